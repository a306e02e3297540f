"""Which code of samples draws random numbers, in any way it may be written."""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Subset, TensorDataset

from fastloop.evidence.samples.random_draws import DRAWS, draws_random
from tests.evidence.samples.test_dataset import Items


class Noisy(Items):
    def __getitem__(self, index: int) -> float:
        return index + random.random()


class Flip:
    def __call__(self, image: Any) -> Any:
        return image if np.random.rand() < 0.5 else -image


class Steady:
    def __call__(self, image: Any) -> Any:
        return image


def jitter(image: Any) -> Any:
    return image + torch.randn(1)


def test_random_draws_are_found_in_code() -> None:
    from torchvision import transforms

    assert draws_random(Noisy()) == ("Noisy.__getitem__",)
    assert draws_random(Items(transform=Flip())) == ("Flip.__call__",)
    assert draws_random(Items(transform=jitter)) == ("jitter",)
    assert draws_random(Items(transform=lambda image: random.choice(image))) == ("<lambda>",)
    assert draws_random(Items(), jitter) == ("jitter",)
    composed = transforms.Compose([transforms.Resize(8), transforms.RandomCrop(8), transforms.ToTensor()])
    assert draws_random(Items(transform=composed)) == ("RandomCrop",)
    assert draws_random(Subset(Noisy(), [0])) == ("Noisy.__getitem__",)
    still = transforms.Compose([transforms.Resize(8), transforms.CenterCrop(8)])
    assert draws_random(Items(transform=still), torch.utils.data.default_collate) == ()
    assert draws_random(Items(transform=Steady()), TensorDataset(torch.zeros(1))) == ()


class Child(Noisy):
    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index) + 1


class Deep(Items):
    def __getitem__(self, index: int) -> Any:
        return twice_removed(index)


def twice_removed(index: Any) -> Any:
    return jitter(index)


class Series(Items):
    """Words of statistics: a univariate series has one column."""

    def __getitem__(self, index: int) -> int:
        return index if self.is_univariate else -index

    @property
    def is_univariate(self) -> bool:
        return not self.is_multivariate()

    def is_multivariate(self) -> bool:
        return False


class ShuffledOnce(Items):
    def __init__(self) -> None:
        super().__init__()
        self.order = torch.randperm(4)


def test_random_draws_are_found_behind_super_and_helper_functions() -> None:
    assert draws_random(Child()) == ("Child.__getitem__",)
    assert draws_random(Deep()) == ("Deep.__getitem__",)
    assert draws_random(ShuffledOnce()) == ()  # drawn before any sample, in the main process either way


def test_a_univariate_series_is_no_draw() -> None:
    assert draws_random(Series()) == ()
    variates = [name for name in dir(random) if name.endswith("variate")]
    assert len(variates) > 6 and all(map(DRAWS.fullmatch, variates)), "what Python draws"


TABLES = """
import random

class Table:
    def __getitem__(self, index):
        return self.get(index)

    def get(self, index):
        return index

    def sample(self):
        return random.choice([1, 2])

class Augments:
    def __call__(self, image):
        return image * self.choose()

    def choose(self):
        return random.random()

class Base:
    def __getitem__(self, index):
        return self._augment(index) + self.noise

    def _augment(self, index):
        return index + random.random()

    @property
    def noise(self):
        return random.random()


class Looks(Table):
    def __init__(self, op):
        self.op = op

    def __getitem__(self, index):
        return getattr(self, "rows")[index]

    def __call__(self, index):
        return getattr(self, self.op)()


class Draws(Table):
    def __getitem__(self, index):
        return getattr(self, "sample")()
"""


def test_of_an_installed_class_only_what_samples_run_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table has a method ``sample``; a transform draws in a method that its call names."""
    (tmp_path / "tables_of_a_package.py").write_text(TABLES)
    (tmp_path / "tables-1.dist-info").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    import tables_of_a_package as package  # type: ignore[import-not-found]

    class Samples(Items):
        def __getitem__(self, index: int) -> Any:
            return self.table.sample()

    class Extends(package.Base):  # type: ignore[misc]
        def __getitem__(self, index: int) -> Any:
            return super().__getitem__(index)

    assert draws_random(Extends()) == ("Extends._augment",)
    assert draws_random(Items(table=package.Table())) == ()
    assert draws_random(Items(transform=package.Augments())) == ("Augments.choose",)
    assert draws_random(Items(table=package.Looks("rows"))) == (), "getattr, of something else"
    assert draws_random(Items(table=package.Draws())) == ("Draws.sample",)
    assert draws_random(Items(table=package.Looks("sample"))) == ("Looks.sample",)
    assert draws_random(Samples(table=package.Table())) == ("Samples.__getitem__", "Table.sample")
    monkeypatch.delitem(sys.modules, "tables_of_a_package")


DRAWING = [
    lambda x: x + torch.empty(3).normal_(0, 0.1),
    lambda x: x + torch.empty_like(x).uniform_(-1, 1),
    lambda x: x.exponential_(),
    lambda x: torch.nn.functional.dropout(x, 0.2, True),
    lambda x: x * random.getrandbits(1),
    lambda x: x * random.betavariate(1, 1),
    lambda x: x + torch.distributions.Normal(0.0, 0.1).rsample((3,)),
]


@pytest.mark.parametrize("draws", DRAWING)
def test_ways_to_draw(draws: Any) -> None:
    assert draws_random(Items(transform=draws)) == ("<lambda>",)
    assert draws_random(Items(transform=lambda x: x.normal())) == ("<lambda>",) and draws_random(Items()) == ()
    assert draws_random(Items(transform=lambda x: x.normalize())) == ()


def test_a_dropout_layer_of_the_dataset_draws() -> None:
    assert draws_random(Items(transform=torch.nn.Dropout(0.2))) == ("Dropout",)


# -- generators that a function makes from a seed ---------------------------------------------------------------------


class OwnGenerators(Items):
    """Each sample's generators are made from its index."""

    def __getitem__(self, index: int) -> Any:
        rng = np.random.default_rng((self.seed, self.epoch, index))
        crop = random.Random(self.seed * 1000 + int(index))
        noise = torch.randn(3, generator=torch.Generator().manual_seed(index))
        generator = torch.Generator().manual_seed(self.seed + index)
        sample = np.random.RandomState(index).permutation(4)
        return rng.normal(size=3), crop.choice(sample), noise + torch.rand(3, generator=generator), rng.random()


class Again(Items):
    def __getitem__(self, index: int) -> Any:
        rng = np.random.default_rng(index)
        if index:
            rng = self.rng
        return rng.normal()


def draw_outside(index: int) -> Any:
    rng = np.random.default_rng(index)
    return rng.normal() + np.random.normal()


def draw_argument(rng: Any) -> Any:
    crop = random.Random(3)
    return crop.random() + rng.random()


def seed_by_draw(index: int) -> Any:
    rng = np.random.default_rng(np.random.randint(9))
    return rng.normal() + index


def seed_by_stream(stream: Any) -> Any:
    rng = np.random.default_rng(stream.integers(9))
    return rng.normal()


def seed_by_clock(index: int) -> Any:
    rng = random.Random(time.time())
    return rng.random() + index


def seed_by_nothing(index: int) -> Any:
    rng = np.random.default_rng()
    return rng.random() + index


def test_generators_made_from_seeds_are_no_draws() -> None:
    assert draws_random(OwnGenerators(seed=3, epoch=0)) == ()
    own, same = OwnGenerators(seed=3, epoch=0), OwnGenerators(seed=3, epoch=0)
    np.random.seed(1), random.seed(1), torch.manual_seed(1)
    first = own[2]
    np.random.seed(2), random.seed(2), torch.manual_seed(2)
    assert str(first) == str(same[2]), "whatever the global streams are"


@pytest.mark.parametrize(
    "draws", [draw_outside, draw_argument, seed_by_draw, seed_by_stream, seed_by_clock, seed_by_nothing]
)
def test_generators_beside_others_or_from_unknown_seeds_are(draws: Any) -> None:
    assert draws_random(Items(transform=draws)) == (draws.__name__,)
    assert draws_random(Again(rng=np.random.default_rng(0))) == ("Again.__getitem__",)

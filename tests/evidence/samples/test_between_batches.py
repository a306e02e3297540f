"""What looks at, or changes, samplers and datasets while training goes on, read from code and attributes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from random import choice
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, Dataset, RandomSampler, Sampler, TensorDataset, WeightedRandomSampler

from fastloop.evidence.samples.between_batches import find_sampler_hazards, list_draws
from fastloop.evidence.samples.between_epochs import list_changers

DATA = TensorDataset(torch.zeros(8))
LOSSES = {"last": 0.0}


class ByLoss(Sampler):
    """A user's own: holds what a test gives it."""

    def __init__(self, **held: Any) -> None:
        self.__dict__.update(held)

    def __iter__(self) -> Iterator[int]:
        self.order = self._sort()
        return iter(self.order)

    def _sort(self) -> list[int]:
        self.sorted = True
        return list(range(8))

    def __len__(self) -> int:
        return 8


class Hears(ByLoss):
    def update(self, losses: Any) -> None:
        self.losses[:] = losses

    def note(self, loss: float) -> None:
        self.losses.append(loss)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class ReadsModule(ByLoss):
    def _sort(self) -> list[int]:
        return sorted(range(8), key=lambda index: LOSSES["last"])


class Feeds(L.Callback):
    """Changes what it was given."""

    def __init__(self, held: Any) -> None:
        self.held = held

    def on_train_batch_end(self, *args: Any) -> None:
        self.held.append(1.0)


class Keeps(L.Callback):
    """Holds it, and does nothing with it while training goes on."""

    def __init__(self, held: Any) -> None:
        self.held = held


class WritesGlobal(L.Callback):
    def on_train_batch_end(self, *args: Any) -> None:
        LOSSES["last"] = 1.0


class DrawsAsItGoes(ByLoss):
    def __iter__(self) -> Iterator[int]:
        for _ in range(8):
            yield int(torch.randint(8, ()))


class ChoosesAsItGoes(ByLoss):
    def __iter__(self) -> Iterator[int]:
        while True:
            yield choice(range(8))


EVERYBODYS = np.random.default_rng(0)


class DrawsFromEverybodys(ByLoss):
    def __iter__(self) -> Iterator[int]:
        for _ in range(8):
            yield int(EVERYBODYS.integers(8))


class DrawsFirst(ByLoss):
    def __iter__(self) -> Iterator[int]:
        buckets = [[1, 2], [3]]
        for bucket in buckets:
            random.shuffle(bucket)
        for start in torch.randperm(8).tolist():
            yield start + 1


class DrawsItsOwn(ByLoss):
    def __iter__(self) -> Iterator[int]:
        own = random.Random(0)
        for _ in range(8):
            yield int(torch.randint(8, (), generator=self.generator)) + own.randint(0, 1)


def test_samplers_that_draw_between_two_indices() -> None:
    assert list_draws(BatchSampler(DrawsAsItGoes(), 2, False)) == ("DrawsAsItGoes.__iter__",)
    assert list_draws(ChoosesAsItGoes()) == ("ChoosesAsItGoes.__iter__",)
    assert list_draws(DrawsFromEverybodys()) == ("DrawsFromEverybodys.__iter__",)
    for sampler in (DrawsFirst(), DrawsItsOwn(), ByLoss(), RandomSampler(DATA), WeightedRandomSampler([0.5], 1)):
        assert list_draws(sampler) == ()


def test_samplers_of_torch_and_plain_ones_of_the_users_look_at_nothing() -> None:
    weighted = WeightedRandomSampler([0.5] * 8, 8)
    for sampler in (RandomSampler(DATA), weighted, BatchSampler(RandomSampler(DATA), 4, False), ByLoss(order=[1])):
        assert find_sampler_hazards(sampler, DATA, [Feeds([]), L.LightningModule()]) == ()
    assert find_sampler_hazards(ReadsModule(), DATA, [Feeds([])]) == ()


@pytest.mark.parametrize(
    ("held", "hazard"),
    [
        ({"model": torch.nn.Linear(1, 1)}, "sampler.model is a part of the training (Linear)"),
        ({"module": L.LightningModule()}, "sampler.module is a part of the training (LightningModule)"),
        ({"weights": torch.zeros(2, requires_grad=True)}, "sampler.weights is a tensor with a gradient"),
        ({"key": lambda index: -index, "labels": torch.zeros(2)}, None),
    ],
)
def test_what_a_sampler_holds_of_the_training(held: Any, hazard: str | None) -> None:
    assert find_sampler_hazards(ByLoss(**held), DATA) == (() if hazard is None else (hazard,))
    inner = BatchSampler(ByLoss(**held), 2, False)
    expected = () if hazard is None else (hazard.replace("sampler.", "sampler.sampler."),)
    assert find_sampler_hazards(inner, DATA) == expected


def test_a_sampler_that_is_told_of_losses() -> None:
    assert find_sampler_hazards(Hears(losses=[0.0]), DATA) == (
        "sampler.losses is changed by its update()",
        "sampler.losses is changed by its note()",
    )


def sample_over(losses: list[float]) -> Any:
    class Enclosed(Sampler[int]):
        def __iter__(self) -> Any:
            return iter(sorted(range(len(losses)), key=losses.__getitem__))

    return Enclosed()


def test_what_a_sampler_shares_with_who_changes_it() -> None:
    losses = [0.0]
    sampler = ByLoss(losses=losses)
    assert find_sampler_hazards(sampler, DATA, [Feeds(losses)]) == ("sampler.losses is held by Feeds (held) too",)
    assert find_sampler_hazards(sampler, DATA, [Feeds(sampler)]) == ("sampler is held by Feeds (held) too",)
    assert find_sampler_hazards(sampler, DATA, [Keeps(losses), Feeds([0.0])]) == ()
    assert find_sampler_hazards(ReadsModule(), DATA, [WritesGlobal()]) == (
        "LOSSES is held by WritesGlobal (LOSSES) too",
    )
    assert find_sampler_hazards(sample_over(losses), DATA, [Feeds(losses)]) == ("losses is held by Feeds (held) too",)


def test_the_dataset_in_a_sampler_is_not_looked_at() -> None:
    class Teaches(Dataset):
        def __init__(self) -> None:
            self.teacher = torch.nn.Linear(1, 1)

        def __len__(self) -> int:
            return 8

    dataset = Teaches()
    assert find_sampler_hazards(RandomSampler(dataset), dataset) == ()


# -- between epochs ---------------------------------------------------------------------------------------------------


class Levels(Dataset):
    def __init__(self) -> None:
        self.level, self.cache = 0, {}

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        self.cache[index] = self._load(index)
        return self.cache[index]

    def _load(self, index: int) -> int:
        self.last = index
        return index


class Curriculum(Levels):
    def harder(self) -> None:
        self.level += 1


class Reaches(L.Callback):
    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        trainer.train_dataloader.dataset.level = trainer.current_epoch


class Makes(L.LightningModule):
    """Makes its data, and no hook of its that runs later names it."""

    def setup(self, stage: str) -> None:
        self.train_dataset = Levels()

    def train_dataloader(self) -> Any:
        return self.train_dataset

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return batch


class Sharpens(Feeds):
    def on_train_epoch_end(self, *args: Any) -> None:
        self.held.level += 1


def test_what_changes_nothing_between_epochs() -> None:
    module = Makes()
    module.setup("fit")
    assert list_changers(module.train_dataset, [module, Feeds([]), L.pytorch.callbacks.ModelCheckpoint()]) == ()
    assert list_changers(DATA, [module]) == ()


def test_what_may_change_a_dataset_between_epochs_is_named() -> None:
    dataset = Levels()
    assert list_changers(Curriculum(), []) == ("dataset.level is changed by its harder()",)
    assert list_changers(dataset, [Reaches()]) == ("Reaches.on_train_epoch_start names train_dataloader",)
    assert list_changers(dataset, [Sharpens(dataset)]) == ("dataset is held by Sharpens (held)",)
    assert list_changers(dataset, [Keeps(dataset)]) == ()

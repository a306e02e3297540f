"""The stand-in for a batch sampler: the same order again, from its middle, and nobody else's draws touched."""

from __future__ import annotations

import io
import random
from itertools import islice
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import DataLoader

from fastloop.feeds.lazy_loader import bound_batches
from fastloop.feeds.place.draws import Draws
from fastloop.feeds.place.kept_order import EpochPlace, KeptOrder
from tests.feeds.place.samplers import DATA, KEPT, CountsItsEpochs, make


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed)


def states() -> tuple[Any, ...]:
    return (
        torch.get_rng_state().tolist(),
        random.getstate(),
        numpy.random.get_state(legacy=False)["state"]["key"].tolist(),
    )


def kept(loader: DataLoader[Any], place: EpochPlace | None = None, ranks: int = 1) -> tuple[KeptOrder, list[str]]:
    places, lines = [place, *[None] * 9], list[str]()
    inner = bound_batches(loader, lambda: len(loader)) or (
        loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    )
    return KeptOrder(inner, Draws(loader, ranks), take=lambda: places.pop(0), warn=lines.append), lines


def read(order: KeptOrder, batches: int) -> EpochPlace:
    """As it comes back from a checkpoint that is loaded as weights only."""
    assert order.order is not None
    file = io.BytesIO()
    place = {"over": False, "batches": batches, "digest": order.digest(batches), "order": order.order}
    torch.save(place, file)
    file.seek(0)
    return torch.load(file, weights_only=True)  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", KEPT)
def test_goes_on_in_the_middle(kind: str) -> None:
    seed_all(1)
    order, lines = kept(make(kind, 7))
    list(order)  # an epoch before
    whole = list(order)
    for behind in (0, 1, len(whole) // 2, len(whole) - 1):
        seed_all(2 + behind)
        resumed, said = kept(make(kind, 8), read(order, behind))
        before = states()
        assert list(resumed) == whole[behind:] and len(resumed) == len(order) and not said
        assert states() == before, "everybody's streams are where they were"
        assert read(resumed, len(whole))["digest"] == order.digest(len(whole))
    assert not lines


@pytest.mark.parametrize("kind", ["generator", "replacement, generator", "own numpy", "own python", "counts"])
def test_what_is_the_samplers_own_moves_on(kind: str) -> None:
    """So that the epochs that follow are those of the uninterrupted run."""
    order, _ = kept(make(kind, 7))
    list(order)
    epoch = list(order)
    place = read(order, 3)
    resumed, _ = kept(make(kind, 8), place)
    assert list(resumed) == epoch[3:] and list(resumed) == list(order)


@pytest.mark.parametrize("kind", ["shuffled", "python", "generator", "buckets"])
def test_streams_that_move_while_it_draws(kind: str) -> None:
    """Training draws between two batches of the resumed epoch: the order is not moved by that, nor the training."""
    seed_all(1)
    order, _ = kept(make(kind, 7))
    whole = list(order)
    seed_all(3)
    expected = [(torch.rand(()).item(), random.random()) for _ in whole[2:]]
    seed_all(3)
    resumed, _ = kept(make(kind, 8), read(order, 2))
    found = [(batch, (torch.rand(()).item(), random.random())) for batch in resumed]
    assert [batch for batch, _ in found] == whole[2:] and [drawn for _, drawn in found] == expected


def test_without_it_the_order_is_another() -> None:
    """The negative control: what a sampler draws with another seed is no part of the epoch before."""
    seed_all(1)
    whole = list(kept(make("shuffled", 7))[0])
    seed_all(2)
    assert list(kept(make("shuffled", 8))[0])[2:] != whole[2:]


@pytest.mark.parametrize("change", ["data", "batch", "sampler"])
def test_another_order_is_told(change: str) -> None:
    seed_all(1)
    order, _ = kept(make("shuffled", 7))
    list(order)
    others = {
        "data": DataLoader(torch.utils.data.Subset(DATA, range(21)), batch_size=4, shuffle=True),
        "batch": DataLoader(DATA, batch_size=3, shuffle=True),
        "sampler": DataLoader(DATA, batch_size=4),
    }
    resumed, lines = kept(others[change], read(order, 2))
    list(resumed)
    assert len(lines) == 1 and lines[0].startswith("the sampler draws a different order than before the checkpoint")


def test_a_shorter_epoch_ends_and_says_so() -> None:
    order, _ = kept(make("in order", 0))
    list(order)
    resumed, lines = kept(DataLoader(DATA, batch_size=11), read(order, 5))
    assert list(resumed) == [] and len(lines) == 1


def test_no_sample_is_drawn_before_it_is_asked_for() -> None:
    """Torch calls ``iter`` twice where there are workers."""
    sampler = CountsItsEpochs(3)
    order, _ = kept(DataLoader(DATA, batch_size=4, sampler=sampler))
    iter(order)
    first = iter(order)
    assert sampler.round == 0 and order.order is None
    next(first)
    assert sampler.round == 1 and order.order is not None


def test_stops_where_the_sampler_does() -> None:
    """A generator of the sampler's own is not asked beyond its end, in a resumed epoch too."""
    order, _ = kept(make("replacement, generator", 7))
    plain = make("replacement, generator", 7)
    epochs = [list(islice(iter(plain.batch_sampler), len(plain))) for _ in range(3)]  # type: ignore[arg-type]
    assert [list(order), list(order)] == epochs[:2]
    resumed, _ = kept(make("replacement, generator", 8), read(order, 4))
    assert list(resumed) == epochs[1][4:] and list(resumed) == epochs[2]


def test_batches_that_nobody_drew_have_no_digest() -> None:
    """A loop that gets a batch twice counts more than were drawn."""
    order, _ = kept(make(KEPT[0], 7))
    count = len(list(order))
    assert order.digest(count) is not None and order.digest(count + 1) is None


def test_looks_like_what_it_stands_in_for() -> None:
    sampler = CountsItsEpochs(3)
    order, _ = kept(DataLoader(DATA, batch_sampler=sampler))  # type: ignore[arg-type]
    order.seed = 11
    assert isinstance(order, CountsItsEpochs) and sampler.seed == 11 and order.round == 0
    with pytest.raises(AttributeError):
        order.nothing  # noqa: B018

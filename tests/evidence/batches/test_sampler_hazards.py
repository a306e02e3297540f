"""What looks at, or changes, samplers while training goes on, read from code and attributes."""

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

from fastloop.evidence.batches.sampler_hazards import find_sampler_hazards, list_draws

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


# -- through functions that both sides call ----------------------------------------------------------------------------

TRACK: dict[str, Any] = {"loss": None}
SETTINGS = {"hardest": 4}
LEVEL = 0.5


class Tracker:
    def __init__(self) -> None:
        self.losses, self.names = [0.0] * 8, ["a"]

    def note(self, loss: float) -> None:
        self.losses[0] = loss
        self.losses.append(loss)


class Wrapper:
    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def note(self, loss: float) -> None:
        self.inner.note(loss)


TRACKER = Tracker()


class Shared:
    temperature = 1.0


def record(loss: float) -> None:
    put(TRACK["loss"], loss)


def put(rows: Any, loss: float) -> None:
    rows[0] = loss


def record_in_object(loss: float) -> None:
    TRACKER.note(loss)


def set_level(loss: float) -> None:
    global LEVEL
    LEVEL = loss


def set_temperature(loss: float) -> None:
    Shared.temperature = loss


def look(loss: float) -> float:
    return loss * SETTINGS["hardest"]


def rank() -> list[int]:
    return sorted(range(8), key=lambda index: TRACK["loss"][index])


def rank_by_object() -> list[int]:
    return sorted(range(8), key=TRACKER.losses.__getitem__)


def rank_by_level() -> list[int]:
    return [int(LEVEL * 2)] * SETTINGS["hardest"]


def rank_by_temperature() -> list[int]:
    return [int(Shared.temperature)]


class Calls(L.LightningModule):
    """Calls a function of its own with each batch."""

    def __init__(self, **held: Any) -> None:
        super().__init__()
        self.__dict__.update(held)


def make_module(function: Any) -> Any:
    class Module(Calls):
        def training_step(self, *args: Any) -> None:
            function(0.5)

    return Module()


def make_callback(function: Any) -> Any:
    class Hook(L.Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            self.note()

        def note(self) -> None:
            function(0.5)

    return Hook()


def make_sampler(function: Any) -> Any:
    class Ranks(Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            yield from function()

    return Ranks()


@pytest.mark.parametrize(
    ("writes", "reads", "why"),
    [
        (record, rank, "TRACK is held by {} (TRACK) too"),
        (record_in_object, rank_by_object, "TRACKER is held by {} (TRACKER) too"),
        (set_level, rank_by_level, "LEVEL is set by {}"),
        (set_temperature, rank_by_temperature, "temperature is set by {}"),
    ],
)
def test_state_that_helpers_write_and_read(writes: Any, reads: Any, why: str) -> None:
    for other, hook in ((make_module(writes), "training_step"), (make_callback(writes), "on_train_batch_end")):
        name = f"{type(other).__name__}"
        expected = why.format(f"{name}.{hook}" if " set " in why else name)
        for sampler in (make_sampler(reads), BatchSampler(make_sampler(reads), 2, False)):
            assert expected in find_sampler_hazards(sampler, DATA, [other])
        assert find_sampler_hazards(make_sampler(lambda: [1, 2]), DATA, [other]) == ()
        assert find_sampler_hazards(make_sampler(reads), DATA, [make_module(look)]) == (), "only settings are read"


class Notes(Calls):
    def training_step(self, *args: Any) -> None:
        self.tracker.note(0.5)


def test_an_object_in_an_object_of_either_side() -> None:
    tracker = Tracker()
    found = find_sampler_hazards(ByLoss(tracker=Wrapper(tracker)), DATA, [Notes(tracker=tracker)])
    assert "sampler.tracker.inner is held by Notes (tracker) too" in found
    held = Notes(tracker=Wrapper(tracker))
    assert find_sampler_hazards(ByLoss(losses=tracker.losses), DATA, [held]) == (
        "sampler.losses is held by Notes (tracker) too",
    )
    assert find_sampler_hazards(ByLoss(names=tracker.names), DATA, [held]) == (), "nobody changes these"
    assert find_sampler_hazards(ByLoss(losses=Tracker().losses), DATA, [held]) == (), "another's"

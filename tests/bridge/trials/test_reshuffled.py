"""Epochs in a ledger, and the one other order that a gate lets pass: that of a shuffle which draws on the same random
numbers as augmentations that are made elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from fastloop.records.experiment import Gate
from tests import models
from tests.twins import judge_ledgers, ledger, shuffled

WORKERS = {"workers": {"count": 1}}


def test_a_row_for_each_epoch(tmp_path: Path) -> None:
    found, _ = ledger(tmp_path / "base", max_epochs=-1, max_steps=7, train=lambda: shuffled(84))
    assert [row[:3] + row[4:] for row in found["epochs"]] == [[3, 84, True, 0], [6, 84, True, 0], [7, 32, False, 0]]
    digests = [row[3] for row in found["epochs"]]
    assert digests[0] == digests[1] != digests[2] and (found["dataset"], found["own_order"]) == (84, None)
    arm, _ = ledger(
        tmp_path / "arm",
        max_epochs=-1,
        max_steps=7,
        train=lambda: shuffled(84, seed=9),
        rungs={"batch": {"micro_batch": 32}, "workers": {"count": 1}},
    )
    assert arm["epochs"][:2] == found["epochs"][:2] and arm["epochs"][2][3] != digests[2]
    assert arm["steps"][0][0] != found["steps"][0][0]


def test_epochs_of_a_part_of_the_data_are_not_complete(tmp_path: Path) -> None:
    for name, rungs in (("base", None), ("arm", {"batch": {"micro_batch": 32}})):
        found, _ = ledger(tmp_path / name, max_epochs=2, limit_train_batches=4, rungs=rungs)
        assert [row[:3] for row in found["epochs"]] == [[1, 32, False], [2, 32, False]], name


def test_whether_the_order_has_random_numbers_of_its_own(tmp_path: Path) -> None:
    def train(own: bool) -> Any:
        generator = torch.Generator().manual_seed(0) if own else None
        return DataLoader(models.pairs(96), batch_size=8, shuffle=True, generator=generator)

    for own in (True, False):
        found, _ = ledger(tmp_path / str(own), train=lambda: train(own))  # noqa: B023
        assert found["own_order"] is own and found["epochs"][0][:3] == [3, 96, True]


# -- another shuffle from the second epoch on -------------------------------------------------------------------------


class Augmented(Dataset[Any]):
    """Pairs with noise of their own, from torch's global random numbers."""

    def __init__(self, samples: int) -> None:
        self.pairs = models.pairs(samples)

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> Any:
        x, y = self.pairs[index]
        return x + 0.01 * torch.rand(x.shape), y


def augmented(samples: int = 96, **settings: Any) -> DataLoader[Any]:
    return DataLoader(Augmented(samples), batch_size=8, shuffle=True, **settings)


class Tampers(Sampler[list[int]]):
    """Batches of a random order, of which the sixth of some epoch is not what it should be."""

    def __init__(self, samples: int, wrong: str, epoch: int, drop_last: bool) -> None:
        self.inner: Any = DataLoader(models.pairs(samples), batch_size=8, shuffle=True, drop_last=drop_last)
        self.wrong, self.at, self.epoch, self.fired = wrong, epoch, 0, 0

    def __len__(self) -> int:
        return len(self.inner)

    def __iter__(self) -> Iterator[list[int]]:
        self.epoch += 1
        first: list[int] = []
        for number, batch in enumerate(self.inner.batch_sampler):
            first = first or batch
            if number == 5 and self.epoch == self.at:
                self.fired += 1
                batch = {"permutes": batch[::-1], "replaces": [first[0], *batch[1:]], "skips": []}[self.wrong]
            if batch:
                yield batch


def compared(
    tmp_path: Path, arm: Any, *, reshuffled: bool = True, base: Any = augmented, epochs: int = 2, **settings: Any
) -> Gate:
    first, _ = ledger(tmp_path / "base", train=base, max_epochs=epochs, max_steps=settings.get("max_steps", -1))
    second, _ = ledger(tmp_path / "arm", train=arm, max_epochs=epochs, **settings)
    return judge_ledgers(first, second, reshuffled=reshuffled)


def test_augmentations_in_workers_leave_another_shuffle(tmp_path: Path) -> None:
    gate = compared(tmp_path / "a", augmented, rungs=WORKERS)
    assert gate.passed and "the first epoch is equal, later ones have the same samples in a different order" in gate.why
    assert gate.detail == {"steps": 6, "reshuffled": True}
    strict = compared(tmp_path / "b", augmented, rungs=WORKERS, reshuffled=False)
    assert strict.passed is False and strict.detail == {"step": 4, "differs": "samples"}


def test_short_last_batches_that_are_dropped(tmp_path: Path) -> None:
    gate = compared(
        tmp_path, lambda: augmented(100, drop_last=True), base=lambda: augmented(100, drop_last=True), rungs=WORKERS
    )
    assert gate.passed and "none of them twice (each side skips" in gate.why, gate


def test_an_epoch_cut_short_has_as_many_samples(tmp_path: Path) -> None:
    gate = compared(tmp_path, augmented, epochs=-1, rungs=WORKERS, max_steps=4)
    assert gate.passed and "the next one, cut short, has as many samples" in gate.why, gate


def test_the_same_once_more_is_equal_throughout(tmp_path: Path) -> None:
    gate = compared(tmp_path, augmented)
    assert gate.passed and gate.why == "6 optimizer steps with the same samples, backwards and learning rates"


@pytest.mark.parametrize("drop_last", [False, True], ids=["whole", "the last dropped"])
@pytest.mark.parametrize(
    ("wrong", "epoch"), [("nothing", 0), ("permutes", 1), ("replaces", 1), ("replaces", 2), ("skips", 2)]
)
def test_what_no_shuffle_does_fails(wrong: str, epoch: int, drop_last: bool, tmp_path: Path) -> None:
    """The arm does without the base's augmentations, which leaves it another shuffle as workers do."""
    sampler = Tampers(100, wrong, epoch, drop_last)
    gate = compared(
        tmp_path,
        lambda: DataLoader(models.pairs(100), batch_sampler=sampler),
        base=lambda: DataLoader(Augmented(100), batch_sampler=Tampers(100, wrong, 0, drop_last)),
    )
    assert sampler.fired == (wrong != "nothing") and gate.passed is (wrong == "nothing"), gate
    if wrong == "nothing":
        assert "in a different order" in gate.why
    elif wrong == "replaces" and epoch == 2:
        assert "epoch 2, which ends with optimizer step" in gate.why and "has different samples" in gate.why
    elif epoch == 1:
        assert gate.detail == {"step": 2, "differs": "samples"}


def test_an_order_with_random_numbers_of_its_own_has_to_stay(tmp_path: Path) -> None:
    def train(workers: int = 0) -> Any:
        return augmented(num_workers=workers, generator=torch.Generator().manual_seed(0))

    gate = compared(tmp_path / "rung", train, base=train, rungs=WORKERS)
    assert gate.passed and "the same samples, backwards" in gate.why
    trap = compared(tmp_path / "trap", lambda: train(1), base=train)
    assert trap.passed is False and trap.detail == {"step": 4, "differs": "samples"}, (
        "torch's own, see test_sample_ledger.py"
    )

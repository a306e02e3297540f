"""What samples change in the objects that they share: each worker would have its own copy, and threads would mix it."""

from __future__ import annotations

import importlib.util
import os
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from fastloop.evidence.samples import sample_code
from fastloop.evidence.samples.dataset import find_worker_hazards
from fastloop.evidence.samples.thread_safety import find_thread_hazards
from tests.evidence.samples.test_thread_safety import Items

TOTAL = {"n": 0}


def check_found(dataset: Any, place: str) -> None:
    """Both workers and threads are refused, for the same reason."""
    expected = f"{place} changes between epochs or samples, and workers hold copies of it"
    assert find_worker_hazards(dataset) == (expected,)
    expected = f"{place} is written while a sample is made, and threads would write it concurrently"
    assert find_thread_hazards(dataset) == (expected,)


# -- another name for it ----------------------------------------------------------------------------------------------


class CountsByAlias(Items):
    def __getitem__(self, index: int) -> Any:
        counts = self.counts
        counts["n"] += 1
        return counts["n"]


class CollectsByAlias(Items):
    def __getitem__(self, index: int) -> Any:
        counts = self.counts
        counts["seen"].append(index)
        return len(counts["seen"])


class CountsGlobalByAlias(Items):
    def __getitem__(self, index: int) -> Any:
        total = TOTAL
        total["n"] += 1
        return total["n"]


class ReadsByAlias(Items):
    """A local name for what a sample reads or copies."""

    def __getitem__(self, index: int) -> Any:
        count = self.count
        count += 1
        label = self.label
        label = dict(label)
        label.update(index=index)
        mask = self.mask
        mask = mask.clone()
        mask[index] += 1
        return count, label, mask


@pytest.mark.parametrize(
    ("dataset", "place"),
    [
        (CountsByAlias(counts={"n": 0}), "dataset.counts"),
        (CollectsByAlias(counts={"seen": []}), "dataset.counts"),
        (CountsGlobalByAlias(), "dataset (the outer TOTAL)"),
    ],
)
def test_a_local_name_for_shared_state_is_followed(dataset: Any, place: str) -> None:
    check_found(dataset, place)


def test_a_local_name_for_a_copy_is_not() -> None:
    dataset = ReadsByAlias(count=0, label={}, mask=torch.zeros(4))
    assert find_worker_hazards(dataset) == () and find_thread_hazards(dataset) == ()


# -- in the methods of other objects ----------------------------------------------------------------------------------


class Counter:
    def __init__(self) -> None:
        self.n = 0

    def tick(self) -> int:
        self.n += 1
        return self.n

    def look_up(self, index: int) -> int:
        return index + self.n


COUNTER = Counter()


class Clock:
    """Gets to the counter by a method of its own."""

    def strike(self) -> int:
        return COUNTER.tick()


class AsksHelper(Items):
    def __getitem__(self, index: int) -> Any:
        return self.helper.tick()


class AsksHelpers(Items):
    def __getitem__(self, index: int) -> Any:
        return [helper.tick() for helper in self.helpers]


class AsksGlobal(Items):
    def __getitem__(self, index: int) -> Any:
        return COUNTER.tick()


class AsksGlobalByHelper(Items):
    def __getitem__(self, index: int) -> Any:
        return self.clock.strike()


class LooksUp(Items):
    """Calls other methods of the same objects, and counts with one of its own."""

    def __getitem__(self, index: int) -> Any:
        counter = self.make()
        return self.helper.look_up(index) + COUNTER.look_up(index) + counter.count(index)

    def make(self) -> Any:
        return [0]


@pytest.mark.parametrize(
    ("dataset", "place"),
    [
        (AsksHelper(helper=Counter()), "dataset.helper.n"),
        (AsksHelpers(helpers=[Counter()]), "dataset.helpers[0].n"),
        (AsksGlobal(), "COUNTER.n"),
        (AsksGlobalByHelper(clock=Clock()), "COUNTER.n"),
    ],
)
def test_what_helpers_count_is_found(dataset: Any, place: str) -> None:
    check_found(dataset, place)


def test_helpers_that_only_look_up_are_fine() -> None:
    dataset = LooksUp(helper=Counter())
    assert find_worker_hazards(dataset) == () and find_thread_hazards(dataset) == ()


def test_workers_do_give_other_samples_with_such_a_helper() -> None:
    """The control: what is refused is a fault."""
    alone, worked = ([int(each) for each in DataLoader(AsksHelper(helper=Counter()), num_workers=n)] for n in (0, 2))
    assert alone == [1, 2, 3, 4] and worked == [1, 1, 2, 2]


# -- by the names of attributes ---------------------------------------------------------------------------------------


class CountsByName(Items):
    def __getitem__(self, index: int) -> Any:
        setattr(self, "n", self.n + 1)  # noqa: B010
        return self.n


class CountsBothByName(Items):
    def __getitem__(self, index: int) -> Any:
        setattr(self, "n", getattr(self, "n", 0) + 1)  # noqa: B010
        return self.n


class CountsByAnyName(Items):
    def __getitem__(self, index: int) -> Any:
        setattr(self, self.key, getattr(self, self.key) + 1)
        return self.n


class SetsByName(Items):
    """A sample that is set, not counted: the same in every worker."""

    def __getitem__(self, index: int) -> Any:
        for name in ("x", "y"):
            setattr(self, name, index * 2)
        setattr(self, "last", getattr(self, "scale", 1) * index)  # noqa: B010
        return self.last


@pytest.mark.parametrize(
    ("dataset", "place"),
    [
        (CountsByName(n=0), "dataset.n"),
        (CountsBothByName(n=0), "dataset.n"),
        (CountsByAnyName(n=0, key="n"), "dataset.<self.key>"),
    ],
)
def test_what_is_counted_by_an_attributes_name_is_found(dataset: Any, place: str) -> None:
    check_found(dataset, place)


def test_what_is_only_set_by_its_name_is_the_same_in_every_worker() -> None:
    assert find_worker_hazards(SetsByName()) == () and find_thread_hazards(SetsByName()) != ()


# -- in place ---------------------------------------------------------------------------------------------------------


class AddsInPlace(Items):
    def __getitem__(self, index: int) -> Any:
        return self.total.add_(1).clone()


class AddsInPlaceByAlias(Items):
    def __getitem__(self, index: int) -> Any:
        total = self.total
        total.mul_(2)
        return total.clone()


class FillsInPlace(Items):
    """A buffer that each sample fills anew, and a tensor of its own."""

    def __getitem__(self, index: int) -> Any:
        self.buffer.zero_()
        self.buffer.copy_(torch.full((4,), float(index)))
        return self.buffer.clone().add_(1)


@pytest.mark.parametrize("kind", [AddsInPlace, AddsInPlaceByAlias])
def test_tensors_that_samples_change_in_place_are_found(kind: Any) -> None:
    check_found(kind(total=torch.zeros(4)), "dataset.total")


def test_a_buffer_that_each_sample_fills_is_the_same_in_every_worker() -> None:
    dataset = FillsInPlace(buffer=torch.zeros(4))
    assert find_worker_hazards(dataset) == () and find_thread_hazards(dataset) != ()


# -- positions in files -----------------------------------------------------------------------------------------------


class Seeks(Items):
    def __getitem__(self, index: int) -> Any:
        os.lseek(self.fd, index, os.SEEK_SET)
        return os.read(self.fd, 1)


class ReadsAt(Items):
    def __getitem__(self, index: int) -> Any:
        return os.pread(self.fd, 1, index)


def test_samples_that_move_the_position_of_a_file_descriptor() -> None:
    (found,), (by_threads,) = find_worker_hazards(Seeks(fd=3)), find_thread_hazards(Seeks(fd=3))
    assert found.startswith("dataset (Seeks.__getitem__) moves the position of a file descriptor")
    assert by_threads == "dataset (Seeks.__getitem__) uses lseek, which is not thread-safe"
    assert find_worker_hazards(ReadsAt(fd=3)) == () and find_thread_hazards(ReadsAt(fd=3)) == ()


# -- in functions that get the object ---------------------------------------------------------------------------------


def bump(counts: Any, by: int = 1) -> None:
    counts["n"] += by


def bump_further(by: int, table: Any) -> None:
    bump(table, by)


def bump_copy(counts: Any) -> Any:
    counts = dict(counts)
    counts["n"] += 1
    return counts


def look_up(counts: Any, index: int) -> int:
    total = 0
    total += counts["n"] + index
    return total


class Bumps(Items):
    def __getitem__(self, index: int) -> Any:
        bump(self.counts)
        return self.counts["n"]


class BumpsByName(Items):
    def __getitem__(self, index: int) -> Any:
        bump_further(1, table=self.counts)
        return self.counts["n"]


class BumpsByMethod(Items):
    def __getitem__(self, index: int) -> Any:
        self.raise_one(self.counts)
        return self.counts["n"]

    def raise_one(self, counts: Any) -> None:
        counts["n"] += 1


class BumpsGlobal(Items):
    def __getitem__(self, index: int) -> Any:
        bump(TOTAL)
        return TOTAL["n"]


class CountsVisits(Items):
    def __getitem__(self, index: int) -> Any:
        TOTAL[index] = TOTAL.get(index, 0) + 1
        return TOTAL[index]


class Wraps(Items):
    """Gives a function what it may write to: a copy, or a sample that another dataset makes anew."""

    def __getitem__(self, index: int) -> Any:
        sample = {"n": look_up(self.counts, index)}
        bump(sample)
        bump(self.others[index])
        return sample, bump_copy(self.counts)


@pytest.mark.parametrize(
    ("dataset", "place"),
    [
        (Bumps(counts={"n": 0}), "dataset.counts"),
        (BumpsByName(counts={"n": 0}), "dataset.counts"),
        (BumpsByMethod(counts={"n": 0}), "dataset.counts"),
        (BumpsGlobal(), "dataset (the outer TOTAL)"),
        (CountsVisits(), "dataset (the outer TOTAL)"),
    ],
)
def test_what_functions_count_in_their_arguments_is_found(dataset: Any, place: str) -> None:
    check_found(dataset, place)


def test_functions_that_only_look_up_or_get_a_copy_are_fine() -> None:
    dataset = Wraps(counts={"n": 0}, others=Items())
    assert find_worker_hazards(dataset) == () and find_thread_hazards(dataset) == ()


# -- in slots ---------------------------------------------------------------------------------------------------------


class Slotted:
    __slots__ = ("__held", "empty")

    def __init__(self, held: Any) -> None:
        self.__held = held

    def ask(self, index: int) -> Any:
        return self.__held, index


class SlottedCounter:
    __slots__ = ("n",)

    def __init__(self) -> None:
        self.n = 0

    def tick(self) -> int:
        self.n += 1
        return self.n


class Asks(Items):
    def __getitem__(self, index: int) -> Any:
        return self.slotted.ask(index)


def test_what_slots_hold_is_looked_at() -> None:
    with socket.socket() as held:
        (found,), (by_threads,) = (
            find(Asks(slotted=Slotted(held))) for find in (find_worker_hazards, find_thread_hazards)
        )
    assert found.startswith("dataset.slotted._Slotted__held (socket) is a connection")
    assert by_threads.startswith("dataset.slotted._Slotted__held (socket) is a connection")
    assert (
        find_worker_hazards(Asks(slotted=Slotted([1]))) == () and find_thread_hazards(Asks(slotted=Slotted([1]))) == ()
    )


def test_counters_in_slots_are_found() -> None:
    check_found(AsksHelper(helper=SlottedCounter()), "dataset.helper.n")
    check_found(AsksHelper(helper=Slotted(SlottedCounter())), "dataset.helper._Slotted__held.n")


# -- around the function ----------------------------------------------------------------------------------------------


def test_the_statement_that_a_lambda_stands_in_is_not_its_own() -> None:
    dataset = Items(read=None)
    dataset.read = lambda index: dataset[index]
    assert find_worker_hazards(dataset) == () and find_thread_hazards(dataset) == ()
    dataset.read = lambda index: dataset.seen.append(index)
    check_found(dataset, "dataset.read (the outer dataset)")


def test_a_counter_in_shared_memory_is_fine_for_workers() -> None:
    class Counted(Items):
        def __init__(self, reads: torch.Tensor) -> None:
            self.reads = reads

        def __getitem__(self, index: int) -> Any:
            self.reads.add_(1)
            return index

    assert find_worker_hazards(Counted(torch.zeros(()).share_memory_())) == ()
    assert len(find_worker_hazards(Counted(torch.zeros(())))) == 1 and find_thread_hazards(Counted(torch.zeros(())))


def test_functions_that_call_each_other_are_read_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Ten functions with four calls each were read a thousand times for each object."""
    lines = list[str]()
    for number in range(10):
        body = "".join(f"    x = f{(number + step) % 10}(x, k)\n" for step in (1, 3, 5, 7))
        lines.append(f"def f{number}(x, k):\n{body}    return x")
    lines.append("class Data:\n    def __getitem__(self, i):\n        return f0(f1(i, self.k), self.k)")
    path = tmp_path / "calling.py"
    path.write_text("\n".join(lines))
    spec = importlib.util.spec_from_file_location("calling", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "calling", module)
    spec.loader.exec_module(module)
    read, original = list[Any](), sample_code._list_outer

    def note(function: Any) -> Any:
        read.append(function)
        return original(function)

    monkeypatch.setattr(sample_code, "_list_outer", note)
    data = module.Data()
    data.k = [1]
    assert find_worker_hazards(data) == ()
    assert 10 < len(read) < 200

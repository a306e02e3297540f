"""A mark of what a dataset holds differs once something has changed it, and only then."""

from __future__ import annotations

import functools
import importlib
import logging
import multiprocessing
import sys
import tracemalloc
import types
import weakref
from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from torch.utils.data import Subset, TensorDataset

from fastloop.evidence.samples.state_mark import StateMark

LEVEL, OPTIONS = 1.0, {"level": 1.0}


class Holds:
    def __init__(self) -> None:
        self.level, self.opts, self.order = 0.0, {"level": 0.0}, list(range(5))
        self.small, self.large = np.zeros(3), np.zeros(200_000)
        self.tensor = torch.zeros(3)

    def __getitem__(self, index: int) -> Any:
        return self.level * LEVEL * OPTIONS["level"] * self.order[index]


def raise_global(_: Any) -> None:
    globals()["LEVEL"] += 1


CHANGES: list[Callable[[Any], Any]] = [
    lambda data: setattr(data, "level", 1.0),
    lambda data: data.opts.update(level=1.0),
    lambda data: data.order.reverse(),
    lambda data: data.order.append(1),
    lambda data: data.small.fill(1),
    lambda data: data.large.fill(1),
    lambda data: data.tensor.add_(1),
    lambda data: setattr(data, "tensor", torch.zeros(3)),
    lambda data: setattr(data, "transform", abs),
    raise_global,
    lambda data: OPTIONS.update(level=OPTIONS["level"] + 1),
]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("wrap", [lambda data: data, lambda data: Subset(data, [0, 1])])
def test_what_changes_is_seen(change: Callable[[Any], Any], wrap: Callable[[Any], Any]) -> None:
    data = Holds()
    root, kept = wrap(data), data.tensor  # its place in memory is not taken again
    mark = StateMark(dataset=root, collate_fn=None)
    assert mark.find_change() is None
    change(data)
    assert mark.find_change() is not None and kept is not None


def test_what_a_run_does_anyway_changes_nothing() -> None:
    data = Holds()
    mark = StateMark(data=data)
    data[3]
    assert mark.find_change() is None
    rows = TensorDataset(torch.zeros(4, 2))
    mark = StateMark(data=rows)
    rows[0]
    assert mark.find_change() is None
    with torch.inference_mode():
        made = [torch.zeros(2)]
    assert StateMark(made=made).find_change() is None


@pytest.mark.parametrize("view", [lambda array: array, np.asarray, lambda array: np.asarray(array)[1:]])
def test_files_are_not_read(view: Callable[[Any], Any], tmp_path: Path) -> None:
    file = np.memmap(tmp_path / "rows", dtype="float32", mode="w+", shape=(4,))
    data = Holds()
    data.small = view(file)
    mark = StateMark(data=data)
    file[2] = 1.0
    assert mark.find_change() is None
    data.small = np.array(data.small)
    mark = StateMark(data=data)
    data.small[-1] = 2.0
    assert mark.find_change() is not None, "the control: a copy in memory"


LOGGER = logging.getLogger(__name__)
HELPERS = types.ModuleType("helpers")
exec(
    "LEVEL = 1.0\ndef get_level():\n    return LEVEL\ndef set_level(value):\n    global LEVEL\n    LEVEL = value",
    vars(HELPERS),
)
CURRENT: ContextVar[float] = ContextVar("CURRENT", default=0.0)


class Registry:
    made: Any = None

    def __init__(self) -> None:
        self.level = 0.0

    @classmethod
    def get(cls) -> Registry:
        cls.made = cls.made or cls()
        return cls.made


@functools.cache
def read_settings() -> Any:
    return types.SimpleNamespace(level=0.0)


def make_pair() -> tuple[Callable[[float], float], Callable[[], None]]:
    level = 1.0

    def scale(value: float) -> float:
        return value * level

    def grow() -> None:
        nonlocal level
        level += 1

    return scale, grow


class Reads:
    """Reads by way of calls, closures and modules, and logs."""

    def __init__(self) -> None:
        self.transform, self.grow = make_pair()

    def __getitem__(self, index: int) -> Any:
        LOGGER.debug("sample %d", index)
        return (
            self.transform(index) * HELPERS.get_level() * CURRENT.get() + Registry.get().level + read_settings().level
        )


@pytest.mark.parametrize(
    "change",
    [
        lambda data: HELPERS.set_level(HELPERS.LEVEL + 1),
        lambda data: CURRENT.set(CURRENT.get() + 1),
        lambda data: setattr(Registry.get(), "level", Registry.get().level + 1),
        lambda data: setattr(read_settings(), "level", read_settings().level + 1),
        lambda data: data.grow(),
    ],
    ids=["module", "context", "class", "cached", "closure"],
)
def test_what_code_reads_elsewhere_is_seen(change: Callable[[Any], Any]) -> None:
    data = Reads()
    data[0]
    mark = StateMark(dataset=data)
    data[1]
    assert not LOGGER.isEnabledFor(logging.DEBUG) and mark.find_change() is None  # a logger remembers that
    change(data)
    assert mark.find_change() is not None


@functools.lru_cache(maxsize=8)
def remember(index: int) -> Any:
    return [index]


class Remembers(Reads):
    def __getitem__(self, index: int) -> Any:
        return remember(index)


def test_one_more_result_in_a_cache_is_no_change() -> None:
    data = Remembers()
    for kept in (remember, read_settings):
        kept.cache_clear()
    data[0]
    mark = StateMark(dataset=data)
    data[1]
    assert mark.find_change() is None and remember.cache_info().currsize == 2


def test_changes_until_a_renewal_are_forgotten_but_not_those_in_large_arrays() -> None:
    data: Any = types.SimpleNamespace(level=0, notes={}, table=np.zeros(100_000))
    mark = StateMark(dataset=data)
    data.level, data.notes["new"] = 1, 2
    assert mark.find_change() is not None
    mark.renew()
    assert mark.find_change() is None
    data.level = 2
    assert mark.find_change() is not None
    mark.renew()
    data.table += 1
    mark.renew()
    assert mark.find_change() == "dataset.table" and mark.is_late


SHARED, COUNTED = multiprocessing.Value("d", 0.0), multiprocessing.RawArray("i", 3)


class ReadsShared:
    """Reads what all processes share, counts in it, and imports a module of the project's when it runs."""

    def __init__(self) -> None:
        self.rows = torch.zeros(3).share_memory_()

    def __getitem__(self, index: int) -> Any:
        import late_settings  # type: ignore[import-not-found]

        COUNTED[index] += 1
        return self.rows[index] + SHARED.value * late_settings.level


@pytest.mark.parametrize("change", ["value", "tensor", "module", "import"])
def test_what_workers_read_ahead_is_seen(change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They see new values in shared memory, but later than a training that loads its batches itself."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "late_settings", raising=False)
    (tmp_path / "late_settings.py").write_text("level = 1.0")
    data = ReadsShared()
    if change == "module":
        data[0]
    mark = StateMark(dataset=data)
    COUNTED[1] += 1
    assert mark.find_change() is None, "samples count there themselves"
    if change == "value":
        SHARED.value += 1
    elif change == "tensor":
        data.rows.add_(1)
    else:
        importlib.import_module("late_settings").level = 2.0  # type: ignore[attr-defined]
    assert mark.find_change() == {"value": "SHARED", "tensor": "dataset.rows"}.get(change, "late_settings")


def test_a_part_of_the_training_is_never_up_to_date_in_workers() -> None:
    data = Holds()
    data.opts["module"] = L.LightningModule()  # type: ignore[assignment]
    assert StateMark(dataset=data).find_change() == "dataset.opts['module'], a part of the training,"


class Lazily:
    """Keeps what a first sample makes."""

    def __init__(self) -> None:
        self.file: Any = None

    @functools.cached_property
    def table(self) -> dict[int, int]:
        return {}

    def __getitem__(self, index: int) -> Any:
        self.file = self.file or [index]
        self.table[index] = index
        return self.file


class Raises(dict):  # type: ignore[type-arg]
    def values(self) -> Any:
        raise RuntimeError("loads a file")

    @property
    def __class__(self) -> Any:
        raise RuntimeError("gone")


def test_what_samples_keep_for_themselves_is_no_change() -> None:
    data = Lazily()
    mark = StateMark(dataset=data)
    data[0]
    data[1]
    assert mark.find_change() is None


@pytest.mark.parametrize(
    "make",
    [
        lambda: Raises(a=1),
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.eye(3).to_sparse_csr(),
        lambda: torch.nn.LazyLinear(3),
        lambda: weakref.proxy(Holds()),
    ],
)
def test_objects_that_cannot_be_read_are_left_out(make: Callable[[], Any]) -> None:
    data = Holds()
    data.opts = make()
    mark = StateMark(dataset=data)
    assert mark.find_change() is None
    data.level = 2.0
    assert mark.find_change() is not None


def test_a_large_array_is_not_copied() -> None:
    data = Holds()
    data.large = np.zeros((400, 500, 600), dtype="uint8").transpose(2, 0, 1)
    tracemalloc.start()
    mark = StateMark(data=data)
    assert mark.find_change() is None
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10e6
    data.large[:] = 1
    assert mark.find_change() is not None


def test_what_torch_changes_of_a_view_is_seen_at_once() -> None:
    bank = torch.zeros(20_000, 64)
    data = Holds()
    data.large = bank.numpy()[::2]
    mark = StateMark(data=data)
    assert mark.find_change() is None
    bank[7, 3] = 1
    assert mark.find_change() == "data.large" and not mark.is_late


@pytest.mark.parametrize("count", [800, 200_000])
def test_what_changes_in_an_array_is_seen_later_where_it_is_large(count: int) -> None:
    """Each look reads other numbers."""
    data = Holds()
    data.large = np.zeros(count)
    mark = StateMark(data=data)
    data.large[100:130] = 1
    looks = [mark.find_change() for _ in range(8)]
    assert "data.large" in looks and mark.is_late is (count == 200_000)
    assert looks[0] is None or count == 800

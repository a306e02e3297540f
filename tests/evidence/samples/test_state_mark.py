"""A mark of what a dataset holds differs once something has changed it, and only then."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Subset, TensorDataset

from fastloop.evidence.samples.state_mark import mark_state

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
    before = mark_state(root, None)
    assert mark_state(root, None) == before
    change(data)
    assert mark_state(root, None) != before and kept is not None


def test_what_a_run_does_anyway_changes_nothing() -> None:
    data = Holds()
    before = mark_state(data)
    data[3]
    assert mark_state(data) == before
    rows = TensorDataset(torch.zeros(4, 2))
    before = mark_state(rows)
    rows[0]
    assert mark_state(rows) == before
    with torch.inference_mode():
        made = [torch.zeros(2)]
    assert mark_state(made) == mark_state(made)


@pytest.mark.parametrize("view", [lambda array: array, np.asarray, lambda array: np.asarray(array)[1:]])
def test_files_are_not_read(view: Callable[[Any], Any], tmp_path: Path) -> None:
    file = np.memmap(tmp_path / "rows", dtype="float32", mode="w+", shape=(4,))
    data = Holds()
    data.small = view(file)
    before = mark_state(data)
    file[2] = 1.0
    assert mark_state(data) == before
    data.small = np.array(data.small)
    before = mark_state(data)
    data.small[-1] = 2.0
    assert mark_state(data) != before, "the control: a copy in memory"

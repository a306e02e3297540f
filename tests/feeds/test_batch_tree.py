"""Walking batches: what is a container, what comes back as what it was."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from typing import Any

import pytest
import torch

from fastloop.feeds.batch_tree import is_container, map_tensors, rebuild, samples, tensors
from tests.feeds.containers import Counted, Pair, Record


class Closed:
    """No container to us."""

    def __init__(self) -> None:
        self.x = torch.zeros(3)


def batches() -> dict[str, Any]:
    x, y = torch.arange(6.0).reshape(3, 2), torch.arange(3)
    return {
        "tensor": x,
        "list": [x, y],
        "tuple": (x, y),
        "dict": {"x": x, "deep": [{"y": y}]},
        "named": Pair(x, y),
        "ordered": OrderedDict(x=x, y=y),
        "mapping": UserDict(x=x, y=y),
        "record": Record(x, "a"),
    }


@pytest.mark.parametrize("kind", batches())
def test_map_tensors_keeps_the_structure(kind: str) -> None:
    batch = batches()[kind]
    doubled = map_tensors(batch, lambda tensor: tensor * 2)
    assert type(doubled) is type(batch)
    for before, after in zip(tensors(batch), tensors(doubled), strict=True):
        assert torch.equal(after, before * 2)
    assert all(not torch.equal(a, b) for a, b in zip(tensors(batch), tensors(doubled), strict=True))


@pytest.mark.parametrize("kind", batches())
def test_samples_is_the_first_dimension(kind: str) -> None:
    assert samples(batches()[kind]) == 3


def test_samples_skips_numbers_and_says_none() -> None:
    assert samples([torch.tensor(1.0), torch.zeros(4, 2)]) == 4
    assert samples(torch.tensor(1.0)) is None
    assert samples({"names": ["a", "b"]}) is None
    assert samples(Closed()) is None


def test_members_that_are_no_tensors_are_handed_through() -> None:
    names, closed = ["a", "b"], Closed()
    out = map_tensors({"names": names, "closed": closed, "none": None, "x": torch.zeros(2)}, lambda tensor: tensor + 1)
    assert out["names"] == names and out["closed"] is closed and out["none"] is None
    assert torch.equal(out["x"], torch.ones(2))


def test_rebuild_says_when_it_cannot() -> None:
    assert is_container(Counted(torch.zeros(1))) and not is_container(Closed()) and not is_container(Counted)
    with pytest.raises(ValueError, match="made"):
        rebuild(Counted(torch.zeros(1)), lambda member: member)

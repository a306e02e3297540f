"""The same samples in other batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fastloop.feeds.batch_tree import CannotRegroup
from fastloop.feeds.regrouping import copy_tensors, regroup
from tests.feeds.containers import Pair


def batch(start: int, size: int) -> tuple[torch.Tensor, dict[str, Any]]:
    ids = torch.arange(start, start + size)
    names = [str(number) for number in ids.tolist()]
    return ids[:, None].float(), {"id": ids, "names": names, "factor": torch.tensor(2)}


def batches(*sizes: int, start: int = 0) -> list[Any]:
    ends = [start + sum(sizes[: n + 1]) for n in range(len(sizes))]
    return [batch(end - size, size) for end, size in zip(ends, sizes, strict=True)]


@pytest.mark.parametrize("theirs", [(4, 4, 4, 4), (16,), (8, 8), (5, 11), (16,)])
@pytest.mark.parametrize("own", [(16,), (4, 4, 4, 4), (6, 6, 4)])
def test_the_samples_of_one_in_the_sizes_of_the_other(own: tuple[int, ...], theirs: tuple[int, ...]) -> None:
    found = regroup(batches(*own, start=100), [copy_tensors(each) for each in batches(*theirs)])
    assert [len(x) for x, _ in found] == list(own)
    assert torch.cat([rest["id"] for _, rest in found]).tolist() == list(range(16))
    assert torch.equal(torch.cat([x for x, _ in found])[:, 0], torch.arange(16.0))
    assert all(rest["factor"] == 2 and isinstance(rest, dict) for _, rest in found)
    assert found[0][1]["names"][0] == "100", "what is no tensor is the arm's own"


def test_only_as_many_batches_as_hold_the_samples() -> None:
    assert len(regroup(batches(4, 4, 4, 4), [copy_tensors(each) for each in batches(4, 4)])) == 2


def test_they_are_copies() -> None:
    own, theirs = batches(4), batches(4, start=50)
    found = regroup(own, [copy_tensors(each) for each in theirs])
    found[0][0].zero_()
    assert theirs[0][0][0, 0] == 50 and own[0][0][1, 0] == 1
    leaf = torch.ones(3)
    copy_tensors([leaf])[0].zero_()
    assert leaf.sum() == 3


@pytest.mark.parametrize(
    ("own", "theirs", "says"),
    [
        (batches(6, 6), batches(4, 4), "8 samples do not fill whole batches of 6/6"),
        (batches(8), [*batches(4), [torch.ones(4)]], "the same number of tensors"),
        ([[torch.ones(8, 2)]], [[torch.ones(4, 2)], [torch.ones(4, 3)]], "such as padded lengths"),
        ([[torch.ones(8), torch.ones(3)]], [[torch.ones(4), torch.ones(3)]] * 2, "shape (3,) in a batch of 4"),
        ([[torch.ones(8), torch.tensor(1)]], [[torch.ones(4), torch.tensor(n)] for n in (1, 2)], "number that differs"),
        ([["text"]], [["text"]], "no tensor"),
    ],
    ids=["sizes", "kinds", "padding", "weights", "scalars", "no tensors"],
)
def test_what_cannot_be_cut_otherwise_is_said(own: list[Any], theirs: list[Any], says: str) -> None:
    with pytest.raises(CannotRegroup) as raised:
        regroup(own, [copy_tensors(each) for each in theirs])
    assert says in str(raised.value)


def test_the_same_sizes_need_no_cutting() -> None:
    theirs = [[torch.ones(4, 2), torch.tensor(n)] for n in (2, 3)]
    found = regroup([[torch.zeros(4, 9), torch.tensor(0)]] * 2, theirs)
    assert [tuple(each[0].shape) for each in found] == [(4, 2), (4, 2)] and [int(each[1]) for each in found] == [2, 3]


def test_bare_tensors_and_containers_of_ones_own() -> None:
    (bare,) = regroup([torch.zeros(4)], [[torch.arange(2)], [torch.arange(2, 4)]])
    assert bare.tolist() == [0, 1, 2, 3]
    pair = regroup([Pair(torch.zeros(4), torch.zeros(4))], [[torch.ones(4), torch.full((4,), 2)]])[0]
    assert isinstance(pair, Pair) and pair[1].sum() == 8


def test_a_container_that_cannot_be_rebuilt() -> None:
    class Stubborn(dict):  # type: ignore[type-arg]
        def __init__(self) -> None:
            super().__init__(x=torch.ones(4))

    with pytest.raises(CannotRegroup, match="a Stubborn cannot be built"):
        regroup([Stubborn()], [[torch.ones(4)]])

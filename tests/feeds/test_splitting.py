"""Cutting batches and putting outputs together again."""

from __future__ import annotations

from collections import UserDict
from typing import Any

import pytest
import torch

from fastloop.feeds.batch_tree import CannotRegroup
from fastloop.feeds.splitting import Piece, average, cut, join
from tests.feeds.containers import Counted, Pair, Record


class Picky(dict):
    def __init__(self, members: Any, key: str) -> None:
        super().__init__(members)


class Closed:
    pass


def x(rows: int = 10) -> torch.Tensor:
    return torch.arange(rows * 2.0).reshape(rows, 2)


def sizes(pieces: list[Piece]) -> list[int]:
    return [piece.samples for piece in pieces]


@pytest.mark.parametrize(
    ("rows", "micro", "expected"),
    [
        (10, 4, [4, 4, 2]),
        (8, 4, [4, 4]),
        (4, 4, [4]),
        (3, 4, [3]),
        (3, 1, [1, 1, 1]),
        (9, 4, [4, 3, 2]),
        (4, 3, [2, 2]),
        (5, 2, [2, 3]),
        (3, 2, [3]),
        (1, 4, [1]),
    ],
)
def test_pieces_cover_the_batch_in_order(rows: int, micro: int, expected: list[int]) -> None:
    pieces = cut(x(rows), micro)
    assert sizes(pieces) == expected
    assert torch.equal(torch.cat([piece.batch for piece in pieces]), x(rows))
    assert [piece.weight for piece in pieces] == pytest.approx([size / rows for size in expected])


def test_a_batch_in_one_piece_is_the_same_object() -> None:
    batch = [x(), x()]
    assert cut(batch, 10)[0].batch is batch


@pytest.mark.parametrize(
    ("batch", "second"),
    [
        ([x(), x()], lambda piece: piece[1]),
        ((x(), x()), lambda piece: piece[1]),
        ({"a": x(), "deep": {"b": [x()]}}, lambda piece: piece["deep"]["b"][0]),
        (Pair(x(), x()), lambda piece: piece.y),
        (Record(x(), "n"), lambda piece: piece.x),
        (UserDict(a=x()), lambda piece: piece["a"]),
    ],
)
def test_containers_are_cut_inside(batch: Any, second: Any) -> None:
    pieces = cut(batch, 4)
    assert all(type(piece.batch) is type(batch) for piece in pieces)
    assert torch.equal(torch.cat([second(piece.batch) for piece in pieces]), x())


def test_what_goes_with_the_samples_is_cut_and_the_rest_is_shared() -> None:
    names, classes = [f"n{number}" for number in range(10)], ["cat", "dog"]
    first, second = cut(
        {
            "x": x(),
            "names": names,
            "ids": tuple(range(10)),
            "classes": classes,
            "scale": 2.0,
            "temperature": torch.tensor(0.5),
            "none": None,
            "split": "train",
        },
        5,
    )
    assert first.batch["names"] + second.batch["names"] == names
    assert second.batch["ids"] == (5, 6, 7, 8, 9)
    for piece in (first, second):
        assert piece.batch["classes"] == classes and piece.batch["scale"] == 2.0 and piece.batch["none"] is None
        assert piece.batch["temperature"] == 0.5 and piece.batch["split"] == "train"


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"x": x(), "pairs": torch.zeros(3, 2)}, r"a tensor of shape \(3, 2\) in a batch of 10 samples"),
        ({"x": x(), "graph": Closed()}, "a Closed cannot be cut into micro-batches"),
        (["a", "b"], "the batch holds no tensor with a first dimension"),
        (torch.tensor(1.0), "the batch holds no tensor with a first dimension"),
        (x(0), "the batch holds no tensor with a first dimension"),
        (Picky({"x": x()}, "k"), "a Picky cannot be rebuilt from its members"),
        (Counted(x()), "a Counted cannot be rebuilt from its members"),
    ],
)
def test_what_cannot_be_cut_says_why(batch: Any, message: str) -> None:
    with pytest.raises(CannotRegroup, match=message):
        cut(batch, 4)


@pytest.mark.parametrize(
    ("window", "micro", "expected"),
    [
        ((8, 8, 8, 8), 16, [(16, 0.5), (16, 0.5)]),
        ((8, 8, 8, 8), 64, [(32, 1.0)]),
        ((8, 8), 16, [(16, 0.5)]),  # half a window weighs half
        ((8, 8, 4), 16, [(16, 0.5), (4, 0.25)]),  # pieces never mix sizes, for their samples weigh differently
        ((8, 8, 8, 4), 10, [(10, 10 / 32), (10, 10 / 32), (4, 4 / 32), (4, 0.25)]),
    ],
)
def test_a_merged_window_weighs_as_accumulation_does(window: tuple[int, ...], micro: int, expected: Any) -> None:
    pieces = cut(x(sum(window)), micro, (window, 4))
    assert sizes(pieces) == [size for size, _ in expected]
    assert [piece.weight for piece in pieces] == pytest.approx([weight for _, weight in expected])
    # The same loss as Lightning's: each batch's mean, divided by the full window.
    rows = x(sum(window))[:, 0]
    lightnings = sum(float(part.mean()) / 4 for part in rows.split(list(window)))
    ours = sum(float(piece.batch[:, 0].mean()) * piece.weight for piece in pieces)
    assert ours == pytest.approx(lightnings)
    if len(set(window)) > 1:  # the control: one mean over the window is another number
        assert float(rows.mean()) * len(window) / 4 != pytest.approx(lightnings)


def test_a_window_of_another_size_is_refused() -> None:
    with pytest.raises(CannotRegroup, match="a merged batch has 10 samples where its window drew 16"):
        cut(x(), 4, ((8, 8), 4))


def test_join_gives_back_what_the_whole_batch_would_have() -> None:
    pieces = cut(x(), 4)
    outputs = [
        {
            "loss": torch.tensor(9.0),
            "rows": piece.batch,
            "mean": piece.batch[:, 0].mean(),
            "names": ["n"] * piece.samples,
            "deep": {"rows": piece.batch},
            "count": (piece.batch[:, 0] > 5).sum(),
            "plain_count": int((piece.batch[:, 0] > 5).sum()),
            "size": len(piece.batch),
            "plain_mean": float(piece.batch[:, 0].mean()),
            "epoch": 3,
            "is_last": True,
            "kind": "k",
        }
        for piece in pieces
    ]
    joined = join(outputs, pieces, torch.tensor(1.0))
    assert joined["loss"] == 1.0
    assert torch.equal(joined["rows"], x()) and torch.equal(joined["deep"]["rows"], x())
    assert joined["mean"] == pytest.approx(float(x()[:, 0].mean()))
    assert float(outputs[-1]["mean"]) != pytest.approx(float(x()[:, 0].mean()))
    assert joined["names"] == ["n"] * 10 and joined["kind"] == "k" and joined["is_last"] is True
    assert joined["plain_mean"] == pytest.approx(float(x()[:, 0].mean()))
    assert joined["count"] == joined["plain_count"] == int((x()[:, 0] > 5).sum()) == 7
    assert joined["size"] == 10 and joined["epoch"] == 3
    assert joined["count"] != outputs[-1]["count"] and joined["size"] != outputs[-1]["size"], "the control"


def test_join_survives_members_that_only_some_pieces_have() -> None:
    pieces = cut(x(), 5)
    outputs = [{"loss": torch.tensor(1.0)}, {"loss": torch.tensor(1.0), "rows": x(5)}]
    assert torch.equal(join(outputs, pieces, torch.tensor(1.0))["rows"], x(5))
    assert join([torch.tensor(1.0), torch.tensor(2.0)], pieces, torch.tensor(1.5)) == 1.5


def test_mean_is_weighted() -> None:
    assert average([1.0, 4.0], [3, 1]) == 1.75


@pytest.mark.parametrize(
    ("window", "micro", "expected", "groups"),
    [
        ((8, 8, 8, 8), 32, [32], [4]),
        ((8, 8, 8, 8), 23, [16, 16], [2, 2]),
        ((8, 8, 8, 8), 24, [24, 8], [3, 1]),
        ((8, 8, 4), 16, [16, 4], [2, 1]),
        ((4, 4, 8), 5, [4, 4, 8], [1, 1, 1]),
        ((1, 1, 1), 2, [2, 1], [2, 1]),
    ],
)
def test_whole_batches_are_not_cut(window: Any, micro: int, expected: list[int], groups: list[int]) -> None:
    pieces = cut(x(sum(window)), micro, (window, 4), whole_batches=True)
    assert sizes(pieces) == expected and [piece.groups for piece in pieces] == groups
    assert sum(piece.weight for piece in pieces) == pytest.approx(len(window) / 4)
    assert {piece.groups for piece in cut(x(sum(window)), micro, (window, 4))} == {1}

"""Batches put together: what comes of it is what cutting gives back, and what cannot be put together says why."""

from __future__ import annotations

import dataclasses
from collections import UserDict
from typing import Any

import pytest
import torch

from fastloop.feeds.batch_tree import CannotRegroup, iterate_tensors
from fastloop.feeds.concatenation import concatenate
from fastloop.feeds.splitting import cut_at
from tests.feeds.containers import Counted, Pair, Record


def x(rows: int = 4, width: int = 2) -> torch.Tensor:
    return torch.arange(float(rows * width)).reshape(rows, width) + 100 * rows


@pytest.mark.parametrize(
    "make",
    [
        x,
        lambda rows: [x(rows), torch.arange(rows)],
        lambda rows: (x(rows), {"deep": [x(rows)]}),
        lambda rows: Pair(x(rows), x(rows)),
        lambda rows: Record(x(rows), "n"),
        lambda rows: UserDict(a=x(rows), b=x(rows)),
        lambda rows: {
            "x": x(rows),
            "names": [f"{rows} {n}" for n in range(rows)],
            "ids": tuple(range(rows)),
            "classes": ["cat", "dog", "cow", "hen", "pig"],
            "scale": 2.0,
            "temperature": torch.tensor(0.5),
            "none": None,
            "split": "train",
        },
    ],
)
def test_cutting_gives_the_batches_back(make: Any) -> None:
    batches = [make(4), make(4), make(3)]
    whole = concatenate(batches)
    assert type(whole) is type(batches[0]) and next(iterate_tensors(whole)).shape[0] == 11
    pieces = cut_at(whole, [4, 4, 3], 4)
    assert [(piece.samples, piece.weight) for piece in pieces] == [(4, 0.25), (4, 0.25), (3, 0.25)]
    for piece, batch in zip(pieces, batches, strict=True):
        assert _plain(piece.batch) == _plain(batch)


def _plain(batch: Any) -> Any:
    """With lists for tensors, to be compared."""
    if isinstance(batch, torch.Tensor):
        return batch.tolist()
    if isinstance(batch, (dict, UserDict)):
        return {key: _plain(value) for key, value in batch.items()}
    if dataclasses.is_dataclass(batch):
        return [_plain(getattr(batch, field.name)) for field in dataclasses.fields(batch)]
    return [_plain(value) for value in batch] if isinstance(batch, (list, tuple)) else batch


def test_one_batch_is_the_same_object() -> None:
    batch = {"anything": object()}
    assert concatenate([batch]) is batch


class Closed:
    pass


@pytest.mark.parametrize(
    ("batches", "why"),
    [
        ([x(4, 2), x(4, 3)], r"batches of several shapes, such as padded lengths: samples of \[2\] and \[3\]"),
        ([[x(), torch.ones(3, 2)]] * 2, r"a tensor of shape \(3, 2\) in a batch of 4 samples"),
        ([[x(), torch.tensor(0.3)], [x(), torch.tensor(0.4)]], "a number that differs between batches"),
        ([{"x": x(), "lam": 0.3}, {"x": x(), "lam": 0.4}], "a float that differs between batches"),
        ([{"x": x(), "lam": 0.3}, {"x": x(), "lam": None}], "a float in one batch and a NoneType in another"),
        ([{"x": x()}, {"x": x(), "y": x()}], "batches with different keys: y"),
        ([[x()], [x(), x()]], "a list of 1 members in one batch, 2 in another"),
        ([x().int(), x()], "tensors of torch.int32 and torch.float32"),
        ([{"x": x(), "graph": Closed()}] * 2, "a Closed cannot be concatenated"),
        ([{"x": x(), "sparse": x().to_sparse()}] * 2, "layout torch.sparse_coo cannot be concatenated"),
        ([[x(), torch.nn.Parameter(x())]] * 2, "tensors of the class Parameter may not concatenate as plain ones do"),
        ([{"x": x(), "names": ["a", "b"]}, {"x": x(), "names": ["a", "c"]}], "a list that differs between batches"),
        ([{"x": x(), "classes": list(range(8))}] * 2, "a list with as many entries as the window has samples"),
        ([["a"], ["b"]], "a batch holds no tensor with a first dimension"),
        ([None, None], "a batch holds no tensor with a first dimension"),
        ([Counted(x())] * 2, "a Counted cannot be rebuilt from its members"),
    ],
)
def test_what_cannot_be_concatenated_says_why(batches: Any, why: str) -> None:
    with pytest.raises(CannotRegroup, match=why):
        concatenate(batches)

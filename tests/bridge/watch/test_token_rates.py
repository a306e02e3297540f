"""Tokens of made-up batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fastloop.bridge.watch import token_rates
from fastloop.bridge.watch.token_rates import Tokens

pytestmark = pytest.mark.short


def ids(samples: int, length: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.zeros(samples, length, dtype=dtype)


def mask(samples: int, length: int, real: int) -> torch.Tensor:
    return (torch.arange(length) < real).expand(samples, length).long()


def per_sample(*batches: Any) -> tuple[float | None, float | None]:
    seen = Tokens()
    for batch in batches:
        seen.add(batch)
    return seen.per_sample()


@pytest.mark.parametrize(
    ("batches", "every", "real"),
    [
        ([{"input_ids": ids(4, 10)}], 10, None),
        ([ids(4, 10)], 10, None),
        ([[ids(4, 10), ids(4, 10)]], 10, None),
        ([(ids(4, 10, torch.int32),)], 10, None),
        ([{"input_ids": ids(4, 10), "attention_mask": mask(4, 10, 5)}], 10, 5),
        ([{"input_ids": ids(4, 10), "attention_mask": mask(4, 10, 5).bool()}], 10, 5),
        (
            [
                {"input_ids": ids(1, 10), "attention_mask": mask(1, 10, 10)},
                {"input_ids": ids(3, 30), "attention_mask": mask(3, 30, 10)},
            ],
            25,
            10,
        ),  # by samples, not by batches
        ([{"input_ids": ids(4, 10), "attention_mask": mask(4, 10, 5)}, ids(4, 10)], 10, 5),  # where nobody masks, as if
        ([{"labels": ids(4, 7), "attention_mask": mask(4, 7, 7)}], 7, 7),
        ([{"input_ids": ids(4, 10), "attention_mask": torch.ones(4, 1, 10, 10)}], 10, None),  # another kind of mask
        ([{"input_ids": ids(4, 1)}], 1, None),
    ],
)
def test_tokens_per_sample(batches: list[Any], every: float, real: float | None) -> None:
    assert per_sample(*batches) == (pytest.approx(every), real if real is None else pytest.approx(real))


@pytest.mark.parametrize(
    "batch",
    [
        None,
        [],
        "text",
        {},
        torch.zeros(4, 10),
        [torch.zeros(4, 3, 8, 8), ids(4, 10)],
        ids(4, 10)[0],
        {"input_ids": torch.zeros(4, 10, 5, dtype=torch.int64)},
        (torch.zeros(4, 8), torch.zeros(4)),
        (ids(4, 2), torch.zeros(4)),  # a user and an item
        {"target": ids(4, 1), "continuous": torch.zeros(4, 2), "categorical": ids(4, 3)},  # rows of a table
    ],
    ids=range(11),
)
def test_batches_without_tokens(batch: Any) -> None:
    assert per_sample(batch) == (None, None)


def test_it_keeps_little_and_reads_nothing_until_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_rates, "MOST", 5)
    seen = Tokens()
    given = {"input_ids": ids(2, 10), "attention_mask": mask(2, 10, 4)}
    with monkeypatch.context() as patched:
        for name in ("item", "tolist", "__float__", "__bool__", "__int__"):
            patched.setattr(torch.Tensor, name, lambda *_: pytest.fail("the host waited for the device"))
        for _ in range(8):
            seen.add(given)
    assert len(seen._real) == 5 and seen.per_sample() == (10.0, pytest.approx(4.0))

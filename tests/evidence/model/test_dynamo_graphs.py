"""What Dynamo captured since a moment, whatever happened before it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.utils import DEFAULT_COMPILATION_METRICS_LIMIT, get_compilation_metrics

from fastloop.evidence.model import dynamo_graphs


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(function: Any, **settings: Any) -> Any:
    return torch.compile(function, backend="eager", **settings)


def test_graphs_are_counted_from_the_moment() -> None:
    compiled(lambda x: x + 1)(torch.ones(2))
    before = dynamo_graphs.count()
    assert dynamo_graphs.count_since(before) == {"graphs": 0, "recompiles": [], "breaks": [], "limit_hit": False}
    compiled(lambda x: x + 2)(torch.ones(2))
    assert dynamo_graphs.count_since(before) == {"graphs": 1, "recompiles": [], "breaks": [], "limit_hit": False}


def test_recompiles_have_one_line_causes() -> None:
    before, double = dynamo_graphs.count(), compiled(lambda x: 2 * x, dynamic=False)
    for size in (2, 3, 3, 4):
        double(torch.ones(size))
    found = dynamo_graphs.count_since(before)
    assert found["graphs"] == 3 and not found["limit_hit"]
    assert found["recompiles"] == [
        "tensor 'x' size mismatch at index 0. expected 2, actual 3",
        "tensor 'x' size mismatch at index 0. expected 3, actual 4",
    ]


def test_the_limit_is_seen() -> None:
    before, double = dynamo_graphs.count(), compiled(lambda x: 2 * x, dynamic=False)
    for size in range(2, 14):
        double(torch.ones(size))
    assert dynamo_graphs.count_since(before)["limit_hit"] is True and dynamo_graphs.count_since(before)["graphs"] == 8
    assert dynamo_graphs.count_since(dynamo_graphs.count())["limit_hit"] is False  # what is over is over


def test_breaks_have_a_reason() -> None:
    def broken(x: torch.Tensor) -> torch.Tensor:
        print("a side effect")
        return x + 1

    before = dynamo_graphs.count()
    compiled(broken)(torch.ones(2))
    assert len(dynamo_graphs.count_since(before)["breaks"]) == 1
    assert "\n" not in dynamo_graphs.count_since(before)["breaks"][0] and dynamo_graphs.count_since(before)["breaks"][0]
    assert dynamo_graphs.count_since(dynamo_graphs.count())["breaks"] == []


def test_causes_are_found_when_the_list_of_compilations_is_full() -> None:
    """Dynamo keeps the latest 64 only: a position in the list says nothing, its last member does."""
    for size in range(DEFAULT_COMPILATION_METRICS_LIMIT + 2):
        compiled(eval(f"lambda x: x + {size}"))(torch.ones(2))  # each with a code object of its own
    assert len(get_compilation_metrics()) == DEFAULT_COMPILATION_METRICS_LIMIT
    before, double = dynamo_graphs.count(), compiled(lambda x: 2 * x, dynamic=False)
    assert dynamo_graphs.count_since(before)["recompiles"] == []
    double(torch.ones(2))
    double(torch.ones(3))
    assert dynamo_graphs.count_since(before)["recompiles"] == [
        "tensor 'x' size mismatch at index 0. expected 2, actual 3"
    ]


@pytest.mark.parametrize(
    ("reason", "is_limit"),
    [
        ("Dynamo recompile limit exceeded", True),
        ("recompile_limit reached", True),
        ("cache_size_limit reached", True),
        ("None", False),
        ("call to print", False),
    ],
)
def test_the_limits_names_in_several_versions(reason: str, is_limit: bool) -> None:
    assert dynamo_graphs._is_limit(reason) is is_limit

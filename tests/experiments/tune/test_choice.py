"""Which values are tried and which is chosen, on made-up curves."""

from __future__ import annotations

import pytest

from fastloop.experiments.tune.choice import (
    are_last_two_slower,
    choose,
    choose_next_value,
    explain,
    list_values,
    pick_promising,
    pick_worth_measuring,
)
from fastloop.records.tuning import Point


@pytest.mark.parametrize(
    ("curve", "tolerance", "chosen"),
    [
        ({0: 100.0, 1: 60.0, 2: 40.0, 4: 30.0}, 0.02, 4),
        ({0: 100.0, 1: 60.0, 2: 40.0, 4: 45.0, 8: 70.0}, 0.02, 2),
        ({0: 100.0, 1: 99.0, 2: 98.5, 4: 99.5}, 0.02, 0),
        ({0: 100.0, 1: 60.0, 2: 50.9, 4: 50.0, 8: 50.5}, 0.02, 2),
        ({64: 50.6, 128: 50.4, 256: 50.0}, 0.01, 128),
        ({8: 1.0}, 0.0, 8),
        ({}, 0.02, None),
    ],
    ids=["falling", "U-shaped", "flat", "flat at its end", "a narrow tolerance", "one", "none"],
)
def test_the_smallest_value_that_is_as_good_as_the_best(
    curve: dict[int, float], tolerance: float, chosen: int | None
) -> None:
    assert choose(curve, tolerance) == chosen
    assert choose(dict(reversed(curve.items())), tolerance) == chosen, "in whatever order they were tried"


@pytest.mark.parametrize(
    ("what", "known", "values"),
    [
        ("workers", {"cpus": 1}, (1,)),
        ("workers", {"cpus": 2}, (1, 2)),
        ("workers", {"cpus": 16}, (1, 2, 4, 8, 16)),
        ("workers", {"cpus": 6}, (1, 2, 4, 6)),
        ("workers", {"cpus": 4, "yours": 12}, (1, 2, 4, 12)),
        ("prefetch", {}, (1, 2, 4)),
        ("prefetch", {"yours": 2}, (1, 2, 4)),
        ("batch", {"micro": 64, "window": 4}, (128, 256)),
        ("batch", {"micro": 8, "window": 6, "yours": 10}, (10, 16, 24, 48)),
        ("batch", {"micro": 64, "window": 1}, ()),
        ("overlap", {}, (10, 25, 50, 100)),
    ],
)
def test_values_to_try(what: str, known: dict[str, int], values: tuple[int, ...]) -> None:
    assert list_values(what, **known) == values  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("tries", "ends"),
    [
        ([100, 60, 40], False),
        ([40, 60], False),
        ([40, 60, 70], True),
        ([40, 60, 39, 50], False),
        ([40, 60, 39, 50, 40.1], False),
        ([40, 60, 39, 50, 41], True),
        ([40, None, 30], False),
        ([40, 30, None, 35], True),
        ([40, None, None], True),
        ([40, 41, 41.1], False),
    ],
)
def test_two_worse_values_in_a_row_end_a_search(tries: list[float | None], ends: bool) -> None:
    assert are_last_two_slower(tries) is ends


def searched(truth: dict[int, float | None], loader_ms: dict[int, float], rest_ms: float) -> list[int]:
    """The values that are trained with, in order."""
    bounds = {value: max(rest_ms, ms) for value, ms in loader_ms.items()}
    tried: dict[int, float | None] = {}
    while (value := choose_next_value(tried, bounds, rest_ms, tuple(truth), 0.02)) is not None:
        assert value not in tried and len(tried) <= len(truth)
        tried[value] = truth[value]
    return list(tried)


@pytest.mark.parametrize(
    ("truth", "loader_ms", "rest_ms", "trained"),
    [
        ({1: 80, 2: 41, 4: 30, 8: 30}, {1: 80, 2: 40, 4: 20}, 30, [4]),
        ({1: 80, 2: 41, 4: 35, 8: 30.1, 16: 30}, {1: 80, 2: 40, 4: 20}, 30, [4, 8]),
        ({1: 33, 2: 32.5, 4: 33}, {1: 31, 2: 30.9, 4: 30}, 20, [4, 2, 1]),
        ({1: 33, 2: 38, 4: 33}, {1: 30.3, 2: 30.2, 4: 30}, 20, [1, 2]),
        ({1: 82, 2: 41, 4: 32, 8: 40}, {1: 80, 2: 40, 4: 21, 8: 10}, 20, [8, 4]),
        ({1: 82, 2: 41, 4: None, 8: 30}, {1: 80, 2: 40, 4: 21, 8: 11}, 20, [8, 4]),
        ({1: 82, 2: 41, 4: 30, 8: None}, {1: 80, 2: 40, 4: 21, 8: 11}, 20, [8, 4]),
        ({1: None, 2: None, 4: None}, {1: 80, 2: 40, 4: 20}, 20, [4, 2]),
    ],
    ids=[
        "as predicted",
        "training needs more than the loader alone",
        "flat: the neighbours tell",
        "worse above",
        "fewer are as good",
        "the neighbour fails",
        "the best fails",
        "all fail",
    ],
)
def test_only_what_can_change_the_choice_is_trained_with(
    truth: dict[int, float | None], loader_ms: dict[int, float], rest_ms: float, trained: list[int]
) -> None:
    assert searched(truth, loader_ms, rest_ms) == trained


@pytest.mark.parametrize(
    ("one_ms", "enough_ms", "asked"),
    [
        (None, 50.0, (1, 2, 4, 8, 16)),
        (800.0, None, (1, 2, 4, 8, 16)),
        (800.0, 100.0, (4, 8, 16)),
        (40.0, 100.0, (1, 2, 4, 8, 16)),
        (1e6, 1.0, (8, 16)),
        (160.0, 100.0, (1, 2, 4, 8, 16)),
    ],
)
def test_counts_far_from_enough_are_not_asked(
    one_ms: float | None, enough_ms: float | None, asked: tuple[int, ...]
) -> None:
    assert pick_worth_measuring((1, 2, 4, 8, 16), one_ms, enough_ms) == asked


@pytest.mark.parametrize(
    ("loader_ms", "rest_ms", "counts"),
    [
        ({4: 90.0, 8: 69.0, 16: 40.0}, 100.0, (8,)),
        ({4: 90.0, 8: 71.0, 16: 70.1}, 100.0, (8, 16)),
        ({4: 60.0, 8: 40.0, 16: 50.0}, 30.0, (8, 16)),
        ({4: 60.0}, 30.0, (4,)),
        ({4: 9.0, 8: 5.0, 16: 6.0}, None, (8, 16)),
        ({4: 90.0, 8: 70.0}, 100.0, (8,)),
    ],
)
def test_headroom_needs_no_training(
    loader_ms: dict[int, float], rest_ms: float | None, counts: tuple[int, ...]
) -> None:
    assert pick_promising(loader_ms, rest_ms) == counts


def said(points: list[Point], best: int | None, yours: int | None = None, what: str = "workers", base: int = 0) -> str:
    return explain(what, points, base, best, yours, {}, None)


def test_what_is_said_claims_no_speed_up() -> None:
    points = [Point(value=0, step_ms=45.0), Point(value=4, step_ms=12.0)]
    found = said(points, 4)
    assert found == (
        "4 is the smallest value within 2 % of the fastest: 12 ms a step, 45 ms without workers;"
        " a search proves no speed-up: confirm it with fastloop ab"
    )
    alone = explain("workers", points, 0, 4, None, {1: 44.0, 4: 9.0}, 11.0)
    assert (
        "; alone, its loader takes 44 with 1, 9 with 4, and the rest of the step 11 ms; a search proves no speed-up"
        in alone
    )


def test_what_was_trained_on_replayed_batches_says_so() -> None:
    points = [Point(value=8, step_ms=45.0), Point(value=64, step_ms=40.0)]
    assert "ms without batch; measured on replayed batches, " in said(points, 64, what="batch", base=8)
    assert "measured on replayed batches" in said(
        points[:1] + [Point(value=64, step_ms=50.0)], None, what="batch", base=8
    )
    assert "replayed" not in said([Point(value=0, step_ms=45.0), points[1]], 64, what="prefetch")


def test_the_users_word_stands() -> None:
    points = [Point(value=0, step_ms=45.0), Point(value=3, step_ms=15.0), Point(value=4, step_ms=12.0)]
    assert "your value 3 stays in effect until you apply the patch" in said(points, 4, yours=3)
    assert "your value" not in said(points, 4, yours=4)
    assert said(points[:2], None, yours=3).endswith("your value 3 stays in effect")


def test_no_best_value_has_its_reason() -> None:
    base, failed = Point(value=0, step_ms=45.0), Point(value=1, ok=False, why="out of memory")
    assert said([Point(value=0, ok=False, why="no luck")], None) == "the unchanged training failed: no luck"
    none = (
        "no value could be measured: out of memory; keep 0, or free the device: nvidia-smi lists what holds its memory"
    )
    assert said([base, failed], None) == f"{none}, and tune again"
    alone = said([Point(value=0, ok=False, why="out of memory")], None)
    assert alone.startswith("the unchanged training failed: out of memory; train with smaller micro-batches")
    assert said([Point(value=4, step_ms=45.0)], None, what="batch", base=4).endswith("there is nothing to merge")
    flat = said([base, Point(value=1, step_ms=44.9)], None)
    assert flat.startswith("no value is more than 2 % faster than the training without workers: 44.9 ms a step with 1")
    assert "its window was too short" in said([base, Point(value=1, step_ms=9.0, why="window too short")], 1)

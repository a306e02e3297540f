"""Arithmetic on stretches of time, against counting microsecond by microsecond."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from fastloop.evidence.trace.intervals import Cover, Span, intersect, merge_spans, subtract, sum_lengths


def points(spans: list[Span]) -> set[int]:
    return {point for begin, end in spans for point in range(int(begin), int(end))}


def made(generator: random.Random) -> list[Span]:
    begins = [generator.randrange(60) for _ in range(generator.randrange(8))]
    return [(float(begin), float(begin + generator.randrange(-2, 15))) for begin in begins]


@pytest.mark.parametrize("seed", range(60))
def test_like_sets_of_points(seed: int) -> None:
    generator = random.Random(seed)
    raw = made(generator), made(generator)
    first, second = merge_spans(raw[0]), merge_spans(raw[1])
    assert points(first) == points(raw[0])
    assert all(a[1] < b[0] for a, b in pairwise(first)), "disjoint, sorted, and not touching"
    assert points(intersect(first, second)) == points(first) & points(second)
    assert points(subtract(first, second)) == points(first) - points(second)
    assert sum_lengths(first) == len(points(first))
    cover = Cover(first)
    for begin in range(-1, 70, 3):
        assert cover.holds(begin) == (begin in points(first))
        assert cover.within(begin, begin + 7) == len(points(first) & set(range(begin, begin + 7)))


def test_nothing_is_no_time() -> None:
    assert merge_spans([(3.0, 3.0), (5.0, 4.0)]) == [] == intersect([], [(0.0, 1.0)])
    assert Cover([]).within(0, 10) == 0.0 == Cover([(0.0, 9.0)]).within(5, 2)

"""Counts, shares and warnings on the way through a store."""

from __future__ import annotations

import hashlib
import warnings
from typing import Any

import pytest

from fastloop.feeds.cache.mapped import StoreFull
from fastloop.feeds.cache.sample_cache import SampleCache
from fastloop.feeds.cache.server import ServerAway
from tests.feeds.cache.pictures import Memory


def key(number: int) -> bytes:
    return hashlib.blake2b(bytes([number % 256, number // 256]), digest_size=16).digest()


def epoch(cache: SampleCache, count: int = 200) -> list[Any]:
    return [cache.fetch(key(number), lambda number=number: [number]) for number in range(count)]


def test_hits_and_misses_add_up() -> None:
    """K7: a first epoch that is interrupted is not lost."""
    cache = SampleCache(Memory(), 1.0)
    epoch(cache, 70)
    assert epoch(cache) == epoch(cache) == [[number] for number in range(200)]
    found = cache.evidence()
    assert (found["hits"], found["misses"], found["not_kept"], found["kept_samples"]) == (270, 200, 0, 200)
    assert cache.fetch(None, lambda: "made") == "made" and cache.evidence()["not_kept"] == 1


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9])
def test_a_share_is_always_the_same_samples(share: float) -> None:
    """K8: a store that is smaller than an epoch is not thrashed."""
    store = Memory()
    cache = SampleCache(store, share)
    epoch(cache)
    first = set(store.kept)
    epoch(cache)
    found = cache.evidence()
    assert set(store.kept) == first and found["hits"] == len(first) and found["hits"] + found["misses"] == 400
    assert abs(len(first) / 200 - share) < 0.1
    larger = Memory()
    epoch(SampleCache(larger, min(1.0, share + 0.1)))
    assert first <= set(larger.kept), "a larger share holds the smaller one"


def test_samples_are_the_callers_own() -> None:
    """K3."""
    cache = SampleCache(Memory(), 1.0)
    for _ in range(3):
        (sample,) = epoch(cache, 1)
        assert sample == [0]
        sample.append("changed")


class Refuses(Memory):
    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def put(self, key: bytes, record: bytes) -> bool:
        raise self.error


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (StoreFull(""), "the sample store is full: samples that are not in it are loaded each time"),
        (StoreFull("No space left"), "the sample store is full (No space left): samples that are not in it are loaded"),
        (
            ServerAway("the server at x does not answer (y)"),
            "does not answer (y): samples are loaded each time until it does",
        ),
    ],
)
def test_what_a_store_cannot_do_is_one_line(error: Exception, line: str) -> None:
    cache = SampleCache(Refuses(error), 1.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert epoch(cache, 5) + epoch(cache, 5) == 2 * [[number] for number in range(5)]
    assert len(caught) == 1 and line in str(caught[0].message)
    assert cache.evidence()["misses"] == cache.evidence()["not_kept"] == 10


def test_a_sample_that_cannot_be_kept_is_handed_on(recwarn: pytest.WarningsRecorder) -> None:
    cache = SampleCache(Memory(), 1.0)
    odd = object()
    assert cache.fetch(key(0), lambda: odd) is odd and epoch(cache, 3)[1:] == [[1], [2]]
    assert "samples are not cached if they contain a builtins.object" in str(recwarn.pop().message)
    assert cache.evidence()["not_kept"] == 1


def test_damage_is_counted() -> None:
    store = Memory()
    cache = SampleCache(store, 1.0)
    epoch(cache, 3)
    store.kept[key(1)] = store.kept[key(1)][:-1] + b"?"
    assert epoch(cache, 3) == [[0], [1], [2]]
    found = cache.evidence()
    assert (found["hits"], found["misses"], found["damaged"]) == (2, 4, 1)
    epoch(cache, 3)
    assert cache.evidence()["hits"] == 5, "it was written anew"


def test_what_making_a_sample_raises_is_passed_on() -> None:
    def fails() -> Any:
        raise ValueError("of the user's")

    cache = SampleCache(Memory(), 1.0)
    with pytest.raises(ValueError, match="of the user's"):
        cache.fetch(key(1), fails)
    assert cache.fetch(key(1), lambda: 1) == 1

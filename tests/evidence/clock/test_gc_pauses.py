"""Passes of the garbage collector, as a clock hears of them."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from fastloop.evidence.clock import step_clock as clocks
from fastloop.evidence.clock.gc_pauses import Garbage, _was_requested

pytestmark = pytest.mark.short
collects = getattr(gc, "collect")  # noqa: B009 (so that no function here names it: a pass of the collector's own)


@pytest.fixture
def clock() -> Any:
    return SimpleNamespace(collected_s=0.0)


@pytest.fixture(autouse=True)
def none_of_its_own() -> Iterator[None]:
    """Only the passes of the tests count, and nothing of theirs stays."""
    before = list(gc.callbacks)
    gc.disable()
    yield
    gc.enable()
    assert gc.callbacks == before


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass takes half a second by the clock, which it asks twice."""
    times = iter(range(1, 1000))
    monkeypatch.setattr(clocks, "now", lambda: next(times) / 2)


def test_passes_are_note_pass_between_start_and_stop(clock: Any, slow: None) -> None:
    garbage = Garbage(clock)
    collects()
    garbage.start()
    garbage.start()
    assert len([each for each in gc.callbacks if each == garbage._note_pass]) == 1
    collects()
    collects(0)
    assert garbage.passes == 2 and clock.collected_s == 1.0
    garbage.stop()
    garbage.stop()
    collects()
    assert garbage.passes == 2 and clock.collected_s == 1.0


def test_a_pass_that_was_under_way_when_it_began_does_not_count(clock: Any, slow: None) -> None:
    garbage = Garbage(clock)
    garbage._note_pass("stop", {"generation": 2})
    assert garbage.passes == 0 and clock.collected_s == 0.0


def test_what_somebody_asks_for_stays_with_who_asked(clock: Any, slow: None) -> None:
    garbage = Garbage(clock)
    garbage.start()
    try:
        gc.collect()
        assert garbage.passes == 0 and clock.collected_s == 0.0
        collects()
        assert garbage.passes == 0, "this function asks for it"
        (lambda: collects())()
        assert garbage.passes == 1, "and this one does not"
    finally:
        garbage.stop()


def test_who_asks_for_passes_is_noted_with_their_time(clock: Any, slow: None) -> None:
    garbage, nobody = Garbage(clock, lambda frame: frame and frame.f_code.co_name), Garbage(clock)
    for each in (garbage, nobody):
        each.start()
        try:
            gc.collect()
            (lambda: collects())()
            gc.collect()
        finally:
            each.stop()
    assert garbage.requested_s == {"test_who_asks_for_passes_is_noted_with_their_time": 1.0}
    assert nobody.requested_s == {} and nobody.passes == garbage.passes == 1


def test_real_time_of_a_real_pass(clock: Any) -> None:
    def many() -> Any:
        return [[number] for number in range(200_000)]

    garbage, kept = Garbage(clock), many()
    began = clocks.now()
    garbage.start()
    collects()
    garbage.stop()
    assert len(kept) == 200_000 and 0.0005 < clock.collected_s < clocks.now() - began


def test_a_pass_on_a_thread_with_no_python_of_its_own() -> None:
    """The autograd engine has such threads: no code there asked for it."""
    assert not _was_requested(None)

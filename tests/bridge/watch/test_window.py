"""The stages of a watched fit: what begins and ends when, whatever the fit looks like."""

from __future__ import annotations

import gc
import tracemalloc
from typing import Any

import pytest
import torch
from lightning.pytorch.profilers import PassThroughProfiler

from fastloop.bridge.watch import window as module
from fastloop.bridge.watch.measurement import ACTIONS
from fastloop.bridge.watch.phases import BODY, NOTHING, find_phase
from fastloop.bridge.watch.profiler_proxy import WatchingProfiler
from fastloop.bridge.watch.window import Watch
from fastloop.evidence.clock.one_time import OneTime
from tests.bridge.watch.made_up import CPU, Time, run, settings
from tests.models import Regression, loader, trainer

pytestmark = pytest.mark.short


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    return Time(monkeypatch)


class Look:
    """A probe and an extra that notes which steps it saw."""

    fails = False

    def __init__(self, steps: int = 3) -> None:
        self.steps = steps
        self.log: list[str] = []
        self.watch: Watch | None = None

    def begin(self) -> None:
        assert self.watch is None or not self.watch.marks.in_work
        self.log.append(f"begin {self.watch.clock.total_steps}" if self.watch else "begin")

    def step_ends(self) -> None:
        self.log.append("step")

    def end(self) -> None:
        assert self.watch is None or not self.watch.marks.in_work
        self.log.append(f"end {self.watch.clock.total_steps}" if self.watch else "end")
        if self.fails:
            raise ZeroDivisionError("planted")

    def give_up(self) -> None:
        self.log.append("given up")
        if self.fails:
            raise ZeroDivisionError("planted")


def watching(*extras: Look, probes: dict[int, Look] | None = None, warmup: int = 2, **more: Any) -> Watch:
    made = Watch(CPU, settings(warmup), extras=extras, probes=probes, **{"one_time": OneTime(), **more})
    for look in (*extras, *(probes or {}).values()):
        look.watch = made
    return made


# -- the window -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inside", [False, True], ids=["loop fetches", "training_step fetches"])
def test_the_window_is_what_follows_the_warm_up(time: Time, inside: bool) -> None:
    watch = watching()
    run(watch, time, 2, wait_s=9.0, compute_s=9.0, fetches_inside=inside)
    assert not watch.clock.open and watch.window is None
    run(watch, time, 11, fetches_inside=inside)
    assert watch.clock.open and watch.window is None
    watch.close()
    assert watch.window is not None and watch.window.steps == 10, "the step in which it opened is not a whole one"
    assert watch.window.wall_s == pytest.approx(10 * 0.04) and watch.clock.total_steps == 13
    before = watch.window
    watch.close()
    assert watch.window is before


def test_without_extras_it_lasts_until_the_end(time: Time, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ENOUGH_STEPS", 20)
    watch = watching()
    watch.ends_at = 60
    run(watch, time, 60)
    assert watch.clock.open
    watch.close()
    assert watch.window is not None and watch.window.steps == 57


@pytest.mark.parametrize("batches", [1, 3])
@pytest.mark.parametrize("inside", [False, True], ids=["loop fetches", "training_step fetches"])
def test_extras_follow_it_in_order_before_the_end(time: Time, batches: int, inside: bool) -> None:
    one, two = Look(3), Look(5)
    watch = watching(one, two)
    watch.ends_at = 40
    run(watch, time, 40, batches=batches, fetches_inside=inside)
    watch.close()
    assert one.log == ["begin 31", *["step"] * 3, "end 34"] and two.log == ["begin 34", *["step"] * 5, "end 39"]
    assert watch.window is not None and watch.window.steps == 31 - 2 - 1
    assert watch.window.wall_s == pytest.approx(28 * batches * 0.04), "the extras' steps are not timed"


def test_an_extra_that_the_end_cuts_short_is_ended_once(time: Time) -> None:
    extra, never = Look(30), Look(5)
    watch = watching(extra, never)
    watch.ends_at = 20
    run(watch, time, 20)
    watch.close()
    watch.close()
    assert extra.log.count("end 20") == 1 and extra.log[0].startswith("begin") and never.log == []


@pytest.mark.parametrize(("queued", "ends"), [(0, 22), (5, 53)])
def test_in_an_endless_fit_the_window_ends_when_it_is_long_enough(
    time: Time, monkeypatch: pytest.MonkeyPatch, queued: int, ends: int
) -> None:
    """Ten times what the queues hold must have passed, and as much as they hold before it begins."""
    monkeypatch.setattr(module, "ENOUGH_STEPS", 20)
    extra = Look(4)
    watch = watching(extra)
    watch.clock.queued_batches = queued
    run(watch, time, ends + max(0, queued - 2))
    assert extra.log == []
    run(watch, time, 8)
    assert extra.log[0].startswith("begin") and extra.log[1:5] == ["step"] * 4 and extra.log[-1].startswith("end")


def test_it_ends_after_a_quarter_of_an_hour_once_it_is_long_enough(time: Time) -> None:
    watch = watching()
    watch.clock.queued_batches = 6
    run(watch, time, 30, compute_s=40.0)
    assert watch.clock.open, "1200 s have passed, and not yet 60 batches"
    run(watch, time, 45, compute_s=40.0)
    assert watch.clock.closed and watch.window is not None and watch.window.batches >= 60
    steps = watch.window.steps
    run(watch, time, 10)
    watch.close()
    assert watch.window.steps == steps and watch.clock.total_steps == 85


def test_board_and_queues_are_read_over_the_window(time: Time) -> None:
    class Board:
        calls: list[tuple[str, int]] = []
        steps = 0

        def start(self) -> None:
            self.calls.append(("start", watch.clock.total_steps))

        def note_step(self) -> None:
            self.steps += 1

        def stop(self) -> str:
            self.calls.append(("stop", watch.clock.total_steps))
            return "seen"

    owed = iter((7, 3))
    board = Board()
    watch = watching(Look(2), board=board, owed=lambda: next(owed))
    watch.ends_at = 30
    run(watch, time, 30)
    watch.close()
    assert Board.calls == [("start", 2), ("stop", 27)] and watch.board_seen == "seen" and watch.owed == (7, 3)
    assert board.steps == 25


def test_hooks_are_those_of_the_window(time: Time) -> None:
    watch = watching(Look(5))
    watch.ends_at = 30

    def hook() -> None:
        if watch.clock.closed:
            watch.marks.ranges = Ranges()  # as a trace does: phases are marked again then
        with watch.marks.profile("[Callback]Slow.on_train_batch_end"):
            time.passes(0.5)

    run(watch, time, 30, between=hook)
    watch.close()
    assert watch.window is not None and watch.window.steps < 25, "a trace came after it"
    assert watch.marks.hooks_s["[Callback]Slow.on_train_batch_end"] == pytest.approx(0.5 * watch.window.steps)


@pytest.mark.parametrize("ends", ["as planned", "stopped", "control"])
def test_workers_are_read_at_the_last_step(ends: str, time: Time) -> None:
    """A fit ended at max_steps with a drained queue, which was full again when it was read at the fit's end."""
    now_owed = 0
    watch = watching(owed=lambda: now_owed)
    watch.ends_at = 30 if ends == "as planned" else None
    run(watch, time, 29)
    assert watch.owed == (0, None)
    now_owed = 4
    run(watch, time, 1)
    if ends == "stopped":
        watch.note_end()
    now_owed = 0
    watch.close()
    assert watch.owed == (0, 0 if ends == "control" else 4)


@pytest.mark.parametrize("batches", [1, 3])
@pytest.mark.parametrize("kept", [True, False], ids=["whole steps", "control"])
def test_what_comes_after_the_last_step_is_not_summed(
    kept: bool, batches: int, time: Time, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One epoch ended with a validation, which the report did not time, but whose waits for batches it did."""
    if not kept:
        monkeypatch.setattr(Watch, "_keep_sums_of_whole_steps", lambda self: None)
    watch = watching()
    monkeypatch.setattr(watch.garbage, "start", lambda: None)  # Python's own passes would count

    def end_step(hook_s: float = 0.5, loading_s: float = 0.0) -> None:
        with watch.marks.profile("[Callback]Slow.on_train_batch_end"):
            time.passes(hook_s)
        with watch.marks.profile("[_EvaluationLoop].val_next"):
            time.passes(loading_s)
        watch.garbage.requested_s["train.py:1"] += loading_s
        watch.garbage.passes += loading_s > 0

    run(watch, time, 20, batches=batches, between=end_step)
    end_step(loading_s=0.2)
    run(watch, time, 2, batches=batches, between=end_step)
    end_step(hook_s=9.0, loading_s=4.0)
    watch.note_batch_requested()
    watch.note_batch_received()
    with pytest.raises(KeyboardInterrupt), watch.marks.profile(BODY):
        raise KeyboardInterrupt
    watch.close()
    assert watch.window is not None and watch.window.steps == 19
    hooks_s = watch.marks.hooks_s["[Callback]Slow.on_train_batch_end"]
    sums = (hooks_s, watch.marks.validation_loading_s, watch.garbage.requested_s["train.py:1"], watch.garbage.passes)
    assert (sums == pytest.approx((0.5 * 19 + 0.5, 0.2, 0.2, 1))) is kept
    assert watch.marks.profile("[Callback]Slow.on_train_batch_end") is NOTHING and not watch.marks.in_window


class Ranges:
    def push(self, name: str) -> None: ...

    def pop(self) -> None: ...


# -- probes, later looks ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batches", [1, 3])
@pytest.mark.parametrize("inside", [False, True], ids=["loop fetches", "training_step fetches"])
def test_probes_see_their_step_of_the_warm_up(time: Time, batches: int, inside: bool) -> None:
    one, two, late = Look(), Look(), Look()
    watch = watching(probes={1: one, 2: two, 4: late}, warmup=4)
    run(watch, time, 20, batches=batches, fetches_inside=inside)
    watch.close()
    assert (one.log, two.log, late.log) == (["begin 1", "end 2"], ["begin 2", "end 3"], [])


def test_a_probe_in_the_fits_last_step_is_ended(time: Time) -> None:
    probe = Look()
    watch = watching(probes={1: probe}, warmup=4)
    run(watch, time, 2)
    assert probe.log == ["begin 1"]
    watch.close()
    assert probe.log == ["begin 1", "end 2"] and watch.window is None


def test_a_probe_whose_step_did_not_end_has_no_result(time: Time) -> None:
    """A fit died in the second of two batches: the work of both was divided by the samples of the first."""
    probe = Look()
    watch = watching(probes={1: probe}, warmup=4)
    run(watch, time, 1, batches=2)
    watch.note_batch_requested()
    watch.note_batch_received()
    watch.batch_end(torch.tensor(1.0), [torch.zeros(4, 2)], 4, step_ends=False, batches_per_step=2)
    assert probe.log == ["begin 1"]
    watch.close()
    assert probe.log == ["begin 1", "given up"]


def test_a_probe_waits_for_a_step_without_trials_of_ours(time: Time) -> None:
    """Their work and their synchronizations are none of the step's."""
    ledger, probe, other = OneTime(), Look(), Look()
    watch = watching(probes={1: probe, 2: other}, warmup=6, one_time=ledger)
    tried = {1, 3}

    def try_rungs(_batch: Any = None) -> None:
        if watch.clock.total_steps in tried:
            ledger.add_span("rehearsal", 0.0, 1.0)

    run(watch, time, 1)
    watch.note_batch_requested()
    watch.note_batch_received()
    try_rungs()  # between a step's begin and its work
    watch.begin_probe_again()
    watch.begin_probe_again()
    run(watch, time, 5, between=try_rungs)
    assert probe.log == ["begin 1", "given up", "begin 1", "end 2"]
    assert other.log == ["begin 2", "given up", "begin 3", "end 4"]


class Later:
    def __init__(self) -> None:
        self.log: list[Any] = []

    def reference(self, window: Any, step: int) -> None:
        self.log.append(("reference", window.steps, step))

    def between_steps(self, step: int) -> None:
        self.log.append(step)

    def end(self, step: int) -> None:
        self.log.append(("end", step))


def test_later_looks_come_between_steps_once_the_window_is_over(time: Time, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LONGEST_S", 0.5)
    watch = watching()
    watch.drift_checks = later = Later()
    run(watch, time, 20, batches=2)
    watch.close()
    window = watch.window
    assert window is not None and later.log[0] == ("reference", window.steps, window.steps + 3)
    assert later.log[1:-1] == list(range(window.steps + 4, 20)) and later.log[-1] == ("end", 20)


def test_another_clock_is_told_of_the_batches_too(time: Time) -> None:
    watch = watching()
    run(watch, time, 5)
    watch.close()
    other = type(watch.clock)(CPU, warmup_steps=0, one_time=OneTime())
    watch.marks.clock = other
    run(watch, time, 6)
    window = other.close()
    assert window is not None and window.steps == 5 and watch.clock.total_steps == 11


# -- giving up, and what it costs -------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", ["warm-up", "window", "extra"])
def test_giving_up_leaves_nothing_running(time: Time, stage: str) -> None:
    probe, extra = Look(), Look(5)
    watch = watching(extra, probes={1: probe})
    watch.ends_at = 20
    run(watch, time, {"warm-up": 2, "window": 8, "extra": 16}[stage])
    probe.fails = extra.fails = True
    watch.marks.around_work, watch.marks.ranges, watch.marks.around_forward = Ranges(), Ranges(), lambda: lambda: None
    watch.stop()
    assert watch.marks.around_work is watch.marks.ranges is watch.marks.around_forward is None
    begun = [look for look in (probe, extra) if look.log]
    assert begun and all(look.log[-1].startswith(("end", "given up")) for look in begun)
    assert stage == "window" or begun[-1].log[-1] == "given up"
    log = [list(look.log) for look in (probe, extra)]
    for _ in range(100):  # the profiler stands there still, and nobody asks or gets any more
        with watch.marks.profile(BODY), watch.marks.profile("[Strategy]X.backward"):
            pass
        with watch.marks.profile("[Callback]X.on_train_batch_end"):
            pass
    assert len(watch.clock._marks) == 0 and log == [look.log for look in (probe, extra)]
    watch.stop()
    watch.close()


def test_memory_stays_bounded() -> None:
    watch, loss, batch = Watch(CPU, settings(0), one_time=OneTime()), torch.zeros(()), [torch.zeros(4)]
    names = list(ACTIONS)

    def steps(count: int) -> None:
        for _ in range(count):
            watch.note_batch_requested()
            watch.note_batch_received()
            with watch.marks.profile(BODY):
                for name in names[-4:]:
                    with watch.marks.profile(name):
                        pass
            watch.batch_end(loss, batch, 4, True, 1)

    steps(12_000)  # until everything that is kept is full
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    steps(12_000)
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert after - before < 100_000, "over 8 bytes a step"
    watch.close()
    assert watch.window is not None and watch.window.steps > 20_000 and len(watch.window.step_s) == 10_000


def test_the_cost_is_that_of_the_actions_lightning_makes() -> None:
    names: list[str] = []

    class Notes(PassThroughProfiler):
        def profile(self, action_name: str) -> Any:
            names.append(action_name)
            return super().profile(action_name)

    trainer(profiler=Notes(), max_steps=3).fit(Regression(), loader())
    _, begin, end = (index for index, name in enumerate(names) if name == BODY)
    made = {
        name.replace("Regression", "Module").replace("SingleDeviceStrategy", "Strategy") for name in names[begin:end]
    }
    assert set(ACTIONS) <= made, "an action that Lightning does not make is none of our cost"
    marked = {name for name in made if find_phase(name) is not None}
    assert marked <= set(ACTIONS), "a marked action is missing from what the cost is measured with"


@pytest.mark.parametrize("ends", ["close", "stop", "extra"])
def test_the_garbage_collector_is_listened_to_while_the_window_is_open(time: Time, ends: str) -> None:
    before, watch = list(gc.callbacks), watching(*([Look(2)] if ends == "extra" else []))
    watch.ends_at = 30
    run(watch, time, 2)
    assert gc.callbacks == before, "the warm-up is none of the window"
    run(watch, time, 5)
    assert len(gc.callbacks) == len(before) + 1
    run(watch, time, 22)
    if ends != "extra":
        getattr(watch, ends)()
    assert gc.callbacks == before, "also while the window's extras run"
    watch.close()
    assert gc.callbacks == before


def test_it_issues_no_collective(monkeypatch: pytest.MonkeyPatch, time: Time) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a collective")

    for name in ("all_reduce", "all_gather", "broadcast", "barrier", "all_gather_object", "reduce"):
        monkeypatch.setattr(torch.distributed, name, refuse)
    watch = watching(Look(2))
    watch.ends_at = 20
    run(watch, time, 20)
    watch.close()
    assert watch.window is not None
    assert isinstance(
        WatchingProfiler(
            PassThroughProfiler(), watch.note_batch_requested, watch.note_batch_received, watch.marks.profile
        ),
        PassThroughProfiler,
    )

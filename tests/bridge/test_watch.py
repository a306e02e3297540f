"""The stand-in for the profiler, and the arithmetic from marks to a measurement."""

from __future__ import annotations

import tracemalloc
from typing import Any

import pytest
import torch
from lightning.pytorch.profilers import PassThroughProfiler, SimpleProfiler

from fastloop.bridge.watch import Watch, WatchingProfiler, cost_us
from fastloop.config import WatchSettings
from fastloop.measurement import PARTS

pytestmark = pytest.mark.short

CPU = torch.device("cpu")
NEXT = "[_TrainingEpochLoop].train_dataloader_next"


class Time:
    """A clock that goes on when told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.s = 100.0
        monkeypatch.setattr("fastloop.evidence.clock.now", lambda: self.s)


def run(watch: Watch, time: Time, steps: int, *, wait_s: float, compute_s: float, batches: int = 1) -> None:
    """`steps` optimizer steps of `batches` batches of 4 samples, each after `wait_s`."""
    for _ in range(steps):
        for batch in range(batches):
            watch.ask()
            time.s += wait_s
            watch.got()
            time.s += compute_s
            watch.batch_end(torch.tensor(1.0 / batches), [torch.zeros(4, 2)], batch == batches - 1, batches)


def settings(warmup_steps: int = 2) -> WatchSettings:
    return WatchSettings(warmup_steps=warmup_steps)


@pytest.mark.parametrize("batches", [1, 3])
def test_rates_and_shares_of_a_steady_run(batches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    time = Time(monkeypatch)
    watch = Watch(CPU, settings(), world_size=2, owed=lambda: 0)
    run(watch, time, 2, wait_s=9.0, compute_s=9.0, batches=batches)  # warm-up: must not count
    run(watch, time, 21, wait_s=0.01, compute_s=0.03, batches=batches)  # the last one ends with the training: left out
    seen = watch.finish({"loader": {}})
    assert (seen.steps, seen.total_steps, seen.world_size, seen.global_batch) == (20, 23, 2, 8 * batches)
    assert seen.samples_per_s == pytest.approx(2 * 4 / 0.04)
    assert [seen.step_ms[name] for name in ("mean", "median", "p10", "p90")] == pytest.approx([40.0 * batches] * 4)
    assert seen.parts_ms["data_wait"] == pytest.approx(10.0 * batches) and set(seen.parts_ms) == set(PARTS)
    assert seen.wall_ms == pytest.approx(20 * 40 * batches) and not seen.window_too_short
    assert seen.loss == pytest.approx((1.0,) * 23) and seen.lead_ms is None and seen.peak_gib is None


@pytest.mark.parametrize(("start", "end", "factor"), [(0, 6, 0.7), (6, 0, 1.0), (3, 3, 1.0)])
def test_batches_made_before_the_window_are_not_its_work(
    start: int, end: int, factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    time, owed = Time(monkeypatch), iter((start, end))
    watch = Watch(CPU, settings(), owed=lambda: next(owed))
    run(watch, time, 23, wait_s=0.0, compute_s=0.1)
    assert watch.finish({}).samples_per_s == pytest.approx(factor * 4 / 0.1)


@pytest.mark.parametrize(("queued", "steps", "short"), [(0, 13, False), (0, 12, True), (3, 33, True), (3, 34, False)])
def test_a_window_too_short_for_its_queues_says_so(
    queued: int, steps: int, short: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    time = Time(monkeypatch)
    watch = Watch(CPU, settings(), owed=lambda: 0)
    watch.clock.queued_batches = queued
    run(watch, time, steps, wait_s=0.0, compute_s=0.1)
    assert watch.finish({}).window_too_short == short


def test_without_a_window_nothing_is_invented(monkeypatch: pytest.MonkeyPatch) -> None:
    time = Time(monkeypatch)
    watch = Watch(CPU, settings(20))
    run(watch, time, 20, wait_s=0.1, compute_s=0.1)
    seen = watch.finish({})
    assert (seen.steps, seen.total_steps, seen.samples_per_s, seen.wall_ms) == (0, 20, None, None)
    assert set(seen.step_ms.values()) == {None} == set(seen.parts_ms.values()) and seen.window_too_short
    nothing = Watch(CPU, settings()).finish({})
    assert nothing.total_steps == 0 and nothing.watch_us_per_step is None and nothing.loss == ()


def test_it_issues_no_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a collective")

    for name in ("all_reduce", "all_gather", "broadcast", "barrier", "all_gather_object", "reduce"):
        monkeypatch.setattr(torch.distributed, name, refuse)
    watch = Watch(CPU, settings(0), world_size=8)
    run(watch, Time(monkeypatch), 3, wait_s=0.1, compute_s=0.1)
    assert watch.finish({}).world_size == 8


def test_memory_stays_bounded() -> None:
    watch, loss, batch = Watch(CPU, settings(0)), torch.zeros(()), [torch.zeros(4)]

    def steps(count: int) -> None:
        for _ in range(count):
            watch.ask()
            watch.got()
            watch.batch_end(loss, batch, True, 1)

    steps(12_000)  # until everything that is kept is full
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    steps(12_000)
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert after - before < 100_000, "over 8 bytes a step"
    assert len(watch.finish({}).loss) <= 10_000


def test_its_own_cost_is_measured_in_microseconds() -> None:
    assert 0.1 < cost_us(CPU) < 1000


class Marks:
    def __init__(self) -> None:
        self.made: list[str] = []

    def __call__(self, profiler: Any) -> WatchingProfiler:
        return WatchingProfiler(profiler, lambda: self.made.append("ask"), lambda: self.made.append("got"))


@pytest.mark.parametrize("kind", [PassThroughProfiler, SimpleProfiler])
def test_only_fetches_of_train_batches_are_marked(kind: type) -> None:
    marks = Marks()
    profiler = marks(kind())
    for name in ("run_training_batch", NEXT, "[_EvaluationLoop].val_next"):
        profiler.start(name)
        profiler.stop(name)
        with profiler.profile("[Callback]Other.on_train_batch_end"):
            pass
    assert marks.made == ["ask", "got"]


def test_a_profiler_of_the_user_gets_every_call_and_every_write() -> None:
    inner = SimpleProfiler()
    profiler = Marks()(inner)
    profiler.dirpath, profiler._lightning_module = "there", "module"
    for either in (inner, profiler):
        assert (either.dirpath, either._lightning_module) == ("there", "module")
    with profiler.profile("one"):
        profiler.start("two")
        profiler.stop("two")
    assert set(inner.recorded_durations) == {"one", "two"} and "two" in profiler.summary()
    assert isinstance(profiler, SimpleProfiler) and type(profiler) is WatchingProfiler
    with pytest.raises(AttributeError):
        profiler.not_there  # noqa: B018


def test_the_price_of_a_million_samples_is_of_gpus_only() -> None:
    priced = WatchSettings(usd_per_gpu_hour=3.6)
    assert Watch(torch.device("cuda"), priced, world_size=4)._usd_per_million(500.0) == pytest.approx(2.0)
    assert Watch(CPU, priced)._usd_per_million(500.0) is None
    assert Watch(torch.device("cuda"), settings())._usd_per_million(500.0) is None

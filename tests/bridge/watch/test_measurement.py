"""The arithmetic from what a watch has seen to a measurement."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fastloop.bridge.watch import measurement
from fastloop.bridge.watch.log_marks import LOGGERS, SELF_LOG
from fastloop.bridge.watch.measurement import build_measurement
from fastloop.bridge.watch.window import Watch
from fastloop.evidence.clock.one_time import OneTime
from fastloop.evidence.clock.step_clock import Window
from fastloop.evidence.gpu.sampler import BoardSeen
from fastloop.records.measurement import GPU_READINGS, PARTS, Measurement
from tests.bridge.watch.made_up import CPU, Time, run, settings

pytestmark = pytest.mark.short

CUDA = torch.device("cuda")


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    return Time(monkeypatch)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own cost has a test of its own, and these have a clock that stands still."""
    monkeypatch.setattr(measurement, "measure_cost_us", lambda device: 12.5)


def seen(watch: Watch, **about: Any) -> Measurement:
    watch.close()
    return build_measurement(watch, about, {"loader": {}})


@pytest.mark.parametrize(
    ("exposed", "ranks", "parts"),
    [
        (12.0, 2, (12.0, 18.0)),
        (50.0, 2, (30.0, 0.0)),
        (12.0, 1, (None, 30.0)),
        (None, 2, (None, 30.0)),
    ],
)
def test_the_exchange_is_taken_out_of_the_backward_that_waits_for_it(
    exposed: float | None, ranks: int, parts: tuple[float | None, float], time: Time
) -> None:
    watch = Watch(CPU, settings(), one_time=OneTime())
    for _ in range(20):
        watch.note_batch_requested()
        watch.note_batch_received()
        with watch.marks.profile("run_training_batch"), watch.marks.profile("[Strategy]DDPStrategy.backward"):
            time.s += 0.03
        watch.batch_end(torch.tensor(1.0), [torch.zeros(4, 2)], 4, True, 1)
    found = seen(watch, world_size=ranks, kernels={"comm_exposed_ms": exposed})
    assert (found.parts_ms["comm_exposed"], found.parts_ms["backward"]) == pytest.approx(parts)
    assert sum(filter(None, found.parts_ms.values())) == pytest.approx(30.0)


# -- times and rates --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batches", [1, 3])
def test_rates_and_shares_of_a_steady_run(batches: int, time: Time) -> None:
    watch = Watch(CPU, settings(), owed=lambda: 0, one_time=OneTime())
    run(watch, time, 2, wait_s=9.0, compute_s=9.0, batches=batches)  # warm-up: must not count
    run(watch, time, 21, wait_s=0.01, compute_s=0.03, batches=batches)  # the first one is not a whole one
    found = seen(watch, world_size=2, precision="32-true")
    assert (found.steps, found.total_steps, found.warmup_steps, found.world_size) == (20, 23, 2, 2)
    assert (found.global_batch, found.micro_batch, found.precision, found.device) == (8 * batches, 4, "32-true", "cpu")
    assert found.samples_per_s == pytest.approx(2 * 4 / 0.04)
    assert [found.step_ms[name] for name in ("mean", "median", "p10", "p90")] == pytest.approx([40.0 * batches] * 4)
    assert found.parts_ms["data_wait"] == pytest.approx(10.0 * batches) == found.host_ms["data_wait"]
    assert found.parts_ms["host_other"] == pytest.approx(30.0 * batches)
    assert found.parts_ms["unexplained"] == pytest.approx(0.0, abs=1e-9) and set(found.parts_ms) == set(PARTS)
    assert found.wall_ms == pytest.approx(20 * 40 * batches) and not found.window_too_short
    assert found.loss == pytest.approx((1.0,) * 23) and found.watch_us_per_step == 12.5
    assert found.lead_ms is found.trail_ms is found.peak_gib is found.tflop_per_s is None
    assert found.parts_ms["comm_exposed"] is None, "only a trace tells"
    assert found.parts_ms["validation"] == 0.0 == found.parts_ms["forward"], "it did not occur"


@pytest.mark.parametrize(
    ("start", "end", "factor"), [(0, 6, 0.7), (6, 0, 1.0), (3, 3, 1.0), (None, 6, 1.0), (6, None, 1.0)]
)
def test_batches_made_before_the_window_are_not_its_work(
    start: int | None, end: int | None, factor: float, time: Time
) -> None:
    owed = iter((start, end))
    watch = Watch(CPU, settings(), owed=lambda: next(owed), one_time=OneTime())
    run(watch, time, 23, wait_s=0.0, compute_s=0.1)
    found = seen(watch)
    assert found.samples_per_s == pytest.approx(factor * 4 / 0.1), "20 batches, of which up to 6 were there before"
    assert found.step_ms["mean"] == pytest.approx(100.0), "times are as they were"


@pytest.mark.parametrize(("owed", "error_pct"), [((4, 4), 20.0), ((0, 6), 0.0), ((None, None), 40.0)])
def test_how_much_of_a_rate_may_have_been_begun_before(
    owed: tuple[int | None, int | None], error_pct: float, time: Time
) -> None:
    """Of 20 batches: those that workers were still making, or all that the queues hold where that cannot be read."""
    readings = iter(owed)
    watch = Watch(CPU, settings(), owed=lambda: next(readings), one_time=OneTime())
    watch.clock.queued_batches = 8
    run(watch, time, 29, wait_s=0.0, compute_s=0.1)
    found = seen(watch)
    assert found.queue_error_pct == pytest.approx(error_pct) and found.window_too_short


@pytest.mark.parametrize(("queued", "steps", "short"), [(0, 13, False), (0, 12, True), (3, 33, True), (3, 34, False)])
def test_a_window_too_short_for_its_queues_says_so(queued: int, steps: int, short: bool, time: Time) -> None:
    watch = Watch(CPU, settings(), owed=lambda: 0, one_time=OneTime())
    watch.clock.queued_batches = queued
    run(watch, time, steps, wait_s=0.0, compute_s=0.1)
    assert seen(watch).window_too_short == short


def test_uneven_steps_have_quantiles(time: Time) -> None:
    watch = Watch(CPU, settings(), one_time=OneTime())
    run(watch, time, 3)
    for tens in range(1, 12):
        run(watch, time, 1, wait_s=0.0, compute_s=tens / 100)
    found = seen(watch)
    assert [found.step_ms[name] for name in ("median", "p10", "p90")] == pytest.approx([60.0, 20.0, 100.0])


def test_without_a_window_nothing_is_invented(time: Time) -> None:
    watch = Watch(CPU, settings(20), one_time=OneTime())
    run(watch, time, 20, wait_s=0.1, compute_s=0.1)
    found = seen(watch, flops={"per_sample": 1e9}, world_size=4)
    assert (found.steps, found.total_steps, found.samples_per_s, found.wall_ms) == (0, 20, None, None)
    assert set(found.step_ms.values()) == {None} == set(found.parts_ms.values()) and found.window_too_short
    assert found.tflop_per_s is found.blocked_ms is found.global_batch is None and found.hooks_ms == {}
    assert found.flops == {"per_sample": 1e9} and found.world_size == 4, "what is known all the same"
    nothing = seen(Watch(CPU, settings(), one_time=OneTime()))
    assert nothing.total_steps == 0 and nothing.watch_us_per_step is None and nothing.loss == ()


def test_samples_that_nobody_can_count_are_unknown(time: Time) -> None:
    watch = Watch(CPU, settings(), one_time=OneTime())
    run(watch, time, 20, batch="no tensor in it")
    found = seen(watch, flops={"per_sample": 1e9})
    assert found.steps == 17 and found.step_ms["mean"] == pytest.approx(40.0)
    assert found.samples_per_s is found.global_batch is found.micro_batch is found.tflop_per_s is None
    assert found.tokens_per_s is None


# -- parts that only some steps tell ----------------------------------------------------------------------------------

WINDOW = Window(
    steps=20,
    detailed_steps=5,
    batches=20,
    samples=80,
    wall_s=2.0,
    parts_s={"forward": 0.02, "data_wait": 0.05},
    host_s={"forward": 0.01, "data_wait": 0.06},
    blocked_s=0.004,
    forward_blocked_s=0.003,
    step_s=(0.1,) * 20,
    step_samples=(4,) * 20,
    batch_samples=(4,) * 20,
    lead_s=0.002,
    trail_s=0.003,
)


@pytest.mark.parametrize(("once", "short"), [(0, False), (1, True)])
def test_a_queue_that_filled_up_during_a_compile_asks_for_a_longer_window(once: int, short: bool) -> None:
    made = Watch(CPU, settings(), one_time=OneTime())
    made.clock.queued_batches = 2
    made.window = replace(WINDOW, once_s=(5.0,) * once + (0.0,) * (20 - once), once_total_s=5.0 * once)
    measured = build_measurement(made, {}, {})
    assert measured.window_too_short is short and measured.wall_ms == 2000.0
    assert measured.samples_per_s == pytest.approx(40.0), "the compile is in neither"


def test_costs_in_many_steps_stay_in_the_figures() -> None:
    """Those that may recur: our own trials, half a second here, do not, however many steps they fall into."""
    made, costs = Watch(CPU, settings(), one_time=OneTime()), (0.5,) * 4 + (0.0,) * 15
    made.window = replace(
        WINDOW, once_s=(*costs, 0.5), once_total_s=2.5, recurring_s=(*costs, 0.0), recurring_total_s=2.0
    )
    measured = build_measurement(made, {}, {"compilation": {"count": 4}})
    assert measured.evidence["compilation"] == {"count": 4, "ms_per_step": pytest.approx(100.0)}
    assert measured.wall_ms == pytest.approx(4000.0) and measured.samples_per_s == pytest.approx(20.0)
    assert measured.step_ms["mean"] == pytest.approx(200.0) and measured.step_ms["p90"] == pytest.approx(600.0)
    assert measured.parts_ms["host_other"] == pytest.approx(100.0)


def test_our_own_trials_do_not_recur() -> None:
    made = Watch(CPU, settings(), one_time=OneTime())
    made.window = replace(WINDOW, once_s=(0.5,) * 8 + (0.0,) * 12, once_total_s=4.0, recurring_s=(0.0,) * 20)
    measured = build_measurement(made, {}, {"compilation": {"count": 4}})
    assert measured.evidence["compilation"] == {"count": 4} and measured.wall_ms == pytest.approx(2000.0)


def of_window(
    window: Window,
    device: torch.device = CPU,
    hooks_s: Mapping[str, float] | None = None,
    board: Any = None,
    about: Mapping[str, Any] | None = None,
    **watch: Any,
) -> Measurement:
    """The measurement of a made-up window."""
    made = Watch(CPU, settings(**watch), one_time=OneTime())
    made.device, made.window, made.board_seen = device, window, board
    made.marks.hooks_s.update(hooks_s or {})
    return build_measurement(made, about or {}, {})


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 3 * 2**30)


def test_what_no_part_explains_is_said() -> None:
    found = of_window(WINDOW)
    assert found.parts_ms["unexplained"] == pytest.approx(100 - 20 - 50) and found.parts_ms["backward"] == 0.0
    assert found.host_ms == pytest.approx({"forward": 10.0, "data_wait": 60.0}) and found.blocked_ms == 4.0
    assert (found.lead_ms, found.trail_ms, found.forward_blocked_ms) == (2.0, 3.0, 3.0)


def test_without_a_step_in_detail_its_parts_are_unknown_and_not_zero() -> None:
    found = of_window(replace(WINDOW, detailed_steps=0, parts_s={"data_wait": 0.05}, blocked_s=None))
    unknown = {part for part, ms in found.parts_ms.items() if ms is None}
    assert unknown == {"h2d", "forward", "backward", "optimizer", "comm_exposed", "unexplained"}
    assert found.parts_ms["data_wait"] == 50.0 and found.parts_ms["checkpoint"] == 0.0 and found.blocked_ms is None


@pytest.fixture
def no_real_pass() -> Iterator[None]:
    """Python's own collector rests: the watch would hear it."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_real_pass")
def test_garbage_collection_is_the_loops_and_said_apart(time: Time) -> None:
    watch = Watch(CPU, settings(), one_time=OneTime())
    run(watch, time, 3)
    for step in range(20):
        watch.note_batch_requested()
        if step == 7:  # one pass, while the loop waits for a batch
            watch.garbage._note_pass("start", {"generation": 2})
            time.passes(0.2)
            watch.garbage._note_pass("stop", {"generation": 2})
        time.passes(0.01)
        watch.note_batch_received()
        with watch.marks.profile("run_training_batch"):
            time.passes(0.03)
        watch.batch_end(torch.tensor(1.0), [torch.zeros(4, 2)], 4, True, 1)
    found = seen(watch)
    assert (
        found.steps == 20
        and found.step_ms["mean"] == pytest.approx(50)
        and found.parts_ms["data_wait"] == pytest.approx(10)
    )
    assert found.parts_ms["host_other"] == pytest.approx(40), "30 of the step's work, which nothing marks, and the pass"
    assert found.evidence["garbage_collection"] == {"ms_per_step": pytest.approx(10), "passes": 1}
    assert found.evidence["loader"] == {}
    assert found.evidence["pauses"] == {"ms_per_step": pytest.approx(10), "steps": 1}


def test_without_a_pause_none_is_said() -> None:
    assert "pauses" not in of_window(WINDOW).evidence


def test_hooks_are_per_step_slowest_first_and_by_their_own_names() -> None:
    outside, inside = 20, 5  # steps that were heard: the window's, and those in detail
    found = of_window(
        WINDOW,
        hooks_s={
            "[Callback]Slow.on_train_batch_end": 0.020 * outside,
            "[Callback]Slow.on_before_zero_grad": 0.010 * inside,
            SELF_LOG: 0.008 * inside,
            LOGGERS: 0.007 * outside,
            "[Callback]Fast.on_train_batch_end": 1e-6,
            "[Callback]Saves{'monitor': 'a.b'}.on_train_batch_end": 0.002 * outside,
            "[Callback]Saves{'monitor': 'c.d'}.on_train_batch_end": 0.004 * outside,
            "[LightningModule]Net.on_train_batch_start": 0.001 * inside,
        },
    ).hooks_ms
    assert found == pytest.approx(
        {
            "Slow.on_train_batch_end": 20.0,
            "Slow.on_before_zero_grad": 10.0,
            "self.log": 8.0,
            "loggers": 7.0,
            "Saves.on_train_batch_end": 6.0,
        }
    )
    assert list(found.values()) == sorted(found.values(), reverse=True) and len(found) == measurement.MOST_HOOKS


def test_hooks_inside_a_steps_work_are_as_long_as_in_an_average_step() -> None:
    hooks = {SELF_LOG: 0.05, "[Callback]Slow.on_train_batch_end": 0.20}
    found = of_window(replace(WINDOW, of_detailed=0.5), hooks_s=hooks).hooks_ms
    assert found == pytest.approx({"self.log": 5.0, "Slow.on_train_batch_end": 10.0})


def test_the_window_says_with_which_step_it_began(time: Time) -> None:
    watch = Watch(CPU, settings(warmup_steps=4), one_time=OneTime())
    run(watch, time, 20)
    found = seen(watch)
    assert (found.first_step, found.steps, found.total_steps) == (5, 15, 20)


# -- tokens, work, energy, money --------------------------------------------------------------------------------------


def test_tokens_and_those_that_are_no_padding(time: Time) -> None:
    watch = Watch(CPU, settings(), one_time=OneTime())
    mask = torch.ones(4, 10, dtype=torch.int64)
    mask[:, 5:] = 0
    run(watch, time, 20, batch={"input_ids": torch.zeros(4, 10, dtype=torch.int64), "attention_mask": mask})
    found = seen(watch, world_size=2)
    assert found.samples_per_s == pytest.approx(200.0) and found.tokens_per_s == pytest.approx(2000.0)
    assert found.unpadded_tokens_per_s == pytest.approx(1000.0)


def test_without_a_mask_padding_is_unknown(time: Time) -> None:
    watch = Watch(CPU, settings(), one_time=OneTime())
    run(watch, time, 20, batch=[torch.zeros(4, 10, dtype=torch.int64)])
    found = seen(watch)
    assert found.tokens_per_s == pytest.approx(1000.0) and found.unpadded_tokens_per_s is None


def test_the_price_of_a_million_samples_is_of_gpus_only(gpu: None) -> None:
    about = {"world_size": 4, "device_name": "NVIDIA H200"}
    priced = of_window(WINDOW, CUDA, about=about, usd_per_gpu_hour=3.6)
    assert priced.samples_per_s == pytest.approx(160.0), "40 a GPU"
    assert priced.usd_per_million_samples == pytest.approx(3.6 / 3600 / 40 * 1e6)
    assert of_window(WINDOW, CPU, usd_per_gpu_hour=3.6).usd_per_million_samples is None
    assert of_window(WINDOW, CUDA).usd_per_million_samples is None and priced.peak_gib == 3.0


def test_energy_is_the_boards_and_its_share_of_the_samples(gpu: None) -> None:
    means = {**dict.fromkeys(GPU_READINGS), "watts": 600.0, "nvml_busy_pct": 99.0}
    board = BoardSeen(
        means=means,
        timeline=({"t_s": 1.0, "watts": 600.0},),
        joule=1200.0,
        state=("it was hot",),
        seconds=2.0,
    )
    found = of_window(WINDOW, CUDA, board=board, about={"world_size": 2})
    assert found.joule_per_sample == pytest.approx(600 / 40)
    assert found.gpu == means and found.timeline == board.timeline and found.state == ("it was hot",)
    none = of_window(WINDOW, CUDA, board=replace(board, joule=None))
    assert none.joule_per_sample is None
    assert set(of_window(WINDOW, CUDA).gpu.values()) == {None}


def test_whether_float32_runs_in_tf32_is_read_here(gpu: None) -> None:
    convolutions = torch.backends.cudnn.allow_tf32
    found = of_window(WINDOW, CUDA, about={"device_name": "NVIDIA H200", "precision": "32-true"})
    assert found.peaks["matmul_tf32"] is False and found.peaks["convolution_tf32"] is convolutions
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        assert of_window(WINDOW, CUDA).peaks["matmul_tf32"] is True
    finally:
        torch.set_float32_matmul_precision(before)
    assert of_window(WINDOW, CPU).peaks == {}


def test_rates_measured_here_are_used_and_not_kept() -> None:
    rates = SimpleNamespace(gemm_tflop_per_s=700.0, copy_tb_per_s=4.0)
    found = of_window(WINDOW, CPU, about={"flops": {"per_sample": 1e9}, "rates": rates})
    assert found.mfu["measured_peak"] == pytest.approx(1e9 * 40 / 1e12 / 700) and found.peaks == {}

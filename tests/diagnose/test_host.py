"""What the host does while the device could work."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from fastloop.records.plan import Verdict
from fastloop.report.run.caveats import list_caveats
from tests.diagnose.scenes import cifar10_launches, findings, gpt2_naive, on_cpu, scene, with_trace

ITEM = {"where": "train.py:40", "what": ".item()", "per_step": 1.0, "ms_per_step": 2.0, "instead": "log it detached"}

ANOMALY: dict[str, Any] = {"evidence": {"anomaly_mode": {"is_on": True}}}


def names(seen: Any, enabled: tuple[str, ...] = ()) -> list[str]:
    return [finding.bottleneck for finding in findings(seen, enabled)]


# -- launches ---------------------------------------------------------------------------------------------------------


def test_launches_are_the_idle_time_that_the_counters_see() -> None:
    (finding,) = findings(cifar10_launches())
    assert finding.bottleneck == "launch_bound" and finding.share_pct == pytest.approx(46)
    assert "2.81 of 6.10 ms a step (a kernel ran 54 % of the time, 0.02 ms of work still queued" in finding.why
    assert finding.patch == {"rungs": {"host": {"enabled": True, "step_graph": "auto"}}}
    assert finding.ceiling_gain_pct == pytest.approx(85.2, abs=0.1) and finding.ceiling_is_estimate


def test_without_a_reading_it_is_a_bound_and_says_so() -> None:
    (finding,) = findings(cifar10_launches(gpu={}))
    assert (
        finding.bottleneck == "launch_bound"
        and "at most 6.10 of 6.10" in finding.why
        and "an upper bound" in finding.why
    )
    assert finding.ceiling_gain_pct is None, "nothing can be promised from a bound"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"gpu": {"gr_active_pct": 94.9}}, True),
        ({"gpu": {"gr_active_pct": 95.1}}, False),
        ({"gpu": {"nvml_busy_pct": 53.0}}, True),
        ({"gpu": {"nvml_busy_pct": 99.7}}, False),
        ({"trail": 0.29}, True),
        ({"trail": 0.32}, False),  # 5 % of 6.1 ms
        ({"trail": None, "lead_ms": 0.03}, True),
        ({"trail": None, "lead_ms": 5.0}, False),
        ({"trail": None, "lead_ms": None}, False),
    ],
)
def test_it_takes_an_empty_queue_and_an_idle_device(change: dict[str, Any], named: bool) -> None:
    assert ("launch_bound" in names(cifar10_launches(**change))) is named


@pytest.mark.parametrize(("active", "beside"), [(3.0, True), (20.0, False)])
def test_launches_name_waits_that_are_no_finding(active: float, beside: bool) -> None:
    untimed = {**ITEM, "ms_per_step": None}
    first, *others = findings(cifar10_launches(gpu={"gr_active_pct": active}, syncs=(untimed,)))
    line = "the host also waits for the GPU at train.py:40 .item(), 1 a step"
    assert first.bottleneck == "launch_bound" and (line in first.detail) is beside
    assert ([each.bottleneck for each in others] == ["sync"]) is not beside


@pytest.mark.parametrize(
    ("where", "graphs"),
    [("train.py:40", False), ("lightning/pytorch/callbacks/progress/rich.py:600", True), (None, True)],
)
def test_steps_that_wait_are_not_advised_to_be_replayed(where: str | None, graphs: bool) -> None:
    line = {**ITEM, "where": where, "ms_per_step": None}
    seen = cifar10_launches(gpu={"gr_active_pct": 20.0}, syncs=() if where is None else (line,))
    finding = next(each for each in findings(seen) if each.bottleneck == "launch_bound")
    replay = {"host": {"enabled": True, "step_graph": "auto"}}
    assert finding.patch == {"rungs": replay if graphs else {"fused": {"enabled": True}}}
    assert ("other work of the host after it had waited" in finding.why) is (where is not None)


def test_a_short_batch_of_a_long_step_is_not_an_empty_queue() -> None:
    assert "launch_bound" not in names(gpt2_naive(gpu={}, trail=60.0)), "60 ms are a third of one of its 8 batches"
    assert "launch_bound" in names(gpt2_naive(gpu={}, trail=9.0))


def test_what_another_part_owns_is_not_launches() -> None:
    seen = scene(100.0, callbacks_logging=40.0, trail=0.0, gpu={"gr_active_pct": 58.0})
    assert names(seen) == ["callbacks_logging"], "40 of the 42 idle milliseconds are the callbacks'"


def test_nvml_is_not_trusted_on_a_starved_device() -> None:
    starved = {"data_wait": 170.0, "trail": 0.0}
    assert names(scene(197.5, gpu={"nvml_busy_pct": 4.1}, **starved)) == ["data_wait"]
    assert names(scene(197.5, gpu={"gr_active_pct": 4.1}, **starved)) == ["data_wait", "launch_bound"]


@pytest.mark.parametrize(
    ("change", "enabled", "patch"),
    [
        ({"micro_batch": 32}, (), {"batch": {"enabled": True, "micro_batch": 128}}),
        ({"micro_batch": 4}, (), {"batch": {"enabled": True, "micro_batch": 32}}),
        ({"micro_batch": 32, "world_size": 4}, (), {"fused": {"enabled": True}}),  # no step can be replayed
        ({"micro_batch": None, "precision": "16-mixed"}, (), {"fused": {"enabled": True}}),
        ({"micro_batch": 32}, ("batch",), {"host": {"enabled": True, "step_graph": "auto"}}),
        ({"micro_batch": None}, (), {"host": {"enabled": True, "step_graph": "auto"}}),
        ({}, ("host",), {"fused": {"enabled": True}}),
        ({}, ("host", "fused"), {"compile": {"enabled": True}}),
        ({}, ("compile", "fused", "host"), None),
    ],
)
def test_what_helps_against_launches(change: dict[str, Any], enabled: tuple[str, ...], patch: Any) -> None:
    evidence = {"compile": {"graphs": 3}, "fused": {"fused_groups": 1}, "host": {"replayed_steps": 9}}
    (finding,) = findings(cifar10_launches(evidence=evidence, **change), enabled)
    assert finding.bottleneck == "launch_bound"
    assert finding.patch == (None if patch is None else {"rungs": patch})
    if patch is None:
        assert "reduce-overhead replays CUDA graphs" in finding.why and "amp" not in finding.why


def test_a_rung_that_did_not_take_is_said_to_be_on() -> None:
    enabled = ("compile", "fused", "host")
    verdicts = (Verdict(rung="compile", took=False, why="0 graphs"), Verdict(rung="fused", took=None, why="no step"))
    (finding,) = findings(cifar10_launches(), enabled, verdicts)
    assert "compile is enabled but inactive (0 graphs)" in finding.why
    assert "fused is on, but whether it had an effect is unknown (no step)" in finding.why
    verdicts = tuple(Verdict(rung=rung, took=False, why="a long reason") for rung in enabled)
    (finding,) = findings(cifar10_launches(), enabled, verdicts)
    assert "host, fused and compile are enabled but inactive; " in finding.why and "a long" not in finding.why
    verdicts = tuple(Verdict(rung=rung, took=True, why="x") for rung in enabled)
    (finding,) = findings(cifar10_launches(), enabled, verdicts)
    assert "is on but" not in finding.why and "is on, but" not in finding.why


def test_a_trace_divides_the_idle_time_and_is_scaled_to_the_untraced_step() -> None:
    seen = with_trace(cifar10_launches(), 3.05, {"data": 0.0, "launch": 6.1, "sync": 0.0, "other": 0.0}, {"gemm": 2.0})
    (finding,) = findings(seen)  # traced, the step took 9.15 ms; 3.05 of the real 6.1 are idle
    assert finding.bottleneck == "launch_bound" and finding.share_pct == pytest.approx(50) and "traced" in finding.why
    full = with_trace(cifar10_launches(trail=5.0), 6.1, {"launch": 6.0}, {"gemm": 6.0})
    assert "launch_bound" not in names(full), "only the profiler made it wait"
    skipped = dataclasses.replace(cifar10_launches(), kernels={"skipped": "another profiler"})
    assert findings(skipped) == findings(cifar10_launches())


# -- a step too small, on the CPU -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("step", "loop", "name"),
    [
        (0.4, 0.16, "launch_bound"),
        (4.9, 0.75, "launch_bound"),
        (4.9, 0.72, "none"),
        (5.0, 0.75, "host_other"),
        (0.4, 0.05, "none"),
        (40.0, 4.1, "host_other"),
        (40.0, 3.9, "none"),
    ],
)
def test_a_step_too_small_for_its_loop(step: float, loop: float, name: str) -> None:
    (finding,) = findings(scene(step, device="cpu", host_other=loop))
    assert finding.bottleneck == name
    assert ("more work per step" in finding.why) is (name == "launch_bound")


def test_what_any_loop_pays_counts_as_the_loops_own() -> None:
    seen = scene(0.4, device="cpu", host_other=0.06, callbacks_logging=0.03, data_wait=0.03)
    (finding,) = findings(seen)
    assert finding.bottleneck == "launch_bound" and finding.share_pct == pytest.approx(30)


# -- synchronisations -------------------------------------------------------------------------------------------------


def test_lines_that_synchronize_come_before_launches() -> None:
    (finding,) = findings(cifar10_launches(syncs=({**ITEM, "ms_per_step": 3.5},)))
    assert finding.bottleneck == "sync" and finding.share_pct == pytest.approx(46), "no more than was idle"
    assert "train.py:40 .item(), 1 a step, 3.50 ms a step" in finding.why and "log it detached" in finding.why
    assert finding.patch is None
    assert names(cifar10_launches(syncs=(ITEM,))) == ["sync", "launch_bound"], "2.0 ms are the line's, 0.8 are not"
    assert names(cifar10_launches(syncs=({**ITEM, "ms_per_step": None},))) == ["sync"]


@pytest.mark.parametrize("change", [{"trail": 5.0, "gpu": {"gr_active_pct": 97.0}}, {"gpu": {"gr_active_pct": 97.0}}])
def test_a_synchronization_that_leaves_the_device_busy_is_none(change: dict[str, Any]) -> None:
    assert "sync" not in names(cifar10_launches(syncs=(ITEM,), **change))


def test_waiting_long_for_a_busy_gpu_costs_nothing() -> None:
    """A loss read each step waits 1.5 s for a step of 1.5 s; the GPU idles for next to none of it."""
    seen = gpt2_naive(trail=0.0, lead_ms=0.0, syncs=({**ITEM, "ms_per_step": 1500.0},))
    assert names(seen) == ["fp32_math"]


def test_a_rare_line_is_not_held_against_the_step() -> None:
    assert names(cifar10_launches(syncs=({**ITEM, "ms_per_step": None, "per_step": 0.02},))) == ["launch_bound"]


def test_a_trace_tells_synchronizations_from_launches() -> None:
    seen = with_trace(cifar10_launches(), 3.05, {"launch": 1.0, "sync": 2.05}, {"gemm": 2.0})
    first, second = findings(seen)
    assert (first.bottleneck, second.bottleneck) == ("sync", "launch_bound")
    assert first.share_pct == pytest.approx(33.6, abs=0.1) and "diagnose --syncs" in first.why


def test_on_the_cpu_lines_are_named_without_a_share_and_last() -> None:
    (finding,) = findings(on_cpu(syncs=({**ITEM, "ms_per_step": None},)))
    assert finding.bottleneck == "sync" and finding.share_pct is None and finding.ceiling_gain_pct is None
    assert "costs nothing on the CPU" in finding.why and "train.py:40" in finding.why and finding.patch is None
    assert names(on_cpu(data_wait=12.0, syncs=({**ITEM, "ms_per_step": None},))) == ["data_wait", "sync"]
    assert names(on_cpu()) == ["none"]


# -- callbacks, and the host itself -----------------------------------------------------------------------------------


def test_callbacks_with_the_slowest_by_name() -> None:
    hooks = {"Slow.on_train_batch_end": 9.7, "Logger.log": 0.3, "A.b": 0.2, "quick": 0.1}
    (finding,) = findings(on_cpu(callbacks_logging=10.0, hooks_ms=hooks))
    assert finding.bottleneck == "callbacks_logging" and finding.share_pct == pytest.approx(25)
    assert "10.0 of 40.0 ms a step (slowest: Slow.on_train_batch_end 9.70 ms; Logger.log 0.30 ms" in finding.why
    assert "quick" not in finding.why and "log_every_n_steps" in finding.why and finding.patch is None


@pytest.mark.parametrize(
    ("hook", "other", "theirs"),
    [
        ("Net.on_after_batch_transfer", 1.0, True),
        ("Data.on_before_batch_transfer", 1.0, True),
        ("Net.on_after_batch_transfer", 11.0, False),
        ("Net.on_train_batch_end", 0.0, False),
    ],
)
def test_a_batch_transfer_hook_is_not_to_be_called_less_often(hook: str, other: float, theirs: bool) -> None:
    (finding,) = findings(on_cpu(callbacks_logging=20.0, hooks_ms={hook: 10.0, "Slow.on_train_batch_start": other}))
    assert finding.bottleneck == "callbacks_logging" and hook in finding.why
    assert (finding.title == "HELD UP BY A TRANSFER HOOK") is theirs
    assert ("your batch transfer hook" in finding.why) is theirs and ("log_every_n_steps" in finding.why) is not theirs


@pytest.mark.parametrize(("ranks", "waits"), [(2, True), (1, False)])
def test_with_several_ranks_a_slow_log_waits_for_them(ranks: int, waits: bool) -> None:
    """`log_every_n_steps=1000` changed nothing for two ranks; without sync_dist the finding was gone."""
    seen = on_cpu(callbacks_logging=20.0, hooks_ms={"self.log": 19.0}, world_size=ranks)
    finding = next(each for each in findings(seen) if each.bottleneck == "callbacks_logging")
    assert ("drop sync_dist in training" in finding.why) is waits is not ("log_every_n_steps" in finding.why)


@pytest.mark.parametrize(("other", "its_own"), [(1.0, True), (11.0, False)])
def test_a_scheduler_is_not_told_to_log_less(other: float, its_own: bool) -> None:
    hooks = {"Net.lr_scheduler_step": 10.0, "Slow.on_train_batch_start": other}
    (finding,) = findings(on_cpu(callbacks_logging=20.0, hooks_ms=hooks))
    assert finding.bottleneck == "callbacks_logging" and "Net.lr_scheduler_step 10.00 ms" in finding.why
    assert (finding.title == "HELD UP BY LR SCHEDULER") is its_own and finding.patch is None
    assert ('"interval": "epoch"' in finding.why) is its_own and ("log_every_n_steps" in finding.why) is not its_own


@pytest.mark.parametrize(
    ("step", "ms", "named"), [(40.0, 3.9, False), (40.0, 4.1, True), (1.0, 0.24, False), (1.0, 0.26, True)]
)
def test_the_price_of_a_progress_bar_is_not_named(step: float, ms: float, named: bool) -> None:
    assert ("callbacks_logging" in names(scene(step, device="cpu", callbacks_logging=ms))) is named


@pytest.mark.parametrize(("blocked", "named"), [(20.0, True), (4.1, True), (3.9, False), (None, False)])
def test_a_host_asleep_on_the_cpu(blocked: float | None, named: bool) -> None:
    found = findings(on_cpu(blocked_ms=blocked, host_ms={"forward": 25.0, "backward": 9.0}))
    assert (found[0].bottleneck == "host_other") is named
    if named:
        assert (
            "the host slept or waited for" in found[0].why and "in forward)" in found[0].why and found[0].patch is None
        )


@pytest.mark.parametrize(
    ("in_forward", "cpu", "asleep"),
    [
        (4.0, {"crowded": True, "threads": 2}, None),
        (9.0, {"crowded": True, "threads": 2}, 7.0),
        (4.0, {"crowded": True, "threads": 1}, 12.0),
        (4.0, {"crowded": True}, 12.0),
        (4.0, {}, 12.0),
        (None, {"crowded": True, "threads": 2}, 12.0),
    ],
    ids=["threads wait", "sleep, too", "one thread", "an older file", "idle CPUs", "unknown"],
)
def test_on_crowded_cpus_torchs_threads_wait_and_no_host_sleeps(
    in_forward: float | None, cpu: dict[str, Any], asleep: float | None
) -> None:
    """Two threads beside two busy processes: the wait for the other thread was called sleep."""
    parts = {"forward": 16.0, "backward": 20.0, "optimizer": 4.0}
    (finding,) = findings(on_cpu(**parts, blocked_ms=12.0, forward_blocked_ms=in_forward, evidence={"cpu": cpu}))
    assert finding.title == ("CPU OVERSUBSCRIBED" if asleep is None else "HELD UP BY THE HOST")
    assert asleep is None or f"slept or waited for {asleep:.1f} of 40.0 ms" in finding.why


def test_with_several_ranks_a_backward_may_wait_for_the_exchange() -> None:
    waits = {"blocked_ms": 20.0, "host_ms": {"forward": 8.0, "backward": 22.0}}
    assert names(on_cpu(**waits)) == ["host_other"]
    assert names(on_cpu(**waits, world_size=2)) == ["none"]
    asleep = {"blocked_ms": 20.0, "host_ms": {"forward": 26.0, "backward": 6.0}}
    assert names(on_cpu(**asleep, world_size=2)) == ["host_other"], "at least 14 ms are not the backward's"
    assert names(on_cpu(blocked_ms=20.0, world_size=2)) == ["none"], "the backward's share is not known"


def test_a_host_asleep_beside_a_gpu_counts_only_where_the_gpu_waited() -> None:
    asleep = {"blocked_ms": 45.0, "host_ms": {"forward": 42.0, "backward": 5.0}, "trail": 30.0}
    idle = scene(60.0, gpu={"gr_active_pct": 50.0}, **asleep)
    (finding,) = findings(idle)
    assert finding.bottleneck == "host_other" and finding.share_pct == pytest.approx(50)
    assert "host_other" not in names(scene(60.0, gpu={"gr_active_pct": 98.0}, **asleep))


def test_a_loop_busy_between_its_hooks() -> None:
    (finding,) = findings(on_cpu(host_other=10.0))
    assert finding.bottleneck == "host_other" and "between its hooks took 10.0 of 40.0" in finding.why


def test_where_ranks_wait_for_one_another_no_host_is_blamed() -> None:
    """Lightning asks all ranks after every batch whether one was told to end: who waits there waits for the slowest."""
    for device, seen in (("cpu", on_cpu(host_other=10.0)), ("cuda", scene(40.0, host_other=10.0, trail=9.0))):
        assert names(seen) == ["host_other"] and seen.device == device
        assert names(dataclasses.replace(seen, world_size=2)) == ["none"]
    both = on_cpu(host_other=10.0, world_size=2, **collected(9.0))
    (finding,) = findings(both)
    assert finding.bottleneck == "host_other" and finding.share_pct == pytest.approx(22.5), "garbage is its own"
    assert "between its hooks" not in finding.why


# -- the garbage collector --------------------------------------------------------------------------------------------


HOST = {"rungs": {"host": {"enabled": True}}}


@pytest.mark.parametrize(
    ("what", "is_for_a_bar"),
    [
        ("self.log(prog_bar=True) of loss", True),
        ("progress bar", True),
        ("self.log to a logger", False),
        (".item(), self.log(prog_bar=True) of loss", False),
    ],
)
@pytest.mark.parametrize("ms", [3.5, None])
def test_reads_for_progress_bars_are_answered_by_host(what: str, is_for_a_bar: bool, ms: float | None) -> None:
    """`lightning/fabric/utilities/apply_func.py` waited twice a step in a table's training: host made it 1.6 times as
    fast, and the finding said that no rung helps."""
    lines = ({**ITEM, "what": what, "per_step": 2.0, "ms_per_step": ms}, {**ITEM, "ms_per_step": ms and ms / 10})
    (finding,) = findings(cifar10_launches(syncs=lines))
    assert finding.bottleneck == "sync" and finding.patch == (HOST if is_for_a_bar else None)
    assert finding.why.count("at train.py:40") == 1 and ("no rung helps" in finding.why) is not is_for_a_bar
    (on,) = findings(cifar10_launches(syncs=lines), ("host",))
    assert on.patch is None and ("no further rung helps" in on.why) is is_for_a_bar


@pytest.mark.parametrize(("part", "hooks"), [("host_other", {}), ("callbacks_logging", {"self.log": 1.5})])
@pytest.mark.parametrize(("ms", "is_lightnings"), [(1.5, True), (2.5, False)])
def test_what_lightning_does_for_every_batch_is_answered_by_host(
    part: str, hooks: dict[str, float], ms: float, is_lightnings: bool
) -> None:
    found = [each for each in findings(cifar10_launches(**{part: ms}, hooks_ms=hooks)) if each.bottleneck == part]
    assert [each.patch for each in found] == [HOST if is_lightnings else None]


@pytest.mark.parametrize(("part", "hooks"), [("host_other", {}), ("callbacks_logging", {"self.log": 6.0})])
@pytest.mark.parametrize(("batches", "is_lightnings"), [(4, True), (2, False)])
def test_what_lightning_does_for_every_batch_adds_up_where_gradients_are_accumulated(
    part: str, hooks: dict[str, float], batches: int, is_lightnings: bool
) -> None:
    """In four batches a step, two values each were to be logged more rarely; the short path takes 4 of those 10 ms."""
    seen = cifar10_launches(**{part: 6.0}, hooks_ms=hooks, global_batch=32 * batches, micro_batch=32)
    found = [each for each in findings(seen) if each.bottleneck == part]
    assert [each.patch for each in found] == [HOST if is_lightnings else None]


@pytest.mark.parametrize(("part", "hooks"), [("host_other", {}), ("callbacks_logging", {"self.log": 5.0})])
@pytest.mark.parametrize("is_crowded", [True, False])
def test_what_takes_long_on_crowded_cpus_is_no_proof_that_no_rung_helps(
    part: str, hooks: dict[str, float], is_crowded: bool
) -> None:
    """Beside two busy processes on two CPUs, `self.log` took 9 ms a step, and the finding said that no rung helps."""
    cpu = {"evidence": {"cpu": {"crowded": True}}} if is_crowded else {}
    (finding,) = findings(on_cpu(**{part: 5.0}, hooks_ms=hooks, **cpu))
    assert finding.bottleneck == part and finding.patch is None
    assert ("fewer threads and workers" in finding.why) is is_crowded is not ("no rung helps" in finding.why)


def test_a_users_own_hook_is_to_be_called_less_often_on_crowded_cpus_too() -> None:
    hooks = {"Slow.on_train_batch_end": 5.0}
    (finding,) = findings(on_cpu(callbacks_logging=5.0, hooks_ms=hooks, evidence={"cpu": {"crowded": True}}))
    assert "no rung helps" in finding.why and "every N steps" in finding.why


def collected(ms: float, passes: int = 1) -> dict[str, Any]:
    return {"evidence": {"garbage_collection": {"ms_per_step": ms, "passes": passes}}}


@pytest.mark.parametrize(
    ("loop", "garbage", "says", "not_says"),
    [
        (10.4, 10.0, "garbage collection took 10.0 of 40.0 ms a step (1 pass in 200 steps)", "between its hooks"),
        (10.4, 0.2, "between its hooks took 10.2 of 40.0", "garbage"),
        (12.0, 5.0, "garbage collection took 5.0", None),
    ],
)
def test_garbage_collection_is_named_as_what_it_is(
    loop: float, garbage: float, says: str, not_says: str | None
) -> None:
    (finding,) = findings(on_cpu(host_other=loop, **collected(garbage)))
    assert finding.bottleneck == "host_other" and finding.share_pct == pytest.approx(100 * loop / 40)
    assert says in finding.why and (not_says is None or not_says not in finding.why)
    assert finding.title == "HELD UP BY THE HOST"
    assert finding.patch == (HOST if garbage > loop - garbage else None)
    (on,) = findings(on_cpu(host_other=loop, **collected(garbage)), ("host",))
    assert ("gc.freeze()" in on.why) is (garbage > loop - garbage) and on.patch is None


def test_several_passes_are_counted() -> None:
    (finding,) = findings(on_cpu(host_other=10.0, **collected(9.0, 3)))
    assert "(3 passes in 200 steps)" in finding.why


def test_in_a_tiny_step_a_pass_is_not_the_loops_price() -> None:
    (finding,) = findings(scene(2.0, device="cpu", host_other=1.0, **collected(0.9)))
    assert finding.bottleneck == "host_other" and finding.share_pct == pytest.approx(45)
    assert "garbage collection took 0.90 of 2.00" in finding.why
    (finding,) = findings(scene(2.0, device="cpu", host_other=1.0))
    assert finding.bottleneck == "launch_bound"
    (finding,) = findings(scene(2.0, device="cpu", host_other=0.2, **collected(0.1)))
    assert finding.bottleneck == "none"


@pytest.mark.parametrize("broken", [{"ms_per_step": None}, {"ms_per_step": "x"}, {"ms_per_step": 1e9}, {}])
def test_what_the_evidence_lacks_or_overstates(broken: dict[str, Any]) -> None:
    (finding,) = findings(on_cpu(host_other=10.0, evidence={"garbage_collection": broken}))
    assert finding.bottleneck == "host_other" and finding.share_pct == pytest.approx(25)


@pytest.mark.parametrize(
    ("forward", "backward", "blocked", "share"),
    [
        (30.0, 5.0, 0.0, 62.5),
        (30.0, 5.0, 4.0, 62.5),
        (30.0, 11.0, 0.0, None),
        (5.0, 1.2, 0.0, None),
        (30.0, 0.0, 0.0, None),
    ],
    ids=["logging", "half asleep", "a cheap backward", "little", "no backward"],
)
def test_work_without_gradients_in_a_training_step(
    forward: float, backward: float, blocked: float, share: float | None
) -> None:
    (finding, *_) = findings(on_cpu(forward=forward, backward=backward, optimizer=1.0, blocked_ms=blocked))
    assert finding.share_pct == (None if share is None else pytest.approx(share))
    if share is not None:
        aside = forward - backward - blocked
        assert finding.title == "WORK WITHOUT GRADIENTS"
        assert finding.bottleneck == "host_other" and f"about {aside:.1f} ms of it is work without" in finding.why
        assert "training_step takes 30.0 of 40.0 ms a step, its backward only 5.0" in finding.why


@pytest.mark.parametrize(
    ("model", "backward", "is_named"),
    [({"convs": 1}, 5.0, False), ({"convs": 1}, 1.0, True), ({"calls_backward": True}, 1.0, False)],
    ids=["pooled convolution", "frozen convolutions", "own backward"],
)
def test_a_forward_that_takes_long_without_work_aside(model: dict[str, Any], backward: float, is_named: bool) -> None:
    (finding, *_) = findings(on_cpu(forward=30.0, backward=backward, optimizer=1.0, evidence={"model": model}))
    assert (finding.title == "WORK WITHOUT GRADIENTS") is is_named


@pytest.mark.parametrize(
    ("forward", "crowded", "is_named"), [(10.0, False, True), (10.0, True, False), (30.0, True, True)]
)
def test_a_short_forward_on_busy_cpus_is_no_work_aside(forward: float, crowded: bool, is_named: bool) -> None:
    """It was called work without gradients where a small model's forward waited for a CPU."""
    evidence = {"cpu": {"crowded": crowded}}
    found = findings(on_cpu(forward=forward, backward=1.0, optimizer=1.0, evidence=evidence))
    assert ("WORK WITHOUT GRADIENTS" in [each.title for each in found]) is is_named


@pytest.mark.parametrize(
    ("seen", "share"),
    [
        (on_cpu(forward=30.0, backward=5.0, optimizer=1.0, blocked_ms=0.0, **ANOMALY), 62.5),
        (on_cpu(forward=30.0, backward=5.0, optimizer=1.0, blocked_ms=5.0, **ANOMALY), 50.0),
        (on_cpu(data_wait=12.0, **ANOMALY), None),
        (cifar10_launches(**ANOMALY), None),
    ],
    ids=["a long forward", "asleep, too", "a long backward", "GPU"],
)
def test_anomaly_mode_is_named_as_what_it_is_and_first(seen: Any, share: float | None) -> None:
    """It was called work without gradients, because it takes its stack traces in the forward."""
    first, *others = findings(seen)
    assert (first.bottleneck, first.title, first.share_pct) == ("host_other", "SLOWED BY ANOMALY MODE", share)
    assert "Trainer(detect_anomaly=False)" in first.why and "WORK WITHOUT GRADIENTS" not in [f.title for f in others]
    assert first.alarm == ("" if share is None else f"at least {share:.0f} % of the step")


def test_a_hook_takes_no_longer_than_all_hooks() -> None:
    (finding,) = findings(on_cpu(callbacks_logging=10.0, hooks_ms={"self.log": 12.0}))
    assert "(slowest: self.log 10.00 ms)" in finding.why


REQUESTED = {"evidence": {"requested_garbage_collection": {"where": "train.py:42", "ms_per_step": 20.0}}}
COLLECTS, ADVICE = "gc.collect() at train.py:42", "most of it is gc.collect() at train.py:42: call it once an epoch"


@pytest.mark.parametrize(
    ("parts", "evidence", "is_named"),
    [
        ({"forward": 30.0, "backward": 5.0, "optimizer": 1.0}, REQUESTED, True),
        ({"forward": 30.0, "backward": 5.0, "optimizer": 1.0}, {}, False),
        ({"callbacks_logging": 30.0, "hooks_ms": {"Tidy.on_train_batch_end": 30.0}}, REQUESTED, True),
        ({"callbacks_logging": 30.0, "hooks_ms": {"Tidy.on_train_batch_end": 30.0}}, {}, False),
        ({"data_wait": 30.0}, REQUESTED, False),
    ],
    ids=["step", "other work in the step", "hook", "another hook", "elsewhere"],
)
def test_a_line_that_collects_garbage_in_each_step_is_what_to_change(
    parts: dict[str, Any], evidence: dict[str, Any], is_named: bool
) -> None:
    seen = on_cpu(blocked_ms=0.0, **parts, **evidence)
    (finding, *others) = findings(seen)
    assert (ADVICE in finding.why) is is_named
    note = [f"{COLLECTS} takes 20.0 ms of each step" in text for text in list_caveats(seen, (finding, *others))]
    assert note == ([True] if evidence and not is_named else []), "said once"


def test_garbage_collected_for_a_small_share_of_the_step_is_not_worth_a_word() -> None:
    seldom = {"requested_garbage_collection": {"where": "train.py:42", "ms_per_step": 1.0}}
    assert list_caveats(on_cpu(data_wait=20.0, evidence=seldom)) == []


def hot(of: str, share_pct: float) -> dict[str, Any]:
    line = {"of": of, "where": "train.py:7", "function": "plot", "share_pct": share_pct}
    others = [
        {"of": each, "where": "data.py:3", "function": "read", "share_pct": 90.0} for each in ("loading", "on_fit")
    ]
    return {"evidence": {"lines": {"looks": 100, "lines": [*others, line]}}}


@pytest.mark.parametrize(("share", "is_named"), [(60.0, True), (30.0, True), (20.0, False)])
def test_the_line_that_takes_most_of_a_cost_is_named(share: float, is_named: bool) -> None:
    asleep = on_cpu(blocked_ms=20.0, host_ms={"forward": 26.0, "backward": 6.0}, **hot("training_step", share))
    aside = on_cpu(forward=26.0, backward=2.0, optimizer=0.0, **hot("training_step", share))
    for seen in (asleep, aside):
        finding = findings(seen)[0]
        assert finding.bottleneck == "host_other"
        assert (", most of it at train.py:7 in plot" in finding.why) is is_named and "data.py" not in finding.why
        assert ("Your slowest lines" in finding.why) is (seen is aside and not is_named)


@pytest.mark.parametrize(
    ("hook", "of", "is_named"),
    [
        ("Slow.on_train_batch_end", "on_train_batch_end", True),
        ("Slow.on_train_batch_end", "training_step", False),
        ("loggers", "log_metrics", True),
    ],
)
def test_a_slow_hook_has_its_own_line(hook: str, of: str, is_named: bool) -> None:
    seen = on_cpu(callbacks_logging=20.0, hooks_ms={hook: 19.0, "A.b": 1.0}, **hot(of, 45.0))
    why = findings(seen)[0].why
    line = ", most of it at train.py:7 in plot" if is_named else ""
    assert f"(slowest: {hook} 19.00 ms{line}; A.b 1.00 ms)" in why

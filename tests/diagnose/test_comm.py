"""Exchange that nothing hides, and slow ranks."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from fastloop.records.plan import Verdict
from tests.diagnose.scenes import findings, gpt2_tuned, on_cpu, ranks, resnet50_naive, scene, with_trace


def two(**changes: Any) -> Any:
    return gpt2_tuned(world_size=2, **changes)


def trials(replayed: float | None, no_exchange: float | None) -> dict[str, float | None]:
    return {"replayed": replayed, "no_exchange": no_exchange}


SLOW_LINK = trials(520.8, 651.0)
TRIALS = "measured by trials with and without it"


@pytest.mark.parametrize(
    ("seen", "share", "gain", "source"),
    [
        (two(ceilings=SLOW_LINK), 20.0, 25.0, TRIALS),
        (with_trace(two(), 100.0, {}, {"nccl": 30.0}, comm_exposed_ms=24.58), 20.0, 25.0, "traced"),
        (two(comm_exposed=24.58), 20.0, 25.0, "timed"),
        (two(comm_exposed=60.0, ceilings=SLOW_LINK), 20.0, 25.0, TRIALS),
        (with_trace(two(ceilings=SLOW_LINK), 100.0, {}, {"nccl": 60.0}, comm_exposed_ms=60.0), 20.0, 25.0, TRIALS),
        (
            with_trace(two(ceilings=trials(None, 651.0)), 100.0, {}, {"nccl": 30.0}, comm_exposed_ms=24.58),
            20.0,
            25.0,
            "traced",
        ),
    ],
    ids=["trials", "trace", "marks", "trials before marks", "trials before the trace", "one trial is none"],
)
def test_the_exchange_by_its_sources(seen: Any, share: float, gain: float, source: str) -> None:
    (finding,) = findings(seen)
    assert finding.bottleneck == "comm_exposed" and finding.share_pct == pytest.approx(share, abs=0.1)
    assert finding.ceiling_gain_pct == pytest.approx(gain, abs=0.1) and source in finding.why
    assert finding.ceiling_is_estimate
    assert finding.patch == {"rungs": {"overlap": {"enabled": True}}}


@pytest.mark.parametrize(
    "seen",
    [
        two(),
        two(ceilings=trials(520.8, 530.0)),
        two(comm_exposed=6.0),
        gpt2_tuned(comm_exposed=60.0),
        two(comm_exposed=60.0, ceilings=trials(520.8, 521.0)),
        two(ceilings=trials(None, 651.0)),
    ],
    ids=["unknown", "2 % by trials", "under 5 %", "one rank", "the trials acquit it", "one trial alone"],
)
def test_no_exchange_to_name(seen: Any) -> None:
    assert "comm_exposed" not in [finding.bottleneck for finding in findings(seen)]


def starved(now: float, replayed: float, no_exchange: float) -> Any:
    """resnet50 on two ranks with 512 samples a step: waits for data for 80 % of it."""
    step = 512_000 / now
    return resnet50_naive(
        step=step,
        data_wait=0.8 * step,
        samples_per_s=now,
        world_size=2,
        global_batch=512,
        ceilings=trials(replayed, no_exchange),
    )


def test_without_exchange_ranks_wait_for_no_slow_loader_which_is_no_exchange() -> None:
    found = [finding.bottleneck for finding in findings(starved(410, 3234, 3290))]
    assert found[0] == "data_wait" and "comm_exposed" not in found, "2.7 of 1249 ms"
    lacking = [finding.bottleneck for finding in findings(starved(410, 410, 459))]
    assert "comm_exposed" in lacking, "the control: 12 % faster than with exchange, all else alike"


def test_a_slow_link_is_named_by_its_share_of_the_step_as_it_is() -> None:
    seen = dataclasses.replace(
        gpt2_tuned(step=512_000 / 900, trail=500.0),
        samples_per_s=900.0,
        world_size=2,
        global_batch=512,
        ceilings=trials(1000, 1600),
    )
    (finding,) = findings(seen)
    assert finding.bottleneck == "comm_exposed" and "192.0 of 568.9 ms" in finding.why
    assert finding.share_pct == pytest.approx(100 * 192 / 568.9, abs=0.1)
    assert finding.ceiling_gain_pct == pytest.approx(100 * (568.9 / (568.9 - 192) - 1), abs=0.1)
    assert finding.ceiling_is_estimate, "900 to 1,600 samples/s would be the data too"


def test_a_slow_link_may_cost_little_of_a_starved_step() -> None:
    found = findings(starved(100, 1000, 1600))
    assert [finding.bottleneck for finding in found if finding.bottleneck == "comm_exposed"] == [], "192 of 5120 ms"


def test_a_rung_that_is_on_is_not_proposed() -> None:
    idle, took = (Verdict(rung="overlap", took=took, why="it is FSDP") for took in (False, True))
    (finding,) = findings(two(ceilings=SLOW_LINK), ("overlap",), (idle,))
    assert finding.patch is None and "overlap is enabled but inactive (it is FSDP)" in finding.why
    (finding,) = findings(two(ceilings=SLOW_LINK), ("overlap",), (took,))
    assert "overlap is on" not in finding.why and "comm_hook: bf16" in finding.why


def world(*parts: dict[str, float], own: int = 0, **changes: Any) -> Any:
    """What rank 0 hands in: its own parts, and those of all."""
    named = ranks(*parts, step=40.0)
    seen = on_cpu(**{"world_size": len(parts), **changes})
    return dataclasses.replace(seen, ranks=named, parts_ms={**seen.parts_ms, **parts[own]})


QUICK, SLOW = {"forward": 12.0, "backward": 26.0}, {"forward": 30.0, "backward": 8.0}


def test_a_slow_rank_is_named_with_its_host_and_part() -> None:
    (finding,) = findings(world(QUICK, QUICK, SLOW))
    assert finding.bottleneck == "straggler" and finding.share_pct == pytest.approx(45)
    assert "2 of 3 ranks wait for rank 2 on node-1 for 18.0 of 40.0 ms a step" in finding.why
    assert "its forward takes 30.0 ms, theirs 12.0" in finding.why and finding.patch is None


def test_a_slow_rank_0_is_not_blamed_twice() -> None:
    asleep = {"blocked_ms": 18.5, "host_ms": {"forward": 30.0, "backward": 0.1}}
    (finding,) = findings(world(SLOW, QUICK, **asleep))
    assert finding.bottleneck == "straggler" and "rank 0" in finding.why
    starved = {"data_wait": 20.0, "forward": 12.0, "backward": 7.0}
    (finding,) = findings(world(starved, {"data_wait": 1.0, "forward": 12.0, "backward": 26.0}))
    assert finding.bottleneck == "straggler" and "data_wait takes 20.0 ms, theirs 1.0" in finding.why


def test_ranks_that_wait_for_data_alike_are_starved_and_no_stragglers() -> None:
    starved = {"data_wait": 20.0, "forward": 12.0, "backward": 7.0}
    assert [finding.bottleneck for finding in findings(world(starved, starved))] == ["data_wait"]


def test_waiting_for_a_slow_rank_is_no_exchange() -> None:
    seen = world(QUICK, SLOW, ceilings=trials(800.0, 1500.0))
    assert [finding.bottleneck for finding in findings(seen)] == ["straggler"], "18 of the 18.7 ms"
    more = world(QUICK, SLOW, ceilings=trials(800.0, 3200.0))
    found = findings(more)
    assert [finding.bottleneck for finding in found] == ["straggler", "comm_exposed"]
    assert found[1].share_pct == pytest.approx(30) and found[1].ceiling_is_estimate


def test_waiting_for_a_rank_whose_data_is_slow_is_in_no_trial() -> None:
    quick, late = {"data_wait": 1.0, "backward": 26.0}, {"data_wait": 20.0, "backward": 7.0}
    shares = {
        finding.bottleneck: finding.share_pct
        for finding in findings(world(quick, late, ceilings=trials(1600.0, 3200.0)))
    }
    assert shares["straggler"] == pytest.approx(47.5) and shares["comm_exposed"] == pytest.approx(25.0)


def test_a_rank_that_only_rank_0_waits_for_does_not_make_the_gpu_slow() -> None:
    seen = scene(
        100.0,
        trail=50.0,
        gpu={"gr_active_pct": 99.0},
        mfu={"datasheet": 0.2},
        world_size=2,
        forward=30.0,
        backward=60.0,
        optimizer=10.0,
    )
    waits = ranks({"forward": 30.0, "backward": 60.0}, {"forward": 70.0, "backward": 20.0})
    found = findings(dataclasses.replace(seen, ranks=waits))
    shares = {finding.bottleneck: finding.share_pct for finding in found}
    assert shares["straggler"] == pytest.approx(40) and shares["compute_bound"] == pytest.approx(60)

"""The headline, and what to try next."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from fastloop.diagnose import list_next_steps
from fastloop.diagnose.finding import TITLES
from fastloop.diagnose.rules import RULES
from fastloop.ladder import collect_cards
from fastloop.records.measurement import Measurement
from tests.diagnose.scenes import (
    cifar10_launches,
    findings,
    gpt2_naive,
    gpt2_tuned,
    on_cpu,
    ranks,
    resnet50_naive,
    resnet50_resident,
    scene,
    with_trace,
)

LINE = {"where": "a.py:1", "per_step": 1.0}
SLOW = gpt2_tuned(mfu={"datasheet": 0.2})
RANKS = ranks({"forward": 12.0, "backward": 26.0}, {"forward": 30.0, "backward": 8.0}, step=40.0)
WORLD = dataclasses.replace(on_cpu(world_size=2), ranks=RANKS)


@pytest.mark.parametrize(
    ("seen", "words"),
    [
        (resnet50_naive(), "STARVED BY DATA"),
        (gpt2_naive(), "BUSY, NOT FAST: FP32 MATH"),
        (cifar10_launches(), "LAUNCH-BOUND"),
        (gpt2_tuned(), "NOTHING TO GAIN: GPU WELL USED"),
        (on_cpu(), "NOTHING TO GAIN"),
        (Measurement(), "TOO SHORT TO JUDGE"),
        (scene(20.0, trail=18.0), "BUSY, USE UNKNOWN"),
        (on_cpu(unexplained=10.0), "NO BOTTLENECK FOUND"),
        (on_cpu(callbacks_logging=20.0), "HELD UP BY HOOKS, LOGGING"),
        (on_cpu(callbacks_logging=20.0, hooks_ms={"Net.on_after_batch_transfer": 19.0}), "HELD UP BY A TRANSFER HOOK"),
        (on_cpu(callbacks_logging=20.0, hooks_ms={"Net.lr_scheduler_step": 19.0}), "HELD UP BY LR SCHEDULER"),
        (on_cpu(callbacks_logging=3.9, host_other=3.9), "NO SINGLE BOTTLENECK"),
        (on_cpu(syncs=(LINE,)), "HIDDEN SYNCS (NO COST ON CPU)"),
        (cifar10_launches(syncs=(LINE,)), "STALLED BY SYNCS"),
        (scene(0.4, device="cpu", host_other=0.2), "LOOP OVERHEAD: STEP TOO SHORT"),
        (WORLD, "WAITING FOR RANK 1"),
        (resnet50_resident(), "BUSY, NOT FAST: MEMORY-BOUND"),
        (SLOW, "BUSY, NOT FAST"),
        (with_trace(SLOW, 100.0, {}, {"attention": 50.0}), "BUSY, NOT FAST: ATTENTION"),
        (with_trace(SLOW, 100.0, {}, {"optimizer": 50.0}), "BUSY, NOT FAST: OPTIMIZER"),
        (with_trace(SLOW, 100.0, {}, {"elementwise": 50.0}), "BUSY, NOT FAST: ELEMENTWISE"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_headline(seen: Measurement, words: str) -> None:
    first = findings(seen)[0]
    assert first.title == words and len(f"fastloop {words}") <= 40
    too_long = first.share_pct is None or words.startswith(("BUSY", "NOTHING", "LOOP OVERHEAD"))
    assert too_long or len(f"fastloop {words} 42 %") <= 40


def test_every_bottleneck_has_a_headline_for_forty_columns() -> None:
    assert set(TITLES) == set(RULES)
    assert [title for title in TITLES.values() if len(f"fastloop {title}") > 40 or not title.isupper()] == []
    assert [title for title in TITLES.values() if len(f"fastloop {title} 42 %") > 40] == [
        "BUSY, NOT FAST: MEMORY-BOUND"
    ]


def test_each_finding_has_its_own() -> None:
    titles = [finding.title for finding in findings(on_cpu(step=60.0, data_wait=12.0, checkpoint=9.0))]
    assert titles == ["STARVED BY DATA", "HELD UP BY CHECKPOINTS"]


def test_memory_without_a_rung_left_is_not_called_slow() -> None:
    seen = resnet50_resident()
    (finding,) = findings(seen, ("amp", "layout", "compile"))
    assert finding.title == "BUSY: MEMORY-BOUND"


@pytest.mark.parametrize(
    ("seen", "enabled", "then", "later"),
    [
        (resnet50_naive(), (), ("prefetch", "pin"), ("amp", "layout", "compile")),
        (resnet50_naive(), ("pin", "amp"), ("prefetch",), ("layout", "compile")),
        (resnet50_naive(h2d=20.0), (), (), ("amp", "layout", "compile")),
        (resnet50_naive(h2d=20.0), ("pin",), (), ("amp", "layout", "compile")),
        (gpt2_naive(), (), ("compile", "fused", "batch"), ()),
        (cifar10_launches(micro_batch=32), (), ("host", "fused", "compile"), ()),
        (on_cpu(data_wait=12.0), (), (), ()),
    ],
)
def test_what_comes_after_the_fix(seen: Measurement, enabled: tuple[str, ...], then: Any, later: Any) -> None:
    found = findings(seen, enabled)
    assert found[0].patch is not None and list_next_steps(found, seen, collect_cards(), enabled) == (then, later)


def test_what_a_patch_has_is_not_tried_again_after_it() -> None:
    seen = resnet50_naive(h2d=20.0)
    found = findings(seen)
    patched = [rung for finding in found for rung in (finding.patch or {}).get("rungs", {})]
    assert patched == ["workers", "pin", "prefetch"] and not set(patched) & set(
        list_next_steps(found, seen, collect_cards())[0]
    )


@pytest.mark.parametrize(
    "seen", [gpt2_tuned(), on_cpu(), Measurement(), on_cpu(callbacks_logging=20.0), gpt2_tuned(validation=20.0)]
)
def test_where_nothing_is_to_be_fixed_nothing_comes_after(seen: Measurement) -> None:
    assert list_next_steps(findings(seen), seen, collect_cards()) == ((), ())

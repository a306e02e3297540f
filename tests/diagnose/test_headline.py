"""The headline, and what to try next."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from fastloop.diagnose import findings, next_steps, title
from fastloop.measurement import Measurement
from tests.diagnose.scenes import (
    cifar10_launches,
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


@pytest.mark.parametrize(("seen", "words"), [
    (resnet50_naive(), "STARVED BY DATA"), (gpt2_naive(), "BUSY, NOT FAST: FP32 MATH"),
    (cifar10_launches(), "BOUND BY LAUNCHES"), (gpt2_tuned(), "NOTHING TO GAIN: THE GPU IS WELL USED"),
    (on_cpu(), "NOTHING TO GAIN"), (Measurement(), "TOO SHORT TO JUDGE"),
    (scene(20.0, trail=18.0), "NO BOTTLENECK FOUND"), (on_cpu(unexplained=10.0), "NO BOTTLENECK FOUND"),
    (on_cpu(callbacks_logging=20.0), "HELD UP BY CALLBACKS AND LOGGING"),
    (on_cpu(syncs=(LINE,)), "SYNCHRONISES, WHICH IS FREE ON THE CPU"),
    (cifar10_launches(syncs=(LINE,)), "STOPPED BY SYNCHRONISATIONS"),
    (scene(0.4, device="cpu", host_other=0.2), "A STEP TOO SMALL FOR ITS LOOP"), (WORLD, "WAITING FOR RANK 1"),
    (resnet50_resident(), "BUSY, NOT FAST: MEMORY-BOUND"), (SLOW, "BUSY, NOT FAST"),
    (with_trace(SLOW, 100.0, {}, {"attention": 50.0}), "BUSY, NOT FAST: ATTENTION"),
    (with_trace(SLOW, 100.0, {}, {"optimizer": 50.0}), "BUSY, NOT FAST: OPTIMIZER"),
], ids=lambda value: value if isinstance(value, str) else "")  # fmt: skip
def test_the_headline(seen: Measurement, words: str) -> None:
    assert title(findings(seen)[0], seen) == words


def test_memory_without_a_rung_left_is_not_called_slow() -> None:
    seen = resnet50_resident()
    (finding,) = findings(seen, ("amp", "layout", "compile"))
    assert title(finding, seen) == "BUSY: MEMORY-BOUND"


@pytest.mark.parametrize(("seen", "enabled", "then", "later"), [
    (resnet50_naive(), (), ("prefetch", "pin"), ("amp", "layout", "compile")),
    (resnet50_naive(), ("pin", "amp"), ("prefetch",), ("layout", "compile")),
    (resnet50_naive(h2d=20.0), (), ("pin", "prefetch"), ("amp", "layout", "compile")),
    (gpt2_naive(), (), ("compile", "fused", "batch"), ()),
    (cifar10_launches(micro_batch=32), (), ("compile", "fused"), ()),
    (on_cpu(data_wait=12.0), (), (), ()),
])  # fmt: skip
def test_what_comes_after_the_fix(seen: Measurement, enabled: tuple[str, ...], then: Any, later: Any) -> None:
    found = findings(seen, enabled)
    assert found[0].patch is not None and next_steps(found, seen, enabled) == (then, later)


@pytest.mark.parametrize("seen", [gpt2_tuned(), on_cpu(), Measurement(), on_cpu(callbacks_logging=20.0),
                                  gpt2_tuned(validation=20.0)])  # fmt: skip
def test_where_nothing_is_to_be_fixed_nothing_comes_after(seen: Measurement) -> None:
    assert next_steps(findings(seen), seen) == ((), ())

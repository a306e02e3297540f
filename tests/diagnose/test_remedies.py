"""What can be switched on: never what is on, never what cannot apply, and always what the configuration takes."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from fastloop.config import from_callback
from fastloop.diagnose.remedies import APPLIES, DOES, TELLING, available, choose, settings, took
from fastloop.ladder import Ladder
from fastloop.measurement import Measurement
from tests.diagnose.scenes import cifar10_launches, gpt2_naive, on_cpu, resnet50_naive, with_trace

RUNGS = [field.name for field in dataclasses.fields(Ladder)]
SPLIT = {"micro_batch": 8, "global_batch": 64}


def test_every_rung_of_the_ladder_is_known_here() -> None:
    assert list(APPLIES) == list(TELLING) == RUNGS and set(DOES) == set(RUNGS) - {"workers"}


@pytest.mark.parametrize("rung", RUNGS)
def test_a_patch_is_one_the_configuration_takes(rung: str) -> None:
    patch = {"rungs": {rung: settings(gpt2_naive(), rung)}}
    config, _ = from_callback(patch)
    assert config.ladder.enabled() == (rung,)


@pytest.mark.parametrize("rung", RUNGS)
def test_what_is_on_is_not_available(rung: str) -> None:
    seen = resnet50_naive(world_size=2, micro_batch=8, global_batch=64)
    assert available(seen, (), rung), "otherwise this tests nothing"
    assert not available(seen, (rung,), rung)


@pytest.mark.parametrize(("rung", "seen"), [
    ("workers", resnet50_naive(loader={"num_workers": 2, "map_style": True})),
    ("workers", resnet50_naive(loader={"num_workers": 0, "map_style": False})), ("pin", on_cpu()),
    ("pin", resnet50_naive(loader={"num_workers": None})), ("pin", resnet50_naive(loader={"pin_memory": True})),
    ("prefetch", on_cpu()), ("batch", cifar10_launches()), ("amp", cifar10_launches()), ("amp", on_cpu()),
    ("amp", gpt2_naive(precision="64-true", peaks={})), ("amp", gpt2_naive(precision=None, peaks={})),
    ("layout", gpt2_naive()), ("layout", resnet50_naive(evidence={"model": {"channels_last": True}})),
    ("fused", resnet50_naive(evidence={"model": {"fused": True}})), ("fused", on_cpu()), ("compile", on_cpu()),
    ("compile", resnet50_naive(evidence={"model": {"compiled": True}})), ("overlap", gpt2_naive()),
    ("compile", with_trace(gpt2_naive(), 9.0, {}, {}, top=[{"name": "triton_red_fused_1"}])),
])  # fmt: skip
def test_what_cannot_apply_is_not_available(rung: str, seen: Measurement) -> None:
    assert not available(seen, (), rung)


@pytest.mark.parametrize("seen", [
    resnet50_naive(), with_trace(resnet50_naive(flops={}), 9.0, {}, {"convolution": 5.0}),
    resnet50_naive(flops={}, evidence={"model": {"convs": 53}}),
], ids=["counted", "traced", "looked at"])  # fmt: skip
def test_convolutions_are_known_from_work_trace_or_model(seen: Measurement) -> None:
    assert available(seen, (), "layout")
    assert not available(resnet50_naive(flops={}), (), "layout"), "not known to have any"


@pytest.mark.parametrize(("micro", "whole", "world", "proposed"), [(8, 64, 1, 64), (8, 64, 2, 32), (4, 256, 1, 32)])
def test_a_micro_batch_grows_up_to_the_step_and_eightfold(micro: int, whole: int, world: int, proposed: int) -> None:
    seen = gpt2_naive(micro_batch=micro, global_batch=whole, world_size=world)
    assert settings(seen, "batch") == {"enabled": True, "micro_batch": proposed}


@pytest.mark.parametrize(("rung", "evidence", "expected"), [
    ("workers", {"loader": {"num_workers": 0}}, False), ("workers", {"loader": {"num_workers": 4}}, True),
    ("pin", {"pin": {"pinned_tensors": 0}}, False), ("prefetch", {"prefetch": {"ahead_batches": 9}}, True),
    ("batch", {"batch": {"changed_steps": 0}}, False), ("amp", {"amp": {"dtype": "torch.float32"}}, False),
    ("amp", {"amp": {"dtype": "torch.bfloat16"}}, True), ("amp", {"amp": {"matmul_precision": "high"}}, True),
    ("amp", {"amp": {"matmul_precision": "highest"}}, False), ("amp", {"amp": {"dtype": None}}, None),
    ("layout", {"layout": {"channels_last_convs": 0}}, False), ("fused", {"fused": {"fused_groups": 2}}, True),
    ("compile", {"compile": {"graphs": 0}}, False), ("compile", {}, None),
    ("overlap", {"overlap": {"gradient_as_bucket_view": False, "bucket_cap_mb": 25}}, False),
])  # fmt: skip
def test_whether_a_rung_took(rung: str, evidence: dict[str, Any], expected: bool | None) -> None:
    assert took(Measurement(evidence=evidence), rung) is expected


def test_the_first_that_is_free_or_all_of_them() -> None:
    seen = resnet50_naive()
    assert choose(seen, (), ("pin", "prefetch"), "-").patch == {"rungs": {"pin": {"enabled": True}}}
    both = choose(seen, (), ("pin", "prefetch"), "-", together=True)
    assert both.patch is not None and list(both.patch["rungs"]) == ["pin", "prefetch"]
    none = choose(on_cpu(), (), ("pin", "prefetch"), "do this")
    assert none == (None, "no rung helps: do this")

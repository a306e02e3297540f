"""Fits of compiled models: their work is counted, and the training is the one it would have been."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fastloop import FastLoop
from tests.bridge.watch.made_up import forget_compiles
from tests.models import Regression, loader, trainer

EAGER = (3 * 2 * 8 * 16 - 2 * 8 * 16) + 3 * 2 * 16
"""Of one sample: the first layer's input needs no gradient."""


def fit(kind: str, config: Any = None, *, watched: bool = True) -> tuple[list[float], dict[str, int], Any]:
    forget_compiles()
    torch.manual_seed(0)
    module = Regression(dropout=0.1)
    if kind == "wrapper":
        module.net = torch.compile(module.net, backend="aot_eager")
    elif kind == "call":
        torch.nn.Module.compile(module.net[0], backend="aot_eager")
    elif kind == "function":
        module.training_step = torch.compile(module.training_step, backend="aot_eager")
    whole: Any = torch.compile(module, backend="aot_eager") if kind == "LightningModule" else module
    loop = FastLoop(config, quiet=True)
    trainer(callbacks=[loop] if watched else []).fit(whole, loader(samples=256, shuffle=True))
    dynamo = torch._dynamo.utils.counters
    stats = {**dynamo["stats"], **dynamo["frames"]}
    forget_compiles()
    return module.losses, stats, loop.measurement


@pytest.mark.parametrize("kind", ["wrapper", "call", "LightningModule", "function"])
def test_a_compiled_model_of_the_users_is_counted_and_left_alone(kind: str) -> None:
    losses, compiled, seen = fit(kind)
    plain = fit(kind, watched=False)
    assert (losses, compiled) == plain[:2], "not one compile more, not another number"
    assert seen.flops["per_sample"] == EAGER and seen.flops["at_least"] is False
    assert "without data" in seen.flops["source"] and seen.tflop_per_s
    # A control: the same model as it is.
    eager = fit("eager")
    assert eager[2].flops["per_sample"] == EAGER and "eager" in eager[2].flops["source"]


def test_a_later_fit_of_compiled_code_is_counted_too() -> None:
    """Its graphs were captured in the first one."""

    class Quiet(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])

    forget_compiles()
    compiled, found = torch.compile(Quiet(), backend="aot_eager"), list[Any]()
    for _ in range(2):
        loop = FastLoop(quiet=True)
        trainer(callbacks=[loop]).fit(compiled, loader(samples=256, shuffle=True))
        assert loop.measurement is not None
        found.append((loop.measurement.flops["per_sample"], torch._dynamo.utils.counters["stats"]["unique_graphs"]))
    assert found[0] == found[1] and found[0][0] == EAGER, "and nothing was compiled again"
    forget_compiles()


def test_a_rung_that_was_not_rehearsed_is_counted_too() -> None:
    config = {"rungs": {"compile": {"enabled": True}}, "rehearsal": "off", "watch": {"warmup_steps": 8}}
    seen = fit("eager", config)[2]
    assert seen.evidence["compile"]["graphs"] == 1
    assert seen.flops["per_sample"] == EAGER and "without data" in seen.flops["source"]


def test_a_rung_that_was_rehearsed_before_the_counted_step_is_counted_as_compiled() -> None:
    """Whether a step may be counted as an eager one was asked before the rehearsal compiled it."""
    seen = fit("eager", {"rungs": {"compile": {"enabled": True}}, "watch": {"warmup_steps": 8}})[2]
    assert seen.evidence["compile"]["graphs"] == 1
    assert seen.flops["per_sample"] == EAGER and "without data" in seen.flops["source"]

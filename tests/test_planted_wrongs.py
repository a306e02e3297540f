"""Known ways to train something else, faster: each fails parity at the gate that is there for it, and its clean twin
does not. What does not show in the loss is shown not to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fastloop.judge import parity
from fastloop.records.experiment import Gate
from fastloop.records.store import decode
from fastloop.records.trial import GradientAnswer
from tests import twins
from tests.twins import Twin, judge_ledgers

SMALL, SPLIT, MERGED = {"batch": {"micro_batch": 3}}, {"batch": {"micro_batch": 4}}, {"batch": {"micro_batch": 32}}


class SkipsEveryTenth(Twin):
    calls = 0

    def backward(self, loss: torch.Tensor, *args: Any, **named: Any) -> None:
        self.calls += 1
        if self.calls % 10:
            super().backward(loss, *args, **named)
        else:
            self.fired += 1


class QuarterInAHook(Twin):
    def __init__(self) -> None:
        super().__init__()
        for parameter in self.parameters():
            parameter.register_hook(self.quarter)

    def quarter(self, gradient: torch.Tensor) -> torch.Tensor:
        self.fired += 1
        return gradient * 0.25


class QuarterRightBeforeTheStep(Twin):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.fired += 1
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.25)


class QuarterWhileClipping(Twin):
    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        QuarterRightBeforeTheStep.on_before_optimizer_step(self, optimizer)  # type: ignore[arg-type]


class ClipsNothing(Twin):
    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        """As the Trainer does without a limit."""


class SchedulerOfTheOldOptimizer(Twin):
    def on_train_start(self) -> None:
        """As a new, faster optimizer is put in place without a word to the scheduler."""
        self.trainer.strategy.optimizers = [torch.optim.AdamW(self.parameters(), lr=1e-2)]
        self.fired += 1


class DetachesALayer(Twin):
    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        self.fired += 1
        return self.second(torch.tanh(self.first(x)).detach())


class DetachesHalfOfALayer(Twin):
    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        self.fired += 1
        out = super().hidden(x)
        return 0.75 * out.detach() + 0.25 * out


class CancelsInBf16(Twin):
    def loss(self, out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.fired += 1
        return ((out + 200).bfloat16() - (y + 200).bfloat16()).pow(2).mean().float()


def permuted() -> Any:
    return twins.shuffled(seed=4)


def swapped_in_a_step() -> Any:
    """Two samples of the first batch change places: the gradient is the same, the order is not."""
    first = list(next(iter(twins.shuffled().batch_sampler)))  # type: ignore[arg-type]
    loader = twins.shuffled()
    order = [index for batch in loader.batch_sampler for index in batch]  # type: ignore[union-attr]
    order[:2] = order[1::-1]
    assert set(order[:8]) == set(first)
    return torch.utils.data.DataLoader(loader.dataset, batch_size=8, sampler=order)


def ledgers(tmp_path: Path, kind: Any = Twin, train: Any = twins.shuffled, **arm: Any) -> tuple[Gate, Any]:
    settings = {key: arm.pop(key) for key in ("accumulate_grad_batches",) if key in arm}
    base, _ = twins.ledger(tmp_path / "base", **settings)
    own, module = twins.ledger(tmp_path / "arm", kind, train, **settings, **arm)
    return judge_ledgers(base, own, regrouped=bool(arm.get("rungs"))), module


def gradients(tmp_path: Path, kind: Any = Twin, base: Any = Twin, **arm: Any) -> tuple[Gate, Any]:
    first, _ = twins.gradient(tmp_path / "base", kind=base)
    own, module = twins.gradient(tmp_path / "arm", tmp_path / "base", kind, **arm)
    return parity.judge_gradient(decode(first, GradientAnswer), decode(own, GradientAnswer), "approximate"), module


# -- wrongs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "step"),
    [({}, 3), ({"accumulate_grad_batches": 1}, 10), ({"rungs": SMALL}, 1), ({"rungs": MERGED}, 10)],
    ids=["accumulated", "one by one", "split", "merged"],
)
def test_every_tenth_backward_skipped(settings: dict[str, Any], step: int, tmp_path: Path) -> None:
    epochs = 4 if settings.get("rungs") is MERGED else 1
    base, _ = twins.ledger(tmp_path / "base", max_epochs=epochs, **{**settings, "rungs": None})
    arm, module = twins.ledger(tmp_path / "arm", SkipsEveryTenth, max_epochs=epochs, **settings)
    gate = judge_ledgers(base, arm, regrouped="rungs" in settings)
    assert module.fired and gate.name == "ledger" and gate.passed is False
    assert gate.detail == {"step": step, "differs": "backwards"} and f"optimizer step {step} " in gate.why


@pytest.mark.parametrize("kind", [QuarterInAHook, QuarterRightBeforeTheStep, QuarterWhileClipping])
def test_gradients_of_a_quarter_the_size(kind: Any, tmp_path: Path) -> None:
    base = ClipsNothing if kind is QuarterWhileClipping else Twin
    gate, module = gradients(tmp_path, kind, base)
    assert module.fired and gate.name == "gradient" and gate.passed is False
    assert gate.deviation == pytest.approx(0.75, abs=1e-6) and gate.limit is not None and gate.limit < 1e-3
    assert parity.sum_up_gates("approximate", [gate]).why.startswith("gradient: ")


@pytest.mark.parametrize("who", ["arm", "base"])
@pytest.mark.parametrize("rungs", [None, SPLIT], ids=["as it is", "in other pieces"])
def test_gradients_that_one_side_clips(who: str, rungs: Any, tmp_path: Path) -> None:
    clip = {"gradient_clip_val": 0.001}
    base, _ = twins.gradient(tmp_path / "base", **(clip if who == "base" else {}))
    arm, _ = twins.gradient(tmp_path / "arm", tmp_path / "base", rungs=rungs, **(clip if who == "arm" else {}))
    gate = parity.judge_gradient(decode(base, GradientAnswer), decode(arm, GradientAnswer), "approximate")
    assert gate.passed is False and f"the {who} clips gradients by norm to 0.001" in gate.why
    assert (gate.deviation or 0) > (0.99 if who == "arm" else 99) and "does not clip" in gate.why


@pytest.mark.parametrize("who", ["arm", "base"])
def test_clipping_that_does_not_bite_is_named(who: str, tmp_path: Path) -> None:
    clip = {"gradient_clip_val": 1e6, "gradient_clip_algorithm": "value"}
    base, _ = twins.gradient(tmp_path / "base", **(clip if who == "base" else {}))
    arm, _ = twins.gradient(tmp_path / "arm", tmp_path / "base", **(clip if who == "arm" else {}))
    gate = parity.judge_gradient(decode(base, GradientAnswer), decode(arm, GradientAnswer), "exact")
    assert gate.passed and gate.deviation == 0 and f"the {who} clips gradients by value to 1e+06" in gate.why
    assert gate.why.endswith("if clipping takes effect in a later step, training differs")


@pytest.mark.parametrize(
    "wrong", [{"kind": QuarterInAHook}, {"gradient_clip_val": 0.001}], ids=["a quarter", "clipped"]
)
def test_which_adamw_hides_from_the_loss(wrong: dict[str, Any]) -> None:
    base, arm = twins.losses(), twins.losses(**wrong)
    assert parity.judge_loss(base, arm, "approximate", bitwise=False, redrawn=False).passed is not False, (
        "the reason for a gradient gate"
    )
    assert base != arm and parity.judge_loss(base, arm, "exact", bitwise=True, redrawn=False).passed is False


@pytest.mark.parametrize("train", [permuted, swapped_in_a_step])
def test_order_permuted(train: Any, tmp_path: Path) -> None:
    gate, _ = ledgers(tmp_path, train=train)
    assert gate.passed is False and gate.detail == {"step": 1, "differs": "samples"}


def test_scheduler_dead(tmp_path: Path) -> None:
    gate, module = ledgers(tmp_path, SchedulerOfTheOldOptimizer)
    assert module.fired and gate.passed is False and gate.detail == {"step": 2, "differs": "rates"}
    assert "learning rates of optimizer step 2 differ" in gate.why and "vs. 0.01" in gate.why


def test_one_layer_detached(tmp_path: Path) -> None:
    gate, module = gradients(tmp_path, DetachesALayer)
    assert (
        module.fired
        and gate.passed is False
        and gate.why == "first.weight, first.bias got no gradient in this arm, but did in the base"
    )


def test_one_layer_detached_under_a_precision_with_a_wide_limit(tmp_path: Path) -> None:
    base, _ = twins.gradient(tmp_path / "base")
    for kind, says in (
        (DetachesALayer, "got no gradient"),
        (DetachesHalfOfALayer, "it nearly vanishes or more than doubles in"),
    ):
        arm, module = twins.gradient(tmp_path / kind.__name__, tmp_path / "base", kind)
        wide = {**base, "precision": "bf16", "rounding": {"bf16": 0.3}}
        gate = parity.judge_gradient(decode(wide, GradientAnswer), decode(arm, GradientAnswer), "approximate")
        assert module.fired and gate.limit == 0.9 and gate.passed is False and says in gate.why


def test_a_bf16_loss_that_cancels(tmp_path: Path) -> None:
    base, _ = twins.gradient(tmp_path / "base")
    arm, module = twins.gradient(tmp_path / "arm", tmp_path / "base", CancelsInBf16)
    rounded = decode({**base, "precision": "bf16"}, GradientAnswer)
    gate = parity.judge_gradient(rounded, decode(arm, GradientAnswer), "approximate")
    assert module.fired and gate.passed is False and (gate.deviation or 0) > 2 * (gate.limit or 0) > 0


# -- and their clean twins --------------------------------------------------------------------------------------------


def test_the_same_once_more_passes_every_gate(tmp_path: Path) -> None:
    ledger, _ = ledgers(tmp_path / "ledgers")
    base, _ = twins.gradient(tmp_path / "base")
    arm, _ = twins.gradient(tmp_path / "arm", tmp_path / "base")
    gradient = parity.judge_gradient(decode(base, GradientAnswer), decode(arm, GradientAnswer), "exact")
    loss = parity.judge_loss(twins.losses(), twins.losses(), "exact", bitwise=True, redrawn=False)
    assert (ledger.passed, gradient.passed, loss.passed) == (True, True, True), (ledger, gradient, loss)
    assert gradient.deviation == 0 and base["self_deviation"] == 0
    assert parity.sum_up_gates("exact", [ledger, gradient, loss]).passed


def test_amp_in_bf16_passes_the_gradient_gate(tmp_path: Path) -> None:
    gate, _ = gradients(tmp_path, rungs={"amp": {"mode": "bf16-mixed"}})
    assert gate.passed and gate.detail["precision"] == "bf16" and 1e-4 < (gate.deviation or 0) < 0.05, gate


@pytest.mark.parametrize(
    ("rungs", "pieces"), [(SMALL, 12), (SPLIT, 8), (MERGED, 1)], ids=["odd pieces", "halves", "merged"]
)
def test_other_micro_batches_pass(rungs: Any, pieces: int, tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    ledger, _ = ledgers(tmp_path / "ledgers", rungs=rungs)
    gradient, module = gradients(tmp_path, rungs=rungs)
    assert ledger.passed and "as many backwards as planned" in ledger.why
    assert gradient.passed and 0 < (gradient.deviation or 0) < 1e-6, gradient
    assert len(module.losses) == 2 * pieces, "an arm makes its step twice"
    assert not [each for each in recwarn if "stopped watching" in str(each.message)]

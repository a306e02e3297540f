"""Steps that lower precision breaks are repeated without it, and training goes on."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from fastloop.bridge.apply.precision_fallback import PrecisionFallback
from tests.bridge.apply.rehearse import test_rehearsal
from tests.bridge.apply.rehearse.test_rehearsal import Module, config, data, fit, read

_own_cache = test_rehearsal._own_cache


class Counts(Module):
    """Computes an accuracy with numpy, from some step on; and one in validation if asked."""

    def __init__(self, at: int = 0, validates: bool = False) -> None:
        super().__init__()
        self.at, self.validates, self.counted = at, validates, 0

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        out = self.net(batch[0], scale=None)
        if self.trainer.global_step >= self.at:
            self.count(out)
        loss = torch.nn.functional.mse_loss(out, batch[1])
        self.losses.append(float(loss.detach()))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        out = self.net(batch[0])
        if self.validates:
            self.count(out)

    def count(self, out: torch.Tensor) -> None:
        self.counted += int((out.detach().cpu().numpy() > 0).sum() >= 0)


def fit_with(module: Module, rungs: tuple[str, ...] = ("amp",), **settings: Any) -> Any:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loop, _, seen = fit(config(*rungs) if rungs else None, module, **settings)
    return loop, seen, [text for each in caught if "is off from here on" in (text := str(each.message))]


def test_a_first_step_that_fails_leaves_no_trace() -> None:
    _, plain, _ = fit_with(Counts(), ())
    loop, ours, said = fit_with(Counts())
    took, why = read(loop)
    assert took is False and why.startswith("a step failed with it: TypeError: ") and "BFloat16" in why
    assert why.endswith("the step was repeated without it")
    assert len(said) == 1 and said[0].startswith("fastloop: amp is off from here on: a step failed with it")
    assert ours == plain, "losses, weights, optimizer, random numbers and the module's own counters"


def test_without_the_fallback_training_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PrecisionFallback, "run", lambda self, call, *args, **named: call(*args, **named))
    with pytest.raises(TypeError, match="BFloat16"):
        fit_with(Counts())


def test_a_later_step_that_fails_is_repeated() -> None:
    module = Counts(at=6)
    loop, _, said = fit_with(module)
    assert len(said) == 1 and read(loop)[0] is False
    assert module.trainer.global_step == 12 and len(module.losses) == 12 and module.counted == 6
    assert loop.plan.step("amp").has_acted, "five steps ran with it"


def test_a_validation_that_fails_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Counts(at=100, validates=True)
    monkeypatch.setattr(module, "val_dataloader", data, raising=False)
    loop, _, said = fit_with(module, num_sanity_val_steps=0, val_check_interval=6)
    assert len(said) == 1 and read(loop)[0] is False
    assert module.trainer.global_step == 12 and module.counted == 12


def test_other_errors_are_the_users_own() -> None:
    class Fails(Counts):
        def count(self, out: torch.Tensor) -> None:
            raise TypeError("another error")

    module = Fails()
    with pytest.raises(TypeError, match="another error"):
        fit_with(module)
    assert module.losses == []

    class Narrow(Counts):
        def count(self, out: torch.Tensor) -> None:
            raise TypeError("no BFloat16 here")

    with pytest.raises(TypeError, match="no BFloat16 here"):  # without the rung, and again where it did not help
        fit_with(Narrow(), ("fused",))
    with pytest.raises(TypeError, match="no BFloat16 here"):
        fit_with(Narrow(at=1))


def test_a_step_that_works_is_run_once() -> None:
    module = Counts(at=100)
    loop, _, said = fit_with(module)
    assert read(loop)[0] is True and said == [] and len(module.losses) == 12

"""Steps that lower precision breaks are repeated without it, and training goes on."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from fastloop.bridge.apply.precision_fallback import PrecisionFallback
from fastloop.errors import FastLoopError
from tests.bridge.apply.rehearse.test_rehearsal import Module, config, data, fit, read


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


def switch(*rungs: str, **more: Any) -> Any:
    settings = config(*rungs)
    for rung, keys in more.items():
        settings["rungs"][rung] |= keys
    return settings


def fit_with(module: Module, rungs: tuple[str, ...] = ("amp",), **settings: Any) -> Any:
    more = settings.pop("config", {})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loop, _, seen = fit(switch(*rungs, **more) if rungs else None, module, **settings)
    return loop, seen, [text for each in caught if "is now off" in (text := str(each.message))]


def test_a_first_step_that_fails_leaves_no_trace() -> None:
    _, plain, _ = fit_with(Counts(), ())
    loop, ours, said = fit_with(Counts())
    took, why = read(loop)
    assert took is False and why.startswith("a step failed with it: TypeError: ") and "BFloat16" in why
    assert why.endswith("the step was repeated without it")
    assert len(said) == 1 and said[0].startswith("fastloop: amp is now off: a step failed with it")
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


class Own(torch.autograd.Function):
    """A product whose backward needs both factors in one type."""

    @staticmethod
    def forward(context: Any, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        context.save_for_backward(first, second)
        return first.to(second.dtype) @ second

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> Any:
        first, second = context.saved_tensors
        return gradients[0] @ second.T, first.T @ gradients[0]


class Backward(Module):
    """Fails in the backward, from some step on."""

    def __init__(self, at: int = 0) -> None:
        super().__init__()
        self.at, self.hooks = at, 0

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        out = self.net(batch[0], scale=None)
        if self.trainer.global_step >= self.at:
            out = Own.apply(out, torch.eye(out.shape[1]))  # type: ignore[no-untyped-call]
        loss = torch.nn.functional.mse_loss(out, batch[1])
        self.losses.append(float(loss.detach()))
        self.log("steps", 1.0, on_step=False, on_epoch=True, reduce_fx="sum")
        return loss

    def on_before_backward(self, loss: torch.Tensor) -> None:
        self.hooks += 1

    def on_after_backward(self) -> None:
        self.hooks += 1


@pytest.mark.parametrize("accumulated", [1, 2])
def test_a_first_backward_that_fails_is_repeated(accumulated: int) -> None:
    steps = 12 // accumulated
    plain, ours = Backward(), Backward()
    _, wanted, _ = fit_with(plain, (), steps=steps, accumulate_grad_batches=accumulated)
    loop, got, said = fit_with(ours, steps=steps, accumulate_grad_batches=accumulated)
    took, why = read(loop)
    assert took is False and why.startswith("a backward failed with it: RuntimeError: ") and "BFloat16" in why
    assert len(said) == 1 and got == wanted, "losses, weights, optimizer, random numbers and counters"
    assert ours.hooks == plain.hooks and ours.trainer.logged_metrics == plain.trainer.logged_metrics, "nothing twice"


def test_a_later_backward_that_fails_names_the_rung() -> None:
    module = Backward(at=6)
    with pytest.raises(FastLoopError, match="a backward that fails in lower precision: RuntimeError") as caught:
        fit_with(module)
    assert caught.value.do == "write rungs.amp.enabled: false" and type(caught.value.__cause__) is RuntimeError
    assert module.trainer.global_step == 6


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


@pytest.mark.parametrize("changes", ["writes", "takes"])
def test_a_step_that_has_changed_its_batch_is_not_repeated(changes: str) -> None:
    class Changes(Counts):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if changes == "writes":
                batch[1].mul_(10)
            else:
                batch.append(batch[0] + 1)
            return super().training_step(batch, batch_idx)

    with pytest.raises(TypeError, match="BFloat16"):
        fit_with(Changes())


class Steps(Counts):
    """Optimizes by hand, and fails after the optimizer's step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        out = self.net(batch[0])
        loss = torch.nn.functional.mse_loss(out, batch[1])
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        self.count(out)
        return loss


def test_steps_that_cannot_be_made_twice_are_not_repeated() -> None:
    with pytest.raises(TypeError, match="BFloat16"):
        fit_with(Steps())
    with pytest.raises(TypeError, match="ScalarType Half"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "numpy", _refuse_half)
        fit_with(Counts(), config={"amp": {"mode": "16-mixed"}})


def _refuse_half(_tensor: Any) -> Any:
    raise TypeError("Got unsupported ScalarType Half")


@pytest.mark.parametrize("kept", [torch.eye(4).to_sparse_csr(), torch.nested.nested_tensor([torch.ones(2)])])
def test_state_that_cannot_be_saved_ends_no_training(kept: Any) -> None:
    module = Counts(at=100)
    object.__setattr__(module, "kept", kept)
    loop, _, said = fit_with(module)
    assert read(loop)[0] is True and not said and len(module.losses) == 12


def test_the_first_validation_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it has counted would count twice."""

    class Adds(Counts):
        def __init__(self) -> None:
            super().__init__(at=100, validates=True)
            self.register_buffer("total", torch.zeros(()))

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.total += 1
            super().validation_step(batch, batch_idx)

    module = Adds()
    monkeypatch.setattr(module, "val_dataloader", data, raising=False)
    fit_with(module, num_sanity_val_steps=0, val_check_interval=6)
    assert float(module.total) == 12


class Collects(Module):
    """Computes what it can only compute at an epoch's end, with numpy: how scripts use scikit-learn."""

    def __init__(self) -> None:
        super().__init__()
        self.trained: list[Any] = []
        self.outs: list[Any] = []
        self.computed = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        out = self.net(batch[0], scale=None)
        self.trained.append({"out": out.detach()})
        return {"loss": torch.nn.functional.mse_loss(out, batch[1]), "out": out}

    def validation_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.outs.append(out := self.net(batch[0]))
        return out

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.computed += len(outputs["out"].detach().numpy())

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.computed += len(outputs.numpy())

    def on_train_epoch_end(self) -> None:
        self.computed += len(torch.cat([each["out"] for each in self.trained]).numpy())

    def on_validation_epoch_end(self) -> None:
        self.computed += len(torch.cat(self.outs).numpy())
        self.outs.clear()

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.net(batch[0])


@pytest.mark.parametrize("by_hand", [False, True])
def test_outputs_that_are_computed_with_numpy_later(by_hand: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Collects, "val_dataloader", lambda self: data(16), raising=False)
    if by_hand:
        monkeypatch.setattr(PrecisionFallback, "_find_rung", lambda self: None)  # the control: nothing is widened
        with pytest.raises(TypeError, match="BFloat16"):
            fit_with(Collects())
        return
    plain, module = Collects(), Collects()
    fit_with(plain, ())
    loop, _, said = fit_with(module)
    assert read(loop)[0] is True and said == [] and module.computed == plain.computed > 0

"""The fused rung: the user's own optimizer object, flipped in place and flipped back."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning, ModelCheckpoint

from fastloop.errors import NotApplicable
from fastloop.records.facts import Facts
from fastloop.records.measurement import Measurement
from fastloop.rungs.fused import Fused
from tests import models
from tests.rungs.fits import Raises, evidence, fit, loop, same, seeded, verdict

FUSED: dict[str, Any] = {"fused": {}}
SGD, ADAM, ADAMW, ADAGRAD = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad


class Tuned(models.Regression):
    """Optimizer settings to choose, and a schedule that moves the learning rate at each step."""

    def __init__(self, kind: Any = ADAMW, schedule: bool = False, lr: float = 0.05, **settings: Any) -> None:
        super().__init__(lr=lr)
        self.kind, self.schedule, self.settings = kind, schedule, settings
        self.rates: list[float] = []

    def configure_optimizers(self) -> Any:
        optimizer = self.kind(self.parameters(), lr=self.lr, **self.settings)
        if not self.schedule:
            return optimizer
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])


class Twice(models.Regression):
    """Two optimizers, in manual optimization."""

    def __init__(self, second: Any = ADAM) -> None:
        super().__init__()
        self.automatic_optimization, self.second = False, second

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return SGD(self.net[0].parameters(), lr=0.01), self.second(self.net[3].parameters(), lr=0.01)


class Home(SGD):
    """A user's own optimizer."""


def flags(optimizer: Any) -> list[tuple[Any, Any]]:
    return [(group["fused"], group["foreach"]) for group in [*optimizer.param_groups, optimizer.defaults]]


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({}, None),
        ({"device": "cuda"}, None),
        ({"precision": "bf16-mixed"}, None),
        ({"precision": "bf16-true"}, None),
        ({"precision": "16-mixed"}, None),
        ({"device": "mps"}, "no fused optimizers on mps"),
    ],
)
def test_plan(facts: dict[str, Any], reason: str | None) -> None:
    if reason is not None:
        with pytest.raises(NotApplicable) as refused:
            Fused(enabled=True).plan(Facts(**facts))
        assert str(refused.value) == reason
        return
    change = Fused(enabled=True).plan(Facts(**facts))
    assert [(action.keys, action.when) for action in change.actions] == [(("optimizer.fused",), "train_start")]
    assert change.parity == "approximate" and not change.evaluation and not change.wants


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (SGD, {}),
        (SGD, {"momentum": 0.9, "nesterov": True}),
        (ADAM, {}),
        (ADAMW, {"amsgrad": True}),
        (ADAGRAD, {}),
    ],
)
def test_takes(kind: Any, settings: dict[str, Any]) -> None:
    seen = []

    class Look(L.Callback):
        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            seen.append(flags(optimizer))

    watcher, _ = fit(FUSED, seeded(Tuned, kind=kind, **settings), callbacks=(Look(),))
    assert seen == 8 * [2 * [(True, False)]]
    assert evidence(watcher, "fused") == {"groups": 1, "fused_groups": 1, "steps": 8}
    assert verdict(watcher, "fused").took is True
    assert verdict(watcher, "fused").why == "1 of 1 parameter groups fused, 8 optimizer steps ran this way"


def test_does_not_take_without_a_step() -> None:
    class Idle(Twice):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            return None

    watcher, _ = fit(FUSED, seeded(Idle))
    assert verdict(watcher, "fused").took is False
    assert verdict(watcher, "fused").why == "2 of 2 parameter groups fused, 0 optimizer steps ran this way"

    class TakesItBack(L.Callback):
        def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
            trainer.optimizers[0].param_groups[0]["fused"] = None

    watcher, _ = fit(FUSED, seeded(Tuned), callbacks=(TakesItBack(),))
    assert verdict(watcher, "fused").took is False
    assert verdict(watcher, "fused").why.startswith("0 of 1 parameter groups fused")
    assert Fused().verify(Measurement()).took is None


def test_optimizers_that_are_made_anew_are_named() -> None:
    """The reason said that steps ran fused, and that no group is."""

    class Anew(Tuned):
        def on_train_epoch_start(self) -> None:
            if self.current_epoch == 1:
                self.trainer.strategy.setup_optimizers(self.trainer)

    watcher, _ = fit(FUSED, seeded(Anew), max_epochs=2)
    assert verdict(watcher, "fused").took is False
    why = "8 steps were fused, then your code recreated the optimizers: 0 of 1 parameter groups are fused now"
    assert verdict(watcher, "fused").why == why


class Transposed(Tuned):
    """Replaces a gradient by one of the other memory order."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        weight = self.net[0].weight
        weight.grad = weight.grad.T.contiguous().T


@pytest.mark.parametrize("kind", [SGD, ADAMW])
def test_a_gradient_of_another_layout_makes_the_same_update(kind: Any) -> None:
    """Fused kernels go through memory: each number of the gradient updated another weight."""
    ours, plain = seeded(Transposed, kind=kind), seeded(Transposed, kind=kind)
    watcher, _ = fit(FUSED, ours)
    fit(None, plain)
    assert verdict(watcher, "fused").took is True
    assert models.distance(models.weights(plain), models.weights(ours)) < 1e-5


def test_sparse_gradients_of_a_function_are_left_to_torch() -> None:
    """They ended the training."""

    class Sparse(Tuned):
        def __init__(self) -> None:
            super().__init__(kind=SGD)
            self.table = torch.nn.Parameter(torch.randn(4, 1))

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            rows = torch.nn.functional.embedding(torch.tensor([0, 2]), self.table, sparse=batch_idx > 2)
            return super().training_step(batch, batch_idx) + rows.square().sum()

    ours, plain = seeded(Sparse), seeded(Sparse)
    watcher, trainer = fit(FUSED, ours)
    fit(None, plain)
    assert models.distance(models.weights(plain), models.weights(ours)) < 1e-5
    assert verdict(watcher, "fused").took is False
    assert verdict(watcher, "fused").why == (
        "0 of 1 parameter groups fused, 3 optimizer steps ran this way; "
        "torch's usual update took over: a gradient is sparse, which fused kernels do not support"
    )
    assert flags(trainer.optimizers[0]) == 2 * [(None, None)]


REFUSED: list[tuple[Any, str]] = [
    (lambda: seeded(Tuned, kind=torch.optim.RMSprop), "RMSprop has no fused form"),
    (lambda: seeded(Tuned, kind=Home), "Home has no fused form"),
    (lambda: seeded(Tuned, fused=True), "AdamW was created with fused=True; your choice stands"),
    (lambda: seeded(Tuned, fused=False), "AdamW was created with fused=False; your choice stands"),
    (lambda: seeded(Tuned, foreach=True), "AdamW was created with foreach=True; your choice stands"),
    (lambda: seeded(Tuned, foreach=False), "AdamW was created with foreach=False; your choice stands"),
    (lambda: seeded(Twice, second=torch.optim.RMSprop), "RMSprop has no fused form"),
]


@pytest.mark.parametrize(("module", "reason"), REFUSED, ids=[reason for _, reason in REFUSED])
def test_what_the_user_chose_stands(module: Any, reason: str) -> None:
    ours, plain = module(), module()
    watcher, trainer = fit(FUSED, ours)
    _, without = fit(None, plain)
    assert (verdict(watcher, "fused").took, verdict(watcher, "fused").why) == (False, reason)
    assert same(models.weights(ours), models.weights(plain))
    assert [str(optimizer) for optimizer in trainer.optimizers] == [str(optimizer) for optimizer in without.optimizers]


def flip(optimizer: Any, module: torch.nn.Module | None = None, device: str = "cpu") -> Any:
    """Run the rung's action on one optimizer."""
    site = SimpleNamespace(optimizers=[optimizer], module=module or torch.nn.Module(), facts=Facts(device=device))
    return Fused(enabled=True).plan(Facts()).actions[0].do(site)


@pytest.mark.parametrize(
    ("optimizer", "device", "module", "reason"),
    [
        (lambda p: ADAGRAD([p]), "cuda", None, "Adagrad has no fused form on cuda"),
        (
            lambda p: SGD([p]),
            "cpu",
            torch.nn.Sequential(torch.nn.Embedding(2, 2, sparse=True)),
            "0 produces sparse gradients, which fused optimizers do not support",
        ),
        (
            lambda p: ADAM([p], capturable=True),
            "cpu",
            None,
            "Adam was created with capturable=True; your choice stands",
        ),
        (
            lambda p: SGD([p], differentiable=True),
            "cpu",
            None,
            "SGD was created with differentiable=True; your choice stands",
        ),
        (
            lambda p: ADAM([p.to(torch.complex64)]),
            "cpu",
            None,
            "Adam has parameters that are not real floating point",
        ),
    ],
)
def test_what_fused_kernels_cannot_do_is_refused(optimizer: Any, device: str, module: Any, reason: str) -> None:
    made = optimizer(torch.zeros(1))
    before = flags(made)
    with pytest.raises(NotApplicable) as refused:
        flip(made, module, device)
    assert str(refused.value) == reason and flags(made) == before


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (SGD, {}),
        (SGD, {"momentum": 0.9}),
        (ADAM, {}),
        (ADAMW, {}),
        (ADAGRAD, {}),
    ],
)
def test_parity(kind: Any, settings: dict[str, Any]) -> None:
    def trained(rungs: Any, lr: float = 0.05, **more: Any) -> Any:
        module = seeded(Tuned, kind=kind, schedule=True, lr=lr, **settings)
        fit(rungs, module, max_epochs=3, **more)
        return module

    ours, plain = trained(FUSED), trained(None)
    assert ours.rates == plain.rates and ours.rates[-1] < ours.rates[0]  # the schedule holds the same optimizer
    assert models.distance(models.weights(plain), models.weights(ours)) < 1e-5
    wrong = trained(FUSED, lr=0.0501)
    assert models.distance(models.weights(plain), models.weights(wrong)) > 1e-5


@pytest.mark.parametrize("settings", [{"gradient_clip_val": 0.05}, {"precision": "bf16-mixed"}])
def test_parity_with_clipping_and_with_mixed_precision(settings: dict[str, Any]) -> None:
    plain, ours = seeded(Tuned), seeded(Tuned)
    fit(None, plain, **settings)
    watcher, _ = fit(FUSED, ours, **settings)
    assert verdict(watcher, "fused").took is True
    assert models.distance(models.weights(plain), models.weights(ours)) < 1e-5
    without = seeded(Tuned)
    fit(None, without)
    assert models.distance(models.weights(plain), models.weights(without)) > 1e-5  # the setting matters


class Clipped(Tuned):
    """Notes the norm of the gradients that each step gets."""

    def configure_optimizers(self) -> Any:
        self.norms: list[float] = []
        optimizer = super().configure_optimizers()
        optimizer.register_step_pre_hook(lambda *_: self.norms.append(self.norm()))
        return optimizer

    def norm(self) -> float:
        return float(torch.nn.utils.get_total_norm([each.grad for each in self.parameters() if each.grad is not None]))


@pytest.mark.parametrize("mode", ["bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("by_user", [False, True])
def test_clipping_under_mixed_precision_has_the_same_norm(mode: str, by_user: bool) -> None:  # P5
    """By our flip, and of an optimizer that its user made fused: Lightning refuses to clip for those."""
    amp = {"amp": {"mode": mode}}
    plain, ours, free = seeded(Clipped), seeded(Clipped, **({"fused": True} if by_user else {})), seeded(Clipped)
    fit(amp, plain, gradient_clip_val=0.05)
    watcher, trainer = fit(amp if by_user else {**amp, "fused": {}}, ours, gradient_clip_val=0.05)
    fit(amp, free)
    assert verdict(watcher, "amp").took is True and (by_user or verdict(watcher, "fused").took is True)
    # A step that a loss scaler leaves out is made, and left out inside, where the user's own optimizer is fused.
    norms = [norm for norm in ours.norms if norm == norm]
    assert norms == pytest.approx(plain.norms, rel=1e-3) and max(norms) < 0.0501 < max(free.norms)
    assert models.distance(models.weights(plain), models.weights(ours)) < 1e-3
    assert trainer.optimizers[0].param_groups[0]["fused"] is (True if by_user else None)


def test_a_step_of_infinite_gradients_is_left_out() -> None:
    """By the loss scaler, clipped and fused as without."""

    class Overflows(Tuned):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = super().training_step(batch, batch_idx)
            return loss * float("inf") if batch_idx == 3 else loss

    def train(*rungs: str) -> tuple[Any, float]:
        module = seeded(Overflows)
        settings: dict[str, Any] = {name: {} for name in rungs}
        amp = {"amp": {"mode": "16-mixed"}}
        scales: list[float] = []

        class Look(L.Callback):
            def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
                scales.append(trainer.precision_plugin.scaler.get_scale())

        fit({**amp, **settings}, module, callbacks=(Look(),), gradient_clip_val=0.05)
        assert scales[3] == scales[2] / 2, "the scaler saw it"
        return module, scales[-1]

    (plain, scale), (ours, our_scale) = train(), train("fused")
    assert our_scale == scale and all(torch.isfinite(each).all() for each in ours.parameters())
    assert models.distance(models.weights(plain), models.weights(ours)) < 1e-3


def test_a_loss_scaler_unscales_before_hooks_see_gradients() -> None:
    class Norms(Tuned):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.norms = [*getattr(self, "norms", []), float(self.net[0].weight.grad.norm())]

    ours, plain = seeded(Norms), seeded(Norms)
    watcher, _ = fit({"amp": {"mode": "16-mixed"}, "fused": {}}, ours)
    fit({"amp": {"mode": "16-mixed"}}, plain)
    assert verdict(watcher, "fused").took is True
    assert ours.norms == pytest.approx(plain.norms, rel=1e-2) and max(plain.norms) < 100
    assert models.distance(models.weights(plain), models.weights(ours)) < 1e-3


def test_undo() -> None:
    watcher, module = loop(FUSED), seeded(Tuned)
    trainer = models.trainer(callbacks=[watcher])
    trainer.fit(module, models.loader())
    optimizer = trainer.optimizers[0]
    assert flags(optimizer) == 2 * [(None, None)]
    assert not optimizer._optimizer_step_post_hooks and not hasattr(optimizer, "_step_supports_amp_scaling")
    fresh = seeded(Tuned).configure_optimizers()
    assert vars(optimizer).keys() == vars(fresh).keys()
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, models.loader())
    assert verdict(watcher, "fused").took is True and flags(trainer.optimizers[0]) == 2 * [(None, None)]

    watcher = loop(FUSED)
    trainer = models.trainer(callbacks=[watcher, Raises()])
    with pytest.raises(RuntimeError, match="planted"):
        trainer.fit(seeded(Tuned), models.loader())
    assert flags(trainer.optimizers[0]) == 2 * [(None, None)] and verdict(watcher, "fused").took is True


def test_step_counters_go_to_the_parameters_device_and_back() -> None:
    class Counter:
        """Stands for a step tensor on a machine with a GPU."""

        def __init__(self, device: str) -> None:
            self.device = device

        def to(self, device: Any) -> Counter:
            return Counter(str(device))

    parameter = torch.nn.Parameter(torch.zeros(2, device="meta"))
    optimizer = ADAM([parameter])
    optimizer.state[parameter] = {"step": Counter("cpu"), "exp_avg": torch.zeros(2)}
    applied = flip(optimizer)
    assert optimizer.state[parameter]["step"].device == "meta"
    applied.undo()
    applied.undo()
    assert optimizer.state[parameter]["step"].device == "cpu"


@pytest.mark.parametrize(("first", "then"), [(None, FUSED), (FUSED, None), (FUSED, FUSED)])
def test_checkpoints_go_both_ways(tmp_path: Path, first: Any, then: Any) -> None:
    def resumed(folder: Path, first: Any, then: Any, lr: float = 0.05) -> tuple[Any, dict[str, Any], Any]:
        keeper = ModelCheckpoint(dirpath=folder, save_last=True)
        fit(first, seeded(Tuned, schedule=True, lr=lr), callbacks=(keeper,), enable_checkpointing=True)
        module = seeded(Tuned, schedule=True)
        keeper = ModelCheckpoint(dirpath=folder)
        watcher, trainer = fit(
            then, module, ckpt=folder / "last.ckpt", callbacks=(keeper,), enable_checkpointing=True, max_epochs=3
        )
        return module, torch.load(folder / "last.ckpt", weights_only=False), (watcher, trainer)

    plain, plain_file, _ = resumed(tmp_path / "plain", None, None)
    ours, file, (watcher, trainer) = resumed(tmp_path / "ours", first, then)
    group, plain_group = (f["optimizer_states"][0]["param_groups"] for f in (file, plain_file))
    assert group == plain_group and group[0]["fused"] is None and group[0]["foreach"] is None
    assert ours.rates == plain.rates
    assert models.distance(models.weights(plain), models.weights(ours)) < 1e-5
    assert flags(trainer.optimizers[0]) == 2 * [(None, None)]
    if then is not None:
        assert verdict(watcher, "fused").took is True
    other, _, _ = resumed(tmp_path / "other", first, then, lr=0.06)
    assert models.distance(models.weights(plain), models.weights(other)) > 1e-5


class Thaw(BaseFinetuning):
    """Trains the first layer from the second epoch on."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.net[0])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.net[0], optimizer)


def test_layers_that_a_callback_unfreezes_are_trained_as_without_us() -> None:
    """They are in the optimizer from the start, but have no momentum when all others do."""
    ours, plain = (seeded(Tuned, kind=SGD, momentum=0.9) for _ in range(2))
    watcher, _ = fit(FUSED, ours, callbacks=(Thaw(),), max_epochs=3)
    fit(None, plain, callbacks=(Thaw(),), max_epochs=3)
    assert evidence(watcher, "fused") == {"groups": 1, "fused_groups": 1, "steps": 24}
    assert models.distance(models.weights(plain), models.weights(ours)) < 1e-5
    frozen = seeded(Tuned, kind=SGD, momentum=0.9)
    fit(None, frozen, max_epochs=3)
    assert models.distance(models.weights(frozen), models.weights(ours)) > 1e-5


def test_groups_that_a_callback_adds_are_fused_and_put_back() -> None:
    class Frozen(Tuned):
        def configure_optimizers(self) -> Any:
            return ADAMW([p for p in self.parameters() if p.requires_grad], lr=0.05)

    ours, plain = seeded(Frozen), seeded(Frozen)
    watcher, trainer = fit(FUSED, ours, callbacks=(Thaw(),), max_epochs=3)
    fit(None, plain, callbacks=(Thaw(),), max_epochs=3)
    assert evidence(watcher, "fused") == {"groups": 2, "fused_groups": 2, "steps": 24}
    assert flags(trainer.optimizers[0]) == 3 * [(None, None)]
    assert models.distance(models.weights(plain), models.weights(ours)) < 1e-5


def test_several_optimizers_are_fused_together() -> None:
    ours, plain = seeded(Twice), seeded(Twice)
    watcher, trainer = fit(FUSED, ours)
    fit(None, plain)
    assert evidence(watcher, "fused") == {"groups": 2, "fused_groups": 2, "steps": 16}
    assert models.distance(models.weights(plain), models.weights(ours)) < 1e-5
    assert [flags(optimizer) for optimizer in trainer.optimizers] == 2 * [2 * [(None, None)]]

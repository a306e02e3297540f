"""The amp rung: precision through Lightning's own plugin, proven inside training_step."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision, Precision

from fastloop.config.loading import from_callback
from fastloop.errors import ConfigError, NotApplicable
from fastloop.records.facts import Facts
from fastloop.records.measurement import Measurement
from fastloop.rungs.amp import Amp
from tests import models
from tests.rungs.fits import Raises, evidence, fit, loop, same, seeded, verdict

BF16: dict[str, Any] = {"amp": {}}
FP16: dict[str, Any] = {"amp": {"mode": "16-mixed"}}
STANDS = "the Trainer already runs precision {}; your choice stands"


class Autocasting(models.Regression):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    ("mode", "facts", "wants"),
    [
        ("bf16-mixed", {}, {"precision.plugin": "bf16-mixed"}),
        ("16-mixed", {}, {"precision.plugin": "16-mixed"}),
        ("16-mixed", {"device": "cuda", "compute_capability": (7, 0)}, {"precision.plugin": "16-mixed"}),
        ("bf16-mixed", {"own_precision": True, "precision": "16-mixed"}, STANDS.format("16-mixed")),
        ("tf32", {"own_precision": True, "precision": "64-true"}, STANDS.format("64-true")),
        (
            "bf16-mixed",
            {"autocasts": ("Net.training_step",)},
            "Net.training_step enters autocast itself; precision has one owner",
        ),
        (
            "bf16-mixed",
            {"plain_gradients": False, "strategy": "FSDPStrategy"},
            "FSDPStrategy has its own precision handling; write Trainer(precision=…) instead",
        ),
        ("bf16-mixed", {"device": "mps"}, "mixed precision is not tested on mps"),
        ("tf32", {}, "tf32 needs CUDA; this run is on cpu"),
        (
            "tf32",
            {"device": "cuda", "compute_capability": (7, 5), "device_name": "T4"},
            "T4 has no TF32 (compute capability 8.0 and later have)",
        ),
        ("tf32", {"device": "cuda", "compute_capability": (9, 0)}, {}),
    ],
)
def test_plan(mode: Any, facts: dict[str, Any], wants: dict[str, str] | str) -> None:
    rung = Amp(enabled=True, mode=mode)
    if isinstance(wants, str):
        with pytest.raises(NotApplicable) as reason:
            rung.plan(Facts(**facts))
        assert str(reason.value) == wants
        return
    change = rung.plan(Facts(**facts))
    assert dict(change.wants) == wants
    assert change.parity == "approximate" and change.evaluation
    assert [key for action in change.actions for key in action.keys] == ([] if wants else ["torch.matmul_precision"])
    assert [action.when for action in change.actions] == ["model"]
    assert dict(change.facts) == ({"precision": mode} if wants else {})


def test_an_emulating_gpu_is_noted() -> None:
    old = Facts(device="cuda", compute_capability=(7, 5), device_name="T4")
    assert Amp(enabled=True).plan(old).notes == ("T4 only emulates bfloat16: slower; 16-mixed suits it",)
    assert Amp(enabled=True, mode="16-mixed").plan(old).notes == ()


@pytest.mark.parametrize(
    ("mode", "shown", "cure"),
    [
        ("fp8", "'fp8'", "write one of bf16-mixed, 16-mixed, tf32"),
        ("amp", "'amp'", "write one of bf16-mixed, 16-mixed, tf32"),
        (True, "true", "write one of bf16-mixed, 16-mixed, tf32"),
        ("bf16", "'bf16'", "write bf16-mixed"),
    ],
)
def test_unknown_modes_are_config_errors(mode: Any, shown: str, cure: str) -> None:  # P2
    with pytest.raises(ConfigError) as error:
        from_callback({"rungs": {"amp": {"enabled": True, "mode": mode}}})
    assert error.value.got.startswith(f"rungs.amp.mode: {shown}")
    assert "it must be one of bf16-mixed, 16-mixed, tf32" in error.value.why
    assert error.value.do == cure


def test_takes() -> None:
    watcher, _ = fit(BF16, seeded())
    assert evidence(watcher, "amp")["dtype"] == "torch.bfloat16"
    assert verdict(watcher, "amp").took is True
    assert verdict(watcher, "amp").why == "matrix products in training_step ran in torch.bfloat16"

    class TakesItBack(L.Callback):
        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            trainer.strategy.precision_plugin = Precision()

    watcher, _ = fit(BF16, seeded(), callbacks=(TakesItBack(),))
    assert verdict(watcher, "amp").took is False
    assert verdict(watcher, "amp").why == "matrix products in training_step ran in torch.float32"


def test_float16_on_the_cpu_is_float16() -> None:  # P1: through Lightning's flag it silently becomes bf16
    seen = []

    class Look(L.Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            seen.append((trainer.precision_plugin.scaler.is_enabled(), trainer.precision_plugin.scaler.get_scale()))

    watcher, _ = fit(FP16, seeded(), callbacks=(Look(),))
    assert verdict(watcher, "amp").why == "matrix products in training_step ran in torch.float16"
    assert verdict(watcher, "amp").took is True
    assert seen and all(enabled and scale > 1 for enabled, scale in seen)


def test_verify_needs_a_training_step() -> None:
    assert Amp().verify(Measurement()).took is None
    tf32 = Amp(mode="tf32")
    assert tf32.verify(Measurement()).took is None
    assert tf32.verify(Measurement(evidence={"amp": {"matmul_precision": "high"}})).took is True
    assert tf32.verify(Measurement(evidence={"amp": {"matmul_precision": "highest"}})).took is False


def test_parity() -> None:
    def weights(rungs: Any, lr: float = 0.05, **settings: Any) -> dict[str, torch.Tensor]:
        module = seeded(lr=lr)
        fit(rungs, module, max_epochs=3, **settings)
        return models.weights(module)

    ours = weights(BF16)
    assert same(ours, weights(None, precision="bf16-mixed"))
    plain = weights(None)
    assert not same(ours, plain)  # the comparison can fail
    assert models.distance(plain, ours) < 0.02  # approximate: the mathematics of fp32
    assert models.distance(plain, weights(BF16, lr=0.06)) > 0.02
    plugin = MixedPrecision("16-mixed", "cpu")
    assert same(weights(FP16), weights(None, plugins=[plugin]))


def test_undo() -> None:
    module = seeded()
    watcher = loop(BF16)
    trainer = models.trainer(callbacks=[watcher], max_epochs=1)
    before = trainer.precision_plugin
    trainer.fit(module, models.loader())
    assert trainer.precision_plugin is before and type(before) is Precision
    assert "training_step" not in vars(module)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, models.loader())  # a second fit is as good as the first
    assert verdict(watcher, "amp").took is True and trainer.precision_plugin is before

    watcher = loop(BF16)
    trainer = models.trainer(callbacks=[watcher, Raises()])
    with pytest.raises(RuntimeError, match="planted"):
        trainer.fit(seeded(), models.loader())
    assert type(trainer.precision_plugin) is Precision
    assert verdict(watcher, "amp").took is True  # what ran, ran so


def test_tf32_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    allow = Amp(enabled=True, mode="tf32").plan(Facts(device="cuda")).actions[0].do
    before = torch.get_float32_matmul_precision()
    assert before == "highest"
    applied = allow(None)
    assert applied.probe() == {"matmul_precision": "high"}
    applied.undo()
    applied.undo()
    assert torch.get_float32_matmul_precision() == before
    torch.set_float32_matmul_precision("medium")
    try:
        with pytest.raises(NotApplicable, match="float32 matmul precision is already 'medium'; your choice stands"):
            allow(None)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)


def test_validation_after_fit_is_validation_inside_fit() -> None:
    def losses(rungs: Any) -> tuple[float, float]:
        module = seeded()
        _, trainer = fit(rungs, module, val=models.loader(32), num_sanity_val_steps=0)
        inside = float(trainer.callback_metrics["val_loss"])
        trainer.validate(module, models.loader(32), verbose=False)
        return inside, float(trainer.callback_metrics["val_loss"])

    inside, after = losses(BF16)
    assert inside == after
    plain = models.trainer()
    module = seeded()
    fit(BF16, module)
    plain.validate(module, models.loader(32), verbose=False)
    assert float(plain.callback_metrics["val_loss"]) != inside  # without us it is another number


@pytest.mark.parametrize(
    ("module", "settings", "reason"),
    [
        (models.Regression, {"precision": "bf16-mixed"}, STANDS.format("bf16-mixed")),
        (models.Regression, {"precision": "64-true"}, STANDS.format("64-true")),
        (models.Regression, {"plugins": "own"}, STANDS.format("16-mixed")),
        (Autocasting, {}, "Autocasting.training_step enters autocast itself; precision has one owner"),
    ],
)
def test_the_users_precision_stands(module: Any, settings: dict[str, Any], reason: str) -> None:  # P7
    if settings.get("plugins"):
        settings = {"plugins": [MixedPrecision("16-mixed", "cpu")]}
    wanted = FP16 if settings.get("precision") else BF16
    watcher, trainer = fit(wanted, seeded(module), **settings)
    assert verdict(watcher, "amp").took is False
    assert verdict(watcher, "amp").why == reason
    assert str(trainer.precision_plugin.precision) == settings.get("precision", "16-mixed" if settings else "32-true")


def test_tf32_on_the_cpu_is_skipped() -> None:
    watcher, _ = fit({"amp": {"mode": "tf32"}}, seeded())
    assert verdict(watcher, "amp").why == "tf32 needs CUDA; this run is on cpu"
    assert torch.get_float32_matmul_precision() == "highest"


def test_checkpoints_hold_the_scaler_under_its_usual_key(tmp_path: Path) -> None:
    def checkpoint(rungs: Any, name: str, **settings: Any) -> dict[str, Any]:
        keeper = L.pytorch.callbacks.ModelCheckpoint(dirpath=tmp_path / name, save_last=True)
        fit(rungs, seeded(), callbacks=(keeper,), enable_checkpointing=True, **settings)
        return torch.load(tmp_path / name / "last.ckpt", weights_only=False)

    ours = checkpoint(FP16, "ours")
    plain = checkpoint(None, "plain", plugins=[MixedPrecision("16-mixed", "cpu")])
    assert ours["MixedPrecision"] == plain["MixedPrecision"] and ours["MixedPrecision"]["scale"] > 1
    assert ours.keys() == plain.keys()
    assert "MixedPrecision" not in checkpoint(BF16, "bf16")
    # …and a plain run goes on from it
    module = seeded()
    fit(None, module, ckpt=tmp_path / "ours" / "last.ckpt", max_epochs=2, plugins=[MixedPrecision("16-mixed", "cpu")])


def test_the_other_namespace() -> None:
    pl = pytest.importorskip("pytorch_lightning")

    class Module(pl.LightningModule):
        training_step, configure_optimizers = models.Regression.training_step, models.Regression.configure_optimizers

        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
            self.optimizer, self.lr = torch.optim.SGD, 0.05
            self.losses: list[float] = []
            self.batch_indices: list[int] = []

    def weights(callbacks: list[Any], **settings: Any) -> dict[str, torch.Tensor]:
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=1,
            logger=False,
            enable_checkpointing=False,
            max_epochs=1,
            enable_progress_bar=False,
            callbacks=callbacks,
            **settings,
        )
        module = Module()
        trainer.fit(module, models.loader())
        assert type(trainer.precision_plugin).__module__.startswith("pytorch_lightning.")
        return models.weights(module)

    watcher = loop(BF16)
    ours = weights([watcher])
    assert verdict(watcher, "amp").took is True
    assert same(ours, weights([], precision="bf16-mixed")) and not same(ours, weights([]))


@pytest.mark.parametrize("vary", [True, False])
def test_cudnn_plans_no_attention_where_sizes_vary(vary: bool) -> None:
    assert torch.backends.cuda.cudnn_sdp_enabled(), "torch's default"
    site = SimpleNamespace(
        device=torch.device("cuda"),
        changed_sizes=[{}, {117: 203}] if vary else [{}, {}],
        set_precision=lambda _mode: lambda: None,
        note_in_step=lambda _note: None,
    )
    applied = Amp(enabled=True)._set_precision(site)  # type: ignore[arg-type]
    assert torch.backends.cuda.cudnn_sdp_enabled() is not vary
    assert applied.probe().get("cudnn_attention", True) is not vary
    applied.undo()
    assert torch.backends.cuda.cudnn_sdp_enabled()

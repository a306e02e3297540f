"""The amp rung: precision through Lightning's own plugin, proven inside training_step."""

from __future__ import annotations

import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from torch.utils._python_dispatch import TorchDispatchMode

from fastloop import FastLoop
from fastloop.config.loading import load_callback_config
from fastloop.errors import ConfigError, NotApplicable
from fastloop.records.facts import Facts
from fastloop.records.measurement import Measurement
from fastloop.rungs.amp import Amp
from tests import models
from tests.rungs.fits import Raises, evidence, fit, loop, same, seeded, verdict

BF16: dict[str, Any] = {"amp": {}}
FP16: dict[str, Any] = {"amp": {"mode": "16-mixed"}}
STANDS = "the Trainer already uses precision {}; your choice stands"


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
            "Net.training_step enters autocast itself; your choice stands",
        ),
        (
            "bf16-mixed",
            {"plain_gradients": False, "strategy": "FSDPStrategy"},
            "FSDPStrategy has its own precision handling; write Trainer(precision=…) instead",
        ),
        ("bf16-mixed", {"refused_losses": ("criterion",)}, {"precision.plugin": "bf16-mixed"}),
        (
            "bf16-mixed",
            {"refused_losses": ("criterion", "training_step"), "device": "cuda", "compute_capability": (9, 0)},
            "criterion computes binary_cross_entropy, which torch refuses under autocast: use"
            " binary_cross_entropy_with_logits on outputs without sigmoid, or list it in keep_fp32",
        ),
        (
            "16-mixed",
            {"handles_grads": ("Net.training_step",)},
            "Net.training_step reads gradients before they are unscaled; use bf16-mixed",
        ),
        ("bf16-mixed", {"handles_grads": ("Net.training_step",)}, {"precision.plugin": "bf16-mixed"}),
        ("bf16-mixed", {"device": "mps"}, "mixed precision is not tested on mps"),
        ("tf32", {}, "tf32 needs CUDA; this run is on cpu"),
        (
            "tf32",
            {"device": "cuda", "compute_capability": (7, 5), "device_name": "T4"},
            "T4 has no TF32 (it needs compute capability 8.0 or later)",
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


def test_a_loss_that_autocast_refuses_may_be_kept_in_float32() -> None:
    rung = Amp(enabled=True, keep_fp32=("criterion",))
    facts = Facts(device="cuda", compute_capability=(9, 0), refused_losses=("criterion",))
    assert dict(rung.plan(facts).wants) == {"precision.plugin": "bf16-mixed"}
    around = Amp(enabled=True, keep_fp32=("compute_loss",))
    assert around.plan(facts), "it may be what calls the criterion"


def test_an_emulating_gpu_is_noted() -> None:
    old = Facts(device="cuda", compute_capability=(7, 5), device_name="T4")
    assert Amp(enabled=True).plan(old).notes == ("T4 only emulates bfloat16: slower; use 16-mixed",)
    assert Amp(enabled=True, mode="16-mixed").plan(old).notes == ()


@pytest.mark.parametrize(
    ("mode", "shown", "cure"),
    [
        ("fp8", "'fp8'", "write one of bf16-mixed, 16-mixed, bf16-true, 16-true, tf32"),
        ("amp", "'amp'", "write one of bf16-mixed, 16-mixed, bf16-true, 16-true, tf32"),
        (True, "true", "write one of bf16-mixed, 16-mixed, bf16-true, 16-true, tf32"),
        ("bf16", "'bf16'", "write bf16-mixed"),
    ],
)
def test_unknown_modes_are_config_errors(mode: Any, shown: str, cure: str) -> None:  # P2
    with pytest.raises(ConfigError) as error:
        load_callback_config({"rungs": {"amp": {"enabled": True, "mode": mode}}})
    assert error.value.got.startswith(f"rungs.amp.mode: {shown}")
    assert "it must be one of bf16-mixed, 16-mixed, bf16-true, 16-true, tf32" in error.value.why
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


class InFloat64(models.Regression):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step([part.double() for part in batch], batch_idx)


def test_a_model_in_float64_is_left_alone_and_says_so() -> None:
    watcher, _ = fit(BF16, seeded(InFloat64).double())
    found = verdict(watcher, "amp")
    assert (found.took, found.why) == (False, "matrix products in training_step ran in torch.float64")


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
        (Autocasting, {}, "Autocasting.training_step enters autocast itself; your choice stands"),
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


class Compares(models.Regression):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.05)


class MayCompare(Compares):
    """Names LBFGS, and trains with another optimizer."""

    def configure_optimizers(self) -> Any:
        return self._search() if self.lr > 1 else torch.optim.Adam(self.parameters())

    def _search(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


class SearchesItself(models.Regression):
    """Has an optimizer that no list of the Trainer's shows."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        assert torch.optim.LBFGS(self.parameters())
        return super().training_step(batch, batch_idx)


SEARCHES = "the optimizer is LBFGS, which can diverge on 16-bit losses"
MAY_SEARCH = "{} may create an LBFGS optimizer, which can diverge on 16-bit losses"


@pytest.mark.parametrize(
    ("kind", "mode", "refused"),
    [
        (Compares, "bf16-mixed", SEARCHES),
        (Compares, "16-mixed", SEARCHES),
        (models.Regression, "16-mixed", None),
        (MayCompare, "bf16-mixed", None),
        (MayCompare, "bf16-true", MAY_SEARCH.format("MayCompare._search")),
        (SearchesItself, "bf16-mixed", MAY_SEARCH.format("SearchesItself.training_step")),
    ],
)
def test_an_optimizer_that_compares_losses_keeps_its_precision(kind: Any, mode: str, refused: str | None) -> None:
    """The optimizers decide, not the text that may make others; the text counts where no optimizers can be seen."""

    def train(rungs: Any) -> tuple[Any, dict[str, torch.Tensor], float]:
        watcher, trainer = fit(rungs, module := seeded(kind))
        found = rungs and verdict(watcher, "amp")
        trainer.validate(module, models.loader(32), verbose=False)
        return found, models.weights(module), float(trainer.callback_metrics["val_loss"])

    (found, ours, our_loss), (_, plain, loss) = train({"amp": {"mode": mode}}), train(None)
    assert found.took is (refused is None) and (refused is None or found.why == refused)
    assert same(ours, plain) is (our_loss == loss) is (refused is not None), "in a later validation, too"


class ByHand(models.Regression):
    """Clips gradients itself: scaled ones would be clipped to nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
        optimizer.step()


def test_scaled_gradients_are_not_clipped_by_hand() -> None:
    watcher, _ = fit(FP16, by_hand := seeded(ByHand))
    assert (
        verdict(watcher, "amp").why == "ByHand.training_step reads gradients before they are unscaled; use bf16-mixed"
    )
    _, _ = fit(None, plain := seeded(ByHand))
    assert by_hand.losses == plain.losses
    watcher, _ = fit(BF16, seeded(ByHand))
    assert verdict(watcher, "amp").took


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
        set_precision=lambda _mode, **_: lambda: None,
        note_in_step=lambda _note: None,
    )
    applied = Amp(enabled=True)._set_precision(site)  # type: ignore[arg-type]
    assert torch.backends.cuda.cudnn_sdp_enabled() is not vary
    assert applied.probe().get("cudnn_attention", True) is not vary
    applied.undo()
    assert torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.parametrize(
    ("mode", "note"),
    [
        ("bf16-true", "weights are also bfloat16: updates below 1/256 of a weight are lost; bf16-mixed keeps them"),
        ("16-true", "weights are also float16: updates below 1/2048 of a weight are lost; 16-mixed keeps them"),
    ],
)
def test_true_modes_change_the_training_and_are_applied_untried(mode: Any, note: str) -> None:
    change = Amp(enabled=True, mode=mode).plan(Facts())
    assert (change.parity, change.notes, change.rehearse) == ("changes-training", (note,), None)
    assert dict(change.wants) == {"precision.plugin": mode} and dict(change.facts) == {"precision": mode}
    for several in (Facts(micro_batches=True), Facts(accumulate=4)):  # A9
        notes = Amp(enabled=True, mode=mode).plan(several).notes
        assert notes == (note, "the gradients of the batches of a step are summed in 16 bits")
    for settings in ({"keep_fp32": ("loss",)}, {"cache_weights": True}):
        with pytest.raises(NotApplicable, match=f"are for mixed precision, not for mode {mode}"):
            Amp(enabled=True, mode=mode, **settings).plan(Facts())


@pytest.mark.parametrize("beside", [(), ("fused",)])
def test_true_precision_is_lightnings_own(beside: tuple[str, ...]) -> None:
    rungs: dict[str, Any] = {name: {"enabled": True} for name in ("amp", *beside)}
    rungs["amp"]["mode"] = "bf16-true"
    watcher = FastLoop({"rungs": rungs, "watch": {"warmup_steps": 1}}, quiet=True)
    kept: list[Any] = []

    class Look(L.Callback):
        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            kept.append({name: each.clone() for name, each in pl_module.state_dict().items()})

    for settings in ({"callbacks": (watcher,)}, {"precision": "bf16-true"}, {}):
        module = seeded(models.Regression)
        module.optimizer = torch.optim.AdamW
        fit(
            None,
            module,
            max_epochs=2,
            gradient_clip_val=0.5,
            **{**settings, "callbacks": (*settings.get("callbacks", ()), Look())},
        )
        if settings.get("callbacks"):
            assert {each.dtype for each in module.parameters()} == {torch.float32}, "undone"
            assert {each.grad.dtype for each in module.parameters() if each.grad is not None} <= {torch.float32}
    ours, lightnings, plain = kept
    assert {each.dtype for each in ours.values()} == {torch.bfloat16}
    assert same(ours, lightnings) is not bool(beside) and models.distance(ours, lightnings) < 0.05
    assert not same(lightnings, plain), "the control"
    assert all(verdict(watcher, rung).took is True for rung in rungs)
    assert verdict(watcher, "amp").parity_class == "changes-training"


class Cancelling(models.Regression):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.compute_loss(super().training_step(batch, batch_idx))

    def compute_loss(self, loss: torch.Tensor) -> torch.Tensor:
        self.dtype_inside = (torch.ones(1, 1) @ torch.ones(1, 1)).dtype
        return loss

    def other_loss(self) -> None: ...


@pytest.mark.parametrize(
    ("name", "took", "why"),
    [
        ("compute_loss", True, "torch.bfloat16, those of compute_loss in torch.float32"),
        ("other_loss", True, "torch.bfloat16; kept in float32, but never called: other_loss"),
        ("computeloss", False, "the model has no module or method 'computeloss' that could be kept in float32"),
    ],
)
def test_losses_are_kept_in_float32_by_name(name: str, took: bool, why: str) -> None:
    module = seeded(Cancelling)
    watcher, trainer = fit({"amp": {"keep_fp32": ["net.0", name] if took is False else [name]}}, module)
    assert verdict(watcher, "amp").took is took and verdict(watcher, "amp").why.endswith(why)
    expected = torch.bfloat16 if name == "other_loss" else torch.float32
    assert name not in vars(module) and "forward" not in vars(module.net[0]), "nothing is left"
    assert module.dtype_inside == expected
    assert type(trainer.precision_plugin) is Precision


def test_what_is_kept_is_seen_although_it_is_compiled_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the rehearsal calls it outside of compiled code."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    rungs = {"amp": {"enabled": True, "keep_fp32": ["net.3"]}, "compile": {"enabled": True}}
    watcher = FastLoop({"rungs": rungs, "watch": {"warmup_steps": 1}}, quiet=True)
    models.trainer(callbacks=[watcher]).fit(seeded(), models.loader())
    assert verdict(watcher, "compile").took is True
    assert verdict(watcher, "amp").why.endswith("torch.bfloat16, those of net.3 in torch.float32")


class Casts(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += "_to_copy" in str(func) and args[0].shape == (8, 8)
        return func(*args, **(kwargs or {}))


class Recurrent(models.Regression):
    """One cell, called for each of five moments."""

    def __init__(self, lr: float = 0.05) -> None:
        super().__init__(lr=lr)
        self.cell = torch.nn.Linear(8, 8)
        self.casts: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        with torch.no_grad():
            self.cell(x)  # what is cached without a gradient must not cost the weight its own
        with Casts() as casts:
            for _ in range(5):
                x = torch.tanh(self.cell(x))
        self.casts.append(casts.count)
        return super().training_step((x, y), batch_idx)


def test_weights_are_rounded_once_a_step_on_request() -> None:
    once, each, wrong = seeded(Recurrent), seeded(Recurrent), seeded(Recurrent, lr=0.06)
    fit({"amp": {"cache_weights": True}}, once)
    fit(BF16, each)
    fit(BF16, wrong)
    assert max(once.casts) < 5 <= min(each.casts)
    ours, plain = models.weights(once), models.weights(each)
    assert models.distance(ours, plain) < 5e-3 < models.distance(ours, models.weights(wrong))
    assert not same(ours, models.weights(seeded(Recurrent)))

"""Ways to use Lightning, each trained plain and with exact rungs: the same losses, and nothing left on the Trainer."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BatchSizeFinder,
    EarlyStopping,
    LearningRateFinder,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader

from fastloop import ConfigError, FastLoop
from tests.bridge.launch import python
from tests.models import WEIGHTS_ONLY, Ema, Regression, distance, loader, trainer, weights

pytestmark = pytest.mark.short

EXACT = {"watch": {"warmup_steps": 1}, "rungs": {"workers": {"enabled": True, "count": 1}, "pin": {"enabled": True}}}
"""Rungs that must not change a bit; without CUDA, pin is skipped."""


@dataclass
class Case:
    """One way to call Lightning. Made anew for every run, since Trainers and loaders keep state."""

    module: Any
    fit: dict[str, Any]
    trainer: dict[str, Any] = field(default_factory=dict)
    workers: bool = True
    """Whether the workers rung takes."""
    optimizers: int = 1
    """Lightning counts a step for each; we count the round of all as one."""


class Data(L.LightningDataModule):
    def train_dataloader(self) -> DataLoader[Any]:
        return loader(shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return loader(16)


class Owns(Regression):
    """Its loaders are its own methods."""

    def train_dataloader(self) -> Any:
        return loader(shuffle=True)

    def val_dataloader(self) -> Any:
        return [loader(16), loader(8)]

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        super().validation_step(batch, batch_idx)


class Sized(Owns):
    """A batch size that a finder may change."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_size = 2

    def train_dataloader(self) -> Any:
        return loader(batch_size=self.batch_size)


class Both(Regression):
    """Trains on a mapping of two loaders."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step(batch["a"], batch_idx) + super().training_step(batch["b"], batch_idx)


class Manual(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        for optimizer in self._optimizers():
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in self._optimizers():
            optimizer.step()
        return loss

    def _optimizers(self) -> list[Any]:
        found = self.optimizers()
        return list(found) if isinstance(found, list) else [found]


class Two(Manual):
    """Two optimizers, as adversarial training has them."""

    def configure_optimizers(self) -> Any:
        first, last = self.net[0].parameters(), self.net[3].parameters()
        return [torch.optim.SGD(first, lr=0.05), torch.optim.AdamW(last, lr=0.01)]


class Late(Regression):
    """Has no layers before configure_model."""

    def __init__(self) -> None:
        super().__init__()
        self.net = None  # type: ignore[assignment]

    def configure_model(self) -> None:
        if self.net is None:
            self.net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))


class Skips(Regression):
    """Returns None for every third batch, as people do for bad data."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx % 3 == 1 else super().training_step(batch, batch_idx)


class Fetches(Regression):
    """Takes its batches from the iterator itself."""

    def training_step(self, dataloader_iter: Any) -> torch.Tensor:  # type: ignore[override]
        batch, batch_idx, _ = next(dataloader_iter)
        return super().training_step(batch, batch_idx)


class Backboned(Regression):
    """The shape a finetuning callback asks for."""

    @property
    def backbone(self) -> torch.nn.Module:
        return self.net[0]

    def configure_optimizers(self) -> Any:
        trainable = [parameter for parameter in self.parameters() if parameter.requires_grad]
        optimizer = torch.optim.SGD(trainable, lr=self.lr)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.9)]


def _nothing_at_times(samples: list[Any]) -> Any:
    return None if float(samples[0][1]) > 0.9 else torch.utils.data.default_collate(samples)


def _on_sgd_schedule(module: Regression) -> Regression:
    module.configure_optimizers = lambda: Backboned.configure_optimizers(module)  # type: ignore[method-assign,arg-type]
    return module


def _swa() -> StochasticWeightAveraging:
    return StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1)


def _unfreeze() -> BackboneFinetuning:
    return BackboneFinetuning(unfreeze_backbone_at_epoch=1, lambda_func=lambda epoch: 1.5)


class Stream:
    """Not a DataLoader, but batches."""

    def __iter__(self) -> Any:
        return iter(loader())


CASES: dict[str, Callable[[], Case]] = {
    "loaders passed to fit": lambda: Case(Regression(), {"train_dataloaders": loader(shuffle=True)}),
    "datamodule": lambda: Case(Regression(), {"datamodule": Data()}),
    "loaders of the module, two validation loaders": lambda: Case(Owns(), {}),
    "CombinedLoader": lambda: Case(
        Both(), {"train_dataloaders": CombinedLoader({"a": loader(), "b": loader(48)}, "max_size_cycle")}
    ),
    "mapping of loaders": lambda: Case(Both(), {"train_dataloaders": {"a": loader(), "b": loader(48)}}),
    "reloaded loaders": lambda: Case(Owns(), {}, {"reload_dataloaders_every_n_epochs": 1}),
    "fast_dev_run": lambda: Case(Owns(), {}, {"fast_dev_run": 3}),
    "overfit_batches": lambda: Case(Regression(), {"train_dataloaders": loader()}, {"overfit_batches": 2}),
    "barebones": lambda: Case(Owns(), {}, {"barebones": True}),
    "accumulation and clipping": lambda: Case(
        Regression(), {"train_dataloaders": loader()}, {"accumulate_grad_batches": 3, "gradient_clip_val": 0.1}
    ),
    "EMA": lambda: Case(Owns(), {}, {"callbacks": [Ema(decay=0.9)]}),
    "SWA": lambda: Case(_on_sgd_schedule(Regression()), {"train_dataloaders": loader()}, {"callbacks": [_swa()]}),
    "finetuning": lambda: Case(Backboned(), {"train_dataloaders": loader()}, {"callbacks": [_unfreeze()]}),
    "learning rate finder": lambda: Case(Owns(), {}, {"callbacks": [LearningRateFinder(num_training_steps=5)]}),
    "batch size finder": lambda: Case(Sized(), {}, {"callbacks": [BatchSizeFinder("power", 2, 4, max_trials=2)]}),
    "manual optimization": lambda: Case(Manual(), {"train_dataloaders": loader()}),
    "several optimizers": lambda: Case(Two(), {"train_dataloaders": loader()}, optimizers=2),
    "configure_model": lambda: Case(Late(), {"train_dataloaders": loader()}),
    "training_step without a loss": lambda: Case(Skips(), {"train_dataloaders": loader()}),
    "None for a batch": lambda: Case(
        Regression(), {"train_dataloaders": loader(collate_fn=_nothing_at_times, batch_size=2)}
    ),
    "training_step(dataloader_iter)": lambda: Case(Fetches(), {"train_dataloaders": loader()}),
    "an iterable that is no DataLoader": lambda: Case(Regression(), {"train_dataloaders": Stream()}, workers=False),
    "strategy object": lambda: Case(
        Regression(), {"train_dataloaders": loader()}, {"strategy": SingleDeviceStrategy(torch.device("cpu"))}
    ),
}


def run(case: Case, loop: FastLoop | None) -> L.Trainer:
    settings = {"max_epochs": 2, **case.trainer}
    if settings.get("barebones"):
        for name in ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"):
            settings[name] = None
    settings["callbacks"] = [*settings.get("callbacks", []), *([loop] if loop else [])]
    made = trainer(**settings)
    torch.manual_seed(5)  # after the Trainer, as the module's weights were made before it
    made.fit(case.module, **case.fit)
    return made


def seeded(name: str) -> Case:
    torch.manual_seed(3)
    return CASES[name]()


@pytest.mark.parametrize("name", CASES)
def test_exact_rungs_leave_the_training_as_it_was(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # the finders put checkpoints there
    plain = seeded(name)
    run(plain, None)
    case, loop = seeded(name), FastLoop(EXACT, out=tmp_path)
    made = run(case, loop)
    assert plain.module.losses == case.module.losses and len(plain.module.losses) >= 3
    assert plain.module.batch_indices == case.module.batch_indices
    assert distance(weights(plain.module), weights(case.module)) == 0
    assert type(made.strategy) is SingleDeviceStrategy and "fastloop" not in vars(made.strategy)
    assert type(made.profiler).__name__ == "PassThroughProfiler"
    assert loop.measurement is not None and loop.measurement.total_steps * case.optimizers == made.global_step
    took = {verdict.rung: verdict.took for verdict in loop.verdicts}
    assert took == {"workers": case.workers, "pin": False}, loop.verdicts
    assert (tmp_path / "measurement.json").is_file()


class Validates(Sized):
    """Counts its validation batches by epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.validated: list[tuple[int, int]] = []

    def val_dataloader(self) -> Any:
        return loader(16)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated.append((self.current_epoch, batch_idx))


def test_validation_that_a_finder_sets_up_runs_in_every_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The finder sets up validation while it trains, so that its loader looks like one for training."""
    monkeypatch.chdir(tmp_path)
    seen = []
    for loop in (None, FastLoop(EXACT, out=tmp_path)):
        torch.manual_seed(3)
        case = Case(Validates(), {}, {"callbacks": [BatchSizeFinder("power", 2, 4, max_trials=2)]})
        run(case, loop)
        seen.append(case.module.validated)
    assert seen[0] == seen[1] and {epoch for epoch, _ in seen[0]} == {0, 1}


def test_the_comparison_finds_another_order_of_samples() -> None:
    plain, other = seeded("loaders passed to fit"), seeded("loaders passed to fit")
    run(plain, None)
    torch.manual_seed(5)
    trainer(max_epochs=2).fit(other.module, loader(shuffle=False))
    assert plain.module.losses != other.module.losses


@pytest.mark.parametrize("name", ["fast_dev_run", "barebones"])
def test_trial_runs_write_nothing(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    loop, case = FastLoop(EXACT), seeded(name)
    case.trainer["logger"] = True
    run(case, loop)
    assert loop.run_dir is None and loop.measurement is not None
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize("named", [False, True], ids=["callback", "strategy by name"])
@pytest.mark.parametrize("space", ["lightning.pytorch", "pytorch_lightning"])
def test_both_namespaces(space: str, named: bool) -> None:
    pl = importlib.import_module(space)
    step = {name: vars(Regression)[name] for name in ("training_step", "validation_step", "configure_optimizers")}
    module = type("InThisNamespace", (pl.LightningModule,), step)()
    module.net, module.optimizer, module.lr = torch.nn.Linear(8, 1), torch.optim.SGD, 0.05
    module.losses, module.batch_indices = [], []
    loop = FastLoop({**EXACT, "rungs": {**EXACT["rungs"], "amp": {"enabled": True}}}, quiet=True)
    strategy = {"strategy": "fastloop"} if named else {}
    made = pl.Trainer(
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        max_epochs=2,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[loop],
        **strategy,
    )
    kind, precision = type(made.strategy), made.strategy.precision_plugin
    made.fit(module, loader(), loader(16))
    assert {verdict.rung: verdict.took for verdict in loop.verdicts} == {"workers": True, "pin": False, "amp": True}
    assert isinstance(made.strategy, pl.strategies.SingleDeviceStrategy)
    assert type(made.strategy) is kind and made.strategy.precision_plugin is precision
    assert len(module.losses) == 16 and sum(module.losses[8:]) < sum(module.losses[:8])


def test_the_named_strategies_work_without_the_callback() -> None:
    plain, named = Regression(), Regression()
    named.load_state_dict(plain.state_dict())
    FastLoop()  # the names are registered with the first access
    trainer().fit(plain, loader())
    made = trainer(strategy="fastloop")
    made.fit(named, loader())
    assert plain.losses == named.losses and made.strategy.root_device == torch.device("cpu")


@pytest.mark.parametrize("several", ["devices", "nodes"])
@pytest.mark.parametrize("space", ["lightning.pytorch", "pytorch_lightning"])
def test_the_single_device_strategy_refuses_several(several: str, space: str) -> None:
    assert FastLoop
    settings = {"devices": 2} if several == "devices" else {"devices": 1, "num_nodes": 2}
    with pytest.raises(ConfigError) as error:
        importlib.import_module(space).Trainer(accelerator="cpu", strategy="fastloop", logger=False, **settings)
    assert f"2 {several}" in error.value.got and 'strategy="fastloop_ddp"' in error.value.do


def test_monitors_of_checkpoints_and_early_stopping(tmp_path: Path) -> None:
    def fit(loop: FastLoop | None) -> tuple[Any, ...]:
        torch.manual_seed(0)
        best = ModelCheckpoint(dirpath=tmp_path, monitor="val_loss", save_top_k=1)
        stop = EarlyStopping("val_loss", patience=1, min_delta=0.05)
        made = trainer(max_epochs=20, enable_checkpointing=True, callbacks=[stop, best, *([loop] if loop else [])])
        made.fit(Regression(), loader(), loader(16))
        return made.current_epoch, best.best_model_score, stop.stopped_epoch, Path(best.best_model_path).name

    plain = fit(None)
    for path in tmp_path.iterdir():
        path.unlink()
    assert fit(FastLoop(EXACT, quiet=True)) == plain
    assert 0 < plain[2] < 20


def test_fit_twice_on_one_trainer() -> None:
    def fit_twice(loop: FastLoop | None) -> tuple[list[float], list[Any]]:
        torch.manual_seed(0)
        module, seen = Regression(), []
        made = trainer(max_epochs=1, callbacks=[loop] if loop else [])
        for epochs in (1, 3):
            made.fit_loop.max_epochs = epochs
            made.fit(module, loader(shuffle=True))
            seen.append(loop.measurement if loop else None)
        return module.losses, seen

    losses, seen = fit_twice(FastLoop(EXACT, quiet=True))
    assert losses == fit_twice(None)[0]
    assert [measurement.total_steps for measurement in seen] == [8, 16]


@pytest.mark.parametrize("rungs", [{}, EXACT["rungs"], {"amp": {"enabled": True}, "fused": {"enabled": True}}])
def test_resume_with_weights_only(rungs: dict[str, Any], tmp_path: Path) -> None:
    """A checkpoint of a run with rungs is loaded by one with them and by one without."""

    def callbacks(on: bool) -> list[Any]:
        return [FastLoop({"rungs": rungs}, quiet=True)] if on else []

    torch.manual_seed(0)
    first = trainer(max_epochs=1, callbacks=callbacks(True))
    first.fit(Regression(torch.optim.AdamW), loader())
    first.save_checkpoint(tmp_path / "one.ckpt")
    content = torch.load(tmp_path / "one.ckpt", weights_only=True)
    ours = any("fastloop" in str(key).lower() for key in [*content, *content.get("callbacks", {})])
    assert ours == ("workers" in rungs), "the place in the data, where a rung changes the loader"
    resumed = []
    for on in (True, False):
        module = Regression(torch.optim.AdamW)
        made = trainer(max_epochs=2, callbacks=callbacks(on))
        made.fit(module, loader(), ckpt_path=tmp_path / "one.ckpt", **WEIGHTS_ONLY)
        assert made.global_step == 16 and len(module.losses) == 8
        group = made.optimizers[0].param_groups[0]
        assert (group["fused"], group["foreach"]) == (None, None), "the rung stayed in a run without it"
        resumed.append(module.losses)
    assert resumed[0] == pytest.approx(resumed[1], rel=2e-2 if "amp" in rungs else 0)


WITHOUT_US = """
import sys
sys.modules["fastloop"] = None
from tests.models import WEIGHTS_ONLY, Regression, loader, torch, trainer
try:
    import fastloop
except ImportError:
    module = Regression(torch.optim.AdamW)
    trainer(max_epochs=2).fit(module, loader(), ckpt_path=sys.argv[1], **WEIGHTS_ONLY)
    torch.load(sys.argv[1], weights_only=True)
    Regression.load_from_checkpoint(sys.argv[1])
    print("LOSSES", module.losses)
"""


def test_a_checkpoint_loads_where_fastloop_is_not_installed(tmp_path: Path) -> None:
    torch.manual_seed(0)
    # Not the ladder by its name: it would leave out what does not make so small a model faster.
    rungs = {rung: {"enabled": True} for rung in ("workers", "amp", "fused")}
    module, loop = Regression(torch.optim.AdamW), FastLoop({"rungs": rungs}, quiet=True)
    made = trainer(max_epochs=1, callbacks=[loop])
    made.fit(module, loader())
    assert {"amp", "fused"} <= {verdict.rung for verdict in loop.verdicts if verdict.took}
    made.save_checkpoint(tmp_path / "one.ckpt")
    here = Regression(torch.optim.AdamW)
    trainer(max_epochs=2).fit(here, loader(), ckpt_path=tmp_path / "one.ckpt", **WEIGHTS_ONLY)
    said = python("-c", WITHOUT_US, tmp_path / "one.ckpt", cwd=tmp_path)
    assert f"LOSSES {here.losses}" in said and len(here.losses) == 8


def test_the_models_of_the_tests_learn() -> None:
    """The comparisons above would hold for a module that does nothing, too."""
    module = Regression()
    trainer(max_epochs=12).fit(module, loader())
    assert sum(module.losses[-8:]) < 0.9 * sum(module.losses[:8])

"""Off means off: plain Lightning and FastLoop without rungs train the same run, bit for bit."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import numpy
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader, Dataset

from fastloop import FastLoop
from fastloop.ladder import Ladder
from tests.models import Ema, trainer

pytestmark = pytest.mark.short

SAMPLES, BATCH, EPOCHS = 40, 8, 2
ALL_OFF = {"watch": {"enabled": False}, "rungs": {name: {"enabled": False} for name, _ in Ladder().rungs()}}


class Noisy(Dataset[Any]):
    """Samples that draw from all three generators, and say which one they are."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        noise = random.random() + float(numpy.random.rand())
        return torch.randn(3, 8, 8) + noise, torch.tensor(index % 2), index


class Body(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        normed = torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU()
        self.layers = torch.nn.Sequential(*normed, torch.nn.Dropout(0.3), torch.nn.Flatten())

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.layers(images)


class Everything(L.LightningModule):
    """Dropout, BatchNorm, a compiled inner module, a schedule over the estimated steps, logging."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.compile(Body(), backend="eager")
        self.head = torch.nn.Linear(4 * 36, 2)
        self.losses: list[float] = []
        self.order: list[int] = []
        self.strategies: set[type] = set()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        images, labels, indices = batch
        loss = torch.nn.functional.cross_entropy(self.head(self.body(images)), labels)
        self.losses.append(float(loss.detach()))
        self.order += indices.tolist()
        self.strategies.add(type(self.trainer.strategy))
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        images, labels, _ = batch
        self.log("val_loss", torch.nn.functional.cross_entropy(self.head(self.body(images)), labels))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


@dataclass(frozen=True, kw_only=True)
class Trace:
    """Everything two equal runs have in common."""

    losses: list[float]
    order: list[int]
    generators: tuple[Any, ...]
    checkpoints: dict[str, bytes]
    metrics_file: str
    metrics: dict[str, float]
    learning_rate: float
    strategies: set[type]


def train(folder: Path, workers: int, callback: Callback | None) -> Trace:
    """One run; every run of a comparison uses the same folder, for checkpoints hold their path."""
    checkpoints = ModelCheckpoint(dirpath=folder / "checkpoints", filename="{epoch}", save_top_k=-1, save_last=True)
    callbacks = [Ema(decay=0.9), checkpoints]
    made = trainer(
        max_epochs=EPOCHS,
        accumulate_grad_batches=2,
        enable_checkpointing=True,
        log_every_n_steps=1,
        logger=CSVLogger(folder, name="log", version="0"),
        callbacks=[*([callback] if callback else []), *callbacks],
    )
    L.seed_everything(7, verbose=False)
    module = Everything()
    data = {"batch_size": BATCH, "num_workers": workers}
    made.fit(module, DataLoader(Noisy(), shuffle=True, **data), DataLoader(Noisy(), **data))
    trace = Trace(
        losses=module.losses,
        order=module.order,
        strategies=module.strategies,
        generators=(random.getstate(), repr(numpy.random.get_state()), torch.get_rng_state().tolist()),
        checkpoints={path.name: path.read_bytes() for path in sorted((folder / "checkpoints").iterdir())},
        metrics_file=(folder / "log" / "0" / "metrics.csv").read_text(),
        metrics={name: float(value) for name, value in made.callback_metrics.items()},
        learning_rate=made.optimizers[0].param_groups[0]["lr"],
    )
    for path in sorted((folder / "checkpoints").iterdir()):
        path.unlink()
    (folder / "log" / "0" / "metrics.csv").unlink()
    return trace


def differing(a: Trace, b: Trace) -> set[str]:
    return {field.name for field in dataclasses.fields(Trace) if getattr(a, field.name) != getattr(b, field.name)}


@pytest.fixture(scope="module", params=[0, 2], ids=["no workers", "2 workers"])
def plain(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int, Trace]:
    """Folder, workers and trace of the run without us."""
    folder = tmp_path_factory.mktemp("off")
    train(folder, request.param, None)  # the first compile in a process fills caches; the next ones are alike
    return folder, request.param, train(folder, request.param, None)


def test_the_plain_run_has_what_the_comparison_is_about(plain: tuple[Path, int, Trace]) -> None:
    _, _, trace = plain
    steps = EPOCHS * SAMPLES // BATCH
    assert len(trace.losses) == steps == len(set(trace.losses))
    assert trace.order[:SAMPLES] != trace.order[SAMPLES:] and sorted(trace.order[:SAMPLES]) == list(range(SAMPLES))
    assert sorted(trace.checkpoints) == ["epoch=0.ckpt", "epoch=1.ckpt", "last.ckpt"]
    assert "val_loss" in trace.metrics and "loss_step" in trace.metrics_file
    assert [kind.__name__ for kind in trace.strategies] == ["SingleDeviceStrategy"]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0, "the inner module was to be compiled"


OFF: dict[str, Callable[[], Callback | None]] = {
    "plain again": lambda: None,
    "watching": lambda: FastLoop(quiet=True),
    "watching, default": lambda: FastLoop(),
    "all rungs disabled": lambda: FastLoop(ALL_OFF),
}


@pytest.mark.parametrize("kind", OFF)
def test_off_is_plain_lightning(kind: str, plain: tuple[Path, int, Trace]) -> None:
    folder, workers, trace = plain
    assert differing(trace, train(folder, workers, OFF[kind]())) == set()


def test_the_environment_switch_turns_every_rung_off(
    plain: tuple[Path, int, Trace], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, workers, trace = plain
    monkeypatch.setenv("FASTLOOP_DISABLE", "1")
    loop = FastLoop("full")
    assert differing(trace, train(folder, workers, loop)) == set()
    assert loop.measurement is None and loop.run_dir is None


class Draws(Callback):
    """One number too many, from one generator."""

    def __init__(self, draw: Callable[[], Any]) -> None:
        self.draw = draw

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.draw()


class Leaves(FastLoop):
    """Would write a key into every checkpoint."""

    def state_dict(self) -> dict[str, Any]:
        return {"seen": 1}


class Renames(Callback):
    """Would change one key of the model's state."""

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        state["head.weights"] = state.pop("head.weight")


def test_a_planted_difference_is_found(plain: tuple[Path, int, Trace]) -> None:
    folder, workers, trace = plain
    drawn = differing(trace, train(folder, workers, Draws(lambda: torch.rand(1))))
    assert {"losses", "generators", "checkpoints", "metrics_file", "order"} <= drawn
    if workers:  # in which none of the rest happens
        return
    assert "generators" in differing(trace, train(folder, workers, Draws(random.random)))
    assert "generators" in differing(trace, train(folder, workers, Draws(numpy.random.rand)))
    assert differing(trace, train(folder, workers, Leaves())) == {"checkpoints"}
    assert differing(trace, train(folder, workers, Renames())) == {"checkpoints"}
    swapped = {"watch": {"enabled": False}, "rungs": {"pin": {"enabled": True}}}
    assert differing(trace, train(folder, workers, FastLoop(swapped))) == {"strategies"}

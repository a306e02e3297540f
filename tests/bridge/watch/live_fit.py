"""A callback that uses LiveMetrics as FastLoop does, and a noisy training to use it in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar
from lightning.pytorch.loggers import Logger

from fastloop.bridge.watch.live_metrics import LiveMetrics
from tests.models import Regression

_OLD = pytest.mark.skipif(L.__version__.startswith("2.5.0"), reason="its own bar fails with today's rich")
BARS = [pytest.param(TQDMProgressBar, id="tqdm"), pytest.param(RichProgressBar, id="rich", marks=_OLD)]


class Live(L.Callback):
    """Hands its own figures to every logger and the bar, by default after every optimizer step."""

    def __init__(self, figures: Mapping[str, Any] | None = None, every_s: float = 0.0) -> None:
        self.figures = {"step_ms": 12.5, "data_wait_pct": 86.0, "lead_ms": None} if figures is None else figures
        self.every_s, self.reads = every_s, 0
        self.live: LiveMetrics | None = None
        self.undo: Callable[[], None] = lambda: None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "live": None, "undo": None}

    def read(self) -> Mapping[str, Any]:
        self.reads += 1
        return self.figures

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.live = LiveMetrics(trainer, self.read, every_s=self.every_s)
        self.undo = self.live.show_on_bar(trainer)

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        assert self.live is not None
        self.live.tick(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert self.live is not None
        self.live.end(trainer, {"step_ms": 11.0})

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self.undo()


class Logs(Regression):
    """Dropout, a metric a step, one on the bar and one an epoch."""

    def __init__(self) -> None:
        super().__init__(dropout=0.2)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, prog_bar=True)
        self.log("mean_loss", loss, on_step=False, on_epoch=True)
        return loss


class Strict(Logger):
    """As Weights & Biases does with an explicit step: rising or equal, or the figures are lost."""

    def __init__(self, fails: type[BaseException] | None = None) -> None:
        super().__init__()
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.refused: list[int] = []
        self.fails, self.failed = fails, 0

    name = version = None

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None: ...

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        if self.fails and any(name.startswith("fastloop/") for name in metrics):
            self.failed += 1
            raise self.fails("wandb is not logged in")
        assert step is not None
        if self.rows and step < self.rows[-1][0]:
            self.refused.append(step)
        self.rows.append((step, dict(metrics)))
        metrics.clear()  # as rude as a logger may be

    @property
    def ours(self) -> list[tuple[int, dict[str, float]]]:
        return [row for row in self.rows if "fastloop/step_ms" in row[1]]

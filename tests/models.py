"""Small modules, data and Trainers that many tests share."""

from __future__ import annotations

import inspect
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset


class Regression(L.LightningModule):
    """Two layers on 8 numbers; records the loss and the batch_idx of every training_step."""

    def __init__(
        self, optimizer: type[torch.optim.Optimizer] = torch.optim.SGD, dropout: float = 0.0, lr: float = 0.05
    ) -> None:
        super().__init__()
        hidden = torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Dropout(dropout)
        self.net = torch.nn.Sequential(*hidden, torch.nn.Linear(16, 1))
        self.optimizer, self.lr = optimizer, lr
        self.losses: list[float] = []
        self.batch_indices: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        loss = torch.nn.functional.mse_loss(self.net(x), y)
        self.losses.append(float(loss.detach()))
        self.batch_indices.append(batch_idx)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", torch.nn.functional.mse_loss(self.net(x), y))

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.parameters(), lr=self.lr)


class OwnEma(L.Callback):
    """An average of the weights, as people wrote it before Lightning 2.6 had one."""

    def __init__(self, decay: float) -> None:
        self.decay = decay
        self.average: dict[str, torch.Tensor] = {}

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        for name, tensor in pl_module.state_dict().items():
            before = self.average.setdefault(name, tensor.detach().clone())
            self.average[name] = torch.lerp(tensor, before, self.decay) if tensor.is_floating_point() else tensor

    def state_dict(self) -> dict[str, Any]:
        return {"average": self.average}


Ema: type[L.Callback] = getattr(L.pytorch.callbacks, "EMAWeightAveraging", OwnEma)
"""Lightning's own from 2.6 on."""


WEIGHTS_ONLY = {"weights_only": True} if "weights_only" in inspect.signature(L.Trainer.fit).parameters else {}
"""For ``fit(ckpt_path=…)``; before Lightning 2.6 torch's own default decided."""


def pairs(samples: int = 64, seed: int = 0) -> TensorDataset:
    """`samples` pairs of x [8] and y [1], the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 8, generator=generator)
    return TensorDataset(x, x.sum(dim=1, keepdim=True).sin())


def loader(samples: int = 64, batch_size: int = 8, **settings: Any) -> DataLoader[Any]:
    return DataLoader(pairs(samples), batch_size=batch_size, **settings)


def trainer(**settings: Any) -> L.Trainer:
    """A quiet CPU Trainer without logger, bar and checkpoints, unless asked for."""
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    defaults = {"accelerator": "cpu", "devices": 1, "max_epochs": 1, **dict.fromkeys(quiet, False)}
    return L.Trainer(**{**defaults, **settings})


def weights(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Largest per-tensor relative difference, ||a - b|| / ||a||."""
    return max(float((a[name] - b[name]).norm() / a[name].norm().clamp_min(1e-12)) for name in a)

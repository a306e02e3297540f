"""Small modules, data and Trainers that many tests share."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset


class Regression(L.LightningModule):
    """Two layers on 8 numbers; records the loss and the batch_idx of every training_step."""

    def __init__(self, optimizer: type[torch.optim.Optimizer] = torch.optim.SGD, dropout: float = 0.0, lr: float = 0.05) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Dropout(dropout), torch.nn.Linear(16, 1))
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


def pairs(samples: int = 64, seed: int = 0) -> TensorDataset:
    """`samples` pairs of x [8] and y [1], the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 8, generator=generator)
    return TensorDataset(x, x.sum(dim=1, keepdim=True).sin())


def loader(samples: int = 64, batch_size: int = 8, **settings: Any) -> DataLoader[Any]:
    return DataLoader(pairs(samples), batch_size=batch_size, **settings)


def trainer(**settings: Any) -> L.Trainer:
    """A quiet CPU Trainer without logger, bar and checkpoints, unless asked for."""
    defaults: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": False,
                                "enable_progress_bar": False, "enable_model_summary": False, "max_epochs": 1}  # fmt: skip
    return L.Trainer(**{**defaults, **settings})


def weights(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Largest per-tensor relative difference, ||a - b|| / ||a||."""
    return max(float((a[name] - b[name]).norm() / a[name].norm().clamp_min(1e-12)) for name in a)

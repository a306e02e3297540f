"""A Lightning script of two gloo ranks whose loaders differ: rank 0 ends well, and rank 1 dies without it."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset

BATCHES = (45, 60)
"""Of each rank."""


class Net(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(8, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-4)

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.randn(4 * BATCHES[self.global_rank], 8)), batch_size=4)


def main() -> None:
    L.seed_everything()
    quiet: dict[str, Any] = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, use_distributed_sampler=False, **quiet
    )
    trainer.fit(Net())


if __name__ == "__main__":
    main()

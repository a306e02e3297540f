"""A Lightning script whose loader is the limit, and whose first step takes long, as one that compiles does."""

from __future__ import annotations

import time
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader, Dataset, default_collate

LOAD_S, STEP_S, STALL_S = 0.04, 0.004, 1.0
WARM = 20


class Rows(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 4000

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((8,), float(index % 17))


def slowly(rows: list[torch.Tensor]) -> Any:
    time.sleep(LOAD_S)
    return default_collate(rows)


class Net(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(8, 1)
        self.ends: list[float] = []

    def training_step(self, x: torch.Tensor, batch_idx: int) -> torch.Tensor:
        time.sleep(STEP_S if batch_idx else STALL_S)
        return self.net(x).pow(2).mean()

    def on_train_batch_end(self, *_: Any) -> None:
        self.ends.append(time.perf_counter())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-4)


def main() -> None:
    L.seed_everything()
    net = Net()
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(net, DataLoader(Rows(), batch_size=4, collate_fn=slowly))
    if (steps := len(net.ends) - WARM) > 0:
        print(f"{1e3 * (net.ends[-1] - net.ends[WARM - 1]) / steps:.3f} ms a step")


if __name__ == "__main__":
    main()

"""A Lightning script whose loss is infinite in bfloat16 once a probability rounds to one, as hand-written losses do."""

from __future__ import annotations

import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset

SATURATED = 40
"""The first batch with a probability between 0.998 and 1, which bfloat16 cannot tell from 1."""


class Net(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(8, 1, bias=False)
        torch.nn.init.constant_(self.net.weight, 1 / 8)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return -torch.log(1 - self.net(batch[0])).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-9)


def main() -> None:
    L.seed_everything()
    probabilities = torch.full((400, 8), 0.5)
    probabilities[4 * SATURATED :] = 0.9995
    trainer = L.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Net(), DataLoader(TensorDataset(probabilities), batch_size=4))


if __name__ == "__main__":
    main()

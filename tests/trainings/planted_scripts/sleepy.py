"""A Lightning script as people have them. Its batches are slow to unpack, so they come dearer from another process."""

from __future__ import annotations

import time
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader, Dataset, default_collate

STEP_S, UNPACK_S = 0.040, 0.004
WARM = 20


class Packed(dict[str, torch.Tensor]):
    """A batch that decompresses itself on its way from one process to another."""

    def __reduce__(self) -> Any:
        return unpack, (dict(self),)


def unpack(content: dict[str, torch.Tensor]) -> Packed:
    time.sleep(UNPACK_S)
    return Packed(content)


def pack(rows: list[dict[str, torch.Tensor]]) -> Packed:
    return Packed(default_collate(rows))


class Rows(Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 4000

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        x = torch.linspace(0, 1, 8) * (index % 17)
        return {"x": x, "y": x.sum().reshape(1)}


class Net(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(8, 1)
        self.ends: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        time.sleep(STEP_S)
        return torch.nn.functional.mse_loss(self.net(batch["x"]), batch["y"])

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
    trainer.fit(net, DataLoader(Rows(), batch_size=4, shuffle=True, collate_fn=pack))
    if (steps := len(net.ends) - WARM) > 0:
        print(f"{1e3 * (net.ends[-1] - net.ends[WARM - 1]) / steps:.3f} ms a step")


if __name__ == "__main__":
    main()

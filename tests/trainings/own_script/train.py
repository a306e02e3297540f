"""A Lightning script as a user has one, and what scripts do wrong. It knows nothing of who runs it."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--lightning", default="lightning.pytorch", help="which of the two")
parser.add_argument("--does", default="trains")
parser.add_argument("--devices", type=int, default=1)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--tell", type=Path, help="where to write what was seen")
parser.add_argument("--api-key", default="none")
parser.add_argument("--ckpts", type=Path, help="where it saves, and goes on from what it saved last")
given = parser.parse_args()
pl: Any = importlib.import_module(given.lightning)


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(), torch.nn.Linear(16, 1))
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if given.does != "trains" and batch_idx == 25:
            self.misbehave()
        loss = torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.losses.append(loss.item())
        return loss

    def misbehave(self) -> None:
        if given.does == "exits":
            sys.exit(3)
        if given.does == "raises":
            raise ValueError(f"no luck with the key {given.api_key}")
        if given.does in ("hangs", "waits"):
            Path("waiting").touch()
            time.sleep(120 if given.does == "hangs" else 0)
        if given.does == "waits":
            while not Path("go").exists():
                time.sleep(0.05)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def trainer(**more: Any) -> Any:
    quiet = ("logger", "enable_progress_bar", "enable_model_summary")
    return pl.Trainer(
        accelerator="cpu",
        devices=given.devices,
        strategy="ddp" if given.devices > 1 else "auto",
        max_epochs=given.epochs,
        enable_checkpointing=given.ckpts is not None,
        callbacks=saves(),
        **{**dict.fromkeys(quiet, False), **more},
    )


def saves() -> list[Any]:
    if given.ckpts is None:
        return []
    return [
        pl.callbacks.ModelCheckpoint(
            dirpath=given.ckpts, every_n_train_steps=5, save_last=True, enable_version_counter=False
        )
    ]


def main() -> None:
    pl.seed_everything()
    x = torch.randn(512, 8)
    data = DataLoader(TensorDataset(x, x.sum(dim=1, keepdim=True)), batch_size=8, shuffle=True)
    fits, net = trainer(), Net()
    if given.does in ("tries_first", "only_tries"):
        trainer(fast_dev_run=2).fit(Net(), data)
    if given.does not in ("never", "only_tries"):
        fits.fit(net, data, ckpt_path="last" if given.ckpts is not None and given.ckpts.exists() else None)
    if given.does == "twice":
        trainer().fit(Net(), data)
    if given.tell is not None and fits.is_global_zero:
        names = [type(each).__name__ for each in fits.callbacks]
        seen = {
            "losses": net.losses,
            "callbacks": names,
            "environ": dict(os.environ),
            "path": sys.path,
            "cwd": str(Path.cwd()),
        }
        given.tell.write_text(json.dumps(seen))
    if given.does == "fails later":
        raise ValueError("no checkpoint to test")


if __name__ == "__main__":
    main()

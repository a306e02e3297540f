"""A multilayer perceptron on a table: steps of a millisecond, short epochs, each with validation and a checkpoint."""

import argparse

import lightning as L
import torch
import torch.nn as nn
import torch.nn.functional as F
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset, random_split
from torchmetrics import MeanAbsoluteError


class Regressor(L.LightningModule):
    def __init__(self, features=32, hidden=256):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(features, hidden), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Dropout(0.1),
            nn.Linear(hidden, hidden), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Linear(hidden, 1),
        )  # fmt: skip
        self.val_mae = MeanAbsoluteError()

    def forward(self, x):
        return self.net(x).squeeze(-1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.mse_loss(self(x), y)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        out = self(x)
        self.val_mae(out, y)
        self.log("val_loss", F.mse_loss(out, y), prog_bar=True)
        self.log("val_mae", self.val_mae, prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--size", choices=["tiny", "default"], default="default")
    args = parser.parse_args()
    tiny = args.size == "tiny"
    L.seed_everything(0)
    rows = 2_000 if tiny else 20_000
    x = torch.randn(rows, 32)
    y = x[:, 0] * x[:, 1] + x[:, 2].sin() + 0.1 * torch.randn(rows)
    train, val = random_split(TensorDataset(x, y), [0.8, 0.2])
    batch_size = 64 if tiny else 256
    trainer = L.Trainer(
        max_steps=args.steps or (75 if tiny else 2_000),
        max_epochs=-1,
        devices=args.devices,
        callbacks=[EarlyStopping("val_loss", patience=1000), ModelCheckpoint(monitor="val_loss")],
    )
    trainer.fit(Regressor(), DataLoader(train, batch_size, shuffle=True), DataLoader(val, batch_size))

"""An image classifier that logs a lot: a collection of torchmetrics at every step, a checkpoint every few steps."""

import argparse

import lightning as L
import torch
import torch.nn as nn
import torch.nn.functional as F
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MetricCollection
from torchmetrics.classification import (
    MulticlassAccuracy,
    MulticlassAUROC,
    MulticlassConfusionMatrix,
    MulticlassF1Score,
)
from torchvision.models import resnet18


class Classifier(L.LightningModule):
    def __init__(self, classes):
        super().__init__()
        self.net = resnet18(num_classes=classes)
        self.net.conv1, self.net.maxpool = nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.Identity()
        kinds = {"acc": MulticlassAccuracy, "f1": MulticlassF1Score, "auroc": MulticlassAUROC}
        self.scores = MetricCollection(
            {name: kind(num_classes=classes) for name, kind in kinds.items()}, prefix="train_"
        )
        self.confusion = MulticlassConfusionMatrix(num_classes=classes)

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self.net(x)
        loss = F.cross_entropy(logits, y)
        self.log("train_loss", loss, prog_bar=True, on_epoch=True)
        self.log_dict(self.scores(logits.softmax(1), y), prog_bar=True)
        self.confusion.update(logits, y)
        for name, parameter in self.net.named_parameters():
            if name.endswith("conv1.weight"):
                self.log(f"norm/{name}", parameter.detach().norm())
        return loss

    def on_train_epoch_end(self):
        self.log("worst_class", self.confusion.compute().diag().min().float())
        self.confusion.reset()
        self.scores.reset()

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--size", choices=["tiny", "default"], default="default")
    args = parser.parse_args()
    tiny = args.size == "tiny"
    L.seed_everything(0)
    count, side = (256, 8) if tiny else (12_800, 32)
    labels = torch.randint(10, (count,))
    pictures = torch.randn(count, 3, side, side) + 0.1 * labels[:, None, None, None]
    every = ModelCheckpoint(every_n_train_steps=5 if tiny else 50, save_top_k=-1)
    trainer = L.Trainer(
        max_steps=args.steps or (12 if tiny else 300),
        devices=args.devices,
        callbacks=[every, LearningRateMonitor("step")],
        logger=CSVLogger("logs"),
        log_every_n_steps=1,
    )
    loader = DataLoader(TensorDataset(pictures, labels), batch_size=32 if tiny else 128, shuffle=True)
    trainer.fit(Classifier(10), loader)

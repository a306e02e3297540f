"""A ViT from timm on a folder of JPEGs (one folder a class); without --data, on JPEGs made up in a temporary folder."""

import argparse
import io
import tempfile
from pathlib import Path

import lightning as L
import timm
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from PIL import Image
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAccuracy
from torchvision import datasets, transforms


def make_jpegs(folder, classes, each, side, copies=32):
    for label in range(classes):
        (folder / f"{label:03d}").mkdir(parents=True)
        for number in range(each):
            if number % copies == 0:
                noise = torch.randint(0, 256, (12, 12, 3), dtype=torch.uint8).numpy()
                Image.fromarray(noise).resize((side, side)).save(jpeg := io.BytesIO(), "jpeg")
            (folder / f"{label:03d}" / f"{number:04d}.jpg").write_bytes(jpeg.getvalue())
    return folder


class ViT(L.LightningModule):
    def __init__(self, name, classes, side, lr=1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.model = timm.create_model(name, pretrained=False, num_classes=classes, img_size=side, drop_path_rate=0.1)
        self.val_acc = MulticlassAccuracy(num_classes=classes)

    def forward(self, x):
        return self.model(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self(x), y, label_smoothing=0.1)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        self.val_acc(logits, y)
        self.log("val_loss", F.cross_entropy(logits, y), prog_bar=True, sync_dist=True)
        self.log("val_acc", self.val_acc, prog_bar=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr, weight_decay=0.05)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.trainer.max_steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--size", choices=["tiny", "default"], default="default")
    args = parser.parse_args()
    tiny = args.size == "tiny"
    steps = args.steps or (20 if tiny else 200)
    side, batch_size = (32, 4) if tiny else (224, 128)
    L.seed_everything(1, workers=True)
    made = tempfile.TemporaryDirectory()
    folder = args.data or make_jpegs(Path(made.name) / "train", 10, 20 if tiny else 1280, side + 32)
    normalize = transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    augment = [transforms.RandomResizedCrop(side), transforms.RandomHorizontalFlip(), transforms.ToTensor(), normalize]
    plain = [transforms.Resize((side, side)), transforms.ToTensor(), normalize]
    train = datasets.ImageFolder(folder, transforms.Compose(augment))
    val = datasets.ImageFolder(folder, transforms.Compose(plain))
    val = torch.utils.data.Subset(val, range(0, len(val), 8))
    workers = 2 if tiny else args.workers
    train_loader = DataLoader(train, batch_size, shuffle=True, num_workers=workers, pin_memory=True, drop_last=True)
    val_loader = DataLoader(val, batch_size * 2, num_workers=workers, pin_memory=True)
    name = "vit_tiny_patch16_224" if tiny else "vit_small_patch16_224"
    trainer = L.Trainer(
        max_steps=steps,
        devices=args.devices,
        val_check_interval=min(10 if tiny else 30, len(train_loader) // args.devices),
        callbacks=[ModelCheckpoint(monitor="val_acc", mode="max"), LearningRateMonitor("step")],
    )
    trainer.fit(ViT(name, len(train.classes), side), train_loader, val_loader)

"""SimCLR: two views of each picture, made on the CPU, and a loss in which every sample is another one's negative."""

import argparse

import lightning as L
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset
from torchvision import models, transforms


class TwoViews(Dataset):
    def __init__(self, count, side):
        generator = torch.Generator().manual_seed(0)
        self.pictures = torch.randint(256, (count, 3, side, side), dtype=torch.uint8, generator=generator)
        self.transform = transforms.Compose([
            transforms.ToPILImage(),
            transforms.RandomResizedCrop(side, scale=(0.2, 1.0)),
            transforms.RandomHorizontalFlip(),
            transforms.RandomApply([transforms.ColorJitter(0.4, 0.4, 0.4, 0.1)], p=0.8),
            transforms.RandomGrayscale(p=0.2),
            transforms.ToTensor(),
        ])  # fmt: skip

    def __len__(self):
        return len(self.pictures)

    def __getitem__(self, index):
        return self.transform(self.pictures[index]), self.transform(self.pictures[index])


class SimCLR(L.LightningModule):
    def __init__(self, temperature=0.2):
        super().__init__()
        self.backbone = models.resnet18(num_classes=512)
        self.backbone.fc = nn.Sequential(self.backbone.fc, nn.ReLU(), nn.Linear(512, 128))
        self.temperature = temperature

    def training_step(self, batch, batch_idx):
        z = F.normalize(self.backbone(torch.cat(batch)), dim=1)
        scores = (z @ z.T / self.temperature).fill_diagonal_(float("-inf"))
        half = len(batch[0])
        partners = torch.arange(2 * half, device=self.device).roll(half)
        loss = F.cross_entropy(scores, partners)
        self.log("loss", loss, prog_bar=True)
        self.log("hits", (scores.argmax(1) == partners).float().mean(), prog_bar=True)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--size", choices=["tiny", "default"], default="default")
    args = parser.parse_args()
    tiny = args.size == "tiny"
    L.seed_everything(0)
    data = TwoViews(128 if tiny else 6_000, 32 if tiny else 96)
    loader = DataLoader(
        data, batch_size=16 if tiny else 256, shuffle=True, drop_last=True, num_workers=0 if tiny else 4
    )
    trainer = L.Trainer(max_steps=args.steps or (10 if tiny else 60), devices=args.devices, sync_batchnorm=True)
    trainer.fit(SimCLR(), loader)

"""Segmentation with heavy augmentation on the CPU: a torchvision model, masks that turn with the pictures, Dice."""

import argparse

import lightning as L
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset
from torchmetrics.classification import MulticlassJaccardIndex
from torchvision import models, tv_tensors
from torchvision.transforms import v2


class Shapes(Dataset):
    """Noise with bright boxes; the mask says which box."""

    def __init__(self, count, side, augment):
        self.count, self.side = count, side
        self.transform = v2.Compose([
            v2.RandomAffine(30, (0.1, 0.1), (0.8, 1.2)),
            v2.ElasticTransform(alpha=40.0),
            v2.RandomHorizontalFlip(),
            v2.ColorJitter(0.3, 0.3),
            v2.GaussianBlur(5),
        ]) if augment else v2.Identity()  # fmt: skip

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        picture = torch.rand(3, self.side, self.side, generator=generator)
        mask = torch.zeros(self.side, self.side, dtype=torch.uint8)
        for label in (1, 2):
            top, left = torch.randint(self.side // 2, (2,), generator=generator).tolist()
            box = slice(top, top + self.side // 3), slice(left, left + self.side // 3)
            picture[(slice(None), *box)] += 0.5 * label
            mask[box] = label
        return self.transform(tv_tensors.Image(picture), tv_tensors.Mask(mask))


class Segmenter(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = models.segmentation.lraspp_mobilenet_v3_large(weights_backbone=None, num_classes=3)
        self.iou = MulticlassJaccardIndex(num_classes=3)

    def step(self, batch):
        x, y = batch
        logits, y = self.net(x)["out"], y.long()
        chances, wanted = logits.softmax(1), F.one_hot(y, 3).movedim(-1, 1)
        dice = 1 - (2 * (chances * wanted).sum((0, 2, 3)) / (chances + wanted).sum((0, 2, 3))).mean()
        return logits, F.cross_entropy(logits, y) + dice

    def training_step(self, batch, batch_idx):
        _, loss = self.step(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        logits, loss = self.step(batch)
        self.iou(logits, batch[1])
        self.log_dict({"val_loss": loss, "val_iou": self.iou}, prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--size", choices=["tiny", "default"], default="default")
    args = parser.parse_args()
    tiny = args.size == "tiny"
    L.seed_everything(0)
    side, workers = (32, 0) if tiny else (256, 8)
    train = DataLoader(Shapes(64 if tiny else 640, side, True), 4 if tiny else 16, shuffle=True, num_workers=workers)
    val = DataLoader(Shapes(8 if tiny else 64, side, False), 4 if tiny else 16, num_workers=workers)
    trainer = L.Trainer(max_steps=args.steps or (12 if tiny else 120), devices=args.devices, num_sanity_val_steps=1)
    trainer.fit(Segmenter(), train, val)

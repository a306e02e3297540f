"""Sentiment with a BERT from Hugging Face, from scratch: fp32, each batch padded to its longest sentence."""

import argparse

import lightning as L
import torch
from torch.utils.data import DataLoader, Dataset
from torchmetrics.classification import MulticlassAccuracy
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup


class Reviews(Dataset):
    """Sentences of made-up tokens; the label is the parity of the first one."""

    def __init__(self, count, longest, vocabulary):
        generator = torch.Generator().manual_seed(0)
        lengths = torch.empty(count).exponential_(6 / longest, generator=generator).clamp(8, longest)
        self.rows = [torch.randint(5, vocabulary, (int(n),), generator=generator) for n in lengths]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {"input_ids": self.rows[index].tolist(), "label": int(self.rows[index][0]) % 2}


def collate(rows):
    longest = max(len(row["input_ids"]) for row in rows)
    ids = [row["input_ids"] + [0] * (longest - len(row["input_ids"])) for row in rows]
    mask = [[1] * len(row["input_ids"]) + [0] * (longest - len(row["input_ids"])) for row in rows]
    labels = torch.tensor([row["label"] for row in rows])
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask), "labels": labels}


class Classifier(L.LightningModule):
    def __init__(self, config, lr, total_steps):
        super().__init__()
        self.model = BertForSequenceClassification(config)
        self.accuracy = MulticlassAccuracy(num_classes=2)
        self.lr, self.total_steps = lr, total_steps
        self.running = 0.0

    def training_step(self, batch, batch_idx):
        out = self.model(**batch)
        self.running = 0.9 * self.running + 0.1 * out.loss.item()
        self.accuracy(out.logits, batch["labels"])
        self.log("train_loss", out.loss, prog_bar=True)
        self.log("running_loss", self.running)
        self.log("train_acc", self.accuracy, prog_bar=True)
        return out.loss

    def configure_optimizers(self):
        decay = [p for n, p in self.named_parameters() if "bias" not in n and "LayerNorm" not in n]
        rest = [p for n, p in self.named_parameters() if "bias" in n or "LayerNorm" in n]
        groups = [{"params": decay, "weight_decay": 0.01}, {"params": rest, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=self.lr)
        schedule = get_linear_schedule_with_warmup(optimizer, self.total_steps // 10, self.total_steps)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--size", choices=["tiny", "default"], default="default")
    args = parser.parse_args()
    tiny = args.size == "tiny"
    steps = args.steps or (20 if tiny else 80)
    L.seed_everything(42)
    if tiny:
        config = BertConfig(
            vocab_size=512, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=128
        )
    else:
        config = BertConfig()
    data = Reviews(16 * 500, 64 if tiny else 384, config.vocab_size)
    loader = DataLoader(data, batch_size=8 if tiny else 32, shuffle=True, collate_fn=collate)
    trainer = L.Trainer(max_steps=steps, devices=args.devices, gradient_clip_val=1.0, log_every_n_steps=10)
    trainer.fit(Classifier(config, 5e-5, steps), loader)

"""A GPT-2 from Hugging Face with gradient checkpointing, trained on made-up text, four batches for each step."""

import argparse

import lightning as L
import torch
from torch.utils.data import DataLoader, Dataset
from transformers import GPT2Config, GPT2LMHeadModel


class Blocks(Dataset):
    def __init__(self, count, length, vocabulary):
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(vocabulary, (count * length,), generator=generator)
        self.length = length

    def __len__(self):
        return len(self.tokens) // self.length

    def __getitem__(self, index):
        block = self.tokens[index * self.length : (index + 1) * self.length]
        return {"input_ids": block, "labels": block.clone()}


class Decoder(L.LightningModule):
    def __init__(self, config):
        super().__init__()
        self.model = GPT2LMHeadModel(config)
        self.model.gradient_checkpointing_enable()

    def training_step(self, batch, batch_idx):
        loss = self.model(**batch).loss
        self.log("train_loss", loss, prog_bar=True)
        self.log("perplexity", loss.detach().exp(), prog_bar=True)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, total_iters=20)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--size", choices=["tiny", "default"], default="default")
    args = parser.parse_args()
    tiny = args.size == "tiny"
    L.seed_everything(0)
    sizes = {"vocab_size": 512, "n_positions": 64, "n_embd": 64, "n_layer": 2, "n_head": 2} if tiny else {}
    config = GPT2Config(use_cache=False, **sizes)
    data = Blocks(2_000, 64 if tiny else 512, config.vocab_size)
    trainer = L.Trainer(
        max_steps=args.steps or (8 if tiny else 60),
        devices=args.devices,
        accumulate_grad_batches=4,
        gradient_clip_val=1.0,
        enable_checkpointing=False,
    )
    trainer.fit(Decoder(config), DataLoader(data, batch_size=4 if tiny else 8, shuffle=True))

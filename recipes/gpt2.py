"""GPT-2 with 124 million parameters, the textbook way: attention written out by hand, AdamW, a memory-mapped text."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import lightning as L
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from . import _data


@dataclass(frozen=True, kw_only=True)
class Settings:
    size: str = "default"
    """default: GPT-2's own shape; or tiny: 2 layers, 64 wide, 64 tokens, no dropout, a vocabulary of the 256 bytes."""
    data: str | None = None
    """A text file, read as one token per byte; null: a text generated once on this machine."""

    def __post_init__(self) -> None:
        _data.check_size(self.size)


class Shape(NamedTuple):
    layers: int = 12
    heads: int = 12
    width: int = 768
    context: int = 1024
    vocabulary: int = 50257  # GPT-2's own, so that the work is too, though a text of bytes uses 256 of it
    dropout: float = 0.1


def build(settings: Settings) -> tuple[GPT2, Text]:
    """Build the module and the data of this recipe; raises ConfigError where ``settings.data`` does not exist."""
    _data.check_path(settings.data)
    tiny = Shape(layers=2, heads=2, width=64, context=64, vocabulary=256, dropout=0.0)
    return GPT2(shape := tiny if settings.size == "tiny" else Shape()), Text(settings.data, shape.context)


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(shape.width, 3 * shape.width), nn.Linear(shape.width, shape.width)
        self.heads, self.dropout = shape.heads, nn.Dropout(shape.dropout)
        self.register_buffer("past", torch.ones(shape.context, shape.context).bool().tril(), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        B, T, C = x.shape
        q, k, v = (part.view(B, T, self.heads, -1).transpose(1, 2) for part in self.qkv(x).split(C, dim=2))
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))  # [B, heads, T, T]
        weights = scores.masked_fill(~self.past[:T, :T], float("-inf")).softmax(dim=-1)
        return self.dropout(self.proj((self.dropout(weights) @ v).transpose(1, 2).reshape(B, T, C)))


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm_1, self.attention = nn.LayerNorm(shape.width), Attention(shape)
        self.norm_2, self.expand = nn.LayerNorm(shape.width), nn.Linear(shape.width, 4 * shape.width)
        self.proj, self.dropout = nn.Linear(4 * shape.width, shape.width), nn.Dropout(shape.dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.dropout(self.proj(F.gelu(self.expand(self.norm_2(x)), approximate="tanh")))


class GPT2(L.LightningModule):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.token = nn.Embedding(shape.vocabulary, shape.width)
        self.place = nn.Parameter(torch.empty(shape.context, shape.width))
        self.blocks = nn.Sequential(*(Block(shape) for _ in range(shape.layers)))
        self.dropout, self.norm = nn.Dropout(shape.dropout), nn.LayerNorm(shape.width)
        for name, parameter in self.named_parameters():  # GPT-2's: projections onto the residual stream start smaller
            std = 0.02 / math.sqrt(2 * shape.layers) if "proj" in name else 0.02
            if "norm" not in name:
                nn.init.normal_(parameter, std=0.0 if name.endswith("bias") else std)

    def forward(self, tokens: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        """Tokens [B, T] and the token that follows each [B, T] to the mean loss."""
        x = self.blocks(self.dropout(self.token(tokens) + self.place[: tokens.size(1)]))
        logits = F.linear(self.norm(x), self.token.weight)  # tied: the embedding is the output layer, too
        return F.cross_entropy(logits.flatten(0, 1), following.flatten())

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        self.log("train_loss", loss := self(*batch))
        return loss

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.log("val_loss", self(*batch))

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-4)
        warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 0.01, total_iters=100)  # else some steps lose 11 to 14
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": warm_up, "interval": "step"}}


class Text(L.LightningDataModule):
    """Windows of the text's tokens and the same windows one token on, both [B, T]."""

    def __init__(self, data: str | None, context: int) -> None:
        super().__init__()
        self.data, self.context, self.batch_size = data, context, 8

    def prepare_data(self) -> None:
        _data.token_sets(self.data, self.context)

    def setup(self, stage: str) -> None:
        self.train_set, self.val_set = _data.token_sets(self.data, self.context)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.train_set, batch_size=self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.val_set, batch_size=self.batch_size)

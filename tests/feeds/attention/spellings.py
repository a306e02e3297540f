"""Attention as people write it. Each module takes x [B, T, 16], or what its own docstring says, and has 2 heads."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

HEADS, WIDTH, CONTEXT = 2, 16, 32


class Spelling(nn.Module):
    """Projections, and heads as [B, heads, T, 8]."""

    causal = True

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("past", torch.ones(CONTEXT, CONTEXT).tril(), persistent=False)

    def split(self, x: torch.Tensor) -> Any:
        B, T, _ = x.shape
        return (part.view(B, T, HEADS, -1).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))

    def join(self, heads: torch.Tensor) -> torch.Tensor:
        B, _, T, _ = heads.shape
        return self.proj(heads.transpose(1, 2).contiguous().view(B, T, WIDTH))


class NanoGpt(Spelling):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        T = x.size(1)
        q, k, v = self.split(x)
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.past.view(1, 1, CONTEXT, CONTEXT)[:, :, :T, :T] == 0, float("-inf"))
        att = F.softmax(att, dim=-1)
        return self.join(att @ v)


class AddedMask(Spelling):
    """The mask is made in forward and added; softmax in float32 or wider."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.split(x)
        scores = torch.matmul(q, k.mT).div(q.shape[-1] ** 0.5)
        ahead = torch.full((x.shape[1], x.shape[1]), -1e9, device=x.device).triu(diagonal=1)
        weights = torch.softmax((scores + ahead).to(torch.promote_types(x.dtype, torch.float32)), dim=3).type_as(q)
        return self.join(torch.matmul(weights, v))


class WhereEinsum(Spelling):
    """The scale is a buffer, the operands are turned around, and the heads never move."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor(0.25))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        B, T, _ = x.shape
        q, k, v = (part.view(B, T, HEADS, -1) for part in self.qkv(x).chunk(3, dim=-1))
        scores = torch.einsum("bshd,bthd->bhts", k, q) * self.scale
        places = torch.arange(T, device=x.device)
        scores = torch.where(places[:, None] >= places, scores, torch.finfo(scores.dtype).min)
        return self.proj(torch.einsum("bhts,bshd->bthd", scores.softmax(-1), v).reshape(B, T, WIDTH))


class Baddbmm(Spelling):
    """Bloom's: samples and heads in one dimension, a bias that is added in the product, no mask."""

    causal = False

    def __init__(self) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.randn(HEADS, 1, CONTEXT))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        B, T, _ = x.shape
        q, k, v = (part.reshape(B * HEADS, T, -1) for part in self.split(x))
        alibi = self.slope[:, :, :T].repeat(B, 1, 1)
        scores = alibi.baddbmm(q, k.transpose(1, 2), beta=1.0, alpha=0.3)
        heads = torch.bmm(scores.softmax(dim=-1), v).view(B, HEADS, T, -1)
        return self.join(heads)


class Padded(Spelling):
    """Both masks: what is past, and what the batch says are tokens (the numbers 0 in the first column are none)."""

    causal = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        T = x.size(1)
        q, k, v = self.split(x)
        tokens = x[:, :, 0] != 0
        scores = torch.matmul(q, k.transpose(2, 3)) / 3.0
        scores = scores.masked_fill(~(self.past[:T, :T] > 0), -1e30)
        scores = scores.masked_fill_(~tokens[:, None, None, :], -1e30)
        return self.join(F.softmax(scores, -1).matmul(v))


class Learned(Spelling):
    """A temperature for each head, a bias for each pair of places, and weights from the right: Swin's, SAGAN's."""

    causal = False

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.full((HEADS, 1, 1), 0.4))
        self.bias = nn.Parameter(torch.randn(HEADS, CONTEXT, CONTEXT))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        T = x.size(1)
        q, k, v = self.split(x)
        weights = ((q @ k.transpose(-2, -1)) * self.temperature + self.bias[:, :T, :T]).softmax(dim=-1)
        return self.join((v.transpose(-2, -1) @ weights.transpose(-2, -1)).transpose(-2, -1))


class OneSequence(Spelling):
    """x [1, T, 16] as one matrix, one head, scaled queries, softmax as a module."""

    causal = False

    def __init__(self) -> None:
        super().__init__()
        self.soft = nn.Softmax(dim=-1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x[0]).chunk(3, dim=-1)
        return self.proj(self.soft((q * 0.2) @ k.T) @ v)[None]


class Helper(Spelling):
    """The work is in a function beside the class, which a method calls."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._attend(x)

    def _attend(self, x: torch.Tensor) -> torch.Tensor:
        return self.join(attend(*self.split(x), self.past[: x.size(1), : x.size(1)].bool()))


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
    scores = torch.where(mask, scores, float("-inf"))
    return scores.softmax(-1) @ v


class Prefix(Spelling):
    """The mask is causal but for its first 4 columns, which a statement of its own opens."""

    causal = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.split(x)
        mask = torch.ones(x.size(1), x.size(1)).tril()
        mask[:, :4].fill_(1)
        return self.join((q @ k.transpose(-2, -1)).masked_fill(mask == 0, -math.inf).softmax(-1) @ v)


class BarsAll(Spelling):
    """All tokens of the samples whose last number is below 0 are barred: their weights are all equal."""

    causal = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.split(x)
        barred = (x[:, :, 0] == 0) | (x[:, -1:, -1] < 0)
        return self.join((q @ k.transpose(-2, -1)).masked_fill(barred[:, None, None, :], -1e9).softmax(-1) @ v)


SPELLINGS: list[type[Spelling]] = [
    BarsAll,
    NanoGpt,
    AddedMask,
    WhereEinsum,
    Baddbmm,
    Padded,
    Learned,
    OneSequence,
    Helper,
    Prefix,
]


class Window(NanoGpt):
    """GPT-Neo's local layers: causal over the first 8 tokens, and a window of 8 beyond."""

    causal = False

    def __init__(self) -> None:
        super().__init__()
        self.past = self.past.triu(diagonal=-7)


class ReturnsWeights(Spelling):
    def forward(self, x: torch.Tensor) -> Any:
        q, k, v = self.split(x)
        weights = (q @ k.transpose(-2, -1)).softmax(-1)
        return self.join(weights @ v), weights


class OtherDimension(Spelling):
    """A softmax over the queries."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.split(x)
        return self.join((q @ k.transpose(-2, -1)).softmax(dim=2) @ v)


class SmallFill(Spelling):
    """What it puts in place of masked scores still has weight."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.split(x)
        past = self.past[: x.size(1), : x.size(1)] == 0
        return self.join((q @ k.transpose(-2, -1)).masked_fill(past, -1.0).softmax(-1) @ v)


class ScaledFill(Spelling):
    """What it puts in place of masked scores is scaled, and then has weight."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.split(x)
        past = self.past[: x.size(1), : x.size(1)] == 0
        return self.join(((q @ k.transpose(-2, -1)).masked_fill(past, -1e4) * 1e-4).softmax(-1) @ v)


class Rounded(Spelling):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.split(x)
        return self.join(torch.div(q @ k.transpose(-2, -1), 0.3, rounding_mode="floor").softmax(-1) @ v)


class CastToInt(Spelling):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.split(x)
        return self.join((q @ k.transpose(-2, -1)).to(torch.int32).to(x.dtype).softmax(-1) @ v)


class ChangesItsMask(Spelling):
    """A bias that is another by the time that the one call would read it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.split(x)
        bias = x.mean(-1)[:, None, None, :].clone()
        scores = q @ k.transpose(-2, -1) + bias
        bias.zero_()
        return self.join(scores.softmax(-1) @ v)


class Gate(nn.Module):
    """A mixture of experts: a softmax and products, and no attention."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, 4), nn.Parameter(torch.randn(4, WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.einsum("bte,btd,edf->btf", self.gate(x).softmax(-1), x, self.experts)


LEFT: dict[type[nn.Module], str] = {
    ReturnsWeights: "its weights are also used elsewhere",
    OtherDimension: "its softmax is not over the last dimension",
    SmallFill: "it does not fill masked scores with a large negative number",
    ScaledFill: "it does not fill masked scores with a large negative number once they are scaled",
    Rounded: "its scores go through div",
    CastToInt: "its scores go through to",
    ChangesItsMask: "one of its inputs is changed in place before its result is computed",
    Gate: "its scores go through linear",
}
"""What one call does not compute, and the reason given."""

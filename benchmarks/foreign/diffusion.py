"""A small diffusion UNet on made-up pictures, with an exponential moving average of the weights in a callback."""

import argparse
import copy
import math

import lightning as L
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset


class Block(nn.Module):
    def __init__(self, inner, outer, time):
        super().__init__()
        self.first, self.second = nn.Conv2d(inner, outer, 3, padding=1), nn.Conv2d(outer, outer, 3, padding=1)
        self.norms = nn.ModuleList([nn.GroupNorm(8, outer), nn.GroupNorm(8, outer)])
        self.time = nn.Linear(time, outer)
        self.skip = nn.Conv2d(inner, outer, 1) if inner != outer else nn.Identity()

    def forward(self, x, t):
        h = F.silu(self.norms[0](self.first(x))) + self.time(t)[:, :, None, None]
        return F.silu(self.norms[1](self.second(h))) + self.skip(x)


class UNet(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.width, sizes = width, [width, 2 * width, 4 * width]
        self.enter = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList(Block(a, b, 4 * width) for a, b in zip([width, *sizes], sizes, strict=False))
        self.up = nn.ModuleList(
            Block(a + b, b, 4 * width) for a, b in zip([4 * width, 4 * width, 2 * width], sizes[::-1], strict=False)
        )
        self.time = nn.Sequential(nn.Linear(width, 4 * width), nn.SiLU(), nn.Linear(4 * width, 4 * width))
        self.leave = nn.Conv2d(width, 3, 1)

    def forward(self, x, t):
        waves = torch.exp(-math.log(1e4) * torch.arange(self.width // 2, device=x.device) / (self.width // 2))
        angles = t[:, None].float() * waves
        t, x, kept = self.time(torch.cat([angles.sin(), angles.cos()], dim=1)), self.enter(x), []
        for block in self.down:
            kept.append(x := block(x, t))
            x = F.avg_pool2d(x, 2)
        for block in self.up:
            x = block(torch.cat([F.interpolate(x, scale_factor=2), kept.pop()], dim=1), t)
        return self.leave(x)


class Diffusion(L.LightningModule):
    def __init__(self, width):
        super().__init__()
        self.net = UNet(width)
        self.register_buffer("alphas", torch.linspace(1, 0.01, 1000).cumprod(0).clamp(min=1e-4))

    def training_step(self, batch, batch_idx):
        (x,) = batch
        t, noise = torch.randint(1000, (len(x),), device=self.device), torch.randn_like(x)
        a = self.alphas[t][:, None, None, None]
        loss = F.mse_loss(self.net(a.sqrt() * x + (1 - a).sqrt() * noise, t), noise)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=2e-4)


class EMA(L.Callback):
    def on_fit_start(self, trainer, pl_module):
        self.average = copy.deepcopy(pl_module.net).requires_grad_(False)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        for mean, value in zip(self.average.parameters(), pl_module.net.parameters(), strict=False):
            mean.lerp_(value.detach(), 0.001)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--size", choices=["tiny", "default"], default="default")
    args = parser.parse_args()
    tiny = args.size == "tiny"
    L.seed_everything(0)
    pictures = torch.rand(512 if tiny else 8_192, 3, *(2 * [16 if tiny else 64])) * 2 - 1
    steps = args.steps or (12 if tiny else 200)
    trainer = L.Trainer(max_steps=steps, devices=args.devices, callbacks=[EMA()], enable_checkpointing=False)
    loader = DataLoader(TensorDataset(pictures), batch_size=8 if tiny else 64, shuffle=True, drop_last=True)
    trainer.fit(Diffusion(8 if tiny else 64), loader)

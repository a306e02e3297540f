"""DCGAN on made-up faces: manual optimization, two optimizers, a discriminator called on real and on fake images."""

import argparse

import lightning as L
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset


class Faces(Dataset):
    def __len__(self):
        return 8192

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        small = torch.rand(1, 3, 8, 8, generator=generator)
        return F.interpolate(small, size=64, mode="bilinear")[0] * 2 - 1


def up(inputs, outputs, stride=2, padding=1):
    return nn.Sequential(
        nn.ConvTranspose2d(inputs, outputs, 4, stride, padding, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(True)
    )


def down(inputs, outputs):
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 4, 2, 1, bias=False), nn.BatchNorm2d(outputs), nn.LeakyReLU(0.2, inplace=True)
    )


class GAN(L.LightningModule):
    def __init__(self, latent=100, width=64, lr=2e-4):
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        w = width
        self.generator = nn.Sequential(
            up(latent, w * 8, 1, 0), up(w * 8, w * 4), up(w * 4, w * 2), up(w * 2, w),
            nn.ConvTranspose2d(w, 3, 4, 2, 1, bias=False), nn.Tanh(),
        )  # fmt: skip
        self.discriminator = nn.Sequential(
            nn.Conv2d(3, w, 4, 2, 1), nn.LeakyReLU(0.2, inplace=True),
            down(w, w * 2), down(w * 2, w * 4), down(w * 4, w * 8), nn.Conv2d(w * 8, 1, 4, 1, 0), nn.Flatten(),
        )  # fmt: skip
        self.register_buffer("fixed_noise", torch.randn(16, latent, 1, 1))

    def forward(self, z):
        return self.generator(z)

    def training_step(self, real, batch_idx):
        opt_g, opt_d = self.optimizers()
        z = torch.randn(real.size(0), self.hparams.latent, 1, 1, device=self.device)
        fake = self(z)

        self.toggle_optimizer(opt_d)
        real_logits, fake_logits = self.discriminator(real), self.discriminator(fake.detach())
        d_loss = F.binary_cross_entropy_with_logits(real_logits, torch.ones_like(real_logits))
        d_loss = d_loss + F.binary_cross_entropy_with_logits(fake_logits, torch.zeros_like(fake_logits))
        opt_d.zero_grad()
        self.manual_backward(d_loss)
        opt_d.step()
        self.untoggle_optimizer(opt_d)

        self.toggle_optimizer(opt_g)
        logits = self.discriminator(self(z))
        g_loss = F.binary_cross_entropy_with_logits(logits, torch.ones_like(logits))
        opt_g.zero_grad()
        self.manual_backward(g_loss)
        opt_g.step()
        self.untoggle_optimizer(opt_g)
        self.log_dict({"d_loss": d_loss, "g_loss": g_loss}, prog_bar=True)

    def configure_optimizers(self):
        opt_g = torch.optim.Adam(self.generator.parameters(), lr=self.hparams.lr, betas=(0.5, 0.999))
        opt_d = torch.optim.Adam(self.discriminator.parameters(), lr=self.hparams.lr, betas=(0.5, 0.999))
        return [opt_g, opt_d]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--size", choices=["tiny", "default"], default="default")
    args = parser.parse_args()
    tiny = args.size == "tiny"
    L.seed_everything(0)
    loader = DataLoader(
        Faces(), batch_size=8 if tiny else 128, shuffle=True, num_workers=0 if tiny else 8, drop_last=True
    )
    steps = 2 * (args.steps or (30 if tiny else 400))  # Lightning counts each optimizer's
    trainer = L.Trainer(max_steps=steps, devices=args.devices, log_every_n_steps=10, strategy="auto")
    trainer.fit(GAN(width=8 if tiny else 64), loader)

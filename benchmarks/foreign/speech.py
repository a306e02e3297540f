"""Speech commands of varying length: spectrograms and SpecAugment on the CPU, a convolutional CTC model."""

import argparse

import lightning as L
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset


class Utterances(Dataset):
    """Made-up tones, half a second to two; the words are their pitches."""

    def __init__(self, count, rate):
        self.count, self.rate = count, rate

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        random = np.random.default_rng(index)
        words = random.integers(1, 20, size=random.integers(2, 8))
        wave = [np.sin(np.arange(self.rate // 4) * 0.02 * word) for word in words]
        sound = torch.from_numpy(np.concatenate(wave)).float() + 0.1 * torch.randn(len(words) * (self.rate // 4))
        spectrum = torch.stft(sound, 400, 160, window=torch.hann_window(400), return_complex=True).abs().log1p()
        for _ in range(2):  # SpecAugment
            start = np.random.randint(spectrum.shape[0] - 20)
            spectrum[start : start + np.random.randint(20)] = 0
            start = np.random.randint(spectrum.shape[1] - 10)
            spectrum[:, start : start + np.random.randint(10)] = 0
        return spectrum.T, torch.from_numpy(words)


def collate(rows):
    spectra, words = zip(*rows, strict=False)
    lengths = torch.tensor([len(each) for each in spectra]), torch.tensor([len(each) for each in words])
    return nn.utils.rnn.pad_sequence(spectra, batch_first=True), torch.cat(words), *lengths


class Recognizer(L.LightningModule):
    def __init__(self, width):
        super().__init__()
        self.enter = nn.Conv1d(201, width, 5, stride=2, padding=2)
        self.blocks = nn.ModuleList(nn.Conv1d(width, width, 5, padding=2) for _ in range(6))
        self.norms = nn.ModuleList(nn.BatchNorm1d(width) for _ in range(6))
        self.head = nn.Linear(width, 20)

    def forward(self, x):
        x = self.enter(x.transpose(1, 2))
        for block, norm in zip(self.blocks, self.norms, strict=False):
            x = x + F.relu(norm(block(x)))
        return self.head(x.transpose(1, 2)).log_softmax(-1)

    def training_step(self, batch, batch_idx):
        x, words, frames, counts = batch
        out = self(x)
        loss = F.ctc_loss(out.transpose(0, 1), words, (frames + 1) // 2, counts, zero_infinity=True)
        self.log("loss", loss, prog_bar=True, batch_size=len(x))
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, self.trainer.estimated_stepping_batches)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--size", choices=["tiny", "default"], default="default")
    args = parser.parse_args()
    tiny = args.size == "tiny"
    L.seed_everything(0)
    data = Utterances(256 if tiny else 4_000, 4_000 if tiny else 16_000)
    loader = DataLoader(data, batch_size=8 if tiny else 32, shuffle=True, collate_fn=collate, num_workers=2)
    trainer = L.Trainer(max_steps=args.steps or (12 if tiny else 150), devices=args.devices, gradient_clip_val=5.0)
    trainer.fit(Recognizer(32 if tiny else 512), loader)

"""A character LSTM over a stream of lines: an IterableDataset, batches of varying length, packed sequences."""

import argparse

import lightning as L
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class Lines(IterableDataset):
    """Endless made-up lines; each worker has its own."""

    def __init__(self, longest, vocabulary):
        self.longest, self.vocabulary = longest, vocabulary

    def __iter__(self):
        worker = get_worker_info()
        generator = torch.Generator().manual_seed(worker.id if worker else 0)
        while True:
            length = int(torch.randint(8, self.longest, (1,), generator=generator))
            start = int(torch.randint(1, self.vocabulary, (1,), generator=generator))
            yield (start + torch.arange(length) * 3) % (self.vocabulary - 1) + 1


def collate(lines):
    lengths = torch.tensor([len(line) for line in lines])
    return pad_sequence(lines, batch_first=True), lengths


class CharLSTM(L.LightningModule):
    def __init__(self, vocabulary, hidden):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, hidden, padding_idx=0)
        self.lstm = nn.LSTM(hidden, hidden, num_layers=2, batch_first=True, dropout=0.1)
        self.head = nn.Linear(hidden, vocabulary)

    def forward(self, tokens, lengths):
        packed = pack_padded_sequence(self.embed(tokens), lengths.cpu(), batch_first=True, enforce_sorted=False)
        out, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True)
        return self.head(out)

    def training_step(self, batch, batch_idx):
        tokens, lengths = batch
        logits = self(tokens[:, :-1], lengths - 1)
        loss = F.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], ignore_index=0)
        self.log("loss", loss, prog_bar=True)
        self.log("perplexity", loss.exp())
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=2e-3)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--size", choices=["tiny", "default"], default="default")
    args = parser.parse_args()
    tiny = args.size == "tiny"
    L.seed_everything(7)
    data = Lines(32 if tiny else 200, 128)
    loader = DataLoader(data, batch_size=8 if tiny else 64, collate_fn=collate)
    trainer = L.Trainer(
        max_steps=args.steps or (30 if tiny else 300), devices=args.devices, gradient_clip_val=1.0, max_epochs=1
    )
    trainer.fit(CharLSTM(128, 32 if tiny else 512), loader)

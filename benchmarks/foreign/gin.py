"""Graph classification with a GIN from PyTorch Geometric, on random graphs that are kept in memory."""

import argparse

import lightning as L
import torch
import torch.nn.functional as F
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GIN, MLP, global_add_pool


def random_graph(generator):
    nodes = int(torch.randint(10, 60, (1,), generator=generator))
    edges = torch.randint(0, nodes, (2, nodes * 4), generator=generator)
    x = torch.randn(nodes, 16, generator=generator)
    return Data(x=x, edge_index=edges, y=(x[:, 0].sum() > 0).long().view(1))


class GraphClassifier(L.LightningModule):
    def __init__(self, hidden=64, layers=5):
        super().__init__()
        self.gnn = GIN(16, hidden, layers, dropout=0.5, jk="cat")
        self.head = MLP([hidden, hidden, 2], norm="batch_norm", dropout=0.5)

    def forward(self, x, edge_index, batch):
        return self.head(global_add_pool(self.gnn(x, edge_index), batch))

    def training_step(self, data, batch_idx):
        out = self(data.x, data.edge_index, data.batch)
        loss = F.cross_entropy(out, data.y)
        self.log("train_loss", loss, prog_bar=True, on_step=True, on_epoch=True, batch_size=data.num_graphs)
        return loss

    def validation_step(self, data, batch_idx):
        out = self(data.x, data.edge_index, data.batch)
        correct = (out.argmax(-1) == data.y).float().mean()
        self.log("val_acc", correct, prog_bar=True, batch_size=data.num_graphs)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, help="rounded up to whole epochs of 32 batches")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--size", choices=["tiny", "default"], default="default")
    args = parser.parse_args()
    tiny = args.size == "tiny"
    steps = args.steps or (64 if tiny else 640)
    batch_size = 8 if tiny else 128
    L.seed_everything(12345)
    generator = torch.Generator().manual_seed(0)
    graphs = [random_graph(generator) for _ in range(batch_size * 32)]
    held_out = [random_graph(generator) for _ in range(batch_size * 2)]
    trainer = L.Trainer(
        max_epochs=-(-steps // 32), devices=args.devices, log_every_n_steps=5, check_val_every_n_epoch=5
    )
    trainer.fit(
        GraphClassifier(16 if tiny else 64),
        DataLoader(graphs, batch_size=batch_size, shuffle=True),
        DataLoader(held_out, batch_size=batch_size),
    )

"""What the rungs that load samples are tried on: facts of a loader, samplers and sources of a user's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import lightning as L
import torch
from torch.utils.data import IterableDataset, Sampler

from fastloop.records.facts import Facts, LoaderFacts
from tests.runs import Holds, Net, Run, Rungs, batches, numbered, run


def facts(loader: dict[str, Any] | None = None, **machine: Any) -> Facts:
    record = None if loader is None else LoaderFacts(**{"kind": "DataLoader", **loader})
    return Facts(**{"cpu_count": 8, **machine}, loader=record)


class Odd(Sampler):
    """A batch sampler without a batch size, which draws samples twice."""

    def __iter__(self) -> Iterator[list[int]]:
        yield from ([number, 19 - number, number] for number in range(0, 20, 3))

    def __len__(self) -> int:
        return 7


class ByEpoch(Sampler):
    """Shuffles by epoch, as DistributedSampler does."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 20

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(20, generator=torch.Generator().manual_seed(self.epoch)).tolist()


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter([tuple(member) for member in numbered(16)])


class Data(L.LightningDataModule):
    def train_dataloader(self) -> Any:
        return batches(shuffle=True)


class Nested(Net):
    """Trains on one of several loaders."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch["a"], batch_idx)


def run_and_draw(rungs: Rungs, train: Callable[[], Any], module: Any) -> tuple[Run, torch.Tensor]:
    """Three epochs on what `train` makes, a loader or a DataModule, and what torch draws after them."""
    made = train()
    source = {"datamodule": made, "train": None} if isinstance(made, Data) else {"train": made}
    return run(rungs, module=module, max_epochs=3, **source), torch.rand(1)


class Centers(Holds):
    """Samples that are centered by their sum, or that are not."""

    def __getitem__(self, index: int) -> Any:
        x, *rest = super().__getitem__(index)
        wide = x.repeat(20_000) * torch.arange(160_000).sin()
        return (x if self.still else x - wide.sum(), *rest)

"""Samples per second of batches of any kind: who is believed about how many samples there are."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, Dataset, IterableDataset

from fastloop import FastLoop
from fastloop.bridge.watch.loader_state import read_batch_sizes
from fastloop.records.measurement import Measurement
from tests.feeds.containers import Bare, Graphs
from tests.models import trainer


class Numbers(Dataset[Any]):
    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> int:
        return index


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(range(64))


class Few:
    """No DataLoader: the same batch four times."""

    def __init__(self, batch: Any) -> None:
        self.batch = batch

    def __iter__(self) -> Any:
        return iter([self.batch] * 4)


class Learns(L.LightningModule):
    """Learns from whatever comes, and logs as it is told."""

    def __init__(self, **logs: Any) -> None:
        super().__init__()
        self.weight, self.logs = torch.nn.Parameter(torch.ones(1)), logs

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.weight.square().sum()
        if self.logs:
            self.log("loss", loss, **self.logs)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Looks(L.Callback):
    """What the loader is said to draw, and what there is of ours in Lightning."""

    def __init__(self) -> None:
        self.sizes: tuple[int, ...] = ()
        self.patched = False
        self.copied: Any = None

    def on_train_batch_end(self, trainer: Any, *_: Any, **__: Any) -> None:
        self.sizes = read_batch_sizes(trainer)
        results = trainer.fit_loop.epoch_loop._results
        self.patched = "log" in vars(results)
        self.copied = copy.copy(vars(results).get("log"))


def watch(loader: Any, module: Learns | None = None, **settings: Any) -> tuple[Measurement, Looks, L.Trainer]:
    looks = Looks()
    loop = FastLoop({"watch": {"warmup_steps": 0}}, quiet=True)
    fit = trainer(callbacks=[loop, looks], max_epochs=1, **settings)
    fit.fit(module or Learns(), loader)
    assert loop.measurement is not None
    return loop.measurement, looks, fit


def load(collate: Callable[[list[int]], Any], size: int = 16, dataset: Any = None) -> DataLoader[Any]:
    return DataLoader(dataset or Numbers(), batch_size=size, collate_fn=collate)


def make_edges(indices: list[int]) -> Any:
    return {"edge_index": torch.zeros(2, 5 * len(indices)), "y": torch.zeros(len(indices))}


def test_graphs_are_counted_by_their_own_word() -> None:
    seen, looks, _ = watch(load(lambda indices: Graphs(len(indices), 7 * len(indices))))
    assert seen.global_batch == seen.micro_batch == 16 and seen.samples_per_s
    # 50 samples in batches of 16: the last one has two, and the first opens the window.
    assert seen.samples_per_s * seen.wall_ms / 1000 == pytest.approx(34)
    assert looks.sizes == (16, 2)


def test_a_loader_says_what_a_first_dimension_does_not() -> None:
    seen, *_ = watch(load(make_edges))
    assert seen.samples_per_s and seen.samples_per_s * seen.wall_ms / 1000 == pytest.approx(34)
    # A control: from a plain list nobody says it, and the first dimension has to do.
    blind, looks, _ = watch(Few(make_edges([*range(16)])))
    assert blind.global_batch == 2 and looks.sizes == ()


def test_a_stream_and_a_dataset_that_makes_batches() -> None:
    seen, looks, _ = watch(load(make_edges, dataset=Stream()))
    assert seen.global_batch == 16 and looks.sizes == (16,)
    ready = DataLoader([torch.zeros(32, 3)] * 4, batch_size=1, collate_fn=lambda batches: batches[0])
    assert watch(ready)[0].global_batch == 32


class Joins(Learns):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return torch.cat([batch["few"], *batch["more"]])


def test_a_batch_of_several_loaders_has_the_samples_of_all() -> None:
    """Also where a loader has ended before the others, where a loss is logged with one loader's size, and where a hook
    has made one batch of them."""

    def combine(samples: int = 32) -> CombinedLoader:
        few = DataLoader(torch.zeros(samples, 3), 4)
        return CombinedLoader({"few": few, "more": [DataLoader(torch.zeros(64, 3), 8) for _ in range(2)]}, "max_size")

    seen, looks, _ = watch(combine(), Learns(batch_size=4))
    assert (seen.global_batch, seen.micro_batch, looks.sizes) == (20, 20, ())
    assert watch(combine(), Joins())[0].global_batch == 20
    ends, *_ = watch(combine(samples=16))
    # The first of 8 steps opens the window; three more have samples of all loaders.
    assert ends.samples_per_s and ends.samples_per_s * ends.wall_ms / 1000 == pytest.approx(3 * 20 + 4 * 16)
    # Where a part cannot be counted, the rate is that of the first loader's batches, as it is without others.
    named = CombinedLoader([DataLoader(torch.zeros(64, 3), 4), DataLoader(["name"] * 64, 4)])  # type: ignore[arg-type]
    assert watch(named)[0].global_batch == 4
    alone, *_ = watch(CombinedLoader({"few": DataLoader(torch.zeros(64, 3), 4)}))
    assert alone.global_batch == 4


def test_the_module_may_say_it_with_its_log() -> None:
    packed = Few(Bare(tokens=torch.zeros(90), ends=torch.zeros(6)))
    assert watch(packed)[0].global_batch == 90
    seen, looks, fit = watch(packed, Learns(batch_size=6))
    assert seen.global_batch == 6 and looks.patched
    assert inspect.ismethod(looks.copied)  # a copy is Lightning's own again
    assert "log" not in vars(fit.fit_loop.epoch_loop._results)
    # Nobody has six hundred of anything.
    assert watch(packed, Learns(batch_size=600))[0].global_batch == 90


def test_what_is_logged_is_the_same() -> None:
    logged = []
    for callbacks in ([], [FastLoop(quiet=True)]):
        fit = trainer(callbacks=callbacks, max_epochs=1)
        fit.fit(Learns(batch_size=6, on_step=False, on_epoch=True), Few(torch.zeros(6, 2)))
        logged.append(dict(fit.callback_metrics))
    assert logged[0] == logged[1] and set(logged[0]) == {"loss"}

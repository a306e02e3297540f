"""Batches picked at once: proven on samples first, fresh after changes in place, and the loader's own in training."""

from __future__ import annotations

import re
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from fastloop.errors import NotApplicable
from fastloop.feeds.rows import engine as engine_file
from fastloop.feeds.rows.engine import RowEngine
from fastloop.feeds.rows.reading import Column, Rows, read_rows
from tests.rungs.fits import evidence, fit, verdict

CPU, META = torch.device("cpu"), torch.device("meta")


class Pairs(Dataset[Any]):
    """Written as people write it."""

    def __init__(self, count: int = 64) -> None:
        numbers = torch.Generator().manual_seed(0)
        self.x = torch.randn(count, 4, generator=numbers)
        self.y = self.x.sum(1, keepdim=True)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        return self.x[index], self.y[index]


class Fit(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Linear(4, 1)
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        loss = torch.nn.functional.mse_loss(self.net(x), y)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def load(dataset: Any, **settings: Any) -> Any:
    return DataLoader(dataset, batch_size=8, shuffle=True, **settings)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["own", "tensors"])
def test_training_is_the_same(kind: str, workers: int) -> None:
    def train(rungs: Any) -> Any:
        dataset: Any = Pairs() if kind == "own" else TensorDataset(Pairs().x, Pairs().y)
        module = Fit()
        watcher, _ = fit(rungs, module, load(dataset, num_workers=workers), max_epochs=3)
        return module.losses, torch.get_rng_state(), watcher

    plain, state, _ = train({})
    ours, after, watcher = train({"cache": {}})
    assert len(plain) == 24 and ours == plain
    assert torch.equal(state, after)
    assert verdict(watcher, "cache").took, verdict(watcher, "cache").why
    assert evidence(watcher, "cache")["row_batches"] == 24


class Tells(Fit):
    """Tells those who asked an installed module for it of every few steps: code reading does not find them."""

    def __init__(self, every: int) -> None:
        super().__init__()
        self.every = every

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for each in torch.told if self.global_step % self.every == 0 else ():
            each()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.losses.append(torch.nn.functional.mse_loss(self.net(batch[0]), batch[1]).item())


@pytest.mark.parametrize(
    ("workers", "every"),
    [({}, 3), ({"num_workers": 1}, 8), ({"num_workers": 1, "persistent_workers": True}, 8)],
    ids=["none, in mid-epoch", "workers", "workers that stay"],
)
@pytest.mark.parametrize("kind", ["own", "tensors", "subset"])
def test_a_dataset_that_is_given_other_rows(
    kind: str, workers: Any, every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """New labels count when they would in the user's loader: at once, with the next epoch's workers, or never."""

    def train(rungs: Any) -> list[float]:
        pool: Any = TensorDataset(Pairs().x, Pairs().y) if kind == "tensors" else Pairs()
        dataset: Any = Subset(pool, range(64)) if kind == "subset" else pool

        def relabel() -> None:
            if kind == "tensors":
                pool.tensors = (pool.tensors[0], pool.tensors[1] * 0.5 + 1)
            else:
                pool.y = pool.y * 0.5 + 1

        module = Tells(every)
        monkeypatch.setattr(torch, "told", [relabel], raising=False)
        watcher, _ = fit(rungs, module, load(dataset, **workers), val=DataLoader(pool, 8, **workers), max_epochs=3)
        assert not rungs or evidence(watcher, "cache")["row_batches"] == 24
        return module.losses

    plain = train({})
    assert train({"cache": {}}) == plain
    if not workers.get("persistent_workers"):
        monkeypatch.setattr(RowEngine, "_follow_changes", lambda _: None)
        assert train({"cache": {}}) != plain, "the control keeps the old labels"


def test_a_dataset_that_is_given_something_else() -> None:
    """Its own method makes the samples until they are rows again."""
    held = Pairs()
    engine, labels = RowEngine(load(held), CPU, 0), held.y
    held.y = [str(float(each)) for each in labels]  # type: ignore[assignment]
    x, y = engine.make([3, 5])
    assert torch.equal(x, held.x[[3, 5]]) and list(y) == [held.y[3], held.y[5]] and engine.batches == 0
    held.y = labels[:9]
    assert torch.equal(engine.make([3, 5])[1], labels[[3, 5]]), "it has no sample 9, which nobody asks for"
    held.y = labels + 1
    assert torch.equal(engine.make([3, 5])[1], labels[[3, 5]] + 1) and engine.batches == 1


def test_other_attributes_are_not_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dataset that is told of each step is not read again for that, nor copied to a device."""
    held = Pairs()
    engine, reads = RowEngine(load(Subset(held, range(9))), CPU, 0), []
    monkeypatch.setattr(engine_file, "read_rows", lambda dataset: reads.append(dataset) or read_rows(dataset))
    held.step = 1000  # type: ignore[attr-defined]
    engine.make([1])
    assert not reads
    held.x = held.x + 1
    assert torch.equal(engine.make([1])[0], held.x[[1]]) and len(reads) == 1


def test_arrays_changed_in_place_are_copied_again_each_epoch() -> None:
    values = np.arange(6.0)
    column = engine_file._Values(Column(values), META)
    first = column._copy()
    assert column._copy() is first
    column.begin_epoch()
    assert column._copy() is not first


class GlobalBatches:
    """A batch sampler that draws each batch from torch's own stream."""

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Any:
        return (torch.randint(0, 64, (8,)).tolist() for _ in range(6))


class OwnOrder(torch.utils.data.Sampler[int]):
    """Draws from a generator of its own when it is read, and between indices."""

    def __init__(self) -> None:
        self.numbers = torch.Generator().manual_seed(1)

    def __len__(self) -> int:
        return 64

    def __iter__(self) -> Any:
        return (int(torch.randint(0, 64, (1,), generator=self.numbers)) for _ in range(64))


ORDERS: dict[str, Any] = {
    "shuffled": lambda: {"shuffle": True, "batch_size": 8},
    "a generator": lambda: {"shuffle": True, "batch_size": 8, "generator": torch.Generator().manual_seed(3)},
    "draws for each batch": lambda: {"batch_sampler": GlobalBatches()},
    "draws for each sample": lambda: {"sampler": OwnOrder(), "batch_size": 8},
}


class Drawing(Fit):
    """Notes where the stream of random numbers is at each step, and draws between epochs and in validation."""

    def on_train_epoch_start(self) -> None:
        torch.randn(1)

    def on_validation_epoch_start(self) -> None:
        torch.randn(1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.losses.append(float(torch.get_rng_state().double().sum()))
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.losses += [float(batch[0].sum()), float(torch.get_rng_state().double().sum())]


@pytest.mark.parametrize("workers", [{}, {"num_workers": 2}, {"num_workers": 1, "persistent_workers": True}], ids=str)
@pytest.mark.parametrize("order", ORDERS)
def test_samplers_draw_when_they_would_have_drawn(order: str, workers: dict[str, Any]) -> None:
    """A loader with workers reads its sampler ahead, and from the start of the epoch."""

    def train(rungs: Any) -> list[float]:
        module = Drawing()
        train, val = (DataLoader(Pairs(), **ORDERS[order](), **workers) for _ in range(2))
        watcher, _ = fit(rungs, module, train, val=val, max_epochs=2, limit_train_batches=5, limit_val_batches=5)
        assert not rungs or (verdict(watcher, "cache").took and evidence(watcher, "cache")["validation_row_batches"])
        return module.losses

    assert train({"cache": {}}) == train({})


class Validated(Fit):
    """Draws random numbers in validation, so that one drawn too many elsewhere would be seen."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        noise = torch.randn_like(x)
        self.losses.append(torch.nn.functional.mse_loss(self.net(x + noise), y).item())


@pytest.mark.parametrize("kept", [False, True], ids=["no workers", "workers that stay"])
def test_validation_is_the_same(kept: bool) -> None:
    def train(rungs: Any) -> Any:
        module, more = Validated(), {"num_workers": 1, "persistent_workers": True} if kept else {}
        watcher, _ = fit(rungs, module, load(Pairs()), val=DataLoader(Pairs(20), 8, **more), max_epochs=3)
        return module.losses, torch.get_rng_state(), watcher

    plain, state, _ = train({})
    ours, after, watcher = train({"cache": {}})
    assert len(plain) >= 33 and ours == plain
    assert torch.equal(state, after)
    assert evidence(watcher, "cache")["validation_row_batches"] >= 9


def test_validation_of_other_samples_is_left_alone() -> None:
    module, others = Validated(), [(torch.ones(4), torch.ones(1))] * 5
    watcher, trainer = fit({"cache": {}}, module, load(Pairs()), val=DataLoader(others), max_epochs=1)
    assert type(trainer.val_dataloaders) is DataLoader
    assert verdict(watcher, "cache").took and evidence(watcher, "cache")["validation_row_batches"] == 0


def test_a_wrong_row_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: what is picked is compared with the dataset's own samples before it is used."""

    def read_others(dataset: Any) -> Rows:
        rows = read_rows(dataset)
        return Rows((rows.form[0], Column(dataset.y * 1.0000001)), rows.count)

    monkeypatch.setattr(engine_file, "read_rows", read_others)
    with pytest.raises(NotApplicable, match="differ from the loader's batch"):
        RowEngine(load(Pairs()), CPU, 0)
    module = Fit()
    watcher, _ = fit({"cache": {}}, module, load(Pairs()), max_epochs=1)
    assert len(module.losses) == 8
    assert verdict(watcher, "cache").took is False
    assert "rows picked at once differ" in verdict(watcher, "cache").why


def test_changed_in_place() -> None:
    """On the CPU rows are the user's own; a copy elsewhere is renewed."""
    held = Pairs()
    engine = RowEngine(load(held), CPU, 0)
    before = engine.make([3])[0]
    held.x.add_(1)
    assert torch.equal(engine.make([3])[0], before + 1)

    column = engine_file._Values(read_rows(held).columns[0], META)
    first = column._copy()
    assert column._copy() is first
    held.x.add_(1)
    assert column._copy() is not first


def test_too_large() -> None:
    held = Pairs()
    with pytest.raises(NotApplicable, match=re.escape("take 1.28 kB, but may take at most 1 kB")):
        engine_file.check_room(read_rows(held), META, 1000)
    engine_file.check_room(read_rows(held), META, 1280)
    engine_file.check_room(read_rows(held), CPU, 0)


def test_an_empty_dataset() -> None:
    with pytest.raises(NotApplicable, match="the dataset is empty"):
        RowEngine(DataLoader(TensorDataset(torch.ones(0, 2))), CPU, 0)

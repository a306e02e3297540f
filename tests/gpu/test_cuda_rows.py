"""Rows picked at once on a real device are those of the plain loader, and none waits for the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from fastloop.feeds.rows.engine import RowEngine
from tests.feeds.rows.test_engine import Fit, Pairs
from tests.feeds.rows.test_reading import DATASETS
from tests.rungs.fits import evidence, fit, verdict

pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"), pytest.mark.timeout(150)]


def flatten(batch: Any) -> list[Any]:
    if isinstance(batch, dict):
        return [*batch, *(leaf for part in batch.values() for leaf in flatten(part))]
    if isinstance(batch, (list, tuple)):
        return [len(batch), *(leaf for part in batch for leaf in flatten(part))]
    bits = batch.cpu().contiguous().view(torch.uint8).numpy().tobytes()
    return [(batch.dtype, batch.shape, batch.stride(), bits)]


def epoch(batches: Any) -> list[Any]:
    return [flatten(batch) for batch in batches]


@pytest.mark.parametrize("name", list(DATASETS))
def test_the_plain_loaders_batches(name: str) -> None:
    loader = DataLoader(DATASETS[name](), batch_size=5, shuffle=True)
    engine = RowEngine(loader, torch.device("cuda", 0), 2**20)
    torch.manual_seed(0)
    plain = epoch(loader)
    torch.manual_seed(0)
    ours = epoch(engine.load(int(torch.empty((), dtype=torch.int64).random_())))
    assert len(plain) == len(ours) > 1 and ours == plain
    first = next(iter(engine.load(0)))
    assert all(each.is_cuda for each in (first if isinstance(first, list) else [first]) if torch.is_tensor(each))


@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_training(where: str) -> None:
    """A dataset whose tensors are on the GPU already is picked there, without a copy."""

    def train(rungs: Any) -> Any:
        held, module = Pairs(), Fit()
        data = TensorDataset(held.x.to(where), held.y.to(where))
        loader = DataLoader(data, batch_size=8, shuffle=True)
        watcher, _ = fit(rungs, module, loader, val=None, max_epochs=3, accelerator="gpu")
        return module.losses, watcher

    plain, _ = train({})
    ours, watcher = train({"cache": {}})
    assert ours == plain and len(plain) == 24
    assert verdict(watcher, "cache").took and evidence(watcher, "cache")["row_batches"] == 24
    assert (evidence(watcher, "cache")["kept_bytes"] > 0) == (where == "cpu")


def test_rows_changed_in_place_are_copied_again() -> None:
    held = Pairs()
    engine = RowEngine(DataLoader(held, batch_size=4), torch.device("cuda", 0), 2**20)
    before = engine.make([3, 1])[0]
    held.x.add_(1)
    assert torch.equal(engine.make([3, 1])[0], before + 1)


def test_no_batch_waits_for_the_device() -> None:
    held = Pairs()
    engine = RowEngine(DataLoader(held, batch_size=4), torch.device("cuda", 0), 2**20)
    list(engine.load(0))
    torch.cuda.set_sync_debug_mode("error")
    try:
        assert len(list(engine.load(0))) == 16
    finally:
        torch.cuda.set_sync_debug_mode("default")

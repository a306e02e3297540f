"""The search for a micro-batch on a CUDA device: memory is measured and predicted; what is found stays within it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from tests.runs import Net, run

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
    pytest.mark.timeout(150),
    pytest.mark.alone,
]
GIB = 2**30


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    torch.cuda.empty_cache()


class Wide(Net):
    """About 200 MiB of activations a sample; 1 GiB of parameters, whose AdamW state is 2 GiB."""

    def __init__(self) -> None:
        super().__init__(torch.optim.AdamW, lr=1e-4)
        wide: list[torch.nn.Module] = []
        for _ in range(6):
            wide += [torch.nn.Linear(4096, 4096), torch.nn.GELU()]
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 4096), *wide, torch.nn.Linear(4096, 1))
        self.table = torch.nn.Parameter(torch.zeros(2**28 - 6 * 2**24))
        self.peak = 0

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch[0][:, None, :].expand(-1, 1024, -1), batch[1][:, None, :]
        return (self.net(x) - y).square().mean() + self.table.square().mean()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.peak = max(self.peak, torch.cuda.max_memory_reserved())
        if batch_idx == 1:
            torch.cuda.reset_peak_memory_stats()
            self.peak = 0


def fit(room_gib: float, batch_size: int, window: int) -> Any:
    free, total = torch.cuda.mem_get_info()
    taken = total - free - torch.cuda.memory_reserved()
    target = (taken + room_gib * GIB) / total
    data = TensorDataset(torch.randn(256, 8), torch.randn(256, 1), torch.arange(256))
    rungs = {"batch": {"target_memory": target}}
    settings = {"accumulate_grad_batches": window, "max_steps": 3, "accelerator": "gpu"}
    done = run(rungs, DataLoader(data, batch_size=batch_size), Wide, **settings)
    print(done.verdict("batch").why, f"peak {done.module.peak / GIB:.2f} GiB of {room_gib}")
    return done


def test_memory_with_the_optimizers_state_limits_it() -> None:
    done = fit(14.0, 4, 16)
    why, size = done.verdict("batch").why, done.seen("batch")["micro_batch"]
    assert "limited by memory: " in why and "would take about" in why
    assert 4 <= size <= 32 and 2 * GIB < done.module.peak <= 14.0 * GIB
    assert all(int(each) * 0.2 < 14 for each in done.seen("batch")["rates"])


def test_a_batch_that_does_not_fit_is_split() -> None:
    done = fit(10.0, 64, 1)
    assert done.verdict("batch").took is True and done.seen("batch")["micro_batch"] < 64
    assert done.module.peak <= 10.0 * GIB and done.trainer.global_step == 3


def test_launches_are_saved() -> None:
    """Kernels of a few samples: the time is that of their launches."""
    data = TensorDataset(torch.randn(512, 8), torch.randn(512, 1), torch.arange(512))
    done = run({"batch": {}}, DataLoader(data, batch_size=8), accumulate_grad_batches=8, max_steps=3, accelerator="gpu")
    assert done.verdict("batch").took is True and done.seen("batch")["micro_batch"] == 64
    assert "not by memory" in done.verdict("batch").why

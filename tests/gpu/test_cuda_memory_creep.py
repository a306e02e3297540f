"""Memory of the GPU that creeps: a planted leak is named, and what only looks like one is not."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from fastloop import FastLoop
from fastloop.records.measurement import Measurement
from tests.models import trainer

pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"), pytest.mark.timeout(150)]
STEPS = 2_000
"""Enough for sixteen readings, 20 ms apart, where a step takes half a millisecond."""


class Samples(Dataset[Any]):
    def __init__(self, growth: int) -> None:
        self.growth = growth

    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.ones(256 + self.growth * index, 64)


class Net(L.LightningModule):
    def __init__(self, keeps: bool) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(64, 1024), torch.nn.Tanh(), torch.nn.Linear(1024, 1024))
        self.keeps = keeps
        self.kept: list[torch.Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        out = self.layers(batch[0])
        if self.keeps:
            self.kept.append(out.detach())
        return out.square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters())


def fit(keeps: bool, growth: int) -> Measurement:
    loop = FastLoop({"watch": {"warmup_steps": 20}}, quiet=True)
    data = DataLoader(Samples(growth), batch_size=1)
    trainer(callbacks=[loop], max_epochs=1, accelerator="gpu").fit(Net(keeps), data)
    assert loop.measurement is not None
    return loop.measurement


def test_tensors_that_are_kept_on_the_gpu_are_found() -> None:
    found = fit(keeps=True, growth=0).evidence["memory"]
    assert found["of"] == "GPU" and found["name"] == "Net.kept" and not found["holds_graphs"]
    assert found["mib_per_1000_steps"] == pytest.approx(1000, rel=0.1) and found["steps_left"] > 1000


@pytest.mark.parametrize("growth", [0, 32], ids=["nothing kept", "growing shapes"])
def test_what_only_looks_like_a_leak_is_none(growth: int) -> None:
    assert "memory" not in fit(keeps=False, growth=growth).evidence

"""A ladder that keeps the user's own workers trains on the samples of a plain run, in its order."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, Dataset

from fastloop import FastLoop


class Numbers(Dataset):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index)])


class Counts(Numbers):
    """Each new worker counts from one."""

    def __init__(self) -> None:
        self.calls = 0

    def __getitem__(self, index: int) -> torch.Tensor:
        self.calls += 1
        return torch.tensor([float(index + 100 * self.calls)])


class Caches(Numbers):
    """Each new worker adds its own noise once."""

    def __init__(self) -> None:
        self.cache: dict[int, Any] = {}

    def __getitem__(self, index: int) -> torch.Tensor:
        if index not in self.cache:
            self.cache[index] = torch.rand(1)
        return self.cache[index]


class Net(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.seen = torch.nn.Linear(1, 1), []

    def on_train_epoch_start(self) -> None:
        torch.rand(3)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        batches = [batch] if isinstance(batch, torch.Tensor) else batch
        self.seen.append([each.flatten().tolist() for each in batches])
        return self.layer(batches[0]).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def fit(data: Any, *watching: Any) -> list[Any]:
    module, quiet = Net(), dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
    trainer = L.Trainer(max_epochs=3, accelerator="cpu", enable_model_summary=False, callbacks=list(watching), **quiet)
    trainer.fit(module, data)
    return module.seen


def load(dataset: Any = None) -> Any:
    return DataLoader(dataset or Numbers(), batch_size=2, shuffle=True, num_workers=1)


@pytest.mark.parametrize(
    ("make", "kept"),
    [
        (load, True),
        (lambda: CombinedLoader([load(), load()], "max_size"), True),
        (lambda: load(Counts()), False),
        (lambda: load(Caches()), False),
    ],
    ids=["one", "two", "state", "cache"],
)
def test_the_samples_are_those_of_a_plain_run(make: Any, kept: bool) -> None:
    torch.manual_seed(0)
    plain = fit(make())
    torch.manual_seed(0)
    watch = FastLoop("safe", quiet=True)
    assert fit(make(), watch) == plain
    step = next(step for step in watch.plan.steps if step.rung == "workers")
    assert (step.status == "planned") is kept, step.reason

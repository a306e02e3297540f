"""The program that test_compile_ranks.py starts on two ranks: one fit; weights and verdict of each rank into a file.

Arguments: name of the case, and how to compile: ``no``, ``eager`` (graphs are captured, not compiled), ``inductor``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader

from tests.rungs.fits import loop

LENGTHS = (5, 9, 6, 12, 7, 10, 8, 11, 13, 14, 15)


class Net(torch.nn.Module):
    """Sums over sentences of any length [B, T, 8]."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(8, 16), torch.nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.last(torch.tanh(self.first(x)).mean(dim=1))
        return made


class Sentences(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def collate(numbers: list[int]) -> torch.Tensor:
    """A batch whose length is that of its first sample: ranks have different lengths in the same step."""
    draws = torch.Generator().manual_seed(numbers[0])
    return torch.randn(len(numbers), LENGTHS[numbers[0] % len(LENGTHS)], 8, generator=draws)


def run(case: str, backend: str) -> None:
    torch.manual_seed(0)
    module, compile_with = Sentences(), torch.compile
    if backend == "eager":
        torch.compile = lambda function, **how: compile_with(function, backend="eager", dynamic=how["dynamic"])
    compiles: dict[str, Any] = {"dynamic": True} if backend == "inductor" else {}  # one graph, which takes half as long
    watcher = None if backend == "no" else loop({"compile": compiles})
    trainer = L.Trainer(
        strategy="ddp",
        devices=2,
        accelerator="cpu",
        max_steps=24,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[] if watcher is None else [watcher],
    )
    trainer.fit(module, DataLoader(range(192), batch_size=4, collate_fn=collate))  # type: ignore[arg-type]
    told: dict[str, Any] = {"weights": [value.tolist() for value in module.state_dict().values()]}
    if watcher is not None and watcher.measurement is not None:
        (verdict,) = watcher.verdicts
        told |= {"took": verdict.took, "why": verdict.why, "evidence": watcher.measurement.evidence["compile"]}
    Path(f"{case}-{trainer.global_rank}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    torch.set_num_threads(1)
    run(*sys.argv[1:])

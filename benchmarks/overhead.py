"""What FastLoop costs a step: an empty Callback, FastLoop switched off, FastLoop watching.

    python benchmarks/overhead.py [--rounds 15] [--steps 2000] [--device cpu]

A trivial model (one Linear(8, 1)), so that the Trainer itself is the step. The cases take turns within each round, in
an order that is shuffled each round; the figures are medians over rounds of the paired difference to the empty
Callback, with a 95 % interval from order statistics. One JSON line per case.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from scipy import stats
from torch.utils.data import DataLoader, TensorDataset

from fastloop import FastLoop

OFF = {"watch": {"enabled": False}}
CASES: dict[str, Callable[[], list[Callback]]] = {
    "no callback": list,
    "empty Callback": lambda: [Callback()],
    "FastLoop off": lambda: [FastLoop(OFF, quiet=True)],
    "FastLoop watching": lambda: [FastLoop(quiet=True)],
    "empty Callback again": lambda: [Callback()],
}


class Trivial(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.layer(batch[0]).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def microseconds(callbacks: list[Callback], steps: int, device: str) -> float:
    """Microseconds per step of one fit, the first tenth left out."""
    marks = []

    class Marks(Trivial):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx in (steps // 10, steps - 1):  # what happens once, at the end, is no cost per step
                marks.append(time.perf_counter())

    loader = DataLoader(TensorDataset(torch.randn(steps, 8)), batch_size=1)
    trainer = L.Trainer(max_steps=steps, accelerator="gpu" if device == "cuda" else "cpu", devices=1, logger=False,
                        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
                        callbacks=callbacks)  # fmt: skip
    trainer.fit(Marks(), loader)
    return (marks[1] - marks[0]) / (steps - 1 - steps // 10) * 1e6


def interval(values: list[float]) -> tuple[float, float]:
    """95 % interval of the median, from order statistics (no distribution assumed)."""
    ordered, n = sorted(values), len(values)
    low = int(stats.binom.ppf(0.025, n, 0.5))
    return ordered[max(0, low - 1)], ordered[min(n - 1, n - low)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    options = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    spent: dict[str, list[float]] = {name: [] for name in CASES}
    for number in range(options.rounds + 1):
        for name in random.Random(number).sample(list(CASES), len(CASES)):
            value = microseconds(CASES[name](), options.steps, options.device)
            if number:  # the first round warms everything up
                spent[name].append(value)
    for name, values in spent.items():
        paired = [value - base for value, base in zip(values, spent["empty Callback"], strict=True)]
        low, high = interval(paired)
        print(json.dumps({
            "what": "overhead", "case": name, "us_per_step": round(statistics.median(values), 2),
            "over_empty_callback_us": round(statistics.median(paired), 2), "ci95_us": [round(low, 2), round(high, 2)],
            "rounds": options.rounds, "steps": options.steps, "device": options.device,
            "lightning": L.__version__, "torch": torch.__version__,
        }), flush=True)  # fmt: skip


if __name__ == "__main__":
    main()

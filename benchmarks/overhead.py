"""What FastLoop costs a step: an empty Callback, FastLoop switched off, FastLoop watching.

    python -m benchmarks.overhead [--rounds 15] [--steps 2000] [--device cpu] [--busy-ms 10]

A trivial model (one Linear(8, 1)), so that the Trainer itself is the step; with --busy-ms the device has that much to
do in each step besides, and so is the limit. The cases take turns within each round, in an order that is shuffled each
round; the figures are medians over rounds of the paired difference to the empty Callback, with a 95 % interval from
order statistics. One JSON line per case, with the largest peak of the device's memory in any of its fits.
"""

from __future__ import annotations

import argparse
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

from benchmarks.cases import say
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
    def __init__(self, busy_cycles: int = 0) -> None:
        super().__init__()
        self.layer, self.busy_cycles = torch.nn.Linear(8, 1), busy_cycles

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.busy_cycles:
            torch.cuda._sleep(self.busy_cycles)
        return self.layer(batch[0]).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def cycles(milliseconds: float) -> int:
    """For `torch.cuda._sleep`, by how long a million of them takes on this device."""
    torch.cuda._sleep(1_000_000)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    torch.cuda._sleep(100_000_000)
    end.record()
    end.synchronize()
    return int(100_000_000 * milliseconds / begin.elapsed_time(end))


def microseconds(callbacks: list[Callback], steps: int, device: str, busy_cycles: int) -> float:
    """Microseconds per step of one fit, the first tenth left out; the device waited for before and after."""
    marks = []

    class Marks(Trivial):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx in (steps // 10, steps - 1):  # what happens once, at the end, is no cost per step
                if device == "cuda":
                    torch.cuda.synchronize()
                marks.append(time.perf_counter())

    loader = DataLoader(TensorDataset(torch.randn(steps, 8)), batch_size=1)
    trainer = L.Trainer(
        max_steps=steps,
        accelerator="gpu" if device == "cuda" else "cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=callbacks,
    )
    trainer.fit(Marks(busy_cycles), loader)
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
    parser.add_argument("--busy-ms", type=float, default=0.0, help="what the device has to do in a step; needs cuda")
    options = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    cuda, busy_cycles = options.device == "cuda", cycles(options.busy_ms) if options.busy_ms else 0
    spent: dict[str, list[float]] = {name: [] for name in CASES}
    peak_bytes = dict.fromkeys(CASES, 0)
    for number in range(options.rounds + 1):
        for name in random.Random(number).sample(list(CASES), len(CASES)):
            if cuda:
                torch.cuda.reset_peak_memory_stats()
            value = microseconds(CASES[name](), options.steps, options.device, busy_cycles)
            if number:  # the first round warms everything up
                spent[name].append(value)
                peak_bytes[name] = max(peak_bytes[name], torch.cuda.max_memory_allocated() if cuda else 0)
    for name, values in spent.items():
        paired = [value - base for value, base in zip(values, spent["empty Callback"], strict=True)]
        low, high = interval(paired)
        found = {
            "case": name,
            "us_per_step": round(statistics.median(values), 2),
            "over_empty_callback_us": round(statistics.median(paired), 2),
            "ci95_us": [round(low, 2), round(high, 2)],
            "peak_bytes": peak_bytes[name] if cuda else None,
        }
        say("overhead", {**found, **vars(options)})


if __name__ == "__main__":
    main()

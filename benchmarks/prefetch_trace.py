"""Does the host-to-device copy leave the step? A copy-heavy training under torch.profiler, without and with prefetch.

    python -m benchmarks.prefetch_trace [--mib 320] [--steps 30]

Batches of `mib` MiB lie ready in pinned memory, so that nothing but the copy is at stake. From the trace: the copies'
total time, the part of it during which a kernel ran (hidden), and the step time with its copies. One JSON line each.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import time
from typing import Any

import lightning as L
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader, Dataset

from benchmarks.cases import say
from fastloop import FastLoop

Span = tuple[float, float]


class Ready(Dataset[torch.Tensor]):
    """A few batches in pinned memory, handed out in turn."""

    def __init__(self, mib: int, count: int) -> None:
        side = 512
        images = mib * 2**20 // (4 * 3 * side * side)
        self.batches = [torch.randn(images, 3, side, side).pin_memory() for _ in range(3)]
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.batches[index % len(self.batches)]


class Net(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        first, second, third = torch.nn.Conv2d(3, 32, 7, 4), torch.nn.Conv2d(32, 64, 3, 2), torch.nn.Conv2d(64, 64, 3)
        self.net = torch.nn.Sequential(first, torch.nn.ReLU(), second, torch.nn.ReLU(), third)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-4)


class Trace(L.Callback):
    """Profiles the middle third of the steps."""

    def __init__(self, steps: int) -> None:
        self.first, self.last = steps // 3, 2 * steps // 3
        self.profiler: Any = None

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.first:
            torch.cuda.synchronize()
            self.profiler = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])
            self.profiler.__enter__()
            self.begun = time.perf_counter()
        if batch_idx == self.last:
            torch.cuda.synchronize()
            self.step_ms = (time.perf_counter() - self.begun) * 1e3 / (self.last - self.first)
            self.profiler.__exit__(None, None, None)


def spans(profiler: Any, copies: bool) -> list[Span]:
    found = []
    for event in profiler.events():
        if event.device_type != torch.autograd.DeviceType.CUDA:
            continue
        name = event.name.lower()
        if ("memcpy htod" in name) if copies else not name.startswith("mem"):
            found.append((event.time_range.start, event.time_range.end))
    return sorted(span for span in found if span[1] - span[0] > 0)


def union(found: list[Span]) -> list[Span]:
    merged: list[Span] = []
    for start, end in found:
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def overlap(a: list[Span], b: list[Span]) -> float:
    return sum(max(0.0, min(x[1], y[1]) - max(x[0], y[0])) for x in a for y in b)


def run(prefetch: bool, mib: int, steps: int) -> dict[str, Any]:
    torch.manual_seed(0)
    rungs = {"prefetch": {"enabled": True}} if prefetch else {}
    trace, loop = Trace(steps), FastLoop({"rungs": rungs, "watch": {"warmup_steps": steps // 3}}, quiet=True)
    trainer = L.Trainer(
        max_steps=steps,
        accelerator="gpu",
        devices=1,
        callbacks=[loop, trace],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Net(), DataLoader(Ready(mib, steps), batch_size=None))
    copies, kernels = union(spans(trace.profiler, copies=True)), union(spans(trace.profiler, copies=False))
    total, hidden, count = sum(end - start for start, end in copies), overlap(copies, kernels), trace.last - trace.first
    return {
        "prefetch": prefetch,
        "mib_per_batch": mib,
        "traced_steps": count,
        "step_ms": trace.step_ms,
        "copy_ms_per_step": total / 1e3 / count,
        "hidden_pct": 100 * hidden / total if total else None,
        "exposed_copy_ms_per_step": (total - hidden) / 1e3 / count,
        "verdicts": [verdict.why for verdict in loop.verdicts],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=320)
    parser.add_argument("--steps", type=int, default=45)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    results: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
    for number in range(options.rounds):
        for prefetch in (False, True) if number % 2 == 0 else (True, False):
            results[prefetch].append(run(prefetch, options.mib, options.steps))
            say("prefetch_trace", results[prefetch][-1])
    for prefetch, rows in results.items():
        middle = {
            key: statistics.median(row[key] for row in rows)
            for key in ("step_ms", "copy_ms_per_step", "hidden_pct", "exposed_copy_ms_per_step")
        }
        say("prefetch_trace summary", {"prefetch": prefetch, "n": len(rows), **middle})


if __name__ == "__main__":
    main()

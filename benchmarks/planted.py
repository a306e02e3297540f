"""Trainings with one planted bottleneck (or two, or none), and what FastLoop calls it.

    python -m benchmarks.planted [--device cpu] [--repeats 20] [--plants getitem,collate,...]

Each line is one training: what was planted, what was named, in order, with the share of the step. The last line of each
plant counts how often the right name came first. On the CPU the step is about 10 ms on one thread; on CUDA a kernel of
known length stands for the device's work.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader, Dataset, default_collate

from benchmarks.cases import say
from fastloop import FastLoop

STEPS, WARMUP = 70, 10


@dataclass(frozen=True, kw_only=True)
class Plant:
    """What is wrong with a training."""

    expected: tuple[str, ...]
    """Bottlenecks that must be named, the worst first; none for a sound training."""
    item_s: float = 0.0
    collate_s: float = 0.0
    step_s: float = 0.0
    callback_s: float = 0.0
    logs: int = 0
    syncs: int = 0
    checkpoints: bool = False
    batch: int = 128
    width: int = 512
    device_ms: float = 0.0
    """A kernel of so many ms stands for the work."""
    work: str = "mlp"
    """mlp, launches, gemm, elementwise, copies."""
    steps: int = STEPS
    slow_rank_s: float = 0.0
    """Rank 1 sleeps so long in every step."""
    trainer: dict[str, Any] = field(default_factory=dict)


CPU_PLANTS: dict[str, Plant] = {
    "none": Plant(expected=()),
    "getitem": Plant(expected=("data_wait",), item_s=0.00005),
    "collate": Plant(expected=("data_wait",), collate_s=0.008),
    "callback": Plant(expected=("callbacks_logging",), callback_s=0.010),
    "step": Plant(expected=("host_other",), step_s=0.010),
    "tiny": Plant(expected=("launch_bound",), batch=1, width=8, steps=200),
    "logging": Plant(expected=("callbacks_logging",), logs=25),
    "checkpoint": Plant(expected=("checkpoint",), checkpoints=True),
    "getitem+callback": Plant(expected=("data_wait", "callbacks_logging"), item_s=0.0001, callback_s=0.010),
    "step+checkpoint": Plant(expected=("checkpoint", "host_other"), step_s=0.010, checkpoints=True),
}
CUDA_PLANTS: dict[str, Plant] = {
    "none": Plant(expected=(), work="gemm", steps=400, trainer={"precision": "bf16-mixed"}),
    "hidden_loader": Plant(expected=(), device_ms=40, collate_s=0.030),
    "loader": Plant(expected=("data_wait",), device_ms=40, collate_s=0.060),
    "callback": Plant(expected=("callbacks_logging",), device_ms=10, callback_s=0.030),
    "step": Plant(expected=("host_other",), device_ms=10, step_s=0.030),
    "launches": Plant(expected=("launch_bound",), work="launches", steps=120),
    "syncs": Plant(expected=("launch_bound", "sync"), work="launches", syncs=20, steps=120),
    "fp32_gemm": Plant(expected=("fp32_math",), work="gemm", steps=120),
    "elementwise": Plant(expected=("memory_bound",), work="elementwise", steps=1500),
    "unpinned": Plant(expected=("h2d",), work="copies", batch=1, steps=150),
    "checkpoint": Plant(expected=("checkpoint",), device_ms=10, checkpoints=True, width=2048),
    "loader+callback": Plant(
        expected=("data_wait", "callbacks_logging"), device_ms=20, collate_s=0.050, callback_s=0.045
    ),
}


class Samples(Dataset[Any]):
    """Random rows, each after a sleep."""

    def __init__(self, plant: Plant) -> None:
        # A whole batch of 256 MiB that is there already: nothing to load, all to copy.
        self.plant, self.row = plant, torch.randn((16, 2**22) if plant.work == "copies" else (plant.width,))

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> Any:
        if self.plant.item_s:
            time.sleep(self.plant.item_s)
        return self.row, torch.arange(16) % 10 if self.plant.work == "copies" else index % 10


class Planted(L.LightningModule):
    """A step with the planted fault in it."""

    def __init__(self, plant: Plant, cycles_per_ms: float = 0.0) -> None:
        super().__init__()
        self.plant, self.cycles = plant, int(cycles_per_ms * plant.device_ms)
        wide = {"gemm": 4096, "launches": 64}.get(plant.work, plant.width)
        self.net = torch.nn.Sequential(
            torch.nn.Linear(wide, 4 * plant.width), torch.nn.ReLU(), torch.nn.Linear(4 * plant.width, 10)
        )
        if plant.work == "gemm":
            self.net = torch.nn.Sequential(*[torch.nn.Linear(wide, wide) for _ in range(4)], torch.nn.Linear(wide, 10))
        if plant.work == "elementwise":
            self.register_buffer("big", torch.zeros(2**27))
        if plant.work == "launches":
            self.net = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(60)], torch.nn.Linear(64, 10))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        plant, (rows, labels) = self.plant, batch
        if plant.step_s:
            time.sleep(plant.step_s)
        if plant.slow_rank_s and self.global_rank == 1:
            time.sleep(plant.slow_rank_s)
        if self.cycles:
            torch.cuda._sleep(self.cycles)
        if plant.work == "copies":
            rows = rows[:, : plant.width]
        if plant.work == "launches":
            rows = rows[:, :64]
        if plant.work == "gemm":
            rows = torch.randn(8192, 4096, device=self.device)
            labels = torch.zeros(8192, dtype=torch.long, device=self.device)
        if plant.work == "elementwise":
            for _ in range(4):
                self.big.mul_(1.0001).add_(0.1)
        out = self.net(rows)
        for _ in range(plant.syncs):
            out = out + out.sum().item() * 0
        loss = torch.nn.functional.cross_entropy(out, labels)
        for number in range(plant.logs):
            self.log(f"loss/{number}", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Sleepy(Callback):
    """Sleeps after every batch."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def on_train_batch_end(self, *_: Any) -> None:
        time.sleep(self.seconds)


SLOW_RANK = Plant(
    expected=("straggler",),
    slow_rank_s=0.010,
    trainer={"strategy": "ddp", "devices": 2, "use_distributed_sampler": False},
)
EVEN_RANKS = Plant(expected=(), trainer=SLOW_RANK.trainer)


def cycles_per_ms() -> float:
    """How long torch's sleeping kernel has to be asked to sleep."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(10_000_000)
    begin.record()
    torch.cuda._sleep(100_000_000)
    end.record()
    end.synchronize()
    return 1e8 / begin.elapsed_time(end)


def train(
    plant: Plant, device: str = "cpu", *, per_ms: float = 0.0, config: dict[str, Any] | None = None, hunt: bool = False
) -> FastLoop:
    """One watched training; the callback holds what was seen."""
    collate: Callable[[Any], Any] = default_collate
    if plant.collate_s:

        def collate(rows: Any) -> Any:
            time.sleep(plant.collate_s)
            return default_collate(rows)

    callbacks: list[Callback] = [Sleepy(plant.callback_s)] if plant.callback_s else []
    loop = FastLoop({"watch": {"warmup_steps": WARMUP}, **(config or {})}, quiet=True)
    loop.hunt_syncs = hunt
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
        if plant.checkpoints:
            callbacks.append(ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=1))
        trainer = L.Trainer(
            max_steps=plant.steps,
            accelerator="gpu" if device == "cuda" else "cpu",
            logger=CSVLogger(folder) if plant.logs else False,
            log_every_n_steps=1,
            enable_checkpointing=plant.checkpoints,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[*callbacks, loop],
            **{"devices": 1, **plant.trainer},
        )
        whole = plant.work == "copies"
        loader = DataLoader(Samples(plant), None if whole else plant.batch, collate_fn=None if whole else collate)
        trainer.fit(Planted(plant, per_ms), loader)
    return loop


def named(loop: FastLoop) -> list[str]:
    """The bottlenecks in order; empty where there was none to name."""
    tuned = ("none", "compute_bound")  # a GPU that is the limit is no bottleneck where nothing is advised
    return [finding.bottleneck for finding in loop.findings if finding.bottleneck not in tuned or finding.patch]


def is_right(plant: Plant, found: list[str]) -> bool:
    """What was planted is named before anything else, and nothing is where nothing was. Two may come in any order."""
    return set(found[: len(plant.expected)]) == set(plant.expected) and (bool(plant.expected) or not found)


def line(name: str, number: int, plant: Plant, loop: FastLoop) -> dict[str, Any]:
    seen, found = loop.measurement, named(loop)
    return {
        "plant": name,
        "run": number,
        "expected": list(plant.expected),
        "named": found,
        "right": is_right(plant, found),
        "shares_pct": [finding.share_pct for finding in loop.findings],
        "why": loop.findings[0].why if loop.findings else None,
        "steps": seen.steps,
        "step_ms": seen.step_ms["mean"],
        "parts_ms": dict(seen.parts_ms),
        "lead_ms": seen.lead_ms,
        "trail_ms": seen.trail_ms,
        "blocked_ms": seen.blocked_ms,
        "syncs": list(seen.syncs)[:3],
        "gpu": {key: value for key, value in seen.gpu.items() if value is not None},
        "watch_us_per_step": seen.watch_us_per_step,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--plants", help="comma-separated; default all")
    options = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    plants = CUDA_PLANTS if options.device == "cuda" else CPU_PLANTS
    names = options.plants.split(",") if options.plants else list(plants)
    per_ms = cycles_per_ms() if options.device == "cuda" else 0.0
    right = dict.fromkeys(names, 0)
    for number in range(options.repeats):
        for name in names:
            loop = train(plants[name], options.device, per_ms=per_ms)
            found = line(name, number, plants[name], loop)
            right[name] += found["right"]
            say("planted", found)
    for name, count in right.items():
        say("planted", {"plant": name, "right": count, "n": options.repeats, "device": options.device})


if __name__ == "__main__":
    main()

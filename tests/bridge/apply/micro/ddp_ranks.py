"""Micro-batches on two ranks, where ranks differ and DDP has settings. Run as a program it fits every case and writes a
file per rank; `results` reads them."""

from __future__ import annotations

import faulthandler
import functools
import os
import sys
import tempfile
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.nn import functional as F
from torch.optim import AdamW
from torch.utils.data import BatchSampler

LIMIT_S = 400
"""Of all cases."""
WINDOWS: dict[str, Any] = {"accumulate_grad_batches": 4, "max_epochs": 3}
ALONE: dict[str, Any] = {"max_epochs": 3}
UNUSED: dict[str, Any] = {"find_unused_parameters": True}
BY_VALUE: dict[str, Any] = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}
HOW: dict[str, Any] = {"merge": {"micro_batch": 16}, "split": {"micro_batch": 3}, "auto": {}}
CASES: dict[str, tuple[str, str, dict[str, Any], dict[str, Any], str]] = {
    # net, sizes of batches, settings of DDP, settings of the Trainer, how it runs besides the plain run
    "short last batches": ("plain", "last", {}, WINDOWS, "merge split auto"),
    "short last window": ("plain", "window", {}, WINDOWS, "merge"),
    "other sizes": ("plain", "other", {}, WINDOWS, "merge split auto"),
    "clipped": ("plain", "last", {}, {**WINDOWS, "gradient_clip_val": 0.05}, "merge split"),
    "clipped by value": ("plain", "last", {}, {**WINDOWS, **BY_VALUE}, "merge"),
    "unused": ("unused", "last", UNUSED, WINDOWS, "merge split"),
    "unused at times": ("sometimes", "last", UNUSED, {**WINDOWS, "max_epochs": 1}, "merge split"),
    "static": ("plain", "last", {"static_graph": True}, ALONE, "split"),
    "norms": ("norms", "last", {}, {**WINDOWS, "gradient_clip_val": 0.05}, "merge auto"),
    "tokens": ("tokens", "last", {}, ALONE, "split"),
    "tokens in windows": ("tokens", "last", {}, WINDOWS, "merge split"),
    "padded": ("padded", "last", {}, ALONE, "auto"),
    "padded in windows": ("padded", "last", {}, WINDOWS, "merge"),
}
"""By what is special about them."""
SIZES = {
    "last": ([8] * 10 + [3], [8] * 10 + [6]),
    "window": ([8] * 8 + [3], [8] * 8 + [8]),
    "other": ([8] * 11, [5] * 11),
}


def rank() -> int:
    return int(os.environ.get("LOCAL_RANK", 0))


class Batches(BatchSampler):
    """Batches of these sizes, of other samples on each rank."""

    def __init__(self, sizes: list[int]) -> None:
        super().__init__(range(256), sizes[0], drop_last=False)
        self.sizes = sizes

    def __iter__(self) -> Iterator[list[int]]:
        start = 100 * rank()
        for size in self.sizes:
            yield list(range(start, start + size))
            start += size

    def __len__(self) -> int:
        return len(self.sizes)


def pad(samples: Any) -> Any:
    """Longer samples on the second rank from the third batch on."""
    x, y, numbers = torch.utils.data.default_collate(samples)
    return x.repeat(1, 3 if int(numbers[0]) >= 116 else 1), y, numbers


def tag(samples: Any) -> Any:
    """Tokens [n, 8] and their labels, fewer in some samples than in others."""
    x, _, numbers = torch.utils.data.default_collate(samples)
    past = torch.arange(8) > numbers[:, None] % 7
    return x, (x > 0).long().masked_fill(past, -100), numbers


COLLATE: dict[str, Any] = {"padded": pad, "tokens": tag}


def fit(name: str, how: str) -> dict[str, Any]:
    from lightning.pytorch.strategies import DDPStrategy

    from tests.runs import Net, numbered, run

    kind, sizes, of_ddp, settings, _ = CASES[name]

    class Own(Net):
        def __init__(self) -> None:
            super().__init__(AdamW, lr=0.01)
            if kind == "norms":
                self.net.insert(1, torch.nn.BatchNorm1d(16))
            if kind == "tokens":
                self.net[-1] = torch.nn.Linear(16, 16)
            if kind in ("unused", "sometimes"):
                self.other = torch.nn.Linear(8, 1)

        def loss(self, batch: Any) -> torch.Tensor:
            if kind == "padded" and batch[0].shape[1] == 24 and len(batch[0]) == 4:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            found = self.net(batch[0][:, :8])
            if kind == "tokens":
                return F.cross_entropy(found.view(-1, 2), batch[1].flatten())
            if kind == "sometimes" and int(batch[2][0]) % 3:
                found = found + 0 * self.other(batch[0])
            return F.mse_loss(found, batch[1])

    batches = Batches(SIZES[sizes][rank()])
    data = torch.utils.data.DataLoader(numbered(256), batch_sampler=batches, collate_fn=COLLATE.get(kind))
    strategy = DDPStrategy(timeout=timedelta(seconds=30), **of_ddp)
    settings = {
        "strategy": strategy,
        "devices": 2,
        "use_distributed_sampler": False,
        "precision": "64-true",
        **settings,
    }
    rungs = None if how == "plain" else {"batch": HOW[how]}
    done = run(rungs, data, Own, **settings)
    return {
        "weights": {name: each for name, each in done.weights.items() if each.is_floating_point()},
        "samples": done.module.samples,
        "took": None if rungs is None else done.verdict("batch").took,
        "why": None if rungs is None else done.verdict("batch").why,
    }


def fit_with_sizes(found: list[tuple[int, int | None]]) -> dict[str, Any]:
    """A run in which each rank's search finds its own size, and one that only fits with amp."""
    from lightning.pytorch.strategies import DDPStrategy

    from fastloop.bridge.apply.micro.search_run import SearchRun
    from fastloop.judge.micro_batch import FoundSize
    from tests.runs import Net, numbered, run

    size, later = found[rank()]
    data = torch.utils.data.DataLoader(numbered(256), batch_sampler=Batches([8] * 12))
    settings = {"strategy": DDPStrategy(timeout=timedelta(seconds=30)), "devices": 2, "use_distributed_sampler": False}
    compile_for_inductor = torch.compile
    with (
        mock.patch.object(SearchRun, "search", lambda _run: FoundSize(size=size, later=later)),
        mock.patch.object(torch, "compile", lambda made, **_how: compile_for_inductor(made, backend="eager")),
    ):
        done = run({"batch": {}, "amp": {}, "compile": {}}, data, Net, **settings, **WINDOWS)
    took = [done.verdict(rung).took for rung in ("batch", "amp", "compile")]
    return {"weights": done.weights, "size": done.seen("batch")["micro_batch"], "took": took}


def main() -> None:
    from fastloop.bridge.apply.micro import search_run

    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    search_run.SearchRun._read_ms = lambda _run, piece: (
        4 if piece.samples == 4 else piece.samples**0.9 * 2  # 4 are the fastest
    )
    found: dict[str, Any] = {}
    for name, case in CASES.items():
        os.environ["XDG_CACHE_HOME"] = str(Path.cwd() / name)
        for how in ["plain", *case[-1].split()]:
            print(rank(), name, how, flush=True)
            found[f"{name}: {how}"] = fit(name, how)
    found["both grow"] = fit_with_sizes([(16, 32), (8, 16)])
    found["one cannot"] = fit_with_sizes([(16, 32), (16, None)])
    torch.save(found, f"rank{rank()}.pt")


@functools.cache
def results() -> list[dict[str, dict[str, Any]]]:
    """What each rank found, by case. One pair of processes for all tests of a session."""
    from tests.bridge.launch import python

    with tempfile.TemporaryDirectory() as folder:
        python(Path(__file__), cwd=Path(folder), limit_s=LIMIT_S + 60)
        return [torch.load(Path(folder) / f"rank{each}.pt", weights_only=True) for each in (0, 1)]


if __name__ == "__main__":
    main()
    sys.exit(0)

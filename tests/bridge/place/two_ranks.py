"""Two ranks that are cut off and resumed. Run as a program it fits every case and writes a file per rank."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch.utils.data import WeightedRandomSampler

WORKERS = {"workers": {"count": 1, "persistent": True}}
ROWS = {"cache": {"store": "device"}}
THREADS = {"nodes": {"threads": 2}}
FEED = {"prefetch": {"depth": 3}}
MERGED = {**FEED, "batch": {"micro_batch": 64}}
WINDOWS = {"accumulate_grad_batches": 2}


class SavesAlone(L.Callback):
    """Rank 0 writes a checkpoint that the other rank knows nothing of, in mid-epoch."""

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.is_global_zero and batch_idx == 1:
            torch.save(trainer._checkpoint_connector.dump_checkpoint(), "alone.ckpt")


def fit(rungs: Any, seed: int, ckpt: Path | None = None, **settings: Any) -> dict[str, Any]:
    from tests.bridge.place.resumed import fit, shuffled

    L.seed_everything(seed, verbose=False)  # Lightning seeds its DistributedSampler by it
    train = settings.pop("train", None) or shuffled()
    module, trainer = fit(rungs, train, seed=seed, ckpt=ckpt, strategy="ddp", devices=2, **settings)
    return {"trained": module.trained, "ends": module.ends, "steps": trainer.global_step}


def weighted() -> Any:
    from tests.bridge.place.resumed import SAMPLES, shuffled

    return shuffled(sampler=WeightedRandomSampler(torch.arange(SAMPLES) + 1.0, SAMPLES))


def main() -> None:
    from tests.runs import feed_on_cpu

    patch = pytest.MonkeyPatch()
    feed_on_cpu(patch)
    saved, merged, drawn = Path("saved"), Path("merged"), Path("weighted")
    found = {
        "whole": fit(WORKERS, 5, save=saved, callbacks=(SavesAlone(),)),
        "resumed": fit(FEED, 6, saved / "step=6.ckpt"),
        "alone": fit(WORKERS, 6, Path("alone.ckpt")),
        "rows": fit(ROWS, 6, saved / "step=6.ckpt"),
        "threads": fit(THREADS, 6, saved / "step=6.ckpt"),
        "without us": fit(None, 6, saved / "step=6.ckpt"),
        "whole windows": fit(MERGED, 5, save=merged, **WINDOWS),
        "resumed windows": fit(WORKERS, 6, merged / "step=3.ckpt", **WINDOWS),
        "whole weighted": fit(WORKERS, 5, save=drawn, train=weighted()),
        "resumed weighted": fit(FEED, 6, drawn / "step=6.ckpt", train=weighted()),
    }
    patch.undo()
    torch.save(found, f"rank{torch.distributed.get_rank()}.pt")


def results() -> list[dict[str, dict[str, Any]]]:
    """What each rank found, by case."""
    from tests.bridge.launch import fit_on_two_ranks

    return fit_on_two_ranks(Path(__file__))


if __name__ == "__main__":
    main()
    sys.exit(0)

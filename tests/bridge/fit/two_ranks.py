"""The program that test_compat_ranks.py starts on two ranks: a plain run, then one with FastLoop; a file per rank."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger

from fastloop import FastLoop
from tests.models import Regression, loader, trainer

RUNGS = {"workers": {"enabled": True, "count": 1}, "overlap": {"enabled": True, "bucket_cap_mb": 1}}


class Notes(Callback):
    """Writes down, on each rank and after FastLoop, what the rank knows."""

    def __init__(self, name: str, loop: FastLoop | None) -> None:
        self.name, self.loop = name, loop

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        loop: Any = self.loop and next(each for each in trainer.callbacks if isinstance(each, FastLoop))
        seen = {
            "losses": pl_module.losses,
            "strategy": type(trainer.strategy).__name__,
            "world": trainer.world_size,
            "order": trainer.train_dataloader.sampler.epoch,
        }
        if loop is not None:
            seen |= {
                "total_steps": loop.measurement.total_steps,
                "samples_per_s": loop.measurement.samples_per_s,
                "global_batch": loop.measurement.global_batch,
                "world_size": loop.measurement.world_size,
                "took": {verdict.rung: verdict.took for verdict in loop.verdicts},
                "plan": [step.status for step in loop.plan.steps],
                "findings": len(loop.findings),
                "run_dir": loop.run_dir and str(loop.run_dir),
            }
        Path(f"{self.name}-{trainer.global_rank}.json").write_text(json.dumps(seen))


def fit(name: str, strategy: str, loop: FastLoop | None) -> Any:
    torch.manual_seed(0)
    logger = CSVLogger(Path.cwd() / "logs", name=name, version="0") if loop else False
    made = trainer(
        strategy=strategy,
        devices=2,
        max_epochs=2,
        logger=logger,
        callbacks=[*([loop] if loop else []), Notes(name, loop)],
    )
    before = type(made.strategy)
    made.fit(Regression(), loader(shuffle=True))
    assert type(made.strategy) is before
    return made


def main(plain: str, ours: str) -> None:
    fit("plain", plain, None)
    fit("ours", ours, FastLoop({"watch": {"warmup_steps": 1}, "rungs": RUNGS}))


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Fits with rungs switched on, for the tests of the rungs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning as L
import torch

from fastloop import FastLoop, Verdict
from fastloop.records.measurement import Measurement
from tests import models

Rungs = Mapping[str, Mapping[str, Any]]
"""Settings of the rungs to switch on, by name."""


def loop(rungs: Rungs, **settings: Any) -> FastLoop:
    """A FastLoop with these rungs on from the first step, watching from the second. Rehearsals have their own tests."""
    config = {
        "rungs": {name: {"enabled": True, **keys} for name, keys in rungs.items()},
        "watch": {"warmup_steps": 1},
        "rehearsal": "off",
    }
    return FastLoop(config, quiet=True, **settings)


def fit(
    rungs: Rungs | None,
    module: L.LightningModule,
    train: Any = None,
    *,
    val: Any = None,
    ckpt: Any = None,
    callbacks: tuple[Any, ...] = (),
    **settings: Any,
) -> tuple[FastLoop | None, L.Trainer]:
    """Fit `module` on the shared pairs; ``rungs=None`` is the plain run, without our callback."""
    watcher = None if rungs is None else loop(rungs)
    torch.manual_seed(1)
    trainer = models.trainer(callbacks=[*callbacks, *([watcher] if watcher else [])], **settings)
    resume = {} if ckpt is None else {"ckpt_path": ckpt, "weights_only": False}
    trainer.fit(module, models.loader() if train is None else train, val, **resume)
    return watcher, trainer


def verdict(watcher: FastLoop | None, rung: str) -> Verdict:
    assert watcher is not None
    return next(verdict for verdict in watcher.verdicts if verdict.rung == rung)


def evidence(watcher: FastLoop | None, rung: str) -> Mapping[str, Any]:
    assert watcher is not None and isinstance(watcher.measurement, Measurement)
    return watcher.measurement.evidence.get(rung, {})


def seeded(kind: type[L.LightningModule] = models.Regression, /, **settings: Any) -> Any:
    """A module whose initial weights are the same each time."""
    torch.manual_seed(0)
    return kind(**settings)


def same(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> bool:
    """Bit for bit."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


class Raises(L.Callback):
    """Ends the fit with an exception after its second batch."""

    def on_train_batch_end(self, *args: Any) -> None:
        if args[-1] == 1:
            raise RuntimeError("planted")

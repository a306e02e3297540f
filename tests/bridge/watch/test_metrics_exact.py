"""Ranks, live figures and drift together leave a training on the CPU as it is, bit for bit; and they cost little."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import numpy
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from fastloop.bridge.watch.live_metrics import LiveMetrics
from fastloop.bridge.watch.rank_exchange import Ranks
from fastloop.evidence.clock.drift import Drift, StepCheck
from tests.bridge.watch.live_fit import BARS, Live, Logs, Strict
from tests.models import loader, trainer, weights


class Eyes(Live):
    """All three, as FastLoop uses them."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self.ranks, self.drift, self.said = Ranks(trainer), Drift(every_s=0.0, recheck_s=0.0), []

    def on_train_batch_end(self, trainer: L.Trainer, *arguments: Any) -> None:
        super().on_train_batch_end(trainer, *arguments)
        slow = trainer.global_step > 6
        if not self.drift.entries or self.drift.due(time.monotonic()):
            self.said.append(
                self.drift.add(time.monotonic(), StepCheck(step=trainer.global_step, step_ms=20.0 if slow else 10.0))
            )

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_train_end(trainer, pl_module)
        self.gathered = self.ranks.gather({"step_ms": 10.0})


class Disturbs(Eyes):
    """What must not happen: it draws a number."""

    def read(self) -> Any:
        torch.rand(1)
        return super().read()


def run(folder: Path, eyes: Eyes | None, bar: Callable[[], Any]) -> dict[str, Any]:
    """Everything two runs can differ in."""
    L.seed_everything(3, verbose=False)
    loggers = [CSVLogger(folder, name="csv"), TensorBoardLogger(folder, name="tb"), Strict()]
    saves = ModelCheckpoint(folder, filename="last", save_top_k=1, every_n_epochs=1)
    module = Logs()
    made = trainer(
        max_epochs=3,
        logger=loggers,
        log_every_n_steps=2,
        enable_progress_bar=True,
        enable_checkpointing=True,
        callbacks=[*([eyes] if eyes else []), bar(), saves],
    )
    made.fit(module, loader(shuffle=True), loader(samples=16))
    saved = torch.load(folder / "last.ckpt", weights_only=False)
    saved["callbacks"] = {name: state for name, state in saved["callbacks"].items() if "Eyes" not in name}
    return {
        "losses": module.losses,
        "weights": weights(module),
        "optimizer": saved["optimizer_states"],
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": numpy.random.get_state()[1],
        "keys": sorted(saved),
        "loops": saved["loops"],
        "metrics": dict(made.callback_metrics),
        "bar": "get_metrics" in vars(made.progress_bar_callback),
    }


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    found = []
    for name, value in one.items():
        try:
            torch.testing.assert_close(value, other[name], rtol=0, atol=0)
        except (AssertionError, TypeError):
            if not isinstance(value, (list, tuple, dict)) or repr(value) != repr(other[name]):
                found.append(name)
    return found


@pytest.mark.parametrize("bar", BARS)
def test_the_same_training_bit_for_bit(bar: Callable[[], Any], tmp_path: Path) -> None:
    eyes = Eyes()
    plain, watched = run(tmp_path / "plain", None, bar), run(tmp_path / "ours", eyes, bar)
    assert differences(plain, watched) == [] and len(plain["losses"]) == 24
    assert eyes.reads == 24 and sum(text is not None for text in eyes.said) == 1, "they did their work"
    assert eyes.gathered == (), "a world of one"
    assert "losses" in differences(plain, run(tmp_path / "disturbed", Disturbs(), bar)), "a test with teeth"


def test_a_step_in_which_nothing_is_due_costs_next_to_nothing() -> None:
    site = SimpleNamespace(is_global_zero=True, loggers=[], global_step=0, fit_loop=None)
    live, drift = LiveMetrics(site, dict, every_s=1e9), Drift()
    drift.add(time.monotonic(), StepCheck(step=1, step_ms=10.0))
    costs = []
    for _ in range(20):
        began = time.perf_counter()
        for _ in range(1000):
            live.tick(site)
            drift.due(time.monotonic())
        costs.append((time.perf_counter() - began) * 1e3)
    assert statistics.median(costs) < 20, "microseconds a step"

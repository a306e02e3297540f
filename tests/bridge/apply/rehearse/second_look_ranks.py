"""The program that test_second_look.py starts on two ranks: a rung that only one of them finds slow; a file each."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader

from fastloop import FastLoop
from fastloop.bridge.apply.rehearse import second_look
from fastloop.judge import rehearsal
from fastloop.records.plan import Action, Applied, Change, Site
from fastloop.rungs.amp import Amp
from tests import models
from tests.bridge.watch import planted

BATCHES = 40


class Stops(L.Callback):
    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        trainer.should_stop = trainer.global_step >= BATCHES


def plan(self: Amp, facts: Any) -> Change:
    """Computes the same, and sleeps in real steps, by a clock that nothing else on this machine moves."""

    def do(site: Site) -> Applied:
        net = site.module.net

        def forward(*args: Any, **kwargs: Any) -> Any:
            if not site.recorded:
                planted.sleep(0.03)
            return type(net).forward(net, *args, **kwargs)

        net.forward = forward
        return Applied(undo=lambda: vars(net).pop("forward", None) and None, probe=lambda: {"dtype": "torch.bfloat16"})

    return Change(actions=(Action(when="model", do=do),), parity="approximate", rehearse="modules")


def run(case: str, rungs: tuple[str, ...], suspects: tuple[int, ...]) -> None:
    """Ranks that suspect nothing find nothing slower, either."""
    torch.manual_seed(0)
    module = models.Regression(optimizer=torch.optim.Adam, dropout=0.2)
    for layer in module.net:
        if hasattr(layer, "reset_parameters"):
            layer.reset_parameters()
    settings = {"rungs": {rung: {"enabled": True} for rung in rungs}, "watch": {"warmup_steps": 2}}
    loop = FastLoop(settings, quiet=True)
    object.__setattr__(loop.config, "by_ladder", frozenset(rungs))
    quiet: Any = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = L.Trainer(
        strategy="ddp",
        devices=2,
        accelerator="cpu",
        max_steps=100_000,
        enable_model_summary=False,
        callbacks=[loop, Stops()],
        **quiet,
    )
    if trainer.global_rank not in suspects:
        second_look.judge.is_suspicious = lambda *_: False  # type: ignore[assignment]
        second_look.judge.compare = lambda *_: None  # type: ignore[assignment]
    torch.manual_seed(1)
    trainer.fit(module, DataLoader(models.pairs(96), batch_size=8))
    told = {
        "weights": {name: value.tolist() for name, value in module.state_dict().items()},
        "losses": module.losses,
        "verdicts": {each.rung: [each.took, each.why] for each in loop.verdicts},
    }
    Path(f"{case}-{trainer.global_rank}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    torch.set_num_threads(1)
    time.perf_counter = planted.read_clock_s
    os.environ["XDG_CACHE_HOME"] = str(Path.cwd() / "cache")
    Amp.plan = plan  # type: ignore[method-assign]
    rehearsal.SLOWER_MS = 1e3
    judge = second_look.judge
    before = judge.is_suspicious, judge.compare
    for case, rungs, suspects in (("plain", (), ()), ("nobody", ("amp",), ()), ("rank_1", ("amp",), (1,))):
        judge.is_suspicious, judge.compare = before
        run(case, rungs, suspects)

"""The program that test_rehearsal.py starts on two ranks: one fit per case; weights and verdicts of each into files."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader

from fastloop import FastLoop
from fastloop.records.plan import Action, Applied, Change, Site
from fastloop.rungs.amp import Amp
from tests import models

PLAN = Amp.plan


def plant(breaks_on: int | None) -> Callable[..., Change]:
    """A rung that changes nothing, and raises on one rank."""

    def do(site: Site) -> Applied:
        net = site.module.net
        rank = torch.distributed.get_rank()

        def forward(*args: Any, **kwargs: Any) -> Any:
            if rank == breaks_on:
                raise RuntimeError("no kernel")
            return type(net).forward(net, *args, **kwargs)

        net.forward = forward
        return Applied(undo=lambda: vars(net).pop("forward", None) and None, probe=lambda: {"dtype": "torch.bfloat16"})

    change = Change(actions=(Action(when="model", do=do),), parity="approximate", rehearse="modules")
    return lambda self, facts: change


class Exchanging(torch.nn.Sequential):
    """As SyncBatchNorm, it asks the other ranks in each call."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = x.detach().mean()
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(mean)
        return super().forward(x - mean)  # type: ignore[no-any-return]


def run(case: str, rungs: tuple[str, ...] | None, *, exchanging: bool = False) -> None:
    torch.manual_seed(0)
    module = models.Regression(optimizer=torch.optim.Adam, dropout=0.2)
    if exchanging:
        module.net = Exchanging(*module.net)
    for layer in module.net:
        if hasattr(layer, "reset_parameters"):
            layer.reset_parameters()
    loop = None
    if rungs is not None:
        loop = FastLoop(
            {"rungs": {rung: {"enabled": True} for rung in rungs}, "watch": {"warmup_steps": 2}}, quiet=True
        )
    trainer = L.Trainer(
        strategy="ddp",
        devices=2,
        accelerator="cpu",
        max_steps=6,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[] if loop is None else [loop],
    )
    torch.manual_seed(1)
    trainer.fit(module, DataLoader(models.pairs(96), batch_size=8))
    told = {
        "weights": {name: value.tolist() for name, value in module.state_dict().items()},
        "losses": module.losses,
        "verdicts": {} if loop is None else {each.rung: [each.took, each.why] for each in loop.verdicts},
        "rehearsed": [] if loop is None else [each.rung for each in loop.verdicts if each.rehearsed is not None],
    }
    Path(f"{case}-{trainer.global_rank}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    torch.set_num_threads(1)
    os.environ["XDG_CACHE_HOME"] = str(Path.cwd() / "cache")
    run("plain", None)
    for case, breaks_on in (("works", None), ("breaks_on_0", 0), ("breaks_on_1", 1)):
        os.environ["XDG_CACHE_HOME"] = str(Path.cwd() / case)
        Amp.plan = plant(breaks_on)  # type: ignore[method-assign]
        run(case, ("amp",))
    Amp.plan = plant(None)  # type: ignore[method-assign]
    run("exchanging", ("amp",), exchanging=True)
    Amp.plan = PLAN  # type: ignore[method-assign]
    run("compiled", ("compile",))

"""The program that test_compat_ranks.py starts on two ranks: FSDP plain, watched, and with rungs; a file per rank.

FSDP of torch takes the type of its device from an accelerator, where there is one; here it is told that it is the CPU.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import FSDPStrategy, StrategyRegistry
from torch.distributed.fsdp import FullyShardedDataParallel

from fastloop import FastLoop
from tests.models import Regression, loader, trainer

RUNGS: dict[str, Any] = {name: {"enabled": True} for name in ("amp", "layout", "overlap", "fused", "host")}
RUNGS["batch"] = {"enabled": True, "micro_batch": 4}


class Pictured(Regression):
    """Has a convolution, and notes that its weights are in shards."""

    def __init__(self) -> None:
        super().__init__()
        self.net.insert(0, torch.nn.Conv2d(1, 1, (1, 3), padding=(0, 1)))
        self.sharded = False

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        self.sharded = isinstance(self.trainer.strategy.model, FullyShardedDataParallel)
        return super().training_step((x[:, None, None], y[:, None, None]), batch_idx)


class PlainFSDP(FSDPStrategy):
    """Lightning's own; it refuses exactly that class on a CPU."""


def fit(strategy: Any, loop: FastLoop | None) -> dict[str, Any]:
    torch.manual_seed(0)
    module, callbacks = Pictured(), list[Callback]([loop] if loop else [])
    made = trainer(strategy=strategy, devices=2, max_epochs=2, callbacks=callbacks)
    before = type(made.strategy)
    made.fit(module, loader(shuffle=True))
    assert type(made.strategy) is before and module.sharded
    seen: dict[str, Any] = {"losses": module.losses, "strategy": before.__name__, "rank": made.global_rank}
    if loop is not None:
        assert loop.measurement is not None
        seen["steps"], seen["world_size"] = loop.measurement.total_steps, loop.measurement.world_size
        seen["findings"] = len(loop.findings)
        seen["skipped"] = {step.rung: step.reason for step in loop.plan.steps if step.status == "skipped"}
        seen["took"] = {verdict.rung: verdict.took for verdict in loop.verdicts}
    return seen


def main() -> None:
    wrap: Any = FullyShardedDataParallel.__init__

    @functools.wraps(wrap)
    def wrap_on_cpu(self: Any, *args: Any, **kwargs: Any) -> None:
        wrap(self, *args, **{**kwargs, "device_id": torch.device("cpu")})

    FullyShardedDataParallel.__init__ = wrap_on_cpu  # type: ignore[method-assign]
    named = functools.partial(StrategyRegistry.get, "fastloop_fsdp")  # by its name alone, Lightning wants a GPU
    seen = {
        "plain": fit(PlainFSDP(), None),
        "watched": fit(named(), FastLoop({"watch": {"warmup_steps": 1}}, quiet=True)),
        "swapped": fit(PlainFSDP(), FastLoop({"rungs": {"host": {"enabled": True}}}, quiet=True)),
        "rungs": fit(named(), FastLoop({"rungs": RUNGS}, quiet=True)),
    }
    Path(f"{seen['plain']['rank']}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main()

"""The program that test_sample_ledger.py starts on two ranks: a base, an arm with other micro-batches, a wrong one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from fastloop.bridge.trials.ceilings import NoExchange
from fastloop.bridge.trials.gradient_probe import GradientProbe
from fastloop.bridge.trials.sample_ledger import Ledger
from fastloop.records import store
from tests.models import pairs
from tests.twins import Twin, made

ARM = {"batch": {"micro_batch": 16}, "overlap": {"gradient_as_bucket_view": True}}


def loader() -> Any:
    return torch.utils.data.DataLoader(pairs(192), batch_size=8, shuffle=True)


def trainer_of(rungs: Any) -> tuple[Any, Any]:
    return made(Twin, rungs, strategy="ddp", devices=2)


def main() -> None:
    for name, rungs in (("base", None), ("arm", ARM)):
        module, trainer = trainer_of(rungs)
        Ledger.into(trainer, Path(name))
        trainer.fit(module, loader())
    for name, rungs in (("base", None), ("arm", ARM), ("wrong", None)):
        module, trainer = trainer_of(rungs)
        probe = GradientProbe.into(trainer, Path(f"{name}-gradient"), None if name == "base" else Path("base-gradient"))
        if name == "wrong":
            trainer.callbacks.append(NoExchange())
        trainer.fit(module, loader())
        trainer.strategy.barrier()
        if trainer.is_global_zero:
            store.write(Path(), {f"{name}-answer.json": store.dump(probe.answer)})


if __name__ == "__main__":
    main()

"""The program that test_ceilings.py starts on two ranks: a fit with exchange of gradients, then one without."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from fastloop.bridge.ceilings import NoExchange
from tests.models import Regression, loader, trainer


class Counts(Callback):
    """Counts the buckets that are exchanged, by a hook that exchanges them."""

    def __init__(self) -> None:
        self.exchanges = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        def hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations that are text
            self.exchanges += 1
            return default_hooks.allreduce_hook(None, bucket)

        trainer.strategy.model.register_comm_hook(None, hook)


def main() -> None:
    for name, callbacks in (("with", []), ("without", [NoExchange()])):
        torch.manual_seed(0)
        counts, module = Counts(), Regression()
        made = trainer(strategy="ddp", devices=2, max_epochs=2, callbacks=[counts, *callbacks])
        made.fit(module, loader())
        seen = {"weights": [parameter.tolist() for parameter in module.parameters()],
                "exchanges": counts.exchanges, "steps": made.global_step}  # fmt: skip
        Path(f"{name}-{made.global_rank}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main()

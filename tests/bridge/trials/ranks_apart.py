"""The program that test_ceilings.py starts on two ranks: a fit as it is, one replayed, one without exchange."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.utils.data import DataLoader, Dataset

from fastloop.bridge.trials.ceilings import remove_cost
from tests.models import Regression, pairs, trainer


class Counts(Callback):
    """Counts the buckets that are exchanged, by a hook that exchanges them."""

    def __init__(self) -> None:
        self.exchanges = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        def hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations that are text
            self.exchanges += 1
            return default_hooks.allreduce_hook(None, bucket)

        trainer.strategy.model.register_comm_hook(None, hook)


class Read(Dataset[Any]):
    """Counts how often a sample is read."""

    def __init__(self) -> None:
        self.inner, self.reads = pairs(64), 0

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        return self.inner[index]


def main() -> None:
    for name in ("as_it_is", "replayed", "no_exchange"):
        torch.manual_seed(0)
        counts, module, data = Counts(), Regression(), Read()
        made = trainer(strategy="ddp", devices=2, max_epochs=2, callbacks=[counts])
        remove_cost(made, name)
        made.fit(module, DataLoader(data, batch_size=8))
        seen = {
            "weights": [parameter.tolist() for parameter in module.parameters()],
            "reads": data.reads,
            "exchanges": counts.exchanges,
            "steps": made.global_step,
        }
        Path(f"{name}-{made.global_rank}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main()

"""Data rungs on two ranks. Run as a program it fits every case and writes a file per rank; `results` reads them."""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.optim import SGD, AdamW

RAGGED = {
    "samples": 168,
    "max_epochs": 34,
    "accumulate_grad_batches": 4,
    "precision": "64-true",
}  # 11 batches a rank and epoch
SHORT = {"samples": 40, "max_epochs": 34, "precision": "64-true"}  # 3 batches a rank and epoch, the last one short
NORMS = {**RAGGED, "max_epochs": 4}
VIEW = {"overlap": {"gradient_as_bucket_view": True}}
SPLIT, MERGE = {"batch": {"micro_batch": 3}}, {"batch": {"micro_batch": 16}}
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "plain": (None, {"samples": 44, "max_epochs": 3}),
    "workers": ({"workers": {"count": 1}}, {"samples": 44, "max_epochs": 3}),
    "nodes": ({"nodes": {"threads": 2}}, {"samples": 44, "max_epochs": 3}),
    "whole": (None, SHORT),
    "split": (SPLIT, SHORT),
    "split view": ({**SPLIT, **VIEW}, SHORT),
    "chatty": (SPLIT, {**SHORT, "max_epochs": 2}),
    "accumulated": (None, RAGGED),
    "merged": (MERGE, RAGGED),
    "one rank refuses": (MERGE, RAGGED),
    "one rank comes apart": (MERGE, RAGGED),
    "one rank has less memory": ({"batch": {}}, RAGGED),
    "accumulated split view": ({**SPLIT, **VIEW}, RAGGED),
    "norms accumulated": (None, NORMS),
    "norms grouped": (MERGE, NORMS),
    "norms merged": ({"batch": {"micro_batch": 16, "batch_norm": "merge"}}, NORMS),
}


def fit(name: str, rungs: Any, samples: int, **settings: Any) -> dict[str, Any]:
    from tests.runs import Net, batches, run

    class Counts(Net):
        """Counts the exchanges of gradients."""

        exchanges = 0

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            if name.startswith("norms"):
                self.net.insert(1, torch.nn.BatchNorm1d(16))

        def on_train_start(self) -> None:
            self.trainer.model.register_comm_hook(self, _exchange)

    kind = SGD if name in ("plain", "workers", "nodes") or name.startswith("norms") else AdamW
    done = run(
        rungs, batches(samples, shuffle=True), partial(Counts, kind, lr=0.01), strategy="ddp", devices=2, **settings
    )
    seen = done.seen("batch") if rungs and "batch" in rungs else {}
    return {
        "apart": seen.get("apart_steps", 0),
        "why": seen.get("apart_why"),
        "searched": seen.get("searched"),
        "samples": done.module.samples,
        "weights": done.weights,
        "rates": done.record.rates,
        "exchanges": done.module.exchanges,
        "steps": done.trainer.global_step,
        "strategy": type(done.trainer.strategy).__name__,
        "took": {verdict.rung: verdict.took for verdict in done.loop.verdicts} if done.loop else {},
    }


def _exchange(module, bucket):  # type: ignore[no-untyped-def]  # DDP reads the annotations, and wants none or its own
    module.exchanges += 1
    reduced = torch.distributed.all_reduce(bucket.buffer(), async_op=True).get_future()
    return reduced.then(lambda future: future.value()[0] / 2)


def _refuse_on_one(*_: Any) -> str | None:
    return "planted" if torch.distributed.get_rank() == 1 else None


def _separate_on_one(batches: Any) -> Any:
    """A window with sample 7 in it, on the second rank, after the first window."""
    from fastloop.feeds.batch_tree import CannotRegroup
    from fastloop.feeds.concatenation import concatenate

    if torch.distributed.get_rank() == 1 and any(7 in batch[2] for batch in batches):
        raise CannotRegroup("planted")
    return concatenate(batches)


def _play_with_less_on_one(run: Any, piece: Any) -> float:
    """The second rank fits 16 samples; without that, 32 are the fastest."""
    if torch.distributed.get_rank() == 1 and piece.samples > 16:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    return 1.0


def main() -> None:
    from fastloop.bridge.apply.micro import batches, choice, search_run, windows
    from fastloop.feeds import window_batches

    os.environ["XDG_CACHE_HOME"] = os.getcwd()
    search_run.SearchRun._play = _play_with_less_on_one
    found, exchange, compare = {}, batches._skip_exchange, choice.explain_difference
    concatenate = window_batches.concatenate
    for name, (rungs, settings) in CASES.items():
        batches._skip_exchange = (lambda strategy: nullcontext()) if name == "chatty" else exchange
        choice.explain_difference = _refuse_on_one if name == "one rank refuses" else compare
        window_batches.concatenate = _separate_on_one if name == "one rank comes apart" else concatenate
        windows.concatenate = window_batches.concatenate
        found[name] = fit(name, rungs, **settings)
    torch.save(found, f"rank{torch.distributed.get_rank()}.pt")


def results() -> list[dict[str, dict[str, Any]]]:
    """What each rank found, by case."""
    from tests.bridge.launch import fit_on_two_ranks

    return fit_on_two_ranks(Path(__file__))


if __name__ == "__main__":
    main()
    sys.exit(0)

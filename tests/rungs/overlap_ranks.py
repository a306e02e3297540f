"""The program that test_overlap.py starts on two ranks: one fit per case; weights and notes of each into files."""

from __future__ import annotations

import functools
import json
import operator
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from fastloop import FastLoop
from tests import models


class Wide(L.LightningModule):
    """About 3 MiB of parameters, so that buckets of 1 MiB are several."""

    def __init__(self, lr: float = 0.05, width: int = 600) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = (torch.nn.Linear(width, width) for _ in range(2))
        self.net = torch.nn.Sequential(torch.nn.Linear(8, width), torch.nn.Tanh(), *layers, torch.nn.Linear(width, 1))
        self.lr = lr

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        return torch.nn.functional.mse_loss(self.net(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class Unused(Wide):
    def __init__(self) -> None:
        super().__init__()
        self.spare = torch.nn.Linear(2, 2)


class Detaching(Wide):
    def on_before_zero_grad(self, optimizer: Any) -> None:
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.detach_()


class Keeping(Wide):
    """Steps away from the last step's gradients, which it keeps."""

    kept: list[Any] | None = None

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        grads = [parameter.grad for parameter in self.parameters()]
        for parameter, last in zip(self.parameters(), self.kept or (), strict=False):
            parameter.grad = parameter.grad - 0.3 * last
        self.kept = grads


class Moving(Wide):
    """Halves gradients by giving them other memory."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for parameter in self.parameters():
            parameter.grad.data = parameter.grad.data * 0.5


class Detaches(L.Callback):
    """The same out of the sight of whoever reads the module's code."""

    def on_before_zero_grad(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        for gradient in map(operator.attrgetter("grad"), pl_module.parameters()):
            if gradient is not None:
                gradient.detach_()


class Look(L.Callback):
    """Notes the living DDP object's settings, and the exchanges a hook ran in each batch."""

    def __init__(self, loop: FastLoop | None) -> None:
        self.loop, self.settings, self.calls = loop, {}, [0]

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        model = trainer.strategy.model
        self.settings = {
            "bucket_cap_mb": model.bucket_bytes_cap / 2**20,
            "static_graph": model.static_graph,
            "gradient_as_bucket_view": model.gradient_as_bucket_view,
        }
        if self.loop is not None and self.loop._applier is not None:
            self.calls.append(self.loop._applier.evidence().get("overlap", {}).get("hook_calls", 0))


def case(
    name: str,
    rungs: dict[str, Any] | None,
    *,
    module: Any = Wide,
    strategy: Any = "ddp",
    fits: int = 1,
    callbacks: tuple[Any, ...] = (),
    **settings: Any,
) -> dict[str, Any]:
    """Fit once or more; what was seen, and the weights in a file."""
    on = {rung: {"enabled": True, **keys} for rung, keys in (rungs or {}).items()}
    loop = None if rungs is None else FastLoop({"rungs": on, "watch": {"warmup_steps": 1}}, quiet=True)
    look, made, error = Look(loop), module(), None
    trainer = models.trainer(
        strategy=strategy, devices=2, callbacks=[*([loop] if loop else []), look, *callbacks], **settings
    )
    before = type(trainer.strategy), dict(trainer.strategy._ddp_kwargs)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for fit in range(fits):
            trainer.fit_loop.max_epochs = 1 + fit
            try:
                trainer.fit(made, DataLoader(models.pairs(256), batch_size=8))
            except Exception as raised:
                error = f"{type(raised).__name__}: {raised}"
    torch.save(made.state_dict(), f"{name}-{trainer.global_rank}.pt")
    calls = [after - earlier for earlier, after in zip(look.calls, look.calls[1:], strict=False)]
    notes = {
        "settings": look.settings,
        "calls": calls,
        "error": error,
        "rank": trainer.global_rank,
        "warnings": [str(line.message) for line in said if "fastloop" in str(line.message)],
        "undone": before == (type(trainer.strategy), trainer.strategy._ddp_kwargs),
        "steps": trainer.global_step,
    }
    if loop is not None and loop.measurement is not None:
        notes |= {
            "verdicts": {verdict.rung: (verdict.took, verdict.why) for verdict in loop.verdicts},
            "evidence": loop.measurement.evidence.get("overlap", {}),
        }
    return notes


def refused(self: Any, state: Any, hook: Any) -> None:
    raise TypeError("BF16 all reduce communication hook required CUDA 11+ and NCCL 2.10+.")


def cases() -> dict[str, Any]:
    """All cases by name, those that raise last."""
    view, one = {"overlap": {}}, {"overlap": {"bucket_cap_mb": 1}}
    small = functools.partial(Wide, width=60)
    run: dict[str, Any] = {
        "plain": lambda n: case(n, None),
        "plain_accumulating": lambda n: case(n, None, accumulate_grad_batches=2),
        "other_rate": lambda n: case(n, None, module=functools.partial(Wide, lr=0.0501)),
        "view": lambda n: case(n, view),
        "buckets": lambda n: case(n, one),
        "no_view": lambda n: case(n, {"overlap": {"gradient_as_bucket_view": False}}),
        "named": lambda n: case(n, one, strategy="fastloop_ddp"),
        "named_alone": lambda n: case(n, None, strategy="fastloop_ddp"),
        "users_buckets": lambda n: case(n, view, strategy=DDPStrategy(bucket_cap_mb=3, static_graph=True)),
        "static": lambda n: case(n, {"overlap": {"static_graph": True, "bucket_cap_mb": 1}}),
        "static_named": lambda n: case(n, {"overlap": {"static_graph": True}}, strategy="fastloop_ddp"),
        "static_accumulating": lambda n: case(n, {"overlap": {"static_graph": True}}, accumulate_grad_batches=2),
        "static_split": lambda n: case(n, {"overlap": {"static_graph": True}, "batch": {"micro_batch": 4}}),
        **{
            hook: lambda n, hook=hook: case(n, {"overlap": {"comm_hook": hook, "bucket_cap_mb": 1}})
            for hook in ("fp16", "bf16")
        },
        "powersgd": lambda n: case(n, {"overlap": {"comm_hook": "powersgd"}}, module=small),
        "powersgd_wide": lambda n: case(n, {"overlap": {"comm_hook": "powersgd"}}),
        "plain_small": lambda n: case(n, None, module=small),
        "hook_accumulating": lambda n: case(
            n, {"overlap": {"comm_hook": "fp16", "bucket_cap_mb": 1}}, accumulate_grad_batches=2
        ),
        "users_hook": lambda n: case(
            n, {"overlap": {"comm_hook": "fp16"}}, strategy=DDPStrategy(ddp_comm_hook=allreduce_hook)
        ),
        "twice": lambda n: case(n, one, fits=2),
        "detaching": lambda n: case(n, view, module=Detaching),
        **{
            f"{name}{suffix}": lambda n, module=module, rungs=rungs, viewed=viewed: case(
                n, rungs, module=module, strategy=DDPStrategy(gradient_as_bucket_view=viewed)
            )
            for name, module in (("keeping", Keeping), ("moving", Moving))
            for suffix, rungs, viewed in (("", view, False), ("_plain", None, False), ("_views", None, True))
        },
        "detached_unseen": lambda n: case(n, view, callbacks=(Detaches(),)),
        "unused": lambda n: case(n, view, module=Unused),
        "after_errors": lambda n: case(n, one),
    }
    found = {name: each(name) for name, each in run.items() if name != "after_errors"}
    with mock.patch.object(DistributedDataParallel, "register_comm_hook", refused):
        found["refused_hook"] = case("refused_hook", {"overlap": {"comm_hook": "bf16"}})
    really, everything = torch.compile, {"amp": {}, "layout": {}, "fused": {}, "compile": {}, **view}
    with mock.patch.object(torch, "compile", lambda function, options, dynamic: really(function, backend="eager")):
        found["compiled"] = case("compiled", {"compile": {}, **view})
        found["everything"] = case("everything", everything)
    return {**found, "after_errors": run["after_errors"]("after_errors")}


if __name__ == "__main__":
    notes = cases()
    Path(f"notes-{notes['plain']['rank']}.json").write_text(json.dumps(notes))

"""What a model already is: each property seen where it holds, and not where it does not."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision

from fastloop.bridge.apply.read_training import read_evidence
from tests.models import Regression
from tests.runs import Net, Run, batches, run


def net() -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3), torch.nn.Conv2d(8, 8, 1), torch.nn.Flatten(), torch.nn.Linear(8, 2)
    )


def seen(module: torch.nn.Module | None, **groups: Any) -> dict[str, Any]:
    optimizer = SimpleNamespace(param_groups=[groups])
    return read_evidence(
        SimpleNamespace(lightning_module=module, datamodule=None, optimizers=[optimizer], precision_plugin=None)
    )


def test_a_plain_model() -> None:
    assert seen(net()) == {
        "compiled": False,
        "channels_last": False,
        "fused": False,
        "convs": 2,
        "transfer_hooks": [],
        "attends_by_hand": 0,
        "calls_backward": False,
        "classes": 0,
        "parameters": 3 * 8 * 9 + 8 + 64 + 8 + 16 + 2,
        "skipped_steps": None,
    }
    assert seen(None) == {}


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda module: module.to(memory_format=torch.channels_last), "channels_last"),
        (lambda module: module[0].compile(backend="eager"), "compiled"),
        (lambda module: module.compile(backend="eager"), "compiled"),
    ],
    ids=["channels_last", "inner", "whole"],
)
def test_what_the_user_did_already(change: Any, name: str) -> None:
    module = net()
    change(module)
    assert [key for key, value in seen(module).items() if value is True] == [name]


def test_fused_only_where_every_group_is() -> None:
    assert seen(net(), fused=True)["fused"] and not seen(net(), fused=None)["fused"]


def test_batch_transfer_hooks_of_the_users_own() -> None:
    class Moves(Regression):
        def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
            return batch

    assert seen(Moves())["transfer_hooks"] == ["transfer_batch_to_device"] and not seen(Regression())["transfer_hooks"]


def test_gradients_that_the_users_code_computes() -> None:
    class Steps(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            super().training_step(batch, batch_idx).backward()

    class Hands(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.manual_backward(super().training_step(batch, batch_idx))

    assert seen(Steps())["calls_backward"] and not seen(Hands())["calls_backward"]


@pytest.mark.parametrize("scale", [2.0**10, 2.0**40])
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
def test_steps_that_a_loss_scaler_skips_are_counted(optimizer: Any, scale: float) -> None:  # A8
    scalers: list[Any] = []

    def fit(rungs: Any) -> Run:
        scalers.append(torch.amp.GradScaler("cpu", init_scale=scale))
        plugins = [MixedPrecision("16-mixed", "cpu", scalers[-1])]
        return run(rungs, batches(400), lambda: Net(optimizer), plugins=plugins)

    seen = fit({}).seen("model")["skipped_steps"]
    overflows = round(math.log2(scale / scalers[-1].get_scale()))
    assert seen == (None if optimizer is torch.optim.SGD else overflows), "SGD counts no steps"
    assert (overflows > 3) is (scale > 2**30), "the control: a small scale overflows nothing"


def test_a_second_fit_counts_its_own_steps() -> None:
    plugins = [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=8.0))]
    first = run({}, batches(64), lambda: Net(torch.optim.AdamW), plugins=plugins)
    assert first.loop is not None and first.seen("model")["skipped_steps"] == 0
    first.trainer.fit_loop.max_epochs += 1
    first.trainer.fit(first.module, batches(64))
    assert first.trainer.global_step > 8 and first.seen("model")["skipped_steps"] == 0

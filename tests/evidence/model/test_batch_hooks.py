"""Whether a hook of each batch may change the training."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fastloop.evidence.model.batch_hooks import may_change_training

SEEN: list[Any] = []


class Looks:
    seen = 0

    def hook(self, trainer: Any, module: Any) -> None:
        self.seen += 1
        self.last = [parameter.grad.norm() for parameter in module.parameters()]
        SEEN.append(self.last)


class Clips:
    def hook(self, trainer: Any, module: Any) -> None:
        torch.nn.utils.clip_grad_value_(module.parameters(), 0.1)


class Scales:
    def hook(self, trainer: Any, module: Any) -> None:
        for parameter in module.parameters():
            gradient = parameter.grad
            gradient *= 0.5


class Replaces(Looks):
    def replace(self, module: Any) -> None:
        module.weight.grad = None

    def hook(self, trainer: Any, module: Any) -> None:
        self.replace(module)


class Averages:
    average: Any

    def hook(self, trainer: Any, module: Any) -> None:
        self.average.update_parameters(module)


class Unreadable:
    hook = print


class Module(torch.nn.Module):
    rate = 1.0

    def training_step(self, batch: Any) -> Any: ...


class Times(Module):
    def hook(self) -> None:
        self.last = 1.0


class Anneals(Module):
    def hook(self) -> None:
        self.rate = self.rate * 0.9


@pytest.mark.parametrize(
    ("owner", "changes"),
    [
        (Looks(), False),
        (Times(), False),
        (Module(), False),
        (Clips(), True),
        (Scales(), True),
        (Replaces(), True),
        (Averages(), True),
        (Unreadable(), True),
        (Anneals(), True),
    ],
)
def test_which_hooks_may_change_the_training(owner: Any, changes: bool) -> None:
    assert may_change_training(owner, "hook") is changes

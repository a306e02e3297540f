"""Code that uses gradients is found; code that only zeroes, clips or computes some is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fastloop.bridge.apply.read_model import list_gradient_users

KEPT: list[Any] = []


class Keeper(torch.optim.Optimizer):
    """An optimizer whose state is the last gradient."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["last"] = parameter.grad


def keep_list(self: Any) -> None:
    self.before = [each.grad for each in self.parameters()]


def keep_by_name(self: Any) -> None:
    self.kept.extend(getattr(each, "grad") for each in self.parameters())  # noqa: B009


def keep_later(self: Any) -> None:
    self.weight.register_post_accumulate_grad_hook(lambda weight: self.before.append(weight.grad))


def keep_zeroed(self: Any) -> None:
    self.before = self.weight.grad.zero_()


def move(self: Any) -> None:
    for each in self.parameters():
        each.grad.data = each.grad.data.clamp(-1, 1)


def restore(self: Any) -> None:
    self.weight.grad = self.before


def log_norm(self: Any) -> None:
    self.log("grad", self.weight.grad.norm())


def zero(self: Any) -> None:
    self.zero_grad()
    self.optimizers().zero_grad(set_to_none=False)
    for each in self.parameters():
        if each.grad is not None:
            each.grad.zero_()
            each.grad = None


def clip(self: Any) -> None:
    torch.nn.utils.clip_grad_norm_(self.parameters(), 1.0)
    self.clip_gradients(self.optimizers(), gradient_clip_val=0.5)


def differentiate(self: Any) -> Any:
    with torch.no_grad():
        self.weight.requires_grad_(getattr(self, "trains", True))
    return torch.autograd.grad(self.weight.sum(), [self.weight])


def choose_optimizer(self: Any) -> Any:
    return Keeper(self.parameters(), {})


def find(function: Callable[..., Any]) -> list[str]:
    """The functions that use gradients, of a module with this method."""
    return list(list_gradient_users([type("Module", (torch.nn.Linear,), {"hook": function})(2, 2)]))


@pytest.mark.parametrize(
    "function",
    [keep_list, keep_by_name, keep_later, keep_zeroed, move, restore, log_norm],
    ids=lambda each: each.__name__,
)
def test_functions_that_use_gradients_are_found(function: Callable[..., Any]) -> None:
    assert find(function) == [function.__qualname__]


@pytest.mark.parametrize("function", [zero, clip, differentiate], ids=lambda each: each.__name__)
def test_zeroing_clipping_and_functional_gradients_are_no_use(function: Callable[..., Any]) -> None:
    assert find(function) == []


def test_an_optimizer_of_the_users_that_a_method_names_is_read() -> None:
    assert find(choose_optimizer) == ["Keeper.step"]


def test_functions_that_a_callback_holds_are_read() -> None:
    class Lambdas:
        def __init__(self) -> None:
            self.on_after_backward = lambda _trainer, module: KEPT.append(module.weight.grad)

    class Nothing:
        def __init__(self) -> None:
            self.on_after_backward = lambda _trainer, module: KEPT.append(module.weight.norm())

    assert "<lambda>" in list_gradient_users([Lambdas()]) and not list(list_gradient_users([Nothing()]))


def test_without_source_a_name_is_enough() -> None:
    namespace: dict[str, Any] = {}
    exec("def hook(self): self.weight.grad = None\ndef other(self): return getattr(self, 'weight')", namespace)
    assert find(namespace["hook"]) == ["hook"] and find(namespace["other"]) == []

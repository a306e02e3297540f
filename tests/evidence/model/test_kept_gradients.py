"""Code that keeps gradients themselves is found; code that copies them or computes with them is not."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fastloop.evidence.model.kept_gradients import list_keepers

KEPT: list[Any] = []


class Keeper(torch.optim.Optimizer):
    """An optimizer whose state is the last gradient."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state, grad = self.state[parameter], parameter.grad
                state["last"] = grad


class Copier(torch.optim.Optimizer):
    """The same with a copy, and a sum."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state, grad = self.state[parameter], parameter.grad
                state["last"] = grad.clone()
                self.total += grad.square().sum()


def keep_list(self: Any) -> None:
    grads = [each.grad for each in self.parameters()]
    self.before = grads


def keep_flat(self: Any) -> None:
    for name, each in self.named_parameters():
        self.before[name] = each.grad.detach().view(-1)


def keep_in_helper(self: Any) -> None:
    KEPT.append({name: each.grad for name, each in self.named_parameters()})


def keep_by_name(self: Any) -> None:
    kept = self.kept
    kept.extend(getattr(each, "grad") for each in self.parameters())  # noqa: B009


def keep_as(self: Any, name: str = "before") -> None:
    setattr(self, name, self.weight.grad)


def keep_first(self: Any) -> None:
    found = defaultdict(list)
    for each in self.parameters():
        found["grads"].append(each.grad)
    self.first = self.first or found


def give_back(self: Any) -> Any:
    return [each.grad for each in self.parameters() if each.grad is not None]


def choose_optimizer(self: Any) -> Any:
    return Keeper(self.parameters(), {})


def keep_later(self: Any) -> None:
    self.weight.register_post_accumulate_grad_hook(lambda weight: self.before.append(weight.grad))


def move(self: Any) -> None:
    for each in self.parameters():
        each.grad.data = each.grad.data.clamp(-1, 1)


def move_by_call(self: Any) -> None:
    for grad in [each.grad for each in self.parameters()]:
        grad.set_(grad.clone())


def move_to_vector(self: Any) -> None:
    vector = torch.cat([each.grad.flatten() for each in self.parameters()])
    torch.nn.utils.vector_to_parameters(vector / vector.norm(), [each.grad for each in self.parameters()])


def keep_elsewhere(self: Any) -> None:
    grads = [each.grad for each in self.parameters()]
    self.remember(grads)


def keep_through_backward(self: Any) -> None:
    found = []
    for loss in self.losses():
        self.zero_grad()
        self.manual_backward(loss)
        found.append([each.grad for each in self.parameters()])
    for each, *grads in zip(self.parameters(), *found, strict=True):
        each.grad = sum(grads)


def sharpen(self: Any) -> None:
    self.manual_backward(self.loss())
    steps = [0.05 * each.grad for each in self.parameters()]
    for each, step in zip(self.parameters(), steps, strict=True):
        each.data.add_(step)
    self.manual_backward(self.loss())


def copy_list(self: Any) -> None:
    self.before = [each.grad.clone() for each in self.parameters()]
    self.deep = copy.deepcopy([each.grad for each in self.parameters()])


def log_norm(self: Any) -> None:
    grads = [each.grad for each in self.parameters() if each.grad is not None]
    self.norm = torch.stack([grad.norm() for grad in grads]).norm()
    self.worst = max(float(grad.abs().max()) for grad in grads)
    self.total += self.weight.grad
    self.logger.experiment.add_histogram("grad", self.weight.grad)
    self.log("grad", self.all_gather(self.weight.grad).norm())


def change(self: Any) -> None:
    for each in self.parameters():
        if each.grad is not None:
            each.grad.mul_(0.5)
            each.grad = each.grad.clamp(-1, 1)
            each.grad[0] = 0
            each.grad.data.add_(each, alpha=1e-4)
            each.grad.data += 1e-4 * each
            each.grad.data[:] = each.grad.data.clone()
            each.data = each.data - 0.1 * each.grad


def differentiate(self: Any) -> Any:
    (found,) = torch.autograd.grad(self.weight.sum(), [self.weight])
    self.take = torch.func.grad
    return torch.autograd.grad(found.sum(), [self.weight], allow_unused=True)


def choose_copier(self: Any) -> Any:
    return Copier(self.parameters(), {})


def find(function: Callable[..., Any]) -> list[str]:
    """The keepers that a module with this method has."""
    return list(list_keepers([type("Module", (torch.nn.Linear,), {"hook": function})(2, 2)]))


@pytest.mark.parametrize(
    "function",
    [
        keep_list,
        keep_flat,
        keep_in_helper,
        keep_by_name,
        keep_as,
        keep_first,
        give_back,
        keep_later,
        move,
        move_by_call,
        move_to_vector,
        keep_through_backward,
        keep_elsewhere,
    ],
)
def test_functions_that_keep_gradients_are_found(function: Callable[..., Any]) -> None:
    assert find(function) == [function.__qualname__]


@pytest.mark.parametrize("function", [copy_list, log_norm, change, differentiate, sharpen, choose_copier])
def test_copies_and_what_is_computed_from_gradients_are_no_gradients(function: Callable[..., Any]) -> None:
    assert find(function) == []


def test_an_optimizer_of_the_users_that_a_method_names_is_read() -> None:
    assert find(choose_optimizer) == ["Keeper.step"]


def test_functions_that_a_callback_holds_are_read() -> None:
    class Lambdas:
        def __init__(self) -> None:
            self.on_after_backward = lambda _trainer, module: KEPT.append(module.weight.grad)

    class Nothing:
        def __init__(self) -> None:
            self.on_after_backward = lambda _trainer, module: KEPT.append(module.weight.grad.norm())

    assert "<lambda>" in list_keepers([Lambdas()]) and not list(list_keepers([Nothing()]))

"""A fused update is torch's usual one whatever the memory layouts, or is left to torch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fastloop.feeds.fused_layouts import DAMPENED, GAPS, SPARSE, fit_layouts, fit_twin

SGD, ADAM, ADAMW, ADAGRAD = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad
KINDS = [(SGD, {}), (SGD, {"momentum": 0.9}), (ADAM, {"amsgrad": True}), (ADAMW, {}), (ADAGRAD, {})]
Give = Callable[[torch.nn.Parameter, torch.Tensor], torch.Tensor]
Between = Callable[[torch.nn.Parameter, Any], None]


def column_major(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.transpose(0, 1).contiguous().transpose(0, 1)


def train(
    optimizer: Any,
    parameter: torch.nn.Parameter,
    give: Give = lambda parameter, gradient: gradient,
    between: Between = lambda parameter, optimizer: None,
) -> torch.Tensor:
    """Step four times, with a change after two."""
    torch.manual_seed(1)
    for step in range(4):
        if step == 2:
            between(parameter, optimizer)
        parameter.grad = given = give(parameter, torch.randn(parameter.shape))
        optimizer.step()
        assert parameter.grad is given
    return parameter.detach()


def compare(kind: Any, start: torch.Tensor, settings: dict[str, Any], **how: Any) -> list[str]:
    """Train unfused and fused; return why groups were fused no longer."""
    plain, ours = (torch.nn.Parameter(start.clone() if start.is_contiguous() else start) for _ in range(2))
    if not start.is_contiguous():
        ours = torch.nn.Parameter(torch.empty(4, 12)[:, ::2].copy_(start))
    notes: list[str] = []
    optimizer = kind([ours], lr=0.1, **settings)
    optimizer.param_groups[0]["fused"] = True
    fit_layouts(optimizer, notes.append)
    expected = train(kind([plain], lr=0.1, **settings), plain, **how)
    assert torch.allclose(train(optimizer, ours, **how), expected, atol=1e-6)
    return notes


def move(parameter: torch.nn.Parameter, optimizer: Any) -> None:
    parameter.data = column_major(parameter.data)


def load(parameter: torch.nn.Parameter, optimizer: Any) -> None:
    state = optimizer.state[parameter]
    state.update({key: column_major(value) for key, value in state.items() if getattr(value, "ndim", 0) > 1})


@pytest.mark.parametrize(("kind", "settings"), KINDS)
@pytest.mark.parametrize(
    "how",
    [
        {"give": lambda parameter, gradient: column_major(gradient)},
        {"give": lambda parameter, gradient: gradient.mean(0, keepdim=True).expand_as(parameter)},
        {"between": move},
        {"between": load},
    ],
    ids=["gradient", "expanded", "parameter", "state"],
)
def test_other_layouts_change_nothing(kind: Any, settings: dict[str, Any], how: dict[str, Any]) -> None:
    assert compare(kind, torch.ones(4, 6), settings, **how) == []


@pytest.mark.parametrize(("kind", "settings"), KINDS)
def test_a_parameter_with_gaps_is_left_to_torch(kind: Any, settings: dict[str, Any]) -> None:
    assert compare(kind, torch.ones(4, 12)[:, ::2], settings) == [GAPS]


@pytest.mark.parametrize(("kind", "settings"), [KINDS[0], KINDS[-1]])
def test_sparse_gradients_are_left_to_torch(kind: Any, settings: dict[str, Any]) -> None:
    def give(parameter: torch.nn.Parameter, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.to_sparse(1) if gradient[0, 0] > 0 else gradient

    assert compare(kind, torch.ones(4, 6), settings, give=give) == [SPARSE]


def thaw(optimizer: Any, early: torch.nn.Parameter, late: torch.nn.Parameter) -> None:
    """Step four times; one parameter gets gradients from the third step on."""
    torch.manual_seed(1)
    for step in range(4):
        gradients = torch.randn(2, 3, 3)
        early.grad, late.grad = gradients[0], gradients[1] if step >= 2 else None
        optimizer.step()


@pytest.mark.parametrize(
    ("settings", "notes"),
    [
        ({}, []),
        ({"nesterov": True, "weight_decay": 0.1}, []),
        ({"maximize": True}, []),
        ({"dampening": 0.5}, [DAMPENED]),
    ],
)
def test_momentum_starts_with_the_first_gradient(settings: dict[str, Any], notes: list[str]) -> None:
    """torch's fused SGD fails if a parameter gets its first gradient later than others: the layers that a finetuning
    callback unfreezes."""
    plain, ours, bare = ([torch.nn.Parameter(torch.ones(3, 3)) for _ in range(2)] for _ in range(3))
    optimizer = SGD(ours, lr=0.1, momentum=0.9, fused=True, **settings)
    found: list[str] = []
    fit_layouts(optimizer, found.append)
    thaw(optimizer, *ours)
    thaw(SGD(plain, lr=0.1, momentum=0.9, **settings), *plain)
    assert found == notes
    for one, other in zip(plain, ours, strict=True):
        assert torch.allclose(one, other, atol=1e-6) and not torch.allclose(other, torch.ones(3, 3), atol=1e-2)
    with pytest.raises(TypeError, match="NoneType"):  # else this is torch's business
        thaw(SGD(bare, lr=0.1, momentum=0.9, fused=True, **settings), *bare)


def test_only_the_group_concerned_is_left_to_torch() -> None:
    first, second = torch.nn.Parameter(torch.ones(4, 8)[:, ::2]), torch.nn.Parameter(torch.ones(4, 4))
    optimizer = ADAM([{"params": [first]}, {"params": [second]}], fused=True)
    first.grad, second.grad = torch.ones(4, 4), torch.ones(4, 4)
    fit_layouts(optimizer, [].append)
    optimizer.step()
    assert [group["fused"] for group in optimizer.param_groups] == [None, True]


def test_what_fits_is_not_copied() -> None:
    """Nor what differs in strides of dimensions of size 1: it has the memory of its parameter."""
    parameter = torch.nn.Parameter(torch.ones(4, 3, 1, 1))
    optimizer = ADAM([parameter], fused=True)
    undo = fit_layouts(optimizer, [].append)
    parameter.grad = torch.ones(12).as_strided((4, 3, 1, 1), (3, 1, 3, 3))
    assert parameter.grad.stride() != parameter.stride()
    lists: list[list[Any]] = [[] for _ in range(6)]
    optimizer._init_group(optimizer.param_groups[0], *lists)  # type: ignore[attr-defined]
    [gradient], [average] = lists[1], lists[2]
    assert gradient.stride() == parameter.stride() and gradient.data_ptr() == parameter.grad.data_ptr()
    assert average is optimizer.state[parameter]["exp_avg"]
    undo()
    undo()
    assert "_init_group" not in vars(optimizer)


def test_the_twin_of_a_fitting_optimizer_fits() -> None:
    optimizer = SGD([torch.nn.Parameter(torch.ones(2))], fused=True)
    twin = copy.copy(optimizer)
    fit_twin(twin, optimizer)
    assert "_init_group" not in vars(twin)
    fit_layouts(optimizer, [].append)
    fit_twin(twin, optimizer)
    assert "_init_group" in vars(twin) and twin._init_group is not optimizer._init_group  # type: ignore[attr-defined]

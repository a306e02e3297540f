"""Fused optimizer kernels read parameters, gradients and state in the order of memory: all need one layout, and all
need their state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fastloop.records.plan import Undo

SPARSE = "a gradient is sparse, which fused kernels do not support"
GAPS = "a parameter is a view with gaps in memory; make it contiguous"
DAMPENED = "a parameter got its first gradient later than others, which fused kernels do not support with dampening"

_is_dense = torch.ops.aten.is_non_overlapping_and_dense.default


def fit_layouts(optimizer: Any, note: Callable[[str], object]) -> Undo:
    """Before each fused update, give gradients and state the layouts of their parameters, and momentum to parameters
    whose gradients come later than those of others, as after unfreezing; a group that cannot be fused is updated by
    torch's usual code from then on.

    This is done where torch collects a group's tensors: a step's closure has computed the gradients by then.

    Args:
        optimizer: a fused one of torch.
        note: receives the reason for each group that is fused no longer.
    """
    collect = optimizer._init_group

    def collect_fitting(group: dict[str, Any], *into: Any) -> Any:
        found = collect(group, *into)
        if not group.get("fused"):
            return found
        lists = [each for each in into if isinstance(each, list)]
        if (why := _explain_no_fusing(group, *lists)) is None:
            _fit(lists, optimizer.state)
            return found
        note(why)
        unfuse(group, optimizer.state)
        for each in lists:
            each.clear()
        return collect(group, *into)

    def undo() -> None:
        vars(optimizer).pop("_init_group", None)

    optimizer._init_group = collect_fitting
    return undo


def fit_twin(twin: Any, optimizer: Any) -> None:
    """Let the copy of an optimizer fit layouts if the optimizer does: copies have none of its own attributes."""
    if "_init_group" in vars(optimizer):
        fit_layouts(twin, list[str]().append)


def unfuse(group: dict[str, Any], states: Any) -> None:
    """Leave the implementation to torch again. Unfused optimizers keep their step counters on the CPU."""
    group.update(fused=None, foreach=None)
    for parameter in group["params"]:
        state = states.get(parameter, {})
        if hasattr(state.get("step"), "to"):
            state["step"] = state["step"].to("cpu")


def _explain_no_fusing(
    group: dict[str, Any], parameters: list[torch.Tensor], gradients: list[torch.Tensor], *states: list[Any]
) -> str | None:
    if any(each.layout is not torch.strided for each in gradients):
        return SPARSE
    if group.get("dampening") and any(map(_list_late, states)):
        return DAMPENED
    return None if all(each.is_contiguous() or _is_dense(each) for each in parameters) else GAPS


def _list_late(tensors: list[Any]) -> list[int]:
    """The places of parameters that have no momentum yet, although others have."""
    places = [at for at, each in enumerate(tensors) if each is None]
    return places if len(places) < len(tensors) else []


def _fit(lists: Sequence[list[Any]], states: Any) -> None:
    """Replace what has other strides than its parameter: gradients in their list only, state for good. Runs at every
    step."""
    parameters, *others = lists
    wanted = [each.stride() for each in parameters]
    for tensors in others:
        # Step counters have no strides, and momentum is None before the first step.
        found = [() if each is None else each.stride() for each in tensors]
        if found == wanted:
            continue
        for place in _list_late(tensors):  # the same: torch starts momentum with the gradient itself
            tensors[place] = torch.zeros_like(parameters[place])
        for place in [at for at, (own, other) in enumerate(zip(found, wanted, strict=False)) if own and own != other]:
            parameter, misfit = parameters[place], tensors[place]
            tensors[place] = fitting = _lay_out(misfit, parameter)
            state = states.get(parameter, {})
            state.update({key: fitting for key, value in state.items() if value is misfit})


def _lay_out(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    pairs = zip(tensor.shape, tensor.stride(), like.stride(), strict=True)
    if all(size == 1 or own == wanted for size, own, wanted in pairs):  # the same memory, but torch compares strides
        return tensor.as_strided(like.shape, like.stride())
    return torch.empty_strided(like.shape, like.stride(), dtype=tensor.dtype, device=tensor.device).copy_(tensor)

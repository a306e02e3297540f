"""Estimates what an optimizer's fused form would save on the CPU, where the usual one makes a dozen calls a parameter.

Both forms are timed on copies of some parameters, the large ones cut to as many elements as show the speed.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

MOST_TENSORS, MOST_ELEMENTS, REPEATS = 32, 2**17, 9
"""Most copies, most elements of each, and timed updates of either form: a tenth of a second in all."""
CHOICES = ("fused", "foreach", "capturable", "differentiable")
"""Settings of an optimizer whose user has chosen the implementation."""


def describe_optimizers(optimizers: Sequence[Any], steps: int = 0) -> dict[str, Any]:
    """Return the names of unfused optimizers that are not torch's own and of those that have no fused form, and the
    milliseconds per step that fusing the others would save. With LBFGS also how often a step computes the loss, with
    several optimizers how many others there are, and with SparseAdam that there is one for sparse gradients.

    Args:
        steps: how many steps the optimizers have made.
    """
    own = [optimizer for optimizer in optimizers if not type(optimizer).__module__.startswith("torch.optim")]
    torchs = [optimizer for optimizer in optimizers if optimizer not in own]
    unfused = [type(each).__name__ for each in own if not _is_fused(each)]
    without_form = [type(each).__name__ for each in torchs if not _has_fused_form(each)]
    found: dict[str, Any] = {
        "own": unfused,
        "no_fused_form": without_form,
        "fusing_saves_ms": sum(filter(None, map(estimate_fusing_ms, torchs))),
    }
    named = unfused or without_form
    if others := len(optimizers) - len(named) if named else 0:
        found["others"] = others
    if any(type(each) is torch.optim.SparseAdam for each in torchs):
        found["takes_sparse_gradients"] = True
    counts = [state["func_evals"] for each in torchs for state in each.state.values() if "func_evals" in state]
    if counts and steps and len(optimizers) == 1:
        found["evaluations_per_step"] = sum(counts) / steps
    return found


def _has_fused_form(optimizer: torch.optim.Optimizer) -> bool:
    return "fused" in inspect.signature(type(optimizer)).parameters


def _is_fused(optimizer: Any) -> bool:
    groups = getattr(optimizer, "param_groups", [])
    return bool(groups) and all(group.get("fused") for group in groups)


def estimate_fusing_ms(optimizer: torch.optim.Optimizer) -> float | None:
    """Return the milliseconds per update that the fused form would save; None if the optimizer has none, its user chose
    a form, or it cannot be timed."""
    known = inspect.signature(type(optimizer)).parameters
    pairs = [(group, each) for group in optimizer.param_groups for each in group["params"] if each.requires_grad]
    chosen = any(group.get(name) is True for group in optimizer.param_groups for name in CHOICES)
    if not _has_fused_form(optimizer) or chosen or not pairs or not all(each.is_floating_point() for _, each in pairs):
        return None
    if any(each.grad is not None and each.grad.is_sparse for _, each in pairs):
        return None  # no fused form takes these
    if _global_optimizer_pre_hooks or _global_optimizer_post_hooks:
        return None  # the user's, which would be called for the copies too
    small = [pair for pair in pairs if pair[1].numel() <= MOST_ELEMENTS]
    large = [pair for pair in pairs if pair[1].numel() > MOST_ELEMENTS]
    names = {*known} - {"params", *CHOICES}
    return 1e3 * sum(_estimate_saved_s(type(optimizer), each, names) for each in (small, large) if each)


def _estimate_saved_s(kind: Any, pairs: Sequence[tuple[Any, torch.Tensor]], names: Collection[str]) -> float:
    """Return the seconds that a fused update of these parameters, all small or all large, would save."""
    drawn = sorted(pairs, key=lambda pair: pair[1].numel())[:: -(-len(pairs) // MOST_TENSORS)]
    groups: dict[int, dict[str, Any]] = {}
    for group, each in drawn:
        options = {name: group[name] for name in names if name in group}
        groups.setdefault(id(group), {"params": [], **options})["params"].append(_copy(each))
    copies = [copy for group in groups.values() for copy in group["params"]]
    forms = [[{**group, "params": [*group["params"]]} for group in groups.values()] for _ in range(2)]
    usual, fused = (kind(form, fused=fused) for form, fused in zip(forms, (False, True), strict=True))
    turns = [(_time_update(usual), _time_update(fused)) for _ in range(1 + REPEATS)][1:]  # the first makes the state
    saved_s = min(each for each, _ in turns) - min(each for _, each in turns)  # other load only makes turns longer
    narrowed: float = sum(each.numel() for _, each in drawn) / sum(copy.numel() for copy in copies)
    scale = len(pairs) / len(drawn) * narrowed
    return max(0.0, scale * saved_s)


def _copy(parameter: torch.Tensor) -> torch.nn.Parameter:
    copy = torch.nn.Parameter(torch.zeros(max(1, min(MOST_ELEMENTS, parameter.numel())), dtype=parameter.dtype))
    copy.grad = torch.zeros_like(copy)
    return copy


def _time_update(optimizer: torch.optim.Optimizer) -> float:
    began_s = time.perf_counter()
    optimizer.step()
    return time.perf_counter() - began_s

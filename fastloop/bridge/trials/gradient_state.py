"""Rounds of one optimizer step from slightly different starts, and the file with their gradients."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fastloop.bridge.trials import determinism

ROUNDING = {"fp32": 2.0**-20, "tf32": 2.0**-11, "bf16": 2.0**-8}
"""Relative errors of weights that represent a precision's rounding. A float32 sum of some hundred products is off by
more than one rounding; the other precisions accumulate in float32."""


@dataclass(frozen=True)
class Start:
    """The starting point of a round."""

    name: str
    seed: int = 0
    error: float = 0.0
    """Relative error of every parameter."""
    raised: bool = False
    """Whether it starts from weights with raised biases, see `raise_biases`."""

    def set(self, module: torch.nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
        """Set parameters, buffers and random streams to this start."""
        determinism.seed_everything(self.seed)
        parameters = {strip_name(name) for name, _ in module.named_parameters()}
        with torch.no_grad():
            for name, tensor in iterate_named(module):
                if (own := weights.get(name)) is None:
                    continue
                tensor.copy_(own)
                if self.error and name in parameters and own.is_floating_point():
                    tensor.mul_(1 + self.error * torch.randn_like(tensor))
        determinism.seed_everything(self.seed)


TWICE = (Start("first"), Start("again"))
STARTS = (*TWICE, Start("random", seed=1), *(Start(name, error=error) for name, error in ROUNDING.items()))
RAISED = tuple(Start(f"raised {name}", error=error, raised=True) for name, error in {"first": 0.0, **ROUNDING}.items())
ABOVE = 3.0
"""Standard deviations by which a raised bias lifts the output of its normalization above 0."""
_NORMALIZATIONS = (torch.nn.modules.batchnorm._NormBase, torch.nn.GroupNorm, torch.nn.LayerNorm)


@dataclass
class Round:
    """The results of one round."""

    start: Start = TWICE[0]
    batches: int = 0
    begins: int = 0
    """batch_idx of its first batch."""
    loss: float | None = None
    gradient: dict[str, Any] = field(default_factory=dict)
    clipped: dict[str, Any] = field(default_factory=dict)


# Weights and gradients of a module by name, on the host, and the file in which one trial leaves them for another.

FILE = "gradients.pt"


def find_path(folder: Path, rank: int) -> Path:
    """Return the file of a rank."""
    return folder / (FILE if rank == 0 else f"gradients-{rank}.pt")


def save(folder: Path, rank: int, content: Mapping[str, Any]) -> None:
    """Write tensors and plain values atomically."""
    folder.mkdir(parents=True, exist_ok=True)
    whole = find_path(folder, rank)
    partial = whole.with_name(f".{whole.name}.{os.getpid()}.tmp")
    try:
        torch.save(dict(content), partial)
        partial.replace(whole)
    finally:
        partial.unlink(missing_ok=True)  # left over only if the disk is full


def read(folder: Path, rank: int) -> dict[str, Any]:
    """Load what the first rank of another trial saved, with the batches of this rank. Loading runs no code.

    Raises:
        OSError, pickle.UnpicklingError: there is no such file, or it holds something else.
    """
    known: dict[str, Any] = torch.load(find_path(folder, 0), map_location="cpu", weights_only=True)
    if rank and find_path(folder, rank).is_file():
        known["batches"] = torch.load(find_path(folder, rank), map_location="cpu", weights_only=True)["batches"]
    return known


def iterate_named(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield parameters and buffers by name, except lazy ones without a shape."""
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if not torch.nn.parameter.is_lazy(tensor):
            yield strip_name(name), tensor.detach()


def strip_name(name: str) -> str:
    """Remove the parts of a name that torch.compile inserts."""
    return name.replace("_orig_mod.", "")


def raise_biases(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return biases for the normalizations, by name, so large that a ReLU after one passes nearly everything.

    At random weights a ReLU cuts its input in the middle, where rounding decides which side a number is on; fifty of
    them scatter a gradient until nothing is left of it (bfloat16 in a ResNet-50 changes it by 1.2 of its norm, with
    these biases by 0.01). Changed biases give a different network, but the same one for all arms, and each of its
    layers counts.
    """
    return {
        strip_name(f"{name}.bias".lstrip(".")): ABOVE * part.weight.detach().abs().cpu()
        for name, part in module.named_modules()
        if isinstance(part, _NORMALIZATIONS) and part.weight is not None and getattr(part, "bias", None) is not None
    }


def copy_state(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Copy all parameters and buffers to the host."""
    return {name: tensor.to("cpu", copy=True) for name, tensor in iterate_named(module)}


def choose_device(module_device: torch.device, gradient: Mapping[str, torch.Tensor]) -> torch.device:
    """Return where to keep the gradients of the other rounds: on the module's device if it has room for all of them,
    which saves the copies of large models; otherwise on the host."""
    if module_device.type != "cuda":
        return torch.device("cpu")
    free_bytes, _ = torch.cuda.mem_get_info(module_device)
    size = sum(each.numel() * each.element_size() for each in gradient.values())  # at most, for sparse ones
    return module_device if free_bytes > 3 * len(STARTS + RAISED) * size else torch.device("cpu")


def copy_gradient(
    trainer: Any, module: torch.nn.Module, optimizer: Any, device: torch.device
) -> dict[str, torch.Tensor]:
    """Copy the gradients that an optimizer is about to use, without a loss scaler's factor, to a device."""
    owned = {id(each) for group in optimizer.param_groups for each in group["params"]}
    scaler = getattr(trainer.strategy.precision_plugin, "scaler", None)
    # A fused optimizer divides by the scale itself, in its step.
    scale = scaler.get_scale() if scaler is not None and getattr(optimizer, "_step_supports_amp_scaling", False) else 1
    return {
        strip_name(name): each.grad.detach().to(device, copy=True) / scale
        for name, each in module.named_parameters()
        if each.grad is not None and id(each) in owned
    }

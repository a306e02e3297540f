"""Weights and gradients of a module by name, on the host, and the file in which a trial leaves them for another."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from fastloop.bridge import measuring, survey

FILE = "gradients.pt"


def path(folder: Path, rank: int) -> Path:
    """The file of a rank."""
    return folder / (FILE if rank == 0 else f"gradients-{rank}.pt")


def save(folder: Path, rank: int, content: Mapping[str, Any]) -> int:
    """Write tensors and plain values, whole or not at all; the size in bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    whole = path(folder, rank)
    partial = whole.with_name(f".{whole.name}.{os.getpid()}.tmp")
    try:
        torch.save(dict(content), partial)
        partial.replace(whole)
    finally:
        partial.unlink(missing_ok=True)  # there only where the disk is full
    return whole.stat().st_size


def read(folder: Path, rank: int) -> dict[str, Any]:
    """What the first rank of another trial kept, with this rank's batches. Loading runs no code.

    Raises:
        OSError, pickle.UnpicklingError: there is no such file, or it holds something else.
    """
    known: dict[str, Any] = torch.load(path(folder, 0), map_location="cpu", weights_only=True)
    if rank and path(folder, rank).is_file():
        known["batches"] = torch.load(path(folder, rank), map_location="cpu", weights_only=True)["batches"]
    return known


def named(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers, but for those that do not know their shape yet."""
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if not torch.nn.parameter.is_lazy(tensor):
            yield plain(name), tensor.detach()


def plain(name: str) -> str:
    """A name without what torch.compile puts into it."""
    return name.replace("_orig_mod.", "")


def state(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Copies of all parameters and buffers."""
    return {name: tensor.to("cpu", copy=True) for name, tensor in named(module)}


def gradient(trainer: Any, module: torch.nn.Module, optimizer: Any) -> dict[str, torch.Tensor]:
    """Copies of the gradients that an optimizer is about to use, without the factor of a loss scaler."""
    owned = {id(each) for group in optimizer.param_groups for each in group["params"]}
    scaler = getattr(trainer.strategy.precision_plugin, "scaler", None)
    # A fused optimizer divides by the scale itself, in its step.
    scale = scaler.get_scale() if scaler is not None and getattr(optimizer, "_step_supports_amp_scaling", False) else 1
    return {plain(name): each.grad.detach().to("cpu", copy=True) / scale for name, each in module.named_parameters()
            if each.grad is not None and id(each) in owned}  # fmt: skip


def precision(trainer: Any, module: torch.nn.Module) -> str:
    """The coarsest arithmetic that a training may use, as `parity.TAU` calls it."""
    said = str(trainer.strategy.precision_plugin.precision)
    if "bf16" in said or any(survey.module_facts(module)["autocasts"]):
        return "bf16"
    if "16" in said or "64" in said:
        return "fp16" if "16" in said else "fp64"
    products, convolutions = measuring.tf32()
    convolves = any(isinstance(part, torch.nn.modules.conv._ConvNd) for part in module.modules())
    on_cuda = trainer.strategy.root_device.type == "cuda"
    return "tf32" if on_cuda and (products or (convolutions and convolves)) else "fp32"

"""The arithmetic that a training uses, as far as it can be read."""

from __future__ import annotations

from typing import Any

import torch

from fastloop.bridge.apply import read_facts
from fastloop.bridge.watch import measurement


def find_precision(trainer: Any, module: torch.nn.Module) -> str:
    """The coarsest arithmetic that a training may use, as `parity.TAU` calls it."""
    name = str(trainer.strategy.precision_plugin.precision)
    if "bf16" in name or any(read_facts.read_module(module)["autocasts"]):
        return "bf16"
    if "16" in name or "64" in name:
        return "fp16" if "16" in name else "fp64"
    products, convolutions = measurement.read_tf32()
    convolves = any(isinstance(part, torch.nn.modules.conv._ConvNd) for part in module.modules())
    on_cuda = trainer.strategy.root_device.type == "cuda"
    return "tf32" if on_cuda and (products or (convolutions and convolves)) else "fp32"

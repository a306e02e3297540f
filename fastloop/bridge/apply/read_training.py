"""What a training already uses (arithmetic, model and optimizer settings), so that advice does not repeat it."""

from __future__ import annotations

from typing import Any

import torch

from fastloop.bridge.apply import read_facts, read_model
from fastloop.bridge.watch import measurement
from fastloop.feeds.attention import candidates as attention
from fastloop.feeds.loss.cross_entropy import find_large


def find_precision(trainer: Any, module: torch.nn.Module) -> str:
    """The coarsest arithmetic that a training may use, by its name in `parity.TAU`."""
    name = str(trainer.strategy.precision_plugin.precision)
    if "bf16" in name or any(read_model.read_module(module)["autocasts"]):
        return "bf16"
    if "16" in name or "64" in name:
        return "fp16" if "16" in name else "fp64"
    products, convolutions = measurement.read_tf32()
    convolves = any(isinstance(part, torch.nn.modules.conv._ConvNd) for part in module.modules())
    on_cuda = trainer.strategy.root_device.type == "cuda"
    return "tf32" if on_cuda and (products or (convolutions and convolves)) else "fp32"


def read_evidence(trainer: Any, steps_before: tuple[int, int] = (0, 0)) -> dict[str, Any]:
    """Return whether the model is compiled and channels-last, whether its optimizers are fused, how many 2-D
    convolutions and hand-written attentions it has, whether its own code computes gradients, and which batch transfer
    hooks the user overrides."""
    module = trainer.lightning_module
    if module is None:
        return {}
    convolutions = [inner for inner in module.modules() if isinstance(inner, torch.nn.Conv2d)]
    # Not by attribute: reading a weight with a spectral norm trains that norm. A 1x1 kernel has the same layout in both
    # memory formats, so it shows nothing.
    weights = [inner._parameters.get("weight") for inner in convolutions]
    wide = [each for each in weights if each is not None and each.dim() == 4 and max(each.shape[2:]) > 1]
    groups = [group for optimizer in trainer.optimizers for group in getattr(optimizer, "param_groups", [])]
    return {
        "compiled": any(read_model.is_compiled(inner) for inner in module.modules()),
        "channels_last": bool(wide) and all(weight.is_contiguous(memory_format=torch.channels_last) for weight in wide),
        "fused": bool(groups) and all(bool(group.get("fused")) for group in groups),
        "convs": len(convolutions),
        "attends_by_hand": len({*attention.list_candidates(module), *attention.list_switchable(module)}),
        "calls_backward": bool(read_model.list_methods(module, r"\.backward\s*\(|\bgrad\s*\(")),
        "classes": find_large(module),
        "transfer_hooks": [
            hook for hook in read_facts.TRANSFER_HOOKS if read_facts.find_hook_owner(trainer, hook) is not None
        ],
        "parameters": sum(parameter.numel() for parameter in module.parameters()),
        "skipped_steps": count_skipped_steps(trainer, steps_before),
    }


def read_optimizer_steps(trainer: Any) -> tuple[int, int]:
    """Return the optimizer steps that Lightning has counted, and those that the only optimizer has; 0 if it does not
    count them, or has made none."""
    optimizers = trainer.optimizers if len(trainer.optimizers) == 1 else []
    states = [state for each in optimizers for state in getattr(each, "state", {}).values()]
    return trainer.global_step, int(max((float(state["step"]) for state in states if "step" in state), default=0))


def count_skipped_steps(trainer: Any, before: tuple[int, int]) -> int | None:
    """Count the optimizer steps that the loss scaler left out because gradients overflowed; None if there is no scaler,
    or if the optimizer does not count its steps. Lightning's counts and its schedulers include them.

    Args:
        before: what `read_optimizer_steps` returned when the fit began.
    """
    if getattr(trainer.precision_plugin, "scaler", None) is None:
        return None
    counted, made = read_optimizer_steps(trainer)
    return max(0, counted - before[0] - (made - before[1])) if made else None

"""What the model and its optimizers already are when they train: so that nobody is advised what is done."""

from __future__ import annotations

from typing import Any

import torch

from fastloop.bridge.survey import TRANSFER_HOOKS, hook_owner


def evidence(trainer: Any) -> dict[str, Any]:
    """Whether the model is compiled and channels-last, its optimizers fused, how many 2-D convolutions it has, and
    which batch transfer hooks are the user's."""
    module = trainer.lightning_module
    if module is None:
        return {}
    convolutions = [inner for inner in module.modules() if isinstance(inner, torch.nn.Conv2d)]
    # A 1x1 kernel lies the same in both orders, and says nothing.
    wide = [inner.weight for inner in convolutions if inner.weight.dim() == 4 and max(inner.weight.shape[2:]) > 1]
    groups = [group for optimizer in trainer.optimizers for group in getattr(optimizer, "param_groups", [])]
    return {
        "compiled": any(_is_compiled(inner) for inner in module.modules()) or _is_compiled(module),
        "channels_last": bool(wide) and all(weight.is_contiguous(memory_format=torch.channels_last) for weight in wide),
        "fused": bool(groups) and all(bool(group.get("fused")) for group in groups),
        "convs": len(convolutions),
        "transfer_hooks": [hook for hook in TRANSFER_HOOKS if hook_owner(trainer, hook) is not None],
        "parameters": sum(parameter.numel() for parameter in module.parameters()),
    }  # fmt: skip


def _is_compiled(module: Any) -> bool:
    return (
        type(module).__name__ == "OptimizedModule"
        or vars(module).get("_compiled_call_impl") is not None
        or getattr(module, "_compiler_ctx", None) is not None
    )

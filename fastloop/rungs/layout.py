"""Store convolution data channels-last (NHWC), the order tensor cores read.

Faster because  cuDNN's tensor-core kernels are NHWC; with NCHW every convolution transposes first.
Costs           one conversion of weights at start and of image batches at each step.
Don't use when  the model has no 2-D convolutions, or runs in plain fp32 (gain is small there).
Evidence        strides of the convolution weights, and image batches converted
Source          https://docs.pytorch.org/tutorials/intermediate/memory_format_tutorial.html
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fastloop.errors import NotApplicable
from fastloop.records import Action, Applied, Change, Facts, Measurement, Verdict


@dataclass(frozen=True, kw_only=True)
class Layout:
    """channels_last for the model and its 4-D inputs."""

    enabled: bool = False

    def plan(self, facts: Facts) -> Change:
        """Ask for channels_last weights and inputs where there are 2-D convolutions."""
        if not facts.convs:
            raise NotApplicable("the model has no 2-D convolution")
        return Change(parity="approximate", evaluation=True, wants={"step.channels_last_inputs": True},
                      actions=(Action(keys=("model.memory_format",), when="model", do=_channels_last),))  # fmt: skip

    def verify(self, seen: Measurement) -> Verdict:
        """Taken when the weights have channels-last strides; says how many batches were converted."""
        evidence = seen.evidence.get("layout", {})
        right, total = evidence.get("channels_last_convs"), evidence.get("convs")
        if right is None:
            return Verdict(took=None, why="the model was not looked at")
        return Verdict(took=right > 0, why=f"{right} of {total} convolutions hold channels-last weights;"
                                           f" {evidence.get('converted_batches', 0)} batches came channels-last")  # fmt: skip


def _channels_last(site: Any) -> Applied:
    """Convert the model in place (shapes, names and values stay) and count at the end what is still converted."""
    import torch

    model = site.module
    model.to(memory_format=torch.channels_last)

    def undo() -> None:
        model.to(memory_format=torch.contiguous_format)

    def probe() -> Mapping[str, Any]:
        # A 1x1 kernel's strides are ambiguous and count as both orders; those cannot show anything.
        weights = [module.weight for module in model.modules()
                   if isinstance(module, torch.nn.Conv2d) and module.kernel_size != (1, 1)]  # fmt: skip
        right = sum(weight.is_contiguous(memory_format=torch.channels_last) for weight in weights)
        return {"convs": len(weights), "channels_last_convs": right}

    return Applied(undo=undo, probe=probe)

"""Store convolution data channels-last (NHWC), the layout that tensor cores read.

Faster because  cuDNN's tensor-core kernels are NHWC; with NCHW every convolution transposes first.
Costs           one conversion of the weights at the start, and of each image batch; cuDNN loads other kernels, which
                takes 0.3 to 1 s for each depthwise convolution. Random numbers that are drawn in an image's memory
                order (dropout, randn_like) fall on other elements; on the CPU, randn_like also leaves torch's random
                stream at another place, so that later shuffles differ.
Don't use when  the model has no 2-D convolutions, or many depthwise ones and a short run. `view` in your
                LightningModule, losses or callbacks fails with it (under DDP also in your modules): write reshape or
                flatten.
Evidence        strides of the convolution weights, and image batches converted
Source          https://docs.pytorch.org/tutorials/intermediate/memory_format_tutorial.html
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fastloop.errors import NotApplicable
from fastloop.records.card import DEVICE, Card
from fastloop.records.facts import Facts
from fastloop.records.measurement import Measurement
from fastloop.records.plan import Action, Applied, Change, Site, Verdict, say_count
from fastloop.records.readings import convolves, does_already, on_gpu

CARD = Card(
    family="compute",
    does="channels_last avoids transposes around convolutions",
    answers={"memory_bound:convolutions": 2, DEVICE: 2},
    follows={"memory_bound": 2, "fp32_math": 2, "compute_bound": 2},
    applies=lambda seen: on_gpu(seen) and convolves(seen) and not does_already(seen, "channels_last"),
    plan_shows_refusal=True,
    explains={
        "view size is not compatible": "rungs.layout stores images and convolution weights channels-last, where view"
        " fails: call reshape instead, or write rungs.layout.enabled: false"
    },
)
CONV_S, DEPTHWISE_S = 0.005, 0.5
"""Time to load a convolution's channels-last kernels once: 2 to 9 ms on an H200, but 0.3 to 0.4 s in float32 and 0.7 to
1 s in bfloat16 for a depthwise one."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """channels_last for the model and its 4-D inputs."""

    enabled: bool = False

    def plan(self, facts: Facts) -> Change:
        """Request channels_last weights and inputs if the model has 2-D convolutions."""
        if not facts.convs:
            raise NotApplicable("the model has no 2-D convolution")
        if not facts.plain_gradients:
            raise NotApplicable(f"{facts.strategy} stores weights in its own layout")
        if views := (*facts.views, *(facts.inner_views if facts.is_ddp else ())):  # the rest is rehearsed
            raise NotApplicable(
                f"{views[0]} calls view, which fails on channels-last images and weights; write reshape or flatten"
            )
        if facts.line_searches:
            raise NotApplicable("LBFGS takes a view of each gradient, which fails on channels-last ones")
        kernels = Action(keys=("model.memory_format",), when="model", do=_convert_to_channels_last)
        loads_s = CONV_S * len(facts.convs) + DEPTHWISE_S * len(facts.depthwise_convs)
        state = Action(keys=("optimizer.memory_format",), when="train_start", do=_match_state)
        return Change(
            parity="approximate",
            evaluation=True,
            wants={"step.channels_last_inputs": True},
            actions=(kernels, state),
            # DDP lays out its buckets by the kernels' memory order, and might not redo that if it changes mid-run.
            rehearse=None if facts.is_ddp else "modules",
            first_call_s=loads_s if facts.device == "cuda" else 0.0,
        )

    def verify(self, seen: Measurement) -> Verdict:
        """The rung took effect if the weights have channels-last strides; also reports the converted batches."""
        evidence = seen.evidence.get("layout", {})
        right, total = evidence.get("channels_last_convs"), evidence.get("convs")
        if right is None:
            return Verdict(took=None, why="the model was not inspected")
        batches = evidence.get("converted_batches", 0)
        took, weights = right > 0, f"{right} of {total} convolutions hold channels-last weights"
        if not total:
            took, weights = batches > 0, "the weights are the same in both layouts (1x1 or depthwise kernels)"
        return Verdict(took=took, why=f"{weights}; {say_count(batches, 'batch')} channels-last")


def _list_kernels(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield names and 4-D parameters of the convolutions [out, in, height, width], including parametrized ones."""
    import torch

    for name, module in model.named_modules():
        if isinstance(module, (torch.nn.Conv2d, torch.nn.ConvTranspose2d)):
            yield from ((key, kernel) for key, kernel in module.named_parameters(prefix=name) if kernel.dim() == 4)


def _convert_to_channels_last(site: Site) -> Applied:
    """Convert the inputs, and the kernels in place (shapes, names and values do not change); at the end, count the
    kernels that are still channels-last."""
    import torch

    from fastloop.feeds.batch_tree import InputsChannelsLast

    model, order, inputs = site.module, torch.channels_last, InputsChannelsLast()
    # Skip kernels that the user already stores in another order, and all other 4-D parameters.
    names = {name for name, kernel in _list_kernels(model) if kernel.is_contiguous()}

    def store(memory_format: Any) -> None:
        for name, kernel in _list_kernels(model):
            if name in names:
                kernel.data = kernel.data.contiguous(memory_format=memory_format)
                if kernel.grad is not None:
                    kernel.grad.data = kernel.grad.data.contiguous(memory_format=memory_format)

    def probe() -> Mapping[str, Any]:
        # If a size is 1, the strides can match both orders; such kernels prove nothing.
        telling = [
            kernel
            for _, kernel in _list_kernels(model)
            if kernel.is_contiguous() != kernel.is_contiguous(memory_format=order)
        ]
        right = sum(not kernel.is_contiguous() for kernel in telling)
        return {"converted_batches": inputs.batches, "convs": len(telling), "channels_last_convs": right}

    def undo() -> None:
        leave_inputs()
        store(torch.contiguous_format)
        _match_state(site)

    def clean(checkpoint: dict[str, Any]) -> None:
        usual = {id(kernel) for name, kernel in _list_kernels(model) if name in names}
        for name in names & checkpoint.get("state_dict", {}).keys():
            checkpoint["state_dict"][name] = checkpoint["state_dict"][name].contiguous()
        for optimizer, stored in zip(site.optimizers, checkpoint.get("optimizer_states", ()), strict=False):
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            for place in stored["state"].keys() & {at for at, key in enumerate(parameters) if id(key) in usual}:
                # A new dictionary, since the checkpoint refers to the live optimizer's one.
                stored["state"][place] = {
                    key: value.contiguous() if isinstance(value, torch.Tensor) else value
                    for key, value in stored["state"][place].items()
                }

    store(order)
    leave_inputs = site.convert_inputs(inputs)
    return Applied(undo=undo, probe=probe, clean=clean)


def _match_state(site: Site) -> Applied:
    """Store optimizer state in its parameter's memory order: a checkpoint has the order of the run that wrote it.

    Fused kernels pair elements by memory position; with different orders, CUDA raises and the CPU is silently wrong.
    """
    import torch

    for parameter, state in ((key, state) for optimizer in site.optimizers for key, state in optimizer.state.items()):
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.dim() == 4 and value.shape == parameter.shape:
                ordered = torch.empty_strided(value.shape, parameter.stride(), dtype=value.dtype, device=value.device)
                state[name] = value if value.stride() == parameter.stride() else ordered.copy_(value)
    return Applied(undo=lambda: None)  # undone together with the kernels, whose order must change first

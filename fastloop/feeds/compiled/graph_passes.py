"""Lets passes change captured graphs before they are compiled, and keeps the tensors that became constants in them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

GraphPass = Callable[[torch.fx.GraphModule], torch.fx.GraphModule]
"""Changes a graph that Dynamo captured, before it is compiled. Nodes hold fake tensors in ``meta["example_value"]``;
calls that the pass adds get theirs afterwards. If the pass reads a tensor's numbers, it adds the tensor to the graph's
``meta[TAKEN]`` by its id; only tensors in ``meta[MAY_TAKE]`` may be read. If such a tensor changes, the module gets new
graphs. ``meta[COMPILES]``: whether Inductor compiles the graph."""
MAY_TAKE, TAKEN, COMPILES = "fastloop_may_take", "fastloop_taken", "fastloop_compiles"


class Frozen:
    """Tensors whose numbers are constants in the graphs of one code object: a mask read as causal, fill values.

    Args:
        barred: paths of tensors that graphs must not freeze.

    Attributes:
        copies: a copy of each tensor when it was taken, by path: ``.name`` for a buffer, or the argument's path.
        module, tensors: module and argument tensors of the current call.
    """

    def __init__(self, barred: frozenset[str]) -> None:
        self.barred, self.copies = barred, dict[str, torch.Tensor]()
        self.module, self.tensors = torch.nn.Module(), dict[str, torch.Tensor]()

    def list_ways(self) -> dict[int, str]:
        """Map the ids of the tensors that a pass may take in this call to their paths."""
        every = {f".{name}": buffer for name, buffer in self.module.named_buffers()} | self.tensors
        return {id(each): way for way, each in every.items() if way not in self.barred and not torch.is_inference(each)}

    def take(self, ways: Mapping[int, str], taken: Mapping[int, torch.Tensor]) -> None:
        """Record that a graph holds the numbers of these tensors from now on."""
        self.copies |= {ways[key]: tensor.detach().clone() for key, tensor in taken.items()}


def hash_masks(module: torch.nn.Module, barred: frozenset[str]) -> tuple[int, ...]:
    """Hash the buffers that a pass may treat as constants: a model's blocks may differ only in their masks."""
    masks = [buffer for name, buffer in module.named_buffers() if buffer.dim() and f".{name}" not in barred]
    return tuple(hash(buffer.cpu().contiguous().view(torch.uint8).numpy().tobytes()) for buffer in masks)


def choose_backend(mode: str, passes: tuple[GraphPass, ...], frozen: Frozen) -> dict[str, Any]:
    """Return the arguments by which torch.compile runs these passes and compiles in this mode.

    Args:
        mode: mode of torch.compile, or ``eager``: graphs run as the passes leave them.
        frozen: gets the tensors that the passes take.
    """
    if passes or mode == "eager":
        return {"backend": _Passing(mode, passes, frozen)}
    return {"options": _list_options(mode)}


@dataclass(frozen=True)
class _Passing:
    """Backend for torch.compile: runs the passes, then Inductor. Equal instances share their graphs."""

    mode: str
    passes: tuple[GraphPass, ...]
    frozen: Frozen

    def __call__(self, graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        graph.meta |= {MAY_TAKE: self.frozen.list_ways(), TAKEN: {}, COMPILES: self.mode != "eager"}
        for each in self.passes:
            graph = each(graph)
            _add_values(graph.graph)
        self.frozen.take(graph.meta.pop(MAY_TAKE), graph.meta.pop(TAKEN))
        if self.mode == "eager":
            return graph.forward
        from torch._inductor.compile_fx import compile_fx

        return compile_fx(graph, inputs, config_patches=_list_options(self.mode))


def _add_values(graph: torch.fx.Graph) -> None:
    """Give added nodes their example values: without them torch does not cache a graph's compiled code on disk."""
    key = "example_value"
    known = [node.meta[key] for node in graph.nodes if key in node.meta]
    with next((each.fake_mode for each in known if isinstance(each, FakeTensor)), contextlib.nullcontext()):
        for node in graph.nodes:
            if key in node.meta or any(key not in each.meta for each in node.all_input_nodes):
                continue
            args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda each: each.meta[key])
            if node.op == "call_method":
                node.meta[key] = getattr(args[0], node.target)(*args[1:], **kwargs)
            elif node.op == "call_function":
                node.meta[key] = node.target(*args, **kwargs)


def _list_options(mode: str) -> dict[str, Any]:
    """List Inductor's options for a mode.

    It benchmarks kernels in a subprocess: a kernel that breaks the CUDA context, as one did for a matrix product of
    more than 2^31 numbers, then breaks only the subprocess's and is not chosen. Dropout and other random operators stay
    torch's own kernels, which draw what they draw eagerly.
    """
    from torch._inductor import list_mode_options

    return {
        **list_mode_options(mode),
        "autotune_in_subproc": torch.cuda.is_available(),
        "fallback_random": True,
    }

"""The graphs that Dynamo captures in functions: a compiled LightningModule, or code under ``torch.compile``.

Running such a function again would repeat what it does besides computing, such as logging. The graph that Dynamo makes
of it only computes. So a copy of each graph is kept when it is captured, for as long as its compiled code exists, and
the shapes of its arguments are noted when it is called; `CompiledWork` then counts it without data, like a module.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from fastloop.errors import let_through

Note = Callable[[torch.nn.Module, "tuple[Any, ...]"], None]
_NOTES: list[Note] = []
"""What receives the calls of all kept graphs: a later fit may call those of an earlier one."""
_kept = 0


def count_kept() -> int:
    """How many graphs this process has kept."""
    return _kept


@contextlib.contextmanager
def keep_graphs() -> Iterator[None]:
    """Keep all graphs that are captured inside this context. Does nothing unless Dynamo has been imported, which takes
    seconds: ``torch.compile`` imports it."""
    kind: Any = getattr(sys.modules.get("torch._dynamo.output_graph"), "OutputGraph", None)
    usual = getattr(kind, "call_user_compiler", None)  # private, and not in every torch
    if usual is None:
        yield
        return

    def call_user_compiler(tracer: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
        graph = _copy(module)
        compiled = usual(tracer, module, *args, **kwargs)
        return compiled if graph is None else _wrap(graph, compiled)

    kind.call_user_compiler = call_user_compiler
    try:
        yield
    finally:
        if kind.call_user_compiler is call_user_compiler:
            kind.call_user_compiler = usual


@contextlib.contextmanager
def note_calls(note: Note) -> Iterator[None]:
    """Pass each call of a kept graph to `note` inside this context."""
    _NOTES.append(note)
    try:
        yield
    finally:
        _NOTES.remove(note)


def _copy(module: Any) -> torch.nn.Module | None:
    """A copy of a graph that the compiler will not change; it shares tensors. None if it cannot be copied."""
    global _kept
    try:
        graph = torch.fx.Graph()
        graph.output(graph.graph_copy(module.graph, {}))
        graph._codegen = module.graph._codegen
        for node in graph.nodes:
            node.meta = {}  # it refers to all that Dynamo knows of the code
        copied = torch.fx.GraphModule(module, graph)
    except Exception as error:  # keeping it must never break a compile
        let_through(error)
        return None
    _kept += 1
    return copied


def _wrap(graph: torch.nn.Module, compiled: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        for note in _NOTES:
            note(graph, args)
        return compiled(*args)

    return call

"""The graphs that Dynamo captures in functions: a compiled LightningModule, or code under ``torch.compile``.

Running such a function again would repeat what it does besides computing, such as logging. The graph that Dynamo makes
of it only computes. So a copy of each graph is kept when it is captured, and the shapes of its arguments are noted when
it is called; `CompiledWork` then counts it without data, as it counts a module.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch

from fastloop.errors import let_through

Note = Callable[[torch.nn.Module, "tuple[Any, ...]"], None]


class CapturedGraphs:
    """Keeps the graphs that Dynamo captures inside `keeps`, as long as their compiled code: a later fit may call it.

    Attributes:
        captured: how many there are; `ever` is the same for all of this process.
    """

    ever: ClassVar[int] = 0
    _notes: ClassVar[list[Note]] = []

    def __init__(self) -> None:
        self.captured = 0

    @contextlib.contextmanager
    def keeps(self) -> Iterator[None]:
        """Keep all that is captured inside this context. Does nothing unless Dynamo has been imported, which takes
        seconds: ``torch.compile`` imports it."""
        kind: Any = getattr(sys.modules.get("torch._dynamo.output_graph"), "OutputGraph", None)
        usual = getattr(kind, "call_user_compiler", None)  # private, and not in every torch
        if usual is None:
            yield
            return

        def call_user_compiler(tracer: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
            graph = self._copy(module)
            compiled = usual(tracer, module, *args, **kwargs)
            return compiled if graph is None else self._wrap(graph, compiled)

        kind.call_user_compiler = call_user_compiler
        try:
            yield
        finally:
            if kind.call_user_compiler is call_user_compiler:
                kind.call_user_compiler = usual

    @contextlib.contextmanager
    def noted(self, note: Note) -> Iterator[None]:
        """Pass each call of a kept graph, of an earlier fit too, to `note` inside this context."""
        self._notes.append(note)
        try:
            yield
        finally:
            self._notes.remove(note)

    def _copy(self, module: Any) -> torch.nn.Module | None:
        """A copy of a graph that the compiler will not change; it shares tensors. None if it cannot be copied."""
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
        self.captured += 1
        CapturedGraphs.ever += 1
        return copied

    @staticmethod
    def _wrap(graph: torch.nn.Module, compiled: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            for note in CapturedGraphs._notes:
                note(graph, args)
            return compiled(*args)

        return call

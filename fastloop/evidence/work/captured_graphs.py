"""The graphs that Dynamo captures in functions: a compiled LightningModule, or code under ``torch.compile``.

Running such a function again would repeat what it does besides computing, such as logging. The graph that Dynamo makes
of it only computes. So a copy of each graph is kept when it is captured, and the shapes of its arguments are noted when
it is called; `CompiledWork` then counts it without data, as it counts a module.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from fastloop.errors import let_through

Note = Callable[[torch.nn.Module, "tuple[Any, ...]"], None]


class CapturedGraphs:
    """Keeps the graphs that Dynamo captures inside `keeps`.

    Attributes:
        captured: how many there are.
    """

    def __init__(self) -> None:
        self.captured = 0
        self._note: Note | None = None

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
        """Pass each call of a kept graph to `note` inside this context."""
        self._note = note
        try:
            yield
        finally:
            self._note = None

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
        return copied

    def _wrap(self, graph: torch.nn.Module, compiled: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            if self._note is not None:
                self._note(graph, args)
            return compiled(*args)

        return call

"""Calls of a module that go through a compiled function in its place, and back to eager should that fail."""

from __future__ import annotations

from types import CodeType
from typing import Any

from fastloop.evidence.model import dynamo_graphs
from fastloop.feeds.short_batches import EagerWhenShort


class CompiledCall:
    """A module's calls by way of a compiled function, and back to eager for good should the backend fail. A plain
    function around ``_call_impl``, since ``module.compile()`` captures nothing for torch's own nn.Sequential.

    Args:
        codes: code objects by class and shapes of a module; filled here, one dictionary for all modules of a fit.

    Attributes:
        graphs: that Dynamo captured in these calls.
        failure: why it fell back to eager; empty: it did not.
    """

    def __init__(self, module: Any, name: str, codes: dict[Any, CodeType], *, mode: str, dynamic: bool | None) -> None:
        import torch

        def call(*args: Any, **kwargs: Any) -> Any:
            return module._call_impl(*args, **kwargs)

        self.module, self.name = module, name or type(module).__name__
        self.graphs, self.failure = 0, ""
        # Dynamo counts recompiles per code object and gives up after 8. Modules of one class and shapes share a code
        # object, and with it their graphs; all others, and every later fit, get one of their own.
        alike = (type(module), *(parameter.shape for parameter in module.parameters()))
        call.__code__ = codes.setdefault(alike, call.__code__.replace(co_name=self.name))
        compiled = torch.compile(call, mode=None if mode == "default" else mode, dynamic=dynamic)
        self.compiled = EagerWhenShort(module, compiled)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from torch._dynamo.exc import TorchDynamoException

        captured = dynamo_graphs.count_captured()
        try:
            return self.compiled(*args, **kwargs)
        except TorchDynamoException as error:
            message = " ".join(str(error).strip().split("\n\n")[0].split())  # hints come after a blank line
            self.failure = f"{self.name}: {type(error).__name__}: {message[:200]}"
            vars(self.module).pop("_compiled_call_impl", None)
            return self.module._call_impl(*args, **kwargs)
        finally:
            self.graphs += dynamo_graphs.count_captured() - captured

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()  # copied and pickled modules are eager: a copy must not call the original

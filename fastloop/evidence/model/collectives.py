"""Detects communication between ranks in the code that runs."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from fastloop.errors import NotApplicable


class RefuseCollectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside ``with``, an operator that all ranks must call raises NotApplicable instead of running."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # as in `flops.FlopCount`: compiled code keeps its graphs

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            raise NotApplicable("a module communicates between ranks when it is called")
        return func(*args, **(kwargs or {}))

"""Temporarily switches dropout off, without any other change between training and evaluation."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

_DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
_ATTENTION = "scaled_dot_product_attention"
_CHANCES = {torch.nn.modules.dropout._DropoutNd: "p", torch.nn.RNNBase: "dropout"}
_DROP_PATHS = {"StochasticDepth": "p", "DropPath": "drop_prob"}
"""Layers of torchvision and timm that drop whole samples."""


def switch_off_dropout(module: torch.nn.Module) -> Callable[[], None]:
    """Switch off the dropout of a module's layers, including those that call no function for it; returns the undo."""
    undo: list[tuple[Any, str, Any]] = []
    for part in module.modules():
        known = (name for kind, name in _CHANCES.items() if isinstance(part, kind))
        name = next(known, _DROP_PATHS.get(type(part).__name__))
        if name is not None and (chance := vars(part).get(name)):
            undo.append((part, name, chance))
            setattr(part, name, 0.0)

    def put_back() -> None:
        for part, name, chance in undo:
            setattr(part, name, chance)

    return put_back


@contextlib.contextmanager
def without_functional_dropout() -> Iterator[None]:
    """Switch off dropout in all calls of torch's functions."""
    functional: Any = torch.nn.functional
    changed = {name: getattr(functional, name) for name in (*_DROPOUTS, _ATTENTION)}
    for name, original in changed.items():
        setattr(functional, name, _wrap_attention(original) if name == _ATTENTION else _wrap_dropout(original))
    try:
        yield
    finally:
        for name, original in changed.items():
            setattr(functional, name, original)


def _wrap_dropout(original: Any) -> Any:
    @functools.wraps(original)
    def none_dropped(input: Any, p: float = 0.5, training: bool = False, inplace: bool = False) -> Any:  # noqa: ARG001
        return original(input, p, False, inplace)

    return none_dropped


def _wrap_attention(original: Any) -> Any:
    def none_dropped(*args: Any, dropout_p: float = 0.0, **named: Any) -> Any:  # noqa: ARG001
        # The dropout probability is the fifth argument.
        return original(*args[:4], *(0.0 for _ in args[4:5]), *args[5:], **named)

    return none_dropped

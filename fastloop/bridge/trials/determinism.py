"""A training step that comes out the same twice: no dropout, kernels that add up in one order, the same random numbers.

For disposable processes, where nothing else trains meanwhile; all of it ends with the context, but for random streams.
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import numpy
import torch

ENVIRONMENT = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""What has to be set before CUDA starts, for cuBLAS to repeat itself.
Source: https://docs.nvidia.com/cuda/cublas/index.html#results-reproducibility"""

_DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
_ATTENTION = "scaled_dot_product_attention"
_CHANCES = {torch.nn.modules.dropout._DropoutNd: "p", torch.nn.RNNBase: "dropout"}
_DROP_PATHS = {"StochasticDepth": "p", "DropPath": "drop_prob"}
"""Of torchvision and timm: layers that leave out whole samples."""


def prepare(environ: MutableMapping[str, str] = os.environ) -> None:
    """Set what CUDA reads when it starts."""
    for name, value in ENVIRONMENT.items():
        environ.setdefault(name, value)


@contextlib.contextmanager
def make_repeatable() -> Iterator[None]:
    """Dropout off wherever torch does it, and deterministic kernels where there are any; the others warn."""
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.backends.cudnn.deterministic,
        torch.backends.cudnn.benchmark,
    )
    with _without_dropout():
        make_deterministic()
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])
            torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = before[2:]


def make_deterministic() -> None:
    """The modes alone. A Trainer sets them when it is made, and a module may set them when it is set up."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False


def switch_off_dropout(module: torch.nn.Module) -> Callable[[], None]:
    """Switch the dropout of a module's layers off, also of those that call no function for it; returns the undo."""
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


def seed_everything(number: int) -> None:
    """Begin all random streams of this process at a number."""
    torch.manual_seed(number)
    random.seed(number)
    numpy.random.seed(number)


@contextlib.contextmanager
def _without_dropout() -> Iterator[None]:
    functional: Any = torch.nn.functional
    changed = {name: getattr(functional, name) for name in (*_DROPOUTS, _ATTENTION)}
    for name, original in changed.items():
        setattr(functional, name, _attention(original) if name == _ATTENTION else _dropout(original))
    try:
        yield
    finally:
        for name, original in changed.items():
            setattr(functional, name, original)


def _dropout(original: Any) -> Any:
    @functools.wraps(original)
    def none_dropped(input: Any, p: float = 0.5, training: bool = False, inplace: bool = False) -> Any:  # noqa: ARG001
        return original(input, p, False, inplace)

    return none_dropped


def _attention(original: Any) -> Any:
    def none_dropped(*args: Any, dropout_p: float = 0.0, **named: Any) -> Any:  # noqa: ARG001
        # The chance is the fifth.
        return original(*args[:4], *(0.0 for _ in args[4:5]), *args[5:], **named)

    return none_dropped

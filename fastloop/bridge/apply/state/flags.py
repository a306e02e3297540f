"""torch's settings for the whole process, which a module's forward may change."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch


def keep_flags() -> Callable[[], None]:
    """Save these settings; returns a function that restores those that have changed."""
    kept = list[tuple[Callable[[], Any], Callable[[Any], Any], Any]]()
    for read, write in _FLAGS:
        with contextlib.suppress(RuntimeError):  # TF32, if it was set through torch's other setting
            kept.append((read, write, read()))

    def restore() -> None:
        for read, write, before in kept:
            with contextlib.suppress(RuntimeError):
                if read() != before:
                    write(before)

    return restore


def _read_determinism() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def _set_determinism(before: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])


_CUDNN = torch.backends.cudnn
_FLAGS: list[tuple[Callable[[], Any], Callable[[Any], Any]]] = [
    *(
        (partial(getattr, _CUDNN, name), partial(setattr, _CUDNN, name))
        for name in ("enabled", "benchmark", "deterministic")
    ),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (torch.get_num_threads, torch.set_num_threads),
    (torch.get_default_dtype, torch.set_default_dtype),
    (_read_determinism, _set_determinism),
]

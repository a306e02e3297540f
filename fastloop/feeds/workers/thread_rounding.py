"""Finds out whether torch rounds samples differently with one thread, as in workers and loading threads, than with
several.

torch splits a sum over many numbers among its threads, then adds up their parts. Work on single numbers, such as a
normalization by constants, does not depend on the number of threads.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fastloop.errors import let_through
from fastloop.evidence.samples import sample_code
from fastloop.evidence.samples.dataset import list_running, walk

ENOUGH_S = 0.5
"""After this time, no more samples are made than `LEAST`."""
LEAST = 2
_FEW_NUMBERS = 2048
"""No library splits the work on fewer numbers: torch starts at 32,768, MKL's dot products and FFTs somewhere below."""
_COPIES = re.compile(r"aten\.(_to_copy|clone|copy_|cat|stack|flip|roll|index\w*|gather|constant_pad_nd|detach|new_\w+)")
"""Operations that only move numbers."""
_ADDS_UP = re.compile(
    r"(\w+_)?(mean|std|var|sum|norm|dot|mm|matmul|einsum|stft|cov|corrcoef|logsumexp|softmax|svd)|i?r?fft[n2]?"
)
"""Methods and functions that add up numbers."""


def find_difference(make: Callable[[int], int], indices: Iterable[int], threads: int) -> bool | None:
    """Whether samples made with one thread differ from those made with this many; None if it cannot be told. For a
    forked process.

    Args:
        make: makes the sample of an index, and returns a checksum of it.
    """
    found: list[bool | None] = []

    def compare() -> None:
        try:
            found.append(_compare(make, indices, threads))
        except Exception as error:
            let_through(error)

    # In another thread: the main thread would wait for torch's threads, which a fork does not copy.
    thread = threading.Thread(target=compare, daemon=True)
    thread.start()
    thread.join()
    return found[0] if found else None


def _compare(make: Callable[[int], int], indices: Iterable[int], threads: int) -> bool | None:
    began = time.monotonic()
    for number, index in enumerate(indices):
        if number >= LEAST and time.monotonic() - began > ENOUGH_S:
            break
        torch.set_num_threads(1)
        with _Watch() as watch:  # type: ignore[no-untyped-call]
            alone = make(index)
        if not watch.adds_up:
            continue
        torch.set_num_threads(threads)
        together = make(index)
        torch.set_num_threads(1)
        if together != alone:
            return True if make(index) == alone else None  # else it differs from itself
    return False


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes whether torch, in this thread, runs an operation that may add up many floating-point numbers."""

    adds_up = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call `func`, and look at its arguments."""
        given = dict(kwargs or {})
        if not (self.adds_up or _keeps_numbers_apart(func)):
            self.adds_up = any(map(_has_many_numbers, tree_leaves((args, given))))
        return func(*args, **given)


def _keeps_numbers_apart(operation: Any) -> bool:
    """Whether an operation computes each number from one of each argument, or only moves numbers."""
    is_view = getattr(operation, "is_view", False)
    is_pointwise = torch.Tag.pointwise in getattr(operation, "tags", ())
    return is_view or is_pointwise or _COPIES.match(str(operation)) is not None


def _has_many_numbers(value: Any) -> bool:
    is_fraction = isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())
    return is_fraction and value.numel() >= _FEW_NUMBERS


def list_adding(dataset: Any, collate: Any) -> tuple[str, ...]:
    """List the user's functions for samples that name a function that adds up numbers, torch's or another library's."""
    running, _ = list_running([*walk(dataset), *walk(collate, "collate_fn")])
    codes = {function.__qualname__: function.__code__ for _, _, function in running}
    named = {
        name: {*sample_code.list_names(code)} - {*sample_code.list_global_names(code)} for name, code in codes.items()
    }
    return tuple(name for name, names in named.items() if any(map(_ADDS_UP.fullmatch, names)))

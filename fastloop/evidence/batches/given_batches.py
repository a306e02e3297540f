"""Finds training that changes batches which may still be the dataset's own objects.

A ``collate_fn`` such as ``lambda batch: tuple(zip(*batch))`` hands out what the dataset holds, and a ``training_step``
that divides boxes in place then divides the dataset's, for all later epochs. In a worker that is another copy.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from torch.utils.data import DataLoader, default_collate

from fastloop.evidence.batches.code_reader import CodeReader
from fastloop.evidence.batches.known_calls import Depth, join, wrap
from fastloop.evidence.samples import sample_code
from fastloop.evidence.samples.between_batches import list_running
from fastloop.evidence.samples.dataset import walk

_PLACES = {
    "training_step": 0,
    "validation_step": 0,
    "on_before_batch_transfer": 0,
    "transfer_batch_to_device": 0,
    "on_after_batch_transfer": 0,
    "on_train_batch_start": 0,
    "on_train_batch_end": 1,
    "on_validation_batch_start": 0,
    "on_validation_batch_end": 1,
}
"""Hooks that receive the batch, and its place among their arguments; a callback's hooks have two more before it."""
_BEFORE_TRANSFER = ("on_before_batch_transfer", "transfer_batch_to_device")
_WHY = "changes its batch, which may be the dataset's own"


class Shared(NamedTuple):
    """The depths of those parts of a batch that outlive it, such as the dataset's own tensors; None: there are none."""

    tensors: Depth = None
    objects: Depth = None
    """Arrays and other objects."""
    containers: Depth = None
    """Lists and dictionaries, which Lightning makes anew when it moves a batch to the device."""


UNKNOWN = Shared(0, 0, 0)


def list_batch_changes(
    loader: DataLoader[Any],
    others: Iterable[Any],
    find_shared: Callable[[], Shared] = lambda: UNKNOWN,
    *,
    copies_tensors: bool = False,
) -> tuple[str, ...]:
    """List the methods that change a batch in place, if that may change the dataset.

    Args:
        others: callbacks, the module, and the datamodule.
        find_shared: returns what batches share with the dataset; only called if a method changes its batch.
        copies_tensors: whether batches are moved to a device, which copies their tensors.
    """
    if loader.collate_fn is default_collate:
        return ()
    others, kinds = tuple(others), _list_kinds(loader)
    found = dict.fromkeys(_list_changes(others, kinds, UNKNOWN, False))
    if found and (shared := find_shared()) != UNKNOWN:
        found = dict.fromkeys(_list_changes(others, kinds, shared, copies_tensors))
    return tuple(f"{each} {_WHY}" for each in found)


def _list_kinds(loader: DataLoader[Any]) -> list[type]:
    """The user's classes whose objects the batches may contain."""
    spaces = (vars(sys.modules[name]) for name in _list_modules(loader) if name in sys.modules)
    named = (value for space in spaces for value in list(space.values()) if isinstance(value, type))
    held = (type(item) for _, item in walk(loader.dataset))
    return [kind for kind in dict.fromkeys((*named, *held)) if not sample_code.is_installed(kind)]


def _list_modules(loader: DataLoader[Any]) -> Iterator[str]:
    """The user's modules that make the samples."""
    for part in (loader.dataset, loader.collate_fn):
        for _, item in walk(part):
            place = item if inspect.isfunction(item) else type(item)
            if not sample_code.is_installed(place):
                yield place.__module__


def _list_changes(others: tuple[Any, ...], kinds: list[type], shared: Shared, copies_tensors: bool) -> Iterator[str]:
    hooks = [(other, list(list_running(other))) for other in others]
    is_moved_by_user = any(name == "transfer_batch_to_device" for _, running in hooks for name, _ in running)
    for other, running in hooks:
        reader = CodeReader(other, kinds)
        for name, function in running:
            depth = _find_depth(name, shared, copies_tensors, is_moved_by_user)
            if reader.changes(function, dict(_list_given(other, name, function, depth))):
                yield f"{type(other).__name__}.{name}"
        reader.known.clear()
        for name, function in running if reader.kept else ():
            if reader.changes(function, {}):
                yield f"{type(other).__name__}.{name}"


def _find_depth(name: str, shared: Shared, copies_tensors: bool, is_moved_by_user: bool) -> Depth:
    """The depth at which this hook's batch holds something of the dataset."""
    is_early = name in _BEFORE_TRANSFER or is_moved_by_user
    tensors = None if copies_tensors and not is_early else shared.tensors
    return join((shared.objects, tensors, shared.containers if is_early else None))


def _list_given(other: Any, name: str, function: Any, depth: Depth) -> Iterator[tuple[str, Depth]]:
    """The parameter that holds the batch, with its depth."""
    if name not in _PLACES or depth is None:
        return
    code = function.__code__
    is_callback = any(base.__name__ == "Callback" for base in type(other).__mro__)
    place = _PLACES[name] + 2 * is_callback + (name not in vars(other))  # a LambdaCallback's have no self
    if place < code.co_argcount:
        yield code.co_varnames[place], depth
    elif code.co_flags & inspect.CO_VARARGS:
        yield code.co_varnames[code.co_argcount + code.co_kwonlyargcount], wrap(depth)

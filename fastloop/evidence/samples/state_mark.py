"""A mark of what a dataset holds and its code reads, to find out whether anything has changed it since."""

from __future__ import annotations

import contextlib
import ctypes
import inspect
import mmap
import re
import sys
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from functools import cached_property, lru_cache, partial
from itertools import islice
from multiprocessing.sharedctypes import SynchronizedBase
from operator import is_
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch

from fastloop.errors import let_through
from fastloop.evidence.samples import sample_code, writes
from fastloop.evidence.samples.before_epoch import find_block
from fastloop.evidence.samples.dataset import TRAINING, find_reason, is_opaque, list_members

_PLAIN = (str, bytes, int, float, complex, bool, type(None))
_MOST_PARTS, _MOST_OBJECTS, _MOST_MEMBERS = 200, 2000, 200
"""Limits that keep a look at all parts below about 0.1 ms."""
_MOST_ALIKE = 20
"""Only this many members of a collection are inspected."""
_MOST_NUMBERS = 1000
"""Of a larger array, a look reads only some numbers, evenly spaced."""
_SHIFTS = 8
"""Number of looks until the same numbers are read again."""
_SHARED = (SynchronizedBase, ctypes.Array, ctypes._SimpleCData)
"""Values in memory that processes share: workers see changes there, but have read ahead."""
_CACHE = ".<cache>"
"""The results of an ``lru_cache``: one more is no change, but what a result holds may change."""
_INSIDE = ("inner", "dataset")
"""Attributes by which our own objects hold the user's."""


class _Part(NamedTuple):
    """Something that can change: an object, the variables of a module that a function reads, a closure."""

    path: str
    read: Callable[[], list[Any]]
    """Returns what it holds now."""
    held: list[Any]
    """What it held when it was marked. Kept, so that no new object gets the identity of an old one."""
    is_sampled: bool = False
    """Whether a look reads only some of its numbers, which the last item of `held` stands for."""


class StateMark:
    """What these objects hold, and what the user's code for samples reads from globals, classes, closures and context
    variables. Changes in large arrays can be found late or missed, and those further away than some 200 objects missed.

    Args:
        roots: objects by the names that a message gives them.

    Attributes:
        is_late: whether the change that was found may be older than the look before.
    """

    def __init__(self, **roots: Any) -> None:
        self._parts = list(islice(_walk(roots), _MOST_PARTS))
        """Only what can be read: objects of the user's may raise anything."""
        self.is_late = False

    def find_change(self) -> str | None:
        """Return the place of something that has changed: ``dataset.level``. None if nothing has."""
        for part in tuple(self._parts):
            path, read, held, is_sampled = part
            try:
                now = read()
            except Exception as error:
                let_through(error)
                self._parts.remove(part)
                continue
            if len(now) != len(held) or not (all(map(is_, now, held)) or all(map(_is_same, now, held))):
                self.is_late = is_sampled and all(map(_is_same, now[:-1], held))
                return path
        return None

    def renew(self) -> None:
        """Forget changes made until now, except those in large arrays, which may be older."""
        for place, part in enumerate(self._parts):
            if not part.is_sampled:
                with contextlib.suppress(Exception):  # `find_change` leaves such a part out
                    self._parts[place] = part._replace(held=part.read())


def _is_same(now: Any, then: Any) -> bool:
    return now is then or (type(now) is type(then) and isinstance(now, _PLAIN) and now == then)


def _walk(roots: dict[str, Any]) -> Iterator[_Part]:
    """Parts below the roots, breadth first."""
    queue, seen, known = deque(roots.items()), dict[int, Any](), dict[int, tuple[Any, type]]()
    while queue and len(seen) < _MOST_OBJECTS:
        path, item = queue.popleft()
        if id(item) in seen:
            continue
        seen[id(item)] = item
        try:
            if isinstance(item, (*_PLAIN, ModuleType)):
                continue
            if is_opaque(item):
                kind: Any = type(item)
                if find_reason(kind) == TRAINING:  # the dataset was given it since its plan
                    yield _Part(f"{path}, a part of the training,", list, [item])
                continue
            if isinstance(item, _SHARED) and path.rpartition(".")[2] in _list_written(known.values()):
                continue
            read = None if path.endswith(_CACHE) else _find_reader(item)
            part = None if read is None else _Part(path, read, read(), isinstance(read, _Sampled))
            members = [(f"{path}{step}", member) for step, member in _list_members(item)]
        except Exception as error:
            let_through(error)
            continue
        if part is not None:
            yield part
        queue.extend(members)
        for function in sample_code.list_sample_functions(item):
            for space, names in _list_spaces(function) if id(function) not in known else ():
                yield from (_Part(name, _read_name(space, name), [space[name]]) for name in names)
                queue.extend((name, space[name]) for name in names if not _holds_no_user_state(space[name]))
            for name in sample_code.list_imported(function) if id(function) not in known else ():
                yield _Part(name, read := _read_module(name, function), read())
            known[id(function)] = function, type(item)
            queue.extend(sample_code.list_closure(function))


def _list_written(functions: Iterable[tuple[Any, type]]) -> set[str]:
    """Names of what these functions for samples write themselves: in workers, too."""
    changes = (
        state for function, kind in functions for state in sample_code.list_touched(function, writes.list_targets, kind)
    )
    return {re.sub(r"^[. ]+(\(the outer )?|\)$", "", state) for state in changes}


def _list_spaces(function: Any) -> Iterator[tuple[dict[str, Any], list[str]]]:
    """The namespaces that a function reads by name, each with the names: its own module, and others of the user's."""
    yield function.__globals__, [name for name, _ in sample_code.list_globals(function)]
    named = set(sample_code.list_names(function.__code__))
    for _, value in sample_code.list_globals(function):
        if inspect.ismodule(value) and not sample_code.is_installed(value):
            yield vars(value), [name for name in vars(value) if name in named]


def _holds_no_user_state(value: Any) -> bool:
    """Whether nothing below it is the user's: a module, or an installed class or function."""
    if inspect.ismodule(value):
        return True
    return (isinstance(value, type) or inspect.isroutine(value)) and sample_code.is_installed(value)


def _list_members(item: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(item, ContextVar):
        yield ".get()", item.get(None)
    elif isinstance(item, type):
        found = () if sample_code.is_installed(item) else _list_class_values(item)
        yield from ((f".{name}", value) for name, value in found if not inspect.isroutine(value))
    elif type(item).__module__.startswith("fastloop.") and sample_code.is_installed(type(item)):
        yield from ((f".{name}", vars(item)[name]) for name in _INSIDE if name in getattr(item, "__dict__", {}))
    elif isinstance(item, torch.nn.Module):
        yield from ((step, member) for step, member in list_members(item) if "_hooks" not in step)
    elif isinstance(item, (list, tuple, set, frozenset, dict, deque)):
        yield from islice(list_members(item), _MOST_ALIKE)
    elif not isinstance(item, torch.Tensor):
        own = {f".{name}" for name in _list_set_by_samples(type(item))}  # type: ignore[arg-type]
        yield from ((step, member) for step, member in list_members(item) if step not in own)


def _list_class_values(kind: type) -> Iterator[tuple[str, Any]]:
    """A class's own attributes; not those that Python adds, such as a cache for pickling its objects."""
    return ((name, value) for name, value in islice(vars(kind).items(), _MOST_MEMBERS) if not name.startswith("__"))


def _find_reader(item: Any) -> Callable[[], list[Any]] | None:
    """What reads the object's contents; None if these cannot change, or only behind its back."""
    if isinstance(item, torch.Tensor):  # also in shared memory: workers see changes there, but read ahead
        return None if item.is_inference() else lambda: [item._version]
    if isinstance(item, _SHARED):
        values = item.get_obj() if isinstance(item, SynchronizedBase) else item
        return _read_numbers(np.frombuffer(memoryview(values), np.uint8))
    if isinstance(item, np.ndarray):
        return None if item.dtype.hasobject or _is_file(item) else _read_numbers(item)
    if isinstance(item, ContextVar):
        return lambda: [item.get(None)]
    if isinstance(item, dict):  # a subclass's own methods may load what it holds
        return lambda: [dict.__len__(item), *islice(dict.values(item), _MOST_MEMBERS)]
    base: Any = next((kind for kind in (list, set, deque) if isinstance(item, kind)), None)
    if base is not None:
        return lambda: [base.__len__(item), *islice(base.__iter__(item), _MOST_MEMBERS)]
    if isinstance(item, FunctionType):
        return lambda: [value for _, value in sample_code.list_closure(item)]
    if isinstance(item, type):
        return None if sample_code.is_installed(item) else lambda: [value for _, value in _list_class_values(item)]
    if type(item).__module__.startswith("fastloop.") and sample_code.is_installed(type(item)):
        return None
    if inspect.isroutine(item) or isinstance(item, (tuple, frozenset, partial)):
        return None
    if (held := getattr(item, "__dict__", None)) is None:
        return (lambda: [value for _, value in list_members(item)]) if hasattr(type(item), "__slots__") else None
    own = _list_set_by_samples(type(item))  # type: ignore[arg-type]
    return lambda: [value for name, value in islice(held.items(), _MOST_MEMBERS) if name not in own]


@lru_cache(maxsize=512)
def _list_set_by_samples(kind: type) -> frozenset[str]:
    """Attributes that code for samples sets by itself, such as a file that it opens at the first one."""
    functions = sample_code.list_sample_functions_of(kind)
    found = {name for each in functions for name in sample_code.list_arguments(each.__code__, "STORE_ATTR")}
    members = (member for base in kind.__mro__ for member in vars(base).items())
    return frozenset(found | {name for name, member in members if isinstance(member, cached_property)})


def _read_name(space: dict[str, Any], name: str) -> Callable[[], list[Any]]:
    return lambda: [space.get(name)]


def _read_module(name: str, function: Any) -> Callable[[], list[Any]]:
    """What a function reads from a module of the user's that it imports itself: nothing until somebody imports it."""
    named = set(sample_code.list_names(function.__code__))

    def read() -> list[Any]:
        module = sys.modules.get(name)
        if module is None or sample_code.is_installed(module):
            return []
        return [value for name, value in vars(module).items() if name in named]

    return read


def _is_file(array: Any) -> bool:
    """Whether an array is memory-mapped: sampling it would read from the disk."""
    return isinstance(find_block(array), (np.memmap, mmap.mmap))


def _read_numbers(array: np.ndarray[Any, Any]) -> Callable[[], list[Any]]:
    """What reads an array's numbers: all of them, or some of a large one."""
    return _Sampled(array) if array.size > _MOST_NUMBERS else lambda: [_sum(array)]


class _Sampled:
    """Reads some of a large array's numbers, each time others, and finds out whether they have changed since it was
    made. Of a view of a tensor it also reads how often torch has changed that."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self._array, self._looks, self._every = array, 0, 1 + array.size // _MOST_NUMBERS
        self._sums = [self._sum(shift) for shift in range(_SHIFTS)]
        block = find_block(array)
        self._tensor = block if isinstance(block, torch.Tensor) and not block.is_inference() else None

    def __call__(self) -> list[Any]:
        shift = self._looks % _SHIFTS
        self._looks += 1
        version = None if self._tensor is None else self._tensor._version
        return [version, self._sum(shift) == self._sums[shift]]

    def _sum(self, shift: int) -> int:
        return _sum(self._array, shift * self._every // _SHIFTS, self._every)


def _sum(array: np.ndarray[Any, Any], first: int = 0, every: int = 1) -> int:
    return zlib.crc32(np.ascontiguousarray(np.asarray(array).flat[first::every]).tobytes())

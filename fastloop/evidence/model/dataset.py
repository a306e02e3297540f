"""What a dataset's objects and code say about moving it to worker processes. No sample is taken."""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import io
import os
import re
import textwrap
from collections import deque
from collections.abc import Iterator
from itertools import islice
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

_MOST_OBJECTS, _MOST_MEMBERS, _DEEPEST = 5000, 200, 7
_HANDLE_MODULES = ("h5py", "lmdb", "sqlite3", "tables", "zarr")
_PLAIN = (str, bytes, int, float, complex, bool, type(None), type, ModuleType)
_EPOCH_NAMES = ("epoch", "_epoch", "current_epoch")
_DRAWS = re.compile(
    r"random|rand(n|int|range|perm)?|randn?_like|shuffle|choices?|sample|uniform|normal|gauss|bernoulli|multinomial"
    r"|default_rng|RandomState"
)
_RANDOM_TRANSFORMS = re.compile(
    r"Random|ColorJitter|(Auto|Rand)Augment|TrivialAugment|AugMix|MixUp|CutMix|ElasticTransform|Gaussian(Blur|Noise)|JPEG"
)
_BEFORE_SAMPLES = ("__init__", "__new__", "__len__", "__setstate__", "setup", "prepare_data")
"""Methods that run before a sample is asked for: what they draw is drawn in the main process either way."""
_LIBRARIES = ("torch.", "torchvision.", "numpy.", "builtins.", "PIL.", "collections.", "functools.", "pathlib.")


def walk(root: Any) -> Iterator[tuple[str, Any]]:
    """Objects reachable from `root` through attributes and containers, breadth first, with their attribute paths."""
    queue, seen = deque([("dataset", root, 0)]), set[int]()
    while queue and len(seen) < _MOST_OBJECTS:
        path, item, depth = queue.popleft()
        if isinstance(item, _PLAIN) or id(item) in seen:
            continue
        seen.add(id(item))
        yield path, item
        if depth < _DEEPEST and not isinstance(item, torch.Tensor) and _handle(item) is None:
            queue.extend((f"{path}{step}", member, depth + 1) for step, member in _members(item))


def _members(item: Any) -> Iterator[tuple[str, Any]]:
    """Direct members with the step that leads to them. Mappings other than dict may load what they are asked for."""
    if isinstance(item, dict):
        yield from ((f"[{key!r}]", value) for key, value in islice(item.items(), _MOST_MEMBERS))
    elif isinstance(item, (list, tuple, set, frozenset)):
        yield from ((f"[{place}]", value) for place, value in enumerate(islice(item, _MOST_MEMBERS)))
    elif inspect.ismethod(item):
        yield ".__self__", item.__self__
    elif isinstance(item, functools.partial):
        yield from ((".func", item.func), (".args", item.args), (".keywords", item.keywords))
    yield from ((f".{name}", value) for name, value in islice(_attributes(item).items(), _MOST_MEMBERS))
    if inspect.isfunction(item):
        cells = zip(item.__code__.co_freevars, item.__closure__ or (), strict=False)
        for name, cell in cells:
            with contextlib.suppress(ValueError):  # an empty one
                yield f".<closure {name}>", cell.cell_contents


def _attributes(item: Any) -> dict[str, Any]:
    try:
        return dict(vars(item))
    except TypeError:  # it has no __dict__
        return {}


def worker_hazards(dataset: Any) -> tuple[str, ...]:
    """Why worker processes would break or change this dataset, each with the place it was seen."""
    hazards = []
    for path, item in walk(dataset):
        if isinstance(item, torch.Tensor) and item.is_cuda:
            hazards.append(f"{path} is a CUDA tensor, which a forked worker cannot use")
        elif (handle := _handle(item)) is not None:
            hazards.append(f"{path} is an open {handle} handle; open it in __getitem__ instead")
        elif (state := _epoch_state(item)) is not None:
            hazards.append(f"{path}{state} changes between epochs or samples, and workers hold copies of it")
    return tuple(hazards)


def _handle(item: Any) -> str | None:
    kind = type(item)
    package = (kind.__module__ or "").split(".")[0]
    if package in _HANDLE_MODULES:
        return package
    if isinstance(item, io.IOBase) and not isinstance(item, (io.BytesIO, io.StringIO)):
        return "file"  # forked workers would share its position
    # lmdb's C types say they live in builtins.
    return "lmdb" if kind.__module__ == "builtins" and kind.__name__ in ("Environment", "Transaction") else None


def _epoch_state(item: Any) -> str | None:
    if not hasattr(type(item), "__getitem__") or _of_library(type(item)):
        return None
    if callable(getattr(item, "set_epoch", None)):
        return ".set_epoch()"
    for name in _EPOCH_NAMES:
        if name in _attributes(item):
            return f".{name}"
    counter = _counter_in(type(item).__getitem__)
    return f".{counter}" if counter else None


def _counter_in(function: Any) -> str | None:
    """The attribute that ``self.x += …`` or ``self.x = self.x + …`` counts up, if the source can be read."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return None
    for node in ast.walk(tree):
        if isinstance(node, ast.AugAssign) and (name := _own_attribute(node.target)):
            return name
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.BinOp):
            read = {_own_attribute(part) for part in ast.walk(node.value)}
            if (name := _own_attribute(node.targets[0])) and name in read:
                return name
    return None


def _own_attribute(node: ast.AST) -> str | None:
    """x in ``self.x``."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
        return node.attr
    return None


def draws_random(*roots: Any) -> tuple[str, ...]:
    """Names of transforms and functions reachable from the dataset that draw random numbers, as their code shows."""
    found: dict[str, None] = {}
    for root in roots:
        for _, item in walk(root):
            if (name := _draws(item)) is not None:
                found[name] = None
    return tuple(found)


def _draws(item: Any) -> str | None:
    kind = type(item)
    if inspect.isfunction(item):
        return item.__qualname__.split(".")[-1] if _function_draws(item) else None
    if _RANDOM_TRANSFORMS.match(kind.__name__):
        return kind.__name__
    for base in kind.__mro__:
        for name, member in [] if _of_library(base) else vars(base).items():
            function = inspect.unwrap(member) if callable(member) else None
            if name not in _BEFORE_SAMPLES and inspect.isfunction(function) and _function_draws(function):
                return f"{kind.__name__}.{name}"
    return None


def _function_draws(function: Any, depth: int = 3) -> bool:
    """Whether a function names a way to draw random numbers, itself or in functions of the user's that it names."""
    names = set(_names(function.__code__))
    if any(_DRAWS.fullmatch(name) for name in names):
        return True
    called = [function.__globals__.get(name) for name in names] if depth else []
    return any(
        inspect.isfunction(other) and not _of_library(other) and _function_draws(other, depth - 1) for other in called
    )


def _names(code: Any) -> Iterator[str]:
    yield from code.co_names
    for const in code.co_consts:
        if inspect.iscode(const):
            yield from _names(const)


def _of_library(thing: Any) -> bool:
    """Whether a class or function is torch's, NumPy's or Python's own."""
    return f"{thing.__module__}.".startswith(_LIBRARIES)


def unpicklable(root: Any, name: str = "dataset") -> str | None:
    """Attribute path of the innermost thing that cannot be pickled, or None where all can."""
    if _pickles(root):
        return None
    path, item = name, root
    for _ in range(_DEEPEST):
        bad = next(((step, member) for step, member in _members(item) if not _pickles(member)), None)
        if bad is None:
            break
        path, item = f"{path}{bad[0]}", bad[1]
    return f"{path} ({getattr(item, '__qualname__', type(item).__name__)})"


def _pickles(item: Any) -> bool:
    try:
        with Path(os.devnull).open("wb") as nowhere:  # so that trying costs no memory
            ForkingPickler(nowhere).dump(item)
    except Exception:  # whatever a __reduce__ raises means: no
        return False
    return True

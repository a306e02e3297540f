"""Finds files that samples read and that the training writes meanwhile, by the names that code has for them.

A worker reads ahead of the training, so it would see such a file as it was some batches ago.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import PurePath
from typing import Any

from fastloop.evidence.samples import dataset as datasets
from fastloop.evidence.samples import sample_code

READS = re.compile(
    r"(\w+_)?(open\w*|imread|load\w*|read\w*|memmap|fromfile|genfromtxt|connect|File|listdir|glob|exists)"
)
WRITES = re.compile(
    r"open|open_memmap|memmap|shutil|(\w+_)?write\w*|save\w*|dump\w*|imwrite|tofile"
    r"|to_(csv|parquet|json|feather|pickle|hdf|zarr|file|disk)"
    r"|execute\w*|commit|unlink|rename|copyfile|copytree|copy2|symlink\w*|system|Popen|check_call|check_output"
)
_PATH = re.compile(r"[\w./\\ -]*(/[\w. -]+|[\w-]{2,}\.\w{1,8})")
"""Text that looks like a path or a file's name; not a mere suffix."""


def list_shared_files(held: Iterable[tuple[str, Any]], running: Iterable[tuple[Any, str, Any]]) -> Iterator[str]:
    """Yield the files that both sides name, each with who reads and who writes it.

    Args:
        held: the objects of which samples are made, with their names.
        running: the functions that run while batches are loaded: owner, hook, and the hook's function or one that it
            calls.
    """
    read: dict[str, str] = {}
    for _, owner, function in datasets.list_running(list(held)):
        if _has_name(function, READS):
            read |= dict.fromkeys(_list_files(function, owner), function.__qualname__)
    hooks = defaultdict[tuple[str, int], list[tuple[Any, Any]]](list)
    for owner, name, function in running if read else ():
        hooks[f"{type(owner).__name__}.{name}", id(owner)].append((owner, function))
    for (name, _), functions in hooks.items():
        if any(_has_name(function, WRITES) for _, function in functions):
            files = (file for owner, function in functions for file in _list_files(function, owner))
            yield from (f"{file}, which {read[file]} reads, may be written by {name}" for file in files if file in read)


def _has_name(function: Any, pattern: re.Pattern[str]) -> bool:
    return any(map(pattern.fullmatch, sample_code.list_names(function.__code__)))


def _list_files(function: Any, owner: Any) -> Iterator[str]:
    """Names of the files in a function's constants, globals and closure, and in its owner's attributes. What has no
    suffix there is a folder, which may hold files of both sides."""
    names, attributes = set(sample_code.list_names(function.__code__)), getattr(owner, "__dict__", {})
    constants = [const for code in sample_code.walk_code(function.__code__) for const in code.co_consts]
    outer = [value for _, value in (*sample_code.list_globals(function), *sample_code.list_closure(function))]
    for value in (*constants, *outer, *(value for name, value in attributes.items() if name in names)):
        if isinstance(value, (str, PurePath)) and _PATH.fullmatch(str(value)):
            path = PurePath(value)
            if path.suffix or any(value is const for const in constants):
                yield path.name

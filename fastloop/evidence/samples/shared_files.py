"""Finds files that samples read and that the training writes meanwhile, by the names that calls in their code give, and
by the files that both sides have mapped into memory.

A worker reads ahead of the training, so it would see such a file as it was some batches ago.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import PurePath
from typing import Any, NamedTuple

import numpy as np

from fastloop.evidence.samples import dataset as datasets
from fastloop.evidence.samples import sample_code
from fastloop.evidence.samples.writes import name_called

READS = re.compile(
    r"(\w+_)?(open\w*|imread|load\w*|read\w*|memmap|fromfile|genfromtxt|connect|File|listdir|glob|exists)"
)
WRITES = re.compile(
    r"open|open_memmap|memmap|shutil|(\w+_)?write\w*|save\w*|dump\w*|imwrite|tofile"
    r"|to_(csv|parquet|json|feather|pickle|hdf|zarr|file|disk)"
    r"|execute\w*|commit|unlink|rename|copyfile|copytree|copy2|symlink\w*|system|Popen|check_call|check_output"
)
_NAME = re.compile(r"(?=.*[A-Za-z])[\w-]+(\.\w*[A-Za-z]\w*)?")
"""A file's name; a version such as v1.0 is none."""
_LONGEST, _DEEPEST = 4096, 4


def list_shared_files(held: Iterable[tuple[str, Any]], running: Iterable[tuple[Any, str, Any]]) -> Iterator[str]:
    """Yield the files that both sides name, each with who reads and who writes it.

    Args:
        held: the objects of which samples are made, with their names.
        running: the functions that run while batches are loaded: owner, hook, and the hook's function or one that it
            calls.
    """
    read: dict[str, str] = {}
    for _, owner, function in datasets.list_running([*held])[0]:
        read |= dict.fromkeys(_list_files(function, owner, READS), function.__qualname__)
    for owner, name, function in running if read else ():
        for file in _list_files(function, owner, WRITES):
            if file in read:
                yield f"{file}, which {read[file]} reads, may be written by {type(owner).__name__}.{name}"


def list_shared_maps(held: Iterable[tuple[str, Any]], running: Iterable[tuple[Any, str, Any]]) -> Iterator[str]:
    """Yield the files that the samples' objects and the training both map into memory, if the training may write them.
    The arguments are those of `list_shared_files`."""
    read = {_find_file(item): path for path, item in held if isinstance(item, np.memmap)}
    for owner, name, function in running if read else ():
        names = set(sample_code.list_names(function.__code__))
        own = [(each, value) for each, value in getattr(owner, "__dict__", {}).items() if each in names]
        for label, value in (*own, *sample_code.list_globals(function), *sample_code.list_closure(function)):
            maps = (
                item for _, item in datasets.walk(value, label) if isinstance(item, np.memmap) and item.flags.writeable
            )
            for file in filter(read.__contains__, map(_find_file, maps)):
                where = f"{type(owner).__name__}.{name}"
                yield f"{read[file]} maps {PurePath(file).name}, which {where} may write through its {label}"


def _find_file(array: np.memmap[Any, Any]) -> str:
    return os.path.realpath(array.filename) if array.filename else f"<{id(array)}>"


def _list_files(function: Any, owner: Any, pattern: re.Pattern[str]) -> Iterator[str]:
    """Names of the files in the arguments of a function's calls that read or write."""
    names = set(sample_code.list_names(function.__code__))
    if not any(map(pattern.fullmatch, names)) or (parsed := sample_code.parse(function)) is None:
        return
    tree, me = parsed
    known = sample_code.read_outer(function)
    if me is not None:
        known |= {f"{me}.{name}": value for name, value in getattr(owner, "__dict__", {}).items() if name in names}
    code = _Code(known, _list_assigned(tree), pattern is WRITES)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and code.is_called(node, pattern):
            for part in (node.func, *node.args, *(each.value for each in node.keywords)):
                yield from code.list_paths(part)


class _Code(NamedTuple):
    known: Mapping[str, Any]
    """Values of globals, closure and attributes, by the text that names them."""
    assigned: Mapping[str, list[ast.expr]]
    """What the function assigns to its local names."""
    writes: bool

    def is_called(self, call: ast.Call, pattern: re.Pattern[str]) -> bool:
        """Whether a call is one that the pattern names."""
        name = name_called(call)
        if self.writes and name == "open":
            return _may_write(call)
        return bool(pattern.fullmatch(name)) or (self.writes and ast.unparse(call.func) == "os.replace")

    def list_paths(self, node: ast.AST, depth: int = 0) -> Iterator[str]:
        """Names of files in an expression. Of an f-string only its end counts; what a variable holds counts with a
        suffix: without one it is a folder, which may hold files of both sides."""
        if isinstance(node, ast.Constant):
            yield from _name_file(node.value, needs_suffix=False)
        elif isinstance(node, ast.JoinedStr):
            last = node.values[-1] if node.values else None
            if isinstance(last, ast.Constant) and (len(node.values) == 1 or "/" in str(last.value)):
                yield from _name_file(last.value, needs_suffix=False)
        elif isinstance(node, (ast.Name, ast.Attribute)):
            text = ast.unparse(node)
            if text in self.known:
                yield from _name_file(self.known[text], needs_suffix=True)
            elif text in self.assigned and depth < _DEEPEST:
                for value in self.assigned[text]:
                    yield from self.list_paths(value, depth + 1)
            elif isinstance(node, ast.Attribute):
                yield from self.list_paths(node.value, depth)
        elif not (self.writes and isinstance(node, ast.Call) and name_called(node) == "open" and not _may_write(node)):
            for child in ast.iter_child_nodes(node):
                yield from self.list_paths(child, depth)


def _may_write(call: ast.Call) -> bool:
    """Whether a call of ``open`` has a mode that may write."""
    given = (*call.args, *(each.value for each in call.keywords))
    modes = [each.value for each in given if isinstance(each, ast.Constant) and isinstance(each.value, str)]
    return any(re.fullmatch(r"[rwaxbt+]{1,4}", mode) and re.search(r"[wax+]", mode) for mode in modes)


def _list_assigned(tree: ast.AST) -> dict[str, list[ast.expr]]:
    """What a function assigns to its local names, with ``with … as`` too."""
    found: dict[str, list[ast.expr]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            pairs: list[tuple[ast.expr | None, ast.expr]] = [(target, node.value) for target in node.targets]
        elif isinstance(node, ast.With):
            pairs = [(item.optional_vars, item.context_expr) for item in node.items]
        else:
            continue
        for target, value in pairs:
            if isinstance(target, ast.Name):
                found.setdefault(target.id, []).append(value)
    return found


def _name_file(value: Any, *, needs_suffix: bool) -> Iterator[str]:
    if isinstance(value, PurePath) or (isinstance(value, str) and len(value) <= _LONGEST):
        path, text = PurePath(value), str(value)
        if (path.suffix or (not needs_suffix and "/" in text)) and _NAME.fullmatch(path.name):
            yield path.name

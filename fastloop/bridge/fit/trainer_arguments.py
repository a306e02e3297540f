"""Reads the Trainer's arguments from Lightning's source, to find mistakes in ``trainer`` without importing torch."""

from __future__ import annotations

import ast
import difflib
import functools
import importlib.util
import operator
import re
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fastloop.config.loading import Config
from fastloop.config.schema import check_type, find_origin, make_fault
from fastloop.config.suggestions import find_nearest

SOURCE = "pytorch/trainer/trainer.py"
"""Path inside the package folder of ``lightning``."""
_TRUTH = {"yes": "true", "on": "true", "true": "true", "no": "false", "off": "false", "false": "false"}
_PLAIN: Mapping[str, Any] = {"str": str, "int": int, "float": float, "bool": bool, "dict": dict, "list": list}
_ACCELERATORS = ("auto", "cpu", "cuda", "gpu", "mps", "tpu")
"""Every Lightning has these; other packages register more, such as hpu and xpu."""
_AT_LEAST_1 = "accumulate_grad_batches"
"""Lightning divides by it in the first step, unchecked."""
_MISTYPED = 0.7
"""Similarity from which a word counts as a mistyped accelerator: ``gpuu`` and ``gpu`` reach 0.86, ``xpu`` and ``gpu``
0.67."""


def check_trainer_arguments(config: Config) -> None:
    """Refuse keys below ``trainer`` that the Trainer lacks, values that match none of the argument's types, and a
    mistyped ``run.accelerator``.

    No value matches a type that YAML cannot write, such as ``Profiler``. An argument whose type is an alias that
    Lightning's source does not explain may be any word or number; Lightning itself checks which.

    Raises:
        ConfigError: with file, line, full key, and the nearest argument or the allowed values.
    """
    _check_accelerator(config)
    known = read_arguments() if config.trainer else None
    if known is None:
        return
    for name, value in config.trainer.items():
        key = f"trainer.{name}"
        origin = find_origin(key, config.origins)
        if name not in known:
            near = find_nearest(name, known)
            do = f"write {near}" if near else "see lightning.pytorch.Trainer for its arguments"
            raise make_fault(key, origin, "Lightning's Trainer takes no such argument", do)
        kinds = known[name]
        if isinstance(value, str) and (fault := _find_malformed(value, kinds)) is not None:
            raise make_fault(key, origin, *fault, value=value)
        if kinds:
            check_type(value, functools.reduce(operator.or_, kinds), key, origin)
            if name == _AT_LEAST_1 and isinstance(value, int) and value < 1:
                raise make_fault(key, origin, "it must be at least 1", "write 1 or more", value=value)
        elif isinstance(value, (dict, list)):
            raise make_fault(
                key, origin, "it does not take a plain value of this type", "write one word or number", value=value
            )


def _check_accelerator(config: Config) -> None:
    key, written = "run.accelerator", config.run.accelerator
    near = difflib.get_close_matches(written, _ACCELERATORS, n=1, cutoff=_MISTYPED)
    if near and written not in _ACCELERATORS:
        origin, names = find_origin(key, config.origins), ", ".join(_ACCELERATORS)
        raise make_fault(key, origin, f"it must be one of {names}", f"write {near[0]}", value=written)


def _find_malformed(text: str, kinds: tuple[Any, ...] | None) -> tuple[str, str] | None:
    """Return why a text cannot be what the user meant, and what to write instead; None if it can."""
    word = text.lower()
    if kinds is None and word in _TRUTH:
        return "it is text, not true or false", f"write {_TRUTH[word]}"
    if kinds and str in kinds and re.fullmatch(r"\d+(:\d+){1,2}", text):
        whole = ":".join([*["00"] * (3 - text.count(":")), text])
        return "Lightning's durations have four parts: days, hours, minutes, seconds", f'write "{whole}"'
    return None


def read_arguments() -> dict[str, tuple[Any, ...] | None] | None:
    """Return the Trainer's arguments with the types of plain values that each accepts; None for an unclear annotation.

    Returns:
        None if the source of the installed Lightning does not show the arguments.
    """
    package = importlib.util.find_spec("lightning")  # imports nothing, because the name has no dot
    if package is None or package.origin is None:
        return None
    return _read_arguments(Path(package.origin).parent)


@functools.cache
def _read_arguments(package: Path) -> dict[str, tuple[Any, ...] | None] | None:
    """As `read_arguments`, from this folder's source, which is read once in a process."""
    module = _read_module(package, SOURCE)
    body = module.tree.body if module is not None else []
    trainer = next((each for each in body if isinstance(each, ast.ClassDef) and each.name == "Trainer"), None)
    inits = [each for each in (trainer.body if trainer else ()) if getattr(each, "name", None) == "__init__"]
    if module is None or not inits or not isinstance(inits[0], ast.FunctionDef) or inits[0].args.kwarg is not None:
        return None
    arguments = [*inits[0].args.args[1:], *inits[0].args.kwonlyargs]
    return {each.arg: module.read_kinds(each.annotation) for each in arguments}


@dataclass(frozen=True)
class _Module:
    """One file of Lightning's source, whose definitions explain its annotations."""

    package: Path
    tree: ast.Module

    def read_kinds(self, node: ast.expr | None) -> tuple[Any, ...] | None:
        """Return the plain types in an annotation; None if it has a part that the source does not explain."""
        if isinstance(node, ast.Constant) and node.value is None:
            return (type(None),)
        if isinstance(node, ast.Name):
            if node.id in _PLAIN:
                return (_PLAIN[node.id],)
            if node.id.startswith("_"):
                return self._read_alias(node.id)
            return None if node.id == "Any" else ()  # a class: YAML cannot write its objects
        if isinstance(node, ast.BinOp):
            return self._join([node.left, node.right])
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
            inner = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
            if node.value.id == "Literal":
                words = [each.value for each in inner if isinstance(each, ast.Constant)]
                return (Literal[tuple(words)],) if {*map(type, words)} <= {str, int} else None
            if node.value.id == "Union":
                return self._join(inner)
            if node.value.id == "Optional":
                return self._join([*inner, ast.Constant(None)])
            held = self._join(inner)  # the element types of a list or a mapping
            return self.read_kinds(node.value) if held else held
        return None

    def _read_alias(self, name: str) -> tuple[Any, ...] | None:
        """Return the plain types behind an alias that this file defines or imports from another Lightning file; None if
        that is unclear."""
        for node in self.tree.body:
            if isinstance(node, ast.Assign) and [getattr(each, "id", None) for each in node.targets] == [name]:
                return self.read_kinds(node.value)
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lightning."):
                original = next((each.name for each in node.names if (each.asname or each.name) == name), None)
                if original is not None:
                    path = (node.module or "").replace(".", "/").removeprefix("lightning/")
                    module = _read_module(self.package, f"{path}.py", f"{path}/__init__.py")
                    return None if module is None else module._read_alias(original)
        return None

    def _join(self, nodes: list[ast.expr]) -> tuple[Any, ...] | None:
        parts = [self.read_kinds(each) for each in nodes]
        if any(part is None for part in parts):
            return None
        kinds = dict.fromkeys(kind for part in parts if part is not None for kind in part)
        if float in kinds:
            kinds.pop(int, None)  # a float argument also accepts an integer
        words = [
            word for kind in kinds if _is_literal(kind) for word in typing.get_args(kind) if type(word) not in kinds
        ]
        plain = tuple(kind for kind in kinds if not _is_literal(kind))
        return (Literal[tuple(words)], *plain) if words else plain  # msgspec allows one Literal in a union


def _read_module(package: Path, *paths: str) -> _Module | None:
    """Read the first of these files that is there; None if there is none, or it cannot be parsed."""
    for path in paths:
        try:
            return _Module(package, ast.parse((package / path).read_bytes()))
        except (OSError, SyntaxError, ValueError):
            continue
    return None


def _is_literal(kind: Any) -> bool:
    return typing.get_origin(kind) is Literal

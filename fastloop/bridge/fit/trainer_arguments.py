"""Reads the Trainer's arguments from Lightning's source, to find mistakes in ``trainer`` without importing torch."""

from __future__ import annotations

import ast
import functools
import importlib.util
import operator
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastloop.config.loading import Config
from fastloop.config.schema import check_type, find_origin, make_fault
from fastloop.config.suggestions import find_nearest

SOURCE = "pytorch/trainer/trainer.py"
"""Path inside the package folder of ``lightning``."""
_TRUTH = {"yes": "true", "on": "true", "true": "true", "no": "false", "off": "false", "false": "false"}
_PLAIN: Mapping[str, Any] = {"str": str, "int": int, "float": float, "bool": bool, "dict": dict, "list": list}


def check_trainer_arguments(config: Config) -> None:
    """Refuse keys below ``trainer`` that the Trainer lacks, and values that match none of the argument's types.

    No value matches a type that YAML cannot write, such as ``Profiler``. An argument whose type is one of Lightning's
    aliases may be any word or number; Lightning itself checks which.

    Raises:
        ConfigError: with file, line, full key, and the nearest argument or the allowed values.
    """
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
        elif isinstance(value, (dict, list)):
            raise make_fault(
                key, origin, "it does not take a plain value of this type", "write one word or number", value=value
            )


def _find_malformed(text: str, kinds: tuple[Any, ...] | None) -> tuple[str, str] | None:
    """Why a text cannot be meant as it stands and what to write; None if it can."""
    word = text.lower()
    if kinds is None and word in _TRUTH:
        return "it is text, not true or false", f"write {_TRUTH[word]}"
    if kinds and str in kinds and re.fullmatch(r"\d+(:\d+){1,2}", text):
        whole = ":".join([*["00"] * (3 - text.count(":")), text])
        return "Lightning's durations have four parts: days, hours, minutes, seconds", f'write "{whole}"'
    return None


def read_arguments() -> dict[str, tuple[Any, ...] | None] | None:
    """The Trainer's arguments with the types of plain values that each one accepts; None for an unclear annotation.

    Returns:
        None if the source of the installed Lightning does not show the arguments.
    """
    package = importlib.util.find_spec("lightning")  # imports nothing, because the name has no dot
    if package is None or package.origin is None:
        return None
    try:
        tree = ast.parse((Path(package.origin).parent / SOURCE).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None
    trainer = next((each for each in tree.body if isinstance(each, ast.ClassDef) and each.name == "Trainer"), None)
    inits = [each for each in (trainer.body if trainer else ()) if getattr(each, "name", None) == "__init__"]
    if not inits or not isinstance(inits[0], ast.FunctionDef) or inits[0].args.kwarg is not None:
        return None
    arguments = [*inits[0].args.args[1:], *inits[0].args.kwonlyargs]
    return {each.arg: _read_kinds(each.annotation) for each in arguments}


def _read_kinds(node: ast.expr | None) -> tuple[Any, ...] | None:
    """The plain types in an annotation; None if it has a part that its text does not explain."""
    if isinstance(node, ast.Constant) and node.value is None:
        return (type(None),)
    if isinstance(node, ast.Name):
        if node.id in _PLAIN:
            return (_PLAIN[node.id],)
        return None if node.id.startswith("_") or node.id == "Any" else ()  # an alias; a class of objects
    if isinstance(node, ast.BinOp):
        return _join([node.left, node.right])
    if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
        inner = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        if node.value.id == "Union":
            return _join(inner)
        if node.value.id == "Optional":
            return _join([*inner, ast.Constant(None)])
        held = _join(inner)  # the element types of a list or a mapping
        return _read_kinds(node.value) if held else held
    return None


def _join(nodes: list[ast.expr]) -> tuple[Any, ...] | None:
    parts = [_read_kinds(each) for each in nodes]
    if any(part is None for part in parts):
        return None
    kinds = dict.fromkeys(kind for part in parts if part is not None for kind in part)
    if float in kinds:
        kinds.pop(int, None)  # a float argument also accepts an integer
    return tuple(kinds)

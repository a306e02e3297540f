"""Finds in code what draws from the system's randomness: no state that could be saved makes it draw the same again."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

from fastloop.evidence.samples import sample_code

_SYSTEM = frozenset(
    {"SystemRandom", "urandom", "getrandom", "secrets", "token_bytes", "token_hex", "randbelow", "randbits", "uuid4"}
)
_SEEDED = frozenset(
    {"seed", "default_rng", "Random", "RandomState", "SeedSequence", "PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64"}
)
"""Calls that take the system's randomness unless they are given a seed."""
_CLOCKS = frozenset({"time", "time_ns", "perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns", "now"})


def find_system_seed(items: Mapping[str, Any]) -> str | None:
    """Where one of these draws from the system, and by what: ``sampler (Shuffled.__iter__: default_rng)``; else
    None."""
    held = list(items.items())
    for place, function in sample_code.follow([*items.values()]):
        path, item = held[place]
        if (name := _find_in(function, item)) is not None:
            return f"{path} ({function.__qualname__}: {name})"
    return None


def _find_in(function: Any, item: Any) -> str | None:
    if named := sorted(_SYSTEM.intersection(sample_code.list_names(function.__code__))):
        return named[0]
    tree, me = sample_code.parse(function) or (ast.Module([], []), None)
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        name, given = _read_name(call), [*call.args, *(keyword.value for keyword in call.keywords)]
        if name in _SEEDED and all(_is_none(each, me, item) for each in given):
            return name
        inner = {_read_name(node) for each in given for node in ast.walk(each) if isinstance(node, ast.Call)}
        if (name in _SEEDED or name == "manual_seed") and (clocks := sorted(_CLOCKS & inner)):
            return clocks[0]
    return None


def _read_name(call: ast.Call) -> str:
    return getattr(call.func, "attr", getattr(call.func, "id", ""))


def _is_none(node: ast.AST, me: str | None, item: Any) -> bool:
    """Whether an argument is ``None``, or an attribute of the function's object with this value."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == me:
        return getattr(item, node.attr, node) is None
    return isinstance(node, ast.Constant) and node.value is None

"""The layers of a configuration: its files and the command line, and how they are merged."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from fastloop.config.shipped import KINDS, Kind, find_root, find_shipped, is_path, locate
from fastloop.config.strict_yaml import COMMAND_LINE, KeyPath, Marked, Origin, load_yaml, parse_scalar
from fastloop.errors import ConfigError, name_kind
from fastloop.records.secrets import mask_secrets
from fastloop.records.store import is_file

_KEY = re.compile(r"[A-Za-z_][\w-]*(\.[\w-]+)*")
_TOKEN = re.compile(r"""(?<=[=,:[{\s])(?:"(?:\\.|[^"\\])*"|'(?:''|[^'])*')|.""", re.DOTALL)
"""A quoted text, or one character. A quote opens only at the beginning of a value: in ``it's`` it is a letter."""


class Leaf(NamedTuple):
    """A value without further keys (a list counts as one value) and where it came from."""

    value: Any
    origin: Origin


Leaves = dict[KeyPath, Leaf]


@dataclass(frozen=True)
class Layer:
    """One file, dict or ``key=value``, without its ``base`` key."""

    marked: Marked
    path: Path | None = None
    depth: int = 0
    """How many ``base`` keys away from the requested file."""


def read_file_layers(text: str, cwd: Path, suggested: Sequence[Kind] = KINDS) -> list[Layer]:
    """Return the layers of a file, given by path or shipped name: its bases left to right, each after its bases, then
    the file itself.

    Args:
        suggested: see `locate`.

    Raises:
        ConfigError: what `locate` and `load_yaml` refuse; circular bases, with the chain.
    """
    layer = _read(locate(text, cwd, got=repr(text), suggested=suggested), cwd)
    return _add_bases(layer, cwd, chain=(layer,))


def read_dict_layers(values: Mapping[str, Any], cwd: Path) -> list[Layer]:
    """Return the layers of a Python mapping; its ``base`` paths start at the working directory."""
    layer = Layer(Marked(to_plain_values(values, ()), {}, "dict"))
    return _add_bases(layer, cwd, chain=(layer,))


def read_patch_layer(text: str, cwd: Path) -> Layer:
    """Return the layer of a patch file, given by path or shipped name.

    Raises:
        ConfigError: the patch has a ``base``, or is a ``key=value``.
    """
    key, equals, _ = text.partition("=")
    if equals and _KEY.fullmatch(key.strip()) and not is_file(cwd / text):
        shown = mask_secrets([text])[0]
        why = "it is key=value, but a patch is a file or a shipped name"
        raise ConfigError(got=f"--config {shown}", why=why, do=f"write {shown}, without --config")
    layer = _read(locate(text, cwd, got=repr(text)), cwd)
    if "base" in layer.marked.value:
        raise ConfigError(
            got=f"base ({layer.marked.origin(('base',))})",
            why="a patch may not have a base",
            do="delete base here, or give this file as the configuration itself",
            key="base",
        )
    return layer


def override_layers(arguments: Sequence[str]) -> list[Layer]:
    """Return one layer for each ``key=value`` in arguments such as ``a.b=1,c.d=[1,2]``.

    Raises:
        ConfigError: a part without ``=`` or without a value, an unclosed bracket, ``base``. Secrets are not printed.
    """
    return [_override(part, argument) for argument in arguments for part in _split(argument)]


def classify_patch(text: str) -> tuple[Literal["more", "override"], str]:
    """Interpret a ``--vs``: ``key=value`` is an override, a path or a shipped name is a patch file.

    Raises:
        ConfigError: neither, with the known names; a key without its value; or a recipe, to which patches are applied.
    """
    key, equals, _ = text.partition("=")
    if equals and _KEY.fullmatch(key.strip()):
        return "override", text
    if is_path(text):
        return "more", text
    names = [name.strip() for name in text.split("+")]
    if len(names) > 1 and all(any(name in find_shipped(kind) for kind in KINDS) for name in names):
        raise ConfigError(got=repr(text), why="separate several patches with commas", do=f"write {','.join(names)}")
    if text in find_shipped("recipes"):
        raise ConfigError(
            got=repr(text),
            why="it is a recipe, but --vs takes a patch, rung or ladder",
            do="write a rung, a ladder, a file with the patch, or key=value",
        )
    if (do := _suggest_value(text)) is not None:
        raise ConfigError(got=repr(text), why="it has no = and no value", do=do)
    locate(text, Path(), got=repr(text))
    return "more", text


def merge(layers: Iterable[Iterable[tuple[KeyPath, Leaf]]]) -> Leaves:
    """Merge layers, later ones on top: mappings are merged, everything else (also lists) is replaced."""
    merged: Leaves = {}
    for layer in layers:
        for path, leaf in layer:
            inside = [each for each in merged if len(each) > len(path) and each[: len(path)] == path]
            if leaf.value == {} and inside:
                continue
            for covered in (*inside, *(path[:length] for length in range(1, len(path)))):
                merged.pop(covered, None)
            merged[path] = leaf
    return merged


def list_marked_leaves(marked: Marked) -> Iterator[tuple[KeyPath, Leaf]]:
    """Yield the leaves of one layer with their origins."""
    return ((path, Leaf(value, marked.origin(path))) for path, value in flatten(marked.value))


def flatten(nested: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Yield every leaf of nested dicts with its path; an empty dict below the top is a leaf."""
    if isinstance(nested, dict) and (nested or not path):
        for key, value in nested.items():
            yield from flatten(value, (*path, key))
    else:
        yield path, nested


def nest(leaves: Mapping[KeyPath, Leaf]) -> dict[str, Any]:
    """Return the nested dict with these leaves."""
    nested: dict[str, Any] = {}
    for path, leaf in leaves.items():
        inner = nested
        for key in path[:-1]:
            inner = inner.setdefault(key, {})
        inner[path[-1]] = leaf.value
    return nested


def show_path(path: Path, cwd: Path) -> str:
    """Return a file's name for messages: relative to the working directory or the shipped files, else the full path."""
    for folder in (cwd.absolute(), find_root()):
        if path.is_relative_to(folder):
            return path.relative_to(folder).as_posix()
    return str(path)


def _read(path: Path, cwd: Path, depth: int = 0) -> Layer:
    return Layer(load_yaml(path, shown=show_path(path, cwd)), path, depth)


def _add_bases(layer: Layer, cwd: Path, chain: tuple[Layer, ...]) -> list[Layer]:
    layers: list[Layer] = []
    folder = layer.path.parent if layer.path else cwd
    for text, origin in _list_bases(layer.marked):
        names = [each.marked.file for each in chain]
        got = f"base: {text} ({origin})"
        path = locate(text, folder, got=got, chain=f" (bases: {' -> '.join([*names, text])})")
        base = _read(path, cwd, layer.depth + 1)
        if path in [each.path for each in chain]:
            raise ConfigError(
                got=got,
                why=f"the bases form a cycle: {' -> '.join([*names, base.marked.file])}",
                do="delete one of these base lines",
                key="base",
            )
        layers += _add_bases(base, cwd, (*chain, base))
    values = {key: value for key, value in layer.marked.value.items() if key != "base"}
    return [*layers, replace(layer, marked=replace(layer.marked, value=values))]


def _list_bases(marked: Marked) -> list[tuple[str, Origin]]:
    base = marked.value.get("base", [])
    items = base if isinstance(base, list) else [base]
    for item in items:
        if not isinstance(item, str):
            raise ConfigError(
                got=f"base: {mask_secrets(base)} ({marked.origin(('base',))})",
                why="a base is a shipped name or a path",
                do="write a name, a path, or a list of them",
                key="base",
            )
    return [
        (item, marked.origin(("base", str(index)) if isinstance(base, list) else ("base",)))
        for index, item in enumerate(items)
    ]


def _split(argument: str) -> list[str]:
    """Split at commas outside brackets, braces and quotes."""
    parts, depth = [""], 0
    for token in _TOKEN.findall(argument):
        if token == "," and not depth:
            parts.append("")
            continue
        depth = max(0, depth + (token in "[{") - (token in "]}"))
        parts[-1] += token
    if depth:
        raise _make_override_error(argument, "a bracket or brace is left open", "close it, or quote the whole value")
    return parts


def _override(part: str, argument: str) -> Layer:
    key, equals, text = part.partition("=")
    path = tuple(key.strip().split("."))
    if not equals and (do := _suggest_value(part)) is not None:
        raise _make_override_error(argument, "it has no = and no value", do)
    if not equals or not _KEY.fullmatch(key.strip()):
        do = "write key=value, and quote a value that holds commas"
        if not equals and (is_path(part) or any(part in find_shipped(kind) for kind in KINDS[1:])):
            is_one_of_several = part != argument and part in find_shipped("rungs")
            do = f"write rungs.{part}.enabled=true" if is_one_of_several else f"write --config {part}"
        raise _make_override_error(argument, "each part between commas has to be key=value", do)
    if path[0] == "base":
        raise _make_override_error(argument, "base belongs in a file", "put base into a YAML file and pass that file")
    if not text.strip():
        raise _make_override_error(argument, f"{key.strip()} has no value", f"write {key.strip()}=null to mean nothing")
    try:
        value = parse_scalar(text)
    except ConfigError as error:
        raise _make_override_error(argument, error.why, error.do) from None
    for inner in reversed(path):
        value = {inner: value}
    return Layer(Marked(value, {}, COMMAND_LINE))


def _suggest_value(text: str) -> str | None:
    """Return how to give a key its value; None if the text is not a dotted key."""
    if "." not in text or is_path(text) or not _KEY.fullmatch(text.strip()):
        return None
    section, *inner = text.strip().split(".")
    return f"write {text.strip()}{'.enabled=true' if section == 'rungs' and len(inner) == 1 else '=VALUE'}"


def _make_override_error(argument: str, why: str, do: str) -> ConfigError:
    return ConfigError(got=f"{mask_secrets([argument])[0]!r} ({COMMAND_LINE})", why=why, do=do)


def to_plain_values(value: Any, path: KeyPath = ()) -> Any:
    """Convert Python values to those of YAML: mappings to dicts, sequences to lists; others must be scalars."""
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str) or "." in key:
                raise ConfigError(
                    got=f"{'.'.join([*path, str(key)])} (dict)",
                    why="a key must be text without dots",
                    do="nest the dicts: {'run': {'seed': 0}}",
                )
        return {key: to_plain_values(inner, (*path, key)) for key, inner in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return [to_plain_values(item, (*path, str(index))) for index, item in enumerate(value)]
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise ConfigError(
        got=f"{'.'.join(path)}: {name_kind(value)} (dict)",
        why="a configuration holds text, numbers, booleans, null, lists and dicts",
        do="write a plain value",
    )

"""The run directory: the one place that writes records to JSON files and reads them back.

A record is a frozen dataclass. Its fields are the keys of its JSON object, with three exceptions:

* ``field(metadata={"json": "class"})`` is written under another key, or not at all if that is None;
* ``schema: ClassVar[int]`` is written first, ``computed: ClassVar[tuple[str, ...]]`` names properties written last.

Reading tolerates files of other versions and files edited by hand: missing keys get the field's default, unknown keys
are ignored, and a value of the wrong type counts as missing, while the others are kept.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import numbers
import os
import re
import types
import typing
import unicodedata
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

import msgspec

SCHEMA = 1

NAMES = (
    "config.resolved.yaml",
    "config.diff.yaml",
    "env.json",
    "plan.json",
    "measurement.json",
    "verdicts.json",
    "findings.json",
    "report.md",
    "report.html",
    "trace.json.gz",
    "metrics.csv",
    "hparams.yaml",
)
"""Files that a run may write into its directory, including the logger's two files."""
EXPERIMENTS = ("comparison.json", "climb.json", "tune.json")
"""What the directory of an experiment with a report holds in place of a measurement."""


class Record(Protocol):
    """Any dataclass."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]


Kind = TypeVar("Kind", bound=Record)


# -- writing ----------------------------------------------------------------------------------------------------------


def save(directory: Path, records: Mapping[str, Record]) -> None:
    """Write records to JSON files, by file name; each write is atomic."""
    write(directory, {name: dump(record) for name, record in records.items()})


def dump(content: Record | Mapping[str, Any], *, ascii_only: bool = False) -> str:
    """JSON text that every parser accepts: non-finite numbers become null, unknown objects their string.

    Uses the standard library, because msgspec rejects integers of more than 64 bits and paths that are not UTF-8.
    """
    return json.dumps(_to_plain(content), indent=1, ensure_ascii=ascii_only, allow_nan=False) + "\n"


def to_json(record: Record) -> dict[str, Any]:
    """A record as the JSON object in its file."""
    content: dict[str, Any] = _to_plain(record)
    return content


def _to_plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        kind = type(value)
        first = {"schema": SCHEMA} if hasattr(kind, "schema") else {}
        fields = {key: _to_plain(getattr(value, name)) for name, key, _ in _list_fields(kind)}
        return {**first, **fields, **{name: _to_plain(getattr(value, name)) for name in getattr(kind, "computed", ())}}
    if isinstance(value, Mapping):
        return {str(key): _to_plain(member) for key, member in value.items()}
    if isinstance(value, (list, tuple)):
        return [_to_plain(member) for member in value]
    if isinstance(value, (set, frozenset)):
        return sorted(map(_to_plain, value), key=str)
    if value is None or isinstance(value, (str, bool)):
        return value
    if isinstance(value, numbers.Integral):  # NumPy's too
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value) if math.isfinite(value) else None
    return str(value)


def clear(directory: Path) -> None:
    """Delete an earlier run's files from a directory, so that a run that fails does not leave another run's report."""
    for name in NAMES:
        (directory / name).unlink(missing_ok=True)


def write(directory: Path, contents: Mapping[str, str]) -> None:
    """Write files atomically: a reader never sees a partial file."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in contents.items():
        partial = directory / f".{name}.{os.getpid()}.tmp"
        try:
            partial.write_text(text, encoding="utf-8", errors="replace")  # paths may contain bytes that are not UTF-8
            partial.replace(directory / name)
        finally:
            partial.unlink(missing_ok=True)  # exists only if the disk is full
    if "report.md" in contents and "report.html" not in contents:
        (directory / "report.html").unlink(missing_ok=True)  # from an earlier fit, with other content


# -- reading ----------------------------------------------------------------------------------------------------------


def load(path: Path, kind: type[Kind]) -> Kind | None:
    """The record in a JSON file; None if the file, its object or a field without a default is missing."""
    return decode(read(path), kind)


def read(path: Path) -> dict[str, Any] | None:
    """An object from a JSON file; None if the file is missing or invalid."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def decode(content: object, kind: type[Kind]) -> Kind | None:
    """The record in an object of a JSON file; None if it is not an object or lacks a field without a default."""
    if isinstance(content, kind):
        return content
    try:
        return _record(content, kind)
    except msgspec.ValidationError:
        return None


def _record(content: object, kind: type[Kind]) -> Kind:
    if not isinstance(content, Mapping):
        raise msgspec.ValidationError(f"Expected `object`, got `{type(content).__name__}`")
    found: dict[str, Any] = {}
    for name, key, hint in _list_fields(kind):
        if key in content:
            try:
                found[name] = _convert(content[key], hint)
            except msgspec.ValidationError:
                continue
    for field in dataclasses.fields(kind):
        if field.name not in found and field.default is field.default_factory is dataclasses.MISSING:
            raise msgspec.ValidationError(f"Object missing required field `{field.name}`")
        if isinstance(found.get(field.name), Mapping) and field.default_factory is not dataclasses.MISSING:
            found[field.name] = {**field.default_factory(), **found[field.name]}  # an older file lacks some of the keys
    return kind(**found)


def _convert(value: object, hint: Any) -> Any:
    """A value converted to the type of its field. In lists and mappings, entries of the wrong type are left out; null
    in a list of numbers is read as NaN, since non-finite numbers are written as null."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return _record(value, hint)
    if hint is Path and isinstance(value, str):
        return Path(value)
    if origin in (typing.Union, types.UnionType) and type(None) in inner:
        others = [each for each in inner if each is not type(None)]
        return None if value is None else _convert(value, typing.Union[tuple(others)])  # noqa: UP007 (built at run time)
    if not _holds_records(hint):
        try:
            return msgspec.convert(value, hint)
        except msgspec.ValidationError:
            if isinstance(value, float) and value.is_integer():
                return msgspec.convert(int(value), hint)
            if origin not in (tuple, Mapping) or (origin is tuple and inner[-1] is not ...):
                raise
    if origin is tuple and isinstance(value, list):
        return tuple(
            _keep_fitting([math.nan if each is None and inner[0] is float else each for each in value], inner[0])
        )
    if origin is Mapping and isinstance(value, Mapping):
        kept = {key: _keep_fitting([each], inner[1]) for key, each in value.items()}
        return {key: each[0] for key, each in kept.items() if each}
    raise msgspec.ValidationError(f"Expected `{hint}`, got `{type(value).__name__}`")


def _keep_fitting(values: list[Any], hint: Any) -> list[Any]:
    kept = []
    for value in values:
        try:
            kept.append(_convert(value, hint))
        except msgspec.ValidationError:
            continue
    return kept


def _holds_records(hint: Any) -> bool:
    return any(dataclasses.is_dataclass(each) or _holds_records(each) for each in typing.get_args(hint))


@functools.cache
def _list_fields(kind: type[Any]) -> list[tuple[str, str, Any]]:
    """Name, key in the file and type of each field that is written to a file."""
    hints = typing.get_type_hints(kind)
    keys = {field.name: field.metadata.get("json", field.name) for field in dataclasses.fields(kind)}
    return [(name, key, hints[name]) for name, key in keys.items() if key is not None]


# -- files and their names --------------------------------------------------------------------------------------------


def report_in(directory: Path) -> Path | None:
    """The report to show for a run directory: the HTML page, else the Markdown; None if there is neither."""
    found = (directory / name for name in ("report.html", "report.md"))
    return next((path for path in found if is_file(path)), None)


def is_file(path: Path) -> bool:
    """Whether a file exists; also False for an invalid file name, such as one of 300 letters."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def make_safe_name(text: str) -> str:
    """A text as a file name that cannot leave its directory: ASCII letters, digits, ``.``, ``_``, ``-``; at most 80."""
    ascii_only = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()
    return re.sub(r"[^A-Za-z0-9._-]+", "-", ascii_only).strip("-._")[:80].rstrip("-._") or "run"


def format_utc() -> str:
    """The current UTC time as a directory name that sorts: 20261120T093000Z."""
    return datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%SZ")

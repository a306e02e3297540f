"""The dataclasses are the schema: their fields are the keys, their annotations the types; no silent conversions.

``build`` makes records from plain values. Text is never taken for a number or a boolean; the only conversions are from
an integer to a required float and from a list to a required tuple.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import sys
import types
import typing
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal, TypeVar, cast

import msgspec

from fastloop.config.strict_yaml import COMMAND_LINE, KeyPath, Origin
from fastloop.config.suggestions import find_nearest
from fastloop.errors import ConfigError
from fastloop.records.secrets import MASK, is_secret, mask_secrets
from fastloop.records.yaml_text import parse_plain

T = TypeVar("T")

_NAMES: Mapping[Any, str] = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "text",
    list: "a list",
    dict: "a mapping",
    types.NoneType: "null",
}
_PLURALS: Mapping[Any, str] = {bool: "booleans", int: "integers", float: "numbers", str: "texts"}
_IS: Mapping[type, str] = {**_NAMES, bool: "a boolean", float: "a float", types.NoneType: "no value"}
_TRUE = ("yes", "y", "on", "true", "1")
_FALSE = ("no", "n", "off", "false", "0")


def check_keys(
    values: Mapping[str, Any],
    schema: Mapping[str, Any],
    origin_of: Callable[[KeyPath], Origin],
    path: KeyPath = (),
    coming: Collection[str] = (),
) -> None:
    """Refuse unknown keys, and single values in place of a section.

    Args:
        values: nested plain values.
        schema: what each key allows: a dataclass (a section with exactly its fields), ``dict`` (a section with any
            keys) or the type of a value.
        origin_of: returns where a key was written.
        path: the keys above these values.
        coming: keys that later versions will have.

    Raises:
        ConfigError: with file, line, full key and the nearest known key.
    """
    for key, value in values.items():
        here = (*path, key)
        full, origin = ".".join(here), origin_of(here)
        if key not in schema:
            raise _explain_unknown(key, value, schema, path, origin, coming)
        kind = schema[key]
        section = kind is dict or dataclasses.is_dataclass(kind)
        if section and not isinstance(value, dict):
            do = _suggest_section(key, value, kind, full if origin.file == COMMAND_LINE else None)
            raise make_fault(full, origin, f"{full} is a section, not a single value", do, value=value)
        if not section and isinstance(value, dict):
            raise make_fault(
                full, origin, f"{full} takes a single value, not a section", f"write {key}: {_describe(kind)}"
            )
        if dataclasses.is_dataclass(kind):
            check_keys(value, list_fields(kind), origin_of, here, getattr(kind, "coming", ()))


def _suggest_section(key: str, value: Any, kind: Any, full: str | None) -> str:
    """Return what to write in place of a single value or a list.

    Args:
        full: the full key if it was written on the command line, else None.
    """
    fields = {} if kind is dict else list_fields(kind)
    items = [name for item in (value if isinstance(value, list) else [value]) for name in _list_names(item)]
    named = [name for name in items if dataclasses.is_dataclass(fields.get(name))]
    if named:
        examples = [f"{name}.enabled=true" if full else f"{name}: {{enabled: true}}" for name in named]
    elif next(iter(fields), "") == "enabled":
        truth = "false" if str(value).lower() in _FALSE else "true"
        examples = [f"enabled={truth}" if full else f"enabled: {truth}"]
    else:
        examples = [f"{next(iter(fields), 'key')}{'=' if full else ': '}…"]
    if full:
        return f"write {','.join(f'{full}.{example}' for example in examples)}"
    return f"write {key}: {{{', '.join(examples)}}}, or delete the line"


def _list_names(item: Any) -> list[str]:
    """Return the names in an item of a list: itself, or its keys."""
    return [name for name in (item if isinstance(item, dict) else [item]) if isinstance(name, str)]


def read_settings(record: type[T], values: Mapping[str, Any], key: str, origins: Mapping[str, Origin]) -> T:
    """Build the record of a section that was read with any keys, such as ``recipe``: check its keys, then its types.

    Raises:
        ConfigError: as in `check_keys` and `build`.
    """
    check_keys({key: values}, {key: record}, lambda path: find_origin(".".join(path), origins))
    return build(record, values, key, origins)


def build(record: type[T], values: Mapping[str, Any], key: str, origins: Mapping[str, Origin]) -> T:
    """Build a record from these values, including nested records.

    Args:
        record: a dataclass.
        values: values for its fields; a field without one keeps its default.
        key: full key of the section, for messages.
        origins: full key of each leaf -> where its value came from.

    Raises:
        ConfigError: a value has the wrong type, or the record refuses it; with file, line and full key.
    """
    fields: dict[str, Any] = {}
    for name, kind in list_fields(record).items():
        full = f"{key}.{name}"
        if name not in values:
            continue
        if dataclasses.is_dataclass(kind):
            fields[name] = build(cast("type[Any]", kind), values[name], full, origins)
        else:
            fields[name] = check_type(values[name], kind, full, find_origin(full, origins))
    try:
        return record(**fields)
    except ConfigError as error:
        raise _locate_error(error, key, origins) from None


def check_type(value: Any, kind: Any, key: str, origin: Origin) -> Any:
    """Return the value converted to its annotation; raises ConfigError if it has another type."""
    try:
        return _read(value, kind)
    except TypeError:
        pass
    wanted = _describe(kind)
    if is_secret(key):
        raise make_fault(key, origin, f"it must be {wanted}", f"write {wanted}", value=value)
    raise make_fault(
        key,
        origin,
        f"it must be {wanted}; {_explain_mismatch(value, kind)}",
        f"write {_suggest_instead(value, kind)}",
        value=value,
    )


def check_arguments(*, out: object, **switches: object) -> None:
    """Raise ConfigError if an argument of ``FastLoop`` is no path, or a switch that is neither true nor false."""
    if out is not None and not isinstance(out, os.PathLike):
        check_type(out, str, "out", Origin("FastLoop"))
    for name, value in switches.items():
        if not any(value == each for each in (True, False)):  # accepts 1 and numpy's booleans, but not text
            check_type(value, bool, name, Origin("FastLoop"))


def list_fields(record: Any) -> dict[str, Any]:
    """Return the field names of a dataclass with their types."""
    hints = typing.get_type_hints(record)
    return {field.name: hints[field.name] for field in dataclasses.fields(record)}


def find_origin(key: str, origins: Mapping[str, Origin]) -> Origin:
    """Return the origin of a key, or of the first leaf below it."""
    return next((origin for leaf, origin in origins.items() if f"{leaf}.".startswith(f"{key}.")), Origin("unknown"))


_NOTHING = object()


def make_fault(key: str, origin: Origin, why: str, do: str, *, value: Any = _NOTHING) -> ConfigError:
    """Return the error for one key, with its value unless that is a secret."""
    shown = "" if value is _NOTHING else f": {MASK if is_secret(key) else spell(value)}"
    return ConfigError(got=f"{key}{shown} ({origin})", why=why, do=do, key=key)


def spell(value: Any) -> str:
    """Format a value without its secrets. A long value is described, not cut: scrubbing would miss half a secret."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = repr(mask_secrets(value))
    return text if len(text) <= 80 else f"<{_IS.get(type(value), 'a value')} of {len(text)} characters>"


def _explain_unknown(
    key: str, value: Any, schema: Mapping[str, Any], path: KeyPath, origin: Origin, coming: Collection[str]
) -> ConfigError:
    where = ".".join(path) or "a configuration"
    home = [name for name, kind in schema.items() if dataclasses.is_dataclass(kind) and key in list_fields(kind)]
    near = "enabled" if key == "on" and "enabled" in schema else find_nearest(key, schema)
    if home:
        do = f"write {'.'.join([*path, home[0], key])}{_repeat_rest(value) if origin.file == COMMAND_LINE else ''}"
    else:
        rid = "drop it" if origin.file == COMMAND_LINE else "delete the line"
        do = f"write {near}" if near else f"write one of these, or {rid}"
    yet = " in this version yet" if key in coming else ""
    return make_fault(".".join([*path, key]), origin, f"{where} has no key {key}{yet}; it has {', '.join(schema)}", do)


def _repeat_rest(value: Any) -> str:
    """Return what follows a key on the command line, such as ``.count=1``; empty if that is not one plain value."""
    rest = ""
    while isinstance(value, dict) and len(value) == 1:
        ((key, value),) = value.items()
        rest += f".{key}"
    if isinstance(value, (bool, int, float)):
        return f"{rest}={json.dumps(value)}"
    return f"{rest}={value}" if isinstance(value, str) else ""


def _locate_error(error: ConfigError, section: str, origins: Mapping[str, Origin]) -> ConfigError:
    """Add the full key and the value's origin to an error that a record raised."""
    leaves = [key for key in origins if key.startswith(f"{section}.")]
    known = [*leaves, *(leaf.rpartition(".")[0] for leaf in leaves)]
    named = error.key or section
    full = next((key for key in known if f".{key}".endswith(f".{named}")), section)
    got = error.got
    if full not in got:
        got = got.replace(named, full, 1) if full.endswith(named) and named in got else f"{full}: {got}"
    place = f" ({origins[full]})" if full in origins else ""
    return ConfigError(got=f"{got}{place}", why=error.why, do=error.do, key=full)


def _read(value: Any, kind: Any) -> Any:
    """Return the value if the type accepts it; raises TypeError otherwise."""
    if isinstance(value, str) and {int, float} & set(_list_alternatives(kind)) and _guess_number(value) is not None:
        raise TypeError  # if a number is allowed, 08 is a malformed number even if text is also allowed
    items = value if isinstance(value, list) else [value]
    if any(isinstance(item, float) and not math.isfinite(item) for item in items):
        raise TypeError
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise TypeError from error


def _describe(kind: Any) -> str:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        words = dict.fromkeys(map(str, arguments))  # 16 and "16" are one word to write
        return repr(arguments[0]) if len(words) == 1 else f"one of {', '.join(words)}"
    if origin is tuple:
        count = "" if arguments[-1:] == (...,) else f"{len(arguments)} "
        return f"a list of {count}{_PLURALS.get(arguments[0], 'values')}"
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_describe(each) for each in arguments).replace("true or false or", "true, false or")
    return _NAMES.get(kind, getattr(kind, "__name__", str(kind)))


def _explain_mismatch(value: Any, kind: Any) -> str:
    """Say what is wrong with the value: its type, or that it is not one of the allowed words."""
    if isinstance(value, float) and not math.isfinite(value):
        return f"{spell(value)} is not finite"
    if type(value) in map(type, _list_words(kind)) and (not isinstance(value, str) or _guess_number(value) is None):
        return f"{spell(value)} is not"
    return f"{spell(value)} is {_IS.get(type(value), type(value).__name__)}"


def _suggest_instead(value: Any, kind: Any) -> str:
    """Suggest what was probably meant, or else what is allowed."""
    kinds = _list_alternatives(kind)
    word = str(value).lower()
    if bool in kinds and word in (*_TRUE, *_FALSE):
        return "true" if word in _TRUE else "false"
    meant = _guess_number(str(value)) if isinstance(value, (str, float)) else None
    if meant is not None and (float in kinds or (int in kinds and meant == int(meant))):
        unquoted = ", without quotes" if isinstance(value, str) and parse_plain(value) == meant else ""
        return f"{meant if float in kinds else int(meant)}{unquoted}"
    words = [str(each) for each in _list_words(kind)]
    near = next((each for each in words if word and each.startswith(word)), None) or find_nearest(word, words)
    if near and not isinstance(value, bool):  # a boolean resembles no word such as 16-true
        return near
    if str in kinds and isinstance(value, (bool, int, float)):
        return f'"{spell(value)}", in quotes'
    return _describe(kind)


def _list_alternatives(kind: Any) -> tuple[Any, ...]:
    return typing.get_args(kind) if typing.get_origin(kind) in (typing.Union, types.UnionType) else (kind,)


def _list_words(kind: Any) -> list[str | int]:
    """Return the literal words and numbers that a type allows."""
    literals = [typing.get_args(each) for each in _list_alternatives(kind) if typing.get_origin(each) is Literal]
    return [choice for choices in literals for choice in choices]


def _guess_number(text: str) -> int | float | None:
    """Return the number that a text was meant to be: ``08``, ``1_000``, ``0x1F``, or one in quotes."""
    for read in (int, lambda text: int(text, 0), float):
        try:
            number: int | float = read(text)
        except ValueError:
            continue
        # Not math.isfinite, which overflows for integers beyond the float range.
        return number if abs(number) <= sys.float_info.max else None
    return None

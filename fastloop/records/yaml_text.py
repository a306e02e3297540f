"""YAML as text: dumps plain values so that they are read back unchanged."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

import yaml  # type: ignore[import-untyped,unused-ignore]

_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]{0,17})")
_FLOAT = re.compile(r"[-+]?((0|[1-9][0-9]*)(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?")
_WORDS: Mapping[str, Any] = {"": None, "~": None, "null": None, "true": True, "false": False}


def parse_plain(text: str) -> Any:
    """The value of an unquoted YAML 1.2 scalar; the text itself if it has no other type.

    ``yes``, ``08``, ``0x1F``, ``1_000``, dates, ``.inf`` and numbers that do not fit 64 bits are text.
    """
    if text in _WORDS:
        return _WORDS[text]
    if _INTEGER.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text) and math.isfinite(float(text)) and not text.lstrip("+-").isdigit():
        return float(text)
    return text


def dump_yaml(value: Any) -> str:
    """Plain values as YAML that `load_yaml` reads back as the same values."""
    dumped: str = yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
    return dumped


def dump_on_one_line(patch: Mapping[str, Any] | None) -> str:
    """A nested patch on one line: ``rungs.workers {enabled: true}``."""
    parts = []
    for section, inner in (patch or {}).items():
        if not isinstance(inner, Mapping):
            parts.append(f"{section}: {json.dumps(inner, default=str)}")
            continue
        for name, settings in inner.items():
            if isinstance(settings, Mapping):
                fields = ", ".join(f"{key}: {json.dumps(value, default=str)}" for key, value in settings.items())
                parts.append(f"{section}.{name} {{{fields}}}")
            else:
                parts.append(f"{section}.{name}: {json.dumps(settings, default=str)}")
    return ", ".join(parts)


class _Dumper(yaml.SafeDumper):  # type: ignore[misc,unused-ignore]
    """Quotes texts that `parse_plain` would parse as another type (``1e-4``), and never writes aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_str(self, data: str) -> Any:
        style = None if isinstance(parse_plain(data), str) else "'"
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=style)


_Dumper.add_representer(str, _Dumper.represent_str)

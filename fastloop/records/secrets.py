"""Keeps secrets out of all output: files, reports, argument lists, error texts.

A key names a secret if its last component contains token, key, secret or password (``recipe.api_key``, ``HF_TOKEN``).
Parent components do not matter: ``keys.count`` is a count.
"""

from __future__ import annotations

import dataclasses
import os
import re
import sys
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any, TypeVar

Nested = TypeVar("Nested")

MASK = "***"
SHORTEST = 4
"""Minimum length of a secret that is searched for in other text; shorter ones would mask ordinary words."""

ORDINARY = ("true", "false", "null", "none", "auto", "default")
"""Ordinary values that settings with secret-sounding keys may have: ``use_token=true``."""
SHORTEST_VARIABLE = 8
"""The same for environment variables; many only sound like secrets: ``TOKENIZERS_PARALLELISM=false``."""

_WORDS = re.compile("token|key|secret|password", re.IGNORECASE)
_ASSIGNMENT = re.compile(r"""([\w.-]+)["']?\s*[=:]\s*""")
"""``key=``, ``key:`` or ``"key":`` inside one argument."""
_FIRST = re.compile(r"""["']?([^"',}\]]+)""")
"""The value right after it, if the same argument continues."""


def is_secret(key: object) -> bool:
    """Whether the last component of a key (``a.b.api_key``, ``--api-key``, ``HF_TOKEN``) names a secret."""
    return isinstance(key, str) and bool(_WORDS.search(key.rpartition(".")[2]))


def mask_secrets(nested: Any) -> Any:
    """A copy in which the values of secret keys are ``***``.

    Args:
        nested: mappings, lists and scalars in any nesting: a configuration, an environment, an argument list. In lists,
            ``trainer.api_key=abc``, ``{token: abc}`` and the pair ``--token``, ``abc`` are masked as well.
    """
    return _walk(nested, on_secret=lambda _: MASK, on_text=str)


class Scrubber:
    """Replaces secrets by key, as `mask_secrets` does, and by value: the text of a known secret inside any text."""

    def __init__(self, *nested: Any) -> None:
        """Collect the secrets in nested values, wherever a key names one."""
        found: set[str] = set()
        for each in nested:
            _walk(each, on_secret=lambda value: found.update(_list_texts(value)), on_text=str)
        found |= {part[1].strip() for text in found if (part := _FIRST.match(text))}
        # The longest first: if one secret is a prefix of another, no part of the longer one may remain.
        self._secrets = sorted(filter(_is_hunted, found), key=len, reverse=True)

    def text(self, text: str) -> str:
        """The text without any known secret."""
        for secret in self._secrets:
            text = text.replace(secret, MASK)
        return text

    def scrub(self, nested: Any) -> Any:
        """A copy of nested values without secrets, by key and by value."""
        return _walk(nested, on_secret=lambda _: MASK, on_text=self.text)

    def clean(self, nested: Nested) -> Nested:
        """A copy of records, mappings and lists without secrets, by value only, since fastloop defines their keys."""
        return _clean(nested, self.text) if self._secrets else nested


def make_scrubber(*nested: Any) -> Scrubber:
    """A scrubber that also knows the secrets in this process's arguments and environment variables."""
    variables = {name: value for name, value in os.environ.items() if len(value) >= SHORTEST_VARIABLE}
    return Scrubber(*nested, sys.argv, variables)


def _is_hunted(text: str) -> bool:
    return len(text) >= SHORTEST and text.lower() not in ORDINARY


def _clean(nested: Any, change: Callable[[str], str]) -> Any:
    if isinstance(nested, str):
        return change(nested)
    if dataclasses.is_dataclass(nested) and not isinstance(nested, type):
        fields = (field.name for field in dataclasses.fields(nested))
        return dataclasses.replace(nested, **{name: _clean(getattr(nested, name), change) for name in fields})
    if isinstance(nested, Mapping):
        return {key: _clean(value, change) for key, value in nested.items()}
    if isinstance(nested, (list, tuple)):
        return type(nested)(_clean(item, change) for item in nested)
    return nested


def _walk(nested: Any, *, on_secret: Callable[[Any], Any], on_text: Callable[[str], str]) -> Any:
    """A copy with secret values and plain texts replaced; null and booleans are never secret."""
    if isinstance(nested, str):
        return on_text(nested)
    if isinstance(nested, Mapping):
        return {
            key: on_secret(value)
            if is_secret(key) and _hides(value)
            else _walk(value, on_secret=on_secret, on_text=on_text)
            for key, value in nested.items()
        }
    if isinstance(nested, (list, tuple)):
        return [_scrub_item(before, item, on_secret, on_text) for before, item in pairwise([None, *nested])]
    return nested


def _scrub_item(before: Any, item: Any, on_secret: Callable[[Any], Any], on_text: Callable[[str], str]) -> Any:
    """One element of a list, which may be an argument list."""
    if not isinstance(item, str):
        return _walk(item, on_secret=on_secret, on_text=on_text)
    if isinstance(before, str) and before.startswith("-") and "=" not in before and is_secret(before):
        return item if item.startswith("--") else on_secret(item)
    for assigned in _ASSIGNMENT.finditer(item):
        if is_secret(assigned[1]):  # all the rest: a secret may contain commas and spaces
            return f"{on_text(item[: assigned.end()])}{on_secret(item[assigned.end() :])}"
    return on_text(item)


def _hides(value: Any) -> bool:
    return value is not None and not isinstance(value, (bool, Mapping))


def _list_texts(value: Any) -> list[str]:
    """The texts in which a secret may appear: unchanged, and as Python quotes it."""
    if isinstance(value, (list, tuple)):
        return [text for item in value for text in _list_texts(item)]
    if isinstance(value, str):
        return [value, repr(value)[1:-1]]
    return [str(value)] if _hides(value) else []

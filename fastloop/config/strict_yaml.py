"""Strict YAML that keeps line numbers.

PyYAML reads YAML 1.1, where ``on`` is a boolean, ``12:30`` is 750 and ``1e-4`` is text. Here scalars are those of YAML
1.2: ``true``/``false``, ``null``/``~``, decimal integers and floats; everything else is text, which the schema may
refuse with file, line and key. PyYAML only composes the node graph (no constructor runs, so no code can run), and every
value keeps its line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped,unused-ignore]

from fastloop.errors import ConfigError
from fastloop.records.yaml_text import parse_plain

KeyPath = tuple[str, ...]
"""The path of a value: the keys above it and its own key, or its index in a list."""

COMMAND_LINE = "command line"
MAX_NODES = 10_000
"""Most values that a file may have with its aliases expanded: a hundred bytes can expand to gigabytes."""
MAX_DEPTH = 50

_QUOTED = re.compile(r"'([^']*)'")


@dataclass(frozen=True)
class Origin:
    """Where a value came from."""

    file: str
    """A file name as the user would write it, or ``default``, ``command line``, ``dict``."""
    line: int | None = None

    def __str__(self) -> str:
        return self.file if self.line is None else f"{self.file}:{self.line}"


@dataclass(frozen=True)
class Marked:
    """Plain values and where they were written."""

    value: Any
    """Nested dicts, lists and scalars."""
    lines: Mapping[KeyPath, int]
    """The line of each key (mappings) or item (lists), counted from 1."""
    file: str

    def origin(self, path: KeyPath) -> Origin:
        return Origin(self.file, self.lines.get(path))


def load_yaml(path: Path, *, shown: str | None = None) -> Marked:
    """Read one YAML file with a mapping (an empty file gives an empty mapping).

    Args:
        path: the file.
        shown: its name in error messages and origins; default: the path itself.

    Raises:
        ConfigError: unreadable, not YAML, several documents, tags, duplicate or non-text keys, merge keys, or too many
            values behind aliases; with file, line and, if there is one, the full key.
    """
    shown = shown or str(path)
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        do = "check its permissions" if isinstance(error, PermissionError) else "check the path"
        raise ConfigError(got=shown, why=f"it cannot be read: {error.strerror}", do=do) from None
    except UnicodeDecodeError as error:
        raise ConfigError(got=shown, why=f"byte {error.start} is not UTF-8", do="save the file as UTF-8") from None
    marked = _parse(text, shown)
    if marked.value is None:
        return Marked({}, {}, shown)
    if not isinstance(marked.value, dict):
        raise ConfigError(
            got=f"{shown}:{marked.lines[()]}",
            why="a configuration must be a mapping",
            do="write keys with values, such as run: {max_steps: 200}",
        )
    return marked


def parse_scalar(text: str) -> Any:
    """Read the value of one ``key=value``: a scalar, or ``[…]``, ``{…}`` and quoted text as in a file.

    Text that does not begin with a bracket, a brace or a quote is one scalar, no matter which characters it contains,
    except that tags are refused here too.

    Raises:
        ConfigError: unclosed brackets or quotes, and everything that `load_yaml` refuses.
    """
    text = text.strip()
    return _parse(text, COMMAND_LINE).value if text.startswith(("[", "{", '"', "'", "!")) else parse_plain(text)


class _Loader(yaml.SafeLoader):  # type: ignore[misc,unused-ignore]
    """Composes nodes without guessing types: ``node.tag`` is the explicit tag in the file, or None."""

    yaml_implicit_resolvers: Mapping[Any, Any] = {}

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()
        node = super().compose_node(parent, index)
        if not isinstance(event, yaml.AliasEvent):
            node.tag = event.tag
        return node


def _parse(text: str, shown: str) -> Marked:
    try:
        node = yaml.compose(text, _Loader)
    except yaml.MarkedYAMLError as error:
        raise _explain_bad_yaml(shown, error) from None
    except yaml.reader.ReaderError as error:
        raise ConfigError(
            got=f"{shown}:{text.count(chr(10), 0, error.position) + 1}",
            why=f"it contains the character U+{error.character:04X}",
            do="delete it",
        ) from None
    except RecursionError:
        raise _refuse_depth(shown) from None
    if node is None:
        return Marked(None, {}, shown)
    reader = _Reader(shown)
    return Marked(reader.value(node, ()), reader.lines, shown)


class _Reader:
    """Turns nodes into plain values, and counts them on the way to refuse an alias bomb before it has grown."""

    def __init__(self, shown: str) -> None:
        self.shown = shown
        self.lines: dict[KeyPath, int] = {}
        self._count = 0

    def value(self, node: Any, path: KeyPath) -> Any:
        self._check(node, path)
        self.lines.setdefault(path, node.start_mark.line + 1)
        if isinstance(node, yaml.MappingNode):
            return {key: self.value(child, (*path, key)) for key, child in self._list_entries(node, path)}
        if isinstance(node, yaml.SequenceNode):
            return [self.value(child, (*path, str(index))) for index, child in enumerate(node.value)]
        return parse_plain(node.value) if node.style is None else node.value

    def _list_entries(self, node: Any, path: KeyPath) -> Iterator[tuple[str, Any]]:
        """Yield key and value node of each entry, after checking the key and recording its line."""
        seen: dict[str, int] = {}
        for key_node, child in node.value:
            line = key_node.start_mark.line + 1
            key = self._read_key(key_node, path, line)
            here = (*path, key)
            if key in seen:
                raise ConfigError(
                    got=f"{self._describe_place(here, line)}, first written on line {seen[key]}",
                    why="a key may have only one value; with two, one would silently win",
                    do="delete one of the two lines",
                )
            seen[key] = line
            self.lines[here] = line
            yield key, child

    def _read_key(self, node: Any, path: KeyPath, line: int) -> str:
        fault = _find_key_fault(node)
        if fault is None:
            return str(node.value)
        name = node.value if isinstance(node, yaml.ScalarNode) else "?"
        raise ConfigError(got=self._describe_place((*path, name), line), why=fault[0], do=fault[1])

    def _check(self, node: Any, path: KeyPath) -> None:
        self._count += 1
        line = self.lines.get(path, node.start_mark.line + 1)
        if node.tag is not None:
            raise ConfigError(
                got=f"{self._describe_place(path, line)}: a value with a tag (!…)",
                why="nothing in YAML is built or executed",
                do="write a plain value, or quote text that begins with !",
            )
        if self._count <= MAX_NODES and len(path) <= MAX_DEPTH:
            return
        section = self._describe_place(path[:1], self.lines.get(path[:1], line))
        if len(path) > MAX_DEPTH:
            raise _refuse_depth(section)
        raise ConfigError(
            got=section,
            why=f"with its aliases expanded, the file contains over {MAX_NODES} values",
            do="write the values out, or keep such data outside the configuration",
        )

    def _describe_place(self, path: KeyPath, line: int) -> str:
        where = f"{self.shown}:{line}"
        return f"{'.'.join(path)} ({where})" if path else where


def _find_key_fault(node: Any) -> tuple[str, str] | None:
    """Return why a key cannot be used and what to write instead; None if it can."""
    if not isinstance(node, yaml.ScalarNode) or node.tag is not None:
        return "a key is plain text", "write one word before the colon"
    if node.value == "<<":
        return "merge keys (<<) are not supported", "use base, or write the keys out"
    if node.style is None and not isinstance(parse_plain(node.value), str):
        return "a key is text; this is a number, a boolean or null", f'write "{node.value}"'
    if "." in node.value:
        outer, *inner = node.value.split(".")
        nested = "{" + ": {".join(inner) + ": …" + "}" * len(inner)
        return "keys are nested in YAML; dots are for the command line", f"write {outer}: {nested}"
    return None


def _explain_bad_yaml(shown: str, error: yaml.MarkedYAMLError) -> ConfigError:
    """Return the parser's message without its quotes from the file, which may be part of a secret."""
    mark, begun = error.problem_mark or error.context_mark, error.context_mark
    problem = error.problem or ""
    if begun is not None and error.context and begun.line != mark.line:
        problem = f"{error.context} that began on line {begun.line + 1}, {problem}"
    problem = _QUOTED.sub(lambda quoted: quoted[0] if len(quoted[1]) < 3 or quoted[1][0] == "<" else "'…'", problem)
    do = "indent with spaces" if "\\t" in problem else "fix this line, or the open quote or bracket above it"
    if problem.endswith("but got '{'"):
        do = 'quote what begins with ${: "${run.seed}"'
    if "single document" in (error.context or ""):
        problem, do = "a second document begins here", "keep one document in a file"
    return ConfigError(got=f"{shown}:{mark.line + 1}", why=f"it is not YAML: {problem}", do=do)


def _refuse_depth(where: str) -> ConfigError:
    return ConfigError(
        got=where,
        why=f"it is nested more than {MAX_DEPTH} levels deep, or an alias contains itself",
        do="use fewer levels",
    )

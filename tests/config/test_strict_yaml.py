"""Strict YAML: what scalars mean, what is refused, and that every value knows its line."""

from __future__ import annotations

import errno
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from fastloop.config.strict_yaml import MAX_DEPTH, MAX_NODES, Marked, Origin, load_yaml, parse_scalar
from fastloop.errors import ConfigError
from fastloop.records.yaml_text import dump_yaml, parse_plain


def read(folder: Path, text: str) -> Marked:
    (folder / "my.yaml").write_text(text, encoding="utf-8")
    return load_yaml(folder / "my.yaml", shown="my.yaml")


def refusal(folder: Path, text: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        read(folder, text)
    return caught.value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("true", True),
        ("false", False),
        ("null", None),
        ("~", None),
        ("", None),
        ("0", 0),
        ("-3", -3),
        ("+5", 5),
        ("1e-4", 1e-4),
        ("1.5", 1.5),
        (".5", 0.5),
        ("5.", 5.0),
        ("-2E3", -2000.0),
        # text, where YAML 1.1 or Python would see something else
        *((word, word) for word in ("yes", "no", "on", "off", "y", "True", "TRUE", "Null", "08", "007", "12:30")),
        *((word, word) for word in ("1_000", "0x1F", "0o17", "0b1", "2024-01-01", ".inf", ".nan", "inf", "1e400")),
        *((word, word) for word in ("9" * 19, ".", "e5", "1.2.3", "=", "bf16-mixed")),
    ],
)
def test_plain_scalars(tmp_path: Path, text: str, value: Any) -> None:
    for seen in (parse_plain(text), parse_scalar(text), read(tmp_path, f"a: {text}").value["a"]):
        assert seen == value
        assert type(seen) is type(value)


def test_quoted_scalars_are_text(tmp_path: Path) -> None:
    assert read(tmp_path, "a: '8'\nb: \"true\"\nc: |\n  null\n").value == {"a": "8", "b": "true", "c": "null\n"}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("[1, 2]", [1, 2]),
        ("{a: 1, b: [x]}", {"a": 1, "b": ["x"]}),
        ("'8'", "8"),
        (" 8 ", 8),
        # one scalar, whatever YAML would make of these signs
        *((word, word) for word in ("*.txt", "&a", "a: b", "# not a comment", "- x", "@x", "it's", "${run.seed}")),
    ],
)
def test_values_of_overrides(text: str, value: Any) -> None:
    assert parse_scalar(text) == value


@pytest.mark.parametrize("text", ["[1", "{a: 1", "'x", "!!python/name:os.system", "{a: !x 1}", "{a: 1, a: 2}"])
def test_values_of_overrides_are_strict_too(text: str) -> None:
    with pytest.raises(ConfigError, match="command line:1"):
        parse_scalar(text)


def test_every_key_and_item_knows_its_line(tmp_path: Path) -> None:
    marked = read(
        tmp_path,
        textwrap.dedent("""\
            # a comment
            run:
              seed: 1
              text: |
                two
                lines
            list:
              - 1
              - {a: 2}
            same: &anchor
              b: 3
            again: *anchor
            """),
    )
    assert marked.value == {
        "run": {"seed": 1, "text": "two\nlines\n"},
        "list": [1, {"a": 2}],
        "same": {"b": 3},
        "again": {"b": 3},
    }
    lines = {".".join(path): line for path, line in marked.lines.items() if path}
    assert lines == {
        "run": 2,
        "run.seed": 3,
        "run.text": 4,
        "list": 7,
        "list.0": 8,
        "list.1": 9,
        "list.1.a": 9,
        "same": 10,
        "same.b": 11,
        "again": 12,
        "again.b": 11,  # where it was written
    }
    assert str(marked.origin(("run", "seed"))) == "my.yaml:3"
    assert marked.origin(("not", "there")) == Origin("my.yaml", None)
    assert str(Origin("command line")) == "command line"


@pytest.mark.parametrize("text", ["", "# only a comment\n", "---\n", "null\n"])
def test_an_empty_file_is_an_empty_mapping(tmp_path: Path, text: str) -> None:
    assert read(tmp_path, text) == Marked({}, {}, "my.yaml")


def test_a_byte_order_mark_is_no_key(tmp_path: Path) -> None:
    assert read(tmp_path, "\ufeffa: 1\n").value == {"a": 1}


TAG = ("nothing in YAML is built or executed", "write a plain value, or quote text that begins with !")
TWICE = ("a key may have only one value; with two, one would silently win", "delete one of the two lines")
NOT_TEXT = "a key is text; this is a number, a boolean or null"
OPEN = "fix this line, or the open quote or bracket above it"
DEEP = (f"it is nested more than {MAX_DEPTH} levels deep, or an alias contains itself", "use fewer levels")
TOP = ("a configuration must be a mapping", "write keys with values, such as run: {max_steps: 200}")


@pytest.mark.parametrize(
    ("text", "got", "why", "do"),
    [
        ("a: 1\nb:\n  c: 1\n  c: 2\n", "b.c (my.yaml:4), first written on line 3", *TWICE),
        ("a:\n- b: 1\n  b: 2\n", "a.0.b (my.yaml:3), first written on line 2", *TWICE),
        ("x: 1\na: !!python/object/apply:os.system [ls]\n", "a (my.yaml:2): a value with a tag (!…)", *TAG),
        ("a:\n  b: !x 1\n", "a.b (my.yaml:2): a value with a tag (!…)", *TAG),
        ("a: {b: !!str 5}\n", "a.b (my.yaml:1): a value with a tag (!…)", *TAG),
        ("!!map\na: 1\n", "my.yaml:1: a value with a tag (!…)", *TAG),
        ("a: {1: x}\n", "a.1 (my.yaml:1)", NOT_TEXT, 'write "1"'),
        ("a:\n  true: x\n", "a.true (my.yaml:2)", NOT_TEXT, 'write "true"'),
        ("? [1, 2]\n: x\n", "? (my.yaml:1)", "a key is plain text", "write one word before the colon"),
        ("!x a: 1\n", "a (my.yaml:1)", "a key is plain text", "write one word before the colon"),
        (
            "a: &x {b: 1}\nc:\n  <<: *x\n",
            "c.<< (my.yaml:3)",
            "merge keys (<<) are not supported",
            "use base, or write the keys out",
        ),
        (
            "run.seed.x: 1\n",
            "run.seed.x (my.yaml:1)",
            "keys are nested in YAML; dots are for the command line",
            "write run: {seed: {x: …}}",
        ),
        ("- 1\n", "my.yaml:1", *TOP),
        ("\njust text\n", "my.yaml:2", *TOP),
        ("a: &x [*x]\n", "a (my.yaml:1)", *DEEP),
        (f"x: 1\na: {'[' * 60}{']' * 60}\n", "a (my.yaml:2)", *DEEP),
        (f"a: {'[' * 5000}", "my.yaml", *DEEP),
        (
            "a: 1\n---\nb: 2\n",
            "my.yaml:2",
            "it is not YAML: a second document begins here",
            "keep one document in a file",
        ),
        ("a: b: c\n", "my.yaml:1", "it is not YAML: mapping values are not allowed here", OPEN),
        (
            "a: 1\n\tb: 2\n",
            "my.yaml:2",
            "it is not YAML: found character '\\t' that cannot start any token",
            "indent with spaces",
        ),
        (
            'a: "x\nb: 2\n',
            "my.yaml:3",
            "it is not YAML: while scanning a quoted scalar that began on line 1, found unexpected end of stream",
            OPEN,
        ),
        ("a: 1\nb: \x01\n", "my.yaml:2", "it contains the character U+0001", "delete it"),
        (
            "run: {seed: ${run.max_steps}}\n",
            "my.yaml:1",
            "it is not YAML: expected ',' or '}', but got '{'",
            'quote what begins with ${: "${run.seed}"',
        ),
        # what the parser quotes may be part of a secret
        ("password: *hunter2\n", "my.yaml:1", "it is not YAML: found undefined alias '…'", OPEN),
        ("token: !hunter2\n", "token (my.yaml:1): a value with a tag (!…)", *TAG),
    ],
)
def test_refusals(tmp_path: Path, text: str, got: str, why: str, do: str) -> None:
    assert str(refusal(tmp_path, text)) == f"got {got}\n  why {why}\n  do  {do}"


def test_an_alias_bomb_is_refused_before_it_grows(tmp_path: Path) -> None:
    rows = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    rows += [f"a{row}: &a{row} [{', '.join([f'*a{row - 1}'] * 10)}]" for row in range(1, 9)]
    began = time.monotonic()
    error = refusal(tmp_path, "\n".join(rows))
    assert time.monotonic() - began < 5
    assert error.got == "a3 (my.yaml:4)"
    assert error.why == f"with its aliases expanded, the file contains over {MAX_NODES} values"


def test_too_long_a_list_on_the_command_line() -> None:
    with pytest.raises(ConfigError, match=f"over {MAX_NODES} values"):
        parse_scalar(f"[{'1,' * MAX_NODES}1]")


def test_unreadable_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"got gone.yaml\n  why it cannot be read: No such file or directory"):
        load_yaml(tmp_path / "gone.yaml", shown="gone.yaml")
    (tmp_path / "latin.yaml").write_bytes(b"a: \xe9\n")
    with pytest.raises(ConfigError, match=r"latin.yaml\n  why byte 3 is not UTF-8\n  do  save the file as UTF-8"):
        load_yaml(tmp_path / "latin.yaml")

    def refuse(_: Path) -> bytes:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(ConfigError, match=r"cannot be read: Permission denied\n  do  check its permissions"):
        load_yaml(tmp_path / "latin.yaml")


def test_what_is_dumped_is_read_back_unchanged(tmp_path: Path) -> None:
    texts = [
        "yes",
        "08",
        "12:30",
        "1e-4",
        "1",
        "null",
        "",
        "~",
        "true",
        "0x1F",
        "a: b",
        "it's",
        "é",
        "two\nlines",
        "x" * 300,
    ]
    values = {"texts": texts, "numbers": [1, -2, 1.0, 1e-5, 1e20], "rest": [None, True, {}, []], "1": {"on": "!x"}}
    shared = [1]
    values["twice"] = [shared, shared]
    assert read(tmp_path, dump_yaml(values)).value == values
    assert "&" not in dump_yaml(values)

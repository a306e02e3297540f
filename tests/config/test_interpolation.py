"""``${key}`` is looked up; nothing else behind a dollar sign does anything."""

from __future__ import annotations

from typing import Any

import pytest

from fastloop.config.interpolation import escape, refuse_resolvers, resolve
from fastloop.config.layers import Leaf, Leaves, flatten, list_marked_leaves, merge, nest
from fastloop.config.strict_yaml import Marked
from fastloop.errors import ConfigError


def layer(values: Any) -> Marked:
    """As read from a file with one key to a line."""
    paths = [path for path, _ in flatten(values)]
    return Marked(values, {path: line for line, path in enumerate(paths, 1)}, "my.yaml")


def leaves_of(values: Any) -> Leaves:
    return merge([list_marked_leaves(layer(values))])


@pytest.mark.parametrize(
    ("values", "resolved"),
    [
        ({"run": {"seed": 3}, "a": "${run.seed}"}, {"run": {"seed": 3}, "a": 3}),
        ({"run": {"seed": 3}, "a": "s${run.seed}-${run.seed}"}, {"run": {"seed": 3}, "a": "s3-3"}),
        ({"run": {"seed": 3, "x": "${.seed}"}}, {"run": {"seed": 3, "x": 3}}),
        ({"a": "${b}", "b": "${c}", "c": None}, {"a": None, "b": None, "c": None}),
        ({"a": ["${b}", {"x": "${b}"}], "b": True}, {"a": [True, {"x": True}], "b": True}),
        ({"a": "${b}", "b": {"x": 1, "y": {}}}, {"a": {"x": 1, "y": {}}, "b": {"x": 1, "y": {}}}),
        ({"a": "\\${b}", "b": 1}, {"a": "${b}", "b": 1}),
        ({"a": "\\${oc.env:HOME}", "b": "${a}"}, {"a": "${oc.env:HOME}", "b": "${oc.env:HOME}"}),
        ({"a": "$b {c}", "d": {}}, {"a": "$b {c}", "d": {}}),
    ],
)
def test_resolve(values: Any, resolved: Any) -> None:
    refuse_resolvers(layer(values))
    assert nest(resolve(leaves_of(values))) == resolved


def test_a_resolved_section_keeps_the_origin_of_the_line_that_asked_for_it() -> None:
    leaves = resolve(leaves_of({"b": {"x": 1}, "a": "${b}"}))
    assert leaves[("a", "x")] == Leaf(1, layer({"b": {"x": 1}, "a": 1}).origin(("a",)))


FROM_THE_TOP = "write a key from the top, as in ${run.seed}"
PLAIN = "write a plain value at one of the keys"
BRACES = "fix the braces, or write \\${ for a literal ${"


@pytest.mark.parametrize(
    ("values", "got", "why", "do"),
    [
        ({"x": 1, "a": {"b": "${nope}"}}, "a.b: '${nope}' (my.yaml:2)", "there is no key nope", FROM_THE_TOP),
        ({"a": [1, "${run.nope}"]}, "a: [1, '${run.nope}'] (my.yaml:1)", "there is no key run.nope", FROM_THE_TOP),
        ({"x": "${a.b}", "a": {"c": 1}}, "x: '${a.b}' (my.yaml:1)", "there is no key a.b", FROM_THE_TOP),
        ({"x": 1, "a": "${b}", "b": "${a}"}, "a: '${b}' (my.yaml:2)", "it refers back to itself", PLAIN),
        ({"a": "x${a}"}, "a: 'x${a}' (my.yaml:1)", "it refers back to itself", PLAIN),
        ({"a": {"b": "${a}"}}, "a.b: '${a}' (my.yaml:1)", "it refers back to itself", PLAIN),
        ({"x": 1, "a": "${b"}, "a: '${b' (my.yaml:2)", "the text inside ${…} is not a key", BRACES),
        ({"a": "${}"}, "a: '${}' (my.yaml:1)", "the text inside ${…} is not a key", BRACES),
        # text under a secret key is not shown, whatever it looks like
        ({"a_key": "${hunter2}"}, "a_key: *** (my.yaml:1)", "there is no such key", FROM_THE_TOP),
        ({"password": "hun${ter2"}, "password: *** (my.yaml:1)", "the text inside ${…} is not a key", BRACES),
    ],
)
def test_what_cannot_be_resolved(values: Any, got: str, why: str, do: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(leaves_of(values))
    assert str(caught.value) == f"got {got}\n  why {why}\n  do  {do}"


@pytest.mark.parametrize(
    "text",
    [
        "${oc.env:HOME}",
        "x-${oc.env:HOME}",
        "${ oc.env : HOME }",
        "${oc.env:HOME,${a}}",
        "${a.${oc.env:HOME}}",
        "${${a}:HOME}",
        "\\\\${oc.env:HOME}",
        "\\${a} ${oc.env:HOME}",
        "{${oc.env:HOME}}",
        "${oc.env:HOME",
    ],
)
def test_resolvers_are_refused(text: str) -> None:
    for value in (text, [1, {"x": text}]):
        with pytest.raises(ConfigError) as caught:
            refuse_resolvers(layer({"x": 1, "a": {"b": value}}))
        assert str(caught.value) == (
            f"got a.b: {value!r} (my.yaml:2)\n"
            "  why only keys are looked up; resolvers are not run\n"
            "  do  write the value, or a key as in ${run.seed}"
        )


@pytest.mark.parametrize("text", ["a: b", "${a}: ${b}", "{a:b}", "12:30", "\\${oc.env:HOME}", "$oc.env:HOME"])
def test_colons_elsewhere_are_just_colons(text: str) -> None:
    assert refuse_resolvers(layer({"a": text})) is None  # it raises where it refuses


def test_a_key_that_names_a_resolver_is_only_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTLOOP_TEST", "leaked")
    values = {"a": "${${b}}", "b": "oc.env:FASTLOOP_TEST"}
    refuse_resolvers(layer(values))
    with pytest.raises(ConfigError, match=r"there is no key oc\.env:FASTLOOP_TEST"):
        resolve(leaves_of(values))


@pytest.mark.parametrize("text", ["plain", "${a}", "\\${a}", "\\\\${a}", "x\\y", "a${", "$", "\\$"])
def test_escaped_values_are_read_back_unchanged(text: str) -> None:
    values = {"x": text, "y": [text, {"z": text}], "n": 1}
    written = escape(values)
    refuse_resolvers(layer(written))
    assert nest(resolve(leaves_of({**written, "go": "${n}"})))["y"] == values["y"]

"""Types are the dataclasses' annotations, taken at their word; messages say key, file, line and what was meant."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from fastloop.config.schema import build, check_keys, check_type, read_settings
from fastloop.config.strict_yaml import Marked, Origin
from fastloop.errors import ConfigError

HERE = Origin("my.yaml", 7)


@dataclass(frozen=True, kw_only=True)
class Inner:
    enabled: bool = False
    count: int = 1
    shape: tuple[int, ...] = (1,)

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ConfigError(key="inner.count", got=f"inner.count={self.count}", why="too few", do="write 1")
        if self.count > 100:
            raise ConfigError(key="outer.inner.count", got="a crowd", why="too many", do="write 100")
        if self.count == 42:
            raise ConfigError(got="42", why="no key", do="write 43")


@dataclass(frozen=True, kw_only=True)
class Outer:
    inner: Inner = field(default_factory=Inner)
    rate: float = 0.5

    def __post_init__(self) -> None:
        if self.rate == 13:
            raise ConfigError(key="inner", got="rate 13 with inner", why="clash", do="write 12")


SCHEMA: dict[str, Any] = {"free": dict, "outer": Outer, "flag": bool}


@pytest.mark.parametrize(
    ("value", "kind", "read"),
    [
        (True, bool, True),
        (3, int, 3),
        (3, float, 3.0),
        (0.5, float, 0.5),
        ("x", str, "x"),
        ("8", str, "8"),
        (None, str | None, None),
        ("x", str | None, "x"),
        ("08", str | None, "08"),
        (4, int | Literal["auto"], 4),
        ("auto", int | Literal["auto"], "auto"),
        ("auto", int | str, "auto"),
        ("8x", int | str, "8x"),
        (None, bool | None, None),
        ("b", Literal["a", "b"], "b"),
        ([1, 2], tuple[int, ...], (1, 2)),
        ([], tuple[int, ...], ()),
        ([1, 0.5], tuple[float, float], (1.0, 0.5)),
    ],
)
def test_values_of_the_type(value: Any, kind: Any, read: Any) -> None:
    result = check_type(value, kind, "a.b", HERE)
    assert result == read
    assert type(result) is type(read)


NUMBER_OR_AUTO = "it must be an integer or 'auto'"
CHOICES = "one of bf16-mixed, 16-mixed, tf32"
MODE = Literal["bf16-mixed", "16-mixed", "tf32"]


@pytest.mark.parametrize(
    ("value", "kind", "got", "why", "do"),
    [
        ("yes", bool, "'yes'", "it must be true or false; 'yes' is text", "true"),
        ("on", bool, "'on'", "it must be true or false; 'on' is text", "true"),
        ("True", bool, "'True'", "it must be true or false; 'True' is text", "true"),
        ("no", bool, "'no'", "it must be true or false; 'no' is text", "false"),
        ("maybe", bool, "'maybe'", "it must be true or false; 'maybe' is text", "true or false"),
        (1, bool, "1", "it must be true or false; 1 is an integer", "true"),
        (0, bool, "0", "it must be true or false; 0 is an integer", "false"),
        (None, bool, "null", "it must be true or false; null is no value", "true or false"),
        ("off", bool | None, "'off'", "it must be true, false or null; 'off' is text", "false"),
        ("08", int, "'08'", "it must be an integer; '08' is text", "8"),
        ("12:30", int, "'12:30'", "it must be an integer; '12:30' is text", "an integer"),
        ("1_000", int, "'1_000'", "it must be an integer; '1_000' is text", "1000"),
        ("0x1F", int, "'0x1F'", "it must be an integer; '0x1F' is text", "31"),
        ("8", int, "'8'", "it must be an integer; '8' is text", "8, without quotes"),
        (8.0, int, "8.0", "it must be an integer; 8.0 is a float", "8"),
        (8.5, int, "8.5", "it must be an integer; 8.5 is a float", "an integer"),
        (True, int, "true", "it must be an integer; true is a boolean", "an integer"),
        ([1], int, "[1]", "it must be an integer; [1] is a list", "an integer"),
        ("08", int | Literal["auto"], "'08'", f"{NUMBER_OR_AUTO}; '08' is text", "8"),
        ("atuo", int | Literal["auto"], "'atuo'", f"{NUMBER_OR_AUTO}; 'atuo' is not", "auto"),
        ("many", int | Literal["auto"], "'many'", f"{NUMBER_OR_AUTO}; 'many' is not", "an integer or 'auto'"),
        ("08", int | str, "'08'", "it must be an integer or text; '08' is text", "8"),
        ("1e-4", float, "'1e-4'", "it must be a number; '1e-4' is text", "0.0001, without quotes"),
        (math.nan, float, "nan", "it must be a number; nan is not finite", "a number"),
        (
            "9" * 400,
            int | float,
            "<text of 402 characters>",
            "it must be an integer or a number; <text of 402 characters> is text",
            "an integer or a number",
        ),
        (
            10**400,
            float,
            "<an integer of 401 characters>",
            "it must be a number; <an integer of 401 characters> is an integer",
            "a number",
        ),
        ("much", float | None, "'much'", "it must be a number or null; 'much' is text", "a number or null"),
        (1, str, "1", "it must be text; 1 is an integer", '"1", in quotes'),
        (False, str | None, "false", "it must be text or null; false is a boolean", '"false", in quotes'),
        ("bf16", MODE, "'bf16'", f"it must be {CHOICES}; 'bf16' is not", "bf16-mixed"),
        ("fp8", MODE, "'fp8'", f"it must be {CHOICES}; 'fp8' is not", CHOICES),
        (16, MODE, "16", f"it must be {CHOICES}; 16 is an integer", "16-mixed"),
        (
            [1, "x"],
            tuple[int, ...],
            "[1, 'x']",
            "it must be a list of integers; [1, 'x'] is a list",
            "a list of integers",
        ),
        (25, tuple[int, ...], "25", "it must be a list of integers; 25 is an integer", "a list of integers"),
        ([1], tuple[float, float], "[1]", "it must be a list of 2 numbers; [1] is a list", "a list of 2 numbers"),
        ({"x": 1}, int, "{'x': 1}", "it must be an integer; {'x': 1} is a mapping", "an integer"),
        (
            "x" * 100,
            int,
            "<text of 102 characters>",
            "it must be an integer; <text of 102 characters> is text",
            "an integer",
        ),
    ],
)
def test_values_of_another_type(value: Any, kind: Any, got: str, why: str, do: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_type(value, kind, "a.b", HERE)
    assert str(caught.value) == f"got a.b: {got} (my.yaml:7)\n  why {why}\n  do  write {do}"
    assert caught.value.key == "a.b"


def test_the_value_of_a_secret_is_not_shown() -> None:
    with pytest.raises(ConfigError) as caught:
        check_type("08", int, "a.api_key", HERE)
    assert str(caught.value) == "got a.api_key: *** (my.yaml:7)\n  why it must be an integer\n  do  write an integer"


OUTER_HAS = "it has inner, rate"
INNER_HAS = "it has enabled, count, shape"
TOP_HAS = "it has free, outer, flag"


@pytest.mark.parametrize(
    ("value", "line", "got", "why", "do"),
    [
        ({"outre": {}}, ("outre",), "outre", f"a configuration has no key outre; {TOP_HAS}", "write outer"),
        ({"rate": 1}, ("rate",), "rate", f"a configuration has no key rate; {TOP_HAS}", "write outer.rate"),
        (
            {"zzz": 1},
            ("zzz",),
            "zzz",
            f"a configuration has no key zzz; {TOP_HAS}",
            "write one of these, or delete the line",
        ),
        (
            {"outer": {"iner": {}}},
            ("outer", "iner"),
            "outer.iner",
            f"outer has no key iner; {OUTER_HAS}",
            "write inner",
        ),
        (
            {"outer": {"inner": {"on": True}}},
            ("outer", "inner", "on"),
            "outer.inner.on",
            f"outer.inner has no key on; {INNER_HAS}",
            "write enabled",
        ),
        (
            {"outer": {"inner": True}},
            ("outer", "inner"),
            "outer.inner: true",
            "outer.inner is a section, not a single value",
            "write inner: {enabled: true}, or delete the line",
        ),
        (
            {"outer": None},
            ("outer",),
            "outer: null",
            "outer is a section, not a single value",
            "write outer: {inner: …}, or delete the line",
        ),
        (
            {"outer": ["inner", {"typo": 1}]},
            ("outer",),
            "outer: ['inner', {'typo': 1}]",
            "outer is a section, not a single value",
            "write outer: {inner: {enabled: true}}, or delete the line",
        ),
        (
            {"outer": [{"inner": {"count": 3}}]},
            ("outer",),
            "outer: [{'inner': {'count': 3}}]",
            "outer is a section, not a single value",
            "write outer: {inner: {enabled: true}}, or delete the line",
        ),
        (
            {"free": [{"token": "hunter2"}]},
            ("free",),
            "free: [{'token': '***'}]",
            "free is a section, not a single value",
            "write free: {key: …}, or delete the line",
        ),
        (
            {"outer": {"inner": {"count": {"x": 1}}}},
            ("outer", "inner", "count"),
            "outer.inner.count",
            "outer.inner.count takes a single value, not a section",
            "write count: an integer",
        ),
        (
            {"flag": {}},
            ("flag",),
            "flag",
            "flag takes a single value, not a section",
            "write flag: true or false",
        ),
    ],
)
def test_keys(value: Any, line: tuple[str, ...], got: str, why: str, do: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_keys(value, SCHEMA, Marked(value, {line: 7}, "my.yaml").origin)
    assert str(caught.value) == f"got {got} (my.yaml:7)\n  why {why}\n  do  {do}"


def test_known_keys_pass() -> None:
    value = {"free": {"anything": {"goes": 1}}, "outer": {"inner": {"count": "not checked here"}}, "flag": 1}
    assert check_keys(value, SCHEMA, Marked(value, {}, "my.yaml").origin) is None  # it raises where it refuses
    assert check_keys({"free": {}, "outer": {}}, SCHEMA, lambda path: HERE) is None


def outer(*, count: Any = 1, rate: Any = 0.5) -> Any:
    values = {"inner": {"enabled": True, "count": count, "shape": [1, 2]}, "rate": rate}
    names = ("inner.enabled", "inner.count", "inner.shape", "rate")
    origins = {f"outer.{name}": Origin("my.yaml", line) for line, name in enumerate(names, 1)}
    return build(Outer, values, "outer", {"other.inner.count": Origin("wrong"), **origins})


def test_build() -> None:
    assert outer(count=3, rate=1) == Outer(inner=Inner(enabled=True, count=3, shape=(1, 2)), rate=1.0)


@pytest.mark.parametrize(
    ("count", "rate", "got", "key"),
    [
        (0, 0.5, "outer.inner.count=0 (my.yaml:2)", "outer.inner.count"),
        (101, 0.5, "outer.inner.count: a crowd (my.yaml:2)", "outer.inner.count"),
        (42, 0.5, "outer.inner: 42", "outer.inner"),
        (1, 13, "rate 13 with outer.inner", "outer.inner"),
        ("x", 0.5, "outer.inner.count: 'x' (my.yaml:2)", "outer.inner.count"),
    ],
)
def test_what_a_record_refuses_gets_its_key_and_place(count: Any, rate: Any, got: str, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        outer(count=count, rate=rate)
    assert (caught.value.got, caught.value.key) == (got, key)


def test_settings_of_a_free_section() -> None:
    origins = {"recipe.inner.count": HERE, "recipe.rate": HERE, "recipe.iner.x": HERE}
    assert read_settings(Outer, {"inner": {"count": 3}}, "recipe", origins) == Outer(inner=Inner(count=3))
    assert read_settings(Outer, {}, "recipe", {}) == Outer()


@pytest.mark.parametrize(
    ("values", "got", "do"),
    [
        ({"iner": {"x": 1}}, "recipe.iner (my.yaml:7)", "write inner"),
        ({"inner": {"count": "08"}}, "recipe.inner.count: '08' (my.yaml:7)", "write 8"),
        ({"inner": {"count": 0}}, "recipe.inner.count=0 (my.yaml:7)", "write 1"),
        ({"inner": 5}, "recipe.inner: 5 (my.yaml:7)", "write inner: {enabled: true}, or delete the line"),
    ],
)
def test_faults_in_the_settings_of_a_free_section(values: Any, got: str, do: str) -> None:
    origins = {"recipe.iner.x": HERE, "recipe.inner.count": HERE}
    with pytest.raises(ConfigError) as caught:
        read_settings(Outer, values, "recipe", origins)
    assert (caught.value.got, caught.value.do) == (got, do)

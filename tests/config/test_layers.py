"""Which files make up a configuration, what the command line adds, and what lies on top of what."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fastloop.config.layers import (
    Layer,
    classify_patch,
    list_marked_leaves,
    merge,
    nest,
    override_layers,
    read_dict_layers,
    read_file_layers,
    read_patch_layer,
)
from fastloop.errors import ConfigError


def write(folder: Path, **files: str) -> None:
    for name, text in files.items():
        (folder / f"{name}.yaml").write_text(text, encoding="utf-8")


def names(layers: list[Layer]) -> list[str]:
    return [layer.marked.file for layer in layers]


def merged(*values: Any) -> Any:
    return nest(merge(list_marked_leaves(layer.marked) for each in values for layer in read_dict_layers(each, Path())))


def test_bases_come_first_from_left_to_right_each_after_its_own(tmp_path: Path) -> None:
    write(tmp_path, mine="base: [a.yaml, b.yaml]\nx: 1", a="base: deep.yaml", b="base: [deep.yaml]", deep="y: 1")
    layers = read_file_layers("mine.yaml", tmp_path)
    assert names(layers) == ["deep.yaml", "a.yaml", "deep.yaml", "b.yaml", "mine.yaml"]
    assert [layer.depth for layer in layers] == [2, 1, 2, 1, 0]
    assert [layer.marked.value for layer in layers] == [{"y": 1}, {}, {"y": 1}, {}, {"x": 1}]


def test_a_base_path_starts_at_the_file_that_says_it(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    write(tmp_path, top="x: 1")
    write(tmp_path / "sub", mine="base: ../top.yaml")
    assert names(read_file_layers("sub/mine.yaml", tmp_path)) == ["top.yaml", "sub/mine.yaml"]
    assert names(read_dict_layers({"base": "top.yaml", "x": 1}, tmp_path)) == ["top.yaml", "dict"]


ROUND = "the bases form a cycle: "
NAME_OR_PATH = ("a base is a shipped name or a path", "write a name, a path, or a list of them")


@pytest.mark.parametrize(
    ("files", "got", "why", "do"),
    [
        (
            {"a": "base: b.yaml", "b": "x: 1\nbase: a.yaml"},
            "base: a.yaml (b.yaml:2)",
            f"{ROUND}a.yaml -> b.yaml -> a.yaml",
            "delete one of these base lines",
        ),
        (
            {"a": "base: a.yaml"},
            "base: a.yaml (a.yaml:1)",
            f"{ROUND}a.yaml -> a.yaml",
            "delete one of these base lines",
        ),
        (
            {"a": "base:\n- c.yaml\n- b.yaml", "b": "base: c.yaml", "c": "base: ./b.yaml"},
            "base: c.yaml (b.yaml:1)",
            f"{ROUND}a.yaml -> c.yaml -> b.yaml -> c.yaml",
            "delete one of these base lines",
        ),
        (
            {"a": "base: b.yaml", "b": "x: 1\nbase:\n  - gone.yaml"},
            "base: gone.yaml (b.yaml:3)",
            "there is no such file (bases: a.yaml -> b.yaml -> gone.yaml)",
            "check the path; it starts at {folder}",
        ),
        ({"a": "base: {x: 1}"}, "base: {'x': 1} (a.yaml:1)", *NAME_OR_PATH),
        ({"a": "base: [a, 1]"}, "base: ['a', 1] (a.yaml:1)", *NAME_OR_PATH),
        ({"a": "base:"}, "base: None (a.yaml:1)", *NAME_OR_PATH),
    ],
)
def test_bases_that_lead_nowhere(tmp_path: Path, files: dict[str, str], got: str, why: str, do: str) -> None:
    write(tmp_path, **files)
    with pytest.raises(ConfigError) as caught:
        read_file_layers("a.yaml", tmp_path)
    assert str(caught.value) == f"got {got}\n  why {why}\n  do  {do.format(folder=tmp_path)}"


def test_an_unknown_base_shows_the_chain(tmp_path: Path) -> None:
    write(tmp_path, a="base: b.yaml", b="base: nowhere")
    with pytest.raises(ConfigError) as caught:
        read_file_layers("a.yaml", tmp_path)
    assert caught.value.got == "base: nowhere (b.yaml:1)"
    assert "(bases: a.yaml -> b.yaml -> nowhere)" in caught.value.why


def test_a_patch_has_no_base(tmp_path: Path) -> None:
    write(tmp_path, patch="x: 1\nbase: a.yaml", fine="x: 1")
    assert read_patch_layer("fine.yaml", tmp_path).marked.value == {"x": 1}
    with pytest.raises(ConfigError) as caught:
        read_patch_layer("patch.yaml", tmp_path)
    assert caught.value.got == "base (patch.yaml:2)"
    assert caught.value.why == "a patch may not have a base"


@pytest.mark.parametrize(
    ("below", "above", "result"),
    [
        ({"a": {"b": 1, "c": 2}}, {"a": {"c": 3, "d": 4}}, {"a": {"b": 1, "c": 3, "d": 4}}),
        ({"a": [1, 2, 3]}, {"a": [9]}, {"a": [9]}),  # lists replace
        ({"a": {"b": 1}}, {"a": 5}, {"a": 5}),
        ({"a": 5}, {"a": {"b": 1}}, {"a": {"b": 1}}),
        ({"a": {"b": 1}}, {"a": {}}, {"a": {"b": 1}}),
        ({"a": {}}, {"a": {"b": {"c": 1}}}, {"a": {"b": {"c": 1}}}),
        ({"a": {"b": 1}}, {"a": {"b": None}}, {"a": {"b": None}}),
        ({"ab": 1, "a": {"x": 2}}, {"a": 3}, {"ab": 1, "a": 3}),
        ({"a": (1, 2)}, {}, {"a": [1, 2]}),
    ],
)
def test_merge(below: Any, above: Any, result: Any) -> None:
    assert merged(below, above) == result


def test_merge_keeps_the_origin_of_what_lies_on_top(tmp_path: Path) -> None:
    write(tmp_path, a="base: b.yaml\nrun:\n  seed: 1", b="run: {seed: 2, x: [1]}\ny: 3")
    leaves = merge(list_marked_leaves(layer.marked) for layer in read_file_layers("a.yaml", tmp_path))
    assert {".".join(path): str(leaf.origin) for path, leaf in leaves.items()} == {
        "run.seed": "a.yaml:3",
        "run.x": "b.yaml:1",
        "y": "b.yaml:2",
    }


@pytest.mark.parametrize(
    ("arguments", "values"),
    [
        (["a.b=1"], {"a": {"b": 1}}),
        (["a.b=1,c.d=[1,2]"], {"a": {"b": 1}, "c": {"d": [1, 2]}}),
        (["a=1", "a=2"], {"a": 2}),
        (["a={b: 1, c: [2, 3]},d=4"], {"a": {"b": 1, "c": [2, 3]}, "d": 4}),
        (['a="x,y",b=1'], {"a": "x,y", "b": 1}),
        (["a='it''s, b',c=1"], {"a": "it's, b", "c": 1}),
        (['a="say \\"x, y\\"",c=1'], {"a": 'say "x, y"', "c": 1}),
        (["a=it's,b=isn't"], {"a": "it's", "b": "isn't"}),
        (["a=['x,y', \"[z\"]"], {"a": ["x,y", "[z"]}),
        (["a=x=y"], {"a": "x=y"}),
        (["a=)],b=1"], {"a": ")]", "b": 1}),
        (["a=null,b=true,c=1e-4"], {"a": None, "b": True, "c": 1e-4}),
        (["a=${run.seed}"], {"a": "${run.seed}"}),
        ([" a.b = 1 , c = 2"], {"a": {"b": 1}, "c": 2}),
    ],
)
def test_overrides(arguments: list[str], values: Any) -> None:
    layers = override_layers(arguments)
    assert nest(merge(list_marked_leaves(layer.marked) for layer in layers)) == values
    assert {str(layer.marked.origin(("a",))) for layer in layers} == {"command line"}


KEY_VALUE = (
    "each part between commas has to be key=value",
    "write key=value, and quote a value that holds commas",
)
LEFT_OPEN = ("a bracket or brace is left open", "close it, or quote the whole value")


@pytest.mark.parametrize(
    ("argument", "got", "why", "do"),
    [
        ("run.seed", "run.seed", "it has no = and no value", "write run.seed=VALUE"),
        ("a=x,y", "a=x,y", *KEY_VALUE),
        ("a=1,", "a=1,", *KEY_VALUE),
        ("a=1,fused", "a=1,fused", KEY_VALUE[0], "write rungs.fused.enabled=true"),
        ("=1", "=1", *KEY_VALUE),
        ("a..b=1", "a..b=1", *KEY_VALUE),
        ("a b=1", "a b=1", *KEY_VALUE),
        ("a.b=", "a.b=", "a.b has no value", "write a.b=null to mean nothing"),
        ("a=[1,2", "a=[1,2", *LEFT_OPEN),
        ("a={b: 1", "a={b: 1", *LEFT_OPEN),
        ("base=x", "base=x", "base belongs in a file", "put base into a YAML file and pass that file"),
        ("base.x=y", "base.x=y", "base belongs in a file", "put base into a YAML file and pass that file"),
        (
            "a=!!python/name:os.system",
            "a=!!python/name:os.system",
            "nothing in YAML is built or executed",
            "write a plain value, or quote text that begins with !",
        ),
        # nothing after a secret's key is shown: the comma may be part of the secret
        ("recipe.api_key=hun,ter2", "recipe.api_key=***", *KEY_VALUE),
        ("a=1,recipe.password=[hunter2", "a=1,recipe.password=***", *LEFT_OPEN),
        ("a={token: hunter2", "a={token: ***", *LEFT_OPEN),
    ],
)
def test_overrides_that_cannot_be_read(argument: str, got: str, why: str, do: str) -> None:
    with pytest.raises(ConfigError) as caught:
        override_layers([argument])
    assert str(caught.value) == f"got {got!r} (command line)\n  why {why}\n  do  {do}"


def test_as_patch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "configs" / "rungs").mkdir(parents=True)
    (tmp_path / "configs" / "rungs" / "amp.yaml").touch()
    monkeypatch.setattr("fastloop.config.shipped.__file__", str(tmp_path / "fastloop" / "config" / "shipped.py"))
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "net.yaml").touch()
    assert classify_patch("amp") == ("more", "amp")
    assert classify_patch("my.yaml") == ("more", "my.yaml")
    assert classify_patch("./lr=3/my.yaml") == ("more", "./lr=3/my.yaml")
    assert classify_patch("run.seed=1,run.x=2") == ("override", "run.seed=1,run.x=2")
    assert classify_patch("data.dir=./x.yaml") == ("override", "data.dir=./x.yaml")
    with pytest.raises(ConfigError, match=r"got 'anp'\n  why no recipe, .* has this name\n  do  write amp"):
        classify_patch("anp")
    with pytest.raises(ConfigError, match=r"got 'net'\n  why it is a recipe, but --vs takes a patch, rung or ladder"):
        classify_patch("net")
    with pytest.raises(ConfigError, match=r"got 'amp\+net'\n.*\n  do  write amp,net"):
        classify_patch("amp+net")
    with pytest.raises(ConfigError, match=r"got 'amp\+nets'\n.*no recipe, ladder, climb or rung has this name"):
        classify_patch("amp+nets")


@pytest.mark.parametrize(
    ("values", "got"),
    [
        ({"run": {1: 2}}, "run.1 (dict)"),
        ({"run.seed": 2}, "run.seed (dict)"),
        ({"run": {"seed": Path("x")}}, f"run.seed: a {type(Path('x')).__name__} (dict)"),
        ({"a": [b"x"]}, "a.0: a bytes (dict)"),
        ({"a": {1, 2}}, "a: a set (dict)"),
    ],
)
def test_dicts_hold_plain_values(values: Any, got: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_dict_layers(values, Path())
    assert caught.value.got == got


def test_omegaconf_containers_are_mappings_too() -> None:
    from omegaconf import OmegaConf

    assert merged(OmegaConf.create({"a": {"b": [1, 2], "c": "${a.b}"}})) == {"a": {"b": [1, 2], "c": [1, 2]}}


@pytest.mark.parametrize("text", ["amp", "safe", "my.yaml"])
def test_a_patch_among_the_overrides_is_told_where_it_belongs(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        override_layers([text])
    assert caught.value.do == f"write --config {text}"
    with pytest.raises(ConfigError) as other:
        override_layers(["max_steps"])
    assert other.value.do.startswith("write key=value")


@pytest.mark.parametrize(
    ("text", "do"),
    [("recipe.size", "write recipe.size=VALUE"), ("rungs.amp", "write rungs.amp.enabled=true")],
)
def test_a_key_without_its_value_is_told_how_to_get_one(text: str, do: str) -> None:
    with pytest.raises(ConfigError, match="it has no = and no value") as caught:
        override_layers([f"run.seed=1,{text}"])
    assert caught.value.do == do
    with pytest.raises(ConfigError, match="it has no = and no value") as caught:
        classify_patch(text)
    assert caught.value.do == do


def test_an_override_in_place_of_a_patch_is_told_where_it_belongs(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        read_patch_layer("recipe.api_key=hunter2", tmp_path)
    assert caught.value.got == "--config recipe.api_key=***" and "without --config" in caught.value.do
    (tmp_path / "lr=3.yaml").write_text("run: {seed: 3}")
    assert read_patch_layer("lr=3.yaml", tmp_path).marked.value == {"run": {"seed": 3}}

"""fastloop recipes and fastloop rungs."""

from __future__ import annotations

import sys

import pytest
import yaml

from fastloop.commands import listing
from fastloop.config.shipped import find_shipped
from fastloop.errors import ConfigError
from fastloop.ladder import Ladder, read_manual

RUNGS = dict(Ladder().rungs())


def test_every_recipe_with_its_first_line() -> None:
    before = set(sys.modules)
    answer = listing.list_recipes()
    assert answer.json is not None and answer.json["schema"] == 1
    rows = {row["name"]: row["summary"] for row in answer.json["recipes"]}
    assert set(rows) == set(find_shipped("recipes")) >= {"cifar10", "gpt2", "resnet50"}
    for name, path in find_shipped("recipes").items():
        assert rows[name] and f'"""{rows[name]}' in path.with_suffix(".py").read_text(encoding="utf-8")
        assert f"{name:<10} {rows[name]}" in answer.text.splitlines()
    assert not [name for name in set(sys.modules) - before if "recipe" in name], "a recipe was imported"


def test_every_rung_in_planning_order() -> None:
    answer = listing.list_rungs(None)
    assert answer.json is not None
    assert [row["name"] for row in answer.json["rungs"]] == list(RUNGS)
    assert [line.split()[0] for line in answer.text.splitlines()] == list(RUNGS)
    assert all(row["summary"] == read_manual(row["name"]).splitlines()[0] for row in answer.json["rungs"])


@pytest.mark.parametrize("name", RUNGS)
def test_a_rungs_page_ends_with_yaml_that_is_its_defaults(name: str) -> None:
    answer = listing.list_rungs(name)
    page, _, settings = answer.text.partition(f"\nrungs.{name}:\n")
    assert page.startswith(read_manual(name)) and answer.json is not None
    defaults = {key: list(value) if isinstance(value, tuple) else value for key, value in vars(RUNGS[name]).items()}
    assert yaml.safe_load(settings) == defaults and answer.json["settings"] == vars(RUNGS[name])


def test_an_unknown_rung() -> None:
    with pytest.raises(ConfigError) as caught:
        listing.list_rungs("compil")
    assert (caught.value.got, caught.value.do) == ("rung 'compil'", "write compile")
    assert all(name in caught.value.why for name in RUNGS)


def test_a_rung_to_come_is_told_apart_from_a_typing_error() -> None:
    with pytest.raises(ConfigError) as caught:
        listing.list_rungs("shard")
    assert caught.value.why.startswith("this version does not have it yet") and caught.value.do == "write one of them"

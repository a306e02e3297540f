"""fastloop config show and config diff."""

from __future__ import annotations

from pathlib import Path

import pytest

from fastloop.commands import config
from fastloop.errors import ConfigError

pytestmark = pytest.mark.usefixtures("here")


@pytest.mark.short
def test_every_value_with_the_place_it_came_from(here: Path) -> None:
    (here / "mine.yaml").write_text("base: cifar10\nrun:\n  max_steps: 7\n  seed: ${run.devices}\n")
    (here / "more.yaml").write_text("rungs:\n  amp: {enabled: true}\n")
    answer = config.show_config(
        "mine.yaml", more=["more.yaml"], overrides=["rungs.workers.count=3,trainer.benchmark=true"]
    )
    lines = {line.split("  #")[0].rstrip(): line.split("  # ")[1] for line in answer.text.splitlines()}
    assert lines["run.max_steps: 7"] == "mine.yaml:3" and lines["run.seed: 1"] == "mine.yaml:4"
    assert lines["recipe.size: 'default'"].startswith("recipes/cifar10.yaml:")
    assert lines["rungs.amp.enabled: true"] == "more.yaml:2" and lines["rungs.amp.mode: 'bf16-mixed'"] == "default"
    assert lines["rungs.workers.count: 3"] == lines["trainer.benchmark: true"] == "command line"
    assert answer.json is not None and answer.json["schema"] == 1
    assert {"key": "run.max_steps", "value": 7, "origin": "mine.yaml:3"} in answer.json["values"]
    assert len(answer.json["values"]) == len(lines)


def test_origins_stand_in_one_column(here: Path) -> None:
    (here / "mine.yaml").write_text(f"recipe: {{data: {'x' * 60}}}\n")
    columns = [line.index("  # ") for line in config.show_config("mine.yaml", more=[], overrides=[]).text.splitlines()]
    assert len(set(columns)) == 2 and max(columns) > 60, "one long value must not push all others away"


def test_secrets_are_masked(here: Path) -> None:
    (here / "mine.yaml").write_text("recipe: {api_key: hunter2hunter2, path: s3://hunter2hunter2@host}\n")
    answer = config.show_config("mine.yaml", more=[], overrides=[])
    assert "recipe.api_key: '***'" in answer.text and "hunter2" not in f"{answer.text}{answer.json}"
    diff = config.diff_configs("mine.yaml", "safe")
    assert "recipe.api_key: '***' -> '-'" in diff.text and "hunter2" not in f"{diff.text}{diff.json}"


def test_what_differs() -> None:
    answer = config.diff_configs("safe", "bf16")
    assert answer.text.splitlines() == [
        "rungs.amp.enabled: false -> true",
        "rungs.layout.enabled: false -> true",
        "rungs.attention.enabled: false -> true",
        "rungs.fused.enabled: false -> true",
    ]
    assert answer.json is not None
    assert answer.json["differences"][0] == {"key": "rungs.amp.enabled", "a": False, "b": True}


def test_lists_are_compared_whole(here: Path) -> None:
    (here / "a.yaml").write_text("trainer: {devices_of_mine: [1, 2, 3]}\n")
    (here / "b.yaml").write_text("base: a.yaml\ntrainer: {devices_of_mine: [9]}\n")
    assert config.diff_configs("a.yaml", "b.yaml").text == "trainer.devices_of_mine: [1, 2, 3] -> [9]"


def test_an_empty_section_is_no_difference_of_its_own(here: Path) -> None:
    (here / "a.yaml").write_text("trainer: {benchmark: true}\nrecipe: {folds: {}}\n")
    (here / "b.yaml").write_text("{}\n")
    diff = config.diff_configs("a.yaml", "b.yaml").text.splitlines()
    assert diff == ["recipe.folds: {} -> '-'", "trainer.benchmark: true -> '-'"]
    assert config.diff_configs("b.yaml", "a.yaml").text.splitlines()[-1] == "trainer.benchmark: '-' -> true"


def test_no_difference() -> None:
    answer = config.diff_configs("safe", "safe")
    assert answer.text == "no difference" and answer.json is not None and answer.json["differences"] == []


def test_a_base_in_a_patch_is_refused(here: Path) -> None:
    (here / "more.yaml").write_text("base: safe\n")
    with pytest.raises(ConfigError, match=r"got base \(more.yaml:1\)"):
        config.show_config("cifar10", more=["more.yaml"], overrides=[])

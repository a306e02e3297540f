"""What a configuration shows of itself: origins, differences, YAML, error texts; and never a secret."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fastloop.config.loading import (
    ABSENT,
    RunSettings,
    WatchSettings,
    diff,
    list_changes,
    load,
    load_callback_config,
    show,
    to_yaml,
)
from fastloop.errors import ConfigError
from tests.small_ladder import Ladder, Read, Workers, folder_fixture, read_fixture  # noqa: F401


class TestShowAndDiff:
    def test_show_names_every_leaf_with_its_origin(self, read: Read) -> None:
        shown = {
            key: (value, str(origin)) for key, value, origin in show(read("run: {seed: 1}", "recipe.api_key=hunter2"))
        }
        assert shown["run.seed"] == (1, "my.yaml:1")
        assert shown["run.devices"] == (1, "default")
        assert shown["recipe.api_key"] == ("***", "command line")
        assert shown["rungs.overlap.sizes"] == ([1, 2, 3], "default")
        assert shown["trainer"] == ({}, "default")

    def test_lists_replace_and_diff_shows_it(self, read: Read) -> None:
        a, b = read(""), read("rungs: {overlap: {sizes: [9]}}")
        assert b.ladder.overlap.sizes == (9,)  # type: ignore[attr-defined]
        assert diff(a, b) == [("rungs.overlap.sizes", [1, 2, 3], [9])]

    def test_what_one_side_lacks_is_absent(self, read: Read) -> None:
        a, b = read("trainer: {x: 1}"), read("trainer: {y: {z: null}}")
        assert diff(a, b) == [("trainer.x", 1, ABSENT), ("trainer.y.z", ABSENT, None)]
        assert diff(a, a) == []

    def test_secrets_differ_without_being_shown(self, read: Read) -> None:
        a, b = read("recipe: {token: hunter2}"), read("recipe: {token: hunter3}")
        assert diff(a, b) == [("recipe.token", "***", "***")]

    def test_one_batch_is_not_all_batches(self, read: Read) -> None:
        a, b = read("trainer: {limit_train_batches: 1}"), read("trainer: {limit_train_batches: 1.0}")
        assert diff(a, b) == [("trainer.limit_train_batches", 1, 1.0)]

    def test_a_float_is_a_float_however_it_is_written(self, read: Read) -> None:
        assert diff(read("rungs: {overlap: {ratio: 2}}"), read("rungs: {overlap: {ratio: 2.0}}")) == []

    def test_changed_is_what_lies_on_top_of_the_recipe(self, read: Read) -> None:
        assert list_changes(load("resnet50")) == {}
        assert list_changes(read("base: resnet50\nrun: {seed: 0}", "trainer.api_key=hunter2", more=("amp",))) == {
            "run": {"seed": 0},
            "trainer": {"api_key": "***"},
            "rungs": {"amp": {"enabled": True}},
        }


def test_what_is_written_is_read_back_as_the_same_values(folder: Path, read: Read) -> None:
    config = read(
        "run: {seed: 3}\nrecipe: {a: '1e-4', b: '\\${x}', c: 's${run.seed}', d: [x, {y: 'on'}], e: {}}\n"
        "trainer: {limit_train_batches: 1.0}\nwatch: {usd_per_gpu_hour: 1e-5}\nrungs: {amp: {enabled: true}}"
    )
    (folder / "config.resolved.yaml").write_text(to_yaml(config), encoding="utf-8")
    again = load("config.resolved.yaml")
    assert again.values == config.values
    assert again.ladder == config.ladder
    assert again.recipe["b"] == "${x}"


class TestSecrets:
    def test_they_are_masked_wherever_they_are_written(self, read: Read) -> None:
        config = read("recipe: {api_key: hunter2, url: 'https://${recipe.api_key}@host', copy: '${recipe.api_key}'}")
        assert config.recipe == {"api_key": "hunter2", "url": "https://hunter2@host", "copy": "hunter2"}
        for written in (
            to_yaml(config),
            str(show(config)),
            str(list_changes(config)),
            str(diff(config, read(""))),
            repr(config),
        ):
            assert "hunter2" not in written
        assert "url: https://***@host" in to_yaml(config)

    @pytest.mark.parametrize(
        "text",
        [
            "recipe: {api_key: hunter2}\nrun: {seed: '${recipe.api_key}'}",
            "recipe: {api_key: hunter2}\nrun: {seed: 'x${recipe.api_key}'}",
            "recipe: {api_key: hunter2, x: 'hunter2 ${oc.env:HOME}'}",
            "recipe: {api_key: hunter2, x: 'hunter2 ${nope}'}",
            "recipe: {api_key: '${oc.env:hunter2}'}",
            "recipe: {api_key: '${hunter2}'}",
            "recipe: {api_key: 'hunter2${'}",
            "recipe: [{api_key: hunter2}]",
            "run: [{api_key: hunter2}]",
            "run: {api_key: hunter2}",
            "run: {seed: {api_key: hunter2}}",
            "trainer: {callbacks: {api_key: hunter2}}",
            "trainer: {callbacks: [hunter2], api_key: hunter2}",
            "base: {api_key: hunter2}",
            "api_key: hunter2",
            "recipe: {api_key: !hunter2 x}",
            "recipe: {api_key: *hunter2}",
            'recipe: {api_key: "hunter2}',
            "recipe: {api_key: hunter2, api_key: hunter2}",
            "recipe: {api_key: 'hunter2\n\\'}\nrun: {accelerator: ['${recipe.api_key}']}",
            f"recipe: {{api_key: hunter2}}\nrun: {{seed: '{'x' * 75}${{recipe.api_key}}{'x' * 75}'}}",
        ],
    )
    def test_errors_do_not_print_them(self, read: Read, text: str) -> None:
        with pytest.raises(ConfigError) as caught:
            read(text)
        assert "hunter2" not in str(caught.value)
        assert "my.yaml:" in str(caught.value)
        assert caught.value.__cause__ is None
        assert caught.value.__suppress_context__ or caught.value.__context__ is None

    @pytest.mark.parametrize("override", ["recipe.token=[hunter2", "recipe.token=x,hunter2", "recipe={token: hunter2"])
    def test_errors_about_overrides_do_not_print_them(self, read: Read, override: str) -> None:
        with pytest.raises(ConfigError) as caught:
            read("", override)
        assert "hunter2" not in str(caught.value)


class TestFromCallback:
    def test_none_is_all_defaults(self, folder: Path) -> None:
        config, ignored = load_callback_config(None)
        assert (config.ladder, config.watch, ignored) == (Ladder(), WatchSettings(), ())

    def test_a_name_a_path_and_a_dict(self, folder: Path) -> None:
        (folder / "my.yaml").write_text("rungs:\n  workers: {enabled: true}")
        for given in ("safe", "my.yaml", Path("my.yaml"), {"rungs": {"workers": {"enabled": True}}}, {"base": "safe"}):
            config, ignored = load_callback_config(given)  # type: ignore[arg-type]
            assert config.ladder == Ladder(workers=Workers(enabled=True))
            assert ignored == ()

    def test_sections_of_a_run_are_ignored_and_named(self, folder: Path) -> None:
        given = {"run": {"no": "check"}, "trainer": {"devices": 3}, "recipe": 5, "strict": True}
        config, ignored = load_callback_config(given)
        assert ignored == ("recipe", "run", "trainer")
        assert (config.run, config.trainer, config.recipe, config.strict) == (RunSettings(), {}, {}, True)
        assert load_callback_config("resnet50")[1] == ("recipe", "run", "trainer")

    def test_ignored_sections_can_still_be_referred_to(self, folder: Path) -> None:
        config, ignored = load_callback_config({"run": {"seed": 7}, "rungs": {"overlap": {"cap_mb": "${run.seed}"}}})
        assert config.ladder.overlap.cap_mb == 7  # type: ignore[attr-defined]
        assert (config.run.seed, ignored) == (0, ("run",))

    @pytest.mark.parametrize(
        ("given", "got"),
        [
            ({"rungs": {"worker": {}}}, "rungs.worker (dict)"),
            ({"rungs": {"amp": {"enabled": 1}}}, "rungs.amp.enabled: 1 (dict)"),
            ({"rungs": {"workers": {"count": 0}}}, "rungs.workers.count=0 (dict)"),
            ({"rungs.amp.enabled": True}, "rungs.amp.enabled (dict)"),
        ],
    )
    def test_faults_in_a_dict(self, folder: Path, given: Any, got: str) -> None:
        with pytest.raises(ConfigError) as caught:
            load_callback_config(given)
        assert caught.value.got == got

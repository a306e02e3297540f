"""fastloop tune: what it prints and writes, and what it refuses."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from fastloop.commands.console import Answer, Request, get_attached
from fastloop.commands.tune import tune
from fastloop.config.loading import load
from fastloop.errors import ConfigError
from fastloop.experiments.trials.failures import Failed
from fastloop.experiments.tune import search as searching
from fastloop.experiments.tune.choice import Point
from fastloop.experiments.tune.search import Search, Tuned
from fastloop.records.trial import Trial
from tests.commands.command_line import measure_anew
from tests.trainings import SLOW

pytestmark = pytest.mark.usefixtures("own_place")

POINTS = (
    Point(value=0, step_ms=45.0, samples_per_s=88.0),
    Point(value=1, ok=False, why="no luck"),
    Point(value=2, step_ms=12.0, samples_per_s=333.0),
)
FOUND = Tuned(
    key="rungs.workers.count",
    points=POINTS,
    best=2,
    why="2 is it; prove it with fastloop ab",
    patch={"rungs": {"workers": {"enabled": True, "count": 2}}},
)


def asked(what: str, *overrides: str, conf: str | Path = SLOW, out: str | None = "a", force: bool = False) -> Answer:
    return tune(str(conf), what, Request(overrides=overrides, out=out, force=force, limit_s=120), lambda line: None)


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Callable[[Tuned], list[Any]]:
    """A search that is not made, and what was searched for."""

    def instead(found: Tuned) -> list[Any]:
        searched: list[Any] = []

        def run(search: Search) -> Tuned:
            searched.append((search.arm.config(), search.what))
            return dataclasses.replace(found, run_dir=str(search.place), what=search.what)

        monkeypatch.setattr(Search, "run", run)
        return searched

    return instead


def lost(name: str, code: int = 1) -> Trial:
    return Trial(
        name=name, ok=False, cause="no luck", seconds=1, run_dir=Path("a") / name, code=code, tail="fastloop: got it"
    )


# -- what is said -----------------------------------------------------------------------------------------------------


def test_the_patch_and_the_curve(pretend: Callable[[Tuned], Any], tmp_path: Path) -> None:
    searched = pretend(FOUND)
    answer = asked("workers", "watch.enabled=false", "rungs.pin.enabled=true")
    (config, what), *_ = searched
    assert what == "workers" and config.watch.enabled and config.ladder.pin.enabled
    assert answer.exit_code == 0 and answer.text.splitlines()[0].startswith("fastloop ")
    assert yaml.safe_load(answer.text.partition("\n\n")[2]) == FOUND.patch, "the patch comes last, ready to be copied"
    assert {path.name for path in Path("a").iterdir()} == {"tune.json", "patch.yaml", "report.md", "report.html"}
    content = json.loads(Path("a", "tune.json").read_text())
    assert content == json.loads(json.dumps(answer.json))
    assert content["schema"] == 1 and content["run_dir"] == "a" and content["what"] == "workers"
    assert content["points"] == [vars(each) for each in POINTS] and content["best"] == 2
    assert content["patch"] == FOUND.patch and content["as_it_is"] == 0


@pytest.mark.usefixtures("fresh_templates")
def test_without_jinja2_there_is_all_but_the_page(
    pretend: Callable[[Tuned], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    pretend(FOUND)
    assert asked("workers").exit_code == 0
    assert {path.name for path in Path("a").iterdir()} == {"tune.json", "patch.yaml", "report.md"}
    assert "There is no report.html: ModuleNotFoundError" in Path("a", "report.md").read_text()


def test_the_patch_file_can_be_laid_on_top(pretend: Callable[[Tuned], Any]) -> None:
    pretend(FOUND)
    asked("workers")
    text = Path("a", "patch.yaml").read_text()
    assert "# 2 is it; prove it with fastloop ab\n" in text
    config = load(str(SLOW), more=("a/patch.yaml",))
    assert config.ladder.workers.enabled and config.ladder.workers.count == 2


def test_without_a_best_value_there_is_no_patch(pretend: Callable[[Tuned], Any]) -> None:
    pretend(FOUND)
    asked("workers")
    pretend(Tuned(key=FOUND.key, points=POINTS[:1], why="nothing is better"))
    answer = asked("workers", force=True)
    assert answer.exit_code == 0 and answer.json is not None and answer.json["patch"] is None
    assert not Path("a", "patch.yaml").exists(), "an older one is gone"


def test_values_that_all_fail_are_told_and_exit_1(pretend: Callable[[Tuned], Any]) -> None:
    pretend(Tuned(key=FOUND.key, points=POINTS[:2], why="no value could be measured", failed=lost("workers-1")))
    answer = asked("workers")
    assert answer.exit_code == 1 and "no luck" in answer.text and Path("a", "tune.json").is_file()


def test_stopped_it_leaves_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(search: Search) -> Tuned:
        stop = KeyboardInterrupt()
        search.stopped(dataclasses.replace(FOUND, best=None, patch=None, partial=True), stop)
        raise stop

    monkeypatch.setattr(Search, "run", run)
    with pytest.raises(KeyboardInterrupt) as raised:
        asked("workers")
    assert getattr(get_attached(raised.value), "partial", None) is True, "for --json"
    found = json.loads(Path("a", "tune.json").read_text())
    assert found["partial"] is True and [each["value"] for each in found["points"]] == [0, 1, 2]
    assert found["best"] is None and found["patch"] is None and not Path("a", "patch.yaml").exists()
    assert "fastloop NOT FINISHED rungs.workers.count" in Path("a", "report.md").read_text()


def test_stopped_before_anything_ran_it_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def run(search: Search) -> Tuned:
        stop = KeyboardInterrupt()
        search.stopped(Tuned(key=FOUND.key), stop)
        raise stop

    monkeypatch.setattr(Search, "run", run)
    with pytest.raises(KeyboardInterrupt) as raised:
        asked("workers")
    assert list(tmp_path.iterdir()) == []
    assert get_attached(raised.value) == Tuned(key=FOUND.key), "for --json"


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "exit_code", "said"),
    [(1, 1, "fastloop: got it\nfastloop: the run failed: no luck"), (2, 2, "fastloop: got it")],
)
def test_without_the_training_as_it_is(
    code: int, exit_code: int, said: str, pretend: Callable[[Tuned], Any], tmp_path: Path
) -> None:
    pretend(Tuned(key=FOUND.key, points=POINTS[1:2], why="no luck", failed=lost("as-it-is", code)))
    with pytest.raises(Failed) as raised:
        asked("workers")
    assert raised.value.exit_code == exit_code and str(raised.value) == said
    assert getattr(get_attached(raised.value), "why", None) == "no luck", "for --json"
    assert list(tmp_path.iterdir()) == [], "what never began leaves nothing"


def test_a_training_too_short_to_measure_says_so(pretend: Callable[[Tuned], Any]) -> None:
    short = Trial(name="as-it-is", ok=True, cause=None, seconds=1, run_dir=Path("a") / "as-it-is", code=0)
    pretend(Tuned(key=FOUND.key, points=POINTS[1:2], failed=short))
    with pytest.raises(Failed, match="the run failed: it was too short to measure a rate"):
        asked("workers")


@pytest.mark.parametrize(
    ("what", "overrides", "said"),
    [
        ("worker", (), "write workers"),
        ("workers.count", (), "write workers"),
        ("lr", (), "workers, prefetch, batch, overlap"),
        ("overlap", (), "a single process exchanges no gradients"),
        ("workers", ("recipe.lode_ms=1",), "load_ms"),
        ("workers", ("rungs.workers.cuont=1",), "count"),
    ],
)
def test_what_no_training_can_answer(
    what: str, overrides: tuple[str, ...], said: str, pretend: Callable[[Tuned], Any], tmp_path: Path
) -> None:
    searched = pretend(FOUND)
    with pytest.raises(ConfigError, match=said):
        asked(what, *overrides)
    assert searched == [] and list(tmp_path.iterdir()) == []


def test_a_configuration_without_a_recipe_is_refused(pretend: Callable[[Tuned], Any]) -> None:
    searched = pretend(FOUND)
    with pytest.raises(ConfigError, match="nothing to train"):
        asked("workers", conf="safe")
    assert searched == []


def test_nothing_is_written_over_without_force(pretend: Callable[[Tuned], Any], tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "mine").touch()
    searched = pretend(FOUND)
    with pytest.raises(ConfigError, match="not empty"):
        asked("workers")
    assert searched == []


# -- as it is ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_loader_that_sleeps_gets_workers(
    monkeypatch: pytest.MonkeyPatch, newborns: Callable[[], list[psutil.Process]]
) -> None:
    monkeypatch.setattr(
        searching.machine, "count_usable_cpus", lambda: 2
    )  # it sleeps: one CPU is enough for two workers
    answer = measure_anew(
        lambda: asked("workers", "recipe.load_ms=60", force=True),
        lambda answer: bool(answer.json) and answer.json["best"] == 2,
    )
    content = json.loads(json.dumps(answer.json))
    assert answer.exit_code == 0 and content["best"] == 2, content
    times = {each["value"]: each["step_ms"] for each in content["points"]}
    assert set(times) == {0, 1, 2} and times[2] < 0.75 * min(times[0], times[1]) and times[0] >= 60
    assert content["hardware"]["devices"] == 1 and content["hardware"]["torch"]
    assert not newborns()

"""What an experiment is, so that no other one's runs are taken for its own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fastloop.commands.ab import list_arms, request
from fastloop.config.loading import load
from fastloop.errors import ConfigError
from fastloop.experiments.ab import manifest
from fastloop.experiments.ab.arms import Ask
from fastloop.experiments.ab.experiment import PARITY
from fastloop.experiments.ab.sides import list_sides
from fastloop.records.experiment import Manifest
from fastloop.records.store import save
from tests.experiments.made_arms import MadeArm

PATCH = "rungs: {amp: {enabled: true}}\n"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("p.yaml").write_text(PATCH)


def told(command: tuple[str, ...] = (), base: str = "cifar10", **shown: Any) -> Manifest:
    asked = request(base=base, overrides=(), vs=("p.yaml", "layout"), more=(), runs="5", steps="auto")
    sides = list_sides(list_arms(asked), aa=False)
    return manifest.describe(sides, command, (asked.vs,), Manifest(**{"runs": 5, "band_pct": 3.0, **shown}))


def refused(before: Manifest, now: Manifest) -> str:
    """Why it is refused; empty where it is not."""
    save(Path(), {manifest.NAME: before})
    try:
        manifest.refuse_another(Path(), now)
    except ConfigError as error:
        assert error.got == "--resume ." and error.do
        return error.why
    return ""


def test_the_same_experiment_goes_on() -> None:
    assert refused(told(), told()) == ""


def test_a_patch_that_was_edited_is_named() -> None:
    before = told()
    Path("p.yaml").write_text(PATCH.replace("amp", "pin"))
    assert refused(before, told()) == "the configuration of p has changed since it began"


def test_so_is_a_base_and_a_recipe(tmp_path: Path) -> None:
    shipped = load("cifar10").recipe_file
    assert shipped is not None
    mine = tmp_path / "mine.yaml"
    mine.write_text(shipped.with_suffix(".yaml").read_text())
    recipe = mine.with_suffix(".py")
    recipe.write_text(shipped.read_text())
    before = told(base=str(mine))
    recipe.write_text(f"{shipped.read_text()}\nFASTER = True\n")
    assert refused(before, told(base=str(mine))) == "mine.py changed since it began"
    before = told(base=str(mine))
    mine.write_text(mine.read_text() + "strict: true\n")
    assert refused(before, told(base=str(mine))) == "the configuration of base, p, layout has changed since it began"


@pytest.mark.parametrize("changed", ["train.py", "exp.yaml", "more.toml"])
def test_so_is_a_script_and_what_it_is_configured_by(changed: str) -> None:
    command = ("torchrun", "train.py", "--config", "exp.yaml", "--more=more.toml", "--tell", "seen.json", "x" * 5000)
    for name in ("train.py", "exp.yaml", "more.toml", "seen.json"):
        Path(name).touch()
    before = told(command)
    Path("seen.json").write_text("its output")
    assert refused(before, told(command)) == ""
    Path(changed).write_text("# another\n")
    assert refused(before, told(command)) == f"{changed} changed since it began"


def test_runs_and_band_are_chosen_before_anything_is_seen() -> None:
    why = refused(told(), told(runs=10))
    assert why.startswith("its --runs was 5 and is now 10: adding runs") and "--runs auto" in why
    assert refused(told(), told(band_pct=5.0)).startswith("its --band was 3.0 and is now 5.0")
    assert refused(told(), replace(told(), options="another")) == "its --vs, --config, --args or key=value differ"
    assert refused(told(), told(steps=9)) == "its steps were None and are now 9"
    assert (
        refused(told(), replace(told(), arms=("base", "amp"))) == "its arms were base, p, layout and are now base, amp"
    )


def test_a_fingerprint_is_of_every_value() -> None:
    plain = manifest.fingerprint(load("cifar10"))
    assert plain == manifest.fingerprint(load("cifar10"))
    assert plain != manifest.fingerprint(load("cifar10", overrides=["run.seed=1"]))


def test_an_earlier_experiment_is_taken_away_and_nothing_else(tmp_path: Path) -> None:
    before = replace(told(), arms=("base", "gone"))
    save(Path(), {manifest.NAME: before})
    for name in manifest.RESULTS:
        Path(name).write_text("old")
    for folder in ("base/run-0", "1-gone/run-0", PARITY, "1-p/run-0", "fastloop-runs/other/run-0", "kept/run-0"):
        MadeArm().run("x", Path(folder), Ask())
    Path("base/notes.txt").write_text("mine")
    manifest.sweep(Path(), [Path("1-p")])
    left = {str(path) for path in Path().rglob("*") if path.is_file()}
    assert {path for path in left if not path.startswith(("fastloop-runs/", "kept/"))} == {"p.yaml", "base/notes.txt"}
    assert "kept/run-0/trial.json" in left and "fastloop-runs/other/run-0/trial.json" in left
    assert not Path("1-gone").exists() and not Path("1-p").exists() and not Path(PARITY).exists()


def test_where_none_began_results_are_somebody_elses() -> None:
    Path("report.md").write_text("mine")
    manifest.sweep(Path())
    assert Path("report.md").read_text() == "mine"

"""fastloop ab: what it refuses before anything is trained, and one real A/A and A/B."""

from __future__ import annotations

import dataclasses
import errno
import json
from pathlib import Path
from typing import Any

import pytest

from fastloop.commands import ab
from fastloop.commands.ab import AbRequest, list_arms
from fastloop.commands.console import Answer
from fastloop.config.loading import load
from fastloop.errors import ConfigError, FastLoopError
from fastloop.experiments.ab import manifest
from fastloop.experiments.ab.sides import changes, list_sides
from fastloop.experiments.trials.failures import Failed
from fastloop.records import store
from tests.commands.command_line import CommandLine, strictly
from tests.experiments.made_arms import MadeArm
from tests.trainings import NET

pytestmark = pytest.mark.usefixtures("here")


def asked(*vs: str, base: str | None = "cifar10", **more: Any) -> AbRequest:
    return AbRequest(base=base, vs=vs, **more)


def compare(request: AbRequest | None = None, **how: Any) -> Answer:
    request = dataclasses.replace(request or asked("amp", steps=40), **{"out": "here", **how})
    return ab.ab(request, lambda _: None)


def refused(request: AbRequest, *, out: str | None = None, **how: Any) -> ConfigError:
    with pytest.raises(ConfigError) as error:
        compare(request, out=out, **how)
    return error.value


@pytest.mark.parametrize(
    ("request_", "why"),
    [
        (asked(), "nothing to compare"),
        (asked(""), "it is empty, so there is nothing to compare"),
        (asked("rungs.amp.enabled=false"), "changes nothing"),
        (asked("watch.warmup_steps=3"), "changes nothing"),
        (asked("rungs.amp.mode=tf32"), "changes nothing"),  # a setting of a rung that is off
        (asked("amp", "rungs.amp.enabled=true"), "it is the same training as --vs amp"),
        (asked("run.seed=1"), "run.seed is the same for all arms"),
        (asked("amp,run.max_steps=9"), "run.max_steps is the same for all arms"),
        (asked("amp,lyout"), "no recipe, ladder, climb or rung has this name"),
        (asked("amp", base=None), "there is no base"),
        (asked("amp", script="nowhere.py", base=None), "there is no such file"),
        (asked("amp", script="train.py"), "there are two bases"),
        (asked("cifar10"), "it is a recipe, but --vs takes a patch, rung or ladder"),
        (asked("amp+layout"), "separate several patches with commas"),
        (asked("amp", base="train.py"), "it is a script, but the base must be a configuration"),
        (asked(vs_commit="main"), "a script in the working tree"),
        (asked("amp", base=None, script="train.py", vs_commit="main"), "--vs-commit already says what to compare with"),
        (
            asked("amp", steps=25),
            "the first 21 steps of a run are not timed (watch.warmup_steps: 20), and a verdict needs 5 that are",
        ),
    ],
    ids=[
        "no arm",
        "empty",
        "nothing",
        "only watching",
        "idle setting",
        "twins",
        "seed",
        "steps",
        "no such rung",
        "no base",
        "no script",
        "two bases",
        "a recipe",
        "a sum",
        "a script",
        "a commit without one",
        "a commit and more",
        "no window",
    ],
)
def test_what_is_refused(request_: AbRequest, why: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    error = refused(request_)
    assert why in error.why or why in str(error)
    assert error.do and not list(tmp_path.glob("fastloop-runs/*/*")), "nothing is left behind"


def test_what_was_meant_is_said() -> None:
    assert refused(asked("amp + layout,trainer.benchmark=true")).do == "write amp,layout"
    meant = "write fastloop ab --script train.py --vs amp --vs 'trainer.token=***'"
    assert refused(asked("amp", "trainer.token=hunter2", base="train.py")).do == meant
    quoted = "write fastloop ab --script 'my train.py' --vs 'rungs.workers={count: 1}'"
    assert refused(asked("rungs.workers={count: 1}", base="my train.py")).do == quoted
    script = refused(asked("amp", base="compile", script="train.py"))
    apart = refused(asked("amp", overrides=("compile", "watch.warmup_steps=3")))
    assert script.do == apart.do
    assert apart.got == "--vs amp compile" and apart.do.startswith("write --vs amp,compile, or")


def test_a_typing_error_in_a_patch_is_an_error_before_anything_runs(tmp_path: Path) -> None:
    assert refused(asked("rungs.amp.enable=true")).do == "write enabled"
    assert not (tmp_path / "fastloop-runs").exists()


def test_names_say_what_is_changed_and_are_told_apart() -> None:
    (Path("fast") / "x").mkdir(parents=True)
    for folder in ("fast", "fast/x"):
        (Path(folder) / "mine.yaml").write_text("rungs: {amp: {enabled: true}}\n")
    both = "rungs.amp.enabled=true,rungs.workers={enabled: true, count: 1},rungs.pin.enabled=true"
    wanted = ("amp", "rungs.workers.enabled=true", "fast/mine.yaml", "fast/x/mine.yaml", both, "amp")
    arms = list_arms(asked(*wanted))
    assert [arm.name for arm in arms] == [
        "base",
        "amp",
        "rungs.workers.enabled=true",
        "mine",
        "mine (2)",
        both,
        "amp (2)",
    ]


def test_names_that_a_secret_made_alike_are_told_apart() -> None:
    vs = [f"recipe.api_key={secret}" for secret in ("one-secret", "other-secret")]
    arms = ab._mask_names(list_arms(asked(*vs, base=str(NET))))
    assert [arm.name for arm in arms] == ["base", "recipe.api_key=***", "recipe.api_key=*** (2)"]


def test_a_secret_on_the_command_line_is_no_name(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("base: cifar10\nrecipe: {token: x}\n")
    _, arm = ab._mask_names(list_arms(asked("recipe.token=hunter2secret", base=str(recipe))))
    assert "hunter2secret" not in arm.name


def test_what_an_arm_changes() -> None:
    arms = list_arms(asked("full", "trainer.benchmark=true,rungs.pin.enabled=true"))
    _, full, both = list_sides(arms, aa=False)
    pair = list_sides(list_arms(asked("amp,layout,trainer.benchmark=true,rungs.amp.mode=tf32")), aa=False)[1]
    assert pair.changed_rungs == ("amp", "layout") and pair.changed_keys == ("trainer.benchmark",)
    assert pair.arm.config().values["rungs"]["amp"]["mode"] == "tf32"
    assert {"workers", "amp", "compile"} <= set(full.changed_rungs) and full.changed_keys == ()
    assert both.changed_rungs == ("pin",) and both.changed_keys == ("trainer.benchmark",)
    assert [str(side.folder) for side in (full, both)] == ["1-full", f"2-{both.folder.name.removeprefix('2-')}"]


def test_identical_arms_only_to_test_the_judge() -> None:
    base, again = list_sides(list_arms(asked(aa=True)), aa=True)
    assert again.changed_rungs == () and again.name == "again" and base.name == "base"
    assert changes(load("cifar10"), load("cifar10", overrides=["strict=true"])) == []


def test_resume_takes_the_directory_of_this_very_experiment(tmp_path: Path) -> None:
    assert "there is nothing to resume" in refused(asked("amp"), resume=str(tmp_path)).why
    content = {"schema": 1, "base": "gpt2", "script": None, "arms": ["base", "amp"], "steps": None, "aa": False}
    store.write(tmp_path, {manifest.NAME: json.dumps(content)})
    assert "its base was 'gpt2' and is now 'cifar10'" in refused(asked("amp"), resume=str(tmp_path)).why
    assert "keeps its directory" in refused(asked("amp"), resume=str(tmp_path), out="y").why


@pytest.mark.parametrize(
    ("option", "text", "why"),
    [
        ("runs", "0", "a verdict needs at least 3 runs"),
        ("runs", "-1", "a verdict needs at least 3 runs"),
        ("runs", "many", "neither auto nor a valid number"),
        ("runs", "1", "a verdict needs at least 3 runs"),
        ("runs", "2", "a verdict needs at least 3 runs"),
        ("steps", "-3", "neither auto nor a valid number"),
    ],
)
def test_numbers_of_the_command_line(option: str, text: str, why: str) -> None:
    given = {"runs": "5", "steps": "auto", option: text}
    with pytest.raises(ConfigError, match=f"--{option} {text}\n.*{why}"):
        ab.request(base="cifar10", overrides=(), vs=(), more=(), **given)
    assert ab.request(base="cifar10", overrides=(), vs=(), more=(), runs="3", steps="auto").runs == 3
    fine = ab.request(base="run.seed=1", overrides=("a.b=2",), vs=(), more=(), runs="auto", steps="9", script="x.py")
    assert (fine.runs, fine.steps, fine.base, fine.overrides) == ("auto", 9, None, ("run.seed=1", "a.b=2"))


def made(monkeypatch: pytest.MonkeyPatch, *arms: Any) -> None:
    monkeypatch.setattr(ab, "list_arms", lambda _: list(arms))


def with_rung(name: str = "amp", kind: type[MadeArm] = MadeArm, **more: Any) -> MadeArm:
    return kind(name=name, overrides=(f"rungs.{name}.enabled=true",), verdicts={name: True}, **more)


def test_everything_is_written_and_the_answer_is_the_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    amp = with_rung(rate=lambda _: 130.0, parity_class="approximate")
    made(monkeypatch, MadeArm(), amp)
    answer = compare()
    written = json.loads((tmp_path / "here" / "comparison.json").read_text())
    assert json.loads(store.dump(answer.json or {})) == written and answer.exit_code == 0
    assert written["verdict"] == "faster" and written["ratio"] == pytest.approx(1.3, rel=0.02)
    assert written["parity"]["passed"] is True and written["ci95"][0] < 1.3 < written["ci95"][1]
    assert {arm["name"]: arm["active_rungs"] for arm in written["arms"]} == {"base": [], "amp": ["amp"]}
    assert written["config_diff"]["amp"] == [["rungs.amp.enabled", False, True]] and written["partial"] is False
    assert (tmp_path / "here" / "report.html").stat().st_size > 5000 and answer.text.startswith("fastloop FASTER 1.3")
    with pytest.raises(ConfigError, match="not empty"):
        compare()
    again = len(amp.calls)
    compare(force=True)
    assert len(amp.calls) == 2 * again, "an earlier experiment's runs are not taken for this one's"


class Stops(MadeArm):
    """An arm at whose fourth run somebody has had enough."""

    def run(self, label: str, folder: Path, *rest: Any, **more: Any) -> Any:
        if folder.name == "run-3":
            raise KeyboardInterrupt
        return super().run(label, folder, *rest, **more)


def test_stopped_it_leaves_a_partial_report(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made(monkeypatch, MadeArm(), with_rung(kind=Stops))
    with pytest.raises(KeyboardInterrupt):
        compare()
    written = json.loads((tmp_path / "here" / "comparison.json").read_text())
    assert written["partial"] is True and written["arms"][1]["runs"] == 3
    assert "PARTIAL" in (tmp_path / "here" / "report.md").read_text()
    assert not (tmp_path / "here" / ".lock").exists()


def test_a_base_that_fails_is_the_end(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made(monkeypatch, MadeArm(fails_at=-1), with_rung())
    with pytest.raises(Failed, match="the base failed") as failed:
        compare()
    assert failed.value.exit_code == 1 and "boom" in str(failed.value)
    assert json.loads((tmp_path / "here" / "comparison.json").read_text())["failures"][0]["arm"] == "base"


@pytest.mark.parametrize("to", ["out.json", "-"])
@pytest.mark.parametrize(
    ("base", "kind", "code"),
    [
        (MadeArm(fails_at=-1), MadeArm, 1),
        (MadeArm(), Stops, 130),
    ],
    ids=["the base failed", "interrupted"],
)
def test_what_there_is_becomes_the_json_too(
    base: MadeArm,
    kind: type[MadeArm],
    code: int,
    to: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    fastloop = CommandLine(tmp_path, capfd, monkeypatch)
    made(monkeypatch, base.but(), with_rung(kind=kind))
    said = fastloop("ab", "cifar10", "--vs", "amp", "--steps", "40", "--out", "here", "--json", to)
    written = (tmp_path / "here" / "comparison.json").read_text()
    assert said.code == code and (said.json if to == "-" else strictly(Path(to).read_text())) == json.loads(written)
    assert said.out == "" or to == "-"
    assert ("the base failed" if code == 1 else "fastloop: interrupted") in said.err


def test_it_goes_on_only_where_it_began(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What `MadeArm` says of its machine: torch 2.11.0."""

    def go_on(torch: str) -> Any:
        monkeypatch.setattr("fastloop.evidence.machine.read_environment", lambda *_: {"versions": {"torch": torch}})
        amp = with_rung()
        made(monkeypatch, MadeArm(), amp)
        return amp, lambda: compare(out=None, resume="here")

    made(monkeypatch, MadeArm(), with_rung(kind=Stops))
    with pytest.raises(KeyboardInterrupt):
        compare()
    amp, resumed = go_on("2.12.0")
    with pytest.raises(ConfigError, match=r"its runs are from torch 2\.11\.0, this is 2\.12\.0"):
        resumed()
    assert amp.calls == [] and not (tmp_path / "here" / ".lock").exists()
    amp, resumed = go_on("2.11.0")
    assert (resumed().json or {})["partial"] is False and dict(amp.calls).keys() == {"run-3", "run-4"}


@pytest.mark.parametrize(("command", "asked_for"), [("train.py", True), ("bash train.sh", False)])
def test_a_script_is_asked_where_it_surely_runs_here(
    command: str, asked_for: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").touch()
    looked: list[Path] = []
    monkeypatch.setattr(ab, "refuse_others", lambda place, folders: looked.append(place))
    script = asked("amp", base=None, script=command, steps=40)
    for resume in (None, "here"):
        made(monkeypatch, MadeArm(), with_rung())
        compare(script, resume=resume)
    assert looked == [Path("here")] * asked_for


def test_a_refused_plan_leaves_its_directory_free(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pin = with_rung("pin")
    made(monkeypatch, MadeArm(), pin, with_rung(fails_at=-2))
    with pytest.raises(Failed):
        compare()
    assert not (tmp_path / "here").exists() and dict(pin.calls).keys() == {"plan"}
    made(monkeypatch, MadeArm(), with_rung())
    assert compare().json


def test_by_force_not_even_the_gradient_of_another_base_is_left(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pin = with_rung("pin")
    for force in (False, True):
        base = MadeArm()
        made(monkeypatch, base, with_rung(), *([] if force else [pin]))
        compare(force=force)
        assert "parity" in dict(base.calls)
    assert not (tmp_path / "here" / "2-pin").exists()


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"runs": 10}, "its --runs was 5 and is now 10"),
        ({"band_pct": 9.0}, "its --band was 3.0 and is now 9.0"),
        ({"script": "other.py"}, "its script was 'train.py' and is now 'other.py'"),
        ({}, "train.py changed since it began"),
    ],
    ids=["runs", "band", "script", "edited"],
)
def test_another_experiment_does_not_go_on(
    changed: dict[str, Any], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("train.py", "other.py"):
        (tmp_path / name).touch()
    first = {"script": "train.py", "steps": 40}
    made(monkeypatch, MadeArm(), with_rung())
    compare(asked("amp", base=None, **first))
    if not changed:
        (tmp_path / "train.py").write_text("# faster")
    assert refused(asked("amp", base=None, **{**first, **changed}), resume="here").why.startswith(why)


def test_a_full_disk_says_how_to_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fills(MadeArm):
        def run(self, label: str, folder: Path, *rest: Any, **more: Any) -> Any:
            raise OSError(errno.ENOSPC, "No space left on device", str(folder))

    made(monkeypatch, Fills(), with_rung())
    with pytest.raises(FastLoopError, match="free some space, then continue with --resume here"):
        compare()

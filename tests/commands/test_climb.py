"""fastloop climb: what it writes, says and refuses. Its decisions are tested in test_ascent.py."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from fastloop.commands import climb as command
from fastloop.commands.climb import ClimbRequest, climb
from fastloop.commands.console import Answer, get_attached
from fastloop.config.loading import load
from fastloop.errors import ConfigError
from fastloop.experiments.climb import budget, candidates
from fastloop.experiments.climb.budget import Spent
from fastloop.experiments.climb.interface import Result
from fastloop.experiments.trials.failures import Failed
from fastloop.experiments.trials.run_directories import claim
from fastloop.records.experiment import Gate, Outcome
from fastloop.records.store import dump
from fastloop.records.trial import Trial
from tests.experiments.simulated_runner import Machine, SimulatedRunner
from tests.trainings import NET, SLOW

pytestmark = pytest.mark.usefixtures("own_place")

SHAPE = {
    "schema",
    "run_dir",
    "name",
    "hardware",
    "naive",
    "ceilings_samples_per_s",
    "rungs",
    "stack",
    "top",
    "stopped",
    "confirmed",
    "budget_s",
    "spent_s",
    "partial",
}


def asked(*overrides: str, conf: Path | None = NET, out: str | None = None, **changes: Any) -> Answer:
    progress = changes.pop("progress", lambda line: None)
    settings = {"budget_s": 600.0, "limit_s": 60.0, **changes}
    request = ClimbRequest(conf=None if conf is None else str(conf), overrides=overrides, out=out, **settings)
    return climb(request, progress)


def content(answer: Answer) -> Any:
    assert answer.json is not None
    return json.loads(json.dumps(answer.json))


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[SimulatedRunner]]:
    """A made-up machine in the place of trainings; gives the labs that the calls have made."""

    def instead(
        machine: Machine | None = None,
        *,
        runs: int | None = None,
        lab_class: type[SimulatedRunner] = SimulatedRunner,
        **confirmed: Any,
    ) -> list[SimulatedRunner]:
        runners: list[SimulatedRunner] = []
        done: dict[str, Result] = {}

        def bench(job: Any, place: Path, budget: Any, **_: Any) -> SimulatedRunner:
            runner = lab_class(machine or Machine(decode_ms=3.0), done=done)
            runner.budget = budget

            def before(at: str) -> None:
                if runs is not None and len(runner.ran) >= runs:
                    raise Spent(at)

            runner.before = before
            original = runner.confirm

            def confirm(*rest: Any, **more: Any) -> Any:
                found: Any = original(*rest, **more)
                return dataclasses.replace(found, **confirmed)

            runner.confirm = confirm  # type: ignore[method-assign]
            runners.append(runner)
            return runner

        monkeypatch.setattr(command, "ProcessRunner", bench)
        return runners

    return instead


# -- what it writes ---------------------------------------------------------------------------------------------------


def test_a_climb_and_its_headline(pretend: Callable[..., Any], tmp_path: Path) -> None:
    runners = pretend()
    answer = asked("run.max_steps=90", out="a")
    found = content(answer)
    assert answer.exit_code == 0 and set(found) >= SHAPE and found["partial"] is False
    assert json.loads((tmp_path / "a" / "climb.json").read_text()) == found
    assert found["confirmed"]["ratio"] == 5.0 and runners[0].confirmed == [found["stack"]["rungs"]]
    assert "5" in answer.text.splitlines()[0] and "CONFIRMED" in answer.text.splitlines()[0]
    assert found["top"]["samples_per_s"] > 2 * found["naive"]["samples_per_s"] > 0
    assert found["naive"]["samples_per_s"] * 1.001 < found["ceilings_samples_per_s"]["resident"]
    kept = [row["rung"] for row in found["rungs"] if row["kept"]]
    assert kept and set(found["stack"]["rungs"]) <= {rung for each in kept for rung in each.split("+")}
    for name in ("report.md", "report.html"):
        assert next(iter(found["stack"]["rungs"])) in (tmp_path / "a" / name).read_text()
    best = max(found["ladders_samples_per_s"].values())
    assert found["top"]["samples_per_s"] > 0.98 * best, "no shipped ladder is faster"
    use = answer.text.splitlines()
    assert use[-1] == f"USE      fastloop run {NET} --config a/ladder.yaml run.max_steps=90"
    text = "\n".join(use[use.index("rungs:") : -1])
    assert yaml.safe_load(text) == {"rungs": found["stack"]["rungs"]}, "the YAML, ready to be copied"


@pytest.mark.usefixtures("fresh_templates")
def test_without_jinja2_there_is_all_but_the_page(
    pretend: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    pretend()
    assert asked(out="a").exit_code == 0
    assert {path.name for path in (tmp_path / "a").iterdir()} == {"climb.json", "ladder.yaml", "report.md"}
    assert "There is no report.html: ModuleNotFoundError" in (tmp_path / "a" / "report.md").read_text()


def test_a_rung_that_is_faster_and_breaks_the_training_is_not_nothing_to_gain(pretend: Callable[..., Any]) -> None:
    pretend(Machine(decode_ms=1, copy_ms=0, factors={"amp": 0.5}, noise=0.0, wrong=frozenset({"amp"})))
    answer = asked(out="a")
    found = content(answer)
    assert found["stack"] == {"rungs": {}} and "nothing to gain" not in found["stopped"]
    assert answer.text.splitlines()[0].startswith("fastloop NOTHING KEPT: PARITY FAILED") and answer.exit_code == 0


def test_its_ladder_is_replayed_without_a_search(pretend: Callable[..., Any], tmp_path: Path) -> None:
    pretend()
    found = content(asked(out="a"))
    written = yaml.safe_load((tmp_path / "a" / "ladder.yaml").read_text())
    assert written == {"rungs": found["stack"]["rungs"]}
    replayed = load(str(NET), more=["a/ladder.yaml"]).ladder
    assert set(replayed.enabled()) == set(found["stack"]["rungs"])


def test_nothing_to_gain_is_an_answer(pretend: Callable[..., Any], tmp_path: Path) -> None:
    runners = pretend(Machine(decode_ms=1, copy_ms=0, factors={}, noise=0.0))
    answer = asked(out="a")
    found = content(answer)
    assert answer.exit_code == 0 and found["partial"] is False and found["confirmed"] is None
    assert found["stopped"].startswith("nothing to gain") and found["stack"] == {"rungs": {}}
    assert "USE" not in answer.text
    assert "NOTHING TO GAIN" in answer.text.splitlines()[0] and runners[0].confirmed == []
    assert found["top"] == pytest.approx(found["naive"]), "where it began"


@pytest.mark.parametrize(
    ("confirmed", "code"),
    [
        ({"parity": Outcome(passed=False, why="gradient"), "verdict": "inconclusive"}, 3),
        ({"verdict": "inconclusive"}, 4),
        ({"verdict": "no_difference"}, 0),
        ({"verdict": "faster"}, 0),
        ({"verdict": "faster", "parity": Outcome(gates=(Gate(name="gradient", passed=None, why="too few runs"),))}, 4),
        ({"verdict": "faster", "parity": Outcome()}, 0),
        (
            {"verdict": "no_difference", "parity": Outcome(gates=(Gate(name="gradient", passed=None, why="no step"),))},
            4,
        ),
    ],
)
def test_the_confirmation_decides_the_exit_code(confirmed: Any, code: int, pretend: Callable[..., Any]) -> None:
    pretend(**confirmed)
    assert asked(out="a").exit_code == code


# -- time -------------------------------------------------------------------------------------------------------------


def test_a_budget_that_is_gone_leaves_a_climb_to_go_on_with(pretend: Callable[..., Any], tmp_path: Path) -> None:
    pretend(runs=6)
    answer = asked(out="a")
    found = content(answer)
    assert answer.exit_code == 4 and found["partial"] is True and found["confirmed"] is None
    assert found["stopped"].startswith("not enough budget left for ") and "--resume a" in found["stopped"]
    assert "PARTIAL" in answer.text.splitlines()[0] and (tmp_path / "a" / "report.html").is_file()
    assert found["stack"]["rungs"] == {} and "USE" not in answer.text, "there is nothing to add"
    fastest = max(found["ladders_samples_per_s"], key=lambda name: found["ladders_samples_per_s"][name])
    assert answer.text.splitlines()[-1] == f"NEXT     prove the fastest so far: fastloop ab {NET} --vs {fastest}"
    assert re.search(rf"; proving {fastest} takes about \d+ (s|min); continue with --resume a$", found["stopped"])
    assert yaml.safe_load((tmp_path / "a" / "ladder.yaml").read_text()) == {"rungs": found["stack"]["rungs"]}


def test_a_budget_too_short_for_the_first_run_says_so(pretend: Callable[..., Any], tmp_path: Path) -> None:
    """Nothing was measured, so nothing is recommended."""
    pretend(runs=0)
    answer = asked(out="a")
    found = content(answer)
    assert answer.exit_code == 4 and found["partial"] is True and found["confirmed"] is None
    assert "--resume a" in found["stopped"] and "USE" not in answer.text and "FASTER" not in answer.text
    assert yaml.safe_load((tmp_path / "a" / "ladder.yaml").read_text()) == {"rungs": {}}


def test_resumed_calls_end_where_one_long_call_ends(pretend: Callable[..., Any], tmp_path: Path) -> None:
    pretend()
    whole = content(asked(out="whole"))
    runners = pretend(runs=5)
    answer = asked(out="a")
    for _ in range(30):
        if "not enough budget" not in content(answer)["stopped"]:
            break
        answer = asked(resume="a")
    found = content(answer)
    assert answer.exit_code == 0 and len(runners) > 2 and found["stack"] == whole["stack"]
    ran = [at for runner in runners for at in runner.ran]
    assert len(ran) == len(set(ran)), "no training is done twice"
    assert found["budget_s"] == 600 * len(runners) and found["run_dir"] == "a"
    assert found["ceilings_samples_per_s"] == pytest.approx(whole["ceilings_samples_per_s"])


def test_a_confirmation_that_does_not_fit_is_said_to_be_left(pretend: Callable[..., Any]) -> None:
    class Soon(SimulatedRunner):
        def estimate_confirmation_s(self, at: str, needs: Any) -> float:
            return 700.0

    runners = pretend(lab_class=Soon)
    answer = asked("run.max_steps=90", out="a")
    found, told = content(answer), f"NEXT     prove the fastest so far: fastloop ab {NET} run.max_steps=90"
    assert answer.text.splitlines()[-1] == f"{told} --vs a/ladder.yaml"
    assert runners[0].confirmed == [] and found["confirmed"] is None and found["partial"] is True
    assert found["stopped"].endswith("; still to do: the confirmation, about 12 min; continue with --resume a")
    assert "no remaining rung" in found["stopped"]
    cut = pretend(lab_class=Soon, runs=12)
    found = content(asked(out="b"))
    assert cut[0].confirmed == [] and found["stack"]["rungs"]
    assert found["stopped"].startswith("not enough budget left for ")
    assert "; still to do: the confirmation, about 12 min; continue with --resume b" in found["stopped"]
    Path("train.py").write_text("")
    told = asked(conf=None, script="train.py", args="--lr 0.1", out="c").text.splitlines()[-1]
    assert told.endswith("fastloop ab --script train.py --args '--lr 0.1' --vs c/ladder.yaml")


def test_what_a_ceiling_was_taken_from_is_told_and_not_forgotten(pretend: Callable[..., Any]) -> None:
    pretend(Machine(decode_ms=3, device_ms=400, copy_ms=1), runs=4)
    found = content(asked(out="a"))
    assert found["ceilings_notes"]["resident"].startswith("same as replayed: copies take 1 ms of ")
    pretend(Machine(decode_ms=3, device_ms=400, copy_ms=1))
    again = content(asked(resume="a"))
    assert again["stack"]["rungs"] and set(again["ceilings_notes"]) == {"resident", "replayed_top"}
    assert again["ceilings_samples_per_s"]["resident"] == again["ceilings_samples_per_s"]["replayed"]


def test_stopped_it_leaves_what_it_has(pretend: Callable[..., Any], tmp_path: Path) -> None:
    class Stopped(SimulatedRunner):
        def run(self, at: str, *rest: Any, **more: Any) -> Result:
            if "screen-2" in at:
                raise KeyboardInterrupt
            return super().run(at, *rest, **more)

    pretend(lab_class=Stopped)
    said: list[str] = []
    with pytest.raises(KeyboardInterrupt) as raised:
        asked(out="a", progress=said.append)
    found = json.loads((tmp_path / "a" / "climb.json").read_text())
    assert json.loads(dump(get_attached(raised.value) or {})) == found, "for --json"
    assert found["partial"] is True and found["stopped"] == "it was stopped" and found["naive"]["step_ms"]
    assert yaml.safe_load((tmp_path / "a" / "ladder.yaml").read_text()) == {"rungs": {}}, "a ladder, whatever ends it"
    assert "PARTIAL" in (tmp_path / "a" / "report.md").read_text()
    assert said[-1] == "fastloop: partial results are in a; to continue, repeat the command with --resume a"


# -- what it refuses --------------------------------------------------------------------------------------------------


def test_a_start_that_fails(pretend: Callable[..., Any], tmp_path: Path) -> None:
    class Broken(SimulatedRunner):
        def _train(self, at: str, stack: Any, ask: Any) -> Result:
            trial = Trial(name="a", ok=False, cause="no luck", seconds=1, run_dir=Path("a") / at, code=1, tail="Bad")
            return Result(ok=False, cause="no luck", trial=trial)

    pretend(lab_class=Broken)
    with pytest.raises(Failed) as raised:
        asked(out="a")
    assert raised.value.exit_code == 1 and "Bad" in str(raised.value) and "no luck" in str(raised.value)
    assert getattr(get_attached(raised.value), "stopped", None) == "failed: no luck", "for --json"
    assert json.loads((tmp_path / "a" / "climb.json").read_text())["stopped"] == "failed: no luck"


def test_a_configuration_that_the_child_refuses_leaves_nothing(pretend: Callable[..., Any], tmp_path: Path) -> None:
    class Refused(SimulatedRunner):
        def _train(self, at: str, stack: Any, ask: Any) -> Result:
            folder = Path("a") / at
            folder.mkdir(parents=True)
            trial = Trial(
                name="a", ok=False, cause="exit code 2", seconds=1, run_dir=folder, code=2, tail="fastloop: got it"
            )
            return Result(ok=False, cause="exit code 2", trial=trial)

    pretend(lab_class=Refused)
    with pytest.raises(Failed) as raised:
        asked(out="a")
    assert raised.value.exit_code == 2 and str(raised.value) == "fastloop: got it" and not (tmp_path / "a").exists()


def test_a_script_is_climbed_with_its_own_line_to_add(pretend: Callable[..., Any]) -> None:
    Path("train.py").write_text("")
    runners = pretend()
    answer = asked("rungs.amp.enabled=true", conf=None, script="train.py", args="--epochs 3", out="a")
    found = content(answer)
    assert answer.exit_code == 0 and found["name"] == "train" and runners[0].confirmed == [found["stack"]["rungs"]]
    assert "amp" not in found["stack"]["rungs"], "the user's word stands, and is no find"
    assert "00-naive/loader" not in runners[0].ran and "loader" not in {
        ask.variation for _, ask in runners[0].asks.values()
    }
    assert answer.text.splitlines()[-1] == f"USE      callbacks=[fastloop.FastLoop('{Path.cwd()}/a/ladder.yaml')]"
    with pytest.raises(ConfigError, match="started with another configuration"):
        asked("rungs.amp.enabled=true", conf=None, script="train.py", args="--epochs 4", resume="a")
    Path("train.py").write_text("import torch")
    with pytest.raises(ConfigError, match="train changed since it began"):
        asked("rungs.amp.enabled=true", conf=None, script="train.py", args="--epochs 3", resume="a")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (
            {"budget_s": 1.0},
            "--budget 1s\n  why not even the first training fits into that time\n  do  write 30s or more",
        ),
        ({"allow": ("everything",)}, "unknown value"),
        ({"resume": "nowhere"}, "there is no such directory"),
        ({"resume": "a", "out": "b"}, "keeps its directory"),
        ({"conf": Path("plain.yaml")}, "there is nothing to train"),
        ({"conf": Path("train.py")}, "it is a script, not a configuration"),
        ({"conf": None}, "it names no configuration or script"),
        ({"conf": None, "resume": "."}, "not the command that began it"),
        ({"script": "train.py"}, "it names two starting points"),
    ],
    ids=[
        "no time",
        "unknown leave",
        "no climb",
        "two places",
        "no recipe",
        "a script",
        "nothing",
        "resume alone",
        "two starts",
    ],
)
def test_what_it_cannot_do(changes: Any, why: str, pretend: Callable[..., Any], tmp_path: Path) -> None:
    runners = pretend()
    Path("plain.yaml").write_text("rungs:\n  amp: {enabled: true}\n")
    with pytest.raises(ConfigError, match=why):
        asked(**changes)
    assert runners == [] and [path.name for path in tmp_path.iterdir()] == ["plain.yaml"]


def test_another_configuration_is_not_resumed(pretend: Callable[..., Any]) -> None:
    runners = pretend(runs=3)
    asked(out="a")
    with pytest.raises(ConfigError, match="started with another configuration"):
        asked("run.seed=7", resume="a")
    assert len(runners) == 1


def test_an_edited_recipe_is_not_resumed(pretend: Callable[..., Any]) -> None:
    pretend(runs=3)
    mine = Path("mine.yaml")
    mine.write_text(NET.read_text())
    recipe = mine.with_suffix(".py")
    recipe.write_text(NET.with_suffix(".py").read_text())
    asked(out="a", conf=mine)
    asked(resume="a", conf=mine)
    before = recipe.read_text()
    recipe.write_text(f"{before}\nFASTER = True\n")
    with pytest.raises(ConfigError, match=r"mine\.py changed since it began"):
        asked(resume="a", conf=mine)
    old = {key: value for key, value in json.loads(Path("a/climb.json").read_text()).items() if key != "recipe_sha256"}
    Path("a/climb.json").write_text(json.dumps(old))
    asked(resume="a", conf=mine)  # one that was begun before this was written down goes on
    recipe.write_text(before)
    with pytest.raises(ConfigError, match="changed since it began"):
        asked(resume="a", conf=mine)


def test_two_climbs_in_one_directory(pretend: Callable[..., Any], tmp_path: Path) -> None:
    runners = pretend()
    with claim("first", "a"), pytest.raises(ConfigError, match="another fastloop is using it"):
        asked(out="a", force=True)
    assert runners == []


def test_by_force_nothing_of_an_earlier_climb_is_found_again(pretend: Callable[..., Any], tmp_path: Path) -> None:
    pretend()
    asked(out="a")
    stale = tmp_path / "a" / "01-amp" / "predict-1"
    stale.mkdir(parents=True)
    (stale / "trial.json").write_text('{"ok": true}')
    with pytest.raises(ConfigError, match="not empty"):
        asked(out="a")
    assert content(asked(out="a", force=True))["partial"] is False and not stale.exists()


# -- as it is ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def really(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Climb with real trainings, of short windows, and with one shipped ladder, of which each rung is left out once."""

    def climb_really(*overrides: str, without: str = "", **ladder: Any) -> Any:
        cards = {name: card for name, card in candidates.collect_cards().items() if name != without}
        monkeypatch.setattr(candidates, "collect_cards", lambda: cards)
        monkeypatch.setattr(command, "list_shipped", lambda: {"safe": ladder})
        for name, value in (("WINDOW_S", 1.0), ("SCREEN_S", 2.0), ("WARMUP_S", 0.5)):
            monkeypatch.setattr(budget, name, value)
        return asked(*overrides, conf=SLOW, out="a", budget_s=900.0)

    return climb_really


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_slow_loader_is_found_and_mended(really: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to the confirmation, which is an A/B as any other."""
    monkeypatch.setattr(command.ProcessRunner, "confirm", SimulatedRunner.confirm)
    for name, value in (("confirmed", []), ("now", 0.0), ("done", {})):
        monkeypatch.setattr(command.ProcessRunner, name, value, raising=False)
    answer = really("recipe.load_ms=15", workers={"enabled": True}, pin={"enabled": True})
    found = content(answer)
    assert answer.exit_code == 0 and found["stack"]["rungs"]["workers"]["enabled"] is True, answer.text
    kept = [row for row in found["rungs"] if row["kept"] and "workers" in row["patch"]["rungs"]]
    assert kept and all(row["parity"]["passed"] is True for row in kept)
    assert found["top"]["step_ms"] < found["naive"]["step_ms"] - 5
    started = {json.loads(path.read_text())["started"] for path in Path("a").rglob("trial.json")}
    assert started == {"forked"}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_gain_is_claimed_in_a_tuned_training(really: Callable[..., Any]) -> None:
    """A worker hides the loader, and what is left of the step no rung can make shorter: `nodes` can, by the two percent
    that a worker's hand-over takes, and is left out. On a busy machine a screening may keep a rung by mistake: that is
    said, and no more."""
    on = {"workers", "amp", "fused", "host"}
    settings = [f"rungs.{rung}.enabled=true" for rung in on]
    settings += ["recipe.step_ms=40", "recipe.load_ms=12", "rungs.workers.count=1"]
    answer = really(*settings, without="nodes", pin={"enabled": True})
    found = content(answer)
    assert answer.exit_code in (0, 4) and "CONFIRMED FASTER" not in answer.text, answer.text
    assert found["confirmed"] is None or found["confirmed"]["verdict"] != "faster", answer.text
    tried = {row["rung"]: row for row in found["rungs"]}
    assert tried and not on & set(tried), "it looked, and the user's word stands"
    assert all(row["why"] for row in found["rungs"])
    assert found["naive"]["step_ms"] > 40
    if not any(row["kept"] for row in found["rungs"]):
        assert found["stack"] == {"rungs": {}} and found["top"] == pytest.approx(found["naive"])
        assert "rungs: {}" in Path("a/ladder.yaml").read_text()

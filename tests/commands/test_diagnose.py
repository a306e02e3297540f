"""fastloop diagnose: of a run there was, and of a configuration that is run for it."""

from __future__ import annotations

import dataclasses
import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fastloop.commands import diagnose as command
from fastloop.commands.console import Answer, Request, get_attached
from fastloop.commands.diagnose import diagnose, run_directory
from fastloop.config.loading import load_callback_config, to_yaml
from fastloop.errors import ConfigError, FastLoopError
from fastloop.experiments.trials.failures import Failed
from fastloop.experiments.trials.trial import Job
from fastloop.records import store
from fastloop.records.measurement import PARTS, Measurement
from fastloop.records.plan import Plan, Step, Verdict
from fastloop.records.run_files import PlanFile, VerdictsFile, load_run
from fastloop.records.trial import ANSWERS, Trial
from tests.commands.command_line import refuse_reading
from tests.trainings import NET, SLOW

pytestmark = pytest.mark.usefixtures("own_place")

SEEN = Measurement(
    steps=50,
    total_steps=60,
    warmup_steps=10,
    samples_per_s=40.0,
    step_ms={"mean": 100.0, "median": 100.0},
    parts_ms={**dict.fromkeys(PARTS, 0.0), "data_wait": 80.0, "forward": 10.0, "backward": 10.0},
    global_batch=4,
    window_too_short=False,
    evidence={"loader": {"num_workers": 0, "map_style": True, "usable_cpus": 4}},
)


def asked(target: str | Path, *overrides: str, **settings: Any) -> Answer:
    syncs, trace = settings.pop("syncs", False), settings.pop("trace", None)
    request = Request(overrides=overrides, limit_s=120, **settings)
    return diagnose(str(target), request, lambda line: None, syncs=syncs, trace=trace)


def content(answer: Answer) -> Any:
    assert answer.json is not None
    return json.loads(store.dump(answer.json))


def write_run(where: Path, seen: Measurement = SEEN, plan: Plan | None = None) -> Path:
    """A run directory as far as a diagnosis reads it."""
    steps = (Step(rung="pin", status="skipped", reason="needs CUDA"),)
    plan = Plan(steps=steps) if plan is None else plan
    verdicts = tuple(Verdict(rung=step.rung, took=False, why=step.reason or "") for step in plan.steps)
    store.write(
        where,
        {
            "measurement.json": store.dump(seen),
            "plan.json": store.dump(PlanFile.of(plan)),
            "verdicts.json": store.dump(VerdictsFile(verdicts=verdicts)),
            "report.md": "# fastloop report\n",
            "config.diff.yaml": "{}\n",
            "env.json": "{}\n",
        },
    )
    return where


# -- a run there was --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("named", ["a", "a/", "a/report.md", "a/measurement.json"])
def test_findings_of_a_run_there_was(named: str, tmp_path: Path) -> None:
    before = {path: path.read_bytes() for path in write_run(tmp_path / "a").iterdir()}
    answer = asked(named)
    lines = answer.text.splitlines()
    assert lines[0].startswith("fastloop STARVED BY DATA") and "INACTIVE pin: needs CUDA" in lines
    assert any(line.startswith("FIX") and "rungs.workers {enabled: true}" in line for line in lines)
    assert lines[-2] == "PROVE    fastloop ab --script train.py --vs workers" and lines[-1].endswith("a/report.md")
    found = content(answer)
    assert found["run_dir"] == "a" and found["findings"][0]["bottleneck"] == "data_wait"
    assert found["measurement"]["steps"] == 50 and found["verdicts"][0]["rung"] == "pin"
    assert {path: path.read_bytes() for path in (tmp_path / "a").iterdir()} == before, "nothing is written"


def test_a_run_has_its_name_in_the_headline(tmp_path: Path) -> None:
    write_run(tmp_path / "a")
    (tmp_path / "a" / "env.json").write_text(json.dumps({"name": "my_net"}))
    assert asked("a").text.splitlines()[0].startswith("fastloop STARVED BY DATA 80 %   my_net ")


def test_a_rung_that_is_on_is_not_proposed_again(tmp_path: Path) -> None:
    write_run(tmp_path / "a", plan=Plan(steps=(Step(rung="workers", status="skipped", reason="iterable"),)))
    assert "rungs.workers {enabled: true}" not in asked("a").text


def test_a_file_of_an_older_version_is_enough(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    old = {
        "schema": 1,
        "steps": 50,
        "step_ms": {"mean": 100.0},
        "parts_ms": {"data_wait": 80.0},
        "unknown_key": 1,
        "total_steps": 60,
        "evidence": SEEN.evidence,
    }
    (tmp_path / "a" / "measurement.json").write_text(json.dumps(old))
    answer = asked("a")
    assert answer.text.startswith("fastloop STARVED BY DATA") and content(answer)["plan"]["rungs"] == []


@pytest.mark.parametrize("text", ["{", "[]", "\x00"])
def test_a_broken_file_is_said(text: str, tmp_path: Path) -> None:
    (write_run(tmp_path / "a") / "measurement.json").write_text(text)
    with pytest.raises(ConfigError, match="not a JSON object"):
        asked("a")


def test_a_file_that_cannot_be_read_is_not_called_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path / "a")
    refuse_reading(monkeypatch)
    with pytest.raises(ConfigError, match="it cannot be read: Permission denied") as error:
        asked("a")
    assert error.value.got == "a/measurement.json"


def test_values_of_the_wrong_kind_are_said(tmp_path: Path) -> None:
    content = {**store.to_json(SEEN), "ranks": [1], "kernels": {"busy_ms": 1.0, "families_ms": [1]}}
    (tmp_path / "measurement.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError) as error:
        asked(tmp_path)
    assert "measurement.json" in error.value.got and "it contains unexpected values" in error.value.why


def test_what_would_need_another_run_is_refused_with_the_way_to_it(tmp_path: Path) -> None:
    (write_run(tmp_path / "a") / "config.resolved.yaml").write_text("base: cifar10\n")
    with pytest.raises(ConfigError, match=r"--syncs, --trace with the run directory a\n") as error:
        asked("a", syncs=True, trace=3)
    assert error.value.do == "run it again: fastloop diagnose a/config.resolved.yaml --syncs --trace 3"
    with pytest.raises(ConfigError, match="KEY=VALUE"):
        asked("a", "run.max_steps=3")


def test_of_a_scripts_run_the_script_has_to_be_run_again(tmp_path: Path) -> None:
    (write_run(tmp_path / "a") / "config.resolved.yaml").write_text(to_yaml(load_callback_config(None)[0]))
    with pytest.raises(ConfigError) as error:
        asked("a", trace=7)
    assert "fastloop diagnose" not in error.value.do and "fastloop exec" in error.value.do
    assert 'run your script again with FastLoop({"watch": {"trace_steps": 7}})' in error.value.do
    assert load_callback_config({"watch": {"trace_steps": 7}})[0].watch.trace_steps == 7, "that is how it is asked for"
    with pytest.raises(ConfigError) as error:
        asked("a", syncs=True)
    assert "run your script again" in error.value.do and "trace_steps" not in error.value.do


def test_a_directory_without_a_run_is_said(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with pytest.raises(ConfigError, match=r"contains no measurement\.json"):
        asked("a")


def test_a_recipe_is_a_configuration_also_where_a_directory_has_its_name(tmp_path: Path) -> None:
    write_run(tmp_path / "gpt2")
    assert run_directory("gpt2") is None and run_directory("./gpt2") == Path("gpt2")
    assert run_directory("no-such-thing") is None and run_directory(str(NET)) is None
    assert run_directory("x" * 300) is None, "what no file can be called"


# -- a configuration --------------------------------------------------------------------------------------------------


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[tuple[str, Job]]]:
    """Trials that are not run: the first writes `seen` as a run would, the others give their rate or answer."""

    def instead(seen: Measurement | str, **results: Any) -> list[tuple[str, Job]]:
        jobs: list[tuple[str, Job]] = []

        def run_trial(name: str, job: Job, run_dir: Path, **_: Any) -> Trial:
            jobs.append((name, job))
            kept: dict[str, Any] = {"name": name, "seconds": 1.0, "run_dir": run_dir}
            result = seen if len(jobs) == 1 else results[name]
            if isinstance(result, str):
                code = 2 if result.startswith("fastloop: got") else 1
                return Trial(ok=False, cause=result, code=code, tail=result, **kept)
            if isinstance(result, Measurement):
                write_run(run_dir, seen)  # type: ignore[arg-type]
            if name in ("flops", "rates"):
                answer = store.decode(result, ANSWERS[name])
                return Trial(ok=True, cause=None, code=0, answer=answer, **kept)
            measured = result if isinstance(result, Measurement) else Measurement(samples_per_s=result)
            return Trial(ok=True, cause=None, code=0, measurement=measured, **kept)

        monkeypatch.setattr(command, "run_trial", run_trial)
        return jobs

    return instead


COUNTED = {"schema": 1, "per_sample": 1e9, "matmul": 1e9, "at_least": False, "source": "a trial"}


def test_ceilings_take_the_place_of_estimates(pretend: Callable[..., Any], tmp_path: Path) -> None:
    jobs = pretend(SEEN, replayed=180.0, resident=190.0, flops=COUNTED)
    answer = asked(NET, out="a")
    assert answer.text.splitlines()[0].startswith("fastloop STARVED BY DATA")
    found = content(answer)
    first = found["findings"][0]
    assert first["bottleneck"] == "data_wait" and first["ceiling_is_estimate"] is False
    assert first["ceiling_gain_pct"] == pytest.approx(350), "as measured, not 400 as the share would have it"
    assert found["measurement"]["ceilings"] == {"replayed": 180.0, "resident": 190.0}
    assert found["measurement"]["flops"]["per_sample"] == 1e9
    assert found["measurement"]["tflop_per_s"] == pytest.approx(0.04)
    assert [name for name, _ in jobs] == ["as it is", "replayed", "resident", "flops"]
    assert [trial["name"] for trial in found["trials"]] == ["as it is", "replayed", "resident", "flops"]
    written = {name: json.loads((tmp_path / "a" / f"{name}.json").read_text()) for name in ("measurement", "findings")}
    assert written["measurement"] == found["measurement"] and written["findings"]["findings"] == found["findings"]
    assert "measured" in (tmp_path / "a" / "report.md").read_text()


def test_without_trials_the_ceiling_is_an_estimate(pretend: Callable[..., Any]) -> None:
    pretend(SEEN, replayed="killed by SIGKILL", resident="hung", flops="exit code 1: no luck")
    answer = asked(NET, out="a")
    first = content(answer)["findings"][0]
    assert answer.exit_code == 0 and first["ceiling_is_estimate"] is True
    assert "NOTE     replayed could not be measured: killed by SIGKILL" in answer.text
    assert "NOTE     flops could not be measured: exit code 1: no luck" in answer.text


def test_the_hunt_and_the_trace_are_for_the_first_run_only(pretend: Callable[..., Any]) -> None:
    jobs = pretend(SEEN, replayed=180.0, resident=190.0, flops=COUNTED)
    asked(NET, "rungs.amp.enabled=true", syncs=True, trace=7)
    steps = [job.config().watch.trace_steps for _, job in jobs]
    assert steps == [7, 0, 0, 0] and [job.hunt_syncs for _, job in jobs] == [True, False, False, False]
    assert [job.further_steps for _, job in jobs] == [5 + 7 + 20, 0, 0, 0], "as many as asked for are timed"
    assert len({job.config().run.max_steps for _, job in jobs}) == 1, "its files shall say what was asked for"
    assert all(job.config().ladder.amp.enabled for _, job in jobs)
    jobs = pretend(SEEN, replayed=180.0, resident=190.0, flops=COUNTED)
    asked(NET, "watch.trace_steps=5", out="b")
    assert [job.config().watch.trace_steps for _, job in jobs] == [5, 0, 0, 0] and not jobs[0][1].hunt_syncs


def test_what_the_run_could_tell_itself_is_not_asked_again(pretend: Callable[..., Any]) -> None:
    on_gpu = dataclasses.replace(SEEN, device="cuda", device_name="NVIDIA H200", precision="32-true", flops=COUNTED)
    jobs = pretend(
        on_gpu,
        replayed=180.0,
        resident=190.0,
        no_exchange=50.0,
        rates={"schema": 1, "gemm_tflop_per_s": 700.0, "copy_tb_per_s": 4.0, "gemm_size": 8192},
    )
    answer = asked(NET, "run.devices=2", out="a")
    assert [name for name, _ in jobs] == ["as it is", "replayed", "resident", "no_exchange", "rates"]
    peaks = content(answer)["measurement"]["peaks"]
    assert (peaks["measured_tflop_per_s"], peaks["measured_copy_tb_per_s"]) == (700.0, 4.0)
    known = dataclasses.replace(on_gpu, peaks={"measured_tflop_per_s": 700.0})
    jobs = pretend(known, replayed=180.0, resident=190.0)
    asked(NET, out="b")
    assert [name for name, _ in jobs] == ["as it is", "replayed", "resident"]


@pytest.mark.parametrize(
    ("asks", "said"),
    [
        (
            {"trace": 2, "syncs": True},
            "27 steps more than run.max_steps, for the trace and the search for synchronizations",
        ),
        ({"trace": 2}, "22 steps more than run.max_steps, for the trace"),
        ({"syncs": True}, "5 steps more than run.max_steps, for the search for synchronizations"),
        ({}, None),
    ],
)
def test_steps_beyond_those_asked_for_are_said(
    asks: dict[str, Any], said: str | None, pretend: Callable[..., Any]
) -> None:
    pretend(SEEN, replayed=180.0, resident=190.0, flops=COUNTED)
    lines = asked(NET, out="a", **asks).text.splitlines()
    assert [line for line in lines if "run.max_steps" in line] == ([f"NOTE     {said}"] if said else [])


def test_a_trace_is_named_with_its_path(tmp_path: Path) -> None:
    write_run(tmp_path / "a")
    assert "TRACE" not in asked("a").text
    (tmp_path / "a" / "trace.json.gz").touch()
    assert asked("a").text.splitlines()[-1] == "TRACE    a/trace.json.gz"


def test_a_run_that_fails_ends_it(pretend: Callable[..., Any], tmp_path: Path) -> None:
    jobs = pretend("exit code 1: no luck")
    with pytest.raises(Failed, match="no luck") as raised:
        asked(NET, out="a")
    assert raised.value.exit_code == 1 and len(jobs) == 1


def test_stopped_what_was_measured_is_told_and_attached(
    pretend: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(SEEN)  # and no answer for the next trial
    told: list[str] = []
    monkeypatch.setattr(command, "_list_further", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt) as raised:
        diagnose(str(NET), Request(out="a", limit_s=120), told.append, syncs=False, trace=None)
    assert get_attached(raised.value) == load_run(Path("a")) and load_run(Path("a")).measurement is not None
    assert told == ["fastloop: the files so far are in a"]


def test_a_configuration_that_the_child_refuses_leaves_nothing(pretend: Callable[..., Any], tmp_path: Path) -> None:
    pretend("fastloop: got it")
    with pytest.raises(Failed) as raised:
        asked(NET)
    assert raised.value.exit_code == 2 and list(tmp_path.iterdir()) == []


def test_a_key_that_the_recipe_has_not_is_refused_before_anything_is_trained(
    pretend: Callable[..., Any], tmp_path: Path
) -> None:
    jobs = pretend(SEEN, replayed=180.0, resident=190.0, flops=COUNTED)
    with pytest.raises(ConfigError, match=r"got recipe.wokers \(command line\)(.|\n)*write workers"):
        asked(NET, "recipe.wokers=2")
    assert jobs == [] and list(tmp_path.iterdir()) == []
    asked(NET, "recipe.workers=2")
    assert len(jobs) == 4


def test_a_full_disk_is_no_fault_of_ours(pretend: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = pretend(SEEN, replayed=180.0, resident=190.0, flops=COUNTED)
    whole = store.write

    def full(where: Path, contents: Any) -> None:
        if len(jobs) == 4:  # all is trained: what is written now is the report with the ceilings
            raise OSError(errno.ENOSPC, "No space left on device", str(where / "findings.json"))
        whole(where, contents)

    monkeypatch.setattr(store, "write", full)
    with pytest.raises(FastLoopError) as error:
        asked(NET, out="a")
    assert error.value.got == "a/findings.json" and "No space left on device" in error.value.why
    assert "--out" in error.value.do and error.value.exit_code == 1


@pytest.mark.slow
def test_a_configuration_as_it_is(tmp_path: Path) -> None:
    answer = asked(SLOW, "recipe.load_ms=20", out="a")
    found = content(answer)
    assert answer.text.startswith("fastloop STARVED BY DATA"), answer.text
    assert all(trial["ok"] for trial in found["trials"])
    first = found["findings"][0]
    assert first["ceiling_is_estimate"] is False and first["ceiling_gain_pct"] > 200
    assert found["measurement"]["flops"]["per_sample"] == 608 and (tmp_path / "a" / "report.html").is_file()
    again = asked("a")
    assert content(again)["findings"] == found["findings"] and again.text.splitlines()[0].startswith("fastloop STARVED")

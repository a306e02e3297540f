"""The trainings of a search: which are asked for, and what becomes of those that fail."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from fastloop.config.loading import Config
from fastloop.experiments.ab import arms
from fastloop.experiments.ab.arms import ConfigArm
from fastloop.experiments.trials.trial import TRIAL, Job
from fastloop.experiments.tune import search as searching
from fastloop.experiments.tune.search import (
    KnownTimes,
    Search,
    Tuned,
    choose_steps,
    explain_inactive,
    make_point,
    read_own_value,
)
from fastloop.records.measurement import Measurement
from fastloop.records.store import decode
from fastloop.records.trial import LoaderAnswer, Trial
from tests.trainings import SLOW

Answers = Callable[[Config, str], Any]


@dataclass
class World:
    """Trainings that are not run: `step_ms` says for a configuration and a variation how long a step would take."""

    step_ms: Answers
    """None: the run is too short; text: why it fails."""
    skipped: dict[str, str] = field(default_factory=dict)
    loader: dict[str, Any] = field(default_factory=dict)
    global_batch: int = 16
    micro_batch: int = 4
    world_size: int = 1
    asked: list[str] = field(default_factory=list)
    steps: dict[str, int] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)

    def run_trial(self, name: str, job: Job, run_dir: Path, **_: Any) -> Trial:
        config = job.config()
        self.asked.append(name)
        self.steps[name] = config.run.max_steps
        run_dir.mkdir(parents=True)
        counts = self.ask_loader(job) if job.counts else None
        found = self.step_ms(config, job.variation) if counts is None else counts
        if isinstance(found, str):
            return Trial(name=name, ok=False, cause=found, seconds=1, run_dir=run_dir, code=1, tail=found)
        rungs = [
            {"rung": rung, "status": "skipped", "reason": self.skipped[rung]}
            for rung in config.ladder.enabled()
            if rung in self.skipped
        ]
        known: dict[str, Any] = {"name": name, "ok": True, "cause": None, "seconds": 1, "run_dir": run_dir, "code": 0}
        if job.variation == "loader":
            return Trial(**known, answer=decode({"counts": found, "inactive": self.loader}, LoaderAnswer))
        (run_dir / "plan.json").write_text(json.dumps({"rungs": rungs}))
        (run_dir / TRIAL).write_text(json.dumps({**known, "run_dir": str(run_dir)}))
        seen = {
            "samples_per_s": found and 1e3 * self.global_batch / found,
            "global_batch": self.global_batch,
            "micro_batch": self.micro_batch,
            "world_size": self.world_size,
            "window_too_short": False,
        }
        (run_dir / "measurement.json").write_text(json.dumps(seen))
        return Trial(**known, measurement=decode(seen, Measurement))

    def ask_loader(self, job: Job) -> Any:
        """The answer for each count, which ends as the real one does; text: why it fails."""
        found: list[Any] = []
        for count in job.counts:
            ms = self.step_ms(
                job.override("rungs.workers.enabled=true", f"rungs.workers.count={count}").config(), "loader"
            )
            if isinstance(ms, str):
                return ms
            found.append({"count": count, "ms_per_step": ms})
            if ms < (job.enough_ms or 0):
                break
        return found


@pytest.fixture
def tuned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Tuned]:
    def run(world: World, what: str, *overrides: str, cpus: int = 2, **settings: Any) -> Tuned:
        monkeypatch.setattr(arms, "run_trial", world.run_trial)
        monkeypatch.setattr(searching.machine, "count_usable_cpus", lambda: cpus)
        arm = ConfigArm(name="slow", job=Job(conf=str(SLOW), overrides=overrides))
        return Search(arm=arm, what=what, place=tmp_path / "place", progress=world.said.append, **settings).run()

    return run


def curve(found: Tuned) -> dict[int, float | None]:
    return {each.value: each.step_ms and round(each.step_ms, 3) for each in found.points}


def workers(times: dict[int, Any]) -> Answers:
    def step_ms(config: Config, variation: str) -> Any:
        rung = config.ladder.workers
        return times[rung.count if rung.enabled else 0]  # type: ignore[index]

    return step_ms


# -- workers ----------------------------------------------------------------------------------------------------------


def test_few_counts_are_trained_with_one_by_one(tuned: Callable[..., Tuned]) -> None:
    world = World(workers({0: 40, 1: 38, 2: 20}))
    found = tuned(world, "workers")
    assert world.asked == ["as-it-is", "workers-1", "workers-2"]
    assert (found.name, found.what, found.tolerance_pct, found.partial) == ("slow", "workers", 2, False)
    assert found.run_dir.endswith("place") and found.seconds is not None
    assert curve(found) == {0: 40, 1: 38, 2: 20}
    assert (found.key, found.best, found.as_it_is) == ("rungs.workers.count", 2, 0) and found.failed is None
    assert found.patch == {"rungs": {"workers": {"enabled": True, "count": 2}}}
    assert world.said == [
        "first your own setting, without the rung; then candidates",
        "workers-1; at most 1 more after it",
        "workers-2; the last",
    ]


def test_of_many_counts_the_loader_is_asked_first(tuned: Callable[..., Tuned]) -> None:
    alone = {1: 80, 2: 40, 4: 20, 8: 10, 16: 5}

    def step_ms(config: Config, variation: str) -> float:
        count = config.ladder.workers.count if config.ladder.workers.enabled else 0
        assert isinstance(count, int)
        if variation == "replayed":
            assert not count
            return 30
        return alone[count] if variation == "loader" else max(31, alone[count]) if count else 110

    world = World(step_ms)
    found = tuned(world, "workers", cpus=16)
    assert world.asked == ["as-it-is", "replayed", "loaders", "workers-4", "workers-8"]
    assert found.best == 4 and curve(found) == {0: 110, 4: 31, 8: 31}
    assert {each.value: each.loader_ms for each in found.loaders} == {
        1: 80,
        2: 40,
        4: 20,
    } and found.rest_ms == pytest.approx(30)


@pytest.mark.parametrize("breaks", ["replayed", "loader"])
def test_where_that_does_not_work_all_are_trained_with(breaks: str, tuned: Callable[..., Tuned]) -> None:
    times = workers({0: 40, 1: 40, 2: 20, 4: 10, 8: 10})
    world = World(lambda config, variation: "no luck" if variation == breaks else times(config, variation))
    found = tuned(world, "workers", cpus=8)
    assert found.best == 4 and world.asked[-4:] == ["workers-1", "workers-2", "workers-4", "workers-8"]
    assert found.failed is None and f"{breaks}{'s' if breaks == 'loader' else ''}" in world.asked


def test_a_rung_that_does_not_apply_is_not_tried_again(tuned: Callable[..., Tuned]) -> None:
    skipped = {"workers": "the loader already has 4 workers; your setting stands"}
    world = World(workers({0: 40, 1: 40, 2: 40}), skipped=skipped)
    found = tuned(world, "workers")
    assert world.asked == ["as-it-is", "workers-1"] and found.patch is None and found.best is None
    assert found.failed is None and skipped["workers"] in found.why
    (_, point) = found.points
    assert not point.ok and point.step_ms is None


def test_what_the_user_wrote_is_tried_and_stands(tuned: Callable[..., Tuned]) -> None:
    world = World(workers({0: 40, 1: 38, 2: 20, 3: 22}))
    found = tuned(world, "workers", "rungs.workers.count=3")
    assert found.yours == 3 and curve(found) == {0: 40, 1: 38, 2: 20, 3: 22}
    assert found.best == 2 and "your value 3 stays in effect until" in found.why


# -- the others -------------------------------------------------------------------------------------------------------


def batch(times: dict[int, Any]) -> Answers:
    def step_ms(config: Config, variation: str) -> Any:
        assert variation == "replayed"
        return times[config.ladder.batch.micro_batch if config.ladder.batch.enabled else 4]  # type: ignore[index]

    return step_ms


@pytest.mark.parametrize(
    ("times", "best", "tried"),
    [
        ({4: 40, 8: 30, 16: 20, 32: 15}, 32, [4, 8, 16, 32]),
        ({4: 40, 8: 30, 16: 20, 32: "exit code 1: CUDA out of memory. Tried to allocate"}, 16, [4, 8, 16, 32]),
        ({4: 40, 8: "exit code 1: CUDA out of memory. Tried to allocate", 16: 20, 32: 19.9}, 16, [4, 8, 16, 32]),
        ({4: 40, 8: 50, 16: 60, 32: 1}, None, [4, 8, 16]),
        ({4: 40, 8: 39.9, 16: 40.1, 32: 39.8}, None, [4, 8, 16, 32]),
    ],
    ids=["falling", "out of memory at the end", "out of memory in the middle", "rising", "flat"],
)
def test_micro_batches(times: dict[int, Any], best: int | None, tried: list[int], tuned: Callable[..., Tuned]) -> None:
    found = tuned(World(batch(times), global_batch=32), "batch", "trainer.accumulate_grad_batches=8")
    assert found.best == best and [each.value for each in found.points] == tried and found.as_it_is == 4
    lost = {each.value: each.why for each in found.points if not each.ok}
    assert lost == {value: "out of memory" for value in tried if isinstance(times[value], str)}
    assert found.patch == (best and {"rungs": {"batch": {"enabled": True, "micro_batch": best}}})


def test_ranks_share_the_global_batch(tuned: Callable[..., Tuned]) -> None:
    world = World(batch({4: 40, 8: 20, 16: 10}), global_batch=32, world_size=2)
    assert [each.value for each in tuned(world, "batch").points] == [4, 8, 16]


def test_one_batch_a_step_cannot_be_merged(tuned: Callable[..., Tuned]) -> None:
    found = tuned(World(batch({4: 40}), global_batch=4), "batch")
    assert found.best is None and found.failed is None and "nothing to merge" in found.why


@pytest.mark.parametrize(
    ("what", "key", "values"), [("prefetch", "depth", (1, 2, 4)), ("overlap", "bucket_cap_mb", (10, 25, 50, 100))]
)
def test_depths_and_buckets(what: str, key: str, values: tuple[int, ...], tuned: Callable[..., Tuned]) -> None:
    def step_ms(config: Config, variation: str) -> float:
        rung = getattr(config.ladder, what)
        return 30 - values.index(getattr(rung, key)) if rung.enabled else 40

    found = tuned(World(step_ms), what)
    assert curve(found) == {0: 40, **{value: 30 - place for place, value in enumerate(values)}}
    assert found.best == values[-1] and found.key == f"rungs.{what}.{key}"


# -- what goes wrong --------------------------------------------------------------------------------------------------


def test_without_the_training_as_it_is_there_is_no_search(tuned: Callable[..., Tuned]) -> None:
    world = World(lambda config, variation: "exit code 1: no luck")
    found = tuned(world, "workers")
    assert world.asked == ["as-it-is"] and found.failed is not None and found.failed.cause == "exit code 1: no luck"
    assert "exit code 1: no luck" in found.why


def test_where_all_values_fail_the_first_failure_is_kept(tuned: Callable[..., Tuned]) -> None:
    killed = "killed by SIGKILL: out of memory, or killed from outside"
    world = World(workers({0: 40, 1: killed, 2: "no luck", 4: 1}))
    found = tuned(world, "workers", cpus=4)
    assert world.asked == ["as-it-is", "workers-1", "workers-2"], "two in a row end it"
    assert found.failed is not None and found.failed.name == "workers-1"
    assert [each.why for each in found.points[1:]] == [killed, "no luck"]


def test_a_run_that_is_too_short_for_a_rate_is_no_point(tuned: Callable[..., Tuned]) -> None:
    found = tuned(World(workers({0: 40, 1: None, 2: 3})), "workers")
    assert found.best is None and "too short to measure a rate" in found.why


def test_what_was_trained_on_another_day_is_not_trained_again(tuned: Callable[..., Tuned]) -> None:
    tuned(World(workers({0: 40, 1: 30, 2: 20})), "workers")
    world = World(workers({0: 1, 1: 1, 2: 1}))
    again = tuned(world, "workers", resume=True)
    assert world.asked == [] and again.best == 2 and curve(again) == {0: 40, 1: 30, 2: 20}


# -- what is known already --------------------------------------------------------------------------------------------


def test_what_is_known_is_not_trained(tuned: Callable[..., Tuned]) -> None:
    world = World(batch({4: 1, 8: 30, 16: 20, 32: 1}), global_batch=32)
    given = KnownTimes(ms={4: 40.0, 32: 25.0}, micro=4, window=8)
    found = tuned(world, "batch", "trainer.accumulate_grad_batches=8", given=given)
    assert world.asked == ["batch-8", "batch-16"] and curve(found) == {4: 40, 8: 30, 16: 20, 32: 25}
    assert found.best == 16 and found.as_it_is == 4


@pytest.mark.parametrize(("beside", "variation"), [(True, "as_it_is"), (False, "replayed")])
def test_micro_batches_are_tried_as_what_is_known(tuned: Callable[..., Tuned], beside: bool, variation: str) -> None:
    tried: list[str] = []

    def step_ms(config: Any, how: str) -> float:
        tried.append(how)
        return 20.0

    world, given = World(step_ms), KnownTimes(ms={4: 40.0}, micro=4, window=8, beside=beside)
    tuned(world, "batch", "trainer.accumulate_grad_batches=8", given=given)
    assert set(tried) == {variation}


def test_a_known_start_may_stay_the_best(tuned: Callable[..., Tuned]) -> None:
    world = World(lambda config, variation: 30.0)
    found = tuned(world, "overlap", given=KnownTimes(ms={0: 20.0}))
    assert found.best is None and world.asked == ["overlap-10", "overlap-25"], "two that are worse end it"
    assert "as-it-is" not in world.asked


def test_who_asked_may_end_it_before_any_training(tuned: Callable[..., Tuned]) -> None:
    world, begun, found = World(workers({0: 40, 1: 30, 2: 20})), list[str](), list[Tuned]()

    def begins(label: str) -> None:
        begun.append(label)
        if len(begun) == 2:
            raise TimeoutError

    with pytest.raises(TimeoutError):
        tuned(world, "workers", begins=begins, stopped=lambda until_then, _: found.append(until_then))
    assert begun == ["as-it-is", "workers-1"] and world.asked == ["as-it-is"]
    assert [each.value for each in found[0].points] == [0] and len(found) == 1, "what there was until then"
    assert found[0].partial and found[0].best is None is found[0].patch and found[0].why == "it was stopped"


# -- pieces -----------------------------------------------------------------------------------------------------------


def config(*overrides: str) -> Config:
    return Job(conf=str(SLOW), overrides=overrides).config()


def test_a_window_is_long_enough_for_its_queues_and_no_longer_than_the_run() -> None:
    long = "run.max_steps=2000"
    assert choose_steps(config(), 0) == 5 + 30 + 2
    assert choose_steps(config(), 16) == 40, "run.max_steps"
    assert choose_steps(config(long), 16) == 16 + 160 + 2
    assert choose_steps(config(long, "trainer.accumulate_grad_batches=4"), 16) == 5 + 40 + 2
    merged = ("rungs.batch.enabled=true", "rungs.batch.micro_batch=8", "trainer.accumulate_grad_batches=4")
    assert choose_steps(config(long, *merged), 16) == 16 + 160 + 2


def test_longer_queues_get_longer_trainings_unless_the_steps_are_given(tuned: Callable[..., Tuned]) -> None:
    times = {0: 40, 1: 30, 2: 20}
    world = World(workers(times))
    tuned(world, "workers", "run.max_steps=500")
    assert world.steps == {"as-it-is": 37, "workers-1": 37, "workers-2": 47}


def test_given_steps_are_taken(tuned: Callable[..., Tuned]) -> None:
    world = World(workers({0: 40, 1: 30, 2: 20}))
    tuned(world, "workers", "run.max_steps=500", steps=12, warmup=3)
    assert set(world.steps.values()) == {12}


@pytest.mark.parametrize(
    ("override", "what", "value"),
    [
        ("rungs.workers.count=3", "workers", 3),
        ("rungs.workers.count=auto", "workers", None),
        ("rungs.workers.enabled=true", "workers", None),
        ("rungs.prefetch.depth=2", "prefetch", None),
        ("rungs.prefetch.depth=4", "prefetch", 4),
        ("rungs.overlap.bucket_cap_mb=80", "overlap", 80),
    ],
)
def test_a_number_of_the_users_is_one_that_is_not_the_default(override: str, what: str, value: int | None) -> None:
    assert read_own_value(config(override), what) == value


def test_a_verdict_of_no_effect_makes_a_rung_inactive(tmp_path: Path) -> None:
    assert explain_inactive(tmp_path, "workers") is None, "nothing was said"
    rows = [
        {"rung": "workers", "took": False, "why": "0 live worker processes fed the window"},
        {"rung": "pin", "took": None, "why": "it could not be seen"},
    ]
    (tmp_path / "verdicts.json").write_text(json.dumps({"verdicts": rows}))
    assert explain_inactive(tmp_path, "workers") == "0 live worker processes fed the window"
    assert explain_inactive(tmp_path, "pin") is None


def test_step_times_leave_out_what_a_queue_held(tmp_path: Path) -> None:
    seen: dict[str, Any] = {"samples_per_s": 400, "global_batch": 8, "step_ms": {"mean": 15.0}}
    seen |= {"window_too_short": True, "state": ["CPUs were busy"]}
    known: dict[str, Any] = {"name": "a", "ok": True, "cause": None, "seconds": 1, "run_dir": tmp_path, "code": 0}
    found = make_point(2, Trial(**known, measurement=decode(seen, Measurement)), "workers")
    assert found.step_ms == 20 and found.ok and found.why == "CPUs were busy; window too short"
    assert (
        make_point(
            2, Trial(**known, measurement=decode({**seen, "global_batch": None}, Measurement)), "workers"
        ).step_ms
        == 15
    )

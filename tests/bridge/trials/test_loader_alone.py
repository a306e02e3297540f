"""How fast a loader is on its own: against loaders whose time is known, and without a single step."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from fastloop.bridge.fit import recipe_modules
from fastloop.bridge.trials import loader_alone
from fastloop.bridge.trials.loader_alone import measure, time_window
from fastloop.errors import FastLoopError, NotApplicable
from fastloop.experiments.trials.supervise import Limits
from fastloop.experiments.trials.trial import Job, run_trial
from fastloop.records.trial import LoaderAnswer
from fastloop.rungs.workers import Workers
from tests.commands.command_line import measure_anew
from tests.runs import feed_on_cpu
from tests.trainings import SLOW

TWO = ("rungs.workers.enabled=true", "rungs.workers.count=2")
WINDOW = ("trainer.accumulate_grad_batches=4", "rungs.batch.enabled=true", "rungs.batch.micro_batch=8")


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, quick_starts: None) -> None:
    monkeypatch.setenv(recipe_modules.FOLDER, "")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(loader_alone, "LEAST_S", 1.2)


def measured(*overrides: str, beat: Path | None = None) -> Any:
    found = measure(Job(conf=str(SLOW), overrides=overrides).config(), beat)
    return json.loads(json.dumps(found))


@pytest.mark.parametrize(
    ("overrides", "step_ms"),
    [((), 80), (("trainer.accumulate_grad_batches=4",), 320), ((*TWO, *WINDOW), 160)],
    ids=["no workers", "accumulating", "two workers, windows merged"],
)
def test_a_known_loader(overrides: tuple[str, ...], step_ms: float, newborns: Callable[[], list[Any]]) -> None:
    found = measure_anew(
        lambda: measured("recipe.load_ms=80", *overrides), lambda found: found["ms_per_step"] < 1.6 * step_ms
    )
    assert 0.8 * step_ms < found["ms_per_step"] < 1.6 * step_ms, "it sleeps; a busy machine makes it later"
    assert found["workers"] == (2 if TWO[0] in overrides else 0)
    assert found["queue_drained"] is True and found["inactive"] == {}
    assert not newborns(), "no worker is left"


def several(*overrides: str, counts: tuple[int, ...], enough_ms: float | None = None) -> Any:
    return measure(Job(conf=str(SLOW), overrides=overrides).config(), None, counts, enough_ms)


def test_several_numbers_of_workers_in_one_process(newborns: Callable[[], list[Any]]) -> None:
    found = measure_anew(
        lambda: several("recipe.load_ms=80", counts=(1, 2, 4), enough_ms=60.0),
        lambda found: len(found["counts"]) == 2 and found["counts"][0]["ms_per_step"] < 1.6 * 80,
    )
    assert [each["count"] for each in found["counts"]] == [1, 2], "the second is enough"
    assert [each["workers"] for each in found["counts"]] == [1, 2] and found["inactive"] == {}
    one, two = (each["ms_per_step"] for each in found["counts"])
    assert 0.8 * 80 < one < 1.6 * 80 and 0.8 * 40 < two < 60 and not newborns()
    assert all(each["queue_drained"] for each in found["counts"])


@pytest.mark.parametrize(
    ("ms", "enough_ms", "measured"),
    [
        ([80.0, 60.0, 50.0], None, 3),
        ([80.0, 75.0, 20.0], None, 2),
        ([80.0, 60.0, 20.0], 61.0, 2),
        ([None, 60.0, 59.0], None, 3),
    ],
    ids=["all", "no faster", "enough", "one that does not tell"],
)
def test_more_workers_are_tried_while_they_help(
    ms: list[float | None], enough_ms: float | None, measured: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def alone(config: Any, *_: Any, **__: Any) -> Any:
        asked.append(config.ladder.workers)
        step = ms[len(asked) - 1]
        return SimpleNamespace(found={"ms_per_step": step, "inactive": {}}, slowest_ms=step or float("inf"))

    monkeypatch.setattr(loader_alone, "_time_alone", alone)
    found = several(counts=(2, 4, 8), enough_ms=enough_ms)
    assert [each.count for each in asked] == [2, 4, 8][:measured] and all(each.enabled for each in asked)
    assert [each["ms_per_step"] for each in found["counts"]] == ms[:measured]


def test_where_workers_do_not_apply_one_answer_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise NotApplicable("the dataset cannot be copied to workers")

    monkeypatch.setattr(Workers, "plan", refuse)
    found = several(counts=(1, 2, 4))
    assert len(found["counts"]) == 1 and found["inactive"] == {"workers": "the dataset cannot be copied to workers"}


def test_nothing_is_trained_and_nothing_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    trained: list[str] = []
    kept = loader_alone.training.train

    def train(config: Any, out: Any, *, prepare: Any) -> Any:
        def more(trainer: Any, loop: Any) -> None:
            prepare(trainer, loop)
            for name in ("training_step", "optimizer_step"):
                monkeypatch.setattr(trainer.strategy, name, lambda *_, name=name, **__: trained.append(name))

        return kept(config, out, prepare=more)

    monkeypatch.setattr(loader_alone.training, "train", train)
    found = measured("trainer.logger=true", "trainer.enable_checkpointing=true", "trainer.min_steps=3")
    assert found["batches"] > 3 and trained == [] and list(tmp_path.iterdir()) == []


def test_epochs_that_are_short_count_with_their_gaps(newborns: Callable[[], list[Any]]) -> None:
    found = measured("recipe.load_ms=20", "recipe.samples=24", *TWO)
    assert found["batches"] > 6 and found["ms_per_step"] > 0.75 * 10, "what was ready is not counted twice"
    assert not newborns()


def test_a_rung_that_does_not_apply_is_named() -> None:
    found = measured("rungs.prefetch.enabled=true")
    assert list(found["inactive"]) == ["prefetch"] and "needs CUDA" in found["inactive"]["prefetch"]


def test_a_feed_is_part_of_the_loader(monkeypatch: pytest.MonkeyPatch, newborns: Callable[[], list[Any]]) -> None:
    feed_on_cpu(monkeypatch)
    found = measure_anew(
        lambda: measured("recipe.load_ms=80", "rungs.prefetch.enabled=true", *TWO),
        lambda found: found["ms_per_step"] < 64,
    )
    assert found["inactive"] == {} and found["queue_drained"] and 32 < found["ms_per_step"] < 64
    assert found["batches"] >= 2 * (2 * 2 + 2) and not newborns()


def test_the_pulse_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader_alone.Beats, "on_train_start", lambda *_: None)
    stamps: list[int] = []
    beat = loader_alone.Beats._beat

    def noted(self: Any, trainer: Any) -> None:
        beat(self, trainer)
        stamps.append(os.stat(tmp_path / "beat").st_mtime_ns)

    monkeypatch.setattr(loader_alone.Beats, "_beat", noted)
    measured("recipe.load_ms=20", *TWO, beat=tmp_path / "beat")
    assert (tmp_path / "beat").read_text().split()[:2] == ["0", "40"]
    assert len(set(stamps)) >= 3, "at the start, and at every batch of the window"


def test_a_loader_without_batches_is_an_error() -> None:
    with pytest.raises(FastLoopError, match="nothing to train on"):
        measured("trainer.limit_train_batches=0")


def test_what_a_dataset_raises_comes_through_and_leaves_no_worker(
    monkeypatch: pytest.MonkeyPatch, newborns: Callable[[], list[psutil.Process]]
) -> None:
    def raises() -> None:
        assert newborns(), "the workers were there"
        raise ZeroDivisionError

    monkeypatch.setattr(loader_alone, "_make_take", lambda combined: lambda: next(combined) and raises())
    with pytest.raises(ZeroDivisionError):
        measured("recipe.load_ms=1", *TWO)
    assert not newborns()


@pytest.mark.slow
@pytest.mark.multirank
def test_ranks_load_at_once_in_a_trial_of_its_own(tmp_path: Path, newborns: Callable[[], list[psutil.Process]]) -> None:
    job = Job(conf=str(SLOW), overrides=("recipe.load_ms=80", "run.devices=2", *TWO), variation="loader")
    trial = measure_anew(
        lambda: run_trial("loader", job, tmp_path / "a", limits=Limits(total_s=90)),
        lambda trial: isinstance(trial.answer, LoaderAnswer) and (trial.answer.ms_per_step or 0) < 80,
    )
    assert trial.ok and trial.answer is not None, trial.tail
    assert isinstance(trial.answer, LoaderAnswer) and trial.answer.ms_per_step is not None
    assert 32 < trial.answer.ms_per_step < 80 and trial.answer.workers == 2
    assert trial.measurement is None and not newborns()


@pytest.mark.slow
@pytest.mark.multirank
def test_ranks_go_through_the_numbers_together(tmp_path: Path, newborns: Callable[[], list[psutil.Process]]) -> None:
    job = Job(
        conf=str(SLOW),
        overrides=("recipe.load_ms=80", "run.devices=2"),
        variation="loader",
        counts=(1, 2, 4),
        enough_ms=55.0,
    )
    trial = measure_anew(
        lambda: run_trial("loader", job, tmp_path / "a", limits=Limits(total_s=90)),
        lambda trial: isinstance(trial.answer, LoaderAnswer) and len(trial.answer.loaders_ms) == 2,
    )
    assert trial.ok and trial.answer is not None, trial.tail
    assert isinstance(trial.answer, LoaderAnswer) and not newborns()
    (one, one_ms), (two, two_ms) = trial.answer.loaders_ms.items()
    assert (one, two) == (1, 2) and one_ms > 60 and two_ms < 55


# -- counting, by a clock of its own ----------------------------------------------------------------------------------


class Clock:
    """Seconds that pass only where a batch is waited for."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def loader(monkeypatch: pytest.MonkeyPatch) -> Callable[..., loader_alone.LoaderWindow]:
    """Windows over made-up loaders: the seconds that each batch takes, what the queues hold, what of it is ready."""

    def run(seconds: Iterator[float], held: int, ready: list[int | None]) -> loader_alone.LoaderWindow:
        clock, fills = Clock(), iter(ready)
        monkeypatch.setattr(loader_alone, "time", clock)
        monkeypatch.setattr(loader_alone.loader_state, "count_queued_batches", lambda trainer: held)
        monkeypatch.setattr(loader_alone.loader_state, "count_batches_ready", lambda trainer: next(fills))

        def take() -> torch.Tensor:
            clock.now += next(seconds)
            return torch.zeros(4, 2)

        trainer: Any = SimpleNamespace(strategy=SimpleNamespace(root_device=torch.device("cpu")))
        return time_window(take, trainer, pulse=lambda: None)

    return run


def test_what_lay_in_the_queue_is_not_the_loaders_work(loader: Callable[..., loader_alone.LoaderWindow]) -> None:
    full = [0.0] * 16  # a queue that was filled while nobody looked
    found = loader(iter([*full, *[0.1] * 99]), 16, [0, 0])
    assert found.seconds / found.made == pytest.approx(0.1) and found.batches == 32 and found.drained
    found = loader(iter([*full, *[0.0] * 8, *[0.1] * 99]), 16, [8, 0])
    assert found.batches == 32 and found.made == 24 and found.seconds / found.made == pytest.approx(0.1)
    found = loader(iter([*full, *[0.1] * 99]), 16, [0, 10])
    assert found.made == found.batches + 10, "what is ready at the end was made in that time"


def test_where_the_queue_cannot_be_looked_into_that_is_said(loader: Callable[..., loader_alone.LoaderWindow]) -> None:
    found = loader(iter([0.1] * 99), 4, [None, 3])
    assert not found.drained and found.made == found.batches


def test_a_slow_loader_is_given_up_in_time(loader: Callable[..., loader_alone.LoaderWindow]) -> None:
    found = loader((9.0 for _ in count()), 16, [0, 0])
    assert found.seconds == 27 and found.batches == 3 and not found.drained, "not even the queue has passed"
    assert loader((9.0 for _ in count()), 1, [0, 0]).drained


def test_without_queues_a_few_batches_are_enough(loader: Callable[..., loader_alone.LoaderWindow]) -> None:
    found = loader((1.0 for _ in count()), 0, [0, 0])
    assert found.batches == 3 and found.drained

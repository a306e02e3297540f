"""The work of one sample: counted once, eager, without rungs, on two samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fastloop.bridge.fit import recipe_modules
from fastloop.bridge.trials import work_count
from fastloop.bridge.trials.work_count import count_flops, measure_rates
from fastloop.errors import FastLoopError
from fastloop.experiments.trials.trial import Job
from tests.trainings import SLOW

LAYERS = 2 * (8 * 16 + 16 * 1)
"""Forward of one sample: a multiplication and an addition per weight."""
EXPECTED = LAYERS + LAYERS + 2 * 16 * 1
"""And the backward: of the weights, and of the second layer's input. Nobody asks for the first one's."""


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(recipe_modules.FOLDER, "")


def counted(*overrides: str) -> Any:
    return count_flops(Job(conf=str(SLOW), overrides=overrides).counted().config(), beat=None)


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("recipe.by_hand=true",),
        ("trainer.accumulate_grad_batches=3",),
        ("run.devices=2",),
        (
            "rungs.amp.enabled=true",
            "rungs.batch={enabled: true, micro_batch: 2}",
            "rungs.pin.enabled=true",
            "strict=true",
        ),
    ],
    ids=["plain", "by hand", "accumulating", "two ranks", "rungs that do not apply, strictly"],
)
def test_the_work_of_a_sample(overrides: tuple[str, ...]) -> None:
    found = counted(*overrides)
    assert found["per_sample"] == found["matmul"] == EXPECTED and not found["at_least"]
    assert found["source"] == "a trial, eager, 2 samples"


def test_what_the_user_compiles_counts_the_same() -> None:
    assert counted("recipe.own_compile=true")["per_sample"] == EXPECTED


def test_one_step_is_enough_and_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    steps: list[int] = []
    ends = work_count._Counting.on_train_batch_end

    def notes(self: Any, trainer: Any, *rest: Any, **named: Any) -> None:
        steps.append(trainer.global_step)
        ends(self, trainer, *rest, **named)

    monkeypatch.setattr(work_count._Counting, "on_train_batch_end", notes)
    counted("run.max_steps=40", "recipe.load_ms=1")
    assert steps == [1] and list(tmp_path.iterdir()) == []


def test_a_batch_that_cannot_be_cut_is_counted_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: Any) -> None:
        raise work_count.CannotRegroup("not this one")

    monkeypatch.setattr(work_count, "cut", refuses)
    found = counted()
    assert found["per_sample"] == EXPECTED and found["source"] == "a trial, eager, 4 samples"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_there_are_no_rates() -> None:
    with pytest.raises(FastLoopError, match="no CUDA device"):
        measure_rates()

"""What makes the figures of a run doubtful is said, and nothing where there is no doubt."""

from __future__ import annotations

from typing import Any

import pytest

from fastloop.records.measurement import Measurement
from fastloop.records.plan import Plan
from fastloop.report.run import caveats, summary
from tests.diagnose.scenes import findings

UNEVEN = "the mean step is 4.8 times the median one: a few long steps distort these figures"


def seen(**what: Any) -> Measurement:
    return Measurement(steps=40, samples_per_s=500.0, **what)


@pytest.mark.parametrize("kernels", [None, {"busy_ms": 3.0}, {"skipped": None}])
def test_no_doubt(kernels: Any) -> None:
    assert caveats.list_caveats(seen(kernels=kernels)) == []


def test_an_epoch_that_was_continued_is_said() -> None:
    (note,) = caveats.list_caveats(seen(evidence={"resumed": {"epoch": 2, "batches": 7}}))
    assert note.startswith("training resumed after batch 7 of epoch 2")


def test_a_trace_that_was_asked_for_and_is_not_there_is_said() -> None:
    lines = summary.write_lines(seen(kernels={"skipped": "only one can run"}), Plan(), [], [])
    assert lines[-1] == "NOTE     no trace: only one can run"


@pytest.mark.parametrize(
    ("steps", "asked", "said"),
    [
        (15, 20, ["the trace covers 15 steps, not 20: training ended early"]),
        (1, 20, ["the trace covers 1 step, not 20: training ended early"]),
        (20, 20, []),
        (20, None, []),
    ],
)
def test_a_trace_of_fewer_steps_than_asked_for_is_said_to_be(steps: int, asked: int | None, said: list[str]) -> None:
    assert caveats.list_caveats(seen(kernels={"steps": steps, "asked_steps": asked})) == said


@pytest.mark.parametrize(("mean", "rare", "said"), [(8.1, 0.0, [UNEVEN]), (3.0, 0.0, []), (8.1, 6.0, [])])
def test_means_of_a_few_long_steps_are_said_to_be(mean: float, rare: float, said: list[str]) -> None:
    assert caveats.list_caveats(seen(step_ms={"mean": mean, "median": 1.7}, parts_ms={"validation": rare})) == said


@pytest.mark.parametrize(
    ("parts", "pauses", "told"),
    [
        ({}, {}, "the mean step is 4.8 times"),
        ({}, {"steps": 2, "ms_per_step": 6.0}, "2 of 40 steps were so long that"),
        ({"callbacks_logging": 6.0}, {}, "NOTE     the mean step is 4.8 times"),
    ],
)
def test_long_steps_are_told_of_once(parts: Any, pauses: Any, told: str) -> None:
    run = seen(
        step_ms={"mean": 8.1, "median": 1.7},
        parts_ms={"forward": 1.0, **parts},
        device="cpu",
        evidence={"pauses": pauses},
    )
    text = "\n".join(summary.write_lines(run, Plan(), [], findings(run)))
    assert told in text and sum(text.count(words) for words in caveats.LONG_STEPS) == 1, text


def test_a_trial_that_is_slower_than_the_run_is_said() -> None:
    (note,) = caveats.list_caveats(seen(ceilings={"replayed": 67.0, "resident": 499.0, "no_exchange": None}))
    assert note.startswith("the trial replayed was slower than the unchanged run (67 instead of 500 samples/s)")
    assert "resident" not in note
    assert caveats.list_caveats(Measurement(ceilings={"replayed": 67.0})) == []


def test_a_drift_is_said_with_what_it_came_with_and_after_the_state() -> None:
    drift = ({"step": 9, "change_pct": 4.0}, {"step": 70, "change_pct": 12.4, "why": "clocks"})
    assert caveats.list_caveats(seen(drift=drift, state=("hot",))) == [
        "hot; a step took 12 % longer at step 70 than in the timed window: clocks"
    ]
    assert caveats.list_caveats(seen(drift=drift[:1])) == []


def test_samples_that_come_several_times_are_the_first_doubt() -> None:
    doubtful = seen(evidence={"loader": {"repeats": "every sample comes 2 times"}}, state=("the clock was low",))
    assert caveats.list_caveats(doubtful) == ["every sample comes 2 times; the clock was low"]


@pytest.mark.parametrize(
    ("skipped", "said"), [(None, []), (0, []), (1, ["1 optimizer step "]), (3, ["3 optimizer steps "])]
)
def test_steps_that_a_loss_scaler_skipped_are_counted(skipped: int | None, said: list[str]) -> None:  # A8
    found = caveats.list_caveats(seen(evidence={"model": {"skipped_steps": skipped}}))
    assert [words in line for words, line in zip(said, found, strict=True)] == [True] * len(said)

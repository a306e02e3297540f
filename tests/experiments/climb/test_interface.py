"""What a climb sees of a trial's files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fastloop.experiments.climb.interface import Result, read_result
from fastloop.experiments.trials.supervise import TOO_SLOW
from fastloop.experiments.tune.search import compute_step_ms
from fastloop.records import store
from fastloop.records.measurement import Measurement
from fastloop.records.trial import LoaderAnswer, Trial

MEASURED: dict[str, Any] = {
    "samples_per_s": 2000.0,
    "global_batch": 256,
    "micro_batch": 64,
    "world_size": 2,
    "device": "cuda",
    "device_name": "NVIDIA Nothing",
    "step_ms": {"mean": 120.0},
    "trail_ms": 5.0,
    "mfu": {"datasheet": 0.04},
    "parts_ms": {"validation": 10.0, "checkpoint": None, "epoch_gap": 8.0, "forward": 50.0},
    "evidence": {"loader": {"num_workers": 4, "queued_batches": 10}},
}


def trial(place: Path, *, measurement: Any = MEASURED, answer: Any = None, **changes: Any) -> Trial:
    """A trial whose files hold these objects."""
    known: dict[str, Any] = {"name": "a", "ok": True, "seconds": 20.0, "run_dir": place, "code": 0, **changes}
    return Trial(**known, measurement=store.decode(measurement, Measurement), answer=store.decode(answer, LoaderAnswer))


def measured(content: dict[str, Any]) -> Measurement:
    found = store.decode(content, Measurement)
    assert found is not None
    return found


def test_what_a_training_says(tmp_path: Path) -> None:
    rows = [
        {"rung": "workers", "status": "planned", "parity_class": "exact"},
        {"rung": "amp", "status": "planned", "parity_class": "approximate"},
        {"rung": "layout", "status": "skipped", "reason": "the model has no 2-D convolution"},
    ]
    verdicts = [
        {"rung": "workers", "took": True, "why": "4 fed"},
        {"rung": "amp", "took": False, "why": "ran in fp32"},
        {"rung": "layout", "took": False, "why": "the model has no 2-D convolution"},
    ]
    store.write(
        tmp_path, {"plan.json": store.dump({"rungs": rows}), "verdicts.json": store.dump({"verdicts": verdicts})}
    )
    found = read_result(trial(tmp_path))
    assert found.step_ms == pytest.approx(128) and found.outside_ms == 18 and found.gap_ms == 8
    assert found.core_ms == pytest.approx(110) and found.mfu == 0.04 and found.launch_bound is True
    assert found.skipped == {"layout": "the model has no 2-D convolution"}
    assert set(found.inactive) == {"amp", "layout"} and found.classes["amp"] == "approximate"
    assert found.workers == 4 and found.queued == 10 and found.world_size == 2 and found.device == "cuda"


def test_what_a_loader_says(tmp_path: Path) -> None:
    answer = {"ms_per_step": 88.0, "workers": 8, "inactive": {"workers": "an iterable dataset"}}
    found = read_result(trial(tmp_path, measurement=None, answer=answer))
    assert found.loader_ms == 88 and found.workers == 8 and found.step_ms is None and found.core_ms is None
    assert found.skipped == {"workers": "an iterable dataset"}


def test_what_a_loader_says_with_several_counts(tmp_path: Path) -> None:
    counts = [
        {"count": 4, "ms_per_step": 88.0, "queue_drained": True},
        {"count": 8, "ms_per_step": 44.0, "queue_drained": True},
        {"count": 16, "ms_per_step": None, "queue_drained": True},
    ]
    found = read_result(trial(tmp_path, measurement=None, answer={"counts": counts, "inactive": {}}))
    assert found.loaders_ms == {4: 88, 8: 44} and found.fill_read and found.loader_ms is None and found.skipped == {}
    counts[1]["queue_drained"] = False
    assert not read_result(trial(tmp_path, measurement=None, answer={"counts": counts})).fill_read


def test_what_the_training_thread_waits_and_copies(tmp_path: Path) -> None:
    told = {**MEASURED, "host_ms": {"data_wait": 7.0}, "parts_ms": {"h2d": 0.5}}
    found = read_result(trial(tmp_path, measurement=told))
    assert (found.waits_ms, found.copies_ms) == (7, 0.5)
    unknown = read_result(trial(tmp_path, measurement={**MEASURED, "parts_ms": {"h2d": None}}))
    assert unknown.waits_ms is None and unknown.copies_ms is None, "not nothing"


def test_a_failed_training_says_why_and_nothing_else(tmp_path: Path) -> None:
    found = read_result(trial(tmp_path, ok=False, cause="killed by SIGKILL"))
    assert found == Result(ok=False, cause="killed by SIGKILL", seconds=20.0, steps=0, trial=found.trial)
    assert found.samples_per_s is None
    assert read_result(trial(tmp_path, ok=False, cause=f"{TOO_SLOW} 2 s, more than 1 s; it was ended")).too_slow


def test_the_step_is_corrected_for_drained_queues() -> None:
    drained = {**MEASURED, "samples_per_s": 1280.0}
    assert compute_step_ms(measured(drained)) == 200, "not the 120 ms that a queue made possible"
    assert (
        compute_step_ms(measured({"step_ms": {"mean": 120.0}})) == 120
        and compute_step_ms(measured({"step_ms": {"mean": None}})) is None
    )


@pytest.mark.parametrize(("trail", "bound"), [(None, None), (5.0, True), (60.0, False)])
def test_launches_limit_where_the_device_is_done_at_once(
    trail: float | None, bound: bool | None, tmp_path: Path
) -> None:
    assert read_result(trial(tmp_path, measurement={**MEASURED, "trail_ms": trail})).launch_bound is bound


def test_where_a_fit_ended_by_itself(tmp_path: Path) -> None:
    found = trial(tmp_path, measurement={**MEASURED, "total_steps": 16})
    assert read_result(found).ended_at == 16
    crashed = replace(found, ok=False, cause="exit code 1", measurement=Measurement(total_steps=5, partial=True))
    assert read_result(crashed).ended_at is None, "its own error is the reason"

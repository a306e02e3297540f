"""What comes between steps: named from its share, with what to do about it and no rung."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from fastloop.records.plan import Verdict
from tests.diagnose.scenes import NO_WORKERS, findings, gpt2_tuned, on_cpu, scene

GAPS = {"validation": "val_check_interval", "checkpoint": "AsyncCheckpointIO", "epoch_gap": "make epochs longer"}


@pytest.mark.parametrize(("of", "is_named"), [("on_train_epoch_end", True), ("training_step", False)])
def test_the_line_that_holds_up_epochs_is_named(of: str, is_named: bool) -> None:
    line = {"of": of, "where": "train.py:7", "function": "plot", "share_pct": 60.0}
    seen = on_cpu(epoch_gap=40.0, evidence={"lines": {"looks": 90, "lines": [line]}})
    finding = findings(seen)[0]
    assert finding.bottleneck == "epoch_gap"
    assert ("spread over all steps, most of it at train.py:7 in plot; " in finding.why) is is_named


@pytest.mark.parametrize("name", GAPS)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_gap_is_named_with_its_advice(name: str, device: str) -> None:
    seen = scene(100.0, device=device, trail=50.0 if device == "cuda" else None, **{name: 20.0})
    (finding,) = findings(seen)
    assert finding.bottleneck == name and finding.share_pct == pytest.approx(20)
    assert "20.0 of 100.0 ms a step" in finding.why and GAPS[name] in finding.why and "no rung helps" in finding.why
    assert finding.patch is None and finding.ceiling_gain_pct == pytest.approx(25) and finding.ceiling_is_estimate


@pytest.mark.parametrize("name", GAPS)
@pytest.mark.parametrize(("ms", "named"), [(4.9, False), (5.0, True)])
def test_from_five_per_cent_on(name: str, ms: float, named: bool) -> None:
    assert (findings(scene(100.0, device="cpu", **{name: ms}))[0].bottleneck == name) is named


@pytest.mark.parametrize(
    ("loader", "enabled", "advice"),
    [
        ({"num_workers": 4}, (), "your loader's 4 workers between epochs: persistent_workers=True"),
        ({"num_workers": 4, "can_keep_workers": False}, (), "make epochs longer"),
        ({"num_workers": 4}, ("workers",), "rungs.workers.persistent: true"),
        ({"num_workers": 4, "can_keep_workers": False}, ("workers",), "make epochs longer"),
        ({"num_workers": 0}, (), "make epochs longer"),
        ({"num_workers": 0, "reload_every_n_epochs": 1}, (), "make epochs longer"),
        (
            {"num_workers": 4, "persistent_workers": True, "reload_every_n_epochs": 1, "can_keep_workers": False},
            (),
            "and its workers every epoch: leave out reload_dataloaders_every_n_epochs if the data stays",
        ),
        ({"num_workers": 4, "reload_every_n_epochs": 1}, ("workers",), "leave out reload_dataloaders_every_n_epochs"),
        ({"num_workers": 4, "persistent_workers": True}, (), "make epochs longer"),
        ({"num_workers": 4, "persistent_workers": True}, ("workers",), "make epochs longer"),
    ],
)
def test_workers_that_start_anew_each_epoch(loader: dict[str, Any], enabled: tuple[str, ...], advice: str) -> None:
    (finding,) = findings(on_cpu(epoch_gap=10.0, loader={**NO_WORKERS, **loader}), enabled)
    assert finding.bottleneck == "epoch_gap" and advice in finding.why


@pytest.mark.parametrize(
    ("loader", "says", "not_says"),
    [
        ({}, "validate less often", "workers"),
        ({"validation_workers": 0}, "validate less often", "workers"),
        (
            {"validation_workers": 0, "validation_obstacle": None},
            "and give the validation loader workers",
            "persistent_workers",
        ),
        (
            {"validation_workers": 0, "validation_obstacle": "dataset.archive is an open file handle"},
            "; but leave the validation loader without workers: dataset.archive is an open file handle",
            "give",
        ),
        (
            {"validation_workers": 8, "validation_keeps_workers": False, "can_keep_for_validation": False},
            "validate less often",
            "workers",
        ),
        (
            {"validation_workers": 8, "validation_keeps_workers": False},
            "keep the validation loader's 8 workers between validations (persistent_workers=True); validate less often",
            "give the validation",
        ),
        ({"validation_workers": 8, "validation_keeps_workers": True}, "validate less often", "workers"),
    ],
)
def test_workers_that_start_anew_for_each_validation(loader: dict[str, Any], says: str, not_says: str) -> None:
    """A ViT's validation with 8 workers took half of its time, and the advice was to give it workers."""
    (finding,) = findings(on_cpu(validation=20.0, loader={**NO_WORKERS, **loader}))
    assert finding.bottleneck == "validation" and says in finding.why and not_says not in finding.why


@pytest.mark.parametrize("took", [True, False, None])
def test_workers_that_were_not_worth_it_are_not_advised_for_validation(took: bool | None) -> None:
    loader = {**NO_WORKERS, "validation_workers": 0, "validation_obstacle": None}
    verdict = Verdict(rung="workers", took=took, why="a batch takes 1.00 ms to make, but taking it took 2.00 ms")
    (finding,) = findings(on_cpu(validation=20.0, loader=loader), ("workers",), (verdict,))
    assert ("give the validation loader workers" in finding.why) is (took is not False)


@pytest.mark.parametrize("rows", ["both", "validation's", "refused", "on"])
def test_rows_that_validation_picks_one_by_one(rows: str) -> None:
    """The rung comes for the train loader, and serves validation with it."""
    loader = {**NO_WORKERS, "validation_workers": 0, "validation_rows": "TensorDataset"}
    loader |= {} if rows == "validation's" else {"rows": "TensorDataset"}
    refused = {"refused": {"cache": "why"}} if rows == "refused" else {}
    (finding,) = findings(on_cpu(validation=20.0, loader=loader, evidence=refused), ("cache",) if rows == "on" else ())
    assert finding.patch == ({"rungs": {"cache": {"enabled": True}}} if rows == "both" else None)
    assert ("with the cache rung, all rows of a validation batch are picked at once" in finding.why) is (rows == "both")


@pytest.mark.parametrize(("loading_ms", "helps"), [(None, True), (16.0, True), (2.0, False)])
def test_faster_loading_is_no_remedy_for_validation_that_computes(loading_ms: float | None, helps: bool) -> None:
    evidence = {} if loading_ms is None else {"validation": {"loading_ms": loading_ms}}
    rows = {**NO_WORKERS, "rows": "TensorDataset", "validation_workers": 0, "validation_rows": "TensorDataset"}
    (finding,) = findings(on_cpu(validation=20.0, loader=rows, evidence=evidence))
    assert (finding.patch is not None) is helps
    slow = {**NO_WORKERS, "validation_workers": 0, "validation_obstacle": None}
    (finding,) = findings(on_cpu(validation=20.0, loader=slow, evidence=evidence))
    assert ("give the validation loader workers" in finding.why) is helps
    share = None if loading_ms is None else f"; {5 * loading_ms:.0f} % of it is waiting for its batches"
    assert ("waiting for its batches" not in finding.why) if share is None else (share in finding.why)


@pytest.mark.parametrize(("images", "loading_ms", "says"), [(8, 16.0, True), (0, 16.0, False), (8, 2.0, False)])
def test_pictures_of_validation_go_to_the_engine_that_decodes_those_of_training(
    images: int, loading_ms: float, says: bool
) -> None:
    """A ViT under `full` spent half of its steps on validation's decoding, and no rung was to help."""
    advice, loader = "rungs.dali.validation: true", {**NO_WORKERS, "validation_workers": 8}
    for more in ({}, {"validation_images": 8}):
        evidence = {"validation": {"loading_ms": loading_ms}, "dali": {"images": images, **more}}
        for on in ("dali", "pin"):
            (finding,) = findings(on_cpu(validation=20.0, loader=loader, evidence=evidence), (on,))
            assert (advice in finding.why) is (says and on == "dali" and not more)


def test_validation_that_an_engine_loads_needs_no_workers() -> None:
    (finding,) = findings(on_cpu(validation=20.0, loader={**NO_WORKERS, "validation_has_engine": True}))
    assert "validate less often" in finding.why and "workers" not in finding.why


@pytest.mark.parametrize(
    ("loader", "gap_ms", "patched"),
    [
        ({"can_keep_workers": True}, 10.0, True),
        ({"can_keep_workers": True}, 30.0, False),  # most of it is something else
        ({"can_keep_workers": False}, 10.0, False),
    ],
)
def test_their_start_has_a_remedy_where_it_is_most_of_the_gap(
    loader: dict[str, Any], gap_ms: float, patched: bool
) -> None:
    """Seven starts of 0.1 s in a hundred steps are 7 ms a step."""
    found = {**NO_WORKERS, "num_workers": 4, "worker_restarts": 7, "worker_restart_s": 0.1, **loader}
    seen = dataclasses.replace(on_cpu(epoch_gap=gap_ms, loader=found), total_steps=100)
    (finding,) = findings(seen)
    patch = {"rungs": {"workers": {"enabled": True, "persistent": True, "across_epochs": True}}}
    assert finding.patch == (patch if patched else None) and ("can stay between epochs" in finding.why) is patched
    assert findings(seen, ("workers",))[0].patch is None, "a rung that is on"


@pytest.mark.parametrize("enabled", [(), ("workers",)])
def test_the_time_of_their_start_is_said_where_it_was_measured(enabled: tuple[str, ...]) -> None:
    found = {**NO_WORKERS, "num_workers": 4}
    words = "workers were restarted 7 times, 0.41 s each until their first batch"
    (finding,) = findings(on_cpu(epoch_gap=10.0, loader=found), enabled)
    assert words not in finding.why, "an older file, or workers that stay"
    loader = {**found, "worker_restarts": 7, "worker_restart_s": 0.412}
    (finding,) = findings(on_cpu(epoch_gap=10.0, loader=loader), enabled)
    assert words in finding.why and "persistent" in finding.why


def test_a_gap_is_told_even_where_the_gpu_is_well_used() -> None:
    (finding,) = findings(gpt2_tuned(validation=20.0))
    assert finding.bottleneck == "validation", "that the GPU is well used is no reason to hide it"

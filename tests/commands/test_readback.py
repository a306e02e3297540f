"""Records read back from a run directory, of this version, an older or a newer one, or broken."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fastloop.commands.readback import findings_from, measurement_from, plan_from, read, verdicts_from
from fastloop.measurement import PARTS, Measurement
from fastloop.records import Action, Applied, Change, Finding, Plan, Step, Verdict
from fastloop.report import files

FULL = Measurement(
    steps=20, samples_per_s=40.5, parts_ms={**dict.fromkeys(PARTS), "data_wait": 3.5}, lead_ms=None, loss=(1.0, 0.5),
    flops={"per_sample": 16, "at_least": False}, syncs=({"where": "a.py:3", "per_step": 1},), state=("hot",),
    ceilings={"replayed": 80.0, "resident": None}, window_too_short=False, partial=True, precision="32-true",
    ranks=({"rank": 0, "parts_ms": {"data_wait": 1.0}},), evidence={"loader": {"num_workers": 0}},
    kernels={"busy_ms": 2.0, "families_ms": {"gemm": 1.5}},
)  # fmt: skip


def test_what_was_written_is_read() -> None:
    assert measurement_from(json.loads(files.dump(files.measurement_json(FULL)))) == FULL
    assert measurement_from(json.loads(files.dump(files.measurement_json(Measurement())))) == Measurement()


def test_an_older_file_lacks_keys_and_a_newer_one_has_more() -> None:
    old = {"schema": 1, "steps": 5, "parts_ms": {"data_wait": 2.0}, "gpu": {"watts": 90.0}, "loss": [0.5]}
    seen = measurement_from({**old, "of_the_future": [1], "mfu": {"datasheet": 0.5, "another": 0.1}})
    assert seen.steps == 5 and seen.loss == (0.5,) and seen.ceilings == {} and seen.samples_per_s is None
    assert seen.parts_ms == {**dict.fromkeys(PARTS), "data_wait": 2.0}, "parts that it did not know were not measured"
    assert seen.gpu["watts"] == 90.0 and seen.gpu["sm_active_pct"] is None and seen.mfu["dtype_in_use"] is None


@pytest.mark.parametrize("wrong", [{"steps": "many"}, {"steps": None}, {"parts_ms": None}, {"loss": 3}, {"device": 1},
                                   {"partial": "yes"}, {"evidence": []}, {"steps": True}, {"samples_per_s": "fast"},
                                   {"kernels": 3}, {"lead_ms": True}], ids=str)  # fmt: skip
def test_what_is_of_another_kind_counts_as_not_measured(wrong: dict[str, object]) -> None:
    assert measurement_from(wrong) == Measurement()


def test_a_plan_comes_back_without_its_actions() -> None:
    action = Action(keys=("model.compile",), when="model", do=lambda site: Applied(undo=lambda: None))
    change = Change(wants={"loader.num_workers": 2}, parity="approximate", notes=("slow start",), actions=(action,))
    plan = Plan(steps=(Step(rung="workers", status="planned", change=change),
                       Step(rung="pin", status="skipped", reason="needs CUDA")))  # fmt: skip
    found = plan_from(json.loads(files.dump(files.plan_json(plan))))
    assert found.wants == plan.wants and found.parity == "approximate"
    assert [(step.rung, step.status, step.reason) for step in found.steps] == [
        ("workers", "planned", None), ("pin", "skipped", "needs CUDA")]  # fmt: skip
    assert found.steps[0].change.notes == ("slow start",) and plan_from({}) == Plan()


def test_verdicts_and_findings_come_back() -> None:
    verdicts = (Verdict(rung="pin", took=None, why="?"), Verdict(rung="amp", took=True, parity_class="approximate"))
    findings = (Finding(bottleneck="data_wait", share_pct=50.0, why="slow", patch={"rungs": {}}, ceiling_gain_pct=9.0),)
    assert verdicts_from(json.loads(files.dump(files.verdicts_json(verdicts)))) == verdicts
    assert findings_from(json.loads(files.dump(files.findings_json(findings)))) == findings
    assert findings_from({"findings": [{"bottleneck": "sync", "of_the_future": 1}, "no row"]})[0].why == ""
    assert verdicts_from({"verdicts": None}) == findings_from({}) == ()


def test_a_file_that_is_missing_or_broken_is_none(tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_text('{"steps": ')
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe")
    assert [read(tmp_path / f"{name}.json") for name in ("none", "broken", "list", "bytes")] == [None] * 4

"""Records read back from a run directory, of this version, an older or a newer one, or broken."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

import pytest

from fastloop.records import store
from fastloop.records.measurement import PARTS, Measurement
from fastloop.records.plan import Action, Applied, Change, Finding, Plan, Step, Verdict
from fastloop.records.run_files import FindingsFile, PlanFile, VerdictsFile
from fastloop.records.store import decode, load

FULL = Measurement(
    steps=20,
    samples_per_s=40.5,
    parts_ms={**dict.fromkeys(PARTS), "data_wait": 3.5},
    lead_ms=None,
    loss=(1.0, 0.5),
    flops={"per_sample": 16, "at_least": False},
    syncs=({"where": "a.py:3", "per_step": 1},),
    state=("hot",),
    ceilings={"replayed": 80.0, "resident": None},
    window_too_short=False,
    partial=True,
    precision="32-true",
    ranks=({"rank": 0, "parts_ms": {"data_wait": 1.0}},),
    evidence={"loader": {"num_workers": 0}},
    kernels={"busy_ms": 2.0, "families_ms": {"gemm": 1.5}},
)


def test_what_was_written_is_read() -> None:
    assert decode(json.loads(store.dump(FULL)), Measurement) == FULL
    assert decode(json.loads(store.dump(Measurement())), Measurement) == Measurement()


def test_an_older_file_lacks_keys_and_a_newer_one_has_more() -> None:
    old = {"schema": 1, "steps": 5, "parts_ms": {"data_wait": 2.0}, "gpu": {"watts": 90.0}, "loss": [0.5]}
    seen = decode({**old, "of_the_future": [1], "mfu": {"datasheet": 0.5, "another": 0.1}}, Measurement)
    assert seen is not None
    assert seen.steps == 5 and seen.loss == (0.5,) and seen.ceilings == {} and seen.samples_per_s is None
    assert seen.parts_ms == {**dict.fromkeys(PARTS), "data_wait": 2.0}, "parts that it did not know were not measured"
    assert seen.gpu["watts"] == 90.0 and seen.gpu["sm_active_pct"] is None and seen.mfu["dtype_in_use"] is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"steps": "many"},
        {"steps": None},
        {"parts_ms": None},
        {"loss": 3},
        {"device": 1},
        {"partial": "yes"},
        {"evidence": []},
        {"steps": True},
        {"samples_per_s": "fast"},
        {"kernels": 3},
        {"lead_ms": True},
    ],
    ids=str,
)
def test_what_is_of_another_kind_counts_as_not_measured(wrong: dict[str, object]) -> None:
    assert decode(wrong, Measurement) == Measurement()
    assert decode({**wrong, "wall_ms": 2}, Measurement) == Measurement(wall_ms=2.0), "the others are not lost"


def test_a_plan_comes_back_without_its_actions() -> None:
    action = Action(keys=("model.compile",), when="model", do=lambda site: Applied(undo=lambda: None))
    change = Change(wants={"loader.num_workers": 2}, parity="approximate", notes=("slow start",), actions=(action,))
    plan = Plan(
        steps=(
            Step(rung="workers", status="planned", change=change),
            Step(rung="pin", status="skipped", reason="needs CUDA"),
        )
    )
    file = decode(json.loads(store.dump(PlanFile.of(plan))), PlanFile)
    assert file is not None
    found = file.to_plan()
    assert found.wants == plan.wants and found.parity == "approximate"
    assert [(step.rung, step.status, step.reason) for step in found.steps] == [
        ("workers", "planned", None),
        ("pin", "skipped", "needs CUDA"),
    ]
    assert found.steps[0].change.notes == ("slow start",) and decode({}, PlanFile) == PlanFile()
    assert PlanFile().to_plan() == Plan()


def test_verdicts_and_findings_come_back() -> None:
    verdicts = (Verdict(rung="pin", took=None, why="?"), Verdict(rung="amp", took=True, parity_class="approximate"))
    findings = (Finding(bottleneck="data_wait", share_pct=50.0, why="slow", patch={"rungs": {}}, ceiling_gain_pct=9.0),)
    for record in (VerdictsFile(verdicts=verdicts), FindingsFile(findings=findings)):
        assert decode(json.loads(store.dump(record)), type(record)) == record
    rows = [{"bottleneck": "sync", "of_the_future": 1}, "no row", {"why": "of nothing"}]
    assert decode({"findings": rows}, FindingsFile) == FindingsFile(findings=(Finding(bottleneck="sync"),))
    assert decode({"verdicts": None}, VerdictsFile) == VerdictsFile()


def test_a_file_that_is_missing_or_broken_is_none(tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_text('{"steps": ')
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe")
    assert [load(tmp_path / f"{name}.json", Measurement) for name in ("none", "broken", "list", "bytes")] == [None] * 4


@dataclass(frozen=True, kw_only=True)
class Row:
    name: str
    kind: str = field(default="exact", metadata={"json": "class"})
    kept_elsewhere: int = field(default=0, metadata={"json": None})
    ends: tuple[float, float] | None = None
    sizes: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Table:
    schema: ClassVar[int] = 1
    computed: ClassVar[tuple[str, ...]] = ("count",)
    rows: tuple[Row, ...] = ()
    best: Row | None = None
    by_name: Mapping[str, Row] = field(default_factory=dict)

    @property
    def count(self) -> int:
        return len(self.rows)


def test_nested_records_other_keys_and_computed_values(tmp_path: Path) -> None:
    row = Row(name="a", kind="approximate", kept_elsewhere=3, ends=(1, 2), sizes={"x": 1})
    table = Table(rows=(row,), best=row, by_name={"a": row})
    store.save(tmp_path, {"table.json": table})
    plain = {"name": "a", "class": "approximate", "ends": [1, 2], "sizes": {"x": 1}}
    expected = {"schema": 1, "rows": [plain], "best": plain, "by_name": {"a": plain}, "count": 1}
    text = (tmp_path / "table.json").read_text()
    assert text == json.dumps(expected, indent=1) + "\n", "keys in this order, indented by 1"
    back = replace(row, kept_elsewhere=0)
    assert load(tmp_path / "table.json", Table) == Table(rows=(back,), best=back, by_name={"a": back})


def test_a_loss_that_was_not_finite_is_none_of_the_finite_ones() -> None:
    back = decode(json.loads(store.dump(Measurement(loss=(1.0, math.nan, math.inf, 2.0)))), Measurement)
    assert back is not None and [math.isnan(loss) for loss in back.loss] == [False, True, True, False]


def test_what_does_not_fit_is_left_out_of_lists_and_mappings() -> None:
    bad = [{"class": "x"}, {"name": 3}, None, {"name": "b", "ends": [1], "sizes": {"x": 1.0, "y": "many"}}]
    table = decode({"rows": bad, "best": {}, "by_name": {"a": 1, "c": {"name": "c"}}}, Table)
    assert table == Table(rows=(Row(name="b", sizes={"x": 1}),), by_name={"c": Row(name="c")})

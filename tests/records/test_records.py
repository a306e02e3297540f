"""The records: frozen, keyword-only, free of torch, and honest about what was not measured."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import Any

import pytest

from fastloop.records import card, experiment, facts, measurement, plan, run_files
from fastloop.records.facts import Facts
from fastloop.records.plan import PARITY_ORDER, Applied, Change, Finding, Plan, Step

MODULES = (card, experiment, facts, measurement, plan, run_files)
RECORDS = {
    kind
    for module in MODULES
    for kind in vars(module).values()
    if isinstance(kind, type) and dataclasses.is_dataclass(kind)
}


@pytest.mark.parametrize("kind", sorted(RECORDS, key=lambda kind: kind.__name__), ids=lambda kind: kind.__name__)
def test_frozen_and_keyword_only(kind: Any) -> None:
    assert kind.__dataclass_params__.frozen
    assert all(field.kw_only for field in dataclasses.fields(kind))
    assert kind.__doc__ and not kind.__doc__.startswith(f"{kind.__name__}(")


def test_there_are_all_of_them() -> None:
    names = {kind.__name__ for kind in RECORDS}
    assert names >= {"Facts", "LoaderFacts", "Action", "Applied", "Change", "Step", "Plan", "Verdict", "Finding"}


def test_no_torch() -> None:
    code = "import sys, fastloop.records.plan, fastloop.errors; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=True)
    assert done.stdout.strip() == "False"


def test_facts_after_a_change() -> None:
    facts = Facts(accumulate=4)
    assert facts.after({}) is facts
    assert facts.after({"accumulate": 1}) == Facts(accumulate=1) and facts.accumulate == 4
    with pytest.raises(TypeError):
        facts.after({"acumulate": 1})


def step(rung: str, status: Any = "planned", **change: Any) -> Step:
    return Step(rung=rung, status=status, change=Change(**change))


def test_a_plan_merges_what_is_planned() -> None:
    plan = Plan(
        steps=(
            step("workers", wants={"a": 1}),
            step("amp", wants={"b": 2}, parity="approximate"),
            step("fused", "skipped", wants={"c": 3}, parity="changes-training"),
            step("batch", "waiting", wants={"d": 4}, parity="changes-training"),
        )
    )
    assert plan.wants == {"a": 1, "b": 2}
    assert [planned.rung for planned in plan.planned] == ["workers", "amp"]
    assert plan.parity == "approximate"
    assert plan.step("amp") is plan.steps[1] and plan.step("layout") is None


@pytest.mark.parametrize(
    ("classes", "weakest"),
    [
        ([], "exact"),
        (["exact"], "exact"),
        (["approximate", "exact"], "approximate"),
        (["exact", "changes-training", "approximate"], "changes-training"),
    ],
)
def test_the_weakest_class_is_the_plans(classes: list[Any], weakest: str) -> None:
    assert Plan(steps=tuple(step(str(place), parity=kind) for place, kind in enumerate(classes))).parity == weakest
    assert PARITY_ORDER == ("exact", "approximate", "changes-training")


@pytest.mark.parametrize(("has_acted", "promise"), [(True, "approximate"), (False, "exact")])
def test_what_trained_until_it_was_switched_off_counts(has_acted: bool, promise: str) -> None:
    """Workers that made the first batches have drawn their own random numbers for them."""
    off = dataclasses.replace(step("workers", "skipped", parity="approximate"), has_acted=has_acted)
    assert Plan(steps=(off, step("host"))).parity == promise


def test_a_finding_has_the_contracts_keys_and_promises_nothing_by_itself() -> None:
    keys = dataclasses.asdict(Finding(bottleneck="none", share_pct=None, why="x")).keys()
    assert keys >= {
        "bottleneck",
        "share_pct",
        "why",
        "patch",
        "ceiling_gain_pct",
        "ceiling_is_estimate",
        "detail",
        "title",
    }
    blank = Finding(bottleneck="none", share_pct=None, why="x")
    assert blank.patch is blank.ceiling_gain_pct is None and blank.ceiling_is_estimate
    assert blank.detail == () and blank.title == ""


def test_an_action_without_evidence_has_none() -> None:
    applied = Applied(undo=lambda: None)
    checkpoint = {"state_dict": {}}
    applied.clean(checkpoint)
    assert applied.probe() == {} and checkpoint == {"state_dict": {}}

"""All rules together: real runs, two faults at once, nothing to name, and whatever a measurement may hold."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest

from fastloop.config.loading import load_callback_config
from fastloop.diagnose import list_next_steps
from fastloop.diagnose.rules import RULES
from fastloop.ladder import Ladder, collect_cards
from fastloop.records.measurement import FAMILIES, PARTS, Measurement
from fastloop.records.plan import Finding
from tests.diagnose.scenes import NO_WORKERS, cifar10_launches, findings, gpt2_naive, gpt2_tuned, on_cpu, scene

NAMES = {
    "data_wait",
    "h2d",
    "launch_bound",
    "host_other",
    "callbacks_logging",
    "sync",
    "comm_exposed",
    "straggler",
    "memory_bound",
    "compute_bound",
    "fp32_math",
    "validation",
    "checkpoint",
    "epoch_gap",
    "none",
}
"""As the contract lists them."""
RUNGS = tuple(field.name for field in dataclasses.fields(Ladder))
RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "recipes_h200_202611.json"


def test_one_rule_for_each_bottleneck() -> None:
    assert set(RULES) == NAMES - {"none"}


def make_table(**changes: Any) -> Measurement:
    """A small network on a table, one H100: 9.5 ms a step, of which a kernel runs for a twentieth."""
    parts = {"data_wait": 2.18, "validation": 1.47, "callbacks_logging": 1.13, "host_other": 1.08}
    bar = {"where": "a.py:1", "what": "progress bar", "per_step": 1.0}
    rows = {**NO_WORKERS, "rows": "TensorDataset", "validation_rows": "TensorDataset", "validation_workers": 0}
    known: dict[str, Any] = {"trail": 0.0, "gpu": {"gr_active_pct": 5.0}, "syncs": (bar,), "loader": rows}
    return scene(9.5, **parts, **{**known, **changes})


def test_what_one_patch_removes_counts_together() -> None:
    """On an H100 the table trained 1.67 times as fast with `cache`, and 1.21 times with what is against the largest
    single share."""
    first, second, third, *_ = findings(make_table())
    assert [first.bottleneck, second.bottleneck, third.bottleneck] == ["data_wait", "validation", "launch_bound"]
    assert first.patch == second.patch == {"rungs": {"cache": {"enabled": True}}} != third.patch
    assert (third.share_pct or 0) > (first.share_pct or 0) > (second.share_pct or 0)
    assert first.detail[0] == "the same patch also addresses HELD UP BY VALIDATION (15 % of the step)"
    alone = findings(make_table(loader={**NO_WORKERS, "rows": "TensorDataset"}))
    assert [each.bottleneck for each in alone][:2] == ["launch_bound", "data_wait"], "validation has no patch here"
    assert "the same patch" not in "".join(alone[1].detail)
    died = findings(make_table(died_of="ValueError: no"))
    assert all(each.patch is None and "the same patch" not in "".join(each.detail) for each in died)


# -- runs that happened -----------------------------------------------------------------------------------------------

EXPECTED = {
    ("resnet50", "naive"): "data_wait",
    ("resnet50", "full"): "data_wait",
    ("cifar10", "naive"): "data_wait",
    ("cifar10", "resident"): "launch_bound",
    ("cifar10", "safe"): "data_wait",
    ("resnet50", "safe"): "none",
    ("resnet50", "resident"): "none",
    ("gpt2", "full"): "none",
    ("gpt2", "resident"): "none",
    ("gpt2", "naive"): "none",
    ("gpt2", "safe"): "none",
    ("cifar10", "full"): "launch_bound",
}
"""Those runs had no counters yet: a GPU that is the limit then gets no name, and no advice."""


def recorded() -> list[dict[str, Any]]:
    return [row for row in map(json.loads, RESULTS.read_text().splitlines()) if "run" in row]


@pytest.mark.parametrize("row", recorded(), ids=lambda row: f"{row['recipe']}-{row['arm']}-{row['run']}")
def test_runs_on_an_h200(row: dict[str, Any]) -> None:
    on = tuple(row["took"])
    workers = 8 if "workers" in on or row["arm"] == "resident" else 0
    seen = scene(
        row["step_ms"]["mean"],
        data_wait=row["data_wait_ms"],
        lead_ms=row["lead_ms"],
        micro_batch=64,
        loader={**NO_WORKERS, "num_workers": workers},
        samples_per_s=row["samples_per_s"],
        precision="bf16-mixed" if "amp" in on else "32-true",
    )
    found = findings(seen, on)
    assert found[0].bottleneck == EXPECTED[row["recipe"], row["arm"]]
    for finding in found:
        assert finding.patch is None or not set(finding.patch["rungs"]) & set(on)
    if row["arm"] == "naive" and row["recipe"] != "gpt2":
        assert found[0].patch == {"rungs": {"workers": {"enabled": True}}}


def of_a_report(name: str) -> Finding:
    """Of gpt2 under `full`, as an H200 measured it."""
    content = json.loads((RESULTS.parent / f"report_{name}_h200_202611.json").read_text())
    names = {field.name for field in dataclasses.fields(Measurement)}
    seen = Measurement(**{key: value for key, value in content.items() if key in names}, device="cuda")
    (finding,) = findings(seen, ("amp", "layout", "compile", "fused", "batch"))
    return finding


def test_a_run_whose_gpu_was_idle_for_two_thirds_is_not_called_busy() -> None:
    finding = of_a_report("gpt2_full_recompiled")
    assert finding.title == "NO BOTTLENECK FOUND" and finding.patch is None
    said = ("idle for another 617.7 of 945.6 ms", "mean step is 2.9 times the median", "67 samples/s now")
    assert [words for words in said if words not in finding.why] == []
    assert of_a_report("gpt2_full").title == "BUSY, NOT FAST: MISALIGNED MATMULS", (
        "the control: the same without a recompile"
    )


# -- faults planted into a healthy run --------------------------------------------------------------------------------

FAULTS: dict[str, dict[str, Any]] = {
    "data_wait": {"data_wait": 16.0},
    "callbacks_logging": {"callbacks_logging": 12.0},
    "checkpoint": {"checkpoint": 9.0},
    "validation": {"validation": 7.0},
    "epoch_gap": {"epoch_gap": 5.0},
    "host_other": {"blocked_ms": 14.0},
}


def planted(*faults: str) -> Measurement:
    """A healthy CPU step of 40 ms with faults, each of which makes it longer."""
    changes = {name: value for fault in faults for name, value in FAULTS[fault].items()}
    return on_cpu(step=40.0 + sum(changes.values()), **changes)


def test_a_healthy_run_has_no_fault() -> None:
    (finding,) = findings(planted())
    assert (
        finding.bottleneck == "none" and finding.patch is None and finding.why.startswith("no rung is worth trying: ")
    )


@pytest.mark.parametrize("fault", FAULTS)
def test_one_fault_is_the_only_one_named(fault: str) -> None:
    assert [finding.bottleneck for finding in findings(planted(fault))] == [fault]


@pytest.mark.parametrize("pair", list(itertools.combinations(FAULTS, 2)), ids="+".join)
def test_two_faults_are_both_named_by_their_share(pair: tuple[str, str]) -> None:
    found = findings(planted(*pair))
    sizes = {fault: sum(FAULTS[fault].values()) for fault in pair}
    assert [finding.bottleneck for finding in found] == sorted(pair, key=lambda fault: -sizes[fault])
    assert sum(finding.share_pct or 0 for finding in found) <= 100
    for finding in found:
        gain, seen = finding.ceiling_gain_pct, planted(*pair)
        step = seen.step_ms["mean"]
        assert gain is not None and step is not None
        assert 1 + gain / 100 == pytest.approx(step / (step - finding.share_pct * step / 100)), "Amdahl"


def test_two_faults_on_a_gpu() -> None:
    found = findings(gpt2_naive(validation=200.0, h2d=300.0))
    assert [finding.bottleneck for finding in found] == ["fp32_math", "h2d", "validation"]


# -- beside them ------------------------------------------------------------------------------------------------------


def test_the_state_of_the_machine_stands_by_the_first_finding() -> None:
    state = ("power cap seen in 12 of 30 seconds",)
    found = findings(dataclasses.replace(planted("data_wait", "checkpoint"), state=state))
    assert found[0].detail[-1:] == state and found[1].detail == ()
    assert findings(dataclasses.replace(planted(), state=state))[0].detail == state


# -- whatever a measurement may hold ----------------------------------------------------------------------------------


def anything(draw: random.Random) -> tuple[Measurement, tuple[str, ...]]:
    """A measurement of random figures, any of which may be missing or absurd."""

    def some(low: float, high: float) -> float | None:
        return draw.choice((None, 0.0, high, draw.uniform(low, high), draw.uniform(low, high)))

    step = draw.choice((None, 0.3, 4.0, 60.0, 1500.0))
    most = 1.3 * (step or 1.0)
    world = draw.choice((1, 1, 2, 4))
    idle = {kind: some(0, most) for kind in ("data", "launch", "sync", "other")}
    kernels = {
        "busy_ms": some(0, most),
        "idle_ms": idle,
        "families_ms": {family: some(0, most) for family in FAMILIES},
        "comm_exposed_ms": some(0, most),
        "top": draw.choice(([], [{"name": "triton_x"}])),
    }
    ranks = tuple(
        {"rank": rank, "host": "h", "step_ms": step, "parts_ms": {part: some(0, most) for part in PARTS}}
        for rank in range(world)
    )
    seen = Measurement(
        steps=100,
        step_ms={"mean": step},
        parts_ms={part: some(-1, most / 3) for part in PARTS},
        world_size=world,
        device=draw.choice(("cpu", "cuda", "cuda", "mps")),
        lead_ms=some(0, most),
        trail_ms=some(0, most),
        host_ms={part: some(0, most) for part in PARTS},
        blocked_ms=some(0, most),
        hooks_ms={"a": 1.0, "b": 0.0},
        gpu={
            name: some(0, 100)
            for name in ("nvml_busy_pct", "gr_active_pct", "sm_active_pct", "tensor_active_pct", "dram_active_pct")
        },
        peaks={
            "dtype": draw.choice((None, "fp32", "tf32", "bf16", "fp32 + tf32")),
            "dtype_tflop_per_s": some(1, 900),
            "datasheet_tflop_per_s": some(1, 900),
            "dram_tb_per_s": some(1, 5),
            "measured_copy_tb_per_s": some(1, 5),
        },
        mfu={"datasheet": some(0, 1), "dtype_in_use": some(0, 1)},
        tflop_per_s=some(0, 900),
        precision="32-true",
        flops=draw.choice(({}, {"convolution": 1.0, "at_least": True})),
        kernels=draw.choice((None, kernels, {})),
        syncs=draw.choice(((), ({"where": "a:1", "per_step": some(0, 2), "ms_per_step": some(0, most)}, {}))),
        samples_per_s=some(0, 1000),
        ceilings={name: some(0, 3000) for name in ("replayed", "resident", "no_exchange")},
        ranks=draw.choice(((), ranks)),
        micro_batch=draw.choice((None, 8)),
        global_batch=draw.choice((None, 8, 64)),
        state=draw.choice(((), ("throttled",))),
        evidence=draw.choice(({}, {"loader": NO_WORKERS}, {"loader": {"num_workers": 4, "usable_cpus": None}})),
    )
    return seen, tuple(rung for rung in RUNGS if draw.random() < 0.3)


@pytest.mark.parametrize("seed", range(8))
def test_it_never_raises_and_keeps_its_word(seed: int) -> None:
    draw, named = random.Random(seed), set()
    for _ in range(250):
        seen, enabled = anything(draw)
        found = findings(seen, enabled)
        names = [finding.bottleneck for finding in found]
        named |= set(names)
        assert names and set(names) <= NAMES and len(set(names)) == len(names)
        assert "none" not in names or names == ["none"]
        shares = [finding.share_pct for finding in found if finding.share_pct is not None]
        assert all(0 <= share <= 100 for share in shares) and sum(shares) <= 100 + 1e-6
        helpless = [each for each in found if each.bottleneck == "compute_bound" and each.patch is None]
        in_order = [finding.share_pct or 0.0 for finding in found if finding not in helpless]
        assert in_order == sorted(in_order, reverse=True)
        for finding in found:
            check(finding, enabled)
            assert finding.title.isupper()
        then, later = list_next_steps(found, seen, collect_cards(), enabled)
        assert not {*then, *later} & set(enabled) and not set(then) & set(later)
        patched = {rung for finding in found if finding.patch for rung in finding.patch["rungs"]}
        assert ((then, later) == ((), ())) if not patched else not patched & {*then, *later}
    assert len(named) > 10, "otherwise these measurements test little"


def check(finding: Finding, enabled: tuple[str, ...]) -> None:
    assert finding.why and "nan" not in finding.why and "\n" not in finding.why
    assert finding.ceiling_gain_pct is None or finding.ceiling_gain_pct >= 0
    if finding.bottleneck == "none":
        assert finding.patch is None and finding.share_pct is None and finding.ceiling_gain_pct is None
    if finding.patch is not None:
        config, _ = load_callback_config(finding.patch)
        assert set(config.ladder.enabled()) == set(finding.patch["rungs"]) and "no rung" not in finding.why
        assert not set(config.ladder.enabled()) & set(enabled)
    elif finding.bottleneck not in ("none", "compute_bound"):
        assert "rung" in finding.why and "help" in finding.why, "without a patch it says what to do instead"


@pytest.mark.parametrize("seen", [gpt2_tuned(), on_cpu(), Measurement()], ids=["gpu", "cpu", "empty"])
@pytest.mark.parametrize("enabled", [(), RUNGS], ids=["none on", "all on"])
def test_a_tuned_or_empty_run_never_gets_a_patch(seen: Measurement, enabled: tuple[str, ...]) -> None:
    assert [finding.patch for finding in findings(seen, enabled)] == [None]
    assert findings(cifar10_launches())[0].patch is not None

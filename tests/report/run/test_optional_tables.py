"""Tables that only some runs have."""

from __future__ import annotations

import dataclasses

import pytest

from fastloop.records.measurement import GPU_READINGS, Measurement
from fastloop.report.run import optional_tables
from tests.report import samples
from tests.report.run.test_tables import values


def titles(seen: Measurement) -> list[str]:
    return [table.title for table in optional_tables.tabulate_all(seen)]


@pytest.mark.parametrize("run", sorted(samples.RUNS))
def test_rows_are_as_long_as_the_head(run: str) -> None:
    for table in optional_tables.tabulate_all(samples.RUNS[run]().seen):
        assert table.rows and {len(row) for row in table.rows} == {len(table.head)}
        assert all(column < len(table.head) for column in table.numeric)
        assert all(type(cell) is str and "nan" not in cell for row in table.rows for cell in row)


def test_what_was_not_measured_has_no_table_and_a_line_that_says_why() -> None:
    assert titles(Measurement()) == []
    said = optional_tables.list_missing(
        Measurement(kernels={"skipped": "a profiler is running"}, flops={"why": "no eager memory"})
    )
    assert len(said) == 5 and "a profiler is running" in said[2] and "no eager memory" in said[1]
    full = samples.gpt2().seen
    assert optional_tables.list_missing(full) == []
    assert titles(full) == [
        "The GPU",
        "Work and energy",
        "Kernels, from the trace",
        "Kernels with the most time",
        "Synchronizations",
        "Ceilings",
        "The slowest hooks",
        "Later checks of the step",
    ]


def test_every_reading_of_the_gpu_has_a_row() -> None:
    table = optional_tables.tabulate_gpu(samples.gpt2().seen)
    assert set(optional_tables.GPU) == set(GPU_READINGS) - {"throttle"} and len(table.rows) == len(GPU_READINGS)
    found = values(table)
    assert found["tensor cores active"] == "0 %" and found["throttle reasons"] == "sw_power_cap"
    assert values(optional_tables.tabulate_gpu(samples.resnet50().seen))["throttle reasons"] == "none"
    unknown = values(optional_tables.tabulate_gpu(Measurement(gpu={"watts": 90.0})))
    assert unknown["SMs active"] == "n/a" == unknown["throttle reasons"] and unknown["board power"] == "90 W"


def test_work_is_at_least_where_operators_could_not_be_counted() -> None:
    found = values(optional_tables.tabulate_work(samples.gpt2().seen))
    assert found["rate per device"] == ">= 36.2 TFLOP/s" and found["work per sample"] == ">= 875 GFLOP"
    assert found["MFU of fp32, by the data sheet"] == ">= 54 % of 67 TFLOP/s"
    assert found["MFU of bf16, by the data sheet"] == ">= 3.66 % of 989 TFLOP/s"
    assert found["MFU of a bf16 product measured here"] == ">= 4.8 % of 751 TFLOP/s"
    assert found["energy of the board per sample"] == "0.577 J"
    assert found["cost of a million samples"] == "$3.43"
    assert "At least:" in optional_tables.tabulate_work(samples.gpt2().seen).note
    sure = optional_tables.tabulate_work(samples.resnet50().seen)
    labels = [label for label, _ in sure.rows]
    assert sure.rows and len(labels) == len(set(labels)), "bf16 is the dtype in use, and has one row"
    assert ">=" not in str(sure.rows) and "At least" not in sure.note


def test_a_price_alone_makes_the_table() -> None:
    found = values(
        optional_tables.tabulate_work(Measurement(usd_per_million_samples=1234.5, peaks={"matmul_tf32": True}))
    )
    assert found["cost of a million samples"] == "$1,234.50" and len(found) == 2
    assert found["TF32 allowed: products, convolutions"] == "yes, n/a"


def test_what_was_not_measured_of_the_work_is_one_sentence() -> None:
    seen = Measurement(tflop_per_s=0.02, flops={"per_sample": 1e6, "source": "one eager step of this run"})
    table = optional_tables.tabulate_work(seen)
    assert [row[0] for row in table.rows] == ["work per sample", "rate per device"] and "n/a" not in str(table.rows)
    assert table.note.startswith("Counted by one eager step of this run. Not measured on the CPU: MFU of")
    assert "energy of the board per sample" in table.note and table.note.endswith("cost of a million samples.")
    assert "on the CPU" not in optional_tables.tabulate_work(samples.resnet50().seen).note
    assert optional_tables.tabulate_work(Measurement()).note == "", "the list of what is missing says it"
    uncounted = optional_tables.tabulate_work(
        Measurement(joule_per_sample=1.0, flops={"source": "a step", "why": "no backward"})
    )
    assert "Not counted: no backward." in uncounted.note and "Counted by" not in uncounted.note


def test_kernels_are_sorted_and_their_idle_time_is_told_apart() -> None:
    families, longest = optional_tables.tabulate_kernels(samples.gpt2().seen)
    rows = [row[0] for row in families.rows]
    assert rows[:2] == ["gemm", "attention"]
    assert rows[-3:] == ["idle: launch", "idle: sync", "idle: other"], "there was no idle time for want of data"
    assert "0.000" not in str(families.rows) and "families that took no time are left out" in families.note
    assert families.rows[0][1:] == ("1,102.000", "69.7") and "cost of the trace 6.4 s" in families.note
    assert "launches per step 9,120" in families.note and "NCCL" not in families.note
    assert len(longest.rows[0][0]) <= 120 and longest.rows[0][1] == "611.000"


def test_ceilings_stand_beside_this_run_s_rate() -> None:
    assert tuple(optional_tables.tabulate_ceilings(samples.resnet50().seen).rows) == (
        ("this run", "324.0"),
        ("host batches replayed: no loader", "2,310.0"),
        ("one batch kept on the device: no loader, no copy", "2,697.0"),
    )


def test_ranks_show_the_parts_that_some_rank_has() -> None:
    table = optional_tables.tabulate_ranks(samples.straggler().seen)
    assert table.head[:4] == ("rank", "host", "step ms", "waiting for data") and len(table.rows) == 2
    assert table.rows[1][:4] == ("1", "node-b", "115.10", "60.00")
    assert "n/a" not in str(table.rows) and "ended by" not in table.head
    bare = dataclasses.replace(samples.straggler().seen, ranks=({"rank": 0, "step_ms": {"mean": 9.5}}, {"rank": 1}))
    assert [row[2] for row in optional_tables.tabulate_ranks(bare).rows] == ["9.50", "n/a"]


def test_ranks_that_ended_badly_say_by_what() -> None:
    seen = samples.died().seen
    table = optional_tables.tabulate_ranks(seen)
    assert table.head[-1] == "ended by" and [row[-1] for row in table.rows] == ["RuntimeError", "ValueError"]
    well, badly = seen.ranks[0] | {"partial": False, "ended_by": None}, {"rank": 1, "partial": True}
    mixed = optional_tables.tabulate_ranks(dataclasses.replace(seen, ranks=(well, badly)))
    assert [row[-1] for row in mixed.rows] == ["normally", "an exception"], "an older record names none"


def test_a_hunt_that_found_nothing_is_a_result() -> None:
    seen = samples.cpu().seen
    assert tuple(optional_tables.tabulate_syncs(seen).rows) == () and "synchronizations: none listed" in " ".join(
        optional_tables.list_missing(seen)
    )
    hunted = dataclasses.replace(seen, evidence={"syncs": {"hunted_steps": 5}})
    assert tuple(optional_tables.tabulate_syncs(hunted).rows) == (("none found", "in 5 steps", "0", "0", "-"),)
    assert "synchronizations" not in " ".join(optional_tables.list_missing(hunted))
    cut_short = dataclasses.replace(seen, evidence={"syncs": {"hunted_steps": 0}})
    assert tuple(optional_tables.tabulate_syncs(cut_short).rows) == (), "0 steps found nothing out"


def test_synchronizations_and_drift() -> None:
    seen = samples.gpt2().seen
    assert tuple(optional_tables.tabulate_syncs(seen).rows) == (
        ("gpt2.py:88", "Tensor.item()", "8", "0.9", "log every 50 steps"),
    )
    lines = dataclasses.replace(seen, syncs=({"where": "a.py:1", "what": "x"},))
    assert tuple(optional_tables.tabulate_syncs(lines).rows) == (("a.py:1", "x", "n/a", "n/a", "n/a"),), (
        "on the CPU there are no times"
    )
    assert tuple(optional_tables.tabulate_drift(seen).rows) == (
        ("900 s", "590", "1,771.00", "+12.2", "SM clock 1,980 to 1,760 MHz"),
    )
    assert optional_tables.tabulate_hooks(seen).rows[0] == ("ProgressBar", "0.420")


def test_lines_of_steps_and_of_loading() -> None:
    step = {"of": "training_step", "where": "train.py:17", "function": "post", "share_pct": 68.04}
    sample = {"of": "loading", "where": "data.py:9", "function": "augment", "share_pct": 20.0}
    seen = Measurement(evidence={"lines": {"lines": [step, sample]}})
    assert tuple(optional_tables.tabulate_lines(seen).rows) == (
        ("train.py:17 in post", "training_step", "68.0"),
        ("data.py:9 in augment", "loading", "20.0"),
    )
    assert optional_tables.tabulate_lines(Measurement(evidence={"lines": {"lines": None}})).rows == []


@pytest.mark.parametrize(
    ("value", "number"),
    [(1, 1.0), (0.5, 0.5), (None, None), (True, None), ("1", None), (float("nan"), None), (float("inf"), None)],
)
def test_what_counts_as_a_number(value: object, number: float | None) -> None:
    assert optional_tables.to_finite_float(value) == number

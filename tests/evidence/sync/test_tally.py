"""Sums per line: order, merging, and what Lightning does for a line that logs."""

from __future__ import annotations

import threading

import pytest

from fastloop.evidence.sync.call_site import CallSite, Cause
from fastloop.evidence.sync.table import ADVICE, OTHER_ADVICE
from fastloop.evidence.sync.tally import Tally

STEP, OTHER = CallSite(where="train.py:4", users=True), CallSite(where="train.py:9", users=True)


def test_dearest_first_and_one_row_per_line() -> None:
    tally = Tally()
    for _ in range(4):
        tally.add(OTHER, ".cpu()", 0.001)
        tally.add(STEP, ".item()", 0.010)
    tally.add(STEP, "boolean mask", 0.100)
    first, second = tally.rows(steps=4)
    assert first == {
        "where": "train.py:4",
        "what": ".item(), boolean mask",
        "per_step": 1.25,
        "ms_per_step": pytest.approx(35),
        "instead": ADVICE["boolean mask"],
    }
    assert (second["where"], second["ms_per_step"]) == ("train.py:9", pytest.approx(1))


def test_unknown_times_are_none_and_then_the_number_decides() -> None:
    tally = Tally()
    tally.add(STEP, "torch.strange", None)
    for _ in range(3):
        tally.add(OTHER, ".item()", None)
    assert [(row["where"], row["ms_per_step"], row["per_step"]) for row in tally.rows(1)] == [
        ("train.py:9", None, 3),
        ("train.py:4", None, 1),
    ]
    assert tally.rows(1)[1]["instead"] == OTHER_ADVICE
    assert Tally().rows(0) == ()


@pytest.mark.parametrize("name", ["loss", "loss_step", "loss_epoch", "loss/dataloader_idx_1"])
def test_lightnings_reads_go_to_the_line_that_logs(name: str) -> None:
    tally = Tally()
    theirs = CallSite(where="lightning/result.py:5", users=False, cause=Cause(kind="prog_bar", name=name))
    tally.add(theirs, ".item()", 0.5)
    logs = {"loss": "model.py:7"}
    (row,) = tally.rows(1, logs)
    assert (row["where"], row["what"]) == ("model.py:7", "self.log(prog_bar=True)")
    assert row["instead"] == ADVICE["self.log(prog_bar=True)"]
    (row,) = tally.rows(1)
    assert (row["where"], row["what"]) == ("lightning/result.py:5", f"self.log(prog_bar=True) of {name}")


def test_a_line_of_the_users_stays_theirs() -> None:
    tally = Tally()
    tally.add(CallSite(where="model.py:7", users=True, cause=Cause(kind="sync_dist", name="loss")), "barrier()", 0.1)
    tally.add(CallSite(where="model.py:8", users=True, inside="torchmetrics/x.py:3"), ".item()", 0.1)
    assert [(row["where"], row["what"]) for row in tally.rows(1, {"loss": "model.py:99"})] == [
        ("model.py:7", "self.log(sync_dist=True)"),
        ("model.py:8", ".item() in torchmetrics/x.py:3"),
    ]


def test_the_name_seen_with_the_call_wins() -> None:
    tally = Tally()
    theirs = CallSite(where="lightning/logger.py:5", users=False, cause=Cause(kind="logger"))
    tally.add(theirs, ".item()", None, "a")
    tally.add(theirs, ".item()", None, "b_step")
    logs = {"a": "model.py:1", "b": "model.py:2"}
    assert {(row["where"], row["what"]) for row in tally.rows(1, logs)} == {
        ("model.py:1", "self.log to a logger"),
        ("model.py:2", "self.log to a logger"),
    }


def test_threads_lose_nothing() -> None:
    tally = Tally()
    threads = [
        threading.Thread(target=lambda: [tally.add(STEP, ".item()", 0.0) for _ in range(2000)]) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert tally.rows(1)[0]["per_step"] == 8000


def test_what_fastloop_does_itself_is_its_own_cost() -> None:
    """A file of ours had been named first, with 37 synchronisations a step, and advice to its user."""
    tally = Tally()
    tally.add(CallSite(where="fastloop's own rung compile", users=False, ours=True), ".item()", 0.2)
    (row,) = tally.rows(1)
    assert row["where"] == "fastloop's own rung compile" and row["what"] == ".item()"
    assert row["instead"].startswith("nothing in your code")
    tally = Tally()
    tally.add(CallSite(where="train.py:3", users=True, ours=True, inside="fastloop's own rung compile"), ".item()", 0.2)
    (row,) = tally.rows(1)
    assert (row["where"], row["what"]) == ("train.py:3", ".item() in fastloop's own rung compile")
    assert row["instead"].startswith("nothing in your code")


def test_a_batch_on_its_way_to_the_device_is_called_that() -> None:
    tally = Tally()
    tally.add(CallSite(where="lightning/apply_func.py:134", users=False, cause=Cause(kind="transfer")), ".to()", 0.2)
    (row,) = tally.rows(1)
    assert row["what"] == "copy of a batch to the device" and "pin_memory=True" in row["instead"]

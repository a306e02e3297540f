"""Verdicts, what forbids them, and the sentence they come in. Their error rates are in test_judge.py."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from fastloop.judge.verdict import LEAST_STEPS, compare, exit_code, explain_hopeless, is_final
from fastloop.records.experiment import Comparison, Gate, Outcome, Sample

GOOD = Outcome(parity_class="exact", passed=True, why="all gates passed")
BAD = Outcome(
    parity_class="exact",
    passed=False,
    why="gradient",
    gates=(
        Gate(name="ledger", passed=True, why="equal"),
        Gate(name="gradient", passed=False, why="off by a factor of 0.25", deviation=0.75, limit=1e-5),
        Gate(name="loss", passed=None, why="too noisy"),
    ),
)
WOBBLE = (1.0, 1.012, 0.994, 1.004, 0.99, 1.008, 0.997, 1.003, 1.009, 0.992)
RUNGS: dict[str, Any] = {"changed_rungs": ("amp", "workers")}


def sample(name: str, rate: float, runs: int = 5, spread: float = 1.0, **more: Any) -> Sample:
    """Runs at ``rate``, one after the other with the other arm's between; the arms wobble differently."""
    shift = 3 * (name != "base")
    rates = tuple(rate * WOBBLE[(run + shift) % 10] ** spread for run in range(runs))
    places = tuple(2 * run + (run % 2 == (name == "base")) for run in range(runs))
    return Sample(name=name, samples_per_s=rates, places=places, **more)


def judged(ratio: float, runs: int = 5, spread: float = 1.0, parity: Outcome = GOOD, **more: Any) -> Comparison:
    options = {key: more.pop(key) for key in ("band_pct", "alpha") if key in more}
    return compare(sample("base", 400, runs, spread), sample("b", 400 * ratio, runs, spread, **more), parity, **options)


def test_the_samples_of_these_tests_interleave() -> None:
    places = [*sample("base", 1).places, *sample("b", 1).places]
    assert sorted(places) == list(range(10))


# -- verdicts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ratio", "runs", "verdict"),
    [
        (1.32, 5, "faster"),
        (0.9, 5, "slower"),
        (1.0, 10, "no_difference"),
        (1.01, 3, "inconclusive"),
    ],
)
def test_verdicts(ratio: float, runs: int, verdict: str) -> None:
    found = judged(ratio, runs)
    assert found.verdict == verdict and found.arm == "b" and found.runs == runs and found.parity is GOOD
    assert found.ratio == pytest.approx(ratio, rel=0.02) and found.ci95 is not None
    assert found.ci95[0] < found.ratio < found.ci95[1]


def test_one_sentence_with_ratio_interval_and_runs() -> None:
    assert re.fullmatch(r"1\.3\dx, 95 % interval 1\.\d\d to 1\.\d\d, 5 runs of each", judged(1.32).why)
    assert judged(1.0, 10).why.endswith("10 runs of each, entirely within 3 % of 1")
    noisy = judged(1.01, 3)
    assert f": 3 runs this noisy can only show differences above {noisy.mde_pct:.1f} %; repeat with" in noisy.why


def test_where_nothing_is_decided_only_the_interval_is_said() -> None:
    found = judged(5.4, 3, spread=60)
    assert found.verdict == "inconclusive" and found.ratio is not None and found.ci95 is not None
    low, high = found.ci95
    said = f"anything from {low:.2f}x to {high:.3g}x is possible (95 % interval, 3 runs of each): 3 runs this noisy"
    assert found.why.startswith(said) and high > 10 and f"{found.ratio:.2f}" not in found.why
    assert "x so far" not in judged(1.5, 2).why and "1.5" not in judged(1.5, 2).why
    assert f"{judged(1.32).ratio:.2f}x" in judged(1.32).why, "the control: a claim has its ratio"
    broken = judged(5.4, 3, spread=60, parity=BAD)
    assert "anything from" in broken.why and f"{found.ratio:.2f}" not in broken.why


def test_a_stricter_level_is_said() -> None:
    strict = judged(1.32, alpha=0.0125)
    assert "98.75 % interval" in strict.why and strict.alpha == 0.0125
    usual = judged(1.32)
    assert strict.ci95 and usual.ci95 and strict.ci95[0] < usual.ci95[0] < usual.ci95[1] < strict.ci95[1]
    assert strict.mde_pct and usual.mde_pct and strict.mde_pct > usual.mde_pct


@pytest.mark.parametrize(
    ("ratio", "error_pct", "verdict"),
    [(1.2, 30.0, "inconclusive"), (1.2, 5.0, "faster"), (3.0, 30.0, "faster"), (0.8, 30.0, "slower")],
)
def test_a_gain_that_full_queues_may_explain_is_no_claim(ratio: float, error_pct: float, verdict: str) -> None:
    found = judged(ratio, queue_error_pct=error_pct)
    assert found.verdict == verdict and found.ratio == pytest.approx(ratio, rel=0.02)
    assert ("b's window is too short for its queues" in found.why) == (verdict == "inconclusive")
    assert exit_code([found], failed=False) == (4 if verdict == "inconclusive" else 0)


def test_a_loss_that_the_bases_full_queues_may_explain_is_none() -> None:
    base = replace(sample("base", 400), queue_error_pct=30.0)
    assert compare(base, sample("b", 320), GOOD).verdict == "inconclusive"
    assert compare(base, sample("b", 200), GOOD).verdict == "slower", "the control: the queues cannot explain a half"


def test_the_rate_of_a_window_of_a_few_steps_is_no_claim() -> None:
    found = judged(12.0, timed_steps=LEAST_STEPS - 1)
    assert found.verdict == "inconclusive" and exit_code([found], failed=False) == 4
    assert found.why.startswith("only 4 steps of b could be timed, and a verdict needs 5") and "12" not in found.why
    assert judged(12.0, timed_steps=LEAST_STEPS).verdict == "faster", "the control"
    base = replace(sample("base", 400), timed_steps=1)
    assert "only 1 step of base could" in compare(base, sample("b", 320, timed_steps=30), GOOD).why


def test_the_band_can_be_set() -> None:
    assert judged(1.0, 10, band_pct=0.2).verdict == "inconclusive"
    assert judged(1.04, 10, spread=6, band_pct=50).verdict == "no_difference"


def test_no_difference_needs_the_whole_interval() -> None:
    wide = judged(1.0, 5, spread=3)
    assert wide.ci95 is not None and wide.ci95[0] < 0.97 and wide.verdict == "inconclusive"


def test_a_certain_difference_is_named_however_small() -> None:
    found = judged(1.002, 10, spread=0.05)
    assert found.verdict == "faster"
    low = re.search(r"interval ([\d.]+) to", found.why)
    assert low and float(low[1]) > 1, "rounding does not hide what the verdict rests on"
    even = judged(1.0)
    assert even.ci95 is not None and even.ratio is not None
    barely = judged(1.002 / even.ci95[0])
    assert barely.verdict == "faster" and "interval 1.002 to 1.0" in barely.why


# -- what forbids one -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("runs", [1, 2])
def test_under_three_runs_there_is_no_verdict(runs: int) -> None:
    found = judged(1.5, runs)
    assert found.verdict == "inconclusive" and found.ci95 is None and found.mde_pct is None
    assert found.ratio is None, "no ratio without an interval"
    assert f"insufficient: {runs} run" in found.why and "a verdict needs 3" in found.why
    assert judged(1.5, 3).verdict == "faster", "the control: a third run each is enough for 50 %"


def test_an_arm_that_lost_its_runs_is_insufficient() -> None:
    found = compare(sample("base", 400, 5), sample("b", 600, 2), GOOD)
    assert found.verdict == "inconclusive" and found.runs == 2
    assert "5 runs of the base and 2 of the arm" in found.why
    nothing = compare(sample("base", 400, 5), Sample(name="b"), GOOD)
    assert nothing.verdict == "inconclusive" and nothing.ratio is None and "0 of the arm" in nothing.why


def test_one_lost_run_leaves_a_verdict() -> None:
    found = compare(sample("base", 400, 5), sample("b", 480, 4), GOOD)
    assert found.verdict == "faster" and found.runs == 4 and "5 runs of the base and 4 of the arm" in found.why


@pytest.mark.parametrize("broken", [0.0, -1.0, float("nan"), float("inf")], ids=str)
def test_a_run_without_a_rate_is_lost(broken: float) -> None:
    arm = sample("b", 480, 4)
    rates = (*arm.samples_per_s[:3], broken)
    found = compare(sample("base", 400, 4), Sample(name="b", samples_per_s=rates, places=arm.places), GOOD)
    assert found.runs == 3 and found.verdict == "faster"


def test_no_changed_rung_that_took_no_verdict() -> None:
    idle = {"inactive_rungs": {"amp": "no autocast seen", "workers": "the loader has no workers"}, **RUNGS}
    found = judged(1.32, **idle)
    assert found.verdict == "inconclusive" and found.ci95 is not None
    assert "amp (no autocast seen), workers (the loader has no workers)" in found.why
    assert judged(1.32, active_rungs=("amp",), **RUNGS).verdict == "faster"
    assert judged(1.32, changes_more=True, **idle).verdict == "faster", "more than rungs differs"
    assert judged(1.32).verdict == "faster", "of identical arms nothing is expected"


def test_an_idle_rung_gets_no_credit() -> None:
    found = judged(1.32, active_rungs=("amp",), inactive_rungs={"workers": "the loader has no workers"}, **RUNGS)
    assert found.verdict == "faster" and found.why.endswith("no credit to workers (the loader has no workers)")


def test_other_rungs_that_took_are_no_excuse() -> None:
    found = judged(1.32, active_rungs=("pin",), inactive_rungs={"amp": "no autocast seen"}, changed_rungs=("amp",))
    assert found.verdict == "inconclusive"


def test_switching_off_a_rung_that_took_is_a_change() -> None:
    arm = sample("b", 300, changed_rungs=("amp",))
    with_it = compare(sample("base", 400, active_rungs=("amp",)), arm, GOOD)
    assert with_it.verdict == "slower" and "no credit" not in with_it.why
    without = sample("base", 400, inactive_rungs={"amp": "no autocast seen"})
    assert compare(without, arm, GOOD).verdict == "inconclusive"
    assert explain_hopeless(without, arm) == "no changed rung took effect: amp (no autocast seen)"


@pytest.mark.parametrize(("of_base", "of_arm"), [(5, 0), (0, 5), (0, 0)])
def test_without_a_finished_run_nobody_knows_what_took(of_base: int, of_arm: int) -> None:
    arm = sample("b", 300, of_arm, changed_rungs=("amp",))
    assert explain_hopeless(sample("base", 400, of_base), arm) is None


def test_failed_parity_takes_the_verdict_and_leaves_the_figures() -> None:
    found = judged(1.32, parity=BAD)
    assert found.verdict == "inconclusive" and found.ratio and found.ratio > 1.3 and found.ci95 and found.ci95[0] > 1.2
    assert found.why.startswith("no speed is claimed: gradient failed: off by a factor of 0.25")
    assert "ledger" not in found.why and "loss" not in found.why and "1.3" in found.why
    assert "no speed is claimed: another order" in judged(1.3, parity=Outcome(passed=False, why="another order")).why


def test_all_that_forbids_a_verdict_is_said() -> None:
    found = judged(1.32, 2, parity=BAD, inactive_rungs={"amp": "no autocast seen"}, changed_rungs=("amp",))
    assert all(part in found.why for part in ("gradient failed", "amp (no autocast seen)"))
    assert "insufficient" not in found.why, "more runs would not help an arm that is another training"
    assert "insufficient: 2 runs" in judged(1.32, 2).why


def test_parity_left_open_is_said() -> None:
    found = judged(1.32, parity=Outcome(parity_class="changes-training", why="another training: no parity is claimed"))
    assert found.verdict == "faster" and found.why.endswith("another training: no parity is claimed")


# -- looks and exits --------------------------------------------------------------------------------------------------

FASTER, SLOWER, OPEN, FAILED = judged(1.32), judged(0.8), judged(1.01, 3), judged(1.01, 3, parity=BAD)
HUNG = Outcome(parity_class="approximate", gates=(Gate(name="gradient", passed=None, why="it hung"),))
BLIND = Outcome(gates=(Gate(name="gradient", passed=None, why="not testable here", detail={"testable": False}),))
UNTESTED = replace(BLIND, parity_class="approximate")
CLAIMLESS = Outcome(parity_class="changes-training")


def test_an_experiment_ends_when_every_arm_is_decided() -> None:
    assert is_final([FASTER, SLOWER, judged(1.0, 10)]) and not is_final([FASTER, OPEN])
    assert is_final([FASTER, FAILED]), "more runs do not mend a failed gate"
    assert is_final([FASTER, OPEN], hopeless=["b"]) and not is_final([OPEN], hopeless=["c"])


def test_a_faster_arm_runs_on_until_its_losses_are_told_apart() -> None:
    few = Outcome(parity_class="approximate", gates=(Gate(name="loss", passed=None, why="too few runs"),))
    assert not is_final([judged(1.32, parity=few)]) and is_final([judged(0.8, parity=few)]), "a slower one is of no use"
    assert is_final([judged(1.32, parity=HUNG)]), "more runs tell nothing of gradients"


@pytest.mark.parametrize(
    ("comparisons", "failed", "code"),
    [
        ([FASTER, SLOWER], False, 0),
        ([FASTER, OPEN], False, 4),
        ([OPEN, FAILED, FASTER], False, 3),
        ([OPEN, FAILED], True, 1),
        ([], False, 0),
        ([], True, 1),
        ([FASTER, judged(1.32, parity=HUNG)], False, 4),
        ([judged(0.8, parity=HUNG)], False, 0),
        ([judged(1.32, parity=BLIND)], False, 0),
        ([judged(1.32, parity=UNTESTED)], False, 4),
        ([judged(1.0, parity=UNTESTED)], False, 4),
        ([judged(0.8, parity=UNTESTED)], False, 0),
        ([judged(1.32, parity=CLAIMLESS)], False, 0),
    ],
    ids=[
        "decided",
        "one open",
        "one not the same training",
        "a run failed",
        "nothing",
        "only failures",
        "faster, but a gate could not be taken",
        "slower anyway",
        "what nothing can test",
        "faster, rounds, and its gradient could not be compared",
        "no difference, and its gradient could not be compared",
        "slower, whatever its gradient",
        "no parity claimed",
    ],
)
def test_exit_codes(comparisons: list[Comparison], failed: bool, code: int) -> None:
    assert exit_code(comparisons, failed) == code

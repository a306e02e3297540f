"""The gradient and the loss gate, what gates say together, and the passport."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from fastloop.judge import parity
from fastloop.judge.parity import sum_up_gates
from fastloop.records.experiment import Gate
from fastloop.records.plan import Parity
from fastloop.records.store import decode
from fastloop.records.trial import GradientAnswer

BASE: dict[str, Any] = {
    "precision": "fp32",
    "self_deviation": 0.0,
    "random_deviation": 0.0,
    "finite": True,
    "rounding": {"fp32": 1e-7, "tf32": 1e-4, "bf16": 1e-3},
}
WORST = [{"name": "head.weight", "deviation": 0.5, "share": 0.9}]


def arm(deviation: float | None, **changes: Any) -> dict[str, Any]:
    return {
        "precision": "fp32",
        "deviation": deviation,
        "kept": 1.0,
        "finite": True,
        "lost": [],
        "astray": [],
        "worst": WORST,
        **changes,
    }


def gradient_gate(base: dict[str, Any], own: dict[str, Any], parity_class: Parity = "approximate") -> Gate:
    """The gate, on what two answer.json hold."""
    answers = [decode(each, GradientAnswer) for each in (base, own)]
    return parity.judge_gradient(*answers, parity_class)  # type: ignore[arg-type]


def judge_loss(
    base: Any, arm: Any, parity_class: Parity = "approximate", *, bitwise: bool = False, redrawn: bool = False
) -> Gate:
    return parity.judge_loss(base, arm, parity_class, bitwise=bitwise, redrawn=redrawn)


# -- gradient ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("precision", "within", "above"),
    [("fp32", 9e-6, 2e-5), ("tf32", 4e-3, 6e-3), ("fp16", 9e-3, 2e-2), ("bf16", 4e-2, 6e-2), ("fp64", 9e-11, 2e-10)],
)
def test_the_coarser_precision_of_both_sets_the_limit(precision: str, within: float, above: float) -> None:
    for base, own in ((BASE, {"precision": precision}), ({**BASE, "precision": precision}, {})):
        if precision == "fp64":
            base, own = {**base, "precision": "fp64"}, {"precision": "fp64"}
        assert gradient_gate(base, arm(within, **own)).passed
        gate = gradient_gate(base, arm(above, **own))
        assert gate.passed is False and gate.limit == parity.TAU[precision] and gate.deviation == above
        assert "most of it in head.weight" in gate.why and precision in gate.why


def test_an_unknown_precision_counts_as_float32() -> None:
    assert gradient_gate({**BASE, "precision": "?"}, arm(1e-6, precision=None)).limit == 1e-5


def test_a_gradient_that_rounding_scatters_has_a_wider_limit_but_not_any() -> None:
    rough = {**BASE, "rounding": {"fp32": 4e-3, "tf32": 0.1, "bf16": 0.3}}
    assert gradient_gate(rough, arm(0.01)).passed and gradient_gate(rough, arm(0.03)).passed is False
    assert gradient_gate(rough, arm(0.08, precision="bf16")).limit == 0.1, "nothing passes above a tenth"
    assert gradient_gate(rough, arm(1.4, precision="bf16")).passed is False
    fp16 = gradient_gate(rough, arm(0.6, precision="fp16"))
    assert fp16.passed is False and fp16.limit == 0.5
    quarter = gradient_gate(rough, arm(0.75, precision="bf16", kept=0.25))
    assert quarter.passed is False and "0.25 times as large" in quarter.why
    fourfold = gradient_gate(rough, arm(0.8, precision="bf16", kept=1.8))
    assert fourfold.passed is False
    astray = gradient_gate(rough, arm(0.3, precision="bf16", astray=["a", "b", "c", "d"]))
    assert astray.passed is False and "a, b, c and 1 more" in astray.why


@pytest.mark.parametrize("deviation", [0.11, 0.36, 0.89])
@pytest.mark.parametrize("precision", ["tf32", "fp16", "bf16"])
def test_a_deviation_that_rounding_may_explain_passes_nothing_by_itself(deviation: float, precision: str) -> None:
    rough = {**BASE, "rounding": {"fp32": 4e-3, "tf32": 0.2, "bf16": 0.3}}
    gate = gradient_gate(rough, arm(deviation, precision=precision))
    assert gate.passed is None and not gate.is_testable and gate.limit == 0.1
    assert "rounding to" in gate.why and "a limit above 0.1" in gate.why
    found = sum_up_gates(
        "approximate", [Gate(name="ledger", passed=True, why=""), gate, Gate(name="loss", passed=True, why="")]
    )
    assert found.passed is None and found.undecided == ("gradient",)


@pytest.mark.parametrize(
    ("rounding", "deviation", "passed", "limit"),
    [
        (0.014, 0.03, True, 0.07),
        (0.014, 0.36, False, 0.07),
        (0.03, 0.045, True, 0.1),
        (0.03, 0.12, None, 0.1),
        (0.03, 0.36, False, 0.15),
        (0.001, 0.06, False, 0.05),
        (0.6, 0.7, None, 0.1),
        (0.6, 1.4, None, 0.1),
    ],
)
@pytest.mark.parametrize("at_first", [0.3, 1.2])
def test_where_rounding_scatters_the_gradient_steadier_weights_decide(
    at_first: float, rounding: float, deviation: float, passed: bool | None, limit: float
) -> None:
    rough = {**BASE, "rounding": {"bf16": at_first}, "steady_rounding": {"bf16": rounding}}
    own = arm(0.95 * at_first if at_first < 1 else 1.24, kept=1.0 if at_first < 1 else 0.25, precision="bf16")
    gate = gradient_gate(rough, {**own, "steady": {"deviation": deviation, "kept": 1.0, "worst": WORST}})
    assert (gate.passed, gate.deviation) == (passed, deviation) and gate.limit == pytest.approx(limit)


def test_a_layer_without_its_gradient_fails_however_small() -> None:
    gate = gradient_gate(BASE, arm(1e-9, lost=["bias"]))
    assert gate.passed is False and gate.why.startswith("bias got no gradient")


def test_an_exact_arm_has_the_same_bits_where_the_base_has() -> None:
    assert gradient_gate(BASE, arm(0.0), "exact").why == "the gradient is bit-identical"
    gate = gradient_gate(BASE, arm(1e-9), "exact")
    assert gate.passed is False and gate.limit == 0 and "promises bit-identical results" in gate.why
    for noise in (1e-8, None):
        gate = gradient_gate({**BASE, "self_deviation": noise}, arm(1e-9), "exact")
        assert gate.passed is None and gate.why.startswith("not testable here") and gate.detail["testable"] is False
    assert gradient_gate({**BASE, "self_deviation": 1e-8}, arm(0.75), "exact").passed is False, "noise is no excuse"
    assert gradient_gate({**BASE, "self_deviation": 1e-8}, arm(0.0), "exact").passed
    assert gradient_gate(BASE, arm(1e-9, self_deviation=1e-9), "exact").passed is False


def test_what_the_base_does_by_itself_is_no_fault_of_the_arm() -> None:
    noisy, dice = {**BASE, "self_deviation": 1e-4}, {**BASE, "random_deviation": 0.4}
    gate = gradient_gate(noisy, arm(5e-4))
    assert gate.passed is None and "between repetitions" in gate.why and gate.visible == 1e-4
    assert gradient_gate(noisy, arm(0.75)).passed is False
    assert gradient_gate(BASE, arm(5e-4, self_deviation=1e-4)).passed is False, "an arm is no excuse for itself"
    gate = gradient_gate(dice, arm(0.5))
    assert gate.passed is None and "random numbers" in gate.why
    assert gradient_gate(dice, arm(1e-6)).passed and gradient_gate(dice, arm(1.3)).passed is False


def test_clipping_that_differs_is_said() -> None:
    clips = {"clips": "by norm to 1"}
    assert "clip" not in gradient_gate({**BASE, **clips}, arm(0.0, **clips)).why
    gate = gradient_gate(BASE, arm(0.0, **clips), "exact")
    assert gate.passed and gate.detail["note"] == "the base does not clip, the arm clips gradients by norm to 1"
    assert gate.why.endswith("by norm to 1: if clipping takes effect in a later step, training differs")
    assert gradient_gate(BASE, arm(0.9, **clips)).why.endswith("the arm clips gradients by norm to 1")


def test_numbers_that_are_none() -> None:
    for own in (arm(None, finite=False), arm(None), arm(math.nan, finite=False)):
        gate = gradient_gate(BASE, own)
        assert gate.passed is False and gate.why == "the arm's gradient is not finite" and gate.deviation is None
    assert gradient_gate({**BASE, "finite": False}, arm(None, finite=False)).passed is None
    for base, own in (({**BASE, "why": "no samples"}, arm(0.0)), (BASE, arm(None, why="no samples"))):
        gate = gradient_gate(base, own)
        assert gate.passed is None and gate.why == "not testable here: no samples"
    assert gradient_gate({}, {}).passed is False


# -- loss -------------------------------------------------------------------------------------------------------------


def curves(
    runs: int, shift: float = 0.0, spread: float = 0.01, noise: float = 0.001, seed: int = 0
) -> list[list[float]]:
    """Losses around 2.0 at the end; runs of one number share their seed's luck."""
    own, luck = random.Random(f"{shift} {seed}"), random.Random(7)
    found = []
    for _ in range(runs):
        level = 2.0 + shift + luck.gauss(0, spread) + own.gauss(0, noise)
        found.append([level + 5 * 0.9**step for step in range(80)] + [level] * 20)
    return found


def test_a_loss_inside_the_band_passes_and_the_smallest_visible_gap_is_said() -> None:
    gate = judge_loss(curves(5), curves(5, seed=1))
    assert gate.passed and gate.limit is not None and gate.visible is not None and gate.deviation is not None
    assert gate.limit == pytest.approx(0.5, rel=0.05), "half a percent of the loss is more than half the spread here"
    assert gate.deviation < gate.limit < gate.visible < 2 * gate.limit


def test_a_loss_outside_fails_either_way() -> None:
    for shift in (0.03, -0.03):
        gate = judge_loss(curves(5), curves(5, shift))
        assert gate.passed is False and gate.deviation == pytest.approx(50 * shift, rel=0.1), "with its sign"


def test_a_wide_interval_tells_nothing() -> None:
    gate = judge_loss(curves(3, noise=0.02), curves(3, 0.01, noise=0.02, seed=5))
    assert gate.passed is None and "too few runs" in gate.why and "testable" not in gate.detail


def test_augmentations_drawn_anew_move_the_loss_as_seeds_do() -> None:
    """The interval of few runs excludes 0 by chance, and no number of runs that anybody waits for would tell."""
    base, arm = curves(3, spread=0.1), curves(3, spread=0.1, noise=0.2, seed=5)
    assert judge_loss(base, arm).detail == {}, "only there: elsewhere more runs are asked for"
    gate = judge_loss(base, arm, redrawn=True)
    assert gate.passed is None and gate.detail["testable"] is False and "random augmentations" in gate.why
    assert judge_loss(base, curves(3, spread=0.1, seed=1), redrawn=True).passed, "where it can be told, it is"
    assert judge_loss(base, curves(3, 9.0, spread=0.1, noise=0.2), redrawn=True).passed is False
    unlucky = [[loss + gap for loss in run] for run, gap in zip(base, (0.2, 0.25, 0.3), strict=True)]
    for redrawn, cause in ((False, "rounding or chance"), (True, "other augmentations")):
        gate = judge_loss(base, unlucky, redrawn=redrawn)
        assert gate.passed is None and gate.detail == {}, "a gap that may well be there is not waved through"
        assert f"the final loss was higher, and 3 runs cannot tell whether {cause} caused that" in gate.why
    steady = [[loss + gap for loss in run] for run, gap in zip(base, (0.24, 0.25, 0.26), strict=True)]
    assert judge_loss(base, steady).passed is judge_loss(base, steady, redrawn=True).passed is False


def test_seeds_that_spread_widen_the_band() -> None:
    assert judge_loss(curves(5), curves(5, 0.02)).passed is False
    gate = judge_loss(curves(5, spread=0.2), curves(5, 0.02, spread=0.2))
    assert gate.passed and gate.limit is not None and gate.limit > 2


@pytest.mark.parametrize("runs", [1, 2])
def test_fewer_than_three_runs_are_too_few_to_pass_or_fail(runs: int) -> None:
    for shift in (0.0, 1.0):
        gate = judge_loss(curves(runs), curves(runs, shift, seed=1))
        assert gate.passed is None and "takes 3" in gate.why and f"{runs} run" in gate.why


def test_bits() -> None:
    base, arm = curves(3), curves(3, seed=1)
    assert judge_loss(base, curves(3), "exact", bitwise=True).why == "the losses are bit-identical"
    assert judge_loss(base[:1], curves(1)).passed, "of one run as well"
    gate = judge_loss(base, arm, "exact", bitwise=True)
    assert gate.passed is False and gate.detail == {"step": 1}
    late = [*base[:2], [*base[2][:99], math.nextafter(base[2][99], 9)]]
    assert judge_loss(base, late, "exact", bitwise=True).detail == {"step": 100}
    assert judge_loss(base, arm, "exact").passed, "where kernels add up in any order, close is all one can ask"
    assert judge_loss(base, arm, "approximate", bitwise=True).passed


@pytest.mark.parametrize("bad", [None, math.nan, math.inf, -math.inf])
def test_a_loss_that_is_no_number_fails_unless_the_base_has_it_too(bad: float | None) -> None:
    broken: Any = curves(3)
    broken[1][41] = bad
    gate = judge_loss(curves(3), broken)
    assert gate.passed is False and gate.detail == {"step": 42} and "step 42 of run-1" in gate.why
    gate = judge_loss(broken, broken)
    assert gate.passed is None and "base's own" in gate.why


def test_no_loss_at_all() -> None:
    for base, own in (([], []), ([[]], [[]]), ([[1.0]], [[]])):
        gate = judge_loss(base, own)
        assert gate.passed is None and gate.detail["testable"] is False


def test_a_loss_of_zero_has_no_percent() -> None:
    gate = judge_loss([[0.0] * 5] * 3, [[1.0] * 5] * 3)
    assert gate.passed is False and gate.deviation is None


def test_how_often_three_gates_cry_wolf() -> None:
    """A true gap of zero, many times: an interval of 90 % is outside the band by chance, and then only just."""
    failed = [
        gate
        for seed in range(200)
        if (gate := judge_loss(curves(5, noise=0.01, seed=2 * seed), curves(5, noise=0.01, seed=2 * seed + 1))).passed
        is False
    ]
    assert len(failed) <= 10


# -- together ---------------------------------------------------------------------------------------------------------


def gate(name: str, passed: bool | None, **changes: Any) -> Gate:
    return Gate(name=name, passed=passed, why=f"about {name}", **changes)


BLIND: Any = {"detail": {"testable": False}}


@pytest.mark.parametrize(
    ("gates", "passed", "why"),
    [
        ([gate("ledger", True), gate("gradient", True), gate("loss", True)], True, "ledger, gradient, loss passed"),
        ([gate("ledger", True), gate("gradient", True)], True, "ledger, gradient passed"),
        ([gate("ledger", True), gate("gradient", False), gate("loss", None)], False, "gradient: about gradient"),
        ([gate("ledger", False), gate("gradient", False)], False, "ledger: about ledger; gradient: about gradient"),
        ([gate("ledger", True), gate("gradient", True), gate("loss", None)], None, "loss: about loss"),
        (
            [gate("ledger", None, **BLIND), gate("gradient", True), gate("loss", True)],
            True,
            "gradient, loss passed; ledger: about ledger",
        ),
        (
            [gate("ledger", None, **BLIND), gate("gradient", None, **BLIND), gate("loss", True)],
            None,
            "ledger: about ledger; gradient: about gradient",
        ),
        ([gate("ledger", None, **BLIND), gate("gradient", True), gate("loss", None)], None, "loss: about loss"),
        ([], None, "no gate ran"),
        (
            [gate("ledger", True), gate("gradient", None, **BLIND), gate("loss", True)],
            None,
            "gradient: about gradient",
        ),
        ([gate("ledger", True), gate("loss", True)], None, "the gradients were not compared"),
    ],
    ids=[
        "all",
        "two of two",
        "one fails",
        "two fail",
        "too few runs",
        "blind to one",
        "one left",
        "both",
        "none",
        "blind to the gradient",
        "no gradient",
    ],
)
def test_what_gates_say_together(gates: list[Gate], passed: bool | None, why: str) -> None:
    found = sum_up_gates("approximate", gates)
    assert (found.passed, found.why, found.gates) == (passed, why, tuple(gates))


def test_only_an_arm_that_promises_the_same_bits_may_do_without_the_gradient() -> None:
    gates = [gate("ledger", True), gate("gradient", None, **BLIND), gate("loss", True)]
    exact, rounds = sum_up_gates("exact", gates), sum_up_gates("approximate", gates)
    assert (exact.passed, exact.undecided) == (True, ()), "the losses of two others tell"
    assert (rounds.passed, rounds.undecided) == (None, ("gradient",))
    assert (
        sum_up_gates("approximate", [gate("ledger", None, **BLIND), *gates[2:], gate("gradient", True)]).undecided == ()
    )


def test_a_changed_training_claims_nothing() -> None:
    found = sum_up_gates("changes-training", [gate("loss", False)])
    assert found.passed is None and found.why == "claims no parity: it changes the training"

"""What a rehearsal may show, and when a one-time cost pays back."""

from __future__ import annotations

import math

import pytest

from fastloop.judge.rehearsal import (
    Deviation,
    Draws,
    RungOutcome,
    count_pay_back_steps,
    drop_slow,
    explain_far_slower,
    explain_no_pay_back,
    explain_no_room,
    explain_no_time,
    find_fault,
    is_close,
    is_slower,
    limit_rehearsal_s,
)
from fastloop.records.plan import Rehearsed

QUIET = Deviation(outputs=1e-7, gradients=1e-7)


@pytest.mark.parametrize(
    ("seen", "precision", "close"),
    [
        (Deviation(outputs=1e-6, gradients=2e-6), "fp32", True),
        (Deviation(outputs=1e-6, gradients=2e-5), "fp32", False),
        (Deviation(outputs=1e-2, gradients=4e-2), "bf16", True),
        (Deviation(outputs=0.0, gradients=None), "fp32", True),
        (Deviation(outputs=0.0, gradients=0.0, finite=False), "bf16", False),
    ],
)
def test_a_deviation_that_needs_no_excuse(seen: Deviation, precision: str, close: bool) -> None:
    assert is_close(seen, precision) is close


def test_what_rounding_explains_is_no_fault() -> None:
    seen = Deviation(outputs=4e-5, gradients=3e-5)
    assert find_fault(seen, Deviation(outputs=1e-5, gradients=1e-5), "fp32") == (None, 4e-5)
    fault, told = find_fault(seen, QUIET, "fp32")
    assert told == 4e-5 and fault == "outputs deviate by 4e-05, more than the 1e-05 that fp32 explains"


def test_a_limit_above_a_tenth_tells_nothing() -> None:
    """Gradients of a network with batch normalization at its random start: rounding alone scatters them."""
    noisy = Deviation(outputs=1e-2, gradients=0.2)
    assert find_fault(Deviation(outputs=2e-2, gradients=0.9), noisy, "bf16") == (None, 2e-2)
    fault, _ = find_fault(Deviation(outputs=2e-2, gradients=1.4), noisy, "bf16")
    assert fault is not None and "gradients deviate by 1.4" in fault
    assert find_fault(Deviation(outputs=0.5, gradients=0.9), Deviation(outputs=0.3, gradients=0.3), "bf16") == (
        None,
        None,
    )


@pytest.mark.parametrize(
    ("apart", "norm", "cosine", "words"),
    [
        (0.9, 1.4, 0.8, None),
        (0.9, 1.9, 0.9, "norm"),
        (0.5, 0.5, 1.0, "norm"),
        (0.2, 1.2, 1.0, "norm"),
        (2.0, 1.0, -1.0, "gradients point in another direction: their mean cosine is -1"),
        (1.6, 1.0, 0.5, None),  # of all values together it is -0.28: one layer holds nearly the whole norm
    ],
)
def test_a_meaningless_limit_still_asks_for_the_norm_and_the_direction(
    apart: float, norm: float, cosine: float, words: str | None
) -> None:
    seen = Deviation(outputs=0.0, gradients=apart, gradients_norm=norm, gradients_cosine=cosine)
    fault, _ = find_fault(seen, Deviation(outputs=0.0, gradients=0.5), "bf16")
    assert fault is None if words is None else words in (fault or "")


def drawn(*plays: tuple[float, float]) -> list[Deviation]:
    """Plays with a single output: `apart` and the norm determine its cosine."""
    cosines = [(1 + norm**2 - apart**2) / (2 * norm) for apart, norm in plays]
    return [
        Deviation(outputs=apart, gradients=None, outputs_norm=norm, outputs_cosine=cosine)
        for (apart, norm), cosine in zip(plays, cosines, strict=True)
    ]


USUAL = drawn((1.1, 0.95), (1.2, 1.0), (1.15, 1.05), (1.15, 1.0))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (drawn((1.2, 1.05), (1.1, 1.0), (1.15, 0.95), (1.1, 1.0)), None),
        (drawn((1.9, 1.0), (1.8, 1.0), (1.9, 0.95), (1.85, 1.0)), "deviate by 1.9"),
        (drawn((1.3, 1.2), (1.3, 1.2), (1.3, 1.25), (1.3, 1.25)), "the norm of outputs is 1.2 times the usual"),
        (drawn((0.2, 2.0), (1.2, 0.7), (1.1, 0.8), (1.2, 1.3)), None),  # one wild draw
        (drawn((1.6, 1.0), (1.65, 1.0), (1.6, 1.0), (1.6, 1.0)), "point in another direction"),
        ([*USUAL[1:], Deviation(outputs=math.inf, gradients=None, finite=False)], "not finite"),
    ],
    ids=["other draws", "far", "larger", "wild", "turned", "not finite"],
)
def test_what_depends_on_random_draws_is_judged_by_many(changed: list[Deviation], words: str | None) -> None:
    seen = Deviation(outputs=1.2, gradients=None)
    fault, told = find_fault(seen, QUIET, "fp32", Draws(usual=USUAL, changed=changed))
    assert (fault is None and told is None) if words is None else words in (fault or "")


def test_draws_without_an_effect_excuse_nothing() -> None:
    nothing = drawn(*4 * [(0.0, 1.0)])
    seen = Deviation(outputs=0.2, gradients=None)
    assert "fp32 explains" in str(find_fault(seen, QUIET, "fp32", Draws(usual=nothing, changed=4 * [seen]))[0])
    zeros = drawn(*4 * [(math.inf, 1.0)])
    assert find_fault(seen, QUIET, "fp32", Draws(usual=zeros, changed=zeros)) == (None, None)


def test_numbers_that_are_none() -> None:
    fault, told = find_fault(Deviation(outputs=0.0, gradients=0.0, finite=False), QUIET, "bf16")
    assert fault == "outputs or gradients are not finite numbers" and told is None


@pytest.mark.parametrize(
    ("cost_s", "step_ms", "left", "refused"),
    [
        (9, 90, 300, False),  # a third of 90 ms, 300 times, is 9 s
        (9, 90, 299, True),
        (9, 90, None, True),
        (0, 100, 0, False),
        (10, 0, 1000, True),
    ],
)
def test_pay_back_before_the_cost(cost_s: float, step_ms: float, left: int | None, refused: bool) -> None:
    why = explain_no_pay_back(cost_s, step_ms, left)
    assert (why is not None) is refused
    if why is not None and left is None:
        assert "it is unknown whether that pays back" in why
    elif why is not None and step_ms:
        assert why == (
            "it takes about 9 s once; if it saved a third of the 90 ms of each step, it would pay back after 300"
            " steps, but this run has only 299 left"
        )


def test_long_times_are_said_without_an_exponent() -> None:
    """Steps on a CPU and trials of large models take thousands of milliseconds."""
    assert "a third of the 1,400 ms of each step" in str(explain_no_pay_back(44, 1400.0, 59))
    assert str(explain_no_time(0.0, 123.4, 99.7)).endswith(
        "that takes about 123 s, and the limit is 100 s, 5 % of the remaining run"
    )
    used_up = "this run is too short to try it: trials have used up their limit of 0.013 s, 5 % of the remaining run"
    assert explain_no_time(0.015, 0.2, 0.013) == used_up


def test_pay_back_after_it() -> None:
    assert count_pay_back_steps(41, 12) == pytest.approx(3416.7, abs=0.1)
    assert count_pay_back_steps(41, 0) is None and count_pay_back_steps(41, -3) is None


def test_a_twentieth_of_the_run() -> None:
    assert limit_rehearsal_s(1000, 20) == pytest.approx(1.0) and limit_rehearsal_s(None, 20) == math.inf


def test_slower() -> None:
    assert is_slower(Rehearsed(eager_ms=10, changed_ms=11), 10) and not is_slower(Rehearsed(changed_ms=10.4), 10)
    assert not is_slower(Rehearsed(changed_ms=0.11), 0.1), "too short to tell"
    assert not is_slower(Rehearsed(), 10) and not is_slower(Rehearsed(changed_ms=11), None)


@pytest.mark.parametrize(("first_ms", "is_far"), [(320.0, False), (340.0, True), (1300.0, True)])
def test_a_first_play_that_needs_no_second(first_ms: float, is_far: bool) -> None:
    assert (explain_far_slower(first_ms, 10.0, 0.0) is not None) is is_far
    assert explain_far_slower(first_ms, 10.0, 1.0) is None, "it was known to take so long once"


@pytest.mark.parametrize(
    ("more", "free", "fits"), [(0, -5, True), (5, 5, True), (6, 5, False), (-5, -9, True), (1, -9, False)]
)
def test_memory_that_a_step_leaves(more: int, free: int, fits: bool) -> None:
    assert (explain_no_room(more * 2**30, free * 2**30) is None) is fits


def outcome(rung: str, changed_ms: float, *, costly: bool = False, fault: str | None = None) -> RungOutcome:
    times = Rehearsed(eager_ms=10, changed_ms=changed_ms)
    return RungOutcome(rung=rung, on_modules=True, is_costly=costly, rehearsed=times, fault=fault)


@pytest.mark.parametrize(
    ("outcomes", "dropped"),
    [
        ([outcome("a", 30), outcome("b", 8, costly=True)], []),  # they pay together
        ([outcome("a", 30), outcome("b", 28)], ["a", "b"]),
        ([outcome("a", 30), outcome("b", 12, costly=True)], ["a", "b"]),
        ([outcome("a", 8), outcome("b", 9), outcome("c", 5, costly=True)], []),
        ([outcome("a", 8), outcome("b", 9)], ["b"]),
        ([outcome("a", 8), outcome("b", 9, costly=True)], ["b"]),
        ([outcome("a", 30, fault="it broke"), outcome("b", 9)], []),
        ([outcome("users", 30), outcome("b", 9)], []),
        ([RungOutcome(rung="a", rehearsed=Rehearsed(eager_ms=1, changed_ms=2))], ["a"]),  # an optimizer, by itself
        ([RungOutcome(rung="a")], []),
    ],
)
def test_what_a_ladder_switched_on_must_not_be_slower(outcomes: list[RungOutcome], dropped: list[str]) -> None:
    judged = drop_slow(outcomes, 10, {"a", "b", "c"})
    off = [after.rung for before, after in zip(outcomes, judged, strict=True) if after.fault and not before.fault]
    assert off == dropped
    assert all("slower on the calls of the first step" in (each.fault or "") for each in judged if each.rung in dropped)
    assert not any(each.fault for each in drop_slow(outcomes[:1], 10, set()) if outcomes[0].fault is None)

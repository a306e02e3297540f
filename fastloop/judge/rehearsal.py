"""Whether the result of a rehearsal is good enough, and whether a one-time cost can pay back. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from fastloop.judge.parity import TAU
from fastloop.records.plan import Rehearsed

NO_GATE = 0.1
"""A limit above this passes everything and proves nothing."""
ROUNDINGS = 5
"""A deviation within this multiple of what rounding does to the unchanged modules is not the rung's fault."""
REHEARSAL_SHARE = 0.05
"""Share of the run's expected time that all rehearsals together may take."""
LIKELY_SAVING = 1 / 3
"""Share of a module's time that a compile is expected to save, before it has been tried."""
SLOWER, SLOWER_MS = 1.05, 0.05
"""Factor and milliseconds by which changed modules must be slower before it counts as more than timing noise."""
REPLAY_GAIN = 0.97
"""A rung that was off comes back if a replayed step takes less than this share of the time without it."""


@dataclass(frozen=True, kw_only=True)
class Deviation:
    """Distance between changed and unchanged modules: norms of differences over norms."""

    outputs: float
    gradients: float | None
    """None if nothing required a gradient."""
    finite: bool = True
    """All numbers are finite where those of the unchanged modules are."""

    @property
    def largest(self) -> float:
        return max(self.outputs, self.gradients or 0.0)


def is_close(seen: Deviation, precision: str) -> bool:
    """Whether a deviation passes without further checks in this precision, a key of ``TAU``."""
    return seen.finite and seen.largest <= TAU[precision]


def find_fault(seen: Deviation, rounding: Deviation, precision: str) -> tuple[str | None, float | None]:
    """The fault in a deviation above the usual limit, given what rounding does to the unchanged modules.

    Returns:
        The fault, or None; and the deviation, None if it could not be judged.
    """
    if not seen.finite:
        return "outputs or gradients are not finite numbers", None
    told: list[float] = []
    for name, value, noise in (
        ("outputs", seen.outputs, rounding.outputs),
        ("gradients", seen.gradients, rounding.gradients),
    ):
        limit = max(TAU[precision], ROUNDINGS * (noise or 0.0))
        if value is None or (limit > NO_GATE and value <= limit):
            continue  # rounding alone scatters them: no limit would be meaningful
        if value > limit:
            return f"{name} deviate by {value:.2g}, more than the {limit:.2g} that {precision} explains", value
        told.append(value)
    return None, max(told, default=None)


def explain_no_pay_back(cost_s: float, step_ms: float, steps_left: int | None) -> str | None:
    """Why a one-time cost is not worth paying, before it is paid; None if it may be.

    Args:
        cost_s: its expected duration.
        step_ms: time per optimizer step of the modules it would speed up.
        steps_left: optimizer steps left in this run; None = unknown.
    """
    saved_ms = LIKELY_SAVING * step_ms
    if steps_left is None:
        return (
            f"it takes about {cost_s:.0f} s once, and it is unknown whether that pays back, because the loader has no"
            " length; enable it by name, or give the Trainer max_steps"
        )
    if 1e3 * cost_s <= saved_ms * steps_left:
        return None
    after = math.ceil(1e3 * cost_s / saved_ms) if saved_ms else None
    when = "never" if after is None else f"after {after:,} steps"
    return (
        f"it takes about {cost_s:.0f} s once; if it saved a third of the {step_ms:.3g} ms of each step, it would pay"
        f" back {when}, but this run has only {steps_left:,} left"
    )


def explain_no_time(spent_s: float, needed_s: float, allowed_s: float) -> str | None:
    """Why there is no time for another trial beside those already made; None if there is."""
    if spent_s + needed_s <= allowed_s:
        return None
    spent = f", and {spent_s:.2g} s are spent" if spent_s else ""
    return f"this run is too short to try it: trying may take 5 % of what is left, {allowed_s:.2g} s{spent}"


def count_pay_back_steps(cost_s: float, saved_ms: float) -> float | None:
    """Optimizer steps until a one-time cost is recovered; None if nothing is saved."""
    return 1e3 * cost_s / saved_ms if saved_ms > 0 else None


def limit_rehearsal_s(steps_left: int | None, step_ms: float) -> float:
    """Seconds that the rehearsals of one run may take."""
    return math.inf if steps_left is None else REHEARSAL_SHARE * steps_left * step_ms / 1e3


def is_slower(seen: Rehearsed, than_ms: float | None) -> bool:
    """Whether the changed modules are slower than without the change."""
    if seen.changed_ms is None or than_ms is None:
        return False
    return seen.changed_ms > SLOWER * than_ms + SLOWER_MS


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of rehearsing one rung."""

    rung: str
    fault: str | None = None
    """Why it is removed again; None: it stays."""
    is_lasting: bool = True
    """Whether the next run would hit the fault again."""
    is_slower: bool = False
    """The fault is that eager steps were slower with it."""
    on_modules: bool = False
    """It changes the modules, so its times are comparable with those of other such rungs."""
    is_costly: bool = False
    """Its first call has a one-time cost."""
    first_call_s: float = 0.0
    """Seconds by which its first call took longer than its second."""
    is_cheaper: bool = False
    """Its cheaper variant was tried."""
    rehearsed: Rehearsed | None = None
    pays_back_after_steps: float | None = None


def take_slowest_times(mine: Rehearsed, every: Sequence[Rehearsed]) -> Rehearsed:
    """One rank's result with the times of the slowest ranks, so that all ranks judge alike."""
    eager_ms = max((each.eager_ms for each in every if each.eager_ms), default=None)
    changed_ms = max((each.changed_ms for each in every if each.changed_ms), default=None)
    return replace(mine, eager_ms=eager_ms, changed_ms=changed_ms)


def find_last_ms(outcomes: Sequence[Outcome], base_ms: float) -> float:
    """Time of the modules with all rungs kept so far."""
    kept = [each.rehearsed.changed_ms for each in outcomes if each.fault is None and each.rehearsed and each.on_modules]
    return next((each for each in reversed(kept) if each is not None), base_ms)


def drop_slow(outcomes: Sequence[Outcome], base_ms: float, by_ladder: Collection[str]) -> list[Outcome]:
    """The outcomes, with a fault for each rung of a shipped ladder that makes the rehearsed calls slower.

    Nothing is dropped from a stack that ends with a compile: rungs may pay only together, and each change would
    recompile.
    """
    judged = list(outcomes)
    for place in reversed(range(len(judged))):
        outcome = judged[place]
        if outcome.fault is not None or outcome.rehearsed is None:
            continue
        without_ms = outcome.rehearsed.eager_ms
        if outcome.on_modules:
            without_ms = min(find_last_ms(judged[:place], base_ms), base_ms)
        if not is_slower(outcome.rehearsed, without_ms):
            if outcome.is_costly:
                break
        elif outcome.rung in by_ladder:
            times = f"{outcome.rehearsed.changed_ms:.3g} ms, {without_ms:.3g} ms without it"
            why = f"slower on the calls of the first step: {times}"
            judged[place] = replace(outcome, fault=why, is_lasting=False, is_slower=True)
    return judged

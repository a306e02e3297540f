"""Whether the result of a rehearsal is good enough, and whether a one-time cost can pay back. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev

from fastloop.judge.parity import TAU
from fastloop.numbers import format_short
from fastloop.records.plan import Rehearsed

NO_GATE = 0.1
"""A limit above this passes everything and proves nothing."""
ROUNDINGS = 5
"""A deviation within this multiple of what rounding does to the unchanged modules is not the rung's fault."""
DRAWN = 1.5
"""The same for what other random numbers do to the unchanged modules: any two draws differ by about that much."""
NORM, COSINE = 1.15, 0.25
"""Limits where deviations prove nothing: the factor by which a norm may change, and how much a cosine may lose."""
SURE = 3
"""Means over random draws may differ by this many standard errors by chance."""
REHEARSAL_SHARE = 0.05
"""Share of the run's expected time that all rehearsals together may take."""
LIKELY_SAVING = 1 / 3
"""Share of a module's time that a compile is expected to save, before it has been tried."""
SLOWER, SLOWER_MS = 1.05, 0.05
"""Factor and milliseconds by which changed modules must be slower before it counts as more than timing noise."""
FAR_SLOWER, FIRST_CALL_MS = 3.0, 300.0
"""A first play that is slower by this factor, plus milliseconds for loading kernels once, needs no second one."""
LAUNCH_BOUND = 0.5
"""A step that takes the host less than this share of its time to launch need not be replayed: the device sets the
pace."""
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
    outputs_norm: float = 1.0
    """Norm of the changed modules' outputs, over that of the unchanged ones'."""
    gradients_norm: float = 1.0
    outputs_cosine: float = 1.0
    """Mean over the tensors of the cosine between their changed and unchanged values."""
    gradients_cosine: float = 1.0

    @property
    def largest(self) -> float:
        return max(self.outputs, self.gradients or 0.0)


@dataclass(frozen=True, kw_only=True)
class Draws:
    """Plays with other random numbers, without a rung and with it, all compared with one play of the unchanged modules.
    Both start from the same random states, but the rung may draw other numbers from there."""

    usual: Sequence[Deviation]
    changed: Sequence[Deviation]


def is_close(seen: Deviation, precision: str) -> bool:
    """Whether a deviation passes without further checks in this precision, a key of ``TAU``."""
    return seen.finite and seen.largest <= TAU[precision]


def find_fault(
    seen: Deviation, rounding: Deviation, precision: str, draws: Draws | None = None
) -> tuple[str | None, float | None]:
    """Find the fault in a deviation above the usual limit, given what rounding does to the unchanged modules.

    Args:
        draws: what other random numbers do, if the rung may draw different ones than the unchanged modules.

    Returns:
        The fault, or None; and the deviation, None if it could not be judged.
    """
    if not all(each.finite for each in (seen, *(draws.changed if draws else ()))):
        return "outputs or gradients are not finite numbers", None
    deviations: list[float] = []
    for name in ("outputs", "gradients"):
        value, noise = getattr(seen, name), getattr(rounding, name)
        if value is None:
            continue
        limit = max(TAU[precision], ROUNDINGS * (noise or 0.0))
        fault = None
        if value > limit:
            digits = ".2g" if f"{value:.2g}" != f"{limit:.2g}" else ".4g"
            fault = f"{name} deviate by {value:{digits}}, more than the {limit:{digits}} that {precision} explains"
            if draws is not None and fmean(getattr(each, name) for each in draws.usual) > limit:
                fault = _find_fault_of_draws(name, draws)
        elif limit > NO_GATE:  # rounding alone scatters them: no limit would be meaningful
            fault = _find_gross_fault(name, value, seen)
        else:
            deviations.append(value)
        if fault is not None:
            return fault, value
    return None, max(deviations, default=None)


def _find_gross_fault(name: str, apart: float, seen: Deviation) -> str | None:
    """Find the fault in numbers that rounding scatters: an independent error of that size increases the norm, and turns
    them by a right angle at most."""
    norm, cosine = getattr(seen, f"{name}_norm"), getattr(seen, f"{name}_cosine")
    most = NORM * math.hypot(1, apart)
    if not 1 / most <= norm <= most:
        return f"the norm of {name} is {norm:.2g} times the usual"
    return f"{name} point in another direction: their mean cosine is {cosine:.2g}" if cosine < -COSINE else None


def _find_fault_of_draws(name: str, draws: Draws) -> str | None:
    """Find the fault in numbers that depend on random draws, from means over many draws."""
    usual, changed = ([getattr(each, name) for each in plays] for plays in (draws.usual, draws.changed))
    norms, new_norms = ([getattr(each, f"{name}_norm") for each in plays] for plays in (draws.usual, draws.changed))
    if math.inf in usual or not any(norms):  # there is nothing but zeros to compare with
        return None
    limit = DRAWN * fmean(usual)
    if fmean(changed) > limit and _differ(usual, changed):
        return f"{name} deviate by {fmean(changed):.2g}, more than the {limit:.2g} that other random numbers explain"
    ratio = fmean(new_norms) / fmean(norms)
    if not 1 / NORM <= ratio <= NORM and _differ(norms, new_norms):
        return f"the norm of {name} is {ratio:.2g} times the usual, whatever random numbers are drawn"
    cosines, new_cosines = (
        [getattr(each, f"{name}_cosine") for each in plays] for plays in (draws.usual, draws.changed)
    )
    if fmean(cosines) - fmean(new_cosines) > COSINE and _differ(cosines, new_cosines):
        why = f"their mean cosine is {fmean(new_cosines):.2g}, and that of other draws {fmean(cosines):.2g}"
        return f"{name} point in another direction: {why}"
    return None


def _differ(usual: Sequence[float], changed: Sequence[float]) -> bool:
    """Whether the means differ by more than chance, given pairs of numbers."""
    apart = [after - before for before, after in zip(usual, changed, strict=True)]
    return abs(fmean(apart)) > SURE * stdev(apart) / math.sqrt(len(apart))


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
        f"it takes about {cost_s:.0f} s once; if it saved a third of the {format_short(step_ms, 'ms')} of each step, it"
        f" would pay back {when}, but this run has only {steps_left:,} left"
    )


def explain_no_time(spent_s: float, needed_s: float, allowed_s: float, kept_s: float = 0.0) -> str | None:
    """Why there is no time for another trial, after `spent_s` for earlier ones and with `kept_s` kept for recording a
    step; None if there is."""
    if spent_s + needed_s + kept_s <= allowed_s:
        return None
    limit = f"{format_short(allowed_s, 's', digits=2)}, {100 * REHEARSAL_SHARE:g} % of the remaining run"
    if spent_s >= allowed_s:
        return f"this run is too short to try it: trials have used up their limit of {limit}"
    gone = [f"{format_short(spent_s, 's', digits=2)} are spent"] if spent_s else []
    gone += [f"{format_short(kept_s, 's', digits=2)} are reserved for recording a step"] if kept_s else []
    of = f", of which {' and '.join(gone)}" if gone else ""
    needed = format_short(needed_s, "s", digits=2)
    return f"this run is too short to try it: that takes about {needed}, and the limit is {limit}{of}"


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


def explain_far_slower(first_ms: float, base_ms: float, first_call_s: float) -> str | None:
    """Why a second play would only lose more time, given the first one's time and that of the unchanged modules; None
    if it may show that the changed modules are fast enough."""
    if first_ms <= FAR_SLOWER * base_ms + FIRST_CALL_MS + 1e3 * first_call_s:
        return None
    return _explain_slower(first_ms, base_ms)


def explain_no_room(more_bytes: int, free_bytes: int) -> str | None:
    """Why changed modules that need `more_bytes` do not fit into what the first step left free; None if they do."""
    if more_bytes <= max(0, free_bytes):
        return None
    more, free = more_bytes / 2**30, max(0, free_bytes) / 2**30
    return f"it takes {more:.2g} GiB more of the device's memory, and the first step left only {free:.2g} GiB of it"


def _explain_slower(with_ms: float | None, without_ms: float | None) -> str:
    times = f"{format_short(with_ms, 'ms')}, {format_short(without_ms, 'ms')} without it"
    return f"slower on the calls of the first step: {times}"


@dataclass(frozen=True, kw_only=True)
class RungOutcome:
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


def find_last_ms(outcomes: Sequence[RungOutcome], base_ms: float) -> float:
    """Return the time of the modules with all rungs kept so far."""
    kept = [each.rehearsed.changed_ms for each in outcomes if each.fault is None and each.rehearsed and each.on_modules]
    return next((each for each in reversed(kept) if each is not None), base_ms)


def drop_slow(outcomes: Sequence[RungOutcome], base_ms: float, by_ladder: Collection[str]) -> list[RungOutcome]:
    """Return the outcomes, with a fault for each rung of a shipped ladder that makes the rehearsed calls slower.

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
            why = _explain_slower(outcome.rehearsed.changed_ms, without_ms)
            judged[place] = replace(outcome, fault=why, is_lasting=False, is_slower=True)
    return judged

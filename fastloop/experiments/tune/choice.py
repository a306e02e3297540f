"""Decides which values of a rung's number to try, and which to choose; nothing is trained here."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fastloop.experiments.trials.failures import FREE_MEMORY
from fastloop.ladder import collect_cards
from fastloop.numbers import format_short
from fastloop.records.card import SearchSpace, Tunable
from fastloop.records.tuning import Point

WORSE = 0.03
"""Two consecutive values that are slower than the best by more than this share end a search."""
FEW = 3
"""Up to this many worker counts, train with each: timing the loader alone first would take longer."""
AMPLE = 0.8
"""A loader that needs less than this share of the rest of the step is not the limit."""
HEADROOM = 0.7
"""Below this share, the loader is not the limit even while a training also needs CPUs: a climb takes the first such
worker count without training."""
FASTER = 0.9
"""More workers count as faster only if their loader takes less than this share of the time with fewer."""
OUT_OF_MEMORY = "out of memory"
"""The reason if a value could not be measured because it needs too much memory."""
HOPE = 1.5
"""A worker count is not measured if, even with the work split evenly, it would take more than this multiple of the time
that is enough."""


def list_tunables() -> dict[str, Tunable]:
    """Return the tunable number of each rung that has one, in the ladder's order."""
    return {rung: card.tunes for rung, card in collect_cards().items() if card.tunes is not None}


def name_tuned_key(rung: str) -> str:
    """Return the full name of a rung's number: ``rungs.workers.count``."""
    return f"rungs.{rung}.{list_tunables()[rung].field}"


def find_loader_rung() -> str:
    """Return the rung with the number that a loader trial varies."""
    return next(rung for rung, number in list_tunables().items() if number.trained == "loader")


def choose(ms: Mapping[int, float], tolerance: float) -> int | None:
    """Return the smallest value that is slower than the fastest by at most this share; None if there are no values."""
    return min((value for value in ms if ms[value] <= min(ms.values()) * (1 + tolerance)), default=None)


def list_values(
    what: str, *, cpus: int = 1, micro: int = 1, window: int = 1, yours: int | None = None
) -> tuple[int, ...]:
    """Return the values to try, in ascending order.

    Args:
        cpus: CPUs for each rank.
        micro: samples of a loader batch.
        window: loader batches of an optimizer step on one rank.
        yours: the user's value, which is also tried.
    """
    space = SearchSpace(cpus=cpus, micro_batch=micro, batches_per_step=window)
    return tuple(sorted({*list_tunables()[what].values(space), *(() if yours is None else (yours,))}))


def are_last_two_slower(ms: Sequence[float | None]) -> bool:
    """Whether the last two of these tries, in chronological order, failed (None) or are slower than the best."""
    best = min((each for each in ms if each is not None), default=math.inf)
    return len(ms) > 2 and all(each is None or each > best * (1 + WORSE) for each in ms[-2:])


def choose_next_value(
    tried: Mapping[int, float | None],
    bounds: Mapping[int, float],
    rest_ms: float,
    values: Sequence[int],
    tolerance: float,
) -> int | None:
    """Return the value to train with next, given a bound for each; None if enough is known.

    First the most promising value, then its neighbors as long as they could still change the choice.

    Args:
        tried: step time by value; None if it failed.
        bounds: by value, the shortest step time that its loader and the rest of the step allow.
        rest_ms: the step without its loader: the bound if a loader was not measured.
    """
    known = {value: ms for value, ms in tried.items() if ms is not None}
    if not known:
        left = {value: ms for value, ms in bounds.items() if value not in tried}
        return choose(left, tolerance) if len(tried) < 2 else None
    best, fastest = choose(known, tolerance), min(known.values())
    at = values.index(best) if best in values else -1
    above, below = values[at + 1 : at + 2], values[max(0, at - 1) : max(0, at)]
    for value in above:
        if value not in tried and bounds.get(value, rest_ms) < fastest * (1 - tolerance):
            return value
    for value in below:
        if value not in tried and bounds.get(value, rest_ms) <= fastest * (1 + tolerance):
            return value
    return None


def pick_worth_measuring(counts: Sequence[int], one_ms: float | None, enough_ms: float | None) -> tuple[int, ...]:
    """Return the worker counts worth measuring: those that may be enough, and the one below them; at least two.

    Args:
        one_ms: the approximate time that a single worker process takes for a step.
    """
    if one_ms is None or enough_ms is None:
        return tuple(counts)
    small = [count for count in counts if one_ms / count > HOPE * enough_ms]
    return tuple(counts[max(0, min(len(small) - 1, len(counts) - 2)) :])


def pick_promising(loader_ms: Mapping[int, float], rest_ms: float | None) -> tuple[int, ...]:
    """Return the smallest count with headroom; if loading stays the limit, the two counts with the fastest loaders."""
    enough = [count for count, ms in loader_ms.items() if rest_ms is not None and ms <= HEADROOM * rest_ms]
    if enough:
        return (min(enough),)
    return tuple(sorted(sorted(loader_ms, key=lambda count: loader_ms[count])[:2]))


def explain(
    what: str,
    points: Sequence[Point],
    base: int,
    best: int | None,
    yours: int | None,
    loader_ms: Mapping[int, float],
    rest_ms: float | None,
) -> str:
    """Explain the result of a search, in a sentence or two.

    Args:
        points: the values that were tried.
        base: the value that represents the training without the rung.
        best: the chosen value.
        loader_ms: the time that the loader alone takes for a step, by value, if measured.
        rest_ms: the step time without its loader.
    """
    number = list_tunables()[what]
    ms = {each.value: each.step_ms for each in points if each.step_ms is not None}
    if base not in ms:
        text = _explain_failed_base(points, base)
    elif len(ms) == 1:
        text = _explain_no_value(points, base, number.no_values)
    else:
        text = _compare(what, ms, base, best, f"{100 * number.tolerance:g} %")
    if number.trained == "replayed" and ms.keys() - {base}:
        text += "; measured on replayed batches, which do not wait for the loader"
    if yours is not None and yours != best:
        text += f"; your value {yours} stays in effect" + ("" if best is None else " until you apply the patch")
    if loader_ms:
        alone = ", ".join(f"{format_short(each)} with {value}" for value, each in loader_ms.items())
        text += f"; alone, its loader takes {alone}, and the rest of the step {format_short(rest_ms, 'ms')}"
    if best is None:
        return text
    unsure = any(each.value == best and each.why for each in points)
    doubt = "; its window was too short for the loader's queues" if unsure else ""
    return f"{text}{doubt}; a search proves no speed-up: confirm it with fastloop ab"


def _explain_failed_base(points: Sequence[Point], base: int) -> str:
    why = next((each.why for each in points if each.value == base), None)
    if why is None:
        return "nothing was measured"
    advice = f"; train with smaller micro-batches, or {FREE_MEMORY}" if why == OUT_OF_MEMORY else ""
    return f"the unchanged training failed: {why}{advice}"


def _explain_no_value(points: Sequence[Point], base: int, no_values: str) -> str:
    """Return why only the unchanged training was measured."""
    why = next((each.why for each in points if each.value != base), None)
    if why is None:
        return no_values
    advice = f"; keep {base}, or {FREE_MEMORY}, and tune again" if why == OUT_OF_MEMORY else ""
    return f"no value could be measured: {why}{advice}"


def _compare(what: str, ms: Mapping[Any, float], base: int, best: int | None, tolerance: str) -> str:
    """Compare the chosen value, or the fastest, with the training without the rung; `ms` are step times by value."""
    without = format_short(ms[base], "ms")
    if best is not None:
        fast = f"{best} is the smallest value within {tolerance} of the fastest"
        return f"{fast}: {format_short(ms[best], 'ms')} a step, {without} without {what}"
    fastest = min(ms.keys() - {base}, key=lambda value: (ms[value], value))
    none = f"no value is more than {tolerance} faster than the training without {what}"
    return f"{none}: {format_short(ms[fastest], 'ms')} a step with {fastest}, {without} without"

"""How much a change would save, from costs measured by separate trials. Plain numbers, milliseconds per step.

A training is a pipeline. If worker processes load, a step takes as long as the slower of loading and the rest; if the
training thread loads, it takes their sum, less the work that a device does meanwhile. ``1 / (1 - share)`` of a step's
parts is wrong in both cases. A step here is one optimizer step; steps of other sizes are not comparable.
"""

from __future__ import annotations

from fastloop.records.climb import Costs

WORTH_PCT = 3.0
"""Percent of the step. A change that can save less is not tried."""
NEAR = 1.03
"""Two costs closer than this ratio count as equal."""
ABOVE = 1.05
"""A trial without one of the costs was disturbed if it takes more than this many times as long as one with it."""


def drop_absurd(costs: Costs) -> Costs:
    """Return the costs without those that took longer than the whole they are a part of."""
    if costs.replayed_ms is not None and costs.replayed_ms > ABOVE * costs.core_ms:
        return costs.but(replayed_ms=None, resident_ms=None, alone_ms=None, mfu=None, launch_bound=None)
    rest = costs.core_ms if costs.replayed_ms is None else costs.replayed_ms
    parts = {"resident_ms": costs.resident_ms, "alone_ms": costs.alone_ms}
    return costs.but(**{name: None if ms is not None and ms > ABOVE * rest else ms for name, ms in parts.items()})


def predict_ms(now: Costs, then: Costs) -> float | None:
    """Predict the step time if the costs change to `then`, from their components; None if one is unknown.

    The part of the step that the components do not explain now (workers and training thread competing, for instance)
    stays in proportion, as long as loading does not move between the workers and the training thread.
    """
    rest, rest_then = now.replayed_ms, then.replayed_ms
    if rest is None or rest_then is None or not rest:
        return None
    loader = _estimate_loader_ms(now, rest)
    host = _estimate_host_ms(now, rest, loader)
    loader_then = loader if then.loader_ms == now.loader_ms else then.loader_ms
    moves = then.beside != now.beside
    if loader_then is None or (moves and then.loader_ms is None):
        return None
    if moves:
        return then.outside_ms + _combine(rest_then, loader_then, host, then.beside)
    explained = _combine(rest, loader, host, now.beside)
    missed = now.core_ms / explained if explained else 1.0
    host = rest_then if host >= rest / NEAR else min(host, rest_then)
    return then.outside_ms + missed * _combine(rest_then, loader_then, host, then.beside)


def predict_saved_ms(now: Costs, then: Costs) -> float | None:
    """How much shorter the step would get; negative if it would get longer."""
    after = predict_ms(now, then)
    return None if after is None else now.now_ms - after


def compute_ceilings_ms(costs: Costs) -> dict[str, float]:
    """The most each family of rungs could save per step, if measured.

    ``feed``: everything but the step on a resident batch. ``sync``: the visible part of the exchange. ``compute``: all
    but the loading or, if the model's work was counted, all but the time a device at its peak would need for it: far
    more than any rung gains.
    """
    found: dict[str, float] = {}
    rests = [cost for cost in (costs.replayed_ms, costs.resident_ms) if cost is not None]
    if rests:
        found["feed"] = max(0.0, costs.core_ms - min(rests))
    if (visible_ms := predict_saved_ms(costs, costs.but(replayed_ms=costs.alone_ms))) is not None:
        found["sync"] = max(0.0, visible_ms)
    least = 1e-6 if costs.mfu is None else min(1.0, costs.mfu)
    floor = None if costs.replayed_ms is None else costs.replayed_ms * least
    gain = predict_saved_ms(costs, costs.but(replayed_ms=floor))
    found["compute"] = costs.core_ms if gain is None else max(0.0, gain)
    return found


def compute_error_pct(predicted: float | None, measured: float | None) -> float | None:
    """Error of a prediction of saved milliseconds, in percent of the measured saving; None if nothing to score."""
    if predicted is None or not measured:
        return None
    return 100 * abs(predicted - measured) / abs(measured)


def _combine(rest: float, loader: float, host: float, beside: bool) -> float:
    return max(rest, loader) if beside else max(rest, loader + host)


def _estimate_loader_ms(costs: Costs, rest: float) -> float:
    """Loading as measured, else as inferred from the step: zero if the rest takes as long as the step."""
    if costs.loader_ms is not None:
        return costs.loader_ms
    if costs.beside:
        return costs.core_ms if costs.core_ms > NEAR * rest else 0.0
    return max(0.0, costs.core_ms - rest)


def _estimate_host_ms(costs: Costs, rest: float, loader: float) -> float:
    """The training thread's own share of the rest, during which it cannot load: all of it if no device works in the
    meantime. If loading does not show in the step, neither does this share; it is then taken as zero, which may
    overestimate the gain, but a screen will show that."""
    shows = not costs.beside and costs.core_ms > NEAR * rest
    return min(rest, max(0.0, costs.core_ms - loader)) if shows else 0.0

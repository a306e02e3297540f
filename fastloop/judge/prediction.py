"""What a change would save, from costs that trials of their own have measured. Plain numbers, milliseconds per step.

A training is a pipeline. Where worker processes load, its step takes as long as the slower of loading and the rest;
where the training thread loads for itself, their sum, less what a device works off meanwhile. ``1 / (1 - share)`` of a
step's parts is the truth in neither case. A step here is one optimizer step; steps of other sizes do not compare.
"""

from __future__ import annotations

from fastloop.records.climb import Costs

WORTH_PCT = 3.0
"""Of the step. What can save less is not tried."""
NEAR = 1.03
"""Two costs closer than this are called equal."""
ABOVE = 1.05
"""A trial with a cost taken away that takes so many times as long as what it was taken from was disturbed."""


def drop_absurd(costs: Costs) -> Costs:
    """The same, less the parts of the step that took longer than what they are a part of."""
    if costs.replayed_ms is not None and costs.replayed_ms > ABOVE * costs.core_ms:
        return costs.but(replayed_ms=None, resident_ms=None, alone_ms=None, mfu=None, launch_bound=None)
    rest = costs.core_ms if costs.replayed_ms is None else costs.replayed_ms
    parts = {"resident_ms": costs.resident_ms, "alone_ms": costs.alone_ms}
    return costs.but(**{name: None if ms is not None and ms > ABOVE * rest else ms for name, ms in parts.items()})


def predict_ms(now: Costs, then: Costs) -> float | None:
    """The step once costs are as in `then`, of which only the components count; None where one is unknown.

    What the components do not explain of today's step (workers and training thread in each other's way, say) they will
    not explain tomorrow: it stays in proportion as long as loading stays where it is, beside or inside.
    """
    rest, rest_then = now.replayed_ms, then.replayed_ms
    if rest is None or rest_then is None or not rest:
        return None
    loader = _estimate_loader_ms(now, rest)
    loader_then = _estimate_loader_ms(now, rest) if then.loader_ms == now.loader_ms else then.loader_ms
    if loader_then is None or (then.beside != now.beside and then.loader_ms is None):
        return None
    if then.beside != now.beside:
        return then.outside_ms + _combine(rest_then, loader_then, _estimate_host_ms(now, rest, loader), then.beside)
    host = _estimate_host_ms(now, rest, loader)
    explained = _combine(rest, loader, host, now.beside)
    missed = now.core_ms / explained if explained else 1.0
    host = rest_then if host >= rest / NEAR else min(host, rest_then)
    return then.outside_ms + missed * _combine(rest_then, loader_then, host, then.beside)


def predict_saved_ms(now: Costs, then: Costs) -> float | None:
    """What the step would get shorter by; negative where it would get longer."""
    after = predict_ms(now, then)
    return None if after is None else now.now_ms - after


def compute_ceilings_ms(costs: Costs) -> dict[str, float]:
    """What each family of rungs could save of a step at most, as far as that was measured.

    ``feed``: everything but the resident batch. ``sync``: the exchange, where it shows. ``compute``: all but the
    loading, or, where the model's work was counted, all but the time a device at its peak would need for it: far more
    than any rung gains.
    """
    found: dict[str, float] = {}
    rests = [cost for cost in (costs.replayed_ms, costs.resident_ms) if cost is not None]
    if rests:
        found["feed"] = max(0.0, costs.core_ms - min(rests))
    if (
        costs.alone_ms is not None
        and (gain := predict_saved_ms(costs, costs.but(replayed_ms=costs.alone_ms))) is not None
    ):
        found["sync"] = max(0.0, gain)
    least = 1e-6 if costs.mfu is None else min(1.0, costs.mfu)
    floor = None if costs.replayed_ms is None else costs.replayed_ms * least
    gain = predict_saved_ms(costs, costs.but(replayed_ms=floor))
    found["compute"] = costs.core_ms if gain is None else max(0.0, gain)
    return found


def compute_error_pct(predicted: float | None, measured: float | None) -> float | None:
    """Of a prediction of saved milliseconds, in percent of what was saved; None where there is nothing to score."""
    if predicted is None or not measured:
        return None
    return 100 * abs(predicted - measured) / abs(measured)


def _combine(rest: float, loader: float, host: float, beside: bool) -> float:
    return max(rest, loader) if beside else max(rest, loader + host)


def _estimate_loader_ms(costs: Costs, rest: float) -> float:
    """Loading as measured, else as the step shows it: not at all where the rest takes as long as the step."""
    if costs.loader_ms is not None:
        return costs.loader_ms
    if costs.beside:
        return costs.core_ms if costs.core_ms > NEAR * rest else 0.0
    return max(0.0, costs.core_ms - rest)


def _estimate_host_ms(costs: Costs, rest: float, loader: float) -> float:
    """The training thread's own share of the rest, for which loading in this thread has to wait: all of it without a
    device that works on meanwhile. Where loading does not show in the step, nor does this; it is then taken for none,
    which promises too much rather than too little: a screen finds out."""
    shows = not costs.beside and costs.core_ms > NEAR * rest
    return min(rest, max(0.0, costs.core_ms - loader)) if shows else 0.0

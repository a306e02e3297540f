"""Are two arms still the same training? Three gates, computed from the trials' JSON files. Free of torch.

*Ledger*: the same samples in the same optimizer steps, with the same backwards and learning rates. *Gradient*: the same
weights and batch give the same gradient, within the precision in use. *Loss*: runs that share a seed end at the same
loss. Each detects what the others miss: an optimizer like AdamW hides a gradient of a quarter its size from the loss,
and a step with equal gradient and loss may still use other samples.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

from fastloop.judge.sample_ledger import judge_ledger
from fastloop.judge.statistics import compute_mean_gap_interval
from fastloop.records.experiment import Gate, Outcome
from fastloop.records.plan import Parity
from fastloop.records.trial import GradientAnswer, GradientDistance

__all__ = ["FEWEST_RUNS", "TAU", "judge_gradient", "judge_ledger", "judge_loss", "sum_up_gates"]

TAU = {"fp64": 1e-10, "fp32": 1e-5, "tf32": 5e-3, "fp16": 1e-2, "bf16": 5e-2}
"""Deviation of a gradient that passes without further checks, by the coarsest arithmetic in either arm. float16 has the
digits of TF32, but also rounds the tensors passed from layer to layer."""
ROUNDINGS, MOST = 5, 0.9
"""The limit is this multiple of the deviation that rounding alone causes in the base's gradient, if that exceeds
``TAU``; but never more than ``MOST``, because two unrelated gradients are 1.4 apart."""
SHARP, SCATTERED = 0.1, 0.5
"""A deviation above the first never passes: a limit of 0.9 would pass wrong gradients. If rounding may explain it, it
proves nothing, and the gradients at steadier weights decide. If rounding moves the base's gradient by the second or
more, so little of the gradient is left that a larger deviation cannot fail an arm either."""
KEPT = 0.75, 1.33
"""Range for how much of the base's gradient rounding alone can leave; a lost factor of 4 is outside."""
RESOLUTION = {"fp64": 2.0**-53, "fp32": 2.0**-24, "tf32": 2.0**-11, "fp16": 2.0**-11, "bf16": 2.0**-8}
"""Rounding error of one number: no gate can detect less."""
CHANCE, NOISE = 3, 10
"""A deviation within this multiple of what random draws, or unordered sums, do to the base is not the arm's fault."""
FEWEST_RUNS = 3
LEVEL, LEVEL_OF_FAILURE = 0.90, 0.99
"""Confidence levels of the loss gate's interval. An arm fails only outside the second: other random numbers, and
in some networks rounding alone, make losses differ as much as two seeds do, so at the first, with three runs, one such
arm in ten would fail."""
MOST_RUNS, T_OF_MOST_RUNS = 10, 1.83
"""The most runs per arm that a user has to make, and Student's t of their interval."""
SEED_SHARE, LOSS_SHARE = 0.5, 0.005
"""The band of the loss gate: this share of the spread between seeds, or of the loss, whichever is larger."""


def judge_gradient(base: GradientAnswer, arm: GradientAnswer, parity_class: Parity) -> Gate:
    """Whether both arms compute the same gradient from the same weights and batch.

    Args:
        base: the answer of the base's trial; ``arm``: of the arm's trial.

    ``||g_arm - g_base|| / ||g_base||`` must stay below the ``TAU`` of the coarser precision, or below the effect of its
    rounding on the base's own gradient. If that effect is too large for a meaningful limit, the steadier weights of
    `gradient_state.raise_biases` decide; if it is too large there too, the gate is not testable. For an `exact` arm the
    deviation must be 0 if the base repeats itself bit for bit. An arm also fails if a layer lost its gradient, however
    small its share of the norm, or if a layer with a notable share keeps less than half of its gradient or gets more
    than twice as much. Gradients are compared as the optimizer receives them, after clipping; if the arms clip
    differently and this step does not show it, the reason says so.
    """
    if (why := base.why or arm.why) is not None:
        return _make_untestable("gradient", why)
    known = (each for each in (base.precision, arm.precision) if each in TAU)
    coarsest = max(known, key=lambda each: TAU[each], default="fp32")
    rounding = _find_rounding(base.rounding, coarsest)
    if not base.finite:
        return _make_untestable("gradient", "the base's own gradient is not finite")
    seen = _describe_distance(base, arm, arm, coarsest, rounding)
    if not arm.finite or arm.deviation is None:
        return _make_gate("gradient", False, "the arm's gradient is not finite", **seen)
    if arm.lost:
        why = f"{_join_names(arm.lost)} got no gradient in this arm, but did in the base"
        return _make_gate("gradient", False, why, **seen)
    if parity_class == "exact" and arm.deviation <= seen["limit"]:
        return _judge_exact(base.self_deviation, seen)
    first = _weigh(base, arm, arm, coarsest, rounding)
    if first.passed is not None or arm.steady is None or arm.steady.deviation is None:
        return first
    return _weigh(base, arm, arm.steady, coarsest, _find_rounding(base.steady_rounding, coarsest))


def _weigh(base: GradientAnswer, arm: GradientAnswer, found: GradientDistance, precision: str, rounding: float) -> Gate:
    """Judge the deviation at some weights: fail above the limit that rounding explains; undecided if that limit is too
    large to mean anything."""
    seen = _describe_distance(base, arm, found, precision, rounding)
    chance, noise = base.random_deviation or 0.0, base.self_deviation or 0.0
    gate = _close(chance, noise, found.astray, precision, seen)
    limit = max(TAU[precision], min(seen["limit"], SHARP))
    if gate.passed and seen["deviation"] <= limit:
        return _close(chance, noise, found.astray, precision, {**seen, "limit": limit})
    if gate.passed is None or (gate.passed is False and rounding < SCATTERED):
        return gate
    why = (
        f"the gradient deviates by {seen['deviation']:.2g}, and rounding to {precision} alone moves the base's own by"
        f" {rounding:.2g}: a limit above {SHARP} would pass anything"
    )
    return _make_untestable("gradient", why, **{**seen, "limit": limit})


def is_sharp(rounding: float | None) -> bool:
    """Whether rounding moves a base's gradient little enough for a meaningful limit."""
    return ROUNDINGS * (rounding or 0.0) <= SHARP


def _find_rounding(known: Mapping[str, float | None], precision: str) -> float:
    return known.get("tf32" if precision == "fp16" else precision) or 0.0


def _describe_distance(
    base: GradientAnswer, arm: GradientAnswer, found: GradientDistance, precision: str, rounding: float
) -> dict[str, Any]:
    """The figures of a distance, whatever the result; the limit is the most that rounding may explain."""
    return {
        "deviation": found.deviation,
        "limit": max(TAU[precision], min(ROUNDINGS * rounding, MOST)),
        "visible": max(base.self_deviation or 0.0, arm.self_deviation or 0.0, rounding, RESOLUTION[precision]),
        "detail": {
            "precision": precision,
            "worst": [dataclasses.asdict(each) for each in found.worst],
            "kept": found.kept,
            **_describe_clipping(base, arm),
        },
    }


def _describe_clipping(base: GradientAnswer, arm: GradientAnswer) -> dict[str, str]:
    """A note if the two arms clip gradients differently."""
    if base.clips == arm.clips:
        return {}
    notes = [
        f"the {name} clips gradients {answer.clips}" if answer.clips else f"the {name} does not clip"
        for name, answer in (("base", base), ("arm", arm))
    ]
    return {"note": ", ".join(notes)}


def _judge_exact(noise: float | None, seen: dict[str, Any]) -> Gate:
    """The gate for an arm that promises the same bits; `noise` is how far the base's repetitions are apart."""
    seen = {**seen, "limit": 0.0, "visible": noise or 0.0}
    said = f"the gradient deviates by {seen['deviation']:.2g}"
    if seen["deviation"] == 0:
        return _make_gate("gradient", True, "the gradient is bit-identical", **seen)
    if noise is None or noise > 0:
        why = f"{said}, but the base's own gradient does not repeat bit for bit either"
        return _make_untestable("gradient", why, **seen)
    return _make_gate("gradient", False, f"{said}, but this arm promises bit-identical results", **seen)


def _close(chance: float, noise: float, astray: Sequence[str], precision: str, seen: dict[str, Any]) -> Gate:
    """The gate for an arm that promises the same mathematics. Deviations as large as the base's own do not fail it."""
    deviation, limit, kept = seen["deviation"], seen["limit"], seen["detail"]["kept"]
    usual = f"{TAU[precision]:.0e} allowed for {precision}"
    limits = usual if limit == TAU[precision] else f"{limit:.2g} that rounding to {precision} can cause here"
    said = f"the gradient deviates by {deviation:.2g}, {'within' if deviation <= limit else 'above'} the {limits}"
    if deviation <= limit and astray:
        why = f"{said}, but it nearly vanishes or more than doubles in {_join_names(astray)}"
        return _make_gate("gradient", False, why, **seen)
    if deviation <= limit and kept is not None and not KEPT[0] <= kept <= KEPT[1]:
        return _make_gate("gradient", False, f"{said}, but it is {kept:.2g} times as large", **seen)
    if deviation <= limit:
        return _make_gate("gradient", True, said, **seen)
    if deviation <= CHANCE * chance:
        why = f"{said}, but the step's own random numbers alone cause {chance:.2g}"
        return _make_untestable("gradient", why, **seen)
    if deviation <= NOISE * noise:
        why = f"{said}, but the base's own gradient varies by {noise:.2g} between repetitions"
        return _make_untestable("gradient", why, **seen)
    worst = [each["name"] for each in seen["detail"]["worst"][:1]]
    return _make_gate("gradient", False, said + "".join(f", most of it in {name}" for name in worst), **seen)


def _join_names(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def judge_loss(
    base: Sequence[Sequence[float | None]],
    arm: Sequence[Sequence[float | None]],
    parity_class: Parity,
    *,
    bitwise: bool,
    redrawn: bool,
) -> Gate:
    """Whether runs that share a seed have the same loss over the last fifth of their steps.

    Args:
        base: the losses of the base's runs, one per optimizer step; null if not finite. ``arm``: those of the arm, run
            by run with the seeds of the base.
        bitwise: this machine is bit-for-bit reproducible in the mode of these runs (the CPU is; CUDA with kernels that
            sum in any order is not). An `exact` arm must then have the same losses, not just close ones.
        redrawn: one of the arms draws its random augmentations elsewhere, so they differ even with a shared seed. If
            seeds differ so much that a decision would take more than `MOST_RUNS`, the gate is not testable.
    """
    for number, (left, right) in enumerate(zip(base, arm, strict=True)):
        steps = [_find_first_wrong(losses) for losses in (left, right)]
        if steps[1] is not None and steps[0] is None:
            why = f"the loss is not finite from optimizer step {steps[1]} of run-{number} on"
            return _make_gate("loss", False, why, detail={"step": steps[1]})
        if steps[0] is not None:
            return _make_gate("loss", None, f"the base's own loss is not finite from optimizer step {steps[0]} on")
    if not base or not all(map(len, [*base, *arm])):
        return _make_untestable("loss", "training_step returns no loss")
    if all(list(left) == list(right) for left, right in zip(base, arm, strict=True)):
        return _make_gate("loss", True, "the losses are bit-identical", deviation=0.0, visible=0.0)
    if parity_class == "exact" and bitwise:
        step = next(
            n
            for left, right in zip(base, arm, strict=True)
            for n, (a, b) in enumerate(zip_longest(left, right), start=1)
            if a != b
        )
        why = f"the losses differ from optimizer step {step} on, but this arm promises bit-identical results"
        return _make_gate("loss", False, why, limit=0.0, detail={"step": step})
    return _judge_band([_end(losses) for losses in base], [_end(losses) for losses in arm], redrawn)


def _find_first_wrong(losses: Sequence[float | None]) -> int | None:
    return next((n for n, loss in enumerate(losses, 1) if loss is None or not math.isfinite(loss)), None)


def _end(losses: Sequence[float | None]) -> float:
    """The mean over the last fifth of the steps."""
    return statistics.fmean(loss for loss in losses[-max(1, len(losses) // 5) :] if loss is not None)


def _judge_band(base: Sequence[float], arm: Sequence[float], redrawn: bool) -> Gate:
    """Compare the interval of the mean gap with the band. All figures are in percent of the base's loss."""
    gaps = [right - left for left, right in zip(base, arm, strict=True)]
    level = statistics.fmean(base)
    interval = compute_mean_gap_interval(gaps, level=LEVEL) if len(gaps) >= FEWEST_RUNS else None
    if interval is None:
        few = f"{len(gaps)} {'run' if len(gaps) == 1 else 'runs'} of each arm"
        why = f"{few}, but it takes {FEWEST_RUNS} to tell a change from a difference between seeds"
        return _make_gate("loss", None, why)
    band = max(SEED_SHARE * statistics.stdev(base), LOSS_SHARE * abs(level))
    low, high = interval
    percent = 100 / abs(level) if level else math.nan
    seen: dict[str, Any] = {
        "deviation": (low + high) / 2 * percent,
        "limit": band * percent,
        "visible": (band + (high - low) / 2) * percent,
    }
    figures = (
        f"{(low + high) / 2 * percent:+.2g} % ({low * percent:+.2g} to {high * percent:+.2g}), band"
        f" ±{band * percent:.2g} %"
    )
    if -band <= low and high <= band:
        return _make_gate("loss", True, f"the final loss is the same: {figures}", **seen)
    widest = compute_mean_gap_interval(gaps, level=LEVEL_OF_FAILURE)
    assert widest is not None
    if widest[0] > band or widest[1] < -band:
        return _make_gate("loss", False, f"the final loss differs: {figures}", **seen)
    best = T_OF_MOST_RUNS * statistics.stdev(gaps) / math.sqrt(MOST_RUNS)
    if redrawn and low <= 0 <= high and best > band:
        why = f"different random augmentations shift it as much as different seeds do: {figures}"
        return _make_untestable("loss", why, **seen)
    if low > band or high < -band:
        side, cause = "higher" if low > band else "lower", "other augmentations" if redrawn else "rounding or chance"
        why = f"the final loss was {side}, and {len(gaps)} runs cannot tell whether {cause} caused that"
        return _make_gate("loss", None, f"{why}: {figures}", **seen)
    return _make_gate("loss", None, f"too few runs to tell whether the final loss is the same: {figures}", **seen)


def sum_up_gates(parity_class: Parity, gates: Sequence[Gate]) -> Outcome:
    """The combined result of the gates.

    A failed gate fails the arm. A gate that more runs could decide leaves the result open. A gate that cannot be tested
    on this machine (a device pipeline that shows no samples, kernels that never repeat themselves) is named, but does
    not block the arm if two others passed; one passed gate is too little evidence for "the same training". For an arm
    that rounds or regroups, the gradient gate must pass: a merge that weights tokens differently has the same samples
    and, under AdamW, the same loss.
    """
    gates = tuple(gates)
    if parity_class == "changes-training":
        return Outcome(
            parity_class=parity_class, passed=None, gates=gates, why="claims no parity: it changes the training"
        )
    failed = [gate for gate in gates if gate.passed is False]
    undecided = [gate for gate in gates if gate.passed is None and gate.is_testable]
    untestable = [gate for gate in gates if gate.passed is None and not gate.is_testable]
    passed = [gate for gate in gates if gate.passed]
    said = "; ".join(f"{gate.name}: {gate.why}" for gate in failed or undecided or untestable)
    if failed:
        verdict: bool | None = False
    elif undecided or not passed or (untestable and len(passed) < 2):
        verdict = None
    elif parity_class == "approximate" and "gradient" not in [gate.name for gate in passed]:
        verdict = None
        said = said or "the gradients were not compared"
    else:
        verdict = True
    held = f"{_join_names([gate.name for gate in passed])} passed"
    return Outcome(
        parity_class=parity_class,
        passed=verdict,
        gates=gates,
        why="; ".join(filter(None, [held if verdict else "", said])) or "no gate ran",
    )


def _make_untestable(name: str, why: str, *, detail: Mapping[str, Any] | None = None, **seen: Any) -> Gate:
    detail = {**(detail or {}), "testable": False}
    return _make_gate(name, None, f"not testable here: {why}", detail=detail, **seen)


def _make_gate(
    name: str, passed: bool | None, why: str, *, detail: Mapping[str, Any] | None = None, **seen: Any
) -> Gate:
    noted = dict(detail or {})
    figures = {key: value if value is None or math.isfinite(value) else None for key, value in seen.items()}
    if note := noted.get("note"):
        why = f"{why}; {note}{': if clipping takes effect in a later step, training differs' if passed else ''}"
    return Gate(name=name, passed=passed, why=why, detail=noted, **figures)

"""A climb's attempts, rung by rung, as rates: before the attempt, reached, and predicted."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from fastloop.numbers import format_number, format_short
from fastloop.records.climb import TOP, Attempt, ClimbFile, Speed
from fastloop.records.experiment import Outcome
from fastloop.report.drawing.document import Table

CEILING = {"replayed": "replayed batches", "resident": "resident batch", "no_exchange": "no exchange"}


@dataclass(frozen=True, kw_only=True)
class ClimbRow:
    """One attempted rung. Rates in samples per second; None if unknown."""

    name: str
    kept: bool
    why: str
    saved_ms: float | None
    rate: float | None
    predicted: float | None
    ends: tuple[float, float] | None
    """Interval of the rate."""


def list_steps(climb: ClimbFile) -> list[ClimbRow]:
    """List all attempts, in the order of the climb."""
    per_step = count_samples_per_step(climb)
    made = []
    for attempt in climb.rungs:
        if attempt.is_removal:
            continue
        before = attempt.step_ms_before
        low, high = (_compute_rate(per_step, _subtract(before, end)) for end in attempt.ci95_saved_ms or (None, None))
        made.append(
            ClimbRow(
                name=attempt.rung,
                kept=attempt.kept,
                why=attempt.why,
                saved_ms=attempt.measured_saved_ms,
                rate=_compute_rate(per_step, attempt.step_ms_after),
                predicted=_compute_rate(per_step, _subtract(before, attempt.predicted_saved_ms)),
                ends=None if low is None or high is None else (low, high),
            )
        )
    return made


def count_samples_per_step(climb: ClimbFile) -> float | None:
    """Return the samples of one optimizer step on all ranks, which convert milliseconds to rates."""
    for end in (climb.naive, climb.top):
        if end.samples_per_s and end.step_ms:
            return end.samples_per_s * end.step_ms / 1000
    return None


def _compute_rate(per_step: float | None, step_ms: float | None) -> float | None:
    return None if per_step is None or step_ms is None or step_ms <= 0 else 1000 * per_step / step_ms


def _subtract(before: float | None, saved: float | None) -> float | None:
    return None if before is None or saved is None else before - saved


def compute_rate(climb: ClimbFile, end: Speed) -> float | None:
    """Return the samples per second of the start or the top."""
    if end.samples_per_s is not None:
        return end.samples_per_s
    return _compute_rate(count_samples_per_step(climb), end.step_ms)


def list_ceilings(climb: ClimbFile, *, top: bool = False) -> list[tuple[str, float]]:
    """List name and rate of each measured ceiling of the start, or of the top, lowest first."""
    rates = climb.ceilings_top_samples_per_s if top else climb.ceilings_samples_per_s
    found = [(name, rate) for key, name in CEILING.items() if (rate := rates.get(key)) is not None]
    return sorted(found, key=lambda entry: entry[1])


def list_notes(climb: ClimbFile) -> dict[str, str]:
    """Return, by name, how the ceilings without a trial were obtained."""
    return {
        f"{name}{' of the top' if end else ''}": climb.ceilings_notes[key + end]
        for end in ("", TOP)
        for key, name in CEILING.items()
        if climb.ceilings_notes.get(key + end)
    }


def format_interval(attempt: Attempt) -> str:
    """Format the interval of the saved milliseconds; n/a without one."""
    ends = attempt.ci95_saved_ms
    return "n/a" if ends is None else f"{format_short(ends[0])} to {format_short(ends[1])}"


def describe_saving(attempt: Attempt) -> str:
    """Describe a rung's measured and predicted saving in one phrase."""
    ends = "" if attempt.ci95_saved_ms is None else f"95 % interval {format_interval(attempt)}, "
    guess = attempt.predicted_saved_ms
    predicted = "not predicted" if guess is None else f"predicted {format_short(guess)}"
    return f"saved {format_short(attempt.measured_saved_ms, 'ms')} ({ends}{predicted})"


def compute_median_error_pct(climb: ClimbFile) -> float | None:
    """Return the median absolute error of the predictions, in percent of the measured saving."""
    errors = [abs(each.prediction_error_pct) for each in climb.rungs if each.prediction_error_pct is not None]
    return median(errors) if errors else None


def make_table(climb: ClimbFile) -> Table:
    """Tabulate the attempts, one row each."""
    rows = [
        (
            f"{attempt.name}{f' ({attempt.family})' if attempt.family else ''}",
            _format_change(attempt),
            format_short(attempt.predicted_saved_ms),
            format_short(attempt.measured_saved_ms),
            format_interval(attempt),
            format_number(attempt.prediction_error_pct, "+,.0f"),
            _format_parity(attempt),
            f"{_name_outcome(attempt)}: {attempt.why or 'n/a'}",
        )
        for attempt in climb.rungs
    ]
    head = ("rung (family)", "step ms", "predicted", "saved ms", "interval", "error %", "parity", "outcome")
    note = (
        "Milliseconds saved per optimizer step. Each rung was screened with few runs and only winners were kept, so"
        " these figures are optimistic. They tell which rung to keep, not how fast the top is."
    )
    return Table(
        "Rungs, in the order of the climb",
        head,
        rows,
        numeric=(1, 2, 3, 4, 5),
        note=note if rows else "n/a: no rung was tried.",
    )


def _name_outcome(attempt: Attempt) -> str:
    if attempt.is_removal:
        return "dropped" if attempt.kept else "needed"
    return "kept" if attempt.kept else "rolled back"


def _format_parity(attempt: Attempt) -> str:
    parity = attempt.parity
    held = {True: "passed", False: "FAILED", None: "not shown"}[parity.passed]
    return "n/a" if parity == Outcome() else f"{parity.parity_class}, {held}"


def _format_change(attempt: Attempt) -> str:
    """Format the step time before and after; n/a if the rung was not trained."""
    before, after = format_short(attempt.step_ms_before), format_short(attempt.step_ms_after)
    return "n/a" if before == after == "n/a" else f"{before} to {after}"

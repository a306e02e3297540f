"""What a climb tried, rung by rung, as rates: what each attempt began with, reached and was predicted to reach."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from fastloop.report import gates, judged
from fastloop.report.document import entries, part
from fastloop.report.readings import real
from fastloop.report.summary import number, short
from fastloop.report.tables import Table

CEILING = {"replayed": "replayed batches", "resident": "resident batch", "no_exchange": "no exchange"}
TOP = "_top"
"""Behind the name of a ceiling: of the top, not of the naive start."""
ODD, UNDECIDED = "odd", "undecided"
"""Ends of attempts that give no answer: pairs that contradict each other, gates that could have told and did not."""


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One rung that was tried. Rates in samples per second; None where not known."""

    name: str
    kept: bool
    why: str
    saved_ms: float | None
    rate: float | None
    predicted: float | None
    ends: tuple[float, float] | None
    """Interval of the rate."""


def attempts(content: Mapping[str, Any]) -> list[Attempt]:
    """Every rung of climb.json, in the order of the climb."""
    per_step = samples_per_step(content)
    made = []
    for rung in entries(content, "rungs"):
        before, saved = real(rung.get("step_ms_before")), real(rung.get("predicted_saved_ms"))
        low, high = judged.interval(rung, "ci95_saved_ms") or (None, None)
        ends = [_rate(per_step, _less(before, end)) for end in (low, high)]
        first, last = ends
        made.append(Attempt(
            name=str(rung.get("rung")), kept=rung.get("kept") is True, why=str(rung.get("why") or ""),
            saved_ms=real(rung.get("measured_saved_ms")), rate=_rate(per_step, real(rung.get("step_ms_after"))),
            predicted=_rate(per_step, _less(before, saved)),
            ends=None if first is None or last is None else (first, last),
        ))  # fmt: skip
    return made


def samples_per_step(content: Mapping[str, Any]) -> float | None:
    """Samples of one optimizer step, all ranks: what turns milliseconds into rates."""
    for end in (part(content, "naive"), part(content, "top")):
        rate, step_ms = real(end.get("samples_per_s")), real(end.get("step_ms"))
        if rate and step_ms:
            return rate * step_ms / 1000
    return None


def _rate(per_step: float | None, step_ms: float | None) -> float | None:
    return None if per_step is None or step_ms is None or step_ms <= 0 else 1000 * per_step / step_ms


def _less(before: float | None, saved: float | None) -> float | None:
    return None if before is None or saved is None else before - saved


def end_rate(content: Mapping[str, Any], end: str) -> float | None:
    """Samples per second of the naive start or of the top."""
    found = part(content, end)
    rate = real(found.get("samples_per_s"))
    return rate if rate is not None else _rate(samples_per_step(content), real(found.get("step_ms")))


def called(rung: Mapping[str, Any]) -> str:
    """What was tried: the rung, or another way to set it, such as ``workers-persistent``."""
    return str(rung.get("try") or rung.get("rung"))


def ceilings(content: Mapping[str, Any], end: str = "") -> list[tuple[str, float]]:
    """Name and rate of each ceiling of the naive start that was measured, the lowest first.

    Args:
        end: ``TOP`` for those of the top.
    """
    found = [(said, real(part(content, f"ceilings{end}_samples_per_s").get(name))) for name, said in CEILING.items()]
    return sorted(((said, rate) for said, rate in found if rate is not None), key=lambda entry: entry[1])


def over_top(content: Mapping[str, Any]) -> list[tuple[str, float]]:
    """The ceilings that the top stands under. With other arithmetic it may be above those of the start."""
    return ceilings(content, TOP) or ceilings(content)


def notes(content: Mapping[str, Any]) -> dict[str, str]:
    """Of the ceilings that no trial has measured: name, and how each came about. Those of the top have a key to it."""
    said = part(content, "ceilings_notes")
    return {f"{name}{' of the top' if end else ''}": str(said[key + end]) for end in ("", TOP)
            for key, name in CEILING.items() if said.get(key + end)}  # fmt: skip


def broken(rungs: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The rungs that were faster, and yet rolled back: the training was not the same any more."""
    return [rung for rung in rungs if rung.get("kept") is not True and (real(rung.get("measured_saved_ms")) or 0.0) > 0
            and gates.passed(part(rung, "parity")) is False]  # fmt: skip


def unanswered(rungs: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The attempts that gave no answer, and were not made again with one."""
    latest = {rung.get("try") or number: rung for number, rung in enumerate(rungs)}
    return [rung for rung in latest.values() if rung.get("ended") in (ODD, UNDECIDED)]


def between(rung: Mapping[str, Any]) -> str:
    """The interval of the saved milliseconds; n/a without one."""
    ends = judged.interval(rung, "ci95_saved_ms")
    return "n/a" if ends is None else f"{short(ends[0])} to {short(ends[1])}"


def saved(rung: Mapping[str, Any]) -> str:
    """What a rung saved, beside what was predicted, in one phrase."""
    measured, predicted = real(rung.get("measured_saved_ms")), real(rung.get("predicted_saved_ms"))
    ends = "" if between(rung) == "n/a" else f"{between(rung)}, "
    return f"saved {short(measured, 'ms')} ({ends}predicted {short(predicted)})"


def off_by(content: Mapping[str, Any]) -> float | None:
    """The median error of the predictions, per cent of what was saved, sign left out."""
    errors = [real(rung.get("prediction_error_pct")) for rung in entries(content, "rungs")]
    found = [abs(error) for error in errors if error is not None]
    return median(found) if found else None


def table(content: Mapping[str, Any]) -> Table:
    """A row for each attempt."""
    rows = [
        (f"{called(rung)}{f' ({family})' if (family := rung.get('family')) else ''}",
         _change(rung), _ms(rung, "predicted_saved_ms"),
         _ms(rung, "measured_saved_ms"), between(rung), number(real(rung.get("prediction_error_pct")), "+,.0f"),
         _parity(rung), f"{'kept' if rung.get('kept') is True else 'rolled back'}: {rung.get('why') or 'n/a'}")
        for rung in entries(content, "rungs")
    ]  # fmt: skip
    head = ("rung (family)", "step ms", "predicted", "saved ms", "interval", "error %", "parity", "outcome")
    note = ("Saved milliseconds of an optimizer step. Each rung was screened with few runs, and winners were kept: such"
            " figures flatter. They say which rung to keep, not how fast the top is.")  # fmt: skip
    return Table(title="Rungs, in the order of the climb", head=head, rows=tuple(rows), numeric=(1, 2, 3, 4, 5),
                 note=note if rows else "n/a: no rung was tried.")  # fmt: skip


def _ms(rung: Mapping[str, Any], key: str) -> str:
    return short(real(rung.get(key)))


def _parity(rung: Mapping[str, Any]) -> str:
    parity = part(rung, "parity")
    held = {True: "passed", False: "FAILED", None: "not shown"}[gates.passed(parity)]
    return f"{parity['class']}, {held}" if parity.get("class") else "n/a"


def _change(rung: Mapping[str, Any]) -> str:
    """The step before and after; n/a where the rung was not trained."""
    before, after = _ms(rung, "step_ms_before"), _ms(rung, "step_ms_after")
    return "n/a" if before == after == "n/a" else f"{before} to {after}"

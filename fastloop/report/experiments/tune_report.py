"""A search for people: every value that was tried, the best of them, and the YAML that sets it."""

from __future__ import annotations

from dataclasses import dataclass

from fastloop.records.card import Setting
from fastloop.records.experiment import Hardware
from fastloop.records.tuning import TuningFile
from fastloop.records.yaml_text import dump_on_one_line, dump_yaml
from fastloop.report.drawing.bars import Bar, Chart, Row, choose_ticks
from fastloop.report.drawing.document import Document, Section, Table
from fastloop.report.drawing.html import draw_reports
from fastloop.report.experiments.verdict_words import describe_hardware, lay_out
from fastloop.report.run.summary import short
from fastloop.report.run.tables import cut

TITLE = "Step time of each value"
PARTIAL = "PARTIAL: the search did not end"
CLOSING = "A search ranks values by step time. It proves no speed-up: that takes an A/B test."
_OTHER, _BEST = "#2f6fb5", "#2a9d74"


@dataclass(frozen=True, kw_only=True)
class Mark:
    """One value that was tried, as it is drawn."""

    value: Setting
    step_ms: float | None
    samples_per_s: float | None
    ok: bool
    why: str
    best: bool
    note: str
    """best, or as it is: what the training has without the rung."""

    @property
    def label(self) -> str:
        return _format(self.value)


def lines(tuning: TuningFile) -> list[str]:
    """What the terminal shows, verdict first."""
    tried = make_marks(tuning)
    curve = ", ".join(f"{mark.label}{mark.note}: {short(mark.step_ms)}" for mark in tried if mark.ok)
    failed = "; ".join(f"{mark.label}: {mark.why or 'n/a'}" for mark in tried if not mark.ok)
    kinds = [
        ("STEP", [f"{curve} ms" if curve else ""]),
        ("WHY", [tuning.why]),
        ("FAILED", [failed]),
        ("PATCH", [dump_on_one_line(tuning.patch)]),
        ("ON", [", ".join(_describe_machine(tuning))]),
        ("FILES", [tuning.run_dir]),
    ]
    named = ": ".join(filter(None, [tuning.name, f"tune {tuning.what or 'n/a'}"]))
    first = f"fastloop {verdict(tuning)}   {named}{f'   {PARTIAL}' if tuning.partial else ''}"
    return lay_out(first, kinds)


def reports(tuning: TuningFile) -> dict[str, str]:
    """report.md and report.html."""
    return draw_reports(make_document(tuning))


def verdict(tuning: TuningFile) -> str:
    """The headline: the key and its best value, or that none is better than going without."""
    return " ".join(_split_headline(tuning))


def _split_headline(tuning: TuningFile) -> tuple[str, str]:
    key = tuning.key or tuning.what or "n/a"
    if tuning.best is not None:
        return "BEST", f"{key} = {_format(tuning.best)}"
    if tuning.partial:
        return "NOT FINISHED", key
    return ("NOTHING TO GAIN FROM" if any(mark.ok for mark in make_marks(tuning)) else "NO VALUE RAN OF"), key


def make_document(tuning: TuningFile) -> Document:
    """The whole report, for Markdown and for the page."""
    start, key = _split_headline(tuning)
    patch = tuning.patch
    return Document(
        kind="tune",
        verdict=f"{start.capitalize()} {key}",
        tone="unknown" if tuning.best is None else "good",
        lede=tuning.why or "n/a",
        lines=tuple(lines(tuning)),
        run=tuple(filter(None, [tuning.name, f"tune {tuning.what or 'n/a'}", *_describe_machine(tuning)])),
        flags=(PARTIAL,) if tuning.partial else (),
        pictures=chart(tuning),
        picture_title=TITLE,
        no_picture="n/a: no value was tried.",
        closing=CLOSING,
        sections=(
            Section(title="Every value that was tried", table=make_table(tuning)),
            *([Section(title="YAML patch", code=dump_yaml(dict(patch)).rstrip())] if patch else []),
        ),
    )


def describe(tuning: TuningFile) -> str:
    """The picture in words."""
    texts = [
        f"{mark.label} {short(mark.step_ms, 'ms') if mark.ok else 'failed'}{', the best' if mark.best else ''}"
        for mark in make_marks(tuning)
    ]
    return f"Milliseconds of a step for each value: {'; '.join(texts) or 'none'}."


def make_table(tuning: TuningFile) -> Table:
    """A row for each value, in the order of the axis."""
    rows = [
        (
            f"{mark.label}{mark.note}",
            short(mark.step_ms),
            short(mark.samples_per_s),
            mark.why or ("-" if mark.ok else "n/a"),
        )
        for mark in make_marks(tuning)
    ]
    return Table(
        "Every value that was tried",
        ("value", "step ms", "samples/s", "why"),
        rows,
        numeric=(1, 2),
        note="" if rows else "n/a: no value was tried.",
    )


def make_marks(tuning: TuningFile) -> list[Mark]:
    """Every value: numbers by size, names in the order they were tried."""
    made = []
    for point in tuning.points:
        best = tuning.best is not None and point.value == tuning.best
        as_it_is = tuning.as_it_is is not None and point.value == tuning.as_it_is
        made.append(
            Mark(
                value=point.value,
                step_ms=point.step_ms,
                samples_per_s=point.samples_per_s,
                ok=point.ok and point.step_ms is not None,
                why=point.why or "",
                best=best,
                note=" (best)" if best else " (as it is)" if as_it_is else "",
            )
        )
    is_numeric = all(isinstance(mark.value, (int, float)) for mark in made)
    return sorted(made, key=lambda mark: float(mark.value or 0)) if is_numeric else made


def chart(tuning: TuningFile) -> tuple[Chart, ...]:
    """A bar for each value, and the causes of those that failed; nothing where none was tried."""
    tried = make_marks(tuning)
    rows = [
        Row(
            name=f"{cut(mark.label, 40)}{mark.note}",
            bars=(Bar(0, mark.step_ms or 0.0, _BEST if mark.best else _OTHER),) if mark.ok else (),
            value=short(mark.step_ms, "ms") if mark.ok else "failed",
            note="" if mark.ok else mark.why or "n/a",
            weight="strong" if mark.best else "",
        )
        for mark in tried
    ]
    high = 1.04 * max((mark.step_ms or 0.0 for mark in tried if mark.ok), default=0.0) or 1.0
    chart = Chart(
        alt_text=describe(tuning),
        rows=tuple(rows),
        high=high,
        ticks=choose_ticks(0, high) if any(mark.ok for mark in tried) else (),
        note=f"Milliseconds of a step for each value of {tuning.key or tuning.what or 'n/a'}.",
        is_stacked=True,
    )
    return (chart,) if rows else ()


def _format(value: Setting) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _describe_machine(tuning: TuningFile) -> tuple[str, ...]:
    return () if tuning.hardware == Hardware() else describe_hardware(tuning.hardware)

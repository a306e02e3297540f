"""The report of a search: every value that was tried, the best one, and the YAML that sets it."""

from __future__ import annotations

from fastloop.numbers import format_short
from fastloop.records.card import Setting
from fastloop.records.experiment import Hardware
from fastloop.records.tuning import Point, TuningFile
from fastloop.records.yaml_text import dump_on_one_line, dump_yaml
from fastloop.report.drawing.bars import Bar, Chart, Row, choose_ticks
from fastloop.report.drawing.document import Document, Section, Table
from fastloop.report.experiments.verdict_words import describe_hardware, lay_out
from fastloop.report.run.tables import cut

TITLE = "Step time of each value"
PARTIAL = "PARTIAL: the search did not finish"
CLOSING = "A search ranks values by step time. It proves no speed-up: that takes an A/B test."
_OTHER, _BEST = "#2f6fb5", "#2a9d74"


def write_lines(tuning: TuningFile) -> list[str]:
    """Return the terminal's output, verdict first."""
    tried = [(name_point(tuning, point), point) for point in list_points(tuning)]
    curve = ", ".join(f"{name}: {format_short(point.step_ms)}" for name, point in tried if _ran(point))
    failed = "; ".join(f"{name}: {point.why or 'n/a'}" for name, point in tried if not _ran(point))
    kinds = [
        ("STEP", [f"{curve} ms" if curve else ""]),
        ("WHY", [tuning.why]),
        ("FAILED", [failed]),
        ("FLAG", ["; ".join(_list_flags(tuning))]),
        ("PATCH", [dump_on_one_line(tuning.patch)]),
        ("ON", [", ".join(_describe_machine(tuning))]),
        ("FILES", [tuning.run_dir]),
    ]
    named = ": ".join(filter(None, [tuning.name, f"tune {tuning.what or 'n/a'}"]))
    first = f"fastloop {describe_verdict(tuning)}   {named}{f'   {PARTIAL}' if tuning.partial else ''}"
    return lay_out(first, kinds)


def describe_verdict(tuning: TuningFile) -> str:
    """Return the headline: the key and its best value, or why there is no best value."""
    return " ".join(_split_headline(tuning))


def _split_headline(tuning: TuningFile) -> tuple[str, str]:
    key = tuning.key or tuning.what or "n/a"
    if tuning.best is not None:
        return "BEST", f"{key} = {_format(tuning.best)}"
    if tuning.partial:
        return "NOT FINISHED", key
    others = [point for point in tuning.points if point.value != tuning.as_it_is]
    if tuning.points and not others and _ran(tuning.points[0]):
        return "NOTHING TRIED FOR", key
    return ("NOTHING TO GAIN FROM" if any(map(_ran, others)) else "NO VALUE RAN FOR"), key


def make_document(tuning: TuningFile) -> Document:
    """Build the whole report, for Markdown and the HTML page."""
    start, key = _split_headline(tuning)
    patch = tuning.patch
    return Document(
        kind="tune",
        verdict=f"{start.capitalize()} {key}",
        tone="unknown" if tuning.best is None else "good",
        lede=tuning.why or "n/a",
        lines=tuple(write_lines(tuning)),
        run=tuple(filter(None, [tuning.name, f"tune {tuning.what or 'n/a'}", *_describe_machine(tuning)])),
        flags=(*([PARTIAL] if tuning.partial else []), *_list_flags(tuning)),
        pictures=chart(tuning),
        picture_title=TITLE,
        no_picture="n/a: no value was tried.",
        closing=CLOSING,
        sections=(
            Section(title="Every value that was tried", table=make_table(tuning)),
            *([Section(title="YAML patch", code=dump_yaml(dict(patch)).rstrip())] if patch else []),
        ),
    )


def _list_flags(tuning: TuningFile) -> list[str]:
    """List reasons to doubt the step times, each with the values that it concerns."""
    doubted: dict[str, list[str]] = {}
    for point in list_points(tuning):
        if _ran(point) and point.why:
            doubted.setdefault(point.why, []).append(_format(point.value))
    every = sum(map(_ran, tuning.points))
    return [f"{'all' if len(named) == every > 1 else ', '.join(named)}: {why}" for why, named in doubted.items()]


def describe(tuning: TuningFile) -> str:
    """Describe the picture in words."""
    texts = [
        f"{name_point(tuning, point)} {format_short(point.step_ms, 'ms') if _ran(point) else 'failed'}"
        for point in list_points(tuning)
    ]
    return f"Milliseconds of a step for each value: {'; '.join(texts) or 'none'}."


def make_table(tuning: TuningFile) -> Table:
    """Tabulate the values, in the order of the axis."""
    rows = [
        (
            name_point(tuning, point),
            format_short(point.step_ms),
            format_short(point.samples_per_s),
            point.why or ("-" if _ran(point) else "n/a"),
        )
        for point in list_points(tuning)
    ]
    head, note = ("value", "step ms", "samples/s", "why"), "" if rows else "n/a: no value was tried."
    return Table("Every value that was tried", head, rows, numeric=(1, 2), note=note)


def list_points(tuning: TuningFile) -> list[Point]:
    """List all values: numbers by size, names in the order in which they were tried."""
    is_numeric = all(isinstance(point.value, (int, float)) for point in tuning.points)
    return sorted(tuning.points, key=lambda point: float(point.value or 0)) if is_numeric else list(tuning.points)


def name_point(tuning: TuningFile, point: Point) -> str:
    """Format the value, and mark the best one and that of the training without the rung."""
    note = " (unchanged)" if tuning.as_it_is is not None and point.value == tuning.as_it_is else ""
    return f"{_format(point.value)}{' (best)' if _is_best(tuning, point) else note}"


def _is_best(tuning: TuningFile, point: Point) -> bool:
    return tuning.best is not None and point.value == tuning.best


def _ran(point: Point) -> bool:
    return point.ok and point.step_ms is not None


def chart(tuning: TuningFile) -> tuple[Chart, ...]:
    """Draw a bar for each value, and the causes of failures; empty if no value was tried."""
    times_ms = [point.step_ms for point in tuning.points if point.ok and point.step_ms is not None]
    high = 1.04 * max(times_ms, default=0.0) or 1.0
    rows = [
        Row(
            name=cut(name_point(tuning, point), 40),
            bars=(Bar(0, point.step_ms or 0.0, _BEST if _is_best(tuning, point) else _OTHER),) if _ran(point) else (),
            value=format_short(point.step_ms, "ms") if _ran(point) else "failed",
            note="" if _ran(point) else point.why or "n/a",
            weight="strong" if _is_best(tuning, point) else "",
        )
        for point in list_points(tuning)
    ]
    chart = Chart(
        alt_text=describe(tuning),
        rows=tuple(rows),
        high=high,
        ticks=choose_ticks(0, high) if times_ms else (),
        note=f"Milliseconds of a step for each value of {tuning.key or tuning.what or 'n/a'}.",
        is_stacked=True,
    )
    return (chart,) if rows else ()


def _format(value: Setting) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _describe_machine(tuning: TuningFile) -> tuple[str, ...]:
    return () if tuning.hardware == Hardware() else describe_hardware(tuning.hardware)

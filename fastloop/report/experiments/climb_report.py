"""The report of a climb: what is proven about the top, and each rung's predicted and measured saving.

The resulting ladder is YAML with these figures as comments.
"""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import indent, wrap

from fastloop.numbers import format_number, format_short
from fastloop.records.climb import Attempt, ClimbFile, Confirmation, Speed, select_broken, select_unanswered
from fastloop.records.yaml_text import dump_yaml
from fastloop.report.drawing.document import Document, Section, Table
from fastloop.report.experiments import climb_picture, climb_rows, verdict_words
from fastloop.report.experiments.verdict_words import describe_hardware, put_on_one_line

SCREEN = "screening proves nothing; only a fresh A/B test of the best stack against the baseline does"
HOW = (
    "The climb picks the family of rungs with the highest ceiling, predicts what its next rung will save, tunes the"
    " rung's settings by step time, and screens it against the current stack. The rung is kept if it looks faster and"
    " the training is still the same; otherwise it is rolled back, and the next attempt starts from the same stack."
)
PARTIAL = "PARTIAL: the climb did not finish"
APART = 1.15
"""If the speed-ups of the climb's own runs and of the fresh runs differ by more than this factor, both are reported."""
SHORT_S = 300.0
"""Shorter times are written in seconds."""
CLOSING = "Quote only the confirmed ratio: it comes from fresh runs that were not used to choose rungs."


def write_lines(climb: ClimbFile) -> list[str]:
    """Return the terminal's output: at most 14 lines, verdict first."""
    kept, back = _split(climb)
    notes = climb_rows.list_notes(climb)
    limits = ", ".join(
        f"{name} {format_short(rate)}{f' ({notes[name]})' if name in notes else ''}"
        for name, rate in climb_rows.list_ceilings(climb)
    )
    over_top = climb_rows.list_ceilings(climb, top=True) if kept else []
    if over_top:
        of_top = f"of the top: {', '.join(f'{name} {format_short(rate)}' for name, rate in over_top)}"
        limits = f"{limits}; {of_top}" if limits else of_top
    why = _explain(climb)
    kinds = [
        ("PROOF" if climb.confirmed else "WHY", [why]),
        ("RATE", [_compare_rates(climb)]),
        ("NOTE", [_describe_other_rates(climb)]),
        ("KEPT", [f"{each.name}: {climb_rows.describe_saving(each)}" for each in kept]),
        ("IDLE", [f"{', '.join(idle)}: no effect here, see report.md"] if (idle := _collect_idle(climb)) else []),
        ("NOT KEPT", [": ".join(filter(None, (each.name, each.why))) for each in back]),
        ("DROPPED", [", ".join(dropped) + ": not slower when left out"] if (dropped := _list_dropped(climb)) else []),
        ("LADDERS", [_list_ladders(climb)]),
        ("CEILINGS", [f"{limits} samples/s"] if limits else []),
        ("STOPPED", [_describe_end(climb).removeprefix(f"{why}; ")]),
        ("ON", [on if (on := ", ".join(describe_hardware(climb.hardware))) != "n/a" else ""]),
        ("FILES", [climb.run_dir]),
    ]
    partial = f"   {PARTIAL}" if climb.partial else ""
    first = f"fastloop {describe_verdict(climb)}   {climb.name}".rstrip() + partial
    return verdict_words.lay_out(first, kinds)


def describe_verdict(climb: ClimbFile) -> str:
    """Return the headline: the confirmed ratio, or why there is none."""
    kept, back = _split(climb)
    if climb.confirmed:
        headline = verdict_words.write_headline(climb.confirmed)
        return f"CONFIRMED {headline}" if headline.startswith("FASTER") else f"NOT CONFIRMED: {headline}"
    if kept:
        count = len(climb.stack.get("rungs") or {})
        return f"{count} RUNG{'' if count == 1 else 'S'} KEPT, NOTHING CONFIRMED"
    tried = bool(climb.rungs) or "budget" not in (climb.stopped or "budget")
    if not tried or climb.partial:
        return "NOT FINISHED"
    if select_broken(back):
        return "NOTHING KEPT: PARITY FAILED"
    return "NOTHING KEPT, SOME INCONCLUSIVE" if select_unanswered(back) else "NOTHING TO GAIN"


def make_document(climb: ClimbFile) -> Document:
    """Build the whole report, for Markdown and the HTML page."""
    headline = describe_verdict(climb)
    good = (headline.startswith("CONFIRMED") and "," not in headline) or headline == "NOTHING TO GAIN"
    rates, error_pct = _compare_rates(climb), climb_rows.compute_median_error_pct(climb)
    error = format_number(error_pct, ",.0f")
    predicted = "" if error_pct is None else f"The predictions were off by {error} % (median)."
    return Document(
        kind="climb",
        verdict=headline[:1] + headline[1:].lower(),
        tone="good" if good else "unknown",
        lede=_explain(climb),
        lines=tuple(write_lines(climb)),
        also=tuple(filter(None, [f"{rates[:1].upper()}{rates[1:]}." if rates else "", predicted])),
        run=tuple(filter(None, [climb.name, *describe_hardware(climb.hardware)])),
        flags=(PARTIAL,) if climb.partial else (),
        pictures=climb_picture.draw(climb),
        picture_title="From naive to top",
        sections=_make_sections(climb),
        closing=CLOSING,
    )


def write_ladder_yaml(climb: ClimbFile) -> str:
    """Return the top as a ladder: only its rungs, each below its predicted and measured saving."""
    stack = climb.stack.get("rungs") or {}
    where = filter(None, [", ".join(describe_hardware(climb.hardware)), climb.date or ""])
    head = [
        f"The ladder that fastloop climb found for {climb.name or 'n/a'} on {'; '.join(where)}.",
        f"{_explain(climb)}.",
        *([f"{rates}."] if (rates := _compare_rates(climb)) else []),
        "To use it: fastloop run CONF --config THIS_FILE, or FastLoop(THIS_FILE) in a script",
    ]
    text = _write_comment(head, "") + ("rungs:\n" if stack else "rungs: {}\n")
    shown = [each for each in climb.rungs if each.kept or each.is_removal]
    listed: list[str] = []
    for name, settings in stack.items():
        of_rung = [each for each in shown if name in (each.rung, *each.patch.get("rungs", {}))]
        figures = [f"{each.name}, as above" if each.name in listed else _describe_figures(each) for each in of_rung]
        listed += [each.name for each in of_rung]
        text += _write_comment(figures or ["enabled from the start"], "  ") + indent(dump_yaml({name: settings}), "  ")
    return text


def _write_comment(texts: Sequence[str], margin: str) -> str:
    wrapped = [
        part
        for line in put_on_one_line(texts)
        for part in wrap(line, 108, subsequent_indent="  ", break_long_words=False)
    ]
    return "".join(f"{margin}# {line}\n" for line in wrapped)


def _describe_figures(attempt: Attempt) -> str:
    if attempt.is_removal:
        return attempt.why
    parity = verdict_words.describe_parity(attempt.parity) or "n/a"
    change = f"step {format_short(attempt.step_ms_before)} to {format_short(attempt.step_ms_after)} ms"
    return f"{attempt.name}: {climb_rows.describe_saving(attempt)}, {change}; parity {parity}"


def _split(climb: ClimbFile) -> tuple[list[Attempt], list[Attempt]]:
    """Return the kept and the rolled-back attempts, without attempts to remove a rung."""
    added = [each for each in climb.rungs if not each.is_removal]
    return [each for each in added if each.kept], [each for each in added if not each.kept]


def _describe_confirmation(found: Confirmation) -> str:
    """Describe the confirmation in a sentence."""
    interval, level = verdict_words.format_interval(found), verdict_words.format_level(found)
    sure = f"{interval}, {level}, {found.runs or 'n/a'} runs of each"
    ratio = f"{verdict_words.format_ratio(found)} ({sure}), "
    if verdict_words.choose_word(found) == "PARITY FAILED":
        ratio = ""
    parity = verdict_words.describe_parity(found.parity) or "n/a"
    return f"Best stack against baseline, fresh runs: {ratio}parity {parity}"


def _explain(climb: ClimbFile) -> str:
    """Return the basis of the headline, or why it is not a ratio."""
    if climb.confirmed:
        return _describe_confirmation(climb.confirmed)
    kept, back = _split(climb)
    if kept:
        return f"Nothing is confirmed yet: {SCREEN}"
    if broken := select_broken(back):
        return f"Faster, but parity failed: {', '.join(each.name for each in broken)}"
    if (unanswered := select_unanswered(back)) and not climb.partial:
        return f"No clear result for {', '.join(each.name for each in unanswered)}"
    return (climb.stopped or "no rung was tried").removeprefix("nothing to gain: ")


def _compare_rates(climb: ClimbFile) -> str:
    """Describe the ends of the climb by the runs that confirmed it, else by its own, without a ratio."""
    fresh, per_step = climb.confirmed, climb_rows.count_samples_per_step(climb)
    if fresh and per_step and fresh.naive_samples_per_s and fresh.top_samples_per_s:
        medians = (("naive", fresh.naive_samples_per_s), ("top", fresh.top_samples_per_s))
        rates = [_describe_rate(name, rate, 1000 * per_step / rate) for name, rate in medians]
        return f"{', '.join(rates)}, medians of the fresh runs"
    ends = [(name, end) for name, end in (("naive", climb.naive), ("top", climb.top)) if end != Speed()]
    return ", ".join(_describe_rate(name, climb_rows.compute_rate(climb, end), end.step_ms) for name, end in ends)


def _describe_rate(name: str, rate: float | None, step_ms: float | None) -> str:
    return f"{name} {format_short(rate)} samples/s ({format_short(step_ms, 'ms')} a step)"


def _describe_other_rates(climb: ClimbFile) -> str:
    """Say that the fresh runs contradict the climb's own, and which rungs had no effect in them; else empty."""
    if climb.confirmed is None:
        return ""
    first, last = (climb_rows.compute_rate(climb, end) for end in (climb.naive, climb.top))
    ratio, notes = climb.confirmed.ratio, list[str]()
    if verdict_words.choose_word(climb.confirmed) == "PARITY FAILED":
        ratio = None
    if ratio and first and last and not 1 / APART < last / first / ratio < APART:
        notes.append(f"the climb's own runs gave {last / first:.2f}x, the fresh ones {ratio:.2f}x")
    idle = [f"{rung} ({why})" if why else rung for rung, why in climb.confirmed.inactive.items()]
    if idle:
        notes.append(f"without effect in the fresh runs: {', '.join(idle)}")
    return "; ".join(notes)


def _collect_idle(climb: ClimbFile) -> dict[str, str]:
    """Collect the rungs of kept ladders that were left out because they have no effect here, with the reason."""
    return {rung: why for each in climb.rungs if each.kept for rung, why in each.idle.items()}


def _list_dropped(climb: ClimbFile) -> list[str]:
    """List rungs that were kept at first and removed again at the end."""
    return [each.rung for each in climb.rungs if each.is_removal and each.kept]


def _list_ladders(climb: ClimbFile) -> str:
    """List the shipped ladders with their measured rates, the fastest first."""
    known = [(name, rate) for name, rate in climb.ladders_samples_per_s.items() if rate is not None]
    rates = sorted(known, key=lambda each: -each[1])
    listed = ", ".join(f"{name} {format_short(rate)}" for name, rate in rates)
    return f"{listed} samples/s, one run each" if rates else ""


def _describe_end(climb: ClimbFile) -> str:
    spent, budget = climb.spent_s, climb.budget_s
    unit, size = ("s", 1) if max(spent or 0.0, budget or 0.0) < SHORT_S else ("min", 60)
    of = "" if budget is None else f" of {format_short(budget / size)}"
    time = "" if spent is None else f"{format_short(spent / size)}{of} {unit} spent"
    return "; ".join(filter(None, [climb.stopped, time]))


def _make_ceiling_table(climb: ClimbFile) -> Table:
    first, last = dict(climb_rows.list_ceilings(climb)), dict(climb_rows.list_ceilings(climb, top=True))
    rows = [(name, format_number(first.get(name)), format_number(last.get(name))) for name in {**first, **last}]
    notes = "".join(f"; {name} {how}" for name, how in climb_rows.list_notes(climb).items())
    note = (
        f"Each is from a trial with a cost removed{notes}. Rungs that speed up the computation itself can lift the"
        " top above the naive ceilings, which were measured without them."
    )
    return Table(
        "Ceilings",
        ("if", "naive samples/s", "top samples/s"),
        rows,
        numeric=(1, 2),
        note=note if rows else "n/a: none was measured.",
    )


def _make_sections(climb: ClimbFile) -> tuple[Section, ...]:
    rungs, ended = climb_rows.make_table(climb), _describe_end(climb)
    parity = verdict_words.tabulate_gates(
        [(each.name, each.parity) for each in climb.rungs]
        + ([("naive vs top", climb.confirmed.parity)] if climb.confirmed else []),
        "rung",
    )
    tuned = tuple(
        f"{each.name}: {', '.join(f'{key} = {value}' for key, value in each.tuned.items())}"
        for each in climb.rungs
        if each.tuned
    )
    idle = tuple(f"{rung}: {why}" for rung, why in _collect_idle(climb).items())
    return (
        Section(title=rungs.title, table=rungs),
        Section(title="The ladder", code=write_ladder_yaml(climb)),
        Section(title="Parity", table=parity),
        Section(title="Ceilings", table=_make_ceiling_table(climb)),
        *([Section(title="Left out of the ladder", listed=idle)] if idle else []),
        *([Section(title="Tuned settings", listed=tuned)] if tuned else []),
        Section(title="How it climbed", text=(HOW, *([f"It ended: {ended}."] if ended else []))),
        Section(title="Where it ran", listed=describe_hardware(climb.hardware)),
    )

"""A climb for people: what is proven of the top, what each rung was predicted to save and what it saved.

The ladder that it leaves is YAML with these figures as comments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from textwrap import indent, wrap
from typing import Any

from fastloop.report import climbed, document, gates, judged, stairs
from fastloop.report.document import Document, Section, entries, flat, machine, part
from fastloop.report.readings import real
from fastloop.report.summary import number, short
from fastloop.report.tables import Table
from fastloop.yamlfile import dump_yaml

MOST_LINES = 14
SCREEN = "a screen is no proof, a fresh A/B of naive against top is"
HOW = (
    "The climb takes the family of rungs with the highest ceiling, predicts what its next rung saves, tunes the rung's"
    " own numbers by step time, and screens it against what was there before. A rung is kept where it looks faster and"
    " the training is still the same; otherwise it is rolled back, and the next attempt begins where this one did."
)
CLOSING = "Only the confirmed ratio may be quoted: it comes from fresh runs that chose nothing."


def lines(content: Mapping[str, Any]) -> list[str]:
    """What the terminal shows, verdict first: at most 14 lines, of climb.json's content."""
    kept, back = _sorted(content)
    how = climbed.notes(content)
    limits = ", ".join(f"{name} {short(rate)}{f' ({how[name]})' if name in how else ''}"
                       for name, rate in climbed.ceilings(content))  # fmt: skip
    at_top = ", ".join(f"{name} {short(rate)}" for name, rate in climbed.ceilings(content, climbed.TOP)) if kept else ""
    limits += f"; of the top: {at_top}" if at_top else ""
    kinds: list[tuple[str, list[str]]] = [
        ("PROOF" if part(content, "confirmed") else "WHY", [_why(content)]), ("RATE", [_rates(content)]),
        ("KEPT", [f"{climbed.called(rung)}: {climbed.saved(rung)}" for rung in kept]),
        ("BACK", [f"{climbed.called(rung)}: {rung.get('why') or 'n/a'}" for rung in back]),
        ("CEILINGS", [f"{limits} samples/s"] if limits else []), ("STOPPED", [_stopped(content)]),
        ("ON", [", ".join(machine(part(content, "hardware")))]), ("FILES", [str(content.get("run_dir") or "")]),
    ]  # fmt: skip
    kinds = [(kind, found) for kind, said in kinds if (found := [text for text in said if text])]
    while sum(len(said) for _, said in kinds) > MOST_LINES - 1:
        longest = max((said for _, said in kinds), key=len)
        longest[-2:] = ["; ".join(longest[-2:])]
    partial = "   PARTIAL: the climb did not end" if content.get("partial") else ""
    first = f"fastloop {verdict(content)}   {content.get('name') or ''}".rstrip() + partial
    return flat([first, *(f"{kind:<8} {line}" for kind, said in kinds for line in said)])


def reports(content: Mapping[str, Any]) -> dict[str, str]:
    """report.md and report.html, of climb.json's content."""
    return document.reports(told(content))


def verdict(content: Mapping[str, Any]) -> str:
    """The headline: the confirmed ratio, or what is missing for one."""
    kept, back = _sorted(content)
    confirmed = part(content, "confirmed")
    if confirmed:
        said = judged.headline(confirmed)
        return f"CONFIRMED {said}" if said.startswith("FASTER") else f"NOT CONFIRMED: {said}"
    if kept:
        return f"{len(kept)} RUNG{'' if len(kept) == 1 else 'S'} KEPT, NOTHING CONFIRMED"
    tried = bool(content.get("rungs")) or "budget" not in str(content.get("stopped") or "budget")
    if not tried or content.get("partial"):
        return "NOT FINISHED"
    if climbed.broken(back):
        return "NOTHING KEPT: PARITY FAILED"
    return "NOTHING KEPT, NOT ALL COULD BE JUDGED" if climbed.unanswered(back) else "NOTHING TO GAIN"


def told(content: Mapping[str, Any]) -> Document:
    """The whole report, for Markdown and for the page."""
    said = verdict(content)
    good = (said.startswith("CONFIRMED") and "," not in said) or said == "NOTHING TO GAIN"
    rates, off = _rates(content), climbed.off_by(content)
    predicted = "" if off is None else f"The predictions were off by {number(off, ',.0f')} % (median)."
    return Document(
        kind="climb", verdict=said[:1] + said[1:].lower(), tone="good" if good else "unknown",
        lede=_why(content) or _confirmed(content), lines=tuple(lines(content)),
        also=tuple(filter(None, [f"{rates[:1].upper()}{rates[1:]}.", predicted])),
        run=tuple(filter(None, [str(content.get("name") or ""), *machine(part(content, "hardware"))])),
        flags=("PARTIAL: the climb did not end",) if content.get("partial") else (),
        pictures=stairs.draw(content), picture_title="From naive to top", sections=_sections(content), closing=CLOSING,
    )  # fmt: skip


def ladder_yaml(content: Mapping[str, Any]) -> str:
    """The top as a ladder: its rungs alone, each under what it was predicted to save and saved."""
    stack = part(part(content, "stack"), "rungs")
    where = filter(None, [", ".join(machine(part(content, "hardware"))), str(content.get("date") or "")])
    head = [f"The ladder that fastloop climb found for {content.get('name') or 'n/a'} on {'; '.join(where)}.",
            f"{_confirmed(content) or _why(content)}.", f"{_rates(content)}.",
            "It is replayed without any search by: fastloop run CONF --config THIS_FILE"]  # fmt: skip
    text = _comments(head, "") + ("rungs:\n" if stack else "rungs: {}\n")
    kept, _ = _sorted(content)
    for name, settings in stack.items():
        said = [_figures(rung) for rung in kept if name in (rung.get("rung"), *part(part(rung, "patch"), "rungs"))]
        text += _comments(said or ["on from the start"], "  ") + indent(dump_yaml({name: settings}), "  ")
    return text


def _comments(said: Sequence[str], margin: str) -> str:
    wrapped = [part for line in flat(said) for part in wrap(line, 108, subsequent_indent="  ", break_long_words=False)]
    return "".join(f"{margin}# {line}\n" for line in wrapped)


def _figures(rung: Mapping[str, Any]) -> str:
    parity = gates.line(part(rung, "parity")) or "n/a"
    before, after = (short(real(rung.get(f"step_ms_{when}"))) for when in ("before", "after"))
    return f"{climbed.called(rung)}: {climbed.saved(rung)}, step {before} to {after} ms; parity {parity}"


def _sorted(content: Mapping[str, Any]) -> tuple[list[Mapping[str, Any]], list[Mapping[str, Any]]]:
    """The rungs that were kept, and those that were rolled back."""
    rungs = entries(content, "rungs")
    kept = [rung for rung in rungs if rung.get("kept") is True]
    return kept, [rung for rung in rungs if rung not in kept]


def _confirmed(content: Mapping[str, Any]) -> str:
    """The confirmation in a sentence; empty without one."""
    found = part(content, "confirmed")
    if not found:
        return ""
    sure = f"{judged.between(found)}, {judged.level(found)}, {found.get('runs') or 'n/a'} runs of each"
    ratio = "" if judged.word(found) == "PARITY FAILED" else f"{judged.times(found)} ({sure}), "
    return f"Naive against top in fresh runs: {ratio}parity {gates.line(part(found, 'parity')) or 'n/a'}"


def _why(content: Mapping[str, Any]) -> str:
    """What keeps the headline from being a ratio, or what it stands on."""
    if part(content, "confirmed"):
        return _confirmed(content)
    kept, back = _sorted(content)
    if kept:
        return f"Nothing is confirmed yet; {SCREEN}"
    if found := climbed.broken(back):
        return f"Not the same training any more, though faster: {', '.join(map(climbed.called, found))}"
    if (found := climbed.unanswered(back)) and not content.get("partial"):
        return f"No answer on {', '.join(map(climbed.called, found))}"
    return str(content.get("stopped") or "no rung was tried").removeprefix("nothing to gain: ")


def _rates(content: Mapping[str, Any]) -> str:
    """Both ends of the climb, as its own trials measured them; no ratio, which only fresh runs may give."""
    said = []
    for end in ("naive", "top"):
        step = short(real(part(content, end).get("step_ms")), "ms")
        said.append(f"{end} {short(climbed.end_rate(content, end))} samples/s ({step} a step)")
    return ", ".join(said)


def _stopped(content: Mapping[str, Any]) -> str:
    spent, budget = real(content.get("spent_s")), real(content.get("budget_s"))
    of = "" if budget is None else f" of {short(budget / 60)}"
    time = "" if spent is None else f"{short(spent / 60)}{of} min spent"
    return "; ".join(filter(None, [str(content.get("stopped") or ""), time]))


def _limits(content: Mapping[str, Any]) -> Table:
    first, last = (dict(climbed.ceilings(content, end)) for end in ("", climbed.TOP))
    rows = [(name, number(first.get(name)), number(last.get(name))) for name in {**first, **last}]
    but = "".join(f"; {name} {how}" for name, how in climbed.notes(content).items())
    note = f"Each from a trial with a cost taken away{but}. With other arithmetic the top may pass those of the start."
    return Table(title="Ceilings", head=("if", "naive samples/s", "top samples/s"), rows=tuple(rows), numeric=(1, 2),
                 note=note if rows else "n/a: none was measured.")  # fmt: skip


def _sections(content: Mapping[str, Any]) -> tuple[Section, ...]:
    rungs = climbed.table(content)
    confirmed = part(content, "confirmed")
    parity = gates.table([(climbed.called(rung), part(rung, "parity")) for rung in entries(content, "rungs")]
                         + ([("naive vs top", part(confirmed, "parity"))] if confirmed else []), "rung")  # fmt: skip
    tuned = [f"{climbed.called(rung)}: {', '.join(f'{key} = {value}' for key, value in part(rung, 'tuned').items())}"
             for rung in entries(content, "rungs") if part(rung, "tuned")]  # fmt: skip
    ended = _stopped(content)
    return (
        Section(title=rungs.title, table=rungs),
        Section(title="The ladder", code=ladder_yaml(content)),
        Section(title="Parity", table=parity), Section(title="Ceilings", table=_limits(content)),
        *([Section(title="Numbers that were tuned", listed=tuple(tuned))] if tuned else []),
        Section(title="How it climbed", text=(HOW, *([f"It ended: {ended}."] if ended else []))),
        Section(title="Where it ran", listed=machine(part(content, "hardware"))),
    )  # fmt: skip

"""An A/B for people: the verdict with its interval, whether it is still the same training, and every run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastloop.report import document, gates, judged, rates
from fastloop.report.document import Document, Section, entries, flat, machine, part
from fastloop.report.judged import WORDS, headline
from fastloop.report.readings import real
from fastloop.report.summary import number, short
from fastloop.report.tables import Table, cut
from fastloop.report.trials import changed, failed, failures, middle, runs

Pair = tuple[Mapping[str, Any], Mapping[str, Any]]
"""A comparison and its arm's entry among the arms."""
MOST_LINES = 14
NAME_LETTERS = 44
MEANING = (
    "The run is the unit: each is a fresh process, and steps before the window (warm-up, compilation, cold caches) do"
    " not count. The logarithm of each run's rate is explained by its arm and by its place in the order, so a machine"
    " that drifts does not pass for a difference. Were the whole experiment repeated many times, about so many of its"
    " intervals as the level says would hold the true ratio. The smallest visible difference is the one that this many"
    " runs at this spread would have found four times out of five: what is smaller may be there all the same."
)
AGAIN = (
    "Run i of every arm trained with the i-th seed, in the order above; each run has a directory of its own beside"
    " comparison.json, with its resolved configuration, its environment and its measurement."
)
CLOSING = "Only these arms were compared, on this machine and with these versions; another GPU asks for its own A/B."


def lines(content: Mapping[str, Any]) -> list[str]:
    """What the terminal shows, verdict first: at most 14 lines, of comparison.json's content."""
    told = ranked(content)
    best = told[0] if told else None
    more = [f"  {_claim(one, arm)}" for one, arm in told[1:]]
    kinds: list[tuple[str, list[str]]] = [
        ("RATE", _rate(content, best)), ("PARITY", _parity(best)), ("WHY", _why(content, best)), ("", more),
        ("ARMS", [judged.together(entries(content, "comparisons"))]),
        ("INACTIVE", inactive(content)), ("FLAG", ["; ".join(map(str, content.get("flags") or ()))]),
        ("FAILED", failures(content)), ("ON", [", ".join(machine(part(content, "hardware")))]),
        ("FILES", [str(content.get("run_dir") or "")]),
    ]  # fmt: skip
    kinds = [(kind, found) for kind, said in kinds if (found := [text for text in said if text])]
    while sum(len(said) for _, said in kinds) > MOST_LINES - 1:
        longest = max((said for _, said in kinds), key=len)
        longest[-2:] = [f"{longest[-2]}; {longest[-1].strip()}"]
    return flat([_first(content, best), *(f"{kind:<8} {line}" if kind else line for kind, said in kinds
                                          for line in said)])  # fmt: skip


def reports(content: Mapping[str, Any]) -> dict[str, str]:
    """report.md and report.html, of comparison.json's content."""
    return document.reports(told(content))


def ranked(content: Mapping[str, Any]) -> list[Pair]:
    """Each comparison with its arm, the best first."""
    arms = {arm.get("name"): arm for arm in entries(content, "arms")}
    found = [(one, arms.get(one.get("arm")) or {}) for one in entries(content, "comparisons")]
    return sorted(found, key=_rank)


def _rank(pair: Pair) -> tuple[int, bool, float]:
    """By verdict, then those whose parity is shown, then by ratio."""
    shown = gates.passed(part(pair[0], "parity")) is True
    return WORDS.index(judged.word(*pair)), not shown, -(real(pair[0].get("ratio")) or 0.0)


def told(content: Mapping[str, Any]) -> Document:
    """The whole report, for Markdown and for the page."""
    found = ranked(content)
    said, best = verdict(content), found[0] if found else None
    setting = (str(content.get("name") or ""), _against(content, best), *machine(part(content, "hardware")))
    partial = ["PARTIAL: the experiment did not end"] if content.get("partial") else []
    parity = gates.line(part(best[0], "parity")) if best else ""
    together = judged.together(entries(content, "comparisons"))
    return Document(
        kind="A/B", verdict=said[:1] + said[1:].lower(), tone=judged.tone(said), lede=_lede(content, best),
        also=tuple(filter(None, [f"Parity: {parity}." if parity else "", *(_claim(*pair) for pair in found[1:]),
                                 together and f"{together}."])),
        lines=tuple(lines(content)), run=tuple(filter(None, setting)), pictures=rates.draw(content),
        flags=(*partial, *map(str, content.get("flags") or ())), picture_title="Every run, and what they say",
        no_picture="n/a: no run finished.", sections=_sections(content, found), closing=CLOSING,
    )  # fmt: skip


def verdict(content: Mapping[str, Any]) -> str:
    """The headline: of the best arm, or that there is nothing to judge."""
    found = ranked(content)
    if found:
        return headline(*found[0])
    return "FAILED" if failures(content) or any(arm.get("failed") for arm in entries(content, "arms")) else WORDS[3]


def _first(content: Mapping[str, Any], best: Pair | None) -> str:
    named = ": ".join(filter(None, [str(content.get("name") or ""), _against(content, best)]))
    partial = "   PARTIAL: the experiment did not end" if content.get("partial") else ""
    return f"fastloop {verdict(content)}   {named}".rstrip() + partial


def _against(content: Mapping[str, Any], best: Pair | None) -> str:
    arms = entries(content, "arms")
    names = [_called(arm.get("name")) for arm in arms[:1]] + ([_called(best[0].get("arm"))] if best else [])
    return " vs ".join(names)


def _called(name: Any) -> str:
    """An arm's name where there is little room: of a long one, both ends."""
    return cut(str(name), NAME_LETTERS)


def _claim(one: Mapping[str, Any], arm: Mapping[str, Any]) -> str:
    """One of the other arms in a line: verdict, interval, parity where it did not hold."""
    said = f"{headline(one, arm)}   {_called(one.get('arm'))}"
    if judged.word(one, arm) == "PARITY FAILED":
        return f"{said}: {gates.line(part(one, 'parity'))}"
    if judged.interval(one) is None:
        return f"{said}: {failed(arm) or one.get('why') or 'n/a'}"
    held = gates.passed(part(one, "parity"))
    return f"{said} ({judged.between(one)}, {judged.level(one)}{', parity passed' if held else ''})"


def _rate(content: Mapping[str, Any], best: Pair | None) -> list[str]:
    """Medians of both arms, and how sure the ratio is."""
    arms = entries(content, "arms")
    shown = [*arms[:1], *([best[1]] if best and best[1] else [])]
    said = [f"{_called(arm.get('name'))} {short(middle(arm))}" for arm in shown]
    said[:1] = [f"{text} samples/s" for text in said[:1]]
    if not said or best is None:
        return [", ".join(said)]
    one = best[0]
    sure = "no interval"
    if judged.interval(one) is not None:
        sure = f"interval of the ratio {judged.between(one)}, {judged.level(one)}"
    mde = real(one.get("mde_pct"))
    visible = "" if mde is None else f"; smallest visible difference {number(mde)} %"
    return [f"{', '.join(said)} ({_count(shown)}; {sure}){visible}{_other_way(one, shown)}"]


def _other_way(one: Mapping[str, Any], arms: Sequence[Mapping[str, Any]]) -> str:
    """What to say where a ratio is claimed and the medians beside it say the opposite."""
    middles, ratio = [middle(arm) for arm in arms], real(one.get("ratio"))
    if len(middles) < 2 or not middles[0] or not middles[1] or ratio is None:
        return ""
    if judged.word(one) not in ("FASTER", "SLOWER") or (middles[1] - middles[0]) * (ratio - 1) >= 0:
        return ""
    return "; the medians point the other way, for only the ratio takes out the order of the runs"


def _count(arms: Sequence[Mapping[str, Any]]) -> str:
    """How many runs the figures stand on."""
    counts = [len(arm.get("samples_per_s") or ()) for arm in arms]
    of = "medians of " if max(counts) > 1 else ""
    if len(set(counts)) == 1:
        return f"{of}{counts[0]} run{'' if counts[0] == 1 else 's'} of each"
    return f"{of}{' and '.join(map(str, counts))} runs"


def _parity(best: Pair | None) -> list[str]:
    return [gates.line(part(best[0], "parity"))] if best else []


def _why(content: Mapping[str, Any], best: Pair | None) -> list[str]:
    """The reason, where the lines above do not say it all."""
    plain = best is not None and judged.word(*best) in ("FASTER", "SLOWER") and gates.passed(part(best[0], "parity"))
    parity = part(best[0], "parity").get("why") if best else None
    return [] if plain else [_lede(content, best).removesuffix(f"; {parity}")]


def _lede(content: Mapping[str, Any], best: Pair | None) -> str:
    if best is None:
        arms = [f"{arm.get('name')}: {failed(arm)}" for arm in entries(content, "arms") if failed(arm)]
        return "; ".join(arms) or "no arm could be compared with the base"
    return str(best[0].get("why") or failed(best[1]) or "n/a")


def inactive(content: Mapping[str, Any]) -> list[str]:
    """Enabled rungs without effect, an arm a line: no credit is theirs."""
    found = []
    for arm in entries(content, "arms"):
        why = part(arm, "inactive_why")
        said = [f"{rung}{f' ({why[rung]})' if why.get(rung) else ''}" for rung in arm.get("inactive_rungs") or ()]
        found += [f"{_called(arm.get('name'))}: {', '.join(said)}: no credit"] if said else []
    return found


def _sections(content: Mapping[str, Any], found: Sequence[Pair]) -> tuple[Section, ...]:
    parity = gates.table([(str(one.get("arm")), part(one, "parity")) for one, _ in found])
    told = [(table.title, table) for table in (_arms(content), _comparisons(found), parity, changed(content))]
    made = [Section(title=title, table=table) for title, table in told]
    lost = failures(content)
    for failure, line in zip(entries(content, "failures"), lost, strict=True):
        made.append(Section(title=f"Failed: {failure.get('arm')}", text=(line,), code=str(failure.get("tail") or "")))
    command = str(content.get("command") or "")
    asked = f"{number(real(content.get('steps')), ',.0f')} steps a run, {_warm(content)} of them before the window."
    return (*made, Section(title="Every run, in order", table=runs(content)),
            Section(title="How to read it, and do it again", text=(MEANING, f"{asked} {AGAIN}"), code=command),
            Section(title="Where it ran", listed=machine(part(content, "hardware"))))  # fmt: skip


def _warm(content: Mapping[str, Any]) -> str:
    return number(real(content.get("warmup_steps")), ",.0f")


def _arms(content: Mapping[str, Any]) -> Table:
    """What each arm reached, and which of its rungs took."""
    idle = {str(arm.get("name")): part(arm, "inactive_why") for arm in entries(content, "arms")}
    rows = [
        (str(arm.get("name")), short(middle(arm)), number(real(arm.get("step_ms")), ",.2f"),
         number(real(arm.get("peak_gib")), ",.2f"), number(real(arm.get("global_batch")), ",.0f"),
         str(arm.get("runs", "n/a")), ", ".join(map(str, arm.get("active_rungs") or ())) or "none",
         ", ".join(f"{rung}: {idle[str(arm.get('name'))].get(rung) or 'n/a'}"
                   for rung in arm.get("inactive_rungs") or ()) or "none", failed(arm) or "-")
        for arm in entries(content, "arms")
    ]  # fmt: skip
    head = ("arm", "samples/s", "step ms", "peak GiB", "batch", "runs", "rungs that took", "without effect", "failed")
    return Table(title="Arms", head=head, rows=tuple(rows), numeric=(1, 2, 3, 4, 5),
                 note="Medians over the runs. A rung without effect gets no credit.")  # fmt: skip


def _comparisons(found: Sequence[Pair]) -> Table:
    rows = [(str(one.get("arm")), judged.word(one, arm), judged.times(one), judged.between(one), judged.level(one),
             number(real(one.get("mde_pct")), ",.1f", "%"), str(one.get("why") or "n/a"))
            for one, arm in found]  # fmt: skip
    head = ("arm", "verdict", "ratio", "interval", "level", "smallest visible", "why")
    return Table(title="Against the base", head=head, rows=tuple(rows), numeric=(2, 3, 4, 5),
                 note="The ratio takes out the order of the runs, which medians do not." if rows else
                 "n/a: nothing was compared.")  # fmt: skip

"""The report of an A/B: the verdict with its interval, whether it is still the same training, and every run."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from itertools import zip_longest
from statistics import median
from typing import Any

from fastloop.numbers import format_number, format_short
from fastloop.records.experiment import ArmResult, Comparison, ExperimentResult
from fastloop.records.plan import say_count
from fastloop.report.drawing.document import Document, Section, Table
from fastloop.report.experiments import ab_picture, verdict_words
from fastloop.report.experiments.verdict_words import WORDS, describe_hardware, write_headline
from fastloop.report.run.tables import cut

Pair = tuple[Comparison, ArmResult]
"""A comparison and its arm's result."""
WIDE = 10
"""From this percentage on, the smallest visible difference has no decimals."""
NAME_LETTERS = 44
WORTH_SAYING_S = 5.0
"""A shorter compile is not worth a line."""
MEANING = (
    "The run is the unit: each is a fresh process, and steps before the window (warm-up, compilation, cold caches) do"
    " not count. The log of each run's rate is modeled by its arm and its place in the order, so machine drift does"
    " not pass for a difference. If the experiment were repeated many times, the stated percentage of its intervals"
    " would contain the true ratio. The smallest visible difference is what this many runs with this spread would"
    " detect four times out of five; smaller differences may exist."
)
AGAIN = (
    "run-0 of every arm trained with the first seed, run-1 with the next, in the order above; each has a directory of"
    " that name inside its arm's directory, with its resolved configuration, environment and measurement."
)
CLOSING = "Only these arms were compared, on this machine and with these versions; another GPU needs its own A/B test."


def write_lines(result: ExperimentResult) -> list[str]:
    """Return the terminal's output from comparison.json's content: at most 14 lines, verdict first."""
    pairs = rank_arms(result)
    best = pairs[0] if pairs else None
    kinds = [
        ("RATE", _describe_rates(result, best)),
        ("PARITY", [verdict_words.describe_parity(best[0].parity)] if best else []),
        ("WHY", _list_reasons(result, best)),
        ("", [f"  {_describe(one, arm)}" for one, arm in pairs[1:]]),
        ("PAY-BACK", [_describe_pay_back(result.arms[0], best[1])] if best else []),
        ("ARMS", [verdict_words.describe_shared_error_rate(result.comparisons)]),
        ("INACTIVE", list_inactive(result, besides=" ".join(_list_reasons(result, best)))),
        ("FLAG", ["; ".join(result.flags)]),
        ("FAILED", list_failures(result)),
        ("ON", [", ".join(describe_hardware(result.hardware))]),
        ("FILES", [result.run_dir]),
    ]
    named = ": ".join(filter(None, [result.name, _describe_against(result, best)]))
    partial = "   PARTIAL: the experiment did not finish" if result.partial else ""
    broken = [cut(one.arm, NAME_LETTERS) for one, _ in pairs[1:] if one.parity.passed is False]
    also = f"   PARITY FAILED: {', '.join(broken)}" if broken and pairs[0][0].parity.passed is not False else ""
    return verdict_words.lay_out(f"fastloop {describe_verdict(result)}   {named}".rstrip() + also + partial, kinds)


def rank_arms(result: ExperimentResult) -> list[Pair]:
    """Return each comparison with its arm, the best first."""
    arms = {arm.name: arm for arm in result.arms}
    pairs = [(one, arms.get(one.arm, ArmResult(name=one.arm))) for one in result.comparisons]
    return sorted(pairs, key=_order)


def _order(pair: Pair) -> tuple[int, bool, float]:
    """Sort key: by verdict, then arms with passed parity first, then by ratio."""
    return WORDS.index(verdict_words.choose_word(*pair)), not pair[0].parity.passed, -(pair[0].ratio or 0.0)


def make_document(result: ExperimentResult) -> Document:
    """Build the whole report, for Markdown and the HTML page."""
    pairs = rank_arms(result)
    headline, best = describe_verdict(result), pairs[0] if pairs else None
    setting = (result.name, _describe_against(result, best), *describe_hardware(result.hardware))
    partial = ["PARTIAL: the experiment did not finish"] if result.partial else []
    parity = verdict_words.describe_parity(best[0].parity) if best else ""
    together = verdict_words.describe_shared_error_rate(result.comparisons)
    also = [parity and f"Parity: {parity}.", *(_describe(*pair) for pair in pairs[1:]), together and f"{together}."]
    return Document(
        kind="A/B",
        verdict=headline[:1] + headline[1:].lower(),
        tone=verdict_words.choose_tone(headline),
        lede=_write_lede(result, best),
        also=tuple(filter(None, also)),
        lines=tuple(write_lines(result)),
        run=tuple(filter(None, setting)),
        pictures=ab_picture.draw(result),
        flags=(*partial, *result.flags),
        picture_title="Every run, and the result",
        no_picture="n/a: no run finished.",
        sections=_make_sections(result, pairs),
        closing=CLOSING,
    )


def describe_verdict(result: ExperimentResult) -> str:
    """Return the headline: that of the best arm, or that there is nothing to judge."""
    pairs = rank_arms(result)
    if pairs:
        return write_headline(*pairs[0])
    return "FAILED" if result.failures or any(arm.failed for arm in result.arms) else "INSUFFICIENT"


def _describe_against(result: ExperimentResult, best: Pair | None) -> str:
    names = [*(arm.name for arm in result.arms[:1]), *([best[0].arm] if best else [])]
    return " vs ".join(cut(name, NAME_LETTERS) for name in names)


def _describe(one: Comparison, arm: ArmResult) -> str:
    """Describe one of the other arms in a line: verdict, interval, parity."""
    claim = f"{write_headline(one, arm)}   {cut(one.arm, NAME_LETTERS)}"
    if verdict_words.choose_word(one, arm) == "PARITY FAILED":
        return f"{claim}: {verdict_words.describe_parity(one.parity)}"
    if one.ci95 is None:
        return f"{claim}: {arm.failed or one.why or 'n/a'}"
    held = ", parity passed" if one.parity.passed else ""
    return f"{claim} ({verdict_words.format_interval(one)}, {verdict_words.format_level(one)}{held})"


def _describe_pay_back(base: ArmResult, arm: ArmResult) -> str:
    """Say after how many steps an arm has recovered its compile time, and how many the user's run has; empty if the
    question does not arise."""
    took_s = (arm.compile_s or 0.0) - (base.compile_s or 0.0)
    if took_s < WORTH_SAYING_S or not base.step_ms or not arm.step_ms or arm.step_ms >= base.step_ms:
        return ""
    after = math.ceil(1e3 * took_s / (base.step_ms - arm.step_ms))
    says = f"compiling took up to {took_s:.0f} s in a run, which pays back after about {after:,} steps"
    if arm.planned_steps is None:
        return says
    return f"{says}; {'your' if arm.planned_steps >= after else 'but your'} run has {arm.planned_steps:,}"


def _describe_rates(result: ExperimentResult, best: Pair | None) -> list[str]:
    """Describe the medians of both arms and the interval of the ratio."""
    shown = [*result.arms[:1], *([best[1]] if best else [])]
    if not any(arm.runs or arm.failed for arm in result.arms):
        return []
    rates = [f"{cut(arm.name, NAME_LETTERS)} {format_short(compute_median_rate(arm))}" for arm in shown]
    rates[:1] = [f"{text} samples/s" for text in rates[:1]]
    if not rates or best is None:
        return [", ".join(rates)]
    one = best[0]
    sure = "no interval"
    if one.ci95 is not None:
        sure = f"{verdict_words.format_level(one)} interval of the ratio {verdict_words.format_interval(one)}"
    is_open = verdict_words.choose_word(one) not in ("FASTER", "SLOWER")
    visible = f"; smallest visible difference {_format_mde(one)}" if one.mde_pct is not None and is_open else ""
    return [f"{', '.join(rates)} ({_count(shown)}; {sure}){visible}{_explain_medians(one, shown)}"]


def _explain_medians(one: Comparison, arms: Sequence[ArmResult]) -> str:
    """Return a remark if a ratio is claimed and the medians say the opposite; otherwise empty."""
    middles, ratio = [compute_median_rate(arm) for arm in arms], one.ratio
    if len(middles) < 2 or not middles[0] or not middles[1] or ratio is None:
        return ""
    if verdict_words.choose_word(one) not in ("FASTER", "SLOWER") or (middles[1] - middles[0]) * (ratio - 1) >= 0:
        return ""
    return "; the medians point the other way because only the ratio corrects for the order of the runs"


def _count(arms: Sequence[ArmResult]) -> str:
    """Describe how many runs the figures are based on."""
    counts = [len(arm.samples_per_s) for arm in arms]
    of = "medians of " if max(counts) > 1 else ""
    if len(set(counts)) == 1:
        return f"{of}{say_count(counts[0], 'run')} of each"
    return f"{of}{' and '.join(map(str, counts))} runs"


def _list_reasons(result: ExperimentResult, best: Pair | None) -> list[str]:
    """Return the reason unless the lines above already give it."""
    if best is None:
        return [_write_lede(result, best)]
    if verdict_words.choose_word(*best) in ("FASTER", "SLOWER") and best[0].parity.passed:
        return []
    return [_write_lede(result, best).removesuffix(f"; {best[0].parity.why}")]


def _write_lede(result: ExperimentResult, best: Pair | None) -> str:
    if best is None:
        failed = [f"{arm.name}: {arm.failed}" for arm in result.arms if arm.failed]
        return "; ".join(failed) or "no arm could be compared with the base"
    return best[0].why or best[1].failed or "n/a"


def list_inactive(result: ExperimentResult, *, besides: str = "") -> list[str]:
    """List enabled rungs without effect, one line per arm, except those that `besides` names already."""
    found = []
    for arm in result.arms:
        why = arm.inactive_why
        rungs = [f"{rung}{f' ({why[rung]})' if why.get(rung) else ''}" for rung in arm.inactive_rungs]
        rungs = [text for text in rungs if text not in besides]
        found += [f"{cut(arm.name, NAME_LETTERS)}: {', '.join(rungs)}: no credit"] if rungs else []
    return found


def _make_sections(result: ExperimentResult, pairs: Sequence[Pair]) -> tuple[Section, ...]:
    parity = verdict_words.tabulate_gates([(one.arm, one.parity) for one, _ in pairs])
    tables = (_tabulate_arms(result), _tabulate_comparisons(pairs), parity, tabulate_changes(result))
    made = [Section(title=table.title, table=table) for table in tables]
    for failure, line in zip(result.failures, list_failures(result), strict=True):
        made.append(Section(title=f"Failed: {failure.arm}", text=(line,), code=failure.tail))
    warm = format_number(None if result.warmup_steps is None else result.warmup_steps + 1, ",.0f")
    asked, ended = format_number(result.steps, ",.0f"), result.ended_at
    steps = f"{asked} steps a run" if ended is None else f"{ended:,} steps a run ({asked} requested)"
    how = f"{steps}, {warm} of them before the window. {AGAIN}"
    return (
        *made,
        Section(title="Every run, in order", table=tabulate_runs(result)),
        Section(title="How to read and repeat this", text=(MEANING, how)),
        Section(title="Where it ran", listed=describe_hardware(result.hardware)),
    )


def _tabulate_arms(result: ExperimentResult) -> Table:
    """Tabulate each arm's results, and which of its rungs took effect."""
    rows = [
        (
            arm.name,
            format_short(compute_median_rate(arm)),
            format_number(arm.step_ms, ",.2f"),
            format_number(arm.peak_gib, ",.2f"),
            format_number(arm.global_batch, ",.0f"),
            str(arm.runs),
            ", ".join(arm.active_rungs) or "none",
            ", ".join(f"{rung}: {arm.inactive_why.get(rung) or 'n/a'}" for rung in arm.inactive_rungs) or "none",
            arm.failed or "-",
        )
        for arm in result.arms
    ]
    head = (
        "arm",
        "samples/s",
        "step ms",
        "peak GiB",
        "global batch",
        "runs",
        "rungs that took effect",
        "without effect",
        "failed",
    )
    return Table(
        "Arms",
        head,
        rows,
        numeric=(1, 2, 3, 4, 5),
        note="Medians over the runs. A rung that had no effect gets no credit.",
    )


def _format_mde(one: Comparison) -> str:
    """Format the smallest visible difference as the verdict's sentence does."""
    return format_number(one.mde_pct, ",.0f" if (one.mde_pct or 0.0) >= WIDE else ".1f", "%")


def _tabulate_comparisons(pairs: Sequence[Pair]) -> Table:
    rows = [
        (
            one.arm,
            verdict_words.choose_word(one, arm),
            verdict_words.format_ratio(one),
            verdict_words.format_interval(one),
            verdict_words.format_level(one),
            _format_mde(one),
            one.why or "n/a",
        )
        for one, arm in pairs
    ]
    head = ("arm", "verdict", "ratio", "interval", "level", "smallest visible", "why")
    return Table(
        "Against the base",
        head,
        rows,
        numeric=(2, 3, 4, 5),
        note="The ratio corrects for the order of the runs; medians do not." if rows else "n/a: nothing was compared.",
    )


# -- the runs behind a comparison: their results, their failures, and the settings of their arms -----------------------


def compute_median_rate(arm: ArmResult) -> float | None:
    """Return the median rate of an arm's runs, in samples per second."""
    return median(arm.samples_per_s) if arm.samples_per_s else None


def list_failures(result: ExperimentResult) -> list[str]:
    """Describe each failed run in a line: its cause and its last step."""
    found = []
    for failure in result.failures:
        run = "" if failure.run is None else f", {failure.run}"
        step = "" if failure.last_step is None else f", last step {failure.last_step}"
        found.append(f"{failure.arm}{run}: {failure.cause or 'n/a'}{step}")
    return found


def tabulate_runs(result: ExperimentResult) -> Table:
    """Tabulate all runs that began, in order."""
    known = {
        place: (str(seed), format_short(rate))
        for arm in result.arms
        for place, rate, seed in zip_longest(arm.places, arm.samples_per_s, arm.seeds[: len(arm.places)])
    }
    rows = [(str(place + 1), name, *known.get(place, ("n/a", "no result"))) for place, name in enumerate(result.order)]
    return Table(
        "Every run, in order",
        ("place", "arm", "seed", "samples/s"),
        rows,
        numeric=(0, 2, 3),
        note="" if rows else "n/a: no run began.",
    )


def tabulate_changes(result: ExperimentResult) -> Table:
    """Tabulate the settings of each arm that differ from the base."""
    rows = [
        (arm, key, _format(base), _format(other))
        for arm, keys in result.config_diff.items()
        for key, base, other in keys
    ]
    return Table(
        "Configuration that differs",
        ("arm", "key", "base", "arm's"),
        rows,
        note="" if rows else "Nothing differs: an A/A test of the false-alarm rate.",
    )


def _format(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)

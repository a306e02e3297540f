"""The report of one run: verdict, step, other readings, rungs, changed configuration, environment."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from fastloop.numbers import format_flop_rate, format_number, format_short
from fastloop.records.measurement import Measurement
from fastloop.records.plan import Finding, Plan, Verdict
from fastloop.records.run_files import Environment
from fastloop.records.yaml_text import dump_yaml
from fastloop.report.drawing.bars import Chart
from fastloop.report.drawing.curves import Curve
from fastloop.report.drawing.document import Document, FindingBox, Section, Table, Tile
from fastloop.report.run import figures, optional_tables, summary, tables
from fastloop.report.run.caveats import list_caveats

CLOSING = (
    "This report measures one run. We never claim a speed-up from a single run: that takes an A/B test over several."
)
_GOOD = ("none", "compute_bound")
_UNKNOWN = ("TOO SHORT TO JUDGE", "NOT MEASURED", "NO BOTTLENECK FOUND", "NO SINGLE BOTTLENECK", "SINGLE PAUSES")


def build_document(
    seen: Measurement,
    plan: Plan,
    verdicts: Sequence[Verdict],
    findings: Sequence[Finding],
    *,
    changed_yaml: str,
    environment: Environment,
    left_out: str = "",
    name: str = "",
    then: Sequence[str] = (),
    later: Sequence[str] = (),
) -> Document:
    """Build the whole report, for Markdown and the HTML page.

    Args:
        left_out: disabled rungs and how to try them, one line each.
        name: the name of the recipe or configuration; for ``then`` and ``later`` see ``summary.write_lines``.
    """
    pictures, headline = figures.draw(seen), summary.choose_title(findings)
    first = findings[0] if findings else None
    is_good = first and not first.alarm and first.bottleneck in _GOOD and "NOT FAST" not in headline
    about = (summary.describe_setting(seen, name), summary.describe_devices(seen), summary.describe_window(seen))
    ceiling = summary.describe_first_ceiling(seen, findings).replace("   ", " \u00b7 ")
    sections = [
        _list_findings(findings, seen, then, later),
        *_narrow(seen, pictures),
        _add_titles(tables.tabulate_parts(seen)),
        *(_add_titles(table) for table in optional_tables.tabulate_all(seen) if len(table.head) != 2),
        _list_rungs(plan, verdicts, seen),
        Section(title="What these figures depend on", listed=seen.state),
        Section(
            title="Configuration that differs from the baseline",
            text=() if changed_yaml.strip() else ("Nothing differs.",),
            code=changed_yaml.rstrip(),
            language="yaml",
        ),
        _add_titles(tables.tabulate_environment(environment)),
        Section(title="Not measured", listed=tuple(optional_tables.list_missing(seen))),
        Section(
            title="Left out, and how to try it",
            listed=tuple(line.removeprefix("* ") for line in left_out.splitlines() if line.strip()),
            is_folded=True,
        ),
    ]
    return Document(
        kind="report",
        verdict=_to_sentence(headline),
        tone="unknown" if headline in _UNKNOWN else "good" if is_good else "bad",
        lede=_capitalize(findings[0].why) if findings else "Nothing was watched.",
        lines=tuple(summary.write_lines(seen, plan, verdicts, findings, name=name, then=then, later=later)),
        run=tuple(filter(None, about)),
        also=tuple(f"Also {_to_sentence(finding.title, start=False)}" for finding in findings[1:]),
        flags=tuple(summary.list_flags(seen)),
        notes=tuple(filter(None, [_capitalize(ceiling), *(f"Note: {note}" for note in list_caveats(seen, findings))])),
        pictures=(pictures["step"],) if "step" in pictures else (),
        picture_title="Where the step goes",
        no_picture="n/a: no step was measured.",
        tiles=_list_tiles(seen),
        sections=tuple(section for section in sections if _has_content(section)),
        closing=CLOSING,
    )


def _has_content(section: Section) -> bool:
    return section != Section(title=section.title, is_narrow=section.is_narrow, is_folded=section.is_folded)


def _add_titles(table: Table, *, is_narrow: bool = False) -> Section:
    return Section(title=table.title, table=table, is_narrow=is_narrow)


def _narrow(seen: Measurement, pictures: Mapping[str, Chart | Curve]) -> list[Section]:
    """Return the pictures and tables that are placed side by side on a wide screen."""
    drawn = {key: (picture,) for key, picture in pictures.items()}
    return [
        Section(title="The GPU over time", pictures=drawn.get("gpu", ()) + drawn.get("watts", ()), is_narrow=True),
        Section(title="Loss", pictures=drawn.get("loss", ()), notes=tables.describe_losses(seen), is_narrow=True),
        Section(title="Kernels and idle time", pictures=drawn.get("kernels", ()), is_narrow=True),
        Section(title="The ranks' steps", pictures=drawn.get("ranks", ()), is_narrow=True),
        _add_titles(tables.tabulate_step(seen), is_narrow=True),
        *(_add_titles(once, is_narrow=True) for once in [tables.tabulate_one_time(seen)] if once.rows),
        *(_add_titles(table, is_narrow=True) for table in optional_tables.tabulate_all(seen) if len(table.head) == 2),
    ]


def _to_sentence(title: str, *, start: bool = True) -> str:
    """Convert a title in capitals to a sentence, or to the end of one."""
    text = title.capitalize() if start else title.lower()
    return re.sub(r"\b([cg]pus?|dram|nccl|ddp)\b", lambda found: found[0].upper(), text, flags=re.IGNORECASE)


def _capitalize(text: str) -> str:
    return text[:1].upper() + text[1:]


def _list_tiles(seen: Measurement) -> tuple[Tile, ...]:
    """Return the few numbers that readers look for first."""
    fed, usd = summary.compute_fed_pct(seen), seen.usd_per_million_samples
    least = ">= " if seen.flops.get("at_least") else ""
    rate, _, unit = format_flop_rate(seen.tflop_per_s).partition(" ")
    mfu = seen.mfu.get("datasheet")
    found = [
        ("step", format_number(seen.step_ms.get("mean")), "ms"),
        ("rate", format_short(seen.samples_per_s), "samples/s"),
        ("rate", "" if seen.tokens_per_s is None else format_short(seen.tokens_per_s), "tokens/s"),
        ("GPU fed", "" if fed is None else f"{fed:.0f}", "%"),
        ("NVML busy", "" if seen.gpu.get("nvml_busy_pct") is None else format_short(seen.gpu["nvml_busy_pct"]), "%"),
        ("lead", "" if seen.lead_ms is None else format_number(seen.lead_ms), "ms"),
        ("work", "" if seen.tflop_per_s is None else f"{least}{rate}", unit),
        ("MFU of bf16", "" if mfu is None else f"{least}{format_short(100 * mfu)}", "%"),
        ("energy", "" if seen.joule_per_sample is None else format_short(seen.joule_per_sample), "J/sample"),
        ("1e6 samples cost", "" if usd is None else f"${usd:,.2f}", ""),
        ("peak memory", "" if seen.peak_gib is None else format_short(seen.peak_gib), "GiB"),
        ("watching", format_number(seen.watch_us_per_step), "us a step"),
    ]
    return tuple(Tile(label, value, "" if value == "n/a" else unit) for label, value, unit in found if value)


def _list_findings(
    findings: Sequence[Finding], seen: Measurement, then: Sequence[str], later: Sequence[str]
) -> Section:
    """Make a card for each finding that contains more than its title."""
    has_ceiling = bool(summary.describe_first_ceiling(seen, findings))
    cards = [
        _make_card(finding, seen, is_first=not index, has_ceiling=has_ceiling and not index)
        for index, finding in enumerate(findings)
    ]
    steps = [f"{word}: {', '.join(rungs)}" for word, rungs in (("Then", then), ("Later", later)) if rungs]
    return Section(
        title="Findings",
        cards=tuple(card for card in cards if card != FindingBox(name=card.name, title=card.title)),
        notes=tuple(steps),
    )


def _make_card(finding: Finding, seen: Measurement, *, is_first: bool, has_ceiling: bool) -> FindingBox:
    """Make a finding's card, without what the head of the report shows: the first finding's reason and ceiling."""
    return FindingBox(
        name="" if finding.bottleneck == "none" else finding.bottleneck,
        title=_to_sentence(finding.title),
        share="" if finding.share_pct is None else f"{format_number(finding.share_pct)} % of the step",
        why="" if is_first else _capitalize(finding.why),
        detail=tuple(line for line in finding.detail if line not in seen.state),
        bound="" if has_ceiling else summary.describe_ceiling(finding, seen) or "",
        patch=dump_yaml(dict(finding.patch)).rstrip() if finding.patch else "",
    )


def _list_rungs(plan: Plan, verdicts: Sequence[Verdict], seen: Measurement) -> Section:
    notes = (f"Parity class of the plan: {plan.parity}.", *summary.list_pay_backs(seen, verdicts))
    return Section(
        title="Rungs",
        table=tables.tabulate_rungs(verdicts),
        notes=notes if verdicts else (),
        listed=tuple(f"`{step.rung}`: {note}" for step in plan.planned for note in step.change.notes),
    )

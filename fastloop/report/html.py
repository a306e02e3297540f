"""report.html: one file that needs no network and no JavaScript. What it says comes from the other modules here."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from typing import Any

from fastloop.measurement import Measurement
from fastloop.records import Finding, Plan, Verdict
from fastloop.report import figures, readings, summary, tables
from fastloop.report.markdown import DISCLAIMER
from fastloop.report.notes import notes
from fastloop.report.summary import number, short
from fastloop.report.svg import printable
from fastloop.yamlfile import dump_yaml

_GOOD = ("none", "compute_bound")
_UNKNOWN = ("TOO SHORT TO JUDGE", "NOT MEASURED", "NO BOTTLENECK FOUND", "NO SINGLE BOTTLENECK", "SINGLE PAUSES")


def report(seen: Measurement, plan: Plan, verdicts: Sequence[Verdict], findings: Sequence[Finding], *,
           changed_yaml: str, environment: Mapping[str, Any], left_out: str = "", name: str = "",
           then: Sequence[str] = (), later: Sequence[str] = ()) -> str:  # fmt: skip
    """The whole report as a page; the words are those of ``summary.lines``.

    Raises:
        ImportError: jinja2 is not installed.
    """
    from markupsafe import Markup

    pictures, titles = figures.draw(seen), summary.titled(findings)
    page = {
        **_head(seen, findings, titles, name), "tiles": _tiles(seen), "pictures": pictures,
        "svg": defaultdict(Markup, {key: Markup(picture.markup) for key, picture in pictures.items()}),
        "why_no_pictures": _why_no_pictures(pictures), "parts": tables.parts(seen), "step": tables.step(seen),
        "findings": _cards(findings, titles, seen), "then": then, "later": later,
        "readings": readings.tables(seen), "rungs": tables.rungs(verdicts), "rung_notes": tables.rung_notes(plan),
        "parity": plan.parity, "losses": tables.losses(seen), "state": seen.state, "missing": readings.missing(seen),
        "changed_yaml": changed_yaml.rstrip(), "environment": tables.environment(environment),
        "left_out": [_pieces(line) for line in left_out.splitlines() if line.strip()], "disclaimer": DISCLAIMER,
    }  # fmt: skip
    return render("report.html.jinja", page)


def render(template: str, page: Mapping[str, Any]) -> str:
    """One of the templates beside this file, filled in: whatever is no ``Markup`` is escaped.

    Raises:
        ImportError: jinja2 is not installed.
    """
    import jinja2

    def source(name: str) -> str:
        return resources.files("fastloop.report").joinpath(name).read_text(encoding="utf-8")

    made = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True,
                              loader=jinja2.FunctionLoader(source),
                              finalize=lambda value: printable(value) if type(value) is str else value)  # fmt: skip
    return made.get_template(template).render(page)


def page(make: Callable[[], str]) -> tuple[dict[str, str], str]:
    """report.html, or nothing and the reason (jinja2 is missing, say): it must not cost the other files."""
    try:
        return {"report.html": make()}, ""
    except Exception as error:
        return {}, f"There is no report.html: {type(error).__name__}: {error}"


def _head(seen: Measurement, findings: Sequence[Finding], titles: Sequence[str], name: str) -> dict[str, Any]:
    """The verdict, its reasons and which run it is about."""
    told = summary.verdict_title(titles)
    tone = "good" if findings and findings[0].bottleneck in _GOOD and "NOT FAST" not in told else "bad"
    return {
        "name": name, "tone": "unknown" if told in _UNKNOWN else tone, "verdict": _sentence(told),
        "why": _upper(findings[0].why) if findings else "Nothing was watched.", "flags": summary.flags(seen),
        "also": [_sentence(title) for title in titles[1:]],
        "ceiling": _upper(summary.ceiling_line(seen, findings).replace("   ", " \u00b7 ")),
        "notes": notes(seen, findings),
        "run": list(filter(None, (summary.setting(seen, name), summary.devices(seen), summary.window(seen)))),
    }  # fmt: skip


def _sentence(title: str) -> str:
    """A title in capitals as one that starts a sentence."""
    return re.sub(r"\b([cg]pus?|dram|nccl|ddp)\b", lambda found: found[0].upper(), title.capitalize())


def _upper(text: str) -> str:
    return text[:1].upper() + text[1:]


def _tiles(seen: Measurement) -> list[tuple[str, str, str]]:
    """Label, value and unit of the few numbers that are looked for first."""
    fed, usd = summary.fed_pct(seen), seen.usd_per_million_samples
    least = ">= " if seen.flops.get("at_least") else ""
    rate, _, unit = summary.flop_rate(seen.tflop_per_s).partition(" ")
    mfu = seen.mfu.get("datasheet")
    found = [
        ("step", number(seen.step_ms.get("mean")), "ms"), ("rate", short(seen.samples_per_s), "samples/s"),
        ("", "" if seen.tokens_per_s is None else short(seen.tokens_per_s), "tokens/s"),
        ("GPU fed", "" if fed is None else f"{fed:.0f}", "%"),
        ("NVML busy", "" if seen.gpu.get("nvml_busy_pct") is None else short(seen.gpu["nvml_busy_pct"]), "%"),
        ("lead", "" if seen.lead_ms is None else number(seen.lead_ms), "ms"),
        ("work", "" if seen.tflop_per_s is None else f"{least}{rate}", unit),
        ("MFU of bf16", "" if mfu is None else f"{least}{short(100 * mfu)}", "%"),
        ("energy", "" if seen.joule_per_sample is None else short(seen.joule_per_sample), "J/sample"),
        ("1e6 samples cost", "" if usd is None else f"${usd:,.2f}", ""),
        ("peak memory", "" if seen.peak_gib is None else short(seen.peak_gib), "GiB"),
        ("watching", number(seen.watch_us_per_step), "us a step"),
    ]  # fmt: skip
    return [(label or "rate", value, "" if value == "n/a" else unit) for label, value, unit in found if value]


def _cards(findings: Sequence[Finding], titles: Sequence[str], seen: Measurement) -> list[dict[str, Any]]:
    """A card for each finding, without what the head of the page says of the first one: its reason and its ceiling."""
    cards = [_card(finding, title, seen) for finding, title in zip(findings, titles, strict=True)]
    if cards:
        cards[0]["why"] = ""
        if summary.ceiling_line(seen, findings):
            cards[0]["bound"] = "n/a"
    return [card for card in cards if card["why"] or card["detail"] or card["patch"]
            or (card["share"], card["bound"]) != ("n/a", "n/a")]  # fmt: skip


def _card(finding: Finding, title: str, seen: Measurement) -> dict[str, Any]:
    return {
        "name": finding.bottleneck, "title": _sentence(title), "why": _upper(finding.why),
        "detail": [line for _, line in tables.details([finding], seen)],
        "share": number(finding.share_pct), "bound": tables.bound(finding, seen),
        "patch": dump_yaml(dict(finding.patch)).rstrip() if finding.patch else "",
    }  # fmt: skip


def _why_no_pictures(pictures: Mapping[str, figures.Picture]) -> str:
    """One sentence where pictures failed, which they do together when matplotlib is missing."""
    reasons = sorted({picture.why_not for picture in pictures.values() if picture.why_not})
    return f"Not every picture could be drawn: {'; '.join(reasons)}." if reasons else ""


def _pieces(line: str) -> list[tuple[bool, str]]:
    """A line of Markdown's simplest kind as (is code, text) pieces."""
    pieces = re.split(r"`([^`]*)`", line.removeprefix("* "))
    return [(index % 2 == 1, text) for index, text in enumerate(pieces) if text]

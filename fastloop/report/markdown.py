"""report.md: the verdict, the step, what was read beside it, the rungs, what changed, where it ran."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from fastloop.measurement import Measurement
from fastloop.records import Finding, Plan, Verdict
from fastloop.report import readings, summary, tables
from fastloop.report.tables import Table

_MARKUP = re.compile(r"[\\`*<|~]|(?<![^\W_])_|_(?![^\W_])")
"""What Markdown would read as markup. An underscore inside a word is none: ``num_workers`` stays as it is."""
DISCLAIMER = "This report measures one run. It says nothing about speed-ups: those need an A/B over several runs."


def report(seen: Measurement, plan: Plan, verdicts: Sequence[Verdict], findings: Sequence[Finding], *,
           changed_yaml: str, environment: Mapping[str, Any], left_out: str = "", note: str = "",
           **words: Any) -> str:  # fmt: skip
    """The whole report as Markdown.

    Args:
        note: what the reader should know about the report itself.
        words: ``name``, ``then`` and ``later`` as ``summary.lines`` takes them.
    """
    first = summary.lines(seen, plan, verdicts, findings, **words)
    parts = [fenced("\n".join(first)), section(tables.step(seen)), section(tables.parts(seen)),
             _findings(findings, seen), *map(section, readings.tables(seen)), _rungs(plan, verdicts),
             _loss(seen), _listed("What these figures depend on", seen.state),
             f"## Configuration that differs from the baseline\n\n{fenced(changed_yaml.rstrip(), 'yaml')}",
             section(tables.environment(environment)), _listed("Not measured", readings.missing(seen))]  # fmt: skip
    if left_out:
        parts.append(f"## Left out, and how to try it\n\n{left_out}")
    parts += [plain(note), DISCLAIMER]
    return "# fastloop report\n\n" + "\n\n".join(filter(None, parts)) + "\n"


def fenced(text: str, kind: str = "") -> str:
    """A block that is shown as it is, between fences longer than any inside it."""
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
    return f"{fence}{kind}\n{text}\n{fence}"


def plain(text: str) -> str:
    """A text on one line, with nothing in it that Markdown would take for markup."""
    return _MARKUP.sub(lambda found: f"\\{found[0]}", " ".join(text.split()))


def section(table: Table) -> str:
    """A table under its heading, or the sentence that stands for it."""
    parts = [f"## {table.title}"]
    if table.rows:
        rule = ["---:" if column in table.numeric else "---" for column in range(len(table.head))]
        rows = [table.head, rule, *([plain(cell) for cell in row] for row in table.rows)]
        parts.append("\n".join(f"| {' | '.join(row)} |" for row in rows))
    return "\n\n".join([*parts, *filter(None, [plain(table.note)])])


def _listed(title: str, said: Sequence[str]) -> str:
    return f"## {title}\n\n" + "\n".join(f"* {plain(line)}" for line in said) if said else ""


def _findings(findings: Sequence[Finding], seen: Measurement) -> str:
    lines = [f"* {plain(name)}: {plain(line)}" for name, line in tables.details(findings, seen)]
    return "\n\n".join(filter(None, [section(tables.findings(findings, seen)), "\n".join(lines)]))


def _rungs(plan: Plan, verdicts: Sequence[Verdict]) -> str:
    text = section(tables.rungs(verdicts))
    if not verdicts:
        return text
    notes = "\n".join(f"* `{rung}`: {plain(note)}" for rung, note in tables.rung_notes(plan))
    return "\n\n".join(filter(None, [text, f"Parity class of the plan: {plan.parity}.", notes]))


def _loss(seen: Measurement) -> str:
    said, warning = tables.losses(seen)
    return f"## Loss\n\n{said}{f' **{warning}**' if warning else ''}"

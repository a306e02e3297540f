"""The summary that users read first: the verdict, the step, the rungs that took effect, what to do.

Lines are not wrapped: terminals do that, and a wrapped line cannot be searched or copied as a whole. The most important
part of a line is in its first 40 columns. There is no color, so NO_COLOR has no effect.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from fastloop.numbers import format_flop_rate, format_number, format_s, format_short
from fastloop.records.measurement import ONE_TIME, PARTS, Measurement
from fastloop.records.plan import Finding, Plan, Verdict, say_count
from fastloop.records.readings import read_ranks
from fastloop.records.yaml_text import dump_on_one_line
from fastloop.report.run import caveats

FREE = {
    "data_wait": "data were free",
    "h2d": "the copies were free",
    "launch_bound": "launches were free",
    "host_other": "the host's work were free",
    "callbacks_logging": "callbacks and logging were free",
    "sync": "nothing synchronized",
    "comm_exposed": "the exchange were free",
    "straggler": "all ranks kept pace",
    "validation": "validation were free",
    "checkpoint": "checkpoints were free",
    "epoch_gap": "epochs had no gap",
}


class PartStyle(NamedTuple):
    """How reports show one part of a step."""

    label: str
    short: str
    """Label below the terminal's bar, which shows its first letter: a capital if the device does not train."""
    color: str
    """The part's color in every picture; warm if the device is kept waiting."""


STYLES = {
    "data_wait": PartStyle("waiting for data", "Wait", "#d9480f"),
    "h2d": PartStyle("copy to the device", "h2d", "#e8a317"),
    "forward": PartStyle("forward", "fwd", "#74b0e4"),
    "backward": PartStyle("backward", "bwd", "#2f6fb5"),
    "optimizer": PartStyle("optimizer", "opt", "#2a9d74"),
    "comm_exposed": PartStyle("exchange, exposed", "comm", "#b565a7"),
    "callbacks_logging": PartStyle("callbacks, logging", "Log", "#9a8b1c"),
    "validation": PartStyle("validation", "Val", "#7c6bc4"),
    "checkpoint": PartStyle("checkpoint", "Save", "#8a5a3c"),
    "epoch_gap": PartStyle("between epochs", "Epoch", "#8f9aa5"),
    "host_other": PartStyle("host, other", "Host", "#66717d"),
    "unexplained": PartStyle("unexplained", "?unexplained", "#b9c0c7"),
}
"""Styles by the name of the part."""
MOST_LINES = 12
EXPLAINED = 2
"""Number of findings, from the first, whose reasons the summary shows; that of growing memory is always shown."""
WORTH_A_WORD_S = 0.05
"""One-time costs below this are not named."""
BAR_CELLS = 22


def write_lines(
    seen: Measurement,
    plan: Plan,
    verdicts: Sequence[Verdict],
    findings: Sequence[Finding],
    report: str | Path | None = None,
    name: str = "",
    then: Sequence[str] = (),
    later: Sequence[str] = (),
    proof: str | None = None,
) -> list[str]:
    """Return at most 12 lines, verdict first. They claim no speed-up of a rung: only an A/B can show one.

    If there are more, some of one kind share a line; no reason is left out.

    Args:
        report: the path of the report, or why there is none.
        name: the name of the recipe or configuration.
        then: what to try after the fixes.
        later: what to try once the device is the limit.
        proof: the command that tests the first fix.
    """
    head = [write_headline(seen, findings, name), *_list_reasons(findings)]
    took = [f"{verdict.rung} ({_flatten(verdict.why)})" for verdict in verdicts if verdict.took]
    figures = (_draw_bar(seen), _describe_rates(seen), describe_work(seen), describe_first_ceiling(seen, findings))
    kinds: list[tuple[str, list[str]]] = [
        ("", list(filter(None, figures))),
        ("ONE-TIME", [text] if (text := describe_one_time(seen)) else []),
        ("PAY-BACK", list_pay_backs(seen, verdicts)),
        ("TOOK", [f"[{plan.parity}] {'; '.join(took)}"] if took else []),
        ("CHANGES", [_flatten(line) for line in list_loop_changes(plan, verdicts)]),
        ("INACTIVE", list_inactive(verdicts)),
        ("UNKNOWN", [f"{verdict.rung}: {_flatten(verdict.why)}" for verdict in verdicts if verdict.took is None]),
        ("SYNC", [_flatten(line) for line in caveats.describe_syncs(seen)]),
        ("NOTE", [_flatten(note) for note in caveats.list_caveats(seen, findings)]),
        ("FIX", list_fixes(findings)),
        *_list_next(then, later),
        ("PROVE", [proof] if proof else []),
        ("REPORT", [str(report)] if report else []),
    ]
    join_lines(kinds, MOST_LINES - len(head))
    return [*map(_flatten, head), *(f"{kind:<8} {line}" if kind else line for kind, texts in kinds for line in texts)]


DIFFERS = "differ"  # in the notes of rungs that load samples: not the samples of a run without them


def list_loop_changes(plan: Plan, verdicts: Sequence[Verdict]) -> list[str]:
    """List the notes of effective rungs that set Trainer keys or group batches into steps differently, those on samples
    that differ, and those of rungs that are off now but changed the first steps."""
    took = {verdict.rung for verdict in verdicts if verdict.took}
    changed = []
    for step in plan.planned:
        notes, keys = step.change.notes, step.change.wants
        if not any(key.startswith(("step.", "trainer.")) for key in keys):
            may_differ = step.change.parity != "exact" and any(key.startswith("loader.") for key in keys)
            notes = tuple(note for note in notes if may_differ and DIFFERS in note)
        changed += [f"{step.rung}: {'; '.join(notes)}"] if step.rung in took and notes else []
    for step in plan.steps:
        if step.has_acted and step.status != "planned" and step.change.parity != "exact":
            said = "; ".join(step.change.notes) or "they may differ by rounding"
            changed.append(f"{step.rung} was on for the first steps: {said}")
    return changed


def list_inactive(verdicts: Sequence[Verdict]) -> list[str]:
    """List why enabled rungs had no effect; rungs share a line if their reasons begin alike."""
    shared: dict[str, list[Verdict]] = {}
    for verdict in verdicts:
        if verdict.took is False:
            shared.setdefault(verdict.why.partition("; ")[0], []).append(verdict)
    whys = {start: {verdict.why for verdict in group} for start, group in shared.items()}
    return [
        f"{', '.join(verdict.rung for verdict in group)}: {_flatten(group[0].why if len(whys[start]) == 1 else start)}"
        for start, group in shared.items()
    ]


def list_fixes(findings: Sequence[Finding]) -> list[str]:
    """List the patches, each once; a patch that does not address the headline says what it addresses."""
    fixes: dict[str, str] = {}
    for place, finding in enumerate(findings):
        if finding.patch:
            share = "" if place < EXPLAINED or finding.share_pct is None else f", {finding.share_pct:.0f} % of the step"
            against = "" if finding.title == findings[0].title else f" (against {finding.title}{share})"
            fixes.setdefault(_flatten(dump_on_one_line(finding.patch)), against)
    return [f"{patch}{against}" for patch, against in fixes.items()]


def join_lines(kinds: list[tuple[str, list[str]]], most: int) -> None:
    """Join lines, in place, until there are at most `most`: lines of one kind first, lines with numbers last.

    Each time, join the two neighbors that are shortest together, so that no line becomes longer than necessary.
    """
    while sum(len(texts) for _, texts in kinds) > most:
        kind, longest = max(kinds, key=lambda entry: len(entry[1]) if entry[0] else 1.5 * (len(entry[1]) > 1))
        pairs = range(len(longest) - 1) if kind else range(len(longest) - 2, len(longest) - 1)
        first = min(pairs, key=lambda place: len(longest[place]) + len(longest[place + 1]))
        longest[first : first + 2] = ["   ".join(longest[first : first + 2])]  # reasons contain semicolons


def _list_next(then: Sequence[str], later: Sequence[str]) -> list[tuple[str, list[str]]]:
    phrases = [(kind, ", ".join(steps)) for kind, steps in (("THEN", then), ("LATER", later)) if steps]
    if not phrases:
        return []
    return [(phrases[0][0], ["     ".join([phrases[0][1], *(f"{kind}  {text}" for kind, text in phrases[1:])])])]


def _flatten(text: str) -> str:
    """Put a text on one line, keeping leading spaces: a reason may be an exception's multi-line message."""
    return " ".join(text.splitlines())


def write_headline(seen: Measurement, findings: Sequence[Finding], name: str = "") -> str:
    """Return the first line: the bottleneck with its share or an alarm's figures, the run, the measured steps, and
    reasons to doubt them."""
    alarms = "; ".join(finding.alarm for finding in findings if finding.alarm)
    share = findings[0].share_pct if findings and not findings[0].title.startswith("NOTHING TO GAIN") else None
    figures = f": {alarms}" if alarms else "" if share is None else f" {share:.0f} %"
    phrases = [
        f"fastloop {choose_title(findings)}{figures}",
        describe_setting(seen, name),
        describe_devices(seen),
        describe_window(seen),
        *list_flags(seen),
    ]
    return "   ".join(filter(None, phrases))


def choose_title(findings: Sequence[Finding]) -> str:
    return findings[0].title if findings else "NOT MEASURED"


def describe_setting(seen: Measurement, name: str = "") -> str:
    """Describe name, micro-batch x accumulation, and precision, without unknown ones."""
    batch = "" if seen.micro_batch is None else f"batch {seen.micro_batch}"
    if batch and seen.global_batch and seen.global_batch % (seen.micro_batch or 1) == 0:
        times = seen.global_batch // (seen.micro_batch or 1) // max(1, seen.world_size)
        batch += f" x {times}" if times > 1 else ""
    return " ".join(filter(None, (name, batch, seen.precision)))


def describe_devices(seen: Measurement) -> str:
    named = (seen.device_name or seen.device).removeprefix("NVIDIA ")
    return f"{seen.world_size}x {named}"


def describe_window(seen: Measurement) -> str:
    if seen.total_steps is None:
        return "steps n/a: not watched"
    first = seen.total_steps - seen.steps if seen.first_step is None else seen.first_step  # no window was opened
    last = first + seen.steps
    return f"steps {first + 1}-{last}" if seen.steps else f"{say_count(last, 'step')}, none of them measured"


def list_flags(seen: Measurement) -> list[str]:
    """List reasons to doubt the figures."""
    ends = [f"rank {rank.rank}: {rank.end}" for rank in read_ranks(seen) if rank.end]
    how = f" ({', '.join(ends)})" if ends else ""
    phrases = [f"PARTIAL: the fit did not end normally{how}"] if seen.partial or ends else []
    if seen.steps and (short := describe_short_window(seen)) is not None:
        phrases.append(short)
    return phrases


def describe_short_window(seen: Measurement) -> str | None:
    """Return why the window is too short; None if it is not."""
    if not seen.window_too_short:
        return None
    why = f": {say_count(seen.steps, 'step')}" if seen.steps < 10 else " for the loader's queues"
    return f"window too short{why}"


def list_one_time(seen: Measurement) -> list[tuple[str, float | None]]:
    """List the causes of one-time costs as text, with their seconds."""
    causes = dict.fromkeys((*ONE_TIME, *seen.one_time_s))
    return [(cause.replace("_", " "), seen.one_time_s[cause]) for cause in causes if cause in seen.one_time_s]


def describe_one_time(seen: Measurement) -> str:
    """Describe one-time costs in seconds, by cause; empty if none is worth a line."""
    return ", ".join(
        f"{cause} {format_s(seconds)}"
        for cause, seconds in list_one_time(seen)
        if seconds is not None and seconds >= WORTH_A_WORD_S
    )


def list_pay_backs(seen: Measurement, verdicts: Sequence[Verdict]) -> list[str]:
    """Say for each rehearsed rung with a one-time cost after how many steps that would pay back. Not a verdict."""
    found, before_ms = list[str](), None
    for verdict in verdicts:
        tried, after, took_s = verdict.rehearsed, verdict.pays_back_after_steps, seen.one_time_s.get(verdict.rung)
        if tried is None or tried.eager_ms is None or tried.changed_ms is None:
            continue
        less_ms = (before_ms if tried.of_batch and before_ms is not None else tried.eager_ms) - tried.changed_ms
        if tried.of_batch and verdict.took is not False:  # it was kept, and later rungs were tried on top of it
            before_ms = tried.changed_ms
        if after is None and not took_s:
            continue  # it has no one-time cost
        took = f"{verdict.rung} took {format_s(took_s)};" if took_s else f"{verdict.rung}:"
        change = f"{format_short(abs(less_ms), 'ms')} {'less' if less_ms > 0 else 'more'}" if less_ms else "no change"
        if after is None:
            when = "would not pay back" if less_ms <= 0 else "pay-back time unknown"
        else:
            when = f"would pay back after about {format_short(_round(after))} steps"
        has = "" if seen.total_steps is None else f"; this run has {seen.total_steps:,d}{' steps' * (after is None)}"
        found.append(f"{took} {change} on the rehearsed batch (no verdict): {when}{has}")
    return found


def _round(steps: float) -> float:
    """Round an estimate to two digits."""
    return steps if steps < 10 or not math.isfinite(steps) else round(steps, 1 - math.floor(math.log10(steps)))


def _list_reasons(findings: Sequence[Finding]) -> list[str]:
    explained = [place for place, each in enumerate(findings) if place < EXPLAINED or each.bottleneck == "memory_creep"]
    return [f"  {f'also {findings[place].title}: ' if place else ''}{findings[place].why}" for place in explained]


def select_known(parts: Mapping[str, float | None]) -> dict[str, float]:
    """Return the measured parts, in the order of a step."""
    found = {part: parts.get(part) for part in PARTS}
    return {part: float(ms) for part, ms in found.items() if ms is not None and math.isfinite(ms)}


def _draw_bar(seen: Measurement) -> str:
    """Draw the step as a bar of its parts; the unknown part is dotted."""
    mean = seen.step_ms.get("mean")
    time = f"step {format_short(mean, 'ms') if mean is not None and 0 < mean < 1 else format_number(mean, unit='ms')}"
    parts = {part: ms for part, ms in select_known(seen.parts_ms).items() if ms > 0}
    if mean is None or not math.isfinite(mean) or mean <= 0 or not parts:
        return time
    rest = max(0.0, mean - sum(parts.values()))
    sizes = {STYLES[part].short[0]: ms for part, ms in parts.items()} | ({".": rest} if rest > 0.01 * mean else {})
    cells = _count_cells(list(sizes.values()))
    bar = "".join(letter * count for letter, count in zip(sizes, cells, strict=True))
    named = [f"{STYLES[part].short} {format_short(ms)}" for part, ms in parts.items() if ms >= 0.01 * mean]
    if "." in sizes:
        named.append(f"...not split {format_short(rest)}")
    elif (small := sum(ms for ms in parts.values() if ms < 0.01 * mean)) >= 0.001 * mean:
        named.append(f"others {format_short(small)}")
    return f"{time} |{bar}| {'  '.join(named)}"


def _count_cells(sizes: Sequence[float]) -> list[int]:
    """Distribute the bar's cells over the sizes by largest remainder, so that they fill it."""
    exact = [BAR_CELLS * size / sum(sizes) for size in sizes]
    cells = [int(share) for share in exact]
    by_rest = sorted(range(len(sizes)), key=lambda index: cells[index] - exact[index])
    for index in by_rest[: BAR_CELLS - sum(cells)]:
        cells[index] += 1
    return cells


def compute_fed_pct(seen: Measurement) -> float | None:
    """Return the share of the step without waiting for data; None on the CPU, which prepares its own data."""
    mean, wait = seen.step_ms.get("mean"), seen.parts_ms.get("data_wait")
    if seen.device == "cpu" or not mean or wait is None:
        return None
    return max(0.0, 100 * (1 - wait / mean))


def _describe_rates(seen: Measurement) -> str:
    phrases = [f"{format_short(seen.samples_per_s)} samples/s"]
    if seen.tokens_per_s is not None:
        phrases.append(f"{format_short(seen.tokens_per_s)} tokens/s")
    if seen.lead_ms is not None:
        phrases.append(f"lead {format_number(seen.lead_ms, unit='ms')}")
    busy = seen.gpu.get("nvml_busy_pct")
    nvml = "" if busy is None else f"NVML busy {format_short(busy)} %"
    if (fed := compute_fed_pct(seen)) is not None:
        phrases.append(f"GPU fed {fed:.0f} %{f' ({nvml})' if nvml else ''}")
    elif nvml:
        phrases.append(nvml)
    if seen.joule_per_sample is not None:
        phrases.append(f"{format_short(seen.joule_per_sample)} J/sample")
    phrases.append(f"watching cost {format_number(seen.watch_us_per_step, unit='us a step')}")
    return "   ".join(phrases)


def describe_work(seen: Measurement) -> str:
    """Describe the arithmetic rate relative to the peaks; empty if FLOPs were not counted."""
    if seen.tflop_per_s is None:
        return ""
    least = ">= " if seen.flops.get("at_least") else ""
    dtype = seen.peaks.get("dtype") or "the dtype in use"
    shares = [(seen.mfu.get("dtype_in_use"), f"of {dtype}"), (seen.mfu.get("datasheet"), "of bf16")]
    if dtype == "bf16":
        shares = shares[:1]
    phrases = [f"{format_short(100 * share)} % {of}" for share, of in shares if share is not None]
    equal = "" if not phrases else ": at least " if least else " = "
    text = f"{least}{format_flop_rate(seen.tflop_per_s)}{equal}{' and '.join(phrases)}"
    active = seen.gpu.get("tensor_active_pct")
    return text if active is None else f"{text}   tensor cores {format_short(active)} % active"


def describe_ceiling(finding: Finding, seen: Measurement) -> str | None:
    """Describe the most samples per second without this bottleneck, as measured or estimated; None if unknown."""
    pct = finding.ceiling_gain_pct
    if pct is None or not math.isfinite(pct) or seen.samples_per_s is None:
        return None
    rate = format_short(seen.samples_per_s * (1 + pct / 100))
    if finding.ceiling_is_estimate:
        return f"at most {rate} samples/s (an estimate)"
    return f"at most {rate} samples/s ({1 + pct / 100:.{1 if pct >= 100 else 2}f}x, measured)"


def describe_first_ceiling(seen: Measurement, findings: Sequence[Finding]) -> str:
    """Describe the first finding's ceiling and the loop's current workers; empty if there is no ceiling, or if a few
    long steps distort the means that an estimate is made of."""
    bound = describe_ceiling(findings[0], seen) if findings else None
    if bound is None or (findings[0].ceiling_is_estimate and caveats.list_unevenness(seen)):
        return ""
    free = FREE.get(findings[0].bottleneck, "the first finding were fixed")
    if findings[0].bottleneck == "launch_bound" and seen.device == "cpu":
        free = "the loop itself were free"  # nothing is launched
    line = f"if {free}: {bound}"
    loader = seen.evidence.get("loader") or {}
    workers, cpus = loader.get("num_workers"), loader.get("usable_cpus")
    if findings[0].bottleneck == "data_wait" and workers is not None and cpus is not None:
        names = " and ".join(loader.get("without_workers") or ())
        where = f" in {names}" if names else ""
        line += f"   now: {say_count(workers, 'worker')}{where}, {cpus} CPUs usable"
    return line

"""The few lines a person reads first: the verdict, the step, what took, what to do.

Lines are not wrapped: terminals do that themselves, and a wrapped line can be neither searched nor copied whole. What
matters most in a line stands in its first 40 columns. There is no colour, so NO_COLOR has nothing to switch off.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fastloop.measurement import PARTS, Measurement
from fastloop.records import Finding, Plan, Verdict
from fastloop.report import syncs
from fastloop.report.notes import notes

FREE = {
    "data_wait": "data were free", "h2d": "the copies were free", "launch_bound": "launches were free",
    "host_other": "the host's work were free", "callbacks_logging": "callbacks and logging were free",
    "sync": "nothing synchronised", "comm_exposed": "the exchange were free", "straggler": "all ranks kept pace",
    "validation": "validation were free", "checkpoint": "checkpoints were free", "epoch_gap": "epochs had no gap",
}  # fmt: skip
LEGEND = {
    "data_wait": "Wait", "h2d": "h2d", "forward": "fwd", "backward": "bwd", "optimizer": "opt", "comm_exposed": "comm",
    "callbacks_logging": "Log", "validation": "Val", "checkpoint": "Save", "epoch_gap": "Epoch", "host_other": "Host",
    "unexplained": "?unexplained",
}  # fmt: skip
"""Names of the parts under the bar; their first letters are drawn in it. Capitals: the device does not train."""
MOST_LINES = 12
BAR_CELLS = 22


def number(value: float | None, form: str = ",.1f", unit: str = "") -> str:
    """A number for people, with its unit; what was not measured is n/a, never 0."""
    return "n/a" if value is None or not math.isfinite(value) else f"{format(value, form)} {unit}".rstrip()


def short(value: float | None, unit: str = "") -> str:
    """A number to three digits, whole from a hundred up: 0.577, 40.5, 2,697."""
    if value is None or not math.isfinite(value):
        return "n/a"
    digits = 0 if abs(value) >= 100 or value == 0 else min(9, 2 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{digits}f}"
    return f"{text.rstrip('0').rstrip('.') if digits else text} {unit}".rstrip()


def titled(findings: Sequence[Finding]) -> list[str]:
    """The headline of each finding; the bottleneck's name where it has none, as in files of older versions."""
    return [finding.title or finding.bottleneck.replace("_", " ").upper() for finding in findings]


def yaml_patch(patch: Mapping[str, Any] | None) -> str:
    """A nested patch on one line: ``rungs.workers {enabled: true}``."""
    parts = []
    for section, inner in (patch or {}).items():
        if not isinstance(inner, Mapping):
            parts.append(f"{section}: {json.dumps(inner, default=str)}")
            continue
        for name, settings in inner.items():
            if isinstance(settings, Mapping):
                fields = ", ".join(f"{key}: {json.dumps(value, default=str)}" for key, value in settings.items())
                parts.append(f"{section}.{name} {{{fields}}}")
            else:
                parts.append(f"{section}.{name}: {json.dumps(settings, default=str)}")
    return ", ".join(parts)


def lines(seen: Measurement, plan: Plan, verdicts: Sequence[Verdict], findings: Sequence[Finding],
          report: str | Path | None = None, name: str = "", then: Sequence[str] = (), later: Sequence[str] = (),
          ) -> list[str]:  # fmt: skip
    """At most 12 lines, verdict first. Says nothing about a rung's speed-up: only an A/B can.

    Where there are more, those of one kind share a line: a reason is never left out.

    Args:
        report: where the report lies.
        name: of the recipe or configuration.
        then: what to try after the fixes.
        later: what to try once the device is the limit.
    """
    titles = titled(findings)
    head = [verdict(seen, titles, name), *_whys(findings, titles)]
    took = [f"{verdict.rung} ({_flat(verdict.why)})" for verdict in verdicts if verdict.took]
    kinds: list[tuple[str, list[str]]] = [
        ("", [line for line in (_bar(seen), _rates(seen), work(seen), ceiling_line(seen, findings)) if line]),
        ("TOOK", [f"[{plan.parity}] {'; '.join(took)}"] if took else []),
        ("INACTIVE", [f"{verdict.rung}: {_flat(verdict.why)}" for verdict in verdicts if verdict.took is False]),
        ("UNKNOWN", [f"{verdict.rung}: {_flat(verdict.why)}" for verdict in verdicts if verdict.took is None]),
        ("SYNC", [_flat(line) for line in syncs.lines(seen)]),
        ("NOTE", [_flat(note) for note in notes(seen, findings)]),
        ("FIX", [_flat(yaml_patch(finding.patch)) for finding in findings if finding.patch]),
        *_next(then, later),
        ("REPORT", [str(report)] if report else []),
    ]
    _fit(kinds, MOST_LINES - len(head))
    return [*map(_flat, head), *(f"{kind:<8} {line}" if kind else line for kind, said in kinds for line in said)]


def _fit(kinds: list[tuple[str, list[str]]], most: int) -> None:
    """Join lines, in place, until there are at most so many: first those of one kind, last those of the numbers."""
    while sum(len(said) for _, said in kinds) > most:
        kind, longest = max(kinds, key=lambda entry: len(entry[1]) if entry[0] else 1.5 * (len(entry[1]) > 1))
        longest[:] = ["; ".join(longest)] if kind else [*longest[:-2], "   ".join(longest[-2:])]


def _next(then: Sequence[str], later: Sequence[str]) -> list[tuple[str, list[str]]]:
    said = [(kind, ", ".join(steps)) for kind, steps in (("THEN", then), ("LATER", later)) if steps]
    if not said:
        return []
    return [(said[0][0], ["     ".join([said[0][1], *(f"{kind}  {text}" for kind, text in said[1:])])])]


def _flat(text: str) -> str:
    """A reason may be an exception's, which have several lines; leading spaces stay."""
    return " ".join(text.splitlines())


def verdict(seen: Measurement, titles: Sequence[str], name: str = "") -> str:
    """The first line: what holds the loop up, of which run, measured over which steps, and what to hold against it."""
    told = [f"fastloop {verdict_title(titles)}", setting(seen, name), devices(seen), window(seen), *flags(seen)]
    return "   ".join(filter(None, told))


def verdict_title(titles: Sequence[str]) -> str:
    return titles[0] if titles else "NOT MEASURED"


def setting(seen: Measurement, name: str = "") -> str:
    """Name, micro-batch x accumulation, precision: what of them is known."""
    batch = "" if seen.micro_batch is None else f"{seen.micro_batch}"
    if batch and seen.global_batch and seen.global_batch % (seen.micro_batch or 1) == 0:
        times = seen.global_batch // (seen.micro_batch or 1) // max(1, seen.world_size)
        batch += f" x {times}" if times > 1 else ""
    return " ".join(filter(None, (name, batch, seen.precision)))


def devices(seen: Measurement) -> str:
    named = (seen.device_name or seen.device).removeprefix("NVIDIA ")
    return f"{seen.world_size}x {named}"


def window(seen: Measurement) -> str:
    if seen.total_steps is None:
        return "steps n/a: nothing watched them"
    first = seen.total_steps - seen.steps if seen.first_step is None else seen.first_step  # older files lack it
    last = first + seen.steps
    return f"steps {first}-{last}" if seen.steps else f"{steps(last)}, none of them measured"


def steps(count: int) -> str:
    return f"{count} step{'' if count == 1 else 's'}"


def flags(seen: Measurement) -> list[str]:
    """What to hold against the figures."""
    ends = [f"rank {rank.get('rank')}: {end}" for rank in seen.ranks if (end := ended_by(rank))]
    how = f" ({', '.join(ends)})" if ends else ""
    said = [f"PARTIAL: the fit did not end normally{how}"] if seen.partial or ends else []
    if seen.window_too_short and seen.steps:
        count = f": {steps(seen.steps)}" if seen.steps < 10 else " for its queues"
        said.append(f"window too short{count}")
    return said


def ended_by(rank: Mapping[str, Any]) -> str:
    """The exception that ended the fit of one rank; empty where it ended well."""
    return str(rank.get("ended_by") or ("an exception" if rank.get("partial") else ""))


def _whys(findings: Sequence[Finding], titles: Sequence[str]) -> list[str]:
    also = [f"also {title}: " for title in titles[1:2]]
    return [f"  {start}{finding.why}" for start, finding in zip(["", *also], findings[:2], strict=False)]


def known(parts: Mapping[str, float | None]) -> dict[str, float]:
    """The parts that were measured, in the order of a step."""
    found = {part: parts.get(part) for part in PARTS}
    return {part: float(ms) for part, ms in found.items() if ms is not None and math.isfinite(ms)}


def _bar(seen: Measurement) -> str:
    """The step as a bar of its parts; the part that nothing is known of is dotted."""
    mean = seen.step_ms.get("mean")
    said = f"step {short(mean, 'ms') if mean is not None and 0 < mean < 1 else number(mean, unit='ms')}"
    parts = {part: ms for part, ms in known(seen.parts_ms).items() if ms > 0}
    if mean is None or not math.isfinite(mean) or mean <= 0 or not parts:
        return said
    rest = max(0.0, mean - sum(parts.values()))
    sizes = {LEGEND[part][0]: ms for part, ms in parts.items()} | ({".": rest} if rest > 0.01 * mean else {})
    cells = _cells(list(sizes.values()))
    bar = "".join(letter * count for letter, count in zip(sizes, cells, strict=True))
    named = [f"{LEGEND[part]} {short(ms)}" for part, ms in parts.items() if ms >= 0.01 * mean]
    if "." in sizes:
        named.append(f"...not split {short(rest)}")
    elif (small := sum(ms for ms in parts.values() if ms < 0.01 * mean)) >= 0.001 * mean:
        named.append(f"others {short(small)}")
    return f"{said} |{bar}| {'  '.join(named)}"


def _cells(sizes: Sequence[float]) -> list[int]:
    """Cells of the bar for each size, by largest remainder, so that they fill it."""
    exact = [BAR_CELLS * size / sum(sizes) for size in sizes]
    cells = [int(share) for share in exact]
    by_rest = sorted(range(len(sizes)), key=lambda index: cells[index] - exact[index])
    for index in by_rest[: BAR_CELLS - sum(cells)]:
        cells[index] += 1
    return cells


def fed_pct(seen: Measurement) -> float | None:
    """Share of the step in which the device was not waiting for data; None on the CPU, which makes its own data."""
    mean, wait = seen.step_ms.get("mean"), seen.parts_ms.get("data_wait")
    if seen.device == "cpu" or not mean or wait is None:
        return None
    return max(0.0, 100 * (1 - wait / mean))


def _rates(seen: Measurement) -> str:
    said = [f"{short(seen.samples_per_s)} samples/s"]
    if seen.tokens_per_s is not None:
        said.append(f"{short(seen.tokens_per_s)} tokens/s")
    if seen.lead_ms is not None:
        said.append(f"lead {number(seen.lead_ms, unit='ms')}")
    busy = seen.gpu.get("nvml_busy_pct")
    nvml = "" if busy is None else f"NVML busy {short(busy)} %"
    if (fed := fed_pct(seen)) is not None:
        said.append(f"GPU fed {fed:.0f} %{f' ({nvml})' if nvml else ''}")
    elif nvml:
        said.append(nvml)
    if seen.joule_per_sample is not None:
        said.append(f"{short(seen.joule_per_sample)} J/sample")
    said.append(f"watching cost {number(seen.watch_us_per_step, unit='us a step')}")
    return "   ".join(said)


def flop_rate(value: float | None) -> str:
    """Arithmetic per second, from TFLOP/s, in the unit that suits its size."""
    small = value is not None and value < 1
    return short(1000 * (value or 0.0), "GFLOP/s") if small else short(value, "TFLOP/s")


def work(seen: Measurement) -> str:
    """Arithmetic against the peaks; empty where no work was counted."""
    if seen.tflop_per_s is None:
        return ""
    least = ">= " if seen.flops.get("at_least") else ""
    dtype = seen.peaks.get("dtype") or "the dtype in use"
    shares = [(seen.mfu.get("dtype_in_use"), f"of {dtype}"), (seen.mfu.get("datasheet"), "of bf16")]
    if dtype == "bf16":
        shares = shares[:1]
    said = [f"{short(100 * share)} % {of}" for share, of in shares if share is not None]
    equal = "" if not said else ": at least " if least else " = "
    text = f"{least}{flop_rate(seen.tflop_per_s)}{equal}{' and '.join(said)}"
    active = seen.gpu.get("tensor_active_pct")
    return text if active is None else f"{text}   tensor cores {short(active)} % active"


def ceiling(finding: Finding, seen: Measurement) -> str | None:
    """Samples per second with this bottleneck gone: a bound, flagged as measured or estimated; None where unknown."""
    pct = finding.ceiling_gain_pct
    if pct is None or not math.isfinite(pct) or seen.samples_per_s is None:
        return None
    rate = short(seen.samples_per_s * (1 + pct / 100))
    if finding.ceiling_is_estimate:
        return f"at most {rate} samples/s (an estimate)"
    return f"at most {rate} samples/s ({1 + pct / 100:.{1 if pct >= 100 else 2}f}x, measured)"


def ceiling_line(seen: Measurement, findings: Sequence[Finding]) -> str:
    """The first finding's ceiling and what feeds the loop now; empty where there is none."""
    bound = ceiling(findings[0], seen) if findings else None
    if bound is None:
        return ""
    free = FREE.get(findings[0].bottleneck, "this were gone")
    if findings[0].bottleneck == "launch_bound" and seen.device == "cpu":
        free = "the loop itself were free"  # nothing is launched
    line = f"if {free}: {bound}"
    loader = seen.evidence.get("loader") or {}
    workers, cpus = loader.get("num_workers"), loader.get("usable_cpus")
    if findings[0].bottleneck == "data_wait" and workers is not None and cpus is not None:
        line += f"   now: {workers} worker{'' if workers == 1 else 's'}, {cpus} CPUs usable"
    return line

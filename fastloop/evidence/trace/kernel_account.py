"""What the device did in the traced steps, and what the host did while the device was idle.

The window runs from the device's first step boundary to its last. The device reaches a host mark when it has done the
work launched before it, so a boundary lies at ``max(host, end of that work)``: the time of a CUDA event recorded there.
Work of earlier steps that is still running then does not count, and host work ahead of the device costs nothing.

A gap is attributed to what the host was doing until it launched the work that ended the gap, and from then on to what
it was doing at that moment. If that work was launched long before the gap began, the host is not the cause: the device
was between two kernels in its queue.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from fastloop.errors import FastLoopError
from fastloop.evidence.trace import families
from fastloop.evidence.trace.chrome import ChromeTrace, DeviceSpan, Source, load
from fastloop.evidence.trace.host_ranges import list_own_time
from fastloop.evidence.trace.intervals import Cover, Span, intersect, merge_spans, subtract, sum_lengths
from fastloop.evidence.trace.phases import Phases, Reached, list_phases
from fastloop.records.measurement import FAMILIES

IDLE = ("data", "launch", "sync", "other")
LAUNCHING = ("forward", "backward", "optimizer")
RESTART_US = 200.0
"""After a wait for the device the host needs a moment to launch again: up to this long counts as the wait."""
LATENCY_US = 20.0
"""A launch reaches an idle device within this time; work launched earlier was queued."""
TOP = 10
NEAR, OF_BLOCK, FEWEST = 12, 0.1, 3
"""Attention written by hand is a softmax between two matrix products, each at most this many kernels away; the softmax
takes at least this share of their total time, and occurs at least this often per step: otherwise it is a loss or a
gate."""
_LONGEST_NAME = 160


def read(source: Source, steps: int | None = None) -> dict[str, Any]:
    """The account of a trace, for ``Measurement.kernels``.

    Args:
        source: a Chrome trace of torch.profiler's, parsed or as a path; steps marked by ``ProfilerStep#<n>``, phases by
            ``fastloop/<phase>``.
        steps: use this many steps, from the first one on; None: all.

    Returns:
        Per step, in milliseconds: ``step_ms``, ``busy_ms`` (any work on the device), ``families_ms`` (unions over the
        streams), ``idle_ms`` {data, launch, sync, other} (adds up with ``busy_ms`` to ``step_ms``),
        ``nccl_overlapped_ms``, ``comm_exposed_ms``, ``comm_tail_ms``; ``attention_by_hand_ms``, for a softmax and the
        products on both sides of it, a lower bound; the number of ``launches``; ``top``, the ten names with the most
        time [{name, ms, count}]; and ``steps``. Without device work the families are the operators' self time on the
        CPU, ``busy_ms`` is their union, and the rest is None.

    Raises:
        FastLoopError: the trace has no step marks.
        ValueError: the file is truncated, or is not a trace.
    """
    trace = load(source)
    marks = list_marks(trace, steps)
    phases = list_phases(trace, trace.steps[0].thread)
    if not trace.work:
        return _on_cpu(trace, phases, marks)
    return _on_device(trace, phases, marks)


def list_marks(trace: ChromeTrace, steps: int | None) -> list[float]:
    """The host's step boundaries: the begin of every step and the end of the last one."""
    found = trace.steps[:steps]
    if not found:
        raise FastLoopError(
            got="a trace without a whole step",
            why="its steps are not marked, or the training ended too early",
            do="record it with fastloop diagnose CONF --trace 5, or call step() of torch.profiler after each step",
        )
    return [*(step.begin for step in found), found[-1].end]


def _on_device(trace: ChromeTrace, phases: Phases, marks: Sequence[float]) -> dict[str, Any]:
    reached, steps = Reached(trace), len(marks) - 1
    window = [(reached(marks[0]), reached(marks[-1]))]
    kinds = [_find_family(work, phases) for work in trace.work]
    spans = _group_by_family(trace.work, kinds)
    busy = intersect(merge_spans((work.begin, work.end) for work in trace.work), window)
    nccl = intersect(spans.get("nccl", []), window)
    compute = merge_spans(
        (work.begin, work.end) for work, kind in zip(trace.work, kinds, strict=True) if kind != "nccl" and not work.copy
    )
    overlapped, per_step = sum_lengths(intersect(nccl, compute)), 1e3 * steps
    # Families count the work launched in these steps: copies on a side stream run ahead of them.
    inside = [work for work in trace.work if _is_inside(work, marks, window[0])]
    spans = _group_by_family(inside, [_find_family(work, phases) for work in inside])
    spent = [(work.name, work.end - work.begin) for work in inside]
    return {
        "steps": steps,
        "step_ms": sum_lengths(window) / per_step,
        "busy_ms": sum_lengths(busy) / per_step,
        "families_ms": {name: sum_lengths(spans.get(name, [])) / per_step for name in FAMILIES},
        "idle_ms": {name: us / per_step for name, us in _split_idle(trace, phases, subtract(window, busy)).items()},
        "nccl_overlapped_ms": overlapped / per_step,
        "comm_exposed_ms": (sum_lengths(nccl) - overlapped) / per_step,
        "comm_tail_ms": _measure_tail_ms(trace.work, kinds, phases, marks),
        "attention_by_hand_ms": _find_attention_by_hand(inside, steps) / per_step,
        "launches": _count_launches(trace, marks) / steps,
        "top": _list_top(spent, Counter(work.name for work in inside), steps),
    }


def _is_inside(work: DeviceSpan, marks: Sequence[float], window: Span) -> bool:
    if work.launched is None:
        return window[0] <= work.begin < window[1]
    return marks[0] <= work.launched < marks[-1]


def _on_cpu(trace: ChromeTrace, phases: Phases, marks: Sequence[float]) -> dict[str, Any]:
    """The account without device work: operators' self time, outside the time in which the loop waits for data."""
    steps, window = len(marks) - 1, [(marks[0], marks[-1])]
    window = subtract(window, merge_spans(phases.spans("data_wait")))
    spans, names = defaultdict[str, list[Span]](list), list[tuple[str, float]]()
    for name, begin, end in list_own_time(trace.operators):
        if cut := intersect([(begin, end)], window):
            family = families.classify_operator(name)
            in_optimizer = family in ("elementwise", "other") and phases.at(begin) == "optimizer"
            spans["optimizer" if in_optimizer else family] += cut
            names.append((name, sum_lengths(cut)))
    if not names:
        raise FastLoopError(
            got="traced steps without any work",
            why="neither device nor CPU ran an operator there",
            do="trace a training that runs operators",
        )
    counts = Counter(row.name for row in trace.operators if marks[0] <= row.begin < marks[-1])
    per_step, unknown = 1e3 * steps, dict.fromkeys(("nccl_overlapped_ms", "comm_exposed_ms", "comm_tail_ms"))
    return {
        "steps": steps,
        "step_ms": (marks[-1] - marks[0]) / per_step,
        "busy_ms": sum_lengths(merge_spans(span for found in spans.values() for span in found)) / per_step,
        "families_ms": {name: sum_lengths(merge_spans(spans.get(name, []))) / per_step for name in FAMILIES},
        "idle_ms": dict.fromkeys(IDLE),
        **unknown,
        "attention_by_hand_ms": None,
        "launches": None,
        "top": _list_top(names, counts, steps),
    }


def _find_family(work: DeviceSpan, phases: Phases) -> str:
    family = families.classify_kernel(work.name)
    if family in ("elementwise", "other") and work.launched is not None and phases.at(work.launched) == "optimizer":
        return "optimizer"
    return family


def _group_by_family(rows: Sequence[DeviceSpan], kinds: Sequence[str]) -> dict[str, list[Span]]:
    spans = defaultdict[str, list[Span]](list)
    for work, kind in zip(rows, kinds, strict=True):
        spans[kind].append((work.begin, work.end))
    return {kind: merge_spans(found) for kind, found in spans.items()}


def _split_idle(trace: ChromeTrace, phases: Phases, gaps: Sequence[Span]) -> dict[str, float]:
    """Microseconds of the gaps, by what the host was doing."""
    causes = _find_causes(trace, phases)
    begins = [work.begin for work in trace.work]
    found = dict.fromkeys(IDLE, 0.0)
    for begin, end in gaps:
        place = bisect_left(begins, end)
        launched = trace.work[place].launched if place < len(begins) and begins[place] == end else None
        if launched is not None and launched <= begin - LATENCY_US:
            found["other"] += end - begin
            continue
        called = end if launched is None else min(max(launched, begin), end)
        split = {name: cover.within(begin, called) for name, cover in causes.items()}
        for name, us in split.items():
            found[name] += us
        found["other"] += max(0.0, called - begin - sum(split.values()))
        if launched is not None:
            found[next((name for name, cover in causes.items() if cover.holds(launched)), "other")] += end - called
    return found


def _find_causes(trace: ChromeTrace, phases: Phases) -> dict[str, Cover]:
    """When the host was waiting for data, waiting for the device, or launching: disjoint."""
    data = merge_spans(phases.spans("data_wait"))
    sync = subtract(_waits(trace, phases), data)
    launch = subtract(
        merge_spans(span for name in LAUNCHING for span in phases.spans(name)), merge_spans([*data, *sync])
    )
    return {"data": Cover(data), "sync": Cover(sync), "launch": Cover(launch)}


def _waits(trace: ChromeTrace, phases: Phases) -> list[Span]:
    """The host's waits for the device, each with the restart after it."""
    found = []
    for call in trace.syncs:
        if call.thread != phases.thread and phases.at(call.begin) != "backward":
            continue  # the thread of a loader or watchdog, which no step waits for
        place = bisect_right(trace.launches, call.end)
        again = trace.launches[place] if place < len(trace.launches) else call.end
        found.append((call.begin, max(call.end, min(again, call.end + RESTART_US, phases.end_at(call.end)))))
    return merge_spans(found)


def _count_launches(trace: ChromeTrace, marks: Sequence[float]) -> int:
    known = bisect_left(trace.launches, marks[-1]) - bisect_left(trace.launches, marks[0])
    return known or sum(marks[0] <= work.begin < marks[-1] for work in trace.work)


def _find_attention_by_hand(rows: Sequence[DeviceSpan], steps: int) -> float:
    """Microseconds of kernels from the product before a softmax to the one after it. A backward has two more products
    outside this range, so this is a lower bound."""
    streams, spent, found = defaultdict[Any, list[DeviceSpan]](list), 0.0, 0
    for work in sorted(rows, key=lambda each: each.begin):
        streams[work.stream].append(work)
    for queue in streams.values():
        kinds = [families.classify_kernel(work.name) for work in queue]
        owned = set[int]()
        for at, work in enumerate(queue):
            if not families.is_softmax(work.name):
                continue
            first = next((n for n in range(at - 1, max(-1, at - NEAR - 1), -1) if kinds[n] == "gemm"), None)
            last = next((n for n in range(at + 1, min(len(queue), at + NEAR + 1)) if kinds[n] == "gemm"), None)
            if first is None or last is None:
                continue
            took = sum(each.end - each.begin for each in queue[first : last + 1])
            if work.end - work.begin >= OF_BLOCK * took:
                owned.update(range(first, last + 1))
                found += 1
        spent += sum(queue[n].end - queue[n].begin for n in owned)
    return spent if found >= FEWEST * steps else 0.0


def _measure_tail_ms(
    rows: Sequence[DeviceSpan], kinds: Sequence[str], phases: Phases, marks: Sequence[float]
) -> float | None:
    """Time from the end of the last backward kernel to the end of the last communication launched by the backward."""
    ends = defaultdict[tuple[int, bool], float](float)
    for work, kind in zip(rows, kinds, strict=True):
        if work.launched is None or work.copy or phases.at(work.launched) != "backward":
            continue
        key = (bisect_right(marks, work.launched), kind == "nccl")
        ends[key] = max(ends[key], work.end)
    tails = [
        max(0.0, ends[step, True] - ends[step, False])
        for step in range(1, len(marks))
        if (step, True) in ends and (step, False) in ends
    ]
    return sum(tails) / len(tails) / 1e3 if tails else None


def _list_top(rows: Sequence[tuple[str, float]], counts: Mapping[str, int], steps: int) -> list[dict[str, Any]]:
    spent = defaultdict[str, float](float)
    for name, us in rows:
        spent[name] += us
    first = sorted(spent, key=lambda name: (-spent[name], name))[:TOP]
    return [
        {
            "name": name if len(name) <= _LONGEST_NAME else name[: _LONGEST_NAME - 3] + "...",
            "ms": spent[name] / 1e3 / steps,
            "count": counts[name] / steps,
        }
        for name in first
    ]

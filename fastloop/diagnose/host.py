"""Findings about the host's work while the device could run: launches, waits, callbacks, the loop itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from fastloop.diagnose.attribution import COMPUTE, WORTH_NAMING_PCT, Attribution, Inside
from fastloop.diagnose.finding import ORDINARY_MS, weigh
from fastloop.diagnose.remedies import NO_RUNG, Remedy, Rungs
from fastloop.records.plan import Finding
from fastloop.records.readings import (
    ANOMALY_MODE,
    CPU_WORTH_PCT,
    LINES,
    convolves,
    count_micro_batches,
    is_crowded,
    name_hot_line,
    read_activity,
    read_requested_garbage,
    to_number,
)

TINY_STEP_MS = 5.0
"""Below this, a CPU step is short compared with the overhead of any training loop."""
TINY_PCT = 15.0
"""Smallest share of a tiny CPU step for naming the loop's overhead: 0.3 ms of a 2 ms step."""
HOOKS_AROUND_TRANSFER = ("on_before_batch_transfer", "on_after_batch_transfer")
SCHEDULER = ("lr_scheduler_step",)
CALLED = {"loggers": "log_metrics"}
"""What Lightning calls for an entry of ``hooks_ms`` that is no hook."""
TRAINING_STEP = "training_step"
WORK = (TRAINING_STEP, "backward", "optimizer_step")
"""What Lightning calls for the forward, the backward and the optimizer."""
ASIDE = 2 / 3
"""Work without gradients is named from this share of the forward: less may come from layers without weights or with a
cheap backward."""
ASIDE_OF_CONVOLUTIONS = 0.9
"""The same for a model with convolutions: a first convolution and its pooling take 5 times as long forward as
backward."""
CROWDED_ASIDE_MS = 10.0
"""By how much a forward on busy CPUs may exceed its backward without any such work: its Python waits for a CPU, too."""
BARS = ("self.log(prog_bar=True)", "progress bar")
"""Labels of synchronizations in which Lightning reads values for progress bars."""
MOST_LOOP_MS = 2.0
"""More time than this between a batch's hooks is not just Lightning's own loop."""
WORTH_SAYING = 0.1
"""Smallest share of ``host_other`` that is listed separately."""
LOG_LESS = "run them every N steps (log_every_n_steps, a callback's own interval)"
SYNC_LESS = (
    "with sync_dist=True each self.log waits for all ranks: on_step=False, on_epoch=True reduces once an epoch; or drop"
    " sync_dist in training"
)
MOVE_HOOK = (
    "most of it is your batch transfer hook: move that work into the dataset or collate function, where workers do it"
    " ahead of time, or onto the GPU"
)
SCHEDULE_LESS = (
    "most of it is the step of your learning rate scheduler: make it cheaper, or let it step each epoch"
    ' ("interval": "epoch" in configure_optimizers) or every N steps ("frequency"), which changes its schedule'
)
LEAVE_CPUS = Remedy(
    None,
    "the CPUs were oversubscribed, which makes such work take several times as long: use fewer threads and workers, end"
    " other processes, and measure again",
)
COLLECT_LESS = (
    "call gc.freeze() once model and data exist to keep them out of later passes, or make passes rarer with"
    " gc.set_threshold; a single pass weighs less in a longer run"
)


def find_sync(step: Attribution, rungs: Rungs) -> Finding | None:
    """Find waits of the host for the device, which then had nothing queued.

    On the CPU these cost nothing; the lines are named because they would cost time on a GPU.
    """
    inside, lines = step.inside, _describe_lines(step)
    instead = step.sync_lines[0].get("instead") if step.sync_lines else None
    if not step.on_gpu:
        if not lines:
            return None
        why = f"costs nothing on the CPU, but with a GPU the host would wait at {lines[0]}; no rung helps with this: "
        return Finding(
            bottleneck="sync",
            share_pct=None,
            why=f"{why}{instead or 'read values only every N steps'}",
            detail=tuple(lines),
            title="HIDDEN SYNCS (NO COST ON CPU)",
        )
    if inside is None or not inside.sync:
        return None
    if (cost := weigh(step, "sync", inside.sync, bound=inside.source == "bound")) is None:
        return None
    most, source = _describe_source(step, inside)
    facts = f"the GPU was idle for {most}{cost.time} after the host had waited for it ({source})"
    advice = (
        f"write instead: {instead}"
        if instead
        else "read values from the device only every N steps; fastloop diagnose --syncs names the lines"
    )
    remedy = _choose(step, rungs, "bar_sync" if _are_for_bars(step) else None, advice)
    return cost.explain(
        facts, Remedy(remedy.patch, f"{f'at {lines[0]}; ' if lines else ''}{remedy.says}"), detail=lines
    )


def _choose(step: Attribution, rungs: Rungs, cause: str | None, advice: str) -> Remedy:
    """Choose a rung against the cause, if there is one; else advise."""
    return Remedy(None, f"{NO_RUNG}: {advice}") if cause is None else rungs.choose(step.measured, cause, advice)


def _are_for_bars(step: Attribution) -> bool:
    """Whether most of the synchronizations are reads for progress bars."""
    timed = any(to_number(line.get("ms_per_step")) for line in step.sync_lines)
    costs = [(line, to_number(line.get("ms_per_step" if timed else "per_step")) or 0.0) for line in step.sync_lines]
    return 2 * sum(cost for line, cost in costs if str(line.get("what")).startswith(BARS)) > sum(c for _, c in costs)


def _describe_lines(step: Attribution) -> list[str]:
    """Describe the lines that synchronize: where, what, how often, how long."""
    texts = []
    for line in step.sync_lines[:3]:
        often, ms = to_number(line.get("per_step")), to_number(line.get("ms_per_step"))
        texts.append(
            f"{line.get('where') or 'an unknown line'} {line.get('what') or ''}".rstrip()
            + ("" if often is None else f", {often:g} a step")
            + ("" if ms is None else f", {ms:.2f} ms a step")
        )
    return texts


def find_launch_bound(step: Attribution, rungs: Rungs) -> Finding | None:
    """Find a device that waits for kernel launches; on the CPU, a step too short for the loop around it."""
    seen, inside = step.measured, step.inside
    if not step.on_gpu:
        return _find_tiny_step(step, rungs)
    if inside is None or not inside.launch:
        return None
    if (cost := weigh(step, "launch_bound", inside.launch, bound=inside.source == "bound")) is None:
        return None
    most, source = _describe_source(step, inside)
    left = seen.lead_ms if seen.trail_ms is None else seen.trail_ms
    queue = "" if left is None else f", {left:.2f} ms of work still queued when the host had launched everything"
    facts = f"the GPU waited for launches for {most}{cost.time} ({source}{queue})"
    if step.sync_lines:  # after each of them the host begins with an empty queue, whatever it does then
        facts += ", or for other work of the host after it had waited for the GPU"
    instead = "more work per launch: a larger batch (which changes the training), larger kernels"
    is_named = inside.sync and weigh(step, "sync", inside.sync) is not None
    waits = [] if is_named else [f"the host also waits for the GPU at {line}" for line in _describe_lines(step)]
    return cost.explain(facts, rungs.choose(seen, "launch_bound", instead), detail=waits)


def _find_tiny_step(step: Attribution, rungs: Rungs) -> Finding | None:
    loop = step.parts_ms.get("host_other")
    if loop is None or step.step_ms >= TINY_STEP_MS:
        return None
    loop = max(0.0, loop - step.garbage_ms - step.compile_ms)
    paid = [step.parts_ms.get(part, 0.0) for part in ("data_wait", "h2d", "callbacks_logging")]
    loop += sum(ms for ms in paid if ms < ORDINARY_MS)
    if (cost := weigh(step, "launch_bound", loop, worth_pct=TINY_PCT)) is None:
        return None
    facts = f"the step is too short for the training loop around it, which takes {cost.time}"
    remedy = rungs.choose(step.measured, "tiny_step", "more work per step: a larger batch (which changes the training)")
    return cost.explain(facts, remedy, title="LOOP OVERHEAD: STEP TOO SHORT")


def _describe_source(step: Attribution, inside: Inside) -> tuple[str, str]:
    """Return the text before an idle time of the GPU, and the text for its source."""
    if inside.source == "bound":
        return "at most ", "an upper bound: no GPU counters were read"
    if inside.source == "trace":
        return "", "traced"
    ran = f"a kernel ran {read_activity(step.measured)[0] or 0:.0f} % of the time"
    return "", f"{ran}, per NVML" if inside.source == "nvml" else ran


def find_callbacks_logging(step: Attribution, rungs: Rungs) -> Finding | None:
    """Find slow hooks of callbacks and of the module, including logging."""
    spent, worth = step.parts_ms.get("callbacks_logging", 0.0), WORTH_NAMING_PCT if step.on_gpu else CPU_WORTH_PCT
    cost = weigh(step, "callbacks_logging", spent, worth_pct=worth, least_ms=ORDINARY_MS)
    if cost is None:
        return None
    hooks = {name: min(to_number(ms) or 0.0, spent) for name, ms in step.measured.hooks_ms.items()}
    facts = f"hooks and logging blocked the {step.device} for {cost.time}{_describe_slowest(step, hooks)}"
    if _is_mostly(hooks, HOOKS_AROUND_TRANSFER):
        return cost.explain(facts, _choose(step, rungs, None, MOVE_HOOK), title="HELD UP BY A TRANSFER HOOK")
    if _is_mostly(hooks, SCHEDULER):
        return cost.explain(facts, _choose(step, rungs, None, SCHEDULE_LESS), title="HELD UP BY LR SCHEDULER")
    advice = _advise_no_garbage(step, spent) or LOG_LESS
    if not _is_mostly(hooks, ("self.log",)):
        return cost.explain(facts, _choose(step, rungs, None, advice))
    is_short, has_ranks = _may_be_loop(step, spent), step.measured.world_size > 1
    if is_crowded(step.measured) and not is_short and not has_ranks:
        return cost.explain(facts, LEAVE_CPUS)
    cause = "log_calls" if is_short else None
    return cost.explain(facts, _choose(step, rungs, cause, SYNC_LESS if has_ranks else advice))


def _describe_slowest(step: Attribution, hooks: Mapping[str, float]) -> str:
    """Describe the three slowest hooks, the first one with its slowest line; empty if none took any time."""
    slow = sorted(((ms, name) for name, ms in hooks.items() if ms), reverse=True)[:3]
    if not slow:
        return ""
    texts = [f"{name} {ms:.2f} ms" for ms, name in slow]
    ms, name = slow[0]
    hook = name.rpartition(".")[2]
    texts[0] += _describe_line(step, ms, CALLED.get(hook, hook))
    return f" (slowest: {'; '.join(texts)})"


def _may_be_loop(step: Attribution, ms: float) -> bool:
    """Whether Lightning's own loop and logging may take this long, for all batches of an optimizer step."""
    return ms <= MOST_LOOP_MS * count_micro_batches(step.measured)


def _is_mostly(hooks: dict[str, float], names: tuple[str, ...]) -> bool:
    """Whether hooks with these names take most of the hooks' time."""
    return 2 * sum(ms for name, ms in hooks.items() if name.endswith(names)) > sum(hooks.values())


def find_host_other(step: Attribution, rungs: Rungs) -> Finding | None:
    """Find a host that slept, read or waited inside the step, garbage collection, or loop overhead between hooks."""
    garbage, loop = step.garbage_ms, max(0.0, step.parts_ms.get("host_other", 0.0) - step.compile_ms)
    off, aside = (step.inside.blocked if step.inside else None) or 0.0, 0.0
    if step.measured.world_size > 1:
        loop = garbage  # the rest is Lightning's check of all ranks after every batch: a wait for the slowest
    if not step.on_gpu:
        loop = loop if step.step_ms >= TINY_STEP_MS else garbage  # the rest of a tiny step is loop overhead
        off, loop, aside = (
            ms if 100 * ms >= CPU_WORTH_PCT * step.step_ms else 0.0 for ms in (off, loop, _find_aside(step))
        )
    if (cost := weigh(step, "host_other", off + loop + aside)) is None:
        return None
    garbage = min(garbage, loop)
    own = loop - garbage
    asleep = _Part(
        off,
        f"in forward, backward and optimizer the host slept or waited for {step.format_ms(off)}"
        f"{_describe_phase(step)}{_describe_line(step, off, *WORK) if off >= aside else ''}",
        "move what sleeps, reads or waits out of the step",
    )
    collecting = _Part(
        garbage,
        f"garbage collection took {step.format_ms(garbage)}{_describe_passes(step)}",
        COLLECT_LESS,
        "garbage",
    )
    looping = _Part(
        own,
        f"the loop's own work between its hooks took {step.format_ms(own)}",
        "py-spy or a profiler shows what Python does there",
        "loop" if _may_be_loop(step, own) else None,
    )
    besides = _Part(
        aside,
        f"training_step takes {step.format_ms(step.parts_ms.get('forward', 0.0))}, its backward only"
        f" {step.parts_ms.get('backward', 0.0):.1f}: about {aside:.1f} ms of it is work without gradients"
        f"{_describe_line(step, aside, TRAINING_STEP) if aside > off else ''}",
        _advise_no_garbage(step, aside)
        or "log and compute metrics only every N steps, and prepare data in the dataset; cache the outputs of frozen"
        f" parts for repeated samples{_point_to_lines(step, aside)}",
    )
    parts = sorted((asleep, collecting, looping, besides), key=lambda part: -part.ms)
    most = parts[0]
    facts = "; ".join(part.facts for part in parts if part.ms >= WORTH_SAYING * (off + loop + aside))
    if most is looping and looping.cause is None and is_crowded(step.measured):
        return cost.explain(facts, LEAVE_CPUS)
    title = "WORK WITHOUT GRADIENTS" if most is besides else ""
    return cost.explain(facts, _choose(step, rungs, most.cause, most.advice), title=title)


class _Part(NamedTuple):
    """A part of ``host_other``, and the cause that a rung may help against."""

    ms: float
    facts: str
    advice: str
    cause: str | None = None


def _find_aside(step: Attribution) -> float:
    """Return by how much the forward exceeds the backward, not counting sleep, if that is most of the forward;
    otherwise 0. A backward takes at least as long as the work it belongs to, so the excess is work without
    gradients."""
    forward, backward = step.parts_ms.get("forward", 0.0), step.parts_ms.get("backward", 0.0)
    more, seen = _measure_excess_ms(step), step.measured
    if (seen.evidence.get("model") or {}).get("calls_backward") or ANOMALY_MODE in seen.evidence:
        return 0.0  # training_step includes a backward, or the stack traces of anomaly mode
    least_ms = (ASIDE_OF_CONVOLUTIONS if convolves(seen) else ASIDE) * forward
    if is_crowded(seen):
        least_ms = max(least_ms, CROWDED_ASIDE_MS)
    return more if backward and more >= least_ms else 0.0


def _measure_excess_ms(step: Attribution) -> float:
    """Return by how much the forward exceeds the backward, not counting sleep."""
    asleep = (step.inside.blocked if step.inside else None) or 0.0
    return step.parts_ms.get("forward", 0.0) - step.parts_ms.get("backward", 0.0) - asleep


def _advise_no_garbage(step: Attribution, of_ms: float) -> str | None:
    """Advise against the user's own garbage collection if it takes at least half of this time."""
    line, ms = read_requested_garbage(step.measured)
    return f"most of it is {line}: call it once an epoch, or not at all" if 2 * ms >= of_ms > 0 else None


def find_anomaly_mode(step: Attribution) -> Finding | None:
    """Find the autograd engine's anomaly mode, which is named even if its cost is unknown.

    On the CPU the forward's time beyond the backward is a lower bound: the traces are taken in the forward, and without
    them the backward takes longer.
    """
    if ANOMALY_MODE not in step.measured.evidence:
        return None
    least = _measure_excess_ms(step)
    known = not step.on_gpu and step.to_pct(least) >= WORTH_NAMING_PCT
    return Finding(
        bottleneck="host_other",
        share_pct=step.to_pct(least) if known else None,
        why="anomaly mode is on: it stores a stack trace for each operation and searches each gradient for NaN"
        f"{f', at least {step.format_ms(least)}' if known else ''}; {NO_RUNG}: outside of debugging, switch it off"
        " (Trainer(detect_anomaly=False), torch.autograd.set_detect_anomaly(False)) and measure again",
        title="SLOWED BY ANOMALY MODE",
        alarm=f"at least {step.to_pct(least):.0f} % of the step" if known else "",
    )


def _describe_line(step: Attribution, cost_ms: float, *of: str) -> str:
    """Describe the user's line that takes most of a cost; empty if unknown."""
    line = name_hot_line(step.measured, step.to_pct(cost_ms), *of)
    return "" if line is None else f", most of it at {line}"


def _point_to_lines(step: Attribution, cost_ms: float) -> str:
    """Point to the report's table of lines if none of them takes most of a cost."""
    is_named = name_hot_line(step.measured, step.to_pct(cost_ms), TRAINING_STEP) is not None
    lines = (step.measured.evidence.get(LINES) or {}).get("lines", ())
    has_others = not is_named and any(line.get("of") == TRAINING_STEP for line in lines)
    return '; the table "Your slowest lines" in the report names candidates' if has_others else ""


def _describe_passes(step: Attribution) -> str:
    passes = to_number((step.measured.evidence.get("garbage_collection") or {}).get("passes"))
    return "" if passes is None else f" ({passes:.0f} pass{'es' if passes != 1 else ''} in {step.measured.steps} steps)"


def _describe_phase(step: Attribution) -> str:
    """Describe the phase that took the host longest; empty if unknown."""
    known = {phase: ms for phase in COMPUTE if (ms := to_number(step.measured.host_ms.get(phase))) is not None}
    if not known:
        return ""
    phase = max(known, key=known.__getitem__)
    return f" (the host spent {step.to_pct(known[phase]):.0f} % of the step in {phase})"

"""What the host does while the device could work: launches, waits, callbacks, the loop itself."""

from __future__ import annotations

from fastloop.diagnose.naming import ORDINARY_MS, device, named, per_step, share_pct
from fastloop.diagnose.reading import (
    CPU_WORTH_PCT,
    activity,
    garbage_ms,
    micro_batches,
    number,
    step_ms,
    syncing_lines,
)
from fastloop.diagnose.remedies import Remedy, choose
from fastloop.diagnose.split import COMPUTE, WORTH_NAMING_PCT, Inside, inside, part_ms
from fastloop.measurement import Measurement
from fastloop.records import Finding

TINY_STEP_MS = 5.0
"""Below this a CPU step is short against what any training loop costs."""
TINY_PCT = 15.0
"""Share of a tiny CPU step from which on the loop's own cost is named: a third of a millisecond of two."""
TRANSFER_HOOKS = ("on_before_batch_transfer", "on_after_batch_transfer")
SCHEDULER = ("lr_scheduler_step",)
WORTH_SAYING = 0.1
"""Of what is named ``host_other``: a smaller share of it is not told apart."""
COLLECT_LESS = ("gc.freeze() once model and data are made keeps them out of later passes, gc.set_threshold makes passes"
                " rarer; a single one weighs less in a longer training")  # fmt: skip


def sync(seen: Measurement, _enabled: tuple[str, ...]) -> Finding | None:
    """The host waited for the device, which then had nothing queued."""
    split, lines = inside(seen), syncing_lines(seen)
    what = _told(seen)
    if seen.device != "cuda":
        return _sync_without_times(seen) if lines else None
    if split is None or not split.sync:
        return None
    bound = split.source == "bound"
    facts = (f"the GPU was idle for {'at most ' if bound else ''}{per_step(seen, split.sync)} after the host had waited"
             f" for it ({_source(seen, split)})")  # fmt: skip
    instead = f"write instead: {lines[0]['instead']}" if lines and lines[0].get("instead") else \
        "read values from the device every so many steps only; fastloop diagnose --syncs names the lines"  # fmt: skip
    remedy = Remedy(None, f"{'at ' + what[0] + '; ' if what else ''}no rung helps: {instead}")
    return named(seen, "sync", split.sync, facts, remedy, bound=bound, detail=what)


def _sync_without_times(seen: Measurement) -> Finding:
    """On the CPU a synchronisation costs nothing; the lines are named for the day there is a GPU."""
    what, instead = _told(seen), syncing_lines(seen)[0].get("instead") or "read values every so many steps only"
    why = f"costs nothing on the CPU, but a GPU's host would wait at {what[0]}; no rung helps: {instead}"
    return Finding(bottleneck="sync", share_pct=None, why=why, detail=tuple(what))


def launch_bound(seen: Measurement, enabled: tuple[str, ...]) -> Finding | None:
    """The device waits for the next kernel to be launched; on the CPU, a step too small for the loop around it."""
    if seen.device != "cuda":
        return _tiny_step(seen, enabled)
    split = inside(seen)
    if split is None or not split.launch:
        return None
    bound = split.source == "bound"
    left = seen.lead_ms if seen.trail_ms is None else seen.trail_ms
    queue = "" if left is None else f", {left:.2f} ms of work left when the host had launched all of it"
    facts = (f"the GPU waited for launches for {'at most ' if bound else ''}{per_step(seen, split.launch)}"
             f" ({_source(seen, split)}{queue})")  # fmt: skip
    instead = "more work per launch: a larger batch (which changes the training), larger kernels"
    if "compile" in enabled and micro_batches(seen) == 1:
        instead = f"compile's mode reduce-overhead replays CUDA graphs instead of launching; else {instead}"
    return named(seen, "launch_bound", split.launch, facts,
                 choose(seen, enabled, ("batch", "compile", "fused"), instead), bound=bound)  # fmt: skip


def callbacks_logging(seen: Measurement, _enabled: tuple[str, ...]) -> Finding | None:
    """Hooks of callbacks and of the module, logging included."""
    spent = part_ms(seen, "callbacks_logging")
    slow = sorted(((number(ms) or 0.0, name) for name, ms in seen.hooks_ms.items()), reverse=True)[:3]
    culprits = ", ".join(f"{name} {ms:.2f} ms" for ms, name in slow if ms)
    facts = f"hooks and logging held the {device(seen)} up for {per_step(seen, spent)}" + (
        f" (slowest: {culprits})" if culprits else "")  # fmt: skip
    advice = "no rung helps: do this every so many steps only (log_every_n_steps, a callback's own interval)"
    if is_transfer(seen):
        advice = ("most of it is your batch transfer hook; no rung helps: move that work into the dataset or collate"
                  " function, where workers do it ahead of need, or onto the GPU")  # fmt: skip
    elif is_scheduler(seen):
        advice = ("most of it is the step of your learning rate scheduler; no rung helps: make it cheaper, or let it"
                  ' step each epoch ("interval": "epoch" in configure_optimizers) or every so many steps ("frequency"),'
                  " which changes its schedule")  # fmt: skip
    worth = WORTH_NAMING_PCT if seen.device == "cuda" else CPU_WORTH_PCT
    return named(seen, "callbacks_logging", spent, facts, Remedy(None, advice), worth_pct=worth, least_ms=ORDINARY_MS)


def is_transfer(seen: Measurement) -> bool:
    """Whether most of what hooks take is a batch transfer hook's of the user."""
    return _mostly(seen, TRANSFER_HOOKS)


def is_scheduler(seen: Measurement) -> bool:
    """Whether most of what hooks take is the step of a learning rate scheduler."""
    return _mostly(seen, SCHEDULER)


def _mostly(seen: Measurement, hooks: tuple[str, ...]) -> bool:
    spent = {name: number(ms) or 0.0 for name, ms in seen.hooks_ms.items()}
    return 2 * sum(ms for name, ms in spent.items() if name.endswith(hooks)) > sum(spent.values())


def host_other(seen: Measurement, _enabled: tuple[str, ...]) -> Finding | None:
    """A host that slept, read or waited inside the step, the garbage collector, and the loop between its hooks."""
    split, step, garbage = inside(seen), step_ms(seen), garbage_ms(seen)
    off, loop = (split.blocked if split else None) or 0.0, part_ms(seen, "host_other") or 0.0
    if step is None:
        return None
    if seen.world_size > 1:
        loop = garbage  # the rest is Lightning asking all ranks after every batch, and so a wait for the slowest
    if seen.device != "cuda":
        loop = loop if step >= TINY_STEP_MS else garbage  # the rest of a tiny step's is the loop's price
        off, loop = (ms if 100 * ms >= CPU_WORTH_PCT * step else 0.0 for ms in (off, loop))
    garbage = min(garbage, loop)
    costs = (
        (off, f"in forward, backward and optimizer the host was off the processor for {per_step(seen, off)}, asleep or"
              f" waiting{_where(seen)}", "move what sleeps, reads or waits out of the step"),
        (garbage, f"garbage collection took {per_step(seen, garbage)}{_passes(seen)}", COLLECT_LESS),
        (loop - garbage, f"the loop's own work between its hooks took {per_step(seen, loop - garbage)}",
         "py-spy or a profiler shows what Python does there"),
    )  # fmt: skip
    said = [words for ms, words, _ in costs if ms >= WORTH_SAYING * (off + loop)]
    return named(seen, "host_other", off + loop, "; ".join(said), Remedy(None, f"no rung helps: {max(costs)[2]}"))


def _passes(seen: Measurement) -> str:
    passes = number((seen.evidence.get("garbage_collection") or {}).get("passes"))
    return "" if passes is None else f" ({passes:.0f} pass{'es' if passes != 1 else ''} in {seen.steps} steps)"


def _tiny_step(seen: Measurement, enabled: tuple[str, ...]) -> Finding | None:
    step, loop = step_ms(seen), part_ms(seen, "host_other")
    if step is None or loop is None or step >= TINY_STEP_MS:
        return None
    loop = max(0.0, loop - garbage_ms(seen))
    paid = [part_ms(seen, part) or 0.0 for part in ("data_wait", "h2d", "callbacks_logging")]
    loop += sum(ms for ms in paid if ms < ORDINARY_MS)
    facts = f"the step is too small for its loop, whose own cost is {per_step(seen, loop)}"
    remedy = choose(seen, enabled, ("batch",), "more work per step: a larger batch (which changes the training)")
    return named(seen, "launch_bound", loop, facts, remedy, worth_pct=TINY_PCT)


def _told(seen: Measurement) -> list[str]:
    """The lines that synchronise, as text: where, what, how often, how long."""
    told = []
    for line in syncing_lines(seen)[:3]:
        often, ms = number(line.get("per_step")), number(line.get("ms_per_step"))
        told.append(f"{line.get('where') or 'an unknown line'} {line.get('what') or ''}".rstrip()
                    + ("" if often is None else f", {often:g} a step")
                    + ("" if ms is None else f", {ms:.2f} ms a step"))  # fmt: skip
    return told


def _source(seen: Measurement, split: Inside) -> str:
    ran = f"a kernel ran {activity(seen)[0] or 0:.0f} % of the time"
    return {"trace": "traced", "counters": ran, "nvml": f"{ran}, says NVML",
            "bound": "a bound: nothing was read from the GPU", None: "n/a"}[split.source]  # fmt: skip


def _where(seen: Measurement) -> str:
    """The phase that took the host longest, where that is known."""
    known = {phase: ms for phase in COMPUTE if (ms := number(seen.host_ms.get(phase))) is not None}
    if not known:
        return ""
    phase = max(known, key=known.__getitem__)
    share = share_pct(seen, known[phase])
    return f" (the host spent {share:.0f} % of the step in {phase})" if share is not None else ""

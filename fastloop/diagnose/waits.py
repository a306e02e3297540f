"""Findings about waits for something outside the step: batches, their copies to the device, other ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping

from fastloop.diagnose.attribution import WORTH_NAMING_PCT, Attribution
from fastloop.diagnose.finding import NO_GAIN_PCT, ORDINARY_MS, format_factor, weigh
from fastloop.diagnose.remedies import Remedy, Rungs
from fastloop.records.measurement import Measurement
from fastloop.records.plan import Finding
from fastloop.records.readings import (
    CPU_WORTH_PCT,
    FEW_WORKERS,
    LOADING,
    MORE_WORTH,
    compute_gain_pct,
    count_micro_batches,
    count_possible_workers,
    describe_decoding,
    find_hand_over_ms,
    is_worth_handing_over,
    name_hot_line,
    read_batch_ms,
    read_loader,
    to_number,
)

DECODING, MOSTLY_DECODING, PICKING = "decoding", "mostly_decoding", "picking"
"""Causes for rungs that decode less: the first if worker processes alone would not keep up, the second if in addition
decoding is most of the work for an image. The third is for rungs that pick the rows of a batch at once."""
SEVERAL_THREADS = 4
"""Busy threads of a worker that are not just its own, the one that sends its batches, and the one that hands over the
shared memory of their tensors (multiprocessing.resource_sharer)."""
CHEAPER = "make samples and batches cheaper"
MOSTLY = 2 / 3
"""Decoding is most of the work if it takes at least this share of the time for making a batch."""
SAYS = {"trials": "measured by trials with and without it", "trace": "traced", "marks": "timed"}


def find_data_wait(step: Attribution, rungs: Rungs) -> Finding | None:
    """Find waits for the next batch. If there was a trial with a replayed batch, it decides."""
    wait = step.parts_ms.get("data_wait")
    cost = weigh(step, "data_wait", wait, measured_pct=step.free_data_pct, least_ms=ORDINARY_MS)
    if cost is None:
        return None
    idle = f"the {step.device} was idle for {cost.time}: the next batch was not ready"
    cause, facts = "data_wait", list[str]()
    if (decoding := describe_decoding(step.measured)) is not None:
        feeds = [rung for rung in rungs.list_against(DECODING) if rungs.is_available(step.measured, rung)]
        if feeds and not _would_keep_up(step):
            cause = MOSTLY_DECODING if _is_mostly_decoding(step.measured) else DECODING
            feeds.sort(key=rungs.list_against(cause).index)
            decoding = f"{decoding}, which {' or '.join(feeds)} would shorten"
        facts.append(decoding)
    elif (rows := read_loader(step.measured).get("rows")) is not None:
        cause = PICKING
        facts.append(f"{rows} holds all rows in memory, but they are picked one at a time")
    if (line := name_hot_line(step.measured, step.to_pct(wait or 0.0), LOADING)) is not None:
        facts.append(f"most of it at {line}")
    idle += f" ({'; '.join(facts)})" if facts else ""
    instead = _advise_loading(
        step.measured, rungs.find_tuned_key("data_wait"), rungs.explain_refused(step.measured, cause)
    )
    remedy = rungs.choose(step.measured, cause, instead)
    if remedy.patch is None:
        more = rungs.choose(step.measured, FEW_WORKERS, instead)
        remedy = remedy if more.patch is None else more
    return cost.explain(idle, remedy)


def _would_keep_up(step: Attribution) -> bool:
    """Whether worker processes, if there are none yet, could make a batch in the time that training on it takes."""
    made_ms, most = read_batch_ms(step.measured), count_possible_workers(step.measured)
    if read_loader(step.measured).get("num_workers") != 0 or made_ms is None or not most:
        return False
    batches = count_micro_batches(step.measured)
    return made_ms / most <= step.step_ms / batches - made_ms


def _is_mostly_decoding(seen: Measurement) -> bool:
    """Whether the training process makes the batches, and spends most of that time on decoding."""
    made_ms, decode_ms = read_batch_ms(seen), to_number(read_loader(seen).get("decode_ms"))
    if read_loader(seen).get("num_workers") != 0 or made_ms is None or decode_ms is None or not seen.micro_batch:
        return False
    return decode_ms * seen.micro_batch >= MOSTLY * made_ms


def _advise_loading(seen: Measurement, number: str | None, refused: str | None) -> str:
    """Return advice about a loader that does not keep up.

    Args:
        number: the setting for the number of workers if a rung sets it, otherwise None.
        refused: why a rung cannot help, if one might.
    """
    found = read_loader(seen)
    count = found.get("num_workers")
    without: Mapping[str, str | None] = found.get("without_workers") or {}
    if found.get("has_engine"):
        # Loaders without workers are others of the same training.
        return _advise_each(without, is_tried=number is not None) if without else _advise_engine(seen)
    if count is None:
        return "this loader is not a DataLoader; prepare its batches ahead of time"
    if any(each.get("loss_ms") for each in seen.evidence.values()):
        return f"{CHEAPER}: taking batches from workers costs more than making them"
    if count:
        return _advise_more_workers(seen, count, number)
    if not found.get("map_style") and not without:
        return "an iterable dataset must be sharded in your code before it can have workers"
    if not is_worth_handing_over(seen):
        return (
            f"workers would save too little: a batch takes {read_batch_ms(seen):.2f} ms to make, and taking it from a"
            f" worker would cost up to {find_hand_over_ms(seen):g} ms; give the dataset a __getitems__ that makes a"
            " whole batch at once"
        )
    if without:
        return _advise_each(without, is_tried=number is not None)
    return CHEAPER if refused is None else f"{refused}; {CHEAPER}"


def _advise_engine(seen: Measurement) -> str:
    """Return advice about a rung that loads the batches in place of the loader."""
    found = read_loader(seen)
    used = max(to_number(each.get("threads")) or 0 for each in seen.evidence.values())
    cheaper = "make samples cheaper"
    has_all = used >= (found.get("usable_cpus") or math.inf)
    does = f"{cheaper}: all CPUs work on it" if has_all else f"give it more threads, or {cheaper}"
    return f"the rung that loads these batches does not keep up; {found.get('engine_advice') or does}"


def _advise_more_workers(seen: Measurement, count: int, number: str | None) -> str:
    """Return advice about a loader that has workers, but too few or too slow ones."""
    found, most = read_loader(seen), count_possible_workers(seen)
    cpus = found.get("usable_cpus")
    threads = found.get("worker_threads") or 0
    if threads >= SEVERAL_THREADS and count * threads > (cpus or math.inf):
        return (
            f"{'the worker computes' if count == 1 else f'each of {count} workers computes'} on {threads} threads,"
            f" {count * threads} on {cpus} CPUs: limit them in worker_init_fn, with threadpoolctl.threadpool_limits(1)"
            " for NumPy, cv2.setNumThreads(0) for OpenCV"
        )
    if most is not None and most >= MORE_WORTH * count:
        how = f"set num_workers={most} in your loader" if number is None else f"write {number}: {most}"
        return f"num_workers={count}, with {cpus} usable CPUs: {how}"
    slow = "1 worker is too slow" if count == 1 else f"{count} workers are too slow"
    if most is None:
        left = ""
    elif most > count:
        left = f" and only {most - count} CPU{'s are' if most - count > 1 else ' is'} left for more"
    else:
        left = f" and no CPU is left for another ({cpus} {'is' if cpus == 1 else 'are'} usable)"
    advice = "make samples cheaper; if loading waits for a disk or network, more workers can still help"
    return f"{slow}{left}; {advice}"


def _advise_each(without_workers: Mapping[str, str | None], *, is_tried: bool) -> str:
    """Return advice about those of several loaders that have no workers, each with why it cannot have any.

    Args:
        is_tried: a rung that starts workers is enabled, so it has its reason to leave them out of loaders that could
            have them.
    """
    can = "set its num_workers"
    whys = {each: why or (None if is_tried else can) for each, why in without_workers.items()}
    obstacles = [f"your loader {each} has no workers: {why}" for each, why in whys.items() if why is not None]
    return "; ".join([*obstacles, *([] if can in whys.values() else [CHEAPER])])


def find_h2d(step: Attribution, rungs: Rungs) -> Finding | None:
    """Find copies to the device that do not overlap with computation."""
    seen = step.measured
    if not step.on_gpu and not _moves_batches(step):
        return None  # nothing is copied: the time is noise of a busy machine
    cost = weigh(
        step,
        "h2d",
        step.parts_ms.get("h2d"),
        measured_pct=compute_gain_pct(seen, "resident", over="replayed"),
        worth_pct=WORTH_NAMING_PCT if step.on_gpu else CPU_WORTH_PCT,
        least_ms=ORDINARY_MS,
        most_pct=compute_gain_pct(seen, "resident"),
    )
    if cost is None:
        return None
    if step.on_gpu:
        instead = "send fewer bytes: integers instead of floats, converted on the device"
        remedy = rungs.choose(seen, "h2d", instead, together=True)
    else:
        remedy = Remedy(None, "no rung helps with this: there is no copy to hide; check your transfer_batch_to_device")
    return cost.explain(f"moving batches to the {step.device} took {cost.time}", remedy)


def _moves_batches(step: Attribution) -> bool:
    """Whether the user's own hook moves the batches."""
    return "transfer_batch_to_device" in ((step.measured.evidence.get("model") or {}).get("transfer_hooks") or ())


def rule_out_data_wait(step: Attribution) -> str | None:
    """Describe a wait for data that costs nothing according to a trial; otherwise None."""
    wait, gain = step.to_pct(step.parts_ms.get("data_wait", 0.0)), step.free_data_pct
    if wait < WORTH_NAMING_PCT or gain is None or gain > NO_GAIN_PCT:
        return None
    return (
        f"waiting for data is {wait:.1f} % of the step, but with free data the rate is {format_factor(gain)} (measured)"
    )


def find_comm_exposed(step: Attribution, rungs: Rungs) -> Finding | None:
    """Find gradient exchange that nothing hides, measured by trials, a trace or the parts.

    The gain is always an estimate: the trials' steps differ from those of the unchanged run, in which the exchange may
    cost less because the wait for data hides it.
    """
    if step.exchange is None or (cost := weigh(step, "comm_exposed", step.exchange.ms)) is None:
        return None
    facts = f"gradient exchange costs {cost.time} ({SAYS[step.exchange.source]})"
    instead = "exchange less often (accumulate_grad_batches, which changes the training)"
    return cost.explain(facts, rungs.choose(step.measured, "comm_exposed", instead))


def find_slow_rank(step: Attribution, _rungs: Rungs) -> Finding | None:
    """Find a rank whose own work takes longer than that of the others."""
    slow, ranks = step.straggler, len(step.measured.ranks)
    if slow is None or (cost := weigh(step, "straggler", slow.excess_ms)) is None:
        return None
    facts = (
        f"{ranks - 1} of {ranks} ranks wait for rank {slow.rank} on {slow.host} for {cost.time}: its"
        f" {slow.part} takes {slow.part_ms:.1f} ms, theirs {slow.others_part_ms:.1f}"
    )
    advice = f"no rung helps with this: check that machine and what rank {slow.rank} does in {slow.part}"
    return cost.explain(facts, Remedy(None, advice), title=f"WAITING FOR RANK {slow.rank}")

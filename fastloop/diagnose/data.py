"""The way of a batch to the device: waiting for it, copying it."""

from __future__ import annotations

from fastloop.diagnose.naming import NO_GAIN_PCT, ORDINARY_MS, device, named, per_step, share_pct, times
from fastloop.diagnose.reading import CPU_WORTH_PCT, measured_gain_pct, micro_batches, number
from fastloop.diagnose.remedies import Remedy, available, choose
from fastloop.diagnose.split import WORTH_NAMING_PCT, part_ms
from fastloop.measurement import Measurement
from fastloop.records import Finding

HAND_OVER_MS = 0.5
"""What taking a batch from a worker costs the training process: 0.2 to 0.5 ms, more where all CPUs are busy. What is
made in less gains nothing by being made elsewhere."""
MORE_WORTH = 1.25
"""Workers that could be had for each there is, from which on more of them are advised."""


def data_wait(seen: Measurement, enabled: tuple[str, ...]) -> Finding | None:
    """The next batch was not there. A trial with a replayed batch, if there was one, has the last word."""
    wait, gain = part_ms(seen, "data_wait"), _free_data_pct(seen)
    idle = f"the {device(seen)} had nothing to do for {per_step(seen, wait)}: the next batch was not there"
    return named(seen, "data_wait", wait, idle, _feed(seen, enabled), measured_pct=gain, least_ms=ORDINARY_MS)


def h2d(seen: Measurement, enabled: tuple[str, ...]) -> Finding | None:
    """Copies to the device that nothing hides."""
    copies, worth = part_ms(seen, "h2d"), WORTH_NAMING_PCT
    facts = f"moving batches to the {device(seen)} took {per_step(seen, copies)}"
    measured = measured_gain_pct(seen, "resident", over="replayed")
    if seen.device == "cuda":
        instead = "send fewer bytes: integers instead of floats, converted on the device"
        remedy = choose(seen, enabled, ("pin", "prefetch"), instead, together=True)
    else:
        if "transfer_batch_to_device" not in ((seen.evidence.get("model") or {}).get("transfer_hooks") or ()):
            return None  # nothing is copied: it is the unrest of a machine that does other things too
        worth = CPU_WORTH_PCT
        remedy = Remedy(None, "no rung helps: there is no copy to hide here; look at your transfer_batch_to_device")
    return named(seen, "h2d", copies, facts, remedy, measured_pct=measured, worth_pct=worth,
                 least_ms=ORDINARY_MS, most_pct=measured_gain_pct(seen, "resident"))  # fmt: skip


def held_nothing_up(seen: Measurement) -> str | None:
    """Words for a wait for data that a trial has shown to cost nothing; None where there was none."""
    wait, gain = share_pct(seen, part_ms(seen, "data_wait")), _free_data_pct(seen)
    if wait is None or wait < WORTH_NAMING_PCT or gain is None or gain > NO_GAIN_PCT:
        return None
    return f"waiting for data is {wait:.1f} % of the step, but with free data the rate is {times(gain)} (measured)"


def _free_data_pct(seen: Measurement) -> float | None:
    replayed = measured_gain_pct(seen, "replayed")
    return measured_gain_pct(seen, "resident") if replayed is None else replayed


def _feed(seen: Measurement, enabled: tuple[str, ...]) -> Remedy:
    """What to do about a loader that does not keep up."""
    loader = seen.evidence.get("loader") or {}
    workers, cpus = loader.get("num_workers"), loader.get("usable_cpus")
    if available(seen, enabled, "workers"):
        made = _made_in_ms(seen)
        if made is not None and made < HAND_OVER_MS:
            return Remedy(None, f"no rung helps: a batch is there after {made:.2f} ms, and taking it from a worker"
                                f" would cost up to {HAND_OVER_MS} ms; a dataset with __getitems__ makes a whole batch"
                                " at once")  # fmt: skip
        return Remedy({"rungs": {"workers": {"enabled": True}}}, f"the loader has 0 workers, {cpus} CPUs are usable")
    if workers == 0 and "workers" in enabled:
        return Remedy(None, "no rung helps: workers is on but could not apply (its verdict says why)")
    if workers is None:
        return Remedy(None, "no rung helps: this loader is not a DataLoader; make its batches ahead of need")
    if workers == 0:
        return Remedy(None, "no rung helps: an iterable dataset has to be sharded by its owner before it can have"
                            " workers")  # fmt: skip
    most = _most_workers(seen)
    if most is not None and most >= MORE_WORTH * workers:
        how = f"write rungs.workers.count: {most}" if "workers" in enabled else f"set num_workers={most} in your loader"
        return Remedy(None, f"no further rung helps: num_workers={workers} and {cpus} CPUs are usable: {how}")
    return Remedy(None, f"no rung of this version helps: num_workers={workers} on {cpus} CPUs is not enough;"
                        " cheapen the transforms")  # fmt: skip


def _made_in_ms(seen: Measurement) -> float | None:
    """What the host spends on getting a batch: on a GPU more than the device waits for it."""
    spent = number(seen.host_ms.get("data_wait"))
    if spent is None and seen.device != "cuda":
        spent = part_ms(seen, "data_wait")
    return None if spent is None else spent / micro_batches(seen)


def _most_workers(seen: Measurement) -> int | None:
    """Workers a rank can have if each rank keeps a CPU of its own; None where the CPUs are not known."""
    cpus = number((seen.evidence.get("loader") or {}).get("usable_cpus"))
    hosts = [rank.get("host") for rank in seen.ranks]
    local = hosts.count(hosts[0]) if hosts else seen.world_size
    return None if cpus is None else int(cpus) // max(1, local) - 1

"""A GPU that always has work: is it well used, and if not, what is it that takes so long?

One answer at most, for all of them speak of the same milliseconds. On the CPU there is none: its own arithmetic is no
fault that could be told from these figures.
"""

from __future__ import annotations

from collections.abc import Iterable

from fastloop.diagnose.busy import copy_share, culprit, products_share, use
from fastloop.diagnose.naming import NO_GAIN_PCT, gain_pct, named, per_step, times
from fastloop.diagnose.reading import families, gpu, measured_gain_pct, number, precision
from fastloop.diagnose.remedies import Remedy, choose
from fastloop.diagnose.split import device_limits, inside, part_ms
from fastloop.measurement import Measurement
from fastloop.records import Finding


def fp32_math(seen: Measurement, enabled: tuple[str, ...]) -> Finding | None:
    """32-bit products on the ordinary cores, while the tensor cores have nothing to do."""
    spent = _busy_ms(seen)
    if spent is None or use(seen) != "fp32_math":
        return None
    nvml = gpu(seen, "nvml_busy_pct")
    busy = f"the GPU is busy{'' if nvml is None else f' (NVML {nvml:.1f} %)'} with 32-bit arithmetic"
    facts = _listed([f"{busy} for {per_step(seen, spent)}", _tensor(seen), _rate(seen), _not_the_data(seen)])
    slow, fast = (number(seen.peaks.get(f"{name}_tflop_per_s")) for name in ("dtype", "datasheet"))
    share = products_share(seen)
    most = gain_pct(seen, share * spent * max(0.0, 1 - slow / fast)) if share and slow and fast else None
    remedy = choose(seen, enabled, ("amp",), "shorter numbers for the products (bf16, TF32)")
    return named(seen, "fp32_math", spent, facts, remedy, most_pct=most, bound=most is None)


def memory_bound(seen: Measurement, enabled: tuple[str, ...]) -> Finding | None:
    """Kernels that move much and compute little."""
    spent = _busy_ms(seen)
    if spent is None or use(seen) != "memory_bound":
        return None
    dram, share = gpu(seen, "dram_active_pct"), copy_share(seen)
    active = None if dram is None else f"DRAM {dram:.0f} % active"
    copied = None if share is None else f"{100 * share:.0f} % of what a plain copy reaches"
    facts = _listed([f"the GPU is busy moving data for {per_step(seen, spent)}", active, copied, _tensor(seen),
                     _largest(seen)])  # fmt: skip
    instead = "compile, layout and amp are on, or do not apply here"
    convolves = number(seen.flops.get("convolution")) or families(seen).get("convolution")
    # autocast halves what products read and write, and leaves elementwise work as it is; merging that is compile's
    rungs = ("amp", "layout", "compile") if convolves else ("compile", "amp")
    remedy = choose(seen, enabled, rungs, instead)
    return named(seen, "memory_bound", spent, facts, remedy, bound=True)


def compute_bound(seen: Measurement, enabled: tuple[str, ...]) -> Finding | None:
    """The GPU is the limit: well used, or slow for a reason among its kernels, or for one that only a trace shows."""
    spent, kind = _busy_ms(seen), use(seen)
    if spent is None or kind not in ("well_used", "slow"):
        return None
    if kind == "well_used":
        facts = _listed(["the GPU is the limit and well used", _rate(seen), _tensor(seen)])
        return named(seen, "compute_bound", spent, facts, Remedy(None, "nothing to gain"), bound=True)
    cause, facts = culprit(seen), _listed([f"the GPU is the limit for {per_step(seen, spent)}", _rate(seen)])
    if cause is None:
        advice = "no rung helps: a trace shows which kernels take the time (watch.trace_steps: 10)"
        return named(seen, "compute_bound", spent, facts, Remedy(None, advice), bound=True)
    most = None if cause.share is None else gain_pct(seen, cause.share * spent)
    return named(seen, "compute_bound", spent, f"{facts}; {cause.says}",
                 choose(seen, enabled, cause.rungs, cause.instead), most_pct=most, bound=most is None)  # fmt: skip


def _busy_ms(seen: Measurement) -> float | None:
    """The device's own work, where the step waits for nothing else."""
    split = inside(seen)
    return split.busy if split is not None and device_limits(seen) else None


def _listed(words: Iterable[str | None]) -> str:
    return ", ".join(word for word in words if word)


def _tensor(seen: Measurement) -> str | None:
    active = gpu(seen, "tensor_active_pct")
    return None if active is None else f"tensor cores {active:.0f} % active"


def _rate(seen: Measurement) -> str | None:
    """``36 TFLOP/s = 54 % of fp32's 67 and 3.7 % of bf16's 989``, as far as it was measured."""
    rate, least, dtype = number(seen.tflop_per_s), "at least " if seen.flops.get("at_least") else "", precision(seen)
    name = seen.peaks.get("dtype") or dtype
    own = [("dtype_in_use", "dtype_tflop_per_s", name)] if dtype not in (None, "mixed") else []
    shares = []
    for key, peak, what in (*own, ("datasheet", "datasheet_tflop_per_s", "bf16")):
        share, full = number(seen.mfu.get(key)), number(seen.peaks.get(peak))
        if share is not None:
            whole = f"{what}'s peak" if full is None else f"{what}'s {full:.0f}"
            shares.append(f"{100 * share:.{0 if share >= 0.1 else 1}f} % of {whole}")
    known = [text for text in (None if rate is None else f"{rate:.0f} TFLOP/s", " and ".join(shares)) if text]
    return f"{least}{' = '.join(known)}" if known else None


def _not_the_data(seen: Measurement) -> str | None:
    gains = [measured_gain_pct(seen, ceiling) for ceiling in ("resident", "replayed")]
    known = [gain for gain in gains if gain is not None]
    if not known:
        return None if part_ms(seen, "data_wait") is None else "nothing waits for data"
    return f"not workers, not pin (with free data {times(known[0])}, measured)" if known[0] <= NO_GAIN_PCT else None


def _largest(seen: Measurement) -> str | None:
    shares = families(seen)
    if not shares:
        return None
    family = max(shares, key=shares.__getitem__)
    return f"{family} kernels {100 * shares[family]:.0f} % of the time"

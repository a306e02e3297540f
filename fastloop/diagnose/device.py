"""Findings about a GPU that always has work: whether it is well used, and if not, what takes so long.

At most one of them applies, because they concern the same milliseconds. On the CPU only the optimizer and padding are
looked at: these figures cannot show whether the model's arithmetic is slow.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from fastloop.diagnose.attribution import Attribution
from fastloop.diagnose.finding import NO_GAIN_PCT, ORDINARY_MS, compute_gain_bound_pct, format_factor, weigh
from fastloop.diagnose.gpu_use import (
    ASK_A_TRACE,
    FUSED_ATTENTION,
    compare_with_copy,
    find_attention_by_hand,
    find_culprit,
    sum_products,
)
from fastloop.diagnose.remedies import NO_RUNG, Remedy, Rungs
from fastloop.records.measurement import Measurement
from fastloop.records.plan import Finding
from fastloop.records.readings import (
    CPU_WORTH_PCT,
    OPTIMIZER,
    compute_gain_pct,
    read_family_shares,
    read_fusing_ms,
    read_gpu,
    read_precision,
    to_number,
)

UNEXPLAINED = "BUSY, NOT FAST"
"""The headline of device work that only a trace can explain."""
HELPLESS = (UNEXPLAINED, f"{UNEXPLAINED}: SMALL KERNELS")
"""Headlines of device work that no rung helps with, and for which there is hardly any advice."""
MOST = 0.8
"""If the fused form saves at least this share of the optimizer's time, no milliseconds are given, because the copies on
which it was timed are not quite like the parameters."""


def find_fp32_math(step: Attribution, rungs: Rungs) -> Finding | None:
    """Find 32-bit matrix products on the ordinary cores while the tensor cores are idle."""
    seen, spent = step.measured, step.device_ms
    if spent is None or step.gpu_use != "fp32_math":
        return None
    slow, fast = (to_number(seen.peaks.get(f"{name}_tflop_per_s")) for name in ("dtype", "datasheet"))
    share = sum_products(seen)
    saved = share * spent * max(0.0, 1 - slow / fast) if share and slow and fast else None
    most = None if saved is None else compute_gain_bound_pct(step.to_pct(saved))
    if (cost := weigh(step, "fp32_math", spent, most_pct=most, bound=most is None)) is None:
        return None
    nvml = read_gpu(seen, "nvml_busy_pct")
    busy = f"the GPU is busy{'' if nvml is None else f' (NVML {nvml:.1f} %)'} with 32-bit arithmetic"
    tensor, rate, data = _describe_tensor_cores(seen), _describe_rate(seen), _describe_free_data(step)
    facts = _join_words(f"{busy} for {cost.time}", tensor, rate, data)
    return cost.explain(facts, rungs.choose(seen, "fp32_math", "use a shorter dtype for matrix products (bf16, TF32)"))


def find_memory_bound(step: Attribution, rungs: Rungs) -> Finding | None:
    """Find kernels that move much data and compute little."""
    seen, spent = step.measured, step.device_ms
    if spent is None or step.gpu_use != "memory_bound":
        return None
    if (cost := weigh(step, "memory_bound", spent, bound=True)) is None:
        return None
    dram, share = read_gpu(seen, "dram_active_pct"), compare_with_copy(seen)
    active = None if dram is None else f"DRAM {dram:.0f} % active"
    copied = None if share is None else f"{100 * share:.0f} % of the bandwidth of a plain copy"
    moving = f"the GPU is busy moving data for {cost.time}"
    convolves = to_number(seen.flops.get("convolution")) or read_family_shares(seen).get("convolution")
    # autocast halves what products read and write, and leaves elementwise work as it is
    cause = "memory_bound:convolutions" if convolves else "memory_bound"
    remedy = rungs.choose(seen, cause, f"{', '.join(rungs.list_against(cause))} are on, or do not apply here")
    title = "" if remedy.patch else "BUSY: MEMORY-BOUND"
    facts = _join_words(moving, active, copied, _describe_tensor_cores(seen), _describe_largest_family(seen))
    return cost.explain(facts, remedy, title=title)


def find_compute_bound(step: Attribution, rungs: Rungs) -> Finding | None:
    """Find a working GPU: well used, or slow because of certain kernels, or for a reason that only a trace shows.

    On the CPU, find a slow optimizer.
    """
    seen, spent = step.measured, step.device_ms
    if not step.on_gpu:
        return _find_slow_optimizer(step, rungs)
    well_used = step.gpu_use == "well_used"
    if spent is None or step.gpu_use not in ("well_used", "slow") or (well_used and not step.is_limit):
        return None
    culprit = None if well_used else find_culprit(seen, rungs.are_in_effect)
    share = None if culprit is None else culprit.share
    most = None if share is None else compute_gain_bound_pct(step.to_pct(share * spent))
    if (cost := weigh(step, "compute_bound", spent, most_pct=most, bound=most is None)) is None:
        return None
    if well_used:
        facts = _join_words("the GPU is the limit and well used", _describe_rate(seen), _describe_tensor_cores(seen))
        return cost.explain(facts, Remedy(None, "no rung is worth trying"), title="NOTHING TO GAIN: GPU WELL USED")
    works = "is the limit" if step.is_limit else "is busy"
    facts = _join_words(f"the GPU {works} for {cost.time}", _describe_rate(seen), _describe_counters(seen))
    if culprit is None:
        advice = f"no rung helps with this: {ASK_A_TRACE}"
        return cost.explain(facts, Remedy(None, advice), title=UNEXPLAINED)
    title = f"BUSY, NOT FAST: {culprit.cause.replace('_', ' ').upper()}"
    remedy = rungs.choose(seen, culprit.cause, culprit.instead)
    return cost.explain(f"{facts}; {culprit.says}", remedy, title=title)


def find_padding(step: Attribution, _rungs: Rungs) -> Finding | None:
    """Find padding: tokens that the attention mask hides but the device computes anyway. On a GPU, other findings own
    this time."""
    every, real = to_number(step.measured.tokens_per_s), to_number(step.measured.unpadded_tokens_per_s)
    spent = step.device_ms if step.on_gpu else step.sum_ms("forward", "backward")
    if not every or real is None or spent is None:
        return None
    padded = max(0.0, 1 - real / every)
    if (cost := weigh(step, "compute_bound", padded * spent, worth_pct=CPU_WORTH_PCT)) is None:
        return None
    facts = f"{100 * padded:.0f} % of the tokens are padding, which costs about {cost.time}"
    advice = (
        "no rung helps with this: pad each batch only to its longest sample (in the collate function), and batch"
        " samples of similar length"
    )
    found = cost.explain(facts, Remedy(None, advice), title="BUSY, NOT FAST: PADDING")
    return dataclasses.replace(found, share_pct=None, ceiling_gain_pct=None) if step.on_gpu else found


def _find_slow_optimizer(step: Attribution, rungs: Rungs) -> Finding | None:
    """Find an optimizer whose fused form would save much of the step, or one that is not fused and cannot be."""
    spent = step.parts_ms.get("optimizer", 0.0)
    unfused, saved_ms = _describe_unfused(step.measured), min(spent, read_fusing_ms(step.measured))
    saves = step.to_pct(saved_ms) >= CPU_WORTH_PCT
    if not saves and unfused is None:
        return None
    most = compute_gain_bound_pct(step.to_pct(saved_ms)) if saves else None
    cost = weigh(step, "compute_bound", spent, worth_pct=CPU_WORTH_PCT, least_ms=ORDINARY_MS, most_pct=most)
    if cost is None:
        return None
    if saves or unfused is None:
        much = "most of it" if saved_ms >= MOST * spent else f"about {saved_ms:.1f} ms of it"
        facts = f"the optimizer takes {cost.time}, and its fused form would save {much}"
        remedy = rungs.choose(step.measured, "optimizer", "create yours with fused=True")
    else:
        takes, beside, advice = unfused
        facts, remedy = f"{takes} {cost.time}{beside}", Remedy(None, f"{NO_RUNG}: {advice}")
    return cost.explain(facts, remedy, title="BUSY, NOT FAST: OPTIMIZER")


def _describe_unfused(seen: Measurement) -> tuple[str, str, str] | None:
    """Describe the optimizers that no rung fuses, what they do besides, and what would help; None without any."""
    found = seen.evidence.get(OPTIMIZER, {})
    others, changes = bool(found.get("others")), "(which changes the training)"
    if own := found.get("own"):
        does = "if torch has an equivalent, create it with fused=True to update all parameters in one call"
        takes = _join_takes(own, "not one of torch's optimizers", "not torch's", others)
        return takes, "", does
    if not (names := found.get("no_fused_form")):
        return None
    if (often := to_number(found.get("evaluations_per_step"))) is not None:
        beside = f" on top of training_step and its backward, which it runs {often:.1f} times a step"
        return f"{names[0]} takes", beside, f"use a smaller max_iter or history_size {changes}"
    advice = f"choose an optimizer that has one, such as AdamW {changes}"
    if found.get("takes_sparse_gradients"):
        advice = f"fused optimizers need dense gradients; for small tables, try AdamW with sparse=False {changes}"
    return _join_takes(names, "without a fused form", "without a fused form", others), "", advice


def _join_takes(names: Sequence[str], lacking: str, briefly: str, others: bool) -> str:
    """Say of optimizers what they lack, up to the verb; with others beside them, the time is that of all."""
    kinds = list(dict.fromkeys(names))
    if others:
        return f"the optimizers, among them {' and '.join(kinds)} ({briefly}), take"
    one = len(kinds) == 1
    return f"{' and '.join(kinds)}, {lacking if one else briefly}, {'takes' if one else 'take'}"


def _join_words(*words: str | None) -> str:
    return ", ".join(word for word in words if word)


def _describe_tensor_cores(seen: Measurement) -> str | None:
    active = read_gpu(seen, "tensor_active_pct")
    return None if active is None else f"tensor cores {active:.0f} % active"


def _describe_counters(seen: Measurement) -> str | None:
    """Describe the work by the GPU's counters if FLOPs were not counted."""
    if to_number(seen.tflop_per_s) is not None:
        return None
    dram = read_gpu(seen, "dram_active_pct")
    return _join_words(_describe_tensor_cores(seen), None if dram is None else f"DRAM {dram:.0f} % active") or None


def _describe_rate(seen: Measurement) -> str | None:
    """Format as ``36 TFLOP/s = 54 % of fp32's 67 and 3.7 % of bf16's 989``, without unmeasured values."""
    rate, dtype = to_number(seen.tflop_per_s), read_precision(seen)
    least = "at least " if seen.flops.get("at_least") else ""
    name = seen.peaks.get("dtype") or dtype
    own = [("dtype_in_use", "dtype_tflop_per_s", name)] if dtype not in (None, "mixed") else []
    shares = []
    for key, peak, what in (*own, ("datasheet", "datasheet_tflop_per_s", "bf16")):
        share, full = to_number(seen.mfu.get(key)), to_number(seen.peaks.get(peak))
        if share is not None:
            whole = f"{what}'s peak" if full is None else f"{what}'s {full:.0f}"
            shares.append(f"{100 * share:.{0 if share >= 0.1 else 1}f} % of {whole}")
    known = [text for text in (None if rate is None else f"{rate:.0f} TFLOP/s", " and ".join(shares)) if text]
    return f"{least}{' = '.join(known)}" if known else None


def _describe_free_data(step: Attribution) -> str | None:
    gains = [compute_gain_pct(step.measured, ceiling) for ceiling in ("resident", "replayed")]
    known = [gain for gain in gains if gain is not None]
    if not known:
        waits = step.parts_ms.get("data_wait")
        return "nothing waits for data" if waits is not None and step.to_pct(waits) < NO_GAIN_PCT else None
    rate = f"nothing waits for data (with free data {format_factor(known[0])}, measured)"
    return rate if known[0] <= NO_GAIN_PCT else None


def _describe_largest_family(seen: Measurement) -> str | None:
    shares = read_family_shares(seen)
    if not shares:
        return None
    if (by_hand := find_attention_by_hand(seen)) is not None:
        return f"hand-written attention at least {100 * by_hand:.0f} % of the kernels' time: use {FUSED_ATTENTION}"
    family = max(shares, key=shares.__getitem__)
    return f"{family} kernels {100 * shares[family]:.0f} % of the time"

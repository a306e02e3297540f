"""Compares two ledgers: did both trainings make the same optimizer steps from the same samples? Free of torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import zip_longest

from fastloop.records.experiment import Gate
from fastloop.records.plan import Parity
from fastloop.records.trial import Ledger, LedgerEpoch, LedgerStep

Wrong = tuple[int, str, str]
"""The number of an optimizer step, from 1; the kind of difference; and its description."""
_NEARLY = 3 / 4
"""Drawing this share of a dataset and no sample twice is no accident: the epoch samples without replacement."""


def judge_ledger(
    pairs: Sequence[tuple[Ledger, Ledger]], *, regrouped: bool, reshuffled: bool, parity_class: Parity
) -> Gate:
    """Whether both arms fed the same samples to the same optimizer steps.

    Args:
        pairs: the ledgers of base and arm, from runs with the same seed, rank by rank.
        regrouped: the arms build their steps from different micro-batches. Each side must then run as many backwards as
            its own plan says or, if no plan is recorded, at least one, and equally many in all full steps.
        reshuffled: the arms draw their random augmentations in different places, so a shuffle that uses the same
            generator differs from the second epoch on, as with another seed. Each later epoch must then have the same
            number of samples in each step and, if it is complete in both arms, the same samples. A loader whose order
            comes from its own random numbers must still keep that order.
        parity_class: of the arm. If batches are identified only by content, different content fails an `exact` arm; for
            other arms random augmentation alone would change the content, so the gate cannot decide.
    """
    steps, unknown, later = 0, None, dict[str, None]()
    for base, arm in pairs:
        first = _count_first_epoch(base, arm) if reshuffled else math.inf
        found = list(_find_wrongs(base, arm, regrouped, first))
        steps += len(base.steps)
        if parity_class != "exact" and any(what == "content" for _, what, _ in found):
            found = [wrong for wrong in found if wrong[1] != "content"]
            unknown = "the batches differ in content, which random augmentation alone can cause"
        if found:
            step, what, words = min(found)
            why = f"{words} (rank {base.rank})" if base.rank else words
            return Gate(name="ledger", passed=False, why=why, detail={"step": step, "differs": what})
        if first < math.inf and [row.digest for row in base.steps] != [row.digest for row in arm.steps]:
            later[describe_later(base, arm)] = None
        unknown = _explain_unknown(base, arm, bool(later)) or unknown
    for side, ledger in (each for pair in pairs for each in zip(("base", "arm"), pair, strict=True)):
        if ledger.partial:  # not "not testable": a complete run can decide
            why = f"rank {ledger.rank or 0} of the {side} did not finish its training"
            return Gate(name="ledger", passed=None, why=why)
    if not steps:
        unknown = "no optimizer step was recorded"
    if unknown is not None:
        return Gate(name="ledger", passed=None, why=f"not testable here: {unknown}", detail={"testable": False})
    return Gate(
        name="ledger",
        passed=True,
        why=f"{steps} optimizer steps with {_describe_same(regrouped, list(later))}",
        detail={"steps": steps, **({"reshuffled": True} if later else {})},
    )


def _explain_unknown(base: Ledger, arm: Ledger, reordered: bool) -> str | None:
    """Why the samples cannot be compared; None if they can."""
    source = _find_common_source(base, arm)
    if source is None:
        return str(base.why or arm.why or "the two arms identify their samples differently")
    if source == "content" and reordered:
        return "the batches differ in content from the second epoch on, which a different shuffle alone can cause"
    return None


def _describe_same(regrouped: bool, later: Sequence[str]) -> str:
    """A description of what was equal."""
    rest = "learning rates, and as many backwards as planned" if regrouped else "backwards and learning rates"
    if not later:
        return f"the same samples{' and' if regrouped else ','} {rest}"
    return f"the same {rest}; the first epoch is equal, {'; '.join(later)}"


def _find_common_source(base: Ledger, arm: Ledger) -> str | None:
    """Return how both ledgers identify their samples; None if they do not, or do so differently."""
    return base.ids if base.ids == arm.ids else None


def _count_first_epoch(base: Ledger, arm: Ledger) -> float:
    """The number of optimizer steps that must have the same samples in the same order."""
    ends = [ledger.epochs[0].end for ledger in (base, arm) if ledger.epochs]
    own = base.own_order or arm.own_order
    return max(ends) if len(ends) == 2 and not own else math.inf


def _find_wrongs(base: Ledger, arm: Ledger, regrouped: bool, first: float) -> Iterator[Wrong]:
    """All differences in what both ledgers record. After `first` optimizer steps, the order may differ."""
    for number, (left, right) in enumerate(zip_longest(base.steps, arm.steps), start=1):
        if left is None or right is None:
            yield number, "steps", f"{len(base.steps)} vs. {len(arm.steps)} optimizer steps"
            return
        yield from _compare_samples(number, left, right, _find_common_source(base, arm) if number <= first else None)
        if not _has_same_rates(left.rates, right.rates):
            rates = f"{_format_rates(left.rates)} vs. {_format_rates(right.rates)}"
            yield number, "rates", f"the learning rates of optimizer step {number} differ: {rates}"
        done = left.backwards, right.backwards
        if not regrouped and None not in done and done[0] != done[1]:
            yield number, "backwards", f"the backwards of optimizer step {number} differ: {done[0]} vs. {done[1]}"
    if first < math.inf:
        yield from find_wrong_epochs(base, arm)
    if regrouped:
        yield from _list_unplanned("base", base)
        yield from _list_unplanned("arm", arm)


def _compare_samples(number: int, left: LedgerStep, right: LedgerStep, source: str | None) -> Iterator[Wrong]:
    if None not in (left.samples, right.samples) and left.samples != right.samples:
        yield number, "samples", f"optimizer step {number} has {left.samples} vs. {right.samples} samples"
    elif source is not None and left.digest != right.digest:
        what = "samples" if source == "sampler" else "content"
        yield number, what, f"optimizer step {number} has different samples, or the same in a different order"


def _has_same_rates(left: Sequence[float | None], right: Sequence[float | None]) -> bool:
    """Whether the rates are equal; one side may store them in single precision."""
    return len(left) == len(right) and all(
        a == b if a is None or b is None else math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-30)
        for a, b in zip(left, right, strict=True)
    )


def _format_rates(rates: Sequence[float | None]) -> str:
    shown = ["n/a" if rate is None else f"{rate:.6g}" for rate in rates[:4]]
    return ", ".join([*shown, *(["…"] if len(rates) > 4 else [])]) or "none"


def _list_unplanned(side: str, ledger: Ledger) -> Iterator[Wrong]:
    """Steps whose backwards differ from this side's own plan."""
    rows = ledger.steps
    counts = [row.backwards for row in rows]
    plans = ledger.planned or [None] * len(rows)
    whole = max((row.samples or 0 for row in rows), default=0)
    usual = [count for row, count in zip(rows, counts, strict=True) if count and (row.samples or 0) == whole]
    for number, (row, count, planned) in enumerate(zip(rows, counts, plans, strict=False), start=1):
        if planned is None and (row.samples or 0) == whole:
            planned = max(set(usual), key=usual.count) if usual else 1
        wrong = count == 0 if planned is None else count != planned
        if count is not None and wrong:
            plan = f"the {side}'s plan has {planned or 'at least one'}"
            yield number, "backwards", f"optimizer step {number} ran {count} backwards, but {plan}"


# Whole epochs, independent of order.


def find_wrong_epochs(base: Ledger, arm: Ledger) -> Iterator[Wrong]:
    """The epochs that cannot consist of the same samples."""
    for number, (left, right) in enumerate(zip_longest(base.epochs, arm.epochs), start=1):
        if left is None or right is None:
            yield (left or right).end, "epochs", f"{len(base.epochs)} vs. {len(arm.epochs)} epochs"
            return
        if left.end != right.end:
            ends = f"epoch {number} ends with optimizer step {left.end} vs. {right.end}"
            yield min(left.end, right.end), "epochs", ends
        elif None not in (left.samples, right.samples) and left.samples != right.samples:
            yield left.end, "samples", f"epoch {number} has {left.samples} vs. {right.samples} samples"
        elif left.complete and right.complete and _are_others(base, left, arm, right):
            which = f"epoch {number}, which ends with optimizer step {left.end},"
            yield left.end, "samples", f"{which} has different samples, or some of them twice"


def describe_later(base: Ledger, arm: Ledger) -> str:
    """How the epochs after the first compare, if there is no difference that counts."""
    later = list(zip(base.epochs, arm.epochs, strict=True))[1:]
    whole = [pair for pair in later if pair[0].complete and pair[1].complete]
    if not whole:
        return "the next one, cut short, has as many samples in a different order (which ones cannot be compared)"
    if all(left.digest is not None and left.digest == right.digest for left, right in whole):
        return "later ones have the same samples in a different order"
    if all(_draws_once(base, left) and _draws_once(arm, right) for left, right in whole):
        return (
            "later ones have as many samples in a different order, none of them twice (each side skips different ones)"
        )
    return (
        "later ones have as many samples in a different order (which ones cannot be compared: they may not be the same)"
    )


def _are_others(base: Ledger, left: LedgerEpoch, arm: Ledger, right: LedgerEpoch) -> bool:
    """Whether two complete epochs differ in samples by more than their order."""
    if None in (left.digest, right.digest) or left.digest == right.digest:
        return False
    if _draws_all(base, left) or _draws_all(arm, right):
        return True
    return None not in (left.again, right.again) and _draws_once(base, left) != _draws_once(arm, right)


def _draws_all(ledger: Ledger, epoch: LedgerEpoch) -> bool:
    """Whether the epoch draws each sample of the dataset once."""
    return epoch.again == 0 and epoch.samples is not None and epoch.samples == ledger.dataset


def _draws_once(ledger: Ledger, epoch: LedgerEpoch) -> bool:
    """Whether the epoch draws most of the dataset and no sample twice."""
    dataset = ledger.dataset
    return epoch.again == 0 and None not in (dataset, epoch.samples) and epoch.samples >= _NEARLY * dataset  # type: ignore[operator]

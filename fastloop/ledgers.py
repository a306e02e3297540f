"""Two ledgers side by side: did both trainings make the same optimizer steps of the same samples? Free of torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Any

from fastloop import epochs
from fastloop.comparison import Gate
from fastloop.epochs import Ledger, Wrong
from fastloop.records import Parity


def ledger_gate(pairs: Sequence[tuple[Ledger, Ledger]], *, regrouped: bool = False, reshuffled: bool = False,
                parity_class: Parity = "exact") -> Gate:  # fmt: skip
    """Whether both arms fed the same samples to the same optimizer steps.

    Args:
        pairs: the ledgers of the base and of the arm, of runs with one seed, rank by rank.
        regrouped: one of the arms makes its steps of other micro-batches than the other. Each side then has to make
            the backwards of its own plan or, where none is written down, at least one and in whole steps always as
            many.
        reshuffled: one of the arms makes its random augmentations elsewhere than the other, which leaves other random
            numbers to a shuffle that draws on the same ones: from the second epoch on it is another, as with another
            seed. Each later epoch then has to have as many samples in each step, and where it is complete in both
            arms the same ones. A loader whose order has random numbers of its own has to keep it all the same.
        parity_class: of the arm. Where batches are known by their content only, other content is a failure of an
            `exact` arm; elsewhere random augmentation alone would change it, and the gate cannot tell.
    """
    steps, unknown, later = 0, None, dict[str, None]()
    for base, arm in pairs:
        first = _first_epoch(base, arm) if reshuffled else math.inf
        found = list(_wrongs(base, arm, regrouped, first))
        steps += len(base["steps"])
        if parity_class != "exact" and any(what == "content" for _, what, _ in found):
            found = [wrong for wrong in found if wrong[1] != "content"]
            unknown = "the batches differ in content, which random augmentation alone would do"
        if found:
            return _failed(base, *min(found))
        if first < math.inf and [row[0] for row in base["steps"]] != [row[0] for row in arm["steps"]]:
            later[epochs.said(base, arm)] = None
        unknown = _unknown(base, arm, bool(later)) or unknown
    if not steps:
        unknown = "no optimizer step was written down"
    if unknown is not None:
        return Gate(name="ledger", passed=None, why=f"not testable here: {unknown}", detail={"testable": False})
    return Gate(name="ledger", passed=True, why=f"{steps} optimizer steps with {_same(regrouped, list(later))}",
                detail={"steps": steps, **({"reshuffled": True} if later else {})})  # fmt: skip


def _failed(base: Ledger, step: int, what: str, words: str) -> Gate:
    where = f" (rank {base['rank']})" if base.get("rank") else ""
    return Gate(name="ledger", passed=False, why=f"{words}{where}", detail={"step": step, "differs": what})


def _unknown(base: Ledger, arm: Ledger, reordered: bool) -> str | None:
    """Why nothing can be said of the samples, where nothing can."""
    source = _source(base, arm)
    if source is None:
        return str(base.get("why") or arm.get("why") or "the two arms know their samples by different marks")
    if source == "content" and reordered:
        return "the batches differ in content from the second epoch on, as another shuffle alone would do"
    return None


def _same(regrouped: bool, later: Sequence[str]) -> str:
    """What was the same."""
    if not later:
        return "the same samples and learning rates, and the backwards of their plans" if regrouped else \
            "the same samples, backwards and learning rates"  # fmt: skip
    rest = "the same learning rates, and the backwards of their plans" if regrouped else \
        "the same backwards and learning rates"  # fmt: skip
    return f"{rest}; the first epoch equal, {'; '.join(later)}"


def _source(base: Ledger, arm: Ledger) -> str | None:
    """By what both know their samples; None where they do not, or by different marks."""
    return base.get("ids") if base.get("ids") == arm.get("ids") else None


def _first_epoch(base: Ledger, arm: Ledger) -> float:
    """Optimizer steps that have to have the same samples in the same order."""
    ends = [ledger["epochs"][0][0] for ledger in (base, arm) if ledger.get("epochs")]
    own = base.get("own_order") or arm.get("own_order")
    return max(ends) if len(ends) == 2 and not own else math.inf


def _wrongs(base: Ledger, arm: Ledger, regrouped: bool, first: float) -> Iterator[Wrong]:
    """All that is not the same, as far as both know. After `first` optimizer steps, the order may be another."""
    for number, (left, right) in enumerate(zip_longest(base["steps"], arm["steps"]), start=1):
        if left is None or right is None:
            yield number, "steps", f"{len(base['steps'])} against {len(arm['steps'])} optimizer steps"
            return
        yield from _samples(number, left, right, _source(base, arm) if number <= first else None)
        if not _same_rates(left[3], right[3]):
            yield number, "rates", (f"the learning rates of optimizer step {number} differ: {_listed(left[3])} against"
                                    f" {_listed(right[3])}")  # fmt: skip
        if not regrouped and None not in (left[2], right[2]) and left[2] != right[2]:
            yield number, "backwards", f"the backwards of optimizer step {number} differ: {left[2]} against {right[2]}"
    if first < math.inf:
        yield from epochs.wrongs(base, arm)
    if regrouped:
        yield from _unplanned("base", base)
        yield from _unplanned("arm", arm)


def _samples(number: int, left: Sequence[Any], right: Sequence[Any], source: str | None) -> Iterator[Wrong]:
    if None not in (left[1], right[1]) and left[1] != right[1]:
        yield number, "samples", f"optimizer step {number} has {left[1]} samples against {right[1]}"
    elif source is not None and left[0] != right[0]:
        what = "samples" if source == "sampler" else "content"
        yield number, what, f"optimizer step {number} has other samples, or the same in another order"


def _same_rates(left: Sequence[float | None], right: Sequence[float | None]) -> bool:
    """Equal, but for rates that one side keeps in single precision."""
    return len(left) == len(right) and all(
        a == b if a is None or b is None else math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-30)
        for a, b in zip(left, right, strict=True)
    )


def _listed(rates: Sequence[float | None]) -> str:
    shown = ["n/a" if rate is None else f"{rate:.6g}" for rate in rates[:4]]
    return ", ".join([*shown, *(["…"] if len(rates) > 4 else [])]) or "none"


def _unplanned(side: str, ledger: Ledger) -> Iterator[Wrong]:
    """Steps with other backwards than this side's own plan has."""
    rows = ledger["steps"]
    counts = [row[2] for row in rows]
    said = ledger.get("planned") or [None] * len(rows)
    whole = max((row[1] or 0 for row in rows), default=0)
    usual = [count for row, count in zip(rows, counts, strict=True) if count and (row[1] or 0) == whole]
    for number, (row, count, planned) in enumerate(zip(rows, counts, said, strict=False), start=1):
        if planned is None and (row[1] or 0) == whole:
            planned = max(set(usual), key=usual.count) if usual else 1
        wrong = count == 0 if planned is None else count != planned
        if count is not None and wrong:
            yield number, "backwards", (f"optimizer step {number} made {count} backwards where the {side}'s plan has"
                                        f" {planned or 'at least one'}")  # fmt: skip

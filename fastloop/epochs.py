"""Whole epochs of two ledgers side by side: the same samples, in whatever order? Free of torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import zip_longest
from typing import Any, NamedTuple

Ledger = Mapping[str, Any]
"""What `ledger.json` holds, see `bridge/ledger.py`."""
Wrong = tuple[int, str, str]
"""The number of an optimizer step, from 1; what is not the same there; and that in words."""
_NEARLY = 3 / 4
"""An epoch that draws so much of a dataset and no sample twice does not put samples back: by chance it would not come
to that."""


class Epoch(NamedTuple):
    """A row of a ledger's `epochs`."""

    end: int
    samples: int | None
    complete: bool
    digest: str | None
    again: int | None


def wrongs(base: Ledger, arm: Ledger) -> Iterator[Wrong]:
    """The epochs that cannot have been of the same samples."""
    for number, (left, right) in enumerate(zip_longest(_epochs(base), _epochs(arm)), start=1):
        if left is None or right is None:
            yield (left or right).end, "epochs", f"{len(_epochs(base))} against {len(_epochs(arm))} epochs"
            return
        if left.end != right.end:
            yield min(left.end, right.end), "epochs", (f"epoch {number} ends with optimizer step {left.end} against"
                                                       f" {right.end}")  # fmt: skip
        elif None not in (left.samples, right.samples) and left.samples != right.samples:
            yield left.end, "samples", f"epoch {number} has {left.samples} samples against {right.samples}"
        elif left.complete and right.complete and _are_others(base, left, arm, right):
            yield left.end, "samples", (f"epoch {number}, which ends with optimizer step {left.end}, has other samples,"
                                        " or some of them twice")  # fmt: skip


def said(base: Ledger, arm: Ledger) -> str:
    """How the epochs after the first compare, where nothing is wrong with them."""
    later = list(zip(_epochs(base), _epochs(arm), strict=True))[1:]
    whole = [pair for pair in later if pair[0].complete and pair[1].complete]
    if not whole:
        return "the one after it, cut short, as many samples in another order (which they are cannot be compared)"
    if all(left.digest is not None and left.digest == right.digest for left, right in whole):
        return "later ones the same samples in another order"
    if all(_draws_once(base, left) and _draws_once(arm, right) for left, right in whole):
        return "later ones as many samples in another order, none of them twice (each leaves out other ones)"
    return "later ones as many samples in another order (which they are cannot be compared: they need not be the same)"


def _epochs(ledger: Ledger) -> list[Epoch]:
    return [Epoch(*row) for row in ledger["epochs"]]


def _are_others(base: Ledger, left: Epoch, arm: Ledger, right: Epoch) -> bool:
    """Whether two complete epochs have samples that another order does not explain."""
    if None in (left.digest, right.digest) or left.digest == right.digest:
        return False
    if _draws_all(base, left) or _draws_all(arm, right):
        return True
    return None not in (left.again, right.again) and _draws_once(base, left) != _draws_once(arm, right)


def _draws_all(ledger: Ledger, epoch: Epoch) -> bool:
    """Each sample of the dataset, once."""
    return epoch.again == 0 and epoch.samples is not None and epoch.samples == ledger.get("dataset")


def _draws_once(ledger: Ledger, epoch: Epoch) -> bool:
    """No sample twice, of a dataset of which little is left."""
    dataset = ledger.get("dataset")
    return epoch.again == 0 and None not in (dataset, epoch.samples) and epoch.samples >= _NEARLY * dataset  # type: ignore[operator]

"""What was drawn in one epoch, in whatever order."""

from __future__ import annotations

import random
from array import array

from fastloop.bridge.trials.drawn_samples import Batch, Drawn, Epoch, join_epochs


def summed(ids: list[int], dataset: int | None = 1000, size: int = 7) -> Epoch:
    """The epoch of these ids, drawn in batches of `size`."""
    return epoch_of(Drawn("sampler", dataset=dataset), ids, size)


def epoch_of(drawn: Drawn, ids: list[int], size: int = 7) -> Epoch:
    drawn.begin()
    for begin in range(0, len(ids), size):
        drawn.add(Batch((array("q", ids[begin : begin + size]).tobytes(),), size, None))
    drawn.end()
    while drawn.take() is not None:
        pass
    return drawn.epoch()


def test_order_and_cuts_do_not_matter_and_everything_else_does() -> None:
    ids = list(range(200, 900))
    mixed = random.Random(0).sample(ids, len(ids))
    whole = summed(ids)
    assert whole == summed(mixed, size=64) and whole.again == 0
    swapped = summed([*ids[:-2], ids[-2] + 1000, ids[-1] - 1000], dataset=None)
    for other in (summed(ids[:-1]), summed([*ids, 0]), summed([*ids[:-1], 199]), swapped):
        assert other.digest != whole.digest, "nor one whose ids have the same sum"
    assert len({summed([one]).digest for one in ids}) == len(ids)


def test_ids_that_come_again() -> None:
    assert summed([5, 6, 5, 7, 5]).again == 2 and summed([]).again == 0
    assert [summed([1, far]).again for far in (999, 1000, -1)] == [0, None, None]
    assert summed([1, 1], dataset=None).again is None
    assert summed([1, 1], dataset=1).again is None and summed([1, 1], dataset=10).again == 1


def test_it_begins_anew() -> None:
    whole, drawn = summed(list(range(100))), Drawn("sampler", dataset=1000)
    for size in (1, 7):
        assert epoch_of(drawn, list(range(100)), size) == whole


def test_several_loaders_are_told_apart() -> None:
    a, b = Epoch(True, "11", 0), Epoch(True, "22", 0)
    assert join_epochs([a]) == a and not join_epochs([]).complete and join_epochs([]).digest is None
    assert join_epochs([a, b]).digest != join_epochs([b, a]).digest and join_epochs([a, b]).again is None
    assert join_epochs([a, b]).complete and not join_epochs([a, Epoch(False, "22")]).complete
    assert join_epochs([a, Epoch(True)]).digest is None

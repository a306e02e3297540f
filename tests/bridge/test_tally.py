"""What was drawn in one epoch, in whatever order."""

from __future__ import annotations

import random
from array import array

import pytest

from fastloop.bridge import tally
from fastloop.bridge.tally import Epoch, Sum, Tally, together


def summed(ids: list[int], dataset: int | None = 1000, size: int = 7) -> Sum:
    found = Tally(dataset)
    for begin in range(0, len(ids), size):
        found.add(array("q", ids[begin : begin + size]).tobytes())
    return found.take()


def test_order_and_cuts_do_not_matter_and_everything_else_does() -> None:
    ids = list(range(200, 900))
    mixed = random.Random(0).sample(ids, len(ids))
    whole = summed(ids)
    assert whole == summed(mixed, size=64) and whole.again == 0
    swapped = summed([*ids[:-2], ids[-2] + 1000, ids[-1] - 1000], dataset=None)
    for other in (summed(ids[:-1]), summed([*ids, 0]), summed([*ids[:-1], 199]), swapped):
        assert other.digest != whole.digest, "nor one whose ids have the same sum"
    assert len({summed([one]).digest for one in ids}) == len(ids)


def test_ids_that_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    assert summed([5, 6, 5, 7, 5]).again == 2 and summed([]) == Sum(0, 0)
    assert [summed([1, far]).again for far in (999, 1000, -1)] == [0, None, None]
    assert summed([1, 1], dataset=None).again is None
    monkeypatch.setattr(tally, "_MARKED", 10)
    assert summed([1, 1], dataset=11).again is None and summed([1, 1], dataset=10).again == 1


def test_it_begins_anew_and_keeps_little(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = summed(list(range(100)))
    monkeypatch.setattr(tally, "_AT_MOST", 100)
    assert summed(list(range(100))) == whole
    found = Tally(1000)
    for _ in range(2):
        for one in range(100):
            found.add(array("q", [one]).tobytes())
            assert len(found._kept) < 13
        assert found.take() == whole


def test_several_loaders_are_told_apart() -> None:
    a, b = Epoch(True, 11, 0), Epoch(True, 22, 0)
    assert together([a]) == a and not together([]).complete and together([]).digest is None
    assert together([a, b]).digest != together([b, a]).digest and together([a, b]).again is None
    assert together([a, b]).complete and not together([a, Epoch(False, 22)]).complete
    assert together([a, Epoch(True)]).digest is None

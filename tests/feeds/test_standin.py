"""A stand-in answers what it does not know by what it stands in for."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest

from fastloop.feeds.lazy_loader import PassesOn, StandIn


class Around(StandIn):
    own = "ours"

    def __init__(self, inner: Any) -> None:
        self.inner = inner


def test_reads_and_length_are_the_inner_ones() -> None:
    around = Around("abc")
    assert around.upper() == "ABC" and len(around) == 3 and around.own == "ours"
    with pytest.raises(AttributeError, match="nothing"):
        around.nothing  # noqa: B018
    assert not hasattr(PassesOn, "__len__"), "an iterator has none, and torch asks the class"


def test_copies_do_not_ask_for_ever() -> None:
    assert not hasattr(Around.__new__(Around), "anything")
    for twin in (copy.copy(Around("abc")), pickle.loads(pickle.dumps(Around("abc")))):
        assert twin.inner == "abc" and twin.upper() == "ABC"

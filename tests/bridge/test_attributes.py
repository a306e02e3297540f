"""Attributes of live objects: set for a moment, or replaced until an undo."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from fastloop.bridge.attributes import attribute, replace_method


def test_an_attribute_is_put_back_whatever_happens() -> None:
    class Owner:
        name = "of the class"

    owner = Owner()
    for before in (None, "of the object"):
        if before:
            owner.name = before
        with pytest.raises(ZeroDivisionError), attribute(owner, "name", "for a moment"):
            assert owner.name == "for a moment"
            raise ZeroDivisionError
        assert owner.name == (before or "of the class") and ("name" in vars(owner)) == (before is not None)


class Counter:
    def __init__(self) -> None:
        self.counted = 0

    def count(self) -> int:
        self.counted += 1
        return self.counted


def test_a_replaced_method_is_put_back_and_no_copy_has_ours() -> None:
    counter = Counter()
    undo = replace_method(counter, "count", lambda: "ours")
    other = copy.deepcopy(counter)
    assert counter.count() == "ours" and other.count() == 1 and counter.counted == 0
    for _ in range(2):
        undo()
        assert "count" not in vars(counter) and counter.count() > 0


def test_a_method_of_the_object_itself_comes_back() -> None:
    counter, own = Counter(), (lambda: "own")
    counter.count = own  # type: ignore[method-assign,assignment]
    replace_method(counter, "count", lambda: "ours")()
    assert vars(counter)["count"] is own


def test_what_others_put_in_our_place_stays() -> None:
    counter: Any = Counter()
    undo = replace_method(counter, "count", lambda: "ours")
    counter.count = theirs = lambda: "theirs"
    undo()
    assert counter.count is theirs

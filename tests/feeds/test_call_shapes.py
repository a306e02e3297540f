"""Sizes of a module's arguments: what varies, which calls a graph fits, and which deserve one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fastloop.feeds import call_shapes
from fastloop.feeds.call_shapes import GRAPHS, Fitting, GraphLimit, Replays, Resized, Seen


def made_for(sizes: list[int], budget: GraphLimit | None = None) -> list[int]:
    """The places of the calls, of one tensor each, that a graph is made for; the others fit one or run eagerly."""
    budget, places = budget or GraphLimit(), list[int]()
    for place, size in enumerate(sizes):
        call = {"x": (size, 3)}
        new = not budget.fits(call)
        if new:
            budget.seen.note(call)
        deserves = new and budget.deserves()
        if deserves:
            budget.expect(call, budget.seen.varying)
            places.append(place)
        budget.count(captured=deserves, eager=new and not deserves)
    return places


def test_tensors_are_found_wherever_they_are() -> None:
    x = torch.zeros(2, 3)
    graph = SimpleNamespace(x=x, edges=[x, None], store=SimpleNamespace(y=x, name="a"))
    graph.store.back = graph  # as a graph library's batch refers to itself
    found = call_shapes.find_tensors((x, graph, None, 3), {"mask": None, "inputs": {"ids": x}})
    assert set(found) == {"args[0]", "args[1].x", "args[1].edges.0", "args[1].store.y", "inputs.ids"}
    assert all(each is x for each in found.values())


def test_modules_and_what_is_far_away_are_no_arguments() -> None:
    layer = torch.nn.Linear(2, 2)
    far: Any = torch.zeros(2)
    for _ in range(call_shapes.DEPTH):
        far = [far]
    assert call_shapes.find_tensors((layer, SimpleNamespace(layer=layer), far), {}) == {}
    many = [0] * call_shapes.MEMBERS
    assert list(call_shapes.find_tensors(([torch.zeros(2), *many, torch.zeros(2)],), {})) == ["args[0].0"]
    assert call_shapes.find_tensors((torch.nested.nested_tensor([torch.zeros(2)], layout=torch.jagged),), {}) == {}


@pytest.mark.parametrize(("replays", "more"), [(9, []), (0, [12])], ids=["replayed", "called"])
def test_a_short_last_batch_is_an_exception_beside_replayed_steps(
    replays: int, more: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replays call no module: after ten steps of 8, only the short batches are seen, one in ten of all."""
    monkeypatch.setattr(Replays, "count", 0)
    budget = GraphLimit()
    assert made_for([8] * 10, budget) == [0]
    places = []
    for epoch in range(20):
        Replays.count += replays
        places += [10 + epoch for _ in made_for([3], budget)]
    assert places == more


def test_what_varies_is_seen() -> None:
    seen = Seen()
    for length, count in [(7, 2), (9, 2), (7, 3)]:
        seen.note({"ids": (4, length), "pieces": (count, 5), "fixed": (4,)})
    seen.note({"fixed": (4, 1)})  # another number of dimensions says nothing of any
    assert seen.varying == {"ids": {1}, "pieces": {0}}
    merged = call_shapes.merge(seen.varying, {"ids": frozenset({0}), "other": frozenset({2})})
    assert merged == {"ids": [0, 1], "pieces": [0], "other": [2]}


def test_what_became_of_a_batchs_sizes() -> None:
    before, after = {"ids": (32, 70), "mask": (32, 70), "y": (32,)}, {"ids": (32, 91), "mask": (32, 91), "y": (32,)}
    assert call_shapes.find_changes(before, after) == {70: 91}
    assert call_shapes.find_changes(before, before) == {}
    assert call_shapes.find_changes({"ids": (32, 32)}, {"ids": (32, 40)}) == {}, "which of them changed is not known"
    assert call_shapes.find_changes({"x": (3,), "gone": (4,)}, {"x": (3, 1), "new": (5,)}) == {}


def test_what_a_graph_fits() -> None:
    fits = Fitting({"x": (4, 7), "y": (4,)}, {"x": frozenset({1}), "gone": frozenset({0})})
    assert fits({"y": (4,), "x": (4, 9)})
    unlike: list[Any] = [{"x": (5, 7), "y": (4,)}, {"x": (4, 1), "y": (4,)}, {"x": (4, 7)}, {"x": (4, 7, 1), "y": (4,)}]
    assert not any(fits(sizes) for sizes in unlike)


def test_the_last_batch_of_an_epoch_is_an_exception() -> None:
    budget = GraphLimit()
    assert made_for(([64] * 17 + [8]) * 20, budget) == [0] and budget.eager == 20
    assert not budget.spent
    late = GraphLimit()
    assert made_for(([64] * 4 + [8]) * 4, late) == [0, 14] and late.eager == 2  # one in five is none


@pytest.mark.parametrize(
    ("sizes", "places", "eager"),
    [
        ([64] * 20, [0], 0),
        ([64, 8], [0], 1),
        ([96, 96, 64] * 20, [0, 8], 2),  # pieces of a batch cut in parts
        ([8, *[64] * 20], [0, 3], 2),  # a short first one
        (list(range(2, 100)), [0, 3], 2),
        ([64] * 100 + [32] * 30, [0, 106], 6),  # another batch size from there on
        ([1, 5] * 20, [0, 5], 2),
    ],
)
def test_sizes_that_come_often_get_a_graph(sizes: list[int], places: list[int], eager: int) -> None:
    budget = GraphLimit()
    assert made_for(sizes, budget) == places and (budget.eager, budget.spent) == (eager, "")
    assert budget.calls == len(sizes)


@pytest.mark.parametrize(("chosen", "places"), [(True, [0, 20]), (False, [0, 23])])
def test_sizes_that_we_chose_get_a_graph_at_once(
    chosen: bool, places: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no exception after them does."""
    monkeypatch.setattr(Resized, "count", 0)
    budget = GraphLimit()
    first = made_for([8] * 20, budget)
    Resized.count += chosen
    assert first + [20 + place for place in made_for([64] * 20, budget)] == places
    one = GraphLimit()
    made_for([8] * 10, one)
    Resized.count += chosen
    assert made_for([8, 5], one) == [], "the chosen size had a graph already"


def test_a_storm_is_told_within_a_stated_count() -> None:
    budget = GraphLimit()
    for _ in range(GRAPHS):
        budget.count(captured=True, eager=False)
    for place in range(100):
        budget.count(captured=False, eager=place % 2 == 1)
    assert not budget.spent, "half of the calls are served"
    budget.count(captured=False, eager=True)
    assert budget.spent == "26 of the last 50 calls matched none of 2 graphs"
    at_once = GraphLimit()
    for _ in range(GRAPHS):
        at_once.count(captured=True, eager=False)
    for _ in range(call_shapes.ENOUGH):
        assert not at_once.spent
        at_once.count(captured=False, eager=True)
    assert at_once.spent == "10 of the last 10 calls matched none of 2 graphs"

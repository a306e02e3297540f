"""Walking batches: what is a container, what comes back as what it was."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from typing import Any

import numpy
import pytest
import torch

from fastloop.feeds.batch_tree import (
    BatchWindow,
    count_rows,
    count_samples,
    is_container,
    iterate_tensors,
    map_tensors,
    may_hide_tensors,
    rebuild,
    walk_storage,
    walk_tensors,
)
from tests.feeds.containers import Bare, Counted, Graphs, Pair, Record


class Closed:
    """No container to us."""

    def __init__(self) -> None:
        self.x = torch.zeros(3)


def batches() -> dict[str, Any]:
    x, y = torch.arange(6.0).reshape(3, 2), torch.arange(3)
    return {
        "tensor": x,
        "list": [x, y],
        "tuple": (x, y),
        "dict": {"x": x, "deep": [{"y": y}]},
        "named": Pair(x, y),
        "ordered": OrderedDict(x=x, y=y),
        "mapping": UserDict(x=x, y=y),
        "record": Record(x, "a"),
    }


@pytest.mark.parametrize("kind", batches())
def test_map_tensors_keeps_the_structure(kind: str) -> None:
    batch = batches()[kind]
    doubled = map_tensors(batch, lambda tensor: tensor * 2)
    assert type(doubled) is type(batch)
    for before, after in zip(iterate_tensors(batch), iterate_tensors(doubled), strict=True):
        assert torch.equal(after, before * 2)
    assert all(not torch.equal(a, b) for a, b in zip(iterate_tensors(batch), iterate_tensors(doubled), strict=True))


@pytest.mark.parametrize("kind", batches())
def test_samples_is_the_first_dimension(kind: str) -> None:
    assert count_rows(batches()[kind]) == 3


def test_samples_skips_numbers_and_says_none() -> None:
    assert count_rows([torch.tensor(1.0), torch.zeros(4, 2)]) == 4
    assert count_rows(torch.tensor(1.0)) is None
    assert count_rows({"names": ["a", "b"]}) is None
    assert count_rows(Closed()) is None


def test_members_that_are_no_tensors_are_handed_through() -> None:
    names, closed = ["a", "b"], Closed()
    out = map_tensors({"names": names, "closed": closed, "none": None, "x": torch.zeros(2)}, lambda tensor: tensor + 1)
    assert out["names"] == names and out["closed"] is closed and out["none"] is None
    assert torch.equal(out["x"], torch.ones(2))


def test_rebuild_says_when_it_cannot() -> None:
    assert is_container(Counted(torch.zeros(1))) and not is_container(Closed()) and not is_container(Counted)
    with pytest.raises(ValueError, match="made"):
        rebuild(Counted(torch.zeros(1)), lambda member: member)


# -- objects ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", batches())
def test_walking_finds_what_is_in_containers(kind: str) -> None:
    batch = batches()[kind]
    assert [id(each) for each in walk_tensors(batch)] == [id(each) for each in iterate_tensors(batch)]


@pytest.mark.parametrize("layout", ["coo", "csr", "csc", "bsr", "bsc"])
def test_a_sparse_tensor_is_stored_in_its_parts(layout: str) -> None:
    kind = getattr(torch, f"sparse_{layout}")
    sparse = torch.eye(4).to_sparse(layout=kind, **({"blocksize": (2, 2)} if layout[0] == "b" else {}))
    found = [*walk_storage([sparse, torch.zeros(3)])]
    assert all(each.layout is torch.strided for each in found) and sum(each.nbytes for each in found) > 12
    assert len(found) == (3 if layout == "coo" else 4)


def test_samples_of_a_nested_tensor_which_has_no_shape() -> None:
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    assert count_rows([nested]) == count_rows(nested) == count_samples((nested,), [2]) == 2


def test_walking_finds_tensors_of_objects_that_can_be_moved() -> None:
    graphs = Graphs(3, 20)
    assert [*walk_tensors([graphs, torch.ones(1)])][:-1] == [*graphs.store.values()]
    assert [*iterate_tensors(graphs)] == []  # what can be rebuilt is another matter
    bare = Bare(x=torch.zeros(2), deep=Bare(y=[torch.zeros(3)]))
    assert [each.shape[0] for each in walk_tensors(bare)] == [2, 3]
    # Neither what nothing can move, nor a model that a batch refers to, nor a class.
    assert [*walk_tensors([Closed(), torch.nn.Linear(2, 2), Graphs, Bare(model=torch.nn.Linear(2, 2))])] == []


def test_objects_that_may_hide_tensors() -> None:
    """Those that no walk looks into: what they hold on the device, nobody can tell the allocator about."""
    seen = [torch.zeros(1), {"ids": [1, "a", None]}, Counted(torch.zeros(1)), Graphs(3, 20), Bare(x=[torch.zeros(1)])]
    assert not any(map(may_hide_tensors, [*seen, seen, numpy.zeros(2)]))
    for hidden in (Closed(), [torch.zeros(1), Closed()], {"a": Closed()}, Bare(x=Closed()), Bare(x=[Closed()])):
        assert may_hide_tensors(hidden) and [*walk_tensors(hidden)] in ([], [hidden[0]] if type(hidden) is list else [])


class Refuses:
    @property
    def batch_size(self) -> int:
        raise ValueError("unknown")


def test_an_object_says_itself_how_many_samples_it_has() -> None:
    assert count_samples(Graphs(3, 20), claims=(20,)) == 3
    assert count_samples(Bare(batch_size=5, x=torch.zeros(40, 2))) == 5
    assert count_samples(Bare(batch_size=torch.Size([6, 2]), x=torch.zeros(6, 2))) == 6
    assert count_samples(BatchWindow([Graphs(3, 20), Graphs(2, 9)])) == 5
    # Nothing useful said: the first dimension of the first tensor.
    for useless in (None, 0, True, "8", torch.tensor(8)):
        assert count_samples(Bare(batch_size=useless, x=torch.zeros(7, 2))) == 7, useless
    assert count_samples(Refuses(), claims=(4,)) is None


def test_a_count_that_would_read_the_device_is_not_asked_for() -> None:
    class Asked(Bare):
        @property
        def num_graphs(self) -> int:
            raise AssertionError("this waits for the device")

    class OnCuda(torch.Tensor):
        is_cuda = True  # type: ignore[assignment]

    of_nodes = torch.zeros(7).as_subclass(OnCuda)
    assert count_samples(Asked(x=torch.zeros(7, 2), batch=of_nodes)) == 7
    told = Bare(x=torch.zeros(7, 2), batch=of_nodes, ptr=torch.zeros(3), num_graphs=2)
    assert count_samples(told) == 2


def test_a_claim_counts_where_the_batch_bears_it_out() -> None:
    images, targets = tuple(torch.zeros(3, 8, 8) for _ in range(4)), tuple({"box": torch.zeros(2, 4)} for _ in range(4))
    detection = (images, targets)
    assert count_rows(detection) == 3  # channels
    assert count_samples(detection, claims=(None, 4)) == 4
    assert count_samples(detection, claims=(11,)) == 3
    edges = {"edge_index": torch.zeros(2, 90), "y": torch.zeros(16)}
    assert count_samples(edges, claims=(None, 16)) == 16
    # Tokens given as batch_size, and a loader of ready-made batches, which draws one sample each: not borne out.
    text = {"input_ids": torch.zeros(8, 32), "labels": torch.zeros(8, 32)}
    assert count_samples(text, claims=(256, 1)) == 8
    # The first claim that is borne out is believed.
    views = {"x": torch.zeros(32, 2), "y": torch.zeros(16)}
    assert count_samples(views, claims=(32, 16)) == 32 and count_samples(views, claims=(16, 32)) == 16


class Plain:
    """Nothing can move it: its owner's transfer hook does."""

    def __init__(self, **members: Any) -> None:
        self.__dict__.update(members)


def test_samples_are_counted_in_a_plain_object_too() -> None:
    x, y = torch.zeros(2, 16), torch.zeros(16)
    assert count_samples(Plain(x=y)) == count_samples((Plain(x=y), {"epoch": 3})) == 16
    assert count_samples(Plain(sequence_first=x, y=y), claims=(None, 16)) == 16
    assert count_samples([Plain(pictures=[torch.zeros(3, 8, 8)] * 4)], claims=(4,)) == 4
    assert count_samples(Plain(sequence_first=x, y=y), claims=(512,)) == 2, "tokens"
    # What it refers to may be anything: a model, a dataset, itself.
    for other in (torch.nn.Linear(2, 2), Plain(x=y), Plain):
        assert count_samples(Plain(other=other)) is None, other
    loop = Plain(y=y)
    loop.owner = loop  # type: ignore[attr-defined]
    assert count_samples(loop, claims=(3,)) == 16 and may_hide_tensors(loop) and not [*walk_tensors(loop)]


def test_a_length_is_the_last_resort() -> None:
    class Sized:
        def __len__(self) -> int:
            return 9

    assert count_samples(Sized()) == 9
    assert count_samples(["a", "b"]) is None and count_samples(["a", "b"], claims=(2,)) == 2
    assert count_samples("text") is None and count_samples({}) is None and count_samples(torch.tensor(1.0)) is None

"""What a dataset's objects and code say about workers, without taking a sample."""

from __future__ import annotations

import functools
import io
import itertools
import multiprocessing
import queue
import random
import socket
import sqlite3
import types
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from fastloop.evidence.samples import dataset as dataset_module
from fastloop.evidence.samples.dataset import find_worker_hazards, list_asking, list_long, walk
from fastloop.evidence.samples.random_draws import draws_random


class Items(Dataset):
    """Holds what a test gives it."""

    def __init__(self, **members: Any) -> None:
        self.__dict__.update(members)

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return index


class Counting(Items):
    def __getitem__(self, index: int) -> int:
        self.count += 1
        return index


class CountingInFull(Items):
    def __getitem__(self, index: int) -> int:
        self.seen = self.seen + 1
        return index


class Caching(Items):
    """Writes to itself without counting: every worker fills its own cache, and the samples stay what they are."""

    def __getitem__(self, index: int) -> int:
        self.last = index * 2
        return self.last


class SetsEpoch(Items):
    def set_epoch(self, epoch: int) -> None: ...


def fake(module: str, name: str) -> Any:
    return type(name, (), {"__module__": module})()


def test_a_plain_dataset_is_fit_for_workers() -> None:
    plain = Items(
        paths=["a"] * 10,
        table={"a": 1},
        array=np.zeros(3),
        memory=io.BytesIO(b"x"),
        tensor=torch.zeros(3),
        root=Path("/"),
        transform=str.upper,
    )
    assert find_worker_hazards(plain) == () and find_worker_hazards(TensorDataset(torch.zeros(3))) == ()
    assert find_worker_hazards(Caching()) == () and find_worker_hazards(Subset(plain, [0])) == ()


@pytest.mark.parametrize(
    ("member", "handle"),
    [
        (fake("h5py._hl.files", "File"), "h5py"),
        (fake("lmdb.cpython", "Environment"), "lmdb"),
        (fake("builtins", "Environment"), "lmdb"),
        (fake("tables.file", "File"), "tables"),
    ],
)
def test_open_handles_are_named(member: Any, handle: str) -> None:
    found = find_worker_hazards(Subset(Items(store={"train": [member]}), [0]))
    assert found == (f"dataset.dataset.store['train'][0] is an open {handle} handle; open it in __getitem__ instead",)


def test_a_real_sqlite_connection_and_a_real_file(tmp_path: Path) -> None:
    connection = sqlite3.connect(tmp_path / "a.db")
    assert find_worker_hazards(Items(db=connection)) == (
        "dataset.db is an open sqlite3 handle; open it in __getitem__ instead",
    )
    connection.close()
    with open(tmp_path / "a.bin", "wb+") as file:
        assert find_worker_hazards(Items(f=file)) == (
            "dataset.f is an open file handle; open it in __getitem__ instead",
        )


def test_an_archive_of_arrays_is_a_handle(tmp_path: Path) -> None:
    """Its namespace of names raises where it is asked for its class."""
    np.savez(tmp_path / "arrays.npz", x=np.zeros(3))
    data = Items()
    data.arrays = np.load(tmp_path / "arrays.npz")  # type: ignore[attr-defined]
    with data.arrays:  # type: ignore[attr-defined]
        found = find_worker_hazards(data)
    assert "dataset.arrays.fid is an open file handle; open it in __getitem__ instead" in found


def test_handles_hidden_in_callables_are_found() -> None:
    handle = fake("h5py", "File")

    class Reader:
        def __init__(self) -> None:
            self.h5 = handle

        def read(self, index: int) -> int:
            return index

    def closure(index: int) -> Any:
        return handle, index

    assert find_worker_hazards(Items(read=Reader().read))[0].startswith("dataset.read.__self__.h5 is an open h5py")
    assert find_worker_hazards(Items(read=functools.partial(len, handle)))[0].startswith(
        "dataset.read.args[0] is an open"
    )
    assert find_worker_hazards(Items(read=closure))[0].startswith("dataset.read.<closure handle> is an open h5py")


def test_cuda_tensors_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Cuda(torch.Tensor):
        is_cuda = True

    tensor = torch.zeros(2).as_subclass(Cuda)
    assert find_worker_hazards(TensorDataset(torch.zeros(2), tensor)) == (
        "dataset.tensors[1] is a CUDA tensor, which a forked worker cannot use",
    )


@pytest.mark.parametrize(
    ("dataset", "place"),
    [
        (SetsEpoch(), "dataset has a set_epoch(), so it may change between epochs"),
        (Items(epoch=0), "dataset.epoch may change between epochs"),
        (Items(_epoch=0), "dataset._epoch may change between epochs"),
        (Counting(count=0), "dataset.count changes between epochs or samples"),
        (CountingInFull(seen=0), "dataset.seen changes between epochs or samples"),
        (
            ConcatDataset([Items(), SetsEpoch()]),
            "dataset.datasets[1] has a set_epoch(), so it may change between epochs",
        ),
    ],
)
def test_state_that_changes_between_epochs_is_named(dataset: Any, place: str) -> None:
    assert find_worker_hazards(dataset) == (f"{place}, and workers hold copies of it",)


def test_looking_touches_nothing() -> None:
    class Lazy(Mapping):
        """Like h5py or a remote table: asking loads."""

        def __getitem__(self, key: Any) -> Any:
            raise AssertionError("was asked for a member")

        def __iter__(self) -> Iterator[Any]:
            raise AssertionError("was iterated")

        def __len__(self) -> int:
            return 10**9

    class Untouched(Items):
        def __getitem__(self, index: int) -> int:
            raise AssertionError("a sample was taken")

    dataset = Untouched(table=Lazy(), module=types, many=list(range(10**6)))
    assert find_worker_hazards(dataset) == () and draws_random(dataset) == ()


def test_walking_is_bounded_and_ends_in_circles() -> None:
    ring = Items()
    ring.ring = ring
    deep: Any = "end"
    for _ in range(50):
        deep = [deep]
    wide = Items(ring=ring, deep=deep, many=[[number] for number in range(10_000)])
    paths = [path for path, _ in walk(wide)]
    assert len(paths) < 300 and "dataset.ring" in paths and "dataset.ring.ring" not in paths


# -- what copies in workers would mix up or change -------------------------------------------------------------------


class Remote:
    """A user's own client, with its connection somewhere inside."""

    def __init__(self, connection: Any) -> None:
        self.pool = {"one": connection}


CONNECTION = socket.socket()
CONNECTION.close()
REMOTE = Remote(CONNECTION)


class AsksGlobal(Items):
    def __getitem__(self, index: int) -> Any:
        return self.ask(index)

    def ask(self, index: int) -> Any:
        return REMOTE, index


def ask_global(samples: Any) -> Any:
    return REMOTE, samples


class AsksClass(Items):
    remote, unused = REMOTE, Remote(CONNECTION)

    def __getitem__(self, index: int) -> Any:
        return self.remote, index


class HidesClass(AsksClass):
    remote = None  # type: ignore[assignment]


@functools.cache
def open_once(_name: str = "") -> Remote:
    with socket.socket() as made:
        return Remote(made)


@functools.lru_cache(maxsize=2)
def open_twice(_name: str = "") -> Remote:
    with socket.socket() as made:
        return Remote(made)


class AsksCached(Items):
    def __getitem__(self, index: int) -> Any:
        return self.opens(), index


@pytest.mark.parametrize(
    ("member", "reason"),
    [
        (CONNECTION, "is a connection or its client"),
        (Remote(CONNECTION), "is a connection or its client"),
        (fake("redis.client", "Redis"), "is a connection or its client"),
        (fake("requests.sessions", "Session"), "is a connection or its client"),
        (fake("botocore.client", "S3"), "is a connection or its client"),
        (fake("psycopg2.extensions", "connection"), "is a connection or its client"),
        (fake("zmq.sugar.socket", "Socket"), "is a connection or its client"),
        (fake("grpc._channel", "Channel"), "is a connection or its client"),
        (queue.Queue(), "runs threads or processes"),
        (ThreadPoolExecutor(1), "runs threads or processes"),
        ((number for number in range(3)), "is an iterator"),
        (itertools.count(), "is an iterator"),
        (np.random.default_rng(0), "is a random generator"),
        (random.Random(0), "is a random generator"),
        (torch.Generator(), "is a random generator"),
        (torch.optim.SGD([torch.zeros(1)], lr=0.1), "is part of the training"),
    ],
)
def test_what_workers_would_share_or_copy_is_named(member: Any, reason: str) -> None:
    (found,) = find_worker_hazards(Items(member=member))
    assert found.startswith("dataset.member") and reason in found
    assert reason in find_worker_hazards(Items(), functools.partial(max, member))[0]


@pytest.mark.parametrize("opens", [open_once, open_twice])
def test_what_a_cached_function_has_returned_is_looked_at(opens: Any) -> None:
    opens.cache_clear()
    assert find_worker_hazards(AsksCached(opens=opens)) == (), "each worker will open its own"
    opens("a")
    (found,) = find_worker_hazards(AsksCached(opens=opens))
    assert found.startswith("dataset.opens.<cache>") and "(socket) is a connection or its client" in found
    opens.cache_clear()


@pytest.mark.parametrize("dataset", [AsksClass(remote=None), HidesClass()], ids=["by the object", "by a subclass"])
def test_what_a_class_keeps_and_another_value_hides_is_no_hazard(dataset: Any) -> None:
    assert find_worker_hazards(dataset) == () != find_worker_hazards(AsksClass())


def test_what_a_dataset_reads_from_its_module_is_looked_at() -> None:
    assert find_worker_hazards(AsksGlobal())[0].startswith("REMOTE.pool['one'] (socket) is a connection")
    assert find_worker_hazards(Items(), ask_global)[0].startswith("REMOTE.pool['one'] (socket) is a connection")

    (found,) = find_worker_hazards(AsksClass())
    assert found.startswith("dataset.remote.pool['one'] (socket) is a connection")

    class NamesOnly(Items):
        def __getitem__(self, index: int) -> Any:
            return index.REMOTE  # type: ignore[attr-defined]

    assert find_worker_hazards(NamesOnly()) == ()


def test_what_a_method_reads_from_the_function_around_its_class_is_looked_at() -> None:
    held: dict[str, Any] = {}

    class Asks(Items):
        def __getitem__(self, index: int) -> Any:
            return held["one"], index

    assert find_worker_hazards(Asks()) == ()
    held["one"] = CONNECTION
    assert find_worker_hazards(Asks())[0].startswith("held['one'] (socket) is a connection")


CALLS = 0
SEEN: list[int] = []


class ByHelper(Items):
    def __getitem__(self, index: int) -> int:
        return self.look(index)

    def look(self, index: int) -> int:
        self.lookups += 1
        return index


class InTable(Items):
    def __getitem__(self, index: int) -> int:
        self.counts["all"] += 1
        return index


class OnClass(Items):
    total = 0

    def __getitem__(self, index: int) -> int:
        type(self).total += 1
        return index


class Collects(Items):
    def __getitem__(this, index: int) -> int:
        this.order.append(index)
        return index


class Moves(Items):
    def __getitem__(self, index: int) -> int:
        self.state = hash(self.state)
        return index


class CountsCalls:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, sample: Any) -> Any:
        self.calls += 1
        return sample


def count_globally(samples: Any) -> Any:
    global CALLS
    CALLS += 1
    return samples


def collect_globally(samples: Any) -> Any:
    SEEN.append(len(samples))
    return samples


def make_counter() -> Any:
    calls = 0

    def count(samples: Any) -> Any:
        nonlocal calls
        calls += 1
        return samples

    return count


@pytest.mark.parametrize(
    ("dataset", "collate", "place"),
    [
        (ByHelper(lookups=0), None, "dataset.lookups"),
        (InTable(counts={"all": 0}), None, "dataset.counts"),
        (OnClass(), None, "dataset.total"),
        (Collects(order=[]), None, "dataset.order"),
        (Moves(state=1), None, "dataset.state"),
        (Items(transform=CountsCalls()), None, "dataset.transform.calls"),
        (Items(), CountsCalls(), "collate_fn.calls"),
        (Items(), count_globally, "collate_fn (the outer CALLS)"),
        (Items(), collect_globally, "collate_fn (the outer SEEN)"),
        (Items(), make_counter(), "collate_fn (the outer calls)"),
    ],
)
def test_counters_under_any_name_are_found(dataset: Any, collate: Any, place: str) -> None:
    expected = f"{place} changes between epochs or samples, and workers hold copies of it"
    assert find_worker_hazards(dataset, collate) == (expected,)


def augment(sample: Any) -> Any:
    augment.calls += 1  # type: ignore[attr-defined]
    return sample


augment.calls = 0  # type: ignore[attr-defined]


class CountsOnFunction(Items):
    def __getitem__(self, index: int) -> Any:
        return augment(index)


class CollectsInDefault(Items):
    def __getitem__(self, index: int, seen: list[int] = []) -> Any:  # noqa: B006
        seen.append(index)
        return len(seen)


def remember(sample: Any, *, log: list[Any] = []) -> Any:  # noqa: B006
    log.append(sample)
    return len(log)


class CollectsInDefaultOfHelper(Items):
    def __getitem__(self, index: int) -> Any:
        return remember(index)


@pytest.mark.parametrize(
    ("dataset", "place"),
    [
        (CountsOnFunction(), "(the outer augment)"),
        (CollectsInDefault(), "(the default of seen)"),
        (CollectsInDefaultOfHelper(), "(the default of log)"),
    ],
)
def test_what_functions_keep_is_found(dataset: Any, place: str) -> None:
    expected = f"dataset {place} changes between epochs or samples, and workers hold copies of it"
    assert find_worker_hazards(dataset) == (expected,)


class Seeded(Items):
    def __getitem__(self, index: int) -> Any:
        return torch.initial_seed() + index


class Asking(Items):
    def __getitem__(self, index: int) -> Any:
        return index if torch.utils.data.get_worker_info() is None else -index


class AskingByHelper(Items):
    def __getitem__(self, index: int) -> Any:
        return find_process(), index


def find_process() -> str:
    return multiprocessing.current_process().name


def test_samples_that_depend_on_their_process_are_named() -> None:
    assert draws_random(Seeded()) == ("Seeded.__getitem__",)
    assert list_asking(Asking()) == ("Asking.__getitem__",)
    assert list_asking(AskingByHelper()) == ("find_process",)
    assert list_asking(Harmless()) == list_asking(Seeded()) == () == draws_random(Asking())


helpers = types.ModuleType("helpers_of_the_user")
exec("def add(one, other):\n    return one + other\n\ndef read(path):\n    return path\n", vars(helpers))


class Harmless(Items):
    """What ordinary datasets do for a sample."""

    def __init__(self) -> None:
        super().__init__(cache={}, file=None, log=None)
        self.made = [1]
        self.made.append(2)

    def __getitem__(self, index: int) -> Any:
        self.file = self.file or Path("/")
        self.log = None if self.log is None else self.log
        if index not in self.cache:
            self.cache[index] = index
        rows, count = [], 0
        rows.append(np.append([1], [2]))
        count += 1
        label: dict[str, int] = {}
        label.update(a=count)
        helpers.read(helpers.add(index, self.look_up(index)))
        return self.cache[index], rows, label

    def look_up(self, index: int, known: dict[int, int] = {}, parts: list[int] = []) -> int:  # noqa: B006
        if index not in known:
            known[index] = index
        parts = [*parts]
        parts.append(index)
        return known[index]


def stack(samples: Any) -> Any:
    parts = {"x": []}
    for sample in samples:
        parts["x"].append(sample)
    return parts


def test_what_ordinary_datasets_do_is_no_state() -> None:
    assert find_worker_hazards(Harmless(), stack) == ()
    assert find_worker_hazards(Items(transform=functools.partial(stack)), lambda samples: stack(samples)) == ()
    assert find_worker_hazards(Subset(TensorDataset(torch.zeros(3)), [0]), torch.utils.data.default_collate) == ()


def test_transforms_of_libraries_are_no_state() -> None:
    from torchvision import transforms

    composed = transforms.Compose([transforms.RandomCrop(8), transforms.ColorJitter(), transforms.ToTensor()])
    assert find_worker_hazards(Items(transform=composed)) == ()


def test_long_lists_are_told_with_their_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataset_module, "_MANY_OBJECTS", 50)
    table = Items(paths=["a"] * 60, short=["a"] * 49, array=np.zeros(60), inner=Items(by_name=dict.fromkeys(range(50))))
    expected = (
        "dataset.paths holds 0.0 million Python objects",
        "dataset.inner.by_name holds 0.0 million Python objects",
    )
    assert list_long(table) == expected and list_long(TensorDataset(torch.zeros(60))) == ()

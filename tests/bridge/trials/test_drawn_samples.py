"""What a loader hands out, noted in the order of use."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from fastloop.bridge.trials.drawn_samples import Batch, Drawn, listen
from fastloop.feeds.device_prefetcher import DeviceFeed
from fastloop.feeds.lazy_loader import LazyLoader, clone
from fastloop.feeds.window_batches import WindowSampler


class Ids(Dataset[Any]):
    """Hands out the id it was asked for."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: Any) -> Any:
        return torch.tensor(index)


class Stream(IterableDataset[Any]):
    def __init__(self, augmented: float = 0.0) -> None:
        self.augmented = augmented

    def __iter__(self) -> Iterator[Any]:
        for number in range(20):
            yield torch.full((3, 8, 8), number + self.augmented), number


def shuffled(**settings: Any) -> DataLoader[Any]:
    return DataLoader(Ids(), batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(0), **settings)


def all_of(drawn: Drawn) -> list[Batch]:
    return list(iter(drawn.take, None))


def ids(drawn: Drawn) -> list[int]:
    noted = array("q")
    for batch in all_of(drawn):
        noted.frombytes(b"".join(batch.streams))
    return list(noted)


@pytest.mark.parametrize("workers", [0, 2])
def test_the_ids_in_the_order_of_use_and_the_users_loader_as_it_was(workers: int) -> None:
    given = shuffled(num_workers=workers)
    before = dict(vars(given))
    loader, drawn = listen(given, given)
    assert loader is not given and type(loader) is DataLoader and vars(given) == before
    used = [batch.tolist() for batch in loader]
    assert used == [batch.tolist() for batch in shuffled()] and ids(drawn) == [each for batch in used for each in batch]
    assert drawn.why is None and drawn.source == "sampler" and len(loader) == 3


def test_counts_and_epochs_cut_short() -> None:
    loader, drawn = listen(given := shuffled(num_workers=1, prefetch_factor=4), given)
    first = next(iter(loader)).tolist()
    assert drawn.take() == Batch((array("q", first).tobytes(),), 8, None)
    batches = list(loader)  # all that was read ahead is forgotten
    assert [batch.samples for batch in all_of(drawn)] == [8, 8, 4] and drawn.take() is None and len(batches) == 3


def test_other_cuts_have_the_same_bytes() -> None:
    def stream(size: int) -> bytes:
        loader, drawn = listen(given := DataLoader(Ids(), batch_size=size), given)
        list(loader)
        return b"".join(batch.streams[0] for batch in all_of(drawn))

    assert stream(8) == stream(20) == stream(3)


def test_ids_may_be_anything() -> None:
    class Names(Ids):
        def __getitem__(self, index: Any) -> Any:
            return len(index)

    order = [f"sample {n}" for n in range(6)]
    found = []
    for size in (2, 3):
        loader, drawn = listen(given := DataLoader(Names(), batch_sampler=BatchSampler(order, size, False)), given)
        list(loader)
        found.append(b"".join(batch.streams[0] for batch in all_of(drawn)))
    assert found[0] == found[1] and len(found[0]) == 6 * 8 == 8 * len(set(array("q", found[0])))


def test_a_batch_of_ids_may_be_a_tensor() -> None:
    batches = [torch.tensor([3, 1]), torch.tensor([2])]
    loader, drawn = listen(given := DataLoader(Ids(), batch_sampler=batches), given)  # type: ignore[arg-type]
    list(loader)
    found = all_of(drawn)
    assert [batch.samples for batch in found] == [2, 1]
    assert b"".join(batch.streams[0] for batch in found) == array("q", [3, 1, 2]).tobytes()


def test_a_sampler_without_batches() -> None:
    sampler = BatchSampler(RandomSampler(Ids(), generator=torch.Generator().manual_seed(0)), 8, False)
    loader, drawn = listen(given := DataLoader(Ids(), batch_size=None, sampler=sampler), given)
    used = [batch.tolist() for batch in loader]
    batches = all_of(drawn)
    assert [batch.samples for batch in batches] == [None] * 3 and len(used[0]) == 8
    assert batches[0].streams[0] == array("q", used[0]).tobytes()
    single, drawn = listen(given := DataLoader(Ids(), batch_size=None), given)
    list(single)
    assert ids(drawn) == list(range(20))


@pytest.mark.parametrize("changed", [True, False], ids=["our copy inside", "the user's own inside"])
def test_inside_our_stand_ins(changed: bool) -> None:
    given = shuffled()
    inner = clone(given, {"pin_memory": False}) if changed else given
    feed = DeviceFeed(inner, depth=2, device=torch.device("cpu"), stage=lambda batch: batch)
    loader, drawn = listen(feed, given)
    assert loader is feed and (feed.inner is inner) == changed and type(given.batch_sampler) is BatchSampler
    iterator = iter(loader)
    first = next(iterator)
    assert [len(drawn.take().streams[0]) // 8] == [len(first)]  # type: ignore[union-attr]
    rest = list(iterator)
    assert ids(drawn) == torch.cat(rest).tolist(), "in the order of use, however far the feed looked ahead"


def test_merged_windows_keep_the_sizes_of_their_parts() -> None:
    given = shuffled()
    inner = clone(given, {"batch_sampler": WindowSampler(given.batch_sampler, 2)})  # type: ignore[arg-type]
    loader, drawn = listen(LazyLoader(inner), given)
    assert [len(batch) for batch in loader] == [16, 4]
    assert [batch.window for batch in all_of(drawn)] == [(8, 8), (4,)]


def test_nothing_random_is_drawn_and_a_loader_that_comes_again_is_known() -> None:
    torch.manual_seed(5)
    plain = [batch.tolist() for _ in range(2) for batch in DataLoader(Ids(), batch_size=8, shuffle=True)]
    torch.manual_seed(5)
    given = DataLoader(Ids(), batch_size=8, shuffle=True)
    loader, drawn = listen(given, given)
    used = [batch.tolist() for _ in range(2) for batch in loader]
    assert used == plain
    again, same = listen(loader, loader)
    assert again is loader and same is drawn and drawn.take() is None


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_that_can_say_where_it_stands_still_can(workers: int) -> None:
    def made() -> StatefulDataLoader[Any]:
        return StatefulDataLoader(
            Ids(), batch_size=4, shuffle=True, num_workers=workers, generator=torch.Generator().manual_seed(0)
        )

    def resumed(noted: bool) -> list[Any]:
        first = listen(given := made(), given)[0] if noted else made()
        iterator = iter(first)
        next(iterator), next(iterator)
        state = first.state_dict()
        second = listen(given := made(), given)[0] if noted else made()
        second.load_state_dict(state)
        return [batch.tolist() for batch in second]

    assert resumed(noted=True) == resumed(noted=False) and len(resumed(noted=True)) == 3


# -- content ----------------------------------------------------------------------------------------------------------


def marks(loader: Any) -> tuple[list[bytes], Drawn]:
    heard, drawn = listen(loader, loader)
    list(heard)
    batches = all_of(drawn)
    return [b"".join(parts) for parts in zip(*(batch.streams for batch in batches), strict=True)], drawn


@pytest.mark.parametrize("workers", [0, 1])
def test_a_stream_is_known_by_its_labels(workers: int) -> None:
    found, drawn = marks(DataLoader(Stream(), batch_size=8, num_workers=workers))
    assert drawn.source == "content" and drawn.why is None
    assert found == marks(DataLoader(Stream(augmented=0.5), batch_size=5))[0], "not by its augmented images"
    assert (
        found != marks(DataLoader([(torch.zeros(3, 8, 8), n + 1) for n in range(20)], batch_size=8, in_order=False))[0]
        and len(found) == 1
    )


def test_without_labels_by_a_few_numbers_of_everything() -> None:
    class Images(IterableDataset[Any]):
        def __init__(self, last: float) -> None:
            self.last = last

        def __iter__(self) -> Iterator[Any]:
            yield from (torch.full((3, 9, 9), float(n)) for n in range(5))
            yield torch.full((3, 9, 9), self.last)

    found, _ = marks(DataLoader(Images(1.0), batch_size=4))
    assert found == marks(DataLoader(Images(1.0), batch_size=3))[0] != marks(DataLoader(Images(2.0), batch_size=4))[0]
    assert len(found[0]) == 6 * 27 * 4, "a few numbers of each image"


LEAVES = {
    "scalar": torch.tensor(3.0),
    "empty": torch.zeros(4, 0),
    "bool": torch.ones(4, dtype=torch.bool),
    "bf16": torch.ones(4, 2, dtype=torch.bfloat16),
    "complex": torch.ones(4, dtype=torch.complex64),
    "channels last": torch.ones(4, 3, 2, 2).to(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("leaf", list(LEAVES.values()), ids=list(LEAVES))
def test_any_tensor_has_a_mark(leaf: torch.Tensor) -> None:
    class Own:
        def __iter__(self) -> Iterator[Any]:
            yield {"leaf": leaf}

    assert len(marks(Own())[0]) == 1


class Foreign:
    """A loader of somebody's own, with workers and a length of its own."""

    num_workers = 3

    def __len__(self) -> int:
        return 2

    def __iter__(self) -> Iterator[Any]:
        yield from (torch.arange(4), torch.arange(4, 8))


def test_a_loader_of_ones_own_stays_what_it_is() -> None:
    loader, drawn = listen(given := Foreign(), given)
    assert loader is given and isinstance(loader, Foreign) and type(loader).__name__ == "Foreign"
    assert len(loader) == 2 and loader.num_workers == 3
    assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]] and len(all_of(drawn)) == 2
    assert listen(loader, loader)[1] is drawn and len(list(loader)) == 2 and len(all_of(drawn)) == 2
    other, own = listen(Foreign(), None)
    assert own is not drawn and len(list(other)) == 2 and drawn.take() is None


def test_what_cannot_be_listened_to_says_so_and_works() -> None:
    batches = [torch.ones(2), torch.ones(2)]
    loader, drawn = listen(batches, batches)
    assert list(loader) == batches and "batches of a list cannot be recorded" in str(drawn.why)

    class ByIndex:
        def __getitem__(self, index: int) -> Any:
            return batches[index]

    loader, drawn = listen(given := ByIndex(), given)
    assert len(list(loader)) == 2 and drawn.why == "a ByIndex is read by index"


def test_batches_without_tensors_on_the_host() -> None:
    class Meta:
        def __iter__(self) -> Iterator[Any]:
            yield torch.ones(2, device="meta")

    _, drawn = marks(Meta())
    assert "already on the device" in str(drawn.why)

"""Reads the current state of the train loaders: their iterators, queues and workers. Changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sized
from typing import Any

from torch.utils.data import BatchSampler, IterableDataset

from fastloop.evidence import loader_queue, machine
from fastloop.feeds.device_prefetcher import DeviceFeed
from fastloop.feeds.images import decode_time
from fastloop.feeds.images.nested import find_user_dataset
from fastloop.feeds.lazy_loader import LazyLoader, ReadAhead, SameOrder
from fastloop.feeds.rows.reading import read_facts as read_rows
from fastloop.records.facts import RowFacts


def measure_decode_ms(trainer: Any) -> float | None:
    """Measure the time to decode one of the train loader's image files, by reading a few of them after the training.
    None if its samples are not image files."""
    for loader in find_loaders(trainer):
        dataset = find_user_dataset(getattr(loader, "dataset", None))
        if (found := decode_time.measure_decode_ms(dataset)) is not None:
            return found
    return None


def find_rows(trainer: Any) -> str | None:
    """Return the class of a train loader's dataset if its samples are rows in memory that are picked one by one."""
    loaders = [loader for loader in find_loaders(trainer) if _find_engine(loader) is None]
    found = (read_rows(getattr(loader, "dataset", None)) for loader in loaders)
    return next((rows.what for rows in found if isinstance(rows, RowFacts)), None)


def find_loaders(trainer: Any) -> list[Any]:
    """Return the train loaders that the Trainer iterates, as a flat list; empty before it has them."""
    # Lightning has no public access to them: `trainer.train_dataloader` returns the user's own nesting.
    return list(getattr(getattr(trainer.fit_loop, "_combined_loader", None), "flattened", []))


def list_without_workers(trainer: Any) -> list[tuple[str, Any]]:
    """List those of several train loaders that have no workers, each with its name: its key, if it has one, and its
    dataset's class. Empty if there is only one loader."""
    found = find_loaders(trainer)
    if len(found) < 2:
        return []
    nest = getattr(trainer.fit_loop._combined_loader, "iterables", None)
    keys = {id(loader): f"{key!r} " for key, loader in nest.items()} if isinstance(nest, Mapping) else {}
    own = [each for each in found if _find_engine(each) is None and getattr(each, "num_workers", None) == 0]
    kinds = [type(find_user_dataset(getattr(each, "dataset", None))).__name__ for each in own]
    return [(f"{keys.get(id(each), '')}({kind})", each) for each, kind in zip(own, kinds, strict=True)]


def find_iterators(trainer: Any) -> Iterator[Any]:
    """Yield the live iterators of the train loaders that Lightning exposes."""
    combined = getattr(trainer.fit_loop, "_combined_loader", None)
    yield from getattr(getattr(combined, "_iterator", None), "iterators", [])
    for loader in find_loaders(trainer):
        if isinstance(loader, LazyLoader) and loader.live is not None and (found := loader.live()) is not None:
            yield found


def find_workers(trainer: Any) -> list[Any] | None:
    """Return the worker processes of the live iterators, empty if there are none; None if unknown."""
    iterators = _list_readable(trainer)
    return [worker for each in iterators for worker in getattr(each, "_workers", ())] if iterators else None


class QueueReader:
    """Reads the queue of the loaders' workers where a window of steps opens and closes."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.worker_threads = 0
        """The most threads that any worker was seen to compute on; 0 if unknown."""

    def count_owed(self) -> int | None:
        counts = [loader_queue.count_busy_threads(worker) or 0 for worker in find_workers(self._trainer) or ()]
        self.worker_threads = max([self.worker_threads, *counts])
        return count_batches_owed(self._trainer)


def read_batch_sizes(trainer: Any) -> tuple[int, ...]:
    """Return how many samples the train loader draws for a batch, and for an epoch's last batch if known; empty with
    several loaders, or without torch's own batch sampler."""
    found = find_loaders(trainer)
    sampler = getattr(found[0], "batch_sampler", None) if len(found) == 1 else None
    while isinstance(sampler, (SameOrder, ReadAhead)):
        sampler = sampler.inner
    if type(sampler) is not BatchSampler:
        return ()
    size = sampler.batch_size
    if sampler.drop_last or not isinstance(sampler.sampler, Sized):
        return (size,)
    return size, len(sampler.sampler) % size or size


def find_nesting(trainer: Any) -> Callable[[Any], list[Any]] | None:
    """Return a function that splits a combined batch into one batch per train loader; None if there is only one loader.

    The function returns None for a loader that has ended, and raises ValueError if the batch's nesting has changed.
    """
    spec = getattr(getattr(trainer.fit_loop, "_combined_loader", None), "_spec", None)
    several = len(find_loaders(trainer)) > 1
    return getattr(spec, "flatten_up_to", None) if several else None


def count_queued_batches(trainer: Any) -> int:
    """Return how many batches workers and device feeds can hold ready."""
    return sum(_count_held(loader) for loader in find_loaders(trainer))


def _find_engine(loader: Any) -> Any:
    """Return the engine that loads in a loader's place; None if the loader loads itself."""
    return loader.engine if isinstance(loader, LazyLoader) else None


def _count_held(loader: Any) -> int:
    if (engine := _find_engine(loader)) is not None:
        return int(getattr(engine, "ahead", 0))
    workers, factor = getattr(loader, "num_workers", 0) or 0, getattr(loader, "prefetch_factor", None) or 0
    return int(workers * factor) + (loader.depth if isinstance(loader, DeviceFeed) else 0)


def count_batches_owed(trainer: Any) -> int | None:
    """Return how many batches are requested from workers and not finished, over all loaders; None if unreadable."""
    return _sum_over_iterators(trainer, loader_queue.count_owed)


def count_batches_ready(trainer: Any) -> int | None:
    """Return how many batches workers have made that were not taken yet, over all loaders; None if unreadable.

    Not the queue's length minus `count_batches_owed`: near the end of an epoch fewer are requested than fit.
    """
    return _sum_over_iterators(trainer, loader_queue.count_ready)


def _sum_over_iterators(trainer: Any, count: Callable[[Any], int | None]) -> int | None:
    counts = [count(each) for each in _list_readable(trainer)]
    if not counts or None in counts:
        return None if count_queued_batches(trainer) else 0
    return sum(filter(None, counts))


def _list_readable(trainer: Any) -> list[Any]:
    """The live iterators whose workers can be read, also those without workers."""
    return [each for each in find_iterators(trainer) if loader_queue.count_live_workers(each) is not None]


def gather_evidence(trainer: Any) -> dict[str, Any]:
    """Gather the few facts about how the data is loaded that findings need."""
    found = find_loaders(trainer)
    if not found:
        return {}
    own = [loader for loader in found if _find_engine(loader) is None]
    workers = [count for loader in own if (count := getattr(loader, "num_workers", None)) is not None]
    return {
        "kind": type(found[0]).__name__,
        "has_engine": len(own) < len(found),
        "engine_advice": next(filter(None, (getattr(_find_engine(each), "advice", None) for each in found)), None),
        "num_workers": min(workers) if workers else None,
        "persistent_workers": all(bool(getattr(loader, "persistent_workers", False)) for loader in own),
        "reload_every_n_epochs": trainer.reload_dataloaders_every_n_epochs,
        "map_style": not any(isinstance(getattr(loader, "dataset", None), IterableDataset) for loader in found),
        "usable_cpus": machine.count_usable_cpus(),
        "queued_batches": count_queued_batches(trainer),
        "pin_memory": all(bool(getattr(loader, "pin_memory", False)) for loader in found),
        **_describe_validation(trainer),
    }


def find_validation_loaders(trainer: Any) -> list[Any]:
    """The loaders of validations inside fit; empty if there are none, or none yet."""
    loop = getattr(getattr(trainer.fit_loop, "epoch_loop", None), "val_loop", None)
    return list(getattr(getattr(loop, "_combined_loader", None), "flattened", []))


def count_validation_workers(trainer: Any) -> int:
    """Count the workers of these loaders."""
    return sum(getattr(loader, "num_workers", 0) for loader in find_validation_loaders(trainer))


def _describe_validation(trainer: Any) -> dict[str, Any]:
    """Describe the validation loaders: the fewest workers, and whether all loaders keep theirs; the dataset's class if
    all have rows in memory; or only that one has an engine. Empty without validation loaders."""
    loaders = find_validation_loaders(trainer)
    if any(_find_engine(loader) is not None for loader in loaders):
        return {"validation_has_engine": True}
    rows = [read_rows(getattr(loader, "dataset", None)) for loader in loaders]
    names = [each.what for each in rows if isinstance(each, RowFacts)]
    found: dict[str, Any] = {"validation_rows": names[0]} if names and len(names) == len(rows) else {}
    workers = [count for loader in loaders if (count := getattr(loader, "num_workers", None)) is not None]
    if not workers or len(workers) < len(loaders):
        return found
    keeps = all(bool(getattr(loader, "persistent_workers", False)) for loader in loaders)
    return {**found, "validation_workers": min(workers), "validation_keeps_workers": keeps}

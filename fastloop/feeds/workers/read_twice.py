"""Reads a few samples twice in a forked process: does reading a sample change it, and does torch round it differently
with one thread?

If ``__getitem__`` divides a stored picture by 255 in place, workers that start anew in each epoch hide that, but with
workers that stay, the picture gets darker each time. Reading the source finds only some of the ways to write this.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import random
import sys
import time
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader
from torch.utils.data._utils.worker import WorkerInfo, _worker_loop

from fastloop.errors import let_through
from fastloop.feeds.workers.forked import Fork, end_in_time, may_try
from fastloop.feeds.workers.in_worker import read_streams
from fastloop.feeds.workers.next_epoch import TORCH_SAMPLERS
from fastloop.feeds.workers.thread_rounding import find_difference

ENOUGH_S = 0.5
"""No further sample is read after this time."""
SOON_S = 1.0
"""The training waits no longer than this for an answer that it can do without at first."""
LATE_S = 10.0
"""The same for one that it cannot: samples that take so long make the first batch take longer."""
ANOTHER, FROZEN = "differs when it is read again", "is random when first read, and stays the same from then on"
_WORKER = sys.modules[_worker_loop.__module__]
_MOST_COMPARED = 16
"""Samples that are made with other numbers of threads: half of them may round alike by chance."""


class ReadTwice:
    """Reads samples of a loader's dataset twice, in a forked process that begins with this object.

    Args:
        compares_threads: whether it also makes samples with as many of torch's threads as this process has.
    """

    def __init__(self, loader: DataLoader[Any], *, compares_threads: bool = False) -> None:
        self._fork: Fork | None = None
        self._answers: list[Any] = []
        threads = torch.get_num_threads()
        self._has_one_thread = threads == 1
        compares = compares_threads and not self._has_one_thread
        self._most = 2 if compares else 1
        """Answers to expect from the process."""
        count = _count_samples(loader)
        if sys.platform == "linux" and count and may_try(loader) and (_has_known_indices(loader) or compares):
            self._began = time.monotonic()
            self._fork = Fork(_read, loader, count, threads if compares else 1)

    def find_change(self, *, is_urgent: bool = False) -> tuple[bool | None, str]:
        """Return whether reading a sample changes it, None if that is not known, and the reason. Waits at most until
        `SOON_S` after the start, `LATE_S` if it is urgent."""
        self._receive(1, LATE_S if is_urgent else SOON_S)
        return self._answers[0] if self._answers else (None, "")

    @property
    def is_pending(self) -> bool:
        """Whether the process still runs and has not said whether reading a sample changes it."""
        return self._fork is not None and not self._answers

    def find_rounding(self) -> bool | None:
        """Return whether torch rounds samples differently with one thread than with as many as here; None if that is
        not known. Waits at most until `SOON_S` after the start."""
        if self._has_one_thread:
            return False
        self._receive(2, SOON_S)
        return self._answers[1] if len(self._answers) > 1 else None

    @property
    def is_over(self) -> bool:
        """Whether no more answers will come."""
        return self._fork is None

    def _receive(self, count: int, wait_s: float) -> None:
        """Receive answers, until there are this many."""
        while self._fork is not None and len(self._answers) < count:
            try:
                if not self._fork.answers.poll(max(0.0, self._began + wait_s - time.monotonic())):
                    return
                self._answers.append(self._fork.answers.recv())
            except (EOFError, OSError):
                self.end()
        if len(self._answers) == self._most:
            self.end()

    def end(self) -> None:
        """End the process, if it still runs."""
        if self._fork is not None:
            self._fork.end()
            self._fork = None


def choose_indices(loader: DataLoader[Any]) -> list[int]:
    """Return the indices of a few samples; none if the dataset's keys are unknown."""
    count = _count_samples(loader) if _has_known_indices(loader) else 0
    return _choose_indices(count, 5) if count > 0 else []


def _has_known_indices(loader: DataLoader[Any]) -> bool:
    """Whether the dataset's keys are known to be the numbers below its length."""
    own = loader.batch_sampler.sampler if type(loader.batch_sampler) is BatchSampler else loader.sampler
    return isinstance(own, TORCH_SAMPLERS)


def _count_samples(loader: DataLoader[Any]) -> int:
    try:
        return len(loader.dataset)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return 0


def _choose_indices(count: int, parts: int) -> list[int]:
    """Spread `parts` indices over `count` samples."""
    return sorted({part * (count - 1) // (parts - 1) for part in range(parts)})


# -- in the forked process ---------------------------------------------------------------------------------------------


def _read(answers: Any, loader: DataLoader[Any], count: int, threads: int) -> None:
    """Read samples as a worker would, with one thread, and answer; also compare with several `threads`."""
    _become_worker(loader)
    indices = choose_indices(loader)
    verdict = _compare(loader, indices, _read_in_another(loader, indices[0])) if indices else (None, "")
    answers.send(verdict)
    if threads > 1 and not verdict[0]:  # else no other process or thread makes samples
        make = functools.partial(_make_checksum, loader)
        answers.send(find_difference(make, _choose_indices(count, _MOST_COMPARED), threads))


def _become_worker(loader: DataLoader[Any]) -> None:
    """Make this process look like the loader's first worker."""
    info = WorkerInfo(id=0, num_workers=loader.num_workers or 1, seed=0, dataset=loader.dataset)
    _WORKER._worker_info = info  # type: ignore[attr-defined]
    if loader.worker_init_fn is not None:
        loader.worker_init_fn(0)


def _read_in_another(loader: DataLoader[Any], index: int) -> int:
    """Return a sample's checksum from another process that starts in the same state as this one. If it differs, the
    sample depends on something like a clock.

    Raises:
        ValueError: that process could not make the sample.
    """
    theirs, ours = os.pipe()
    parent = os.getpid()
    if (child := os.fork()) == 0:
        with contextlib.suppress(BaseException):
            end_in_time(parent)
            os.write(ours, str(_digest(_fetch(loader, index)[0])).encode())
        os._exit(0)
    os.close(ours)
    with os.fdopen(theirs) as answer:
        checksum = answer.read()
    os.waitpid(child, 0)
    return int(checksum)


def _compare(loader: DataLoader[Any], indices: Sequence[int], elsewhere: int) -> tuple[bool | None, str]:
    began = time.monotonic()
    for number, index in enumerate(indices):
        if number and time.monotonic() - began > ENOUGH_S:
            break
        try:
            (first, drew), (again, draws) = ((_digest(value), moved) for value, moved in _fetch_twice(loader, index))
        except Exception as error:
            let_through(error)
            return None, ""
        if not number and first != elsewhere:
            return None, ""
        if drew and not draws:
            return True, f"sample {index} {FROZEN}"
        if first != again:
            return True, f"sample {index} {ANOTHER}"
    return False, ""


def _make_checksum(loader: DataLoader[Any], index: int) -> int:
    """Return a checksum of a sample and, if it can be collated alone, of the batch."""
    value, _ = _fetch(loader, index)
    total = _digest(value)
    has_several = isinstance(value, list) and callable(getattr(loader.dataset, "__getitems__", None))
    with contextlib.suppress(Exception):
        total += _digest(loader.collate_fn(value if has_several or loader.batch_sampler is None else [value]))
    return total


def _fetch_twice(loader: DataLoader[Any], index: int) -> Iterator[tuple[Any, bool]]:
    for _ in range(2):
        value, drew = _fetch(loader, index)
        yield value, drew
        with contextlib.suppress(Exception):  # it may change what the dataset stores; a lone sample may be odd to it
            loader.collate_fn([value])


def _fetch(loader: DataLoader[Any], index: int) -> tuple[Any, bool]:
    """Return a sample, and whether making it drew from a global stream of random numbers."""
    torch.manual_seed(0)
    random.seed(0)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(0)
    before = read_streams()
    several = getattr(loader.dataset, "__getitems__", None)
    value = several([index]) if callable(several) and loader.batch_sampler is not None else loader.dataset[index]
    return value, read_streams() != before


# -- what a sample holds -----------------------------------------------------------------------------------------------


class _UnknownKind(Exception):
    """A sample holds something whose content cannot be told."""


def _digest(value: Any) -> int:
    """Return a checksum of all that a sample holds."""
    total = 0
    for part in _list_parts(value, 0):
        total = zlib.crc32(part, total)
    return total


def _list_parts(value: Any, depth: int) -> Iterator[bytes]:
    yield type(value).__qualname__.encode()
    if depth > 20:
        raise _UnknownKind
    if isinstance(value, torch.Tensor):
        yield from _list_tensor_parts(value.detach())
    elif isinstance(value, (str, bytes, int, float, complex, bool, type(None))):
        yield repr(value).encode(errors="replace")
    elif callable(raw := getattr(value, "tobytes", None)):  # arrays, pictures
        kind = getattr(value, "dtype", None)
        yield str((kind, getattr(value, "shape", getattr(value, "size", None)))).encode()
        if getattr(kind, "hasobject", False):
            yield from _list_parts(value.tolist(), depth + 1)
        else:
            yield raw()
    elif isinstance(value, Mapping):
        for key in value:
            yield from _list_parts(key, depth + 1)
            yield from _list_parts(value[key], depth + 1)
    elif isinstance(value, (set, frozenset)):
        yield from sorted(b"".join(_list_parts(each, depth + 1)) for each in value)
    elif isinstance(value, Iterable) and isinstance(value, Collection):
        for each in value:
            yield from _list_parts(each, depth + 1)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from _list_parts(getattr(value, field.name, None), depth + 1)
    elif hasattr(value, "__dict__") and not callable(value):
        for name, member in sorted(vars(value).items()):
            yield name.encode()
            yield from _list_parts(member, depth + 1)
    else:
        raise _UnknownKind


def _list_tensor_parts(tensor: torch.Tensor) -> Iterator[bytes]:
    yield str((tensor.dtype, tuple(tensor.shape), tensor.layout)).encode()
    if tensor.layout is torch.sparse_coo:
        tensor = tensor.coalesce()
        yield from (*_list_tensor_parts(tensor.indices()), *_list_tensor_parts(tensor.values()))
    elif tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        raise _UnknownKind
    elif tensor.numel():
        flat = tensor.cpu().contiguous().reshape(-1).resolve_conj().resolve_neg()
        yield flat.view(torch.uint8).numpy().tobytes()

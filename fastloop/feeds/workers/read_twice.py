"""Whether reading a sample changes it for the next time, found out by reading a few samples twice in a forked process.

A ``__getitem__`` that divides a stored picture by 255 in place is right with workers that start anew in each epoch, and
with kept ones the picture grows darker. Code that reads code finds only some ways to write that.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import multiprocessing
import os
import pickle
import random
import signal
import sys
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data._utils.worker import WorkerInfo, _worker_loop
from torch.utils.data.distributed import DistributedSampler

from fastloop.errors import let_through, quote
from fastloop.evidence.samples.dataset import is_in_shared_memory, walk

SAMPLES = 3
"""Samples that are read: the first, the last, and one between them."""
ENOUGH_S = 1.0
"""No further sample is read after this time."""
MOST_S, SOON_S = 20.0, 5.0
"""After this time the process is ended, and nothing is known; the shorter one where the training waits for it."""
SEEDS = 3
"""Seeds with which a sample is read whose code draws random numbers. Two flips are alike every other time."""
_WHOLE = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler)
"""Samplers whose indices are those of the dataset."""
_WORKER = sys.modules[_worker_loop.__module__]


class ReadTwice:
    """Reads samples of a loader's dataset twice, in a forked process that begins with this object.

    Args:
        draws: whether the code for samples draws random numbers, so that other seeds must give other samples.
    """

    def __init__(self, loader: DataLoader[Any], *, draws: bool) -> None:
        self._process: Any = None
        self._verdict: tuple[bool | None, str] = None, "its samples could not be read twice beforehand"
        may_fork = "fork" in multiprocessing.get_all_start_methods() and not multiprocessing.current_process().daemon
        if may_fork and (indices := _choose_indices(loader)) and not _shares_memory(loader.dataset):
            context = multiprocessing.get_context("fork")
            self._answer, theirs = context.Pipe(duplex=False)
            self._process = context.Process(target=_read, args=(loader, indices, draws, theirs), daemon=True)
            self._process.start()
            theirs.close()
            self._began = time.monotonic()

    def find_change(self, within_s: float | None = None) -> tuple[bool | None, str]:
        """Return whether reading a sample changes it, None if unknown, and the reason. Waits for the process, at most
        until this long after its start, by default `MOST_S`."""
        if self._process is not None:
            with contextlib.suppress(EOFError, OSError):
                most_s = MOST_S if within_s is None else within_s
                if self._answer.poll(max(0.0, self._began + most_s - time.monotonic())):
                    self._verdict = self._answer.recv()
            self.end()
        return self._verdict

    def end(self) -> None:
        """End the process, if it still runs."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._answer.close()
            self._process = None


def _choose_indices(loader: DataLoader[Any]) -> list[int]:
    """Return the samples to read; none if the dataset's keys are unknown."""
    own = loader.batch_sampler.sampler if type(loader.batch_sampler) is BatchSampler else loader.sampler
    try:
        count = len(loader.dataset) if isinstance(own, _WHOLE) else 0  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return []
    return sorted({0, count // 2, count - 1})[:SAMPLES] if count > 0 else []


def _shares_memory(dataset: Any) -> bool:
    """Whether reading a sample in another process might change what this one holds."""
    return any(
        type(item).__module__.startswith("multiprocessing.") or is_in_shared_memory(item) for _, item in walk(dataset)
    )


def _read(loader: DataLoader[Any], indices: Sequence[int], draws: bool, answer: Any) -> None:
    """In the forked process: read samples as a worker would, answer, and end without any cleanup."""
    gc.disable()  # what is garbage here is the parent's, CUDA events among it
    with contextlib.suppress(BaseException):
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        quiet = os.open(os.devnull, os.O_WRONLY)
        for stream in (1, 2):
            os.dup2(quiet, stream)
        torch.set_num_threads(1)
        dataset = loader.dataset
        _WORKER._worker_info = WorkerInfo(id=0, num_workers=loader.num_workers or 1, seed=0, dataset=dataset)  # type: ignore[attr-defined]
        if loader.worker_init_fn is not None:
            loader.worker_init_fn(0)
        answer.send(_compare(dataset, indices, draws))
    os._exit(0)


def _compare(dataset: Any, indices: Sequence[int], draws: bool) -> tuple[bool | None, str]:
    began, is_frozen = time.monotonic(), draws
    for number, index in enumerate(indices):
        if number and time.monotonic() - began > ENOUGH_S:
            break
        try:
            first, again = (_digest(_fetch(dataset, index, seed=0)) for _ in range(2))
            others = (_digest(_fetch(dataset, index, seed=seed)) for seed in range(1, 1 + SEEDS))
            is_frozen = is_frozen and all(other == first for other in others)
        except Exception as error:
            let_through(error)
            return None, f"sample {index} could not be read beforehand: {quote(error, briefly=True)}"
        if first != again:
            return True, f"sample {index} is another one when it is read again"
    if is_frozen:
        return True, "samples stay as they were drawn at first"
    return False, ""


def _fetch(dataset: Any, index: int, *, seed: int) -> Any:
    torch.manual_seed(seed)
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed)
    several = getattr(dataset, "__getitems__", None)
    return several([index]) if callable(several) else dataset[index]


def _digest(value: Any) -> int:
    """Return a checksum of all that a sample holds."""
    total = 0
    for part in _list_parts(value, 0):
        total = zlib.crc32(part, total)
    return total


def _list_parts(value: Any, depth: int) -> Iterator[bytes]:
    yield type(value).__qualname__.encode()
    if isinstance(value, torch.Tensor):
        tensor = value.detach()
        if tensor.layout is torch.strided and not tensor.is_quantized:
            flat = tensor.cpu().contiguous().reshape(-1)
            yield str((tensor.dtype, tuple(tensor.shape))).encode()
            yield flat.resolve_conj().resolve_neg().view(torch.uint8).numpy().tobytes() if flat.numel() else b""
        else:
            yield pickle.dumps(tensor)
    elif isinstance(value, (str, bytes, int, float, complex, bool, type(None))):
        yield repr(value).encode(errors="replace")
    elif callable(raw := getattr(value, "tobytes", None)):  # arrays, pictures
        yield str((getattr(value, "dtype", None), getattr(value, "shape", getattr(value, "size", None)))).encode()
        yield raw()
    elif depth > 20:
        yield b"..."
    elif isinstance(value, Mapping):
        for key in value:
            yield repr(key).encode(errors="replace")
            yield from _list_parts(value[key], depth + 1)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _list_parts(each, depth + 1)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from _list_parts(getattr(value, field.name, None), depth + 1)
    else:
        members = {**{name: getattr(value, name, None) for name in getattr(value, "__slots__", ())}, **_vars(value)}
        for name in sorted(map(str, members)):
            yield name.encode()
            yield from _list_parts(members[name], depth + 1)


def _vars(value: Any) -> dict[str, Any]:
    return getattr(value, "__dict__", None) or {}

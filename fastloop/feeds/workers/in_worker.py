"""Code that workers on trial run in their processes: they leave CPUs to the training, pickle each batch themselves, and
send what they raise."""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
import random
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch.utils.data import _DatasetKind

from fastloop.errors import describe

TIMED = 9
"""Batches whose making and transfer are timed before the two times are compared."""
_NICENESS = 5


@dataclass(frozen=True)
class LeavesRoom:
    """A ``worker_init_fn`` that keeps its worker off some CPUs, and then calls the loader's own function. So the thread
    that launches the device's work never waits for a CPU; the training process itself does not change.

    Args:
        own: the loader's ``worker_init_fn``, or None.
        free_cpus: CPUs reserved for the training processes on this machine. If affinity cannot be set, the worker
            raises its niceness instead.
    """

    own: Callable[[int], None] | None
    free_cpus: int

    def __call__(self, worker_id: int) -> None:
        if not _keep_off(self.free_cpus):
            with contextlib.suppress(OSError):
                os.nice(_NICENESS)
        _limit_opencv()
        if self.own is not None:
            self.own(worker_id)


def _keep_off(free_cpus: int) -> bool:
    """Keep this process off the last of its allowed CPUs, the same for all workers; return False if impossible."""
    with contextlib.suppress(AttributeError, OSError):  # only Linux has affinity, and a sandbox may forbid it
        usable = sorted(os.sched_getaffinity(0))
        if len(usable) > 2 * free_cpus:
            os.sched_setaffinity(0, usable[:-free_cpus])
        return True
    return False


def _limit_opencv() -> None:
    """Limit OpenCV to one thread in each worker, like torch's threads, if it would use all CPUs."""
    cv2: Any = sys.modules.get("cv2")
    if cv2 is not None and cv2.getNumThreads() >= (os.cpu_count() or 1):
        cv2.setNumThreads(1)


@dataclass(frozen=True)
class Unsent:
    """Sent instead of a batch that a worker could not send."""

    why: str
    no_room: bool
    """Whether shared memory was full."""


class _WholePickler(ForkingPickler):
    """Refuses tensors that torch would send without an error, but not whole."""

    def reducer_override(self, item: Any) -> Any:
        if isinstance(item, torch.Tensor) and (lost := _find_lost(item)) is not None:
            raise TypeError(f"{lost} would get lost on the way")
        return NotImplemented


def _find_lost(tensor: torch.Tensor) -> str | None:
    """What another process does not get of a tensor; None if it gets all. Subclasses are pickled as a whole.

    Source: torch/multiprocessing/reductions.py, reduce_tensor: the storage, and which numbers of it to read.
    """
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return None
    if tensor.is_quantized:
        return "a quantized tensor's scale"
    if tensor.is_conj() or tensor.is_neg():
        return "the conjugation of a tensor"
    return next((f"a tensor's attribute {name}" for name in vars(tensor)), None)


class Parcel:
    """A batch that is already pickled: unpickling this object returns the batch."""

    def __init__(self, content: bytes) -> None:
        self.content = content

    def __reduce__(self) -> Any:
        return _open, (self.content,)


def _open(content: bytes) -> Any:
    try:
        return pickle.loads(content)
    except (OSError, EOFError):  # the worker is gone, and its shared memory too
        raise
    except Exception as error:
        return Unsent(f"what workers send cannot be unpickled: {describe(error)}", False)


class Order:
    """The indices of a batch. When a worker unpickles them, it records its start time."""

    def __init__(self, indices: Any) -> None:
        self.indices = indices

    def __reduce__(self) -> Any:
        return _begin_batch, (self.indices,)


def _begin_batch(indices: Any) -> Any:
    Send.streams = read_streams()
    Send.began = time.perf_counter()
    return indices


def read_streams() -> tuple[Any, ...]:
    """Return the states of this process's global random generators: torch's, Python's, NumPy's."""
    numpy = sys.modules.get("numpy.random")
    state = () if numpy is None else numpy.get_state()
    drawn = (state[1].tobytes(), *state[2:]) if isinstance(state, tuple) and state else ()
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), drawn


class Send:
    """A ``collate_fn`` that, in a worker, returns only objects that can be sent.

    Args:
        made_ms: shared by all workers; each writes its median time per batch there, without its first batch.
        drew: shared by all workers; set once a batch has drawn from a global random generator.
    """

    began, streams = 0.0, ()

    def __init__(self, collate: Callable[[Any], Any], made_ms: Any, drew: Any) -> None:
        self.collate, self.made_ms, self.drew = collate, made_ms, drew
        self._took_ms: deque[float] = deque(maxlen=TIMED)
        self._is_first = True

    def __call__(self, samples: Any) -> Any:
        if (worker := torch.utils.data.get_worker_info()) is None:
            return self.collate(samples)
        try:
            batch = self.collate(samples)
            if not self.drew.value and self.streams != read_streams():
                self.drew.value = True
            self._note(worker.id)
        except Exception as error:  # the default collate function writes into shared memory
            if _is_full(error):
                return Unsent(describe(error), True)
            raise
        try:
            return Parcel(bytes(_WholePickler.dumps(batch)))
        except Exception as error:
            if _is_full(error):
                return Unsent(describe(error), True)
            return Unsent(f"workers cannot send the loader's batches: {describe(error)}", False)

    def _note(self, worker: int) -> None:
        if not self._is_first:
            self._took_ms.append(1e3 * (time.perf_counter() - self.began))
            self.made_ms[worker] = statistics.median(self._took_ms)
        self._is_first = False


def _is_full(error: Exception) -> bool:
    return getattr(error, "errno", None) == errno.ENOSPC or "No space left on device" in str(error)


def _can_be_sent(kind: type) -> bool:
    """Whether a class can be pickled; one that is made in a function cannot."""
    try:
        ForkingPickler.dumps(kind)
    except Exception:
        return False
    return True


class SendsExits:
    """A ``worker_init_fn`` that calls another one, then makes its worker send what it raises, ``SystemExit`` and
    exceptions of classes that cannot be pickled too."""

    def __init__(self, own: Callable[[int], None] | None) -> None:
        self.own = own

    def __call__(self, worker_id: int) -> None:
        if self.own is not None:
            self.own(worker_id)
        create: Callable[..., Any] = _DatasetKind.create_fetcher

        def create_fetcher(*args: Any) -> Any:
            fetcher = create(*args)
            fetch = fetcher.fetch

            def fetch_or_raise(indices: Any) -> Any:
                try:
                    return fetch(indices)
                except SystemExit as error:
                    raise RuntimeError(f"SystemExit: {error}") from error
                except Exception as error:
                    if not _can_be_sent(type(error)):
                        raise RuntimeError(f"{type(error).__name__}: {error}") from error
                    raise

            fetcher.fetch = fetch_or_raise
            return fetcher

        _DatasetKind.create_fetcher = create_fetcher  # type: ignore[method-assign]

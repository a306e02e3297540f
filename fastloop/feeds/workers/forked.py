"""Forked copies of this process, which try out a loader's samples and leave no trace."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import multiprocessing
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from fastloop.evidence.samples import sample_code
from fastloop.evidence.samples.dataset import list_running, walk

_WRITES = re.compile(
    r"(\w+_)?write\w*|save\w*|dump\w*|imwrite|tofile|to_(csv|parquet|json|feather|pickle|hdf|zarr|file|disk)"
    r"|shutil|commit|unlink|rename|copyfile|copytree|copy2|symlink\w*|mkdir|makedirs|system|Popen|check_call|check_output"
)
"""Calls with effects outside of the process: such samples are not read once more than needed."""
_MOST_S = 30
"""A forked process ends itself after this time, wherever it is."""
_MOST_SHARED_BYTES = 2**28
_PRIVATE_ANONYMOUS_FIXED = 0x02 | 0x20 | 0x10
"""Flags of Linux's mmap."""


def may_try(loader: DataLoader[Any]) -> bool:
    """Whether workers would be forked, this process may fork, and samples write nothing outside of their process."""
    context = loader.multiprocessing_context
    method = multiprocessing.get_start_method() if context is None else context.get_start_method()
    if method != "fork" or multiprocessing.current_process().daemon:
        return False
    running, _ = list_running([*walk(loader.dataset), *walk(loader.collate_fn, "collate_fn")])
    names = (sample_code.list_names(function.__code__) for _, _, function in running)
    return not any(_WRITES.fullmatch(name) for each in names for name in each)


class Fork:
    """Calls ``work(answers, *args)`` in a forked process, which first copies the memory that processes share.

    Attributes:
        answers: receives what `work` sends.
    """

    def __init__(self, work: Callable[..., None], *args: Any) -> None:
        context = multiprocessing.get_context("fork")
        self.answers, theirs = context.Pipe(duplex=False)
        self._process = context.Process(target=_run, args=(work, theirs, os.getpid(), args), daemon=True)
        self._process.start()
        theirs.close()

    def end(self) -> None:
        """End the process, if it still runs."""
        self._process.kill()
        self._process.join()
        self.answers.close()


def _run(work: Callable[..., None], answers: Any, parent: int, args: tuple[Any, ...]) -> None:
    """Do the work with one thread, print nothing, and end without any cleanup."""
    gc.disable()  # what is garbage here is the parent's, CUDA events among it
    with contextlib.suppress(BaseException):
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM):
            signal.signal(number, signal.SIG_DFL)
        end_in_time(parent)
        quiet = os.open(os.devnull, os.O_WRONLY)
        for stream in (1, 2):
            os.dup2(quiet, stream)
        _copy_shared()
        torch.set_num_threads(1)
        work(answers, *args)
    os._exit(0)


def end_in_time(parent: int) -> None:
    """Let this process end with its parent, or after `_MOST_S`."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    signal.alarm(_MOST_S)
    if os.getppid() != parent:
        os._exit(1)


def _copy_shared() -> None:
    """Replace all memory that other processes see when it is written by copies."""
    libc: Any = ctypes.CDLL(None)
    libc.mmap.restype, libc.mmap.argtypes = (
        ctypes.c_void_p,
        [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long],
    )
    for start, size in _list_shared():
        content = ctypes.string_at(start, size)
        libc.mmap(start, size, 3, _PRIVATE_ANONYMOUS_FIXED, -1, 0)
        ctypes.memmove(start, content, size)


def _list_shared() -> list[tuple[int, int]]:
    """Return start and size of the memory that other processes see when it is written, devices' left out.

    Raises:
        MemoryError: it is too much to copy.
    """
    found = []
    for line in Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines():
        span, flags, *rest = line.split(maxsplit=5)
        name = rest[3] if len(rest) == 4 else ""
        is_device = name.startswith("/dev/") and not name.startswith(("/dev/shm/", "/dev/zero"))
        if flags.startswith("rw") and "s" in flags and not is_device:
            start, end = (int(part, 16) for part in span.split("-"))
            found.append((start, end - start))
    if sum(size for _, size in found) > _MOST_SHARED_BYTES:
        raise MemoryError
    return found

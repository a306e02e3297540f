"""The lines of the user's code that take most of the time for a batch, found by making some in a forked process.

A loader's worker processes cannot be looked into from outside. This process makes batches as a worker does, while
another of its threads looks at its stack.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from itertools import chain, repeat
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, _DatasetKind

from fastloop.evidence.samples.dataset import find_worker_hazards
from fastloop.evidence.sync.line_samples import LineSamples
from fastloop.feeds.workers.read_twice import become_worker, choose_indices, may_try, stand_alone

LOOK_S = 0.5
"""Batches are made for this long; a batch may take longer."""
MOST_S = 4.0
"""The fit's end waits no longer than this for the answer."""
_MOST_EPOCHS = 1000


def find_sample_lines(loader: DataLoader[Any]) -> Mapping[str, Any]:
    """Return what `LineSamples.describe` returns of making this loader's batches; empty where no process may be forked
    for that, samples share something with this one, or the dataset is iterable."""
    if sys.platform != "linux" or isinstance(loader.dataset, IterableDataset) or not may_try(loader):
        return {}
    if not choose_indices(loader) or find_worker_hazards(loader.dataset, loader.collate_fn):
        return {}
    context = multiprocessing.get_context("fork")
    answer, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_tell, args=(loader, theirs, os.getpid()), daemon=True)
    process.start()
    theirs.close()
    try:
        return dict(answer.recv()) if answer.poll(MOST_S) else {}
    except (EOFError, OSError):
        return {}
    finally:
        process.kill()
        process.join()
        answer.close()


# -- in the forked process ---------------------------------------------------------------------------------------------


def _tell(loader: Any, answer: Any, parent: int) -> None:
    gc.disable()  # what is garbage here is the parent's, CUDA events among it
    with contextlib.suppress(BaseException):
        stand_alone(parent)
        torch.set_num_threads(1)
        become_worker(loader)
        kind: Any = _DatasetKind
        how = (loader._dataset_kind, loader.dataset, loader._auto_collation, loader.collate_fn, loader.drop_last)
        fetcher, lines = kind.create_fetcher(*how), LineSamples()
        threading.Timer(LOOK_S, _answer, (lines, answer)).start()
        lines.begin()
        for indices in _draw_indices(loader):
            fetcher.fetch(indices)
    os._exit(0)


def _answer(lines: LineSamples, answer: Any) -> None:
    """Answer and end, in the middle of a batch."""
    lines.stop()
    answer.send(lines.describe())
    os._exit(0)


def _draw_indices(loader: DataLoader[Any]) -> Iterator[Any]:
    """Indices of batches, from the user's own sampler, of several epochs if they are short."""
    sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    return chain.from_iterable(repeat(sampler, _MOST_EPOCHS))

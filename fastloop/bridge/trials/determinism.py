"""Makes a training step repeat bit for bit: no dropout, deterministic kernels, the same random numbers.

For disposable processes, where nothing else trains meanwhile; the context restores everything except random streams.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Iterator, MutableMapping

import numpy
import torch

from fastloop.bridge.apply.state.flags import keep_flags
from fastloop.evidence.model.dropout import without_functional_dropout

ENVIRONMENT = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""Environment variables that must be set before CUDA starts, to make cuBLAS reproducible.
Source: https://docs.nvidia.com/cuda/cublas/index.html#results-reproducibility"""


def prepare(environ: MutableMapping[str, str] = os.environ) -> None:
    """Set the environment variables that CUDA reads when it starts."""
    for name, value in ENVIRONMENT.items():
        environ.setdefault(name, value)


@contextlib.contextmanager
def make_repeatable() -> Iterator[None]:
    """Switch off torch's dropout, and use deterministic kernels if they exist; the others warn."""
    restore = keep_flags()
    with without_functional_dropout():
        make_deterministic()
        try:
            yield
        finally:
            restore()


def make_deterministic() -> None:
    """Set only the modes. Repeat it in the fit: the Trainer sets them when it is created, and a module may in setup."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False


def seed_everything(number: int) -> None:
    """Seed all random streams of this process."""
    torch.manual_seed(number)
    random.seed(number)
    numpy.random.seed(number)


def shift_seeds(offset: int) -> None:
    """Change all random streams by an offset from their current states."""
    torch.manual_seed((torch.initial_seed() + offset) % 2**64)  # a seed of -1 is the largest
    random.seed(random.getrandbits(32) + offset)
    numpy.random.seed((int(numpy.random.randint(2**31)) + offset) % 2**32)

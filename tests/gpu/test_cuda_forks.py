"""Workers forked by a process with CUDA events in its garbage."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from fastloop import FastLoop
from tests.models import Regression, trainer

pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"), pytest.mark.timeout(150)]


class Collects(Dataset[Any]):
    """Its worker collects garbage for each sample, as a worker that allocates much does at some time."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Any:
        gc.collect()
        return torch.full((8,), float(index)), torch.zeros(1)


class Litters(Regression):
    def on_train_start(self) -> None:
        leave_garbage()


def leave_garbage() -> None:
    event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    ring = [event]
    ring.append(ring)


@pytest.fixture(autouse=True)
def no_collection() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("ours", [True, False], ids=["workers of ours", "workers of the user's"])
def test_they_do_not_destroy_it(ours: bool) -> None:
    loop = FastLoop({"rungs": {"workers": {"enabled": True, "count": 1}}} if ours else None, quiet=True)
    loader = DataLoader(Collects(), batch_size=4, num_workers=0 if ours else 1)
    trainer(callbacks=[loop], max_epochs=2, accelerator="gpu").fit(Litters(), loader)
    assert loop.measurement is not None and loop.measurement.total_steps == 8


CONTROL = """
import gc, os, torch
gc.disable()
event = torch.cuda.Event(); event.record()
ring = [event]; ring.append(ring)
del event, ring
child = os.fork()
if not child:
    gc.collect()
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_the_control_aborts() -> None:
    done = subprocess.run([sys.executable, "-c", CONTROL], capture_output=True, text=True, timeout=100, check=True)
    assert int(done.stdout) != 0

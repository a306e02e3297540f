"""The program that test_rank_exchange.py starts: two gloo ranks which gather, in the ways that one argument names."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback
from torch import distributed, multiprocessing

from fastloop.bridge.watch.rank_exchange import Ranks
from tests.models import Regression, loader, trainer

LIMIT_S = 1.5


def write(name: str, **found: Any) -> None:
    Path(f"{name}.json").write_text(json.dumps(found))


# -- bare process groups: forked, so that torch is imported once for all cases ----------------------------------------


def both(ranks: Callable[[], Ranks], rank: int) -> None:
    """Two fits, one after the other."""
    for fit in ("first", "second"):
        exchange = ranks()
        if rank == 1:
            time.sleep(0.3)
        began = time.monotonic()
        records = exchange.gather({"step_ms": 10.0 + rank, "parts_ms": {"data_wait": None}, "fit": fit}, 20)
        write(
            f"both-{fit}-{rank}",
            records=records,
            missing=exchange.missing,
            why=exchange.why,
            took_s=time.monotonic() - began,
        )
        distributed.barrier()


def sleeps(ranks: Callable[[], Ranks], rank: int) -> None:
    """Rank 1 is stuck for longer than rank 0 waits, and hands in its record when nobody is there any more."""
    exchange = ranks()
    if rank == 1:
        write("sleeps-fault", at=time.time())
        time.sleep(LIMIT_S + 2)
    began = time.monotonic()
    records = exchange.gather({"step_ms": 10.0 + rank}, 60 if rank else LIMIT_S)
    write(
        f"sleeps-{rank}", records=records, missing=exchange.missing, why=exchange.why, took_s=time.monotonic() - began
    )


def dies(ranks: Callable[[], Ranks], rank: int) -> None:
    """Rank 1 is gone before it could hand in anything."""
    exchange = ranks()
    if rank == 1:
        write("dies-fault", at=time.time())
        os._exit(7)
    began = time.monotonic()
    records = exchange.gather({"step_ms": 10.0}, LIMIT_S)
    write("dies-0", records=records, missing=exchange.missing, why=exchange.why, took_s=time.monotonic() - began)


def leaves(ranks: Callable[[], Ranks], rank: int) -> None:
    """Rank 1 hands in its record and is gone at once; rank 0 looks only then."""
    exchange = ranks()
    if rank == 1:
        exchange.gather({"step_ms": 11.0}, LIMIT_S)
        os._exit(7)
    time.sleep(1)
    write("leaves-0", records=exchange.gather({"step_ms": 10.0}, LIMIT_S), missing=exchange.missing)


CASES = {case.__name__: case for case in (both, sleeps, dies, leaves)}


def in_group(name: str, rank: int, port: int) -> None:
    distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    CASES[name](lambda: Ranks(SimpleNamespace(global_rank=rank, world_size=2)), rank)
    os._exit(0)  # as a dying rank leaves: a group whose other half is gone need not be closed


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def bare() -> None:
    codes = {}
    fork = multiprocessing.get_context("fork")
    for name in CASES:
        port = free_port()
        processes = [fork.Process(target=in_group, args=(name, rank, port)) for rank in (0, 1)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(100)
            process.kill()
        codes[name] = [process.exitcode for process in processes]
    write("codes", **codes)


# -- Lightning's ways to start two ranks ------------------------------------------------------------------------------


class Gathers(Callback):
    fits = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.ranks, self.fits = Ranks(trainer), self.fits + 1

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        began = time.monotonic()
        records = self.ranks.gather({"steps": trainer.global_step, "fit": self.fits})
        write(
            f"fit{self.fits}-{trainer.global_rank}",
            records=records,
            missing=self.ranks.missing,
            why=self.ranks.why,
            took_s=time.monotonic() - began,
            environment=type(trainer.strategy.cluster_environment).__name__,
        )


def fit(strategy: str) -> None:
    torch.manual_seed(0)
    gathers = Gathers()
    for fits in (1,) if strategy == "ddp_spawn" else (1, 2):
        made = trainer(strategy=strategy, devices=2, max_steps=2 * fits, callbacks=[gathers], max_epochs=-1)
        made.fit(Regression(), loader())


def slurm() -> None:
    """Two tasks as srun starts them."""
    shared = {
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_JOB_NAME": "train",
        "SLURM_JOB_ID": "1",
        "SLURM_NODEID": "0",
        "SLURM_NODELIST": "127.0.0.1",
        "SLURM_NNODES": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    tasks = [
        subprocess.Popen(
            [sys.executable, __file__, "ddp"],
            env={**os.environ, **shared, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)},
        )
        for rank in (0, 1)
    ]
    assert [task.wait(150) for task in tasks] == [0, 0]


if __name__ == "__main__":
    if sys.argv[1] in ("bare", "slurm"):
        {"bare": bare, "slurm": slurm}[sys.argv[1]]()
    else:
        fit(sys.argv[1])

"""Queries that run in a disposable process: what torch sees of CUDA, and how fast processes exchange gradients.

Torch is imported only in the child, and everything that the child starts ends with it, even if it hangs.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

from fastloop.experiments.trials.supervise import STDOUT, Limits, supervise

Backend = Literal["nccl", "gloo"]

TORCH_LIMIT_S = 60
TORCH_QUESTION = """
import json, torch
cuda = torch.cuda.is_available()
count = torch.cuda.device_count()
print(json.dumps({
    "cuda_available": cuda,
    "device_count": count,
    "bf16_native": all(torch.cuda.get_device_capability(i)[0] >= 8 for i in range(count)) if cuda else None,
    "built_cuda": torch.version.cuda,
}))
"""

EXCHANGE_LIMIT_S = 120
EXCHANGE_BYTES = 64 * 2**20
EXCHANGE_REPEATS = 20
EXCHANGE_QUESTION = "from fastloop.commands import torch_probe; torch_probe.answer_exchange()"


class NoAnswer(Exception):
    """A child process failed or ran out of time; the message ends with the last lines of its stderr."""


@dataclass(frozen=True, kw_only=True)
class TorchProbe:
    """What torch reports about CUDA."""

    cuda_available: bool = False
    device_count: int = 0
    """Number of devices visible with CUDA_VISIBLE_DEVICES."""
    bf16_native: bool | None = None
    """Every device computes in bfloat16; False if one of them emulates it."""
    built_cuda: str | None = None
    """CUDA version torch was built for; ``None`` for a CPU or ROCm build."""
    trouble: str | None = None
    """Why torch could not answer."""


def probe_torch() -> TorchProbe:
    """Ask torch about CUDA; never raises."""
    try:
        return TorchProbe(**_answer_of_child(TORCH_QUESTION, limit_s=TORCH_LIMIT_S))
    except NoAnswer as trouble:
        return TorchProbe(trouble=str(trouble))


def exchange_gb_per_s(backend: Backend, ranks: int) -> float:
    """Return the bus bandwidth of a 64 MiB fp32 all-reduce between ``ranks`` processes, in 10^9 bytes per second.

    Raises:
        NoAnswer: the exchange failed, gave a wrong sum or hung.
    """
    answer = _answer_of_child(EXCHANGE_QUESTION, backend, str(ranks), limit_s=EXCHANGE_LIMIT_S)
    return float(answer["busbw_gb_per_s"])


def answer_exchange() -> None:
    """Run in the child: start the ranks that ``sys.argv`` requests, and write rank 0's measurement to stdout."""
    multiprocessing: Any = importlib.import_module("torch.multiprocessing")  # torch leaves it untyped
    backend, ranks = sys.argv[1], int(sys.argv[2])
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(_time_all_reduce, args=(backend, ranks, folder), nprocs=ranks)
        sys.stdout.write(Path(folder, "answer.json").read_text())


def _time_all_reduce(rank: int, backend: Backend, ranks: int, folder: str) -> None:
    """Run one rank: check the sum of one all-reduce, then take the median time of several more.

    Bus bandwidth = bytes / s * 2 (ranks - 1) / ranks. Source: NVIDIA/nccl-tests, doc/PERFORMANCE.md.
    """
    import torch
    import torch.distributed as dist

    on_gpu = backend == "nccl"
    if on_gpu:
        torch.cuda.set_device(rank)
    store, patience = f"file://{folder}/store", timedelta(seconds=EXCHANGE_LIMIT_S)
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=ranks, timeout=patience)
    flat = torch.ones(EXCHANGE_BYTES // 4, device="cuda" if on_gpu else "cpu")
    dist.all_reduce(flat)
    if not bool((flat == ranks).all()):
        raise RuntimeError(f"the sum of {ranks} ones came out wrong: this transport corrupts data")
    seconds = []
    for _ in range(EXCHANGE_REPEATS):
        start = time.perf_counter()
        dist.all_reduce(flat)
        if on_gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    busbw_gb_per_s = EXCHANGE_BYTES / statistics.median(seconds) * 2 * (ranks - 1) / ranks / 1e9
    if rank == 0:
        Path(folder, "answer.json").write_text(json.dumps({"busbw_gb_per_s": busbw_gb_per_s}))
    dist.destroy_process_group()


def _answer_of_child(code: str, *arguments: str, limit_s: float) -> dict[str, Any]:
    """Run ``code`` in a fresh interpreter and return the JSON object on its last line; nothing it starts is left.

    Raises:
        NoAnswer: it failed, or gave no answer within ``limit_s``.
    """
    # the child finds the same modules as this process, but not a torch.py in the working directory
    search_path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
    with tempfile.TemporaryDirectory() as folder:
        ended = supervise(
            [sys.executable, "-c", code, *arguments],
            Path(folder),
            limits=Limits(total_s=limit_s, grace_s=0.0),
            env={**os.environ, "PYTHONPATH": search_path, "PYTHONSAFEPATH": "1"},
        )
        lines = Path(folder, STDOUT).read_text(encoding="utf-8", errors="replace").splitlines()
    why = f"no answer within {limit_s:g} s"
    if ended.seconds <= limit_s:
        with contextlib.suppress(IndexError, ValueError):
            return dict(json.loads(lines[-1]))
        why = f"exit code {ended.code} and no answer"
    raise NoAnswer(": ".join([why, *ended.tail.splitlines()[-3:]]))

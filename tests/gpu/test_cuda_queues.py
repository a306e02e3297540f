"""Whether CUDA takes the number of hardware queues that a callback with DALI sets."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
    pytest.mark.timeout(150),
    pytest.mark.alone,
]

SCRIPT = """
import sys, time, torch
from fastloop import FastLoop

if "asks" in sys.argv:
    torch.cuda.is_available()
FastLoop({"rungs": {"dali": {"enabled": "dali" in sys.argv}}})
streams = [torch.cuda.Stream() for _ in range(24)]

def time_chains(streams):
    torch.cuda.synchronize()
    began = time.perf_counter()
    for stream in streams:
        with torch.cuda.stream(stream):
            for _ in range(4):
                torch.cuda._sleep(2_000_000)
    torch.cuda.synchronize()
    return time.perf_counter() - began

time_chains(streams)
print(min(time_chains(streams) for _ in range(5)) / min(time_chains(streams[:1]) for _ in range(5)))
"""


@pytest.mark.parametrize(("arguments", "apart"), [(["dali"], True), (["asks", "dali"], True), ([], False)])
def test_chains_of_kernels_in_24_streams_run_side_by_side(arguments: list[str], apart: bool) -> None:
    """Of three chains in one queue, each waits for the one before it; each kernel sleeps on a single thread."""
    variables = {name: value for name, value in os.environ.items() if name != "CUDA_DEVICE_MAX_CONNECTIONS"}
    command = [sys.executable, "-c", SCRIPT, *arguments]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120, check=True)
    ratio = float(done.stdout.split()[-1])
    assert ratio < 1.5 if apart else ratio > 2, ratio

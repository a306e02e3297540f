"""Run a Python program in a process of its own, with a time limit that holds for everything it starts."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests import preloaded

ROOT = Path(__file__).resolve().parents[2]
OF_ANOTHER_RUN = (
    "PYTEST_",
    "LOCAL_RANK",
    "RANK",
    "WORLD_SIZE",
    "MASTER_",
    "NODE_RANK",
    "GROUP_RANK",
    "TORCHELASTIC",
    "PL_",
    "FASTLOOP_",
    "SLURM_",
)
"""Variables with these prefixes are of the run that the tests themselves may be part of."""


def python(
    *arguments: str | Path,
    cwd: Path,
    limit_s: float = 200,
    env: Mapping[str, str] | None = None,
    executed: bool = False,
) -> str:
    """What the program wrote to both streams, which must be an exit code 0.

    Args:
        executed: start a new interpreter, as people do, in place of forking one that has imported its libraries.

    Raises:
        AssertionError: another exit code, or the time was up; with all it wrote.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith(OF_ANOTHER_RUN)}
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment |= {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", **(env or {})}
    with contextlib.nullcontext() if executed else preloaded.quick_starts(ranks=True):
        program = subprocess.Popen(
            [sys.executable, *map(str, arguments)],
            cwd=cwd,
            env=environment,
            text=True,
            start_new_session=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
    try:
        said, _ = program.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(program.pid, signal.SIGKILL)
        said, _ = program.communicate()
        raise AssertionError(f"not done after {limit_s} s:\n{said}") from None
    assert program.returncode == 0, f"exit code {program.returncode}:\n{said}"
    return said


@functools.cache
def fit_on_two_ranks(program: Path) -> list[Any]:
    """What each of a program's two ranks has written into its file; run once for all tests of a session."""
    import torch

    with tempfile.TemporaryDirectory() as folder:
        python(program, cwd=Path(folder))
        return [torch.load(Path(folder) / f"rank{rank}.pt", weights_only=True) for rank in (0, 1)]

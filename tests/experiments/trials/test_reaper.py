"""Nothing that a command starts outlives it or its supervisor, whoever of them is killed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from fastloop.experiments.trials import reaper
from tests.commands.command_line import ROOT, wait_for

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="orphans come to the leash on Linux only")
SLEEPS = "import time; time.sleep(60)"
FAMILY = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session={own_session})
open("pids", "w").write(f"{{os.getpid()}} {{child.pid}}\\n")
{then}
"""
"""A command and a child of its own, in its group or, as torchrun starts its ranks, not."""


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


@contextlib.contextmanager
def leashed(code: str, folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], Any]]:
    process, hold = reaper.start(
        python(code), cwd=folder, stdin=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    try:
        yield process, hold
    finally:
        hold.close()
        process.wait(100)


def pids(folder: Path) -> list[int]:
    """What the family wrote, once it has."""
    path = folder / "pids"
    text = wait_for(lambda: path.read_text() if path.is_file() and path.read_text().endswith("\n") else None)
    return [int(pid) for pid in text.split()]


def gone(*numbers: int) -> bool:
    """Whether none of them runs: a zombie, which some containers never reap, does not."""
    for pid in numbers:
        with contextlib.suppress(psutil.NoSuchProcess):
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                return False
    return True


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("pass", 0),
        ("import sys; sys.exit(7)", 7),
        ("raise SystemExit('no')", 1),
        ("import os; os.kill(os.getpid(), 11)", -11),
        ("import os; os.kill(os.getpid(), 9)", -9),
    ],
)
def test_it_ends_as_the_command_ends(end: str, code: int, tmp_path: Path) -> None:
    with leashed(end, tmp_path) as (process, hold):
        assert process.wait(100) == code
        assert hold.recv(1) == b"", "and lets the supervisor know without being asked"


def test_a_command_that_is_not_there_is_127(tmp_path: Path) -> None:
    process, hold = reaper.start(
        ["no-such-program"], cwd=tmp_path, stderr=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    with hold, process:
        assert process.wait(100) == 127
        assert process.stderr is not None and b"no-such-program: No such file" in process.stderr.read()


@LINUX
@pytest.mark.parametrize("own_session", [False, True])
def test_children_left_behind_end_with_the_command(own_session: bool, tmp_path: Path) -> None:
    with leashed(FAMILY.format(own_session=own_session, then="pass"), tmp_path) as (process, _):
        assert process.wait(100) == 0
        assert gone(*pids(tmp_path))


@LINUX
@pytest.mark.parametrize("own_session", [False, True])
def test_let_go_it_leaves_nothing(own_session: bool, tmp_path: Path) -> None:
    with leashed(FAMILY.format(own_session=own_session, then="time.sleep(60)"), tmp_path) as (process, hold):
        family = pids(tmp_path)
        assert not gone(*family)
        hold.close()
        assert process.wait(100) == -signal.SIGKILL
        assert gone(*family)


def test_a_byte_ends_a_command_that_ignores_signals(tmp_path: Path) -> None:
    ignores = f"import signal; [signal.signal(n, signal.SIG_IGN) for n in (2, 15)]; open('up', 'w'); {SLEEPS}"
    with leashed(ignores, tmp_path) as (process, hold):
        wait_for((tmp_path / "up").exists)
        os.killpg(process.pid, signal.SIGTERM)
        time.sleep(0.3)
        assert process.poll() is None, "the leash itself does not end by what is meant for the command"
        hold.send(b".")
        assert process.wait(100) == -signal.SIGKILL


def test_signals_reach_the_command_with_their_usual_meaning(tmp_path: Path) -> None:
    with leashed(f"open('up', 'w'); {SLEEPS}", tmp_path) as (process, _):
        wait_for((tmp_path / "up").exists)
        os.killpg(process.pid, signal.SIGTERM)
        assert process.wait(100) == -signal.SIGTERM


@LINUX
def test_with_the_leash_killed_the_command_ends(tmp_path: Path) -> None:
    with leashed(f"import os; open('pids', 'w').write(f'{{os.getpid()}}\\n'); {SLEEPS}", tmp_path) as (process, _):
        family = pids(tmp_path)
        process.kill()
        wait_for(lambda: gone(*family))


@LINUX
@pytest.mark.parametrize("own_session", [False, True])
def test_with_the_supervisor_killed_nothing_is_left(own_session: bool, tmp_path: Path) -> None:
    command = python(FAMILY.format(own_session=own_session, then="time.sleep(60)"))
    supervisor = (
        f"import time\nfrom fastloop.experiments.trials import reaper\nkept = reaper.start({command!r})\ntime.sleep(60)"
    )
    process = subprocess.Popen(python(supervisor), cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)})
    try:
        family = pids(tmp_path)
        assert not gone(*family)
    finally:
        process.kill()
        process.wait()
    wait_for(lambda: gone(*family))


@LINUX
def test_shared_memory_is_given_back(tmp_path: Path) -> None:
    holds = (
        "import os, time\nfrom multiprocessing.shared_memory import SharedMemory\n"
        "memory = SharedMemory(create=True, size=4096)\n"
        "open('name', 'w').write(memory.name + '\\n')\ntime.sleep(60)"
    )
    with leashed(holds, tmp_path) as (process, hold):
        name = tmp_path / "name"
        wait_for(lambda: name.is_file() and name.read_text().endswith("\n"))
        segment = Path("/dev/shm") / name.read_text().strip()
        assert segment.exists()
        hold.close()
        process.wait(100)
        assert not segment.exists(), "its resource tracker had the time to take it away"

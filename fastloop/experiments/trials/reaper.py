"""A process between a command and its supervisor, so that nothing the command starts outlives either of them.

This small process, ``python -m fastloop.experiments.trials.reaper SOCKET COMMAND…``, starts the command and waits for
it. When the command has ended, when the supervisor sends a byte, or when the supervisor is gone (its socket then reads
as closed), it kills all descendants and ends as the command ended. On Linux it adopts orphans, so it also finds those
that left the process group, such as torchrun's ranks; and if it is killed itself, the kernel kills the command.
Source: prctl(2), PR_SET_CHILD_SUBREAPER and PR_SET_PDEATHSIG.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import IO

import psutil

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
LIMIT_S = 10.0
"""Longest wait for a process to die: one in an uninterruptible kernel call may never do so."""
CLEANERS = ("multiprocessing.resource_tracker", "torch_shm_manager")
"""Processes that free shared memory once all its users have ended…"""
CLEANERS_S = 2.0
"""… and the time they get for it."""


def start(
    command: Sequence[str],
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    stdin: int | None = None,
    stdout: IO[bytes] | int | None = None,
    stderr: IO[bytes] | int | None = None,
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start a command on a leash, in a new session.

    Returns:
        The leash, which ends as the command ends, and the socket that controls it: closing the socket or sending one
        byte makes the leash kill everything; it reads as closed once the leash has ended.
    """
    ours, theirs = socket.socketpair()
    try:
        line = [sys.executable, "-m", __name__, str(theirs.fileno()), *command]
        process = subprocess.Popen(
            line,
            pass_fds=(theirs.fileno(),),
            start_new_session=True,
            cwd=cwd,
            env=env,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
        )
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
    return process, ours


def main() -> int:
    """Run the leash."""
    ignore_signals()
    held = int(sys.argv[1])  # a bare descriptor: it closes only when this process ends
    adopt_orphans(True)
    try:
        # preexec_fn is safe here: there is no other thread yet.
        child = subprocess.Popen(sys.argv[2:], preexec_fn=lambda: die_with_parent(signal.SIGKILL))
    except OSError as error:
        sys.stderr.write(f"{sys.argv[2]}: {error.strerror or error}\n")
        return 127
    return keep(held, child.wait)


def ignore_signals() -> None:
    """Ignore signals meant for the command, without SIG_IGN, which the command would inherit."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2):
        signal.signal(number, lambda *_: None)


def keep(held: int, wait: Callable[[], int]) -> int:
    """Wait for the command, kill all its descendants, and end as it ended, even if by a signal.

    Args:
        held: the descriptor of the socket that its supervisor holds.
        wait: returns the command's exit code, or the negative number of a signal.
    """
    threading.Thread(target=_wait_until_let_go, args=(held,), daemon=True).start()
    code = wait()
    end_descendants()
    if code < 0:
        _end_by(-code)
    return code


def adopt_orphans(on: bool) -> None:
    """Make this process, instead of init, adopt orphaned descendants; on Linux only."""
    _call_prctl(PR_SET_CHILD_SUBREAPER, int(on))


def die_with_parent(number: int) -> None:
    """Send this process the given signal when its parent ends; on Linux only."""
    _call_prctl(PR_SET_PDEATHSIG, number)


def _call_prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _wait_until_let_go(held: int) -> None:
    with contextlib.suppress(OSError):
        os.read(held, 1)
    end_descendants()


def list_descendants() -> set[int]:
    """Return the process ids of all descendants of this process."""
    return {process.pid for process, _ in _list_descendants()}


def end_descendants(besides: Collection[int] = (), grace_s: float = 0.0) -> None:
    """Kill all descendants of this process until none is left.

    Args:
        besides: process ids that are left alone.
        grace_s: seconds that the others get to end by themselves.
    """
    begun = time.monotonic()
    while remaining := [each for each in _list_descendants() if each[0].pid not in besides]:
        spent = time.monotonic() - begun
        if spent > LIMIT_S + grace_s:
            return
        for process, cleans in remaining:
            if spent >= (max(grace_s, CLEANERS_S) if cleans else grace_s):
                with contextlib.suppress(psutil.Error):
                    process.kill()
        time.sleep(0.02)


def _list_descendants() -> list[tuple[psutil.Process, bool]]:
    """Return the living descendants, without zombies, and whether each one frees shared memory."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE:
                line = " ".join(process.cmdline())
                found.append((process, any(name in line for name in CLEANERS)))
    return found


def _end_by(number: int) -> None:
    """End by a signal, without a second core file."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError):  # SIGKILL has no handler to reset
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


if __name__ == "__main__":
    sys.exit(main())

"""Ending a training from outside or after an exception: in time, and without leaving processes behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from typing import Any

import psutil

TERMINATED = 143
"""Exit code after SIGTERM, as shells have it: 128 + 15."""
PATIENCE_S = 4.0
"""After SIGTERM Lightning ends a training once its batch is done. One that hangs is interrupted after this time…"""
LIMIT_S = 8.0
"""… and where not even that gets through, the process and its children are ended after this time."""
RANKS_S = 5.0
"""What the other ranks get to end by themselves."""


@contextlib.contextmanager
def ends(trainer: Any) -> Iterator[None]:
    """Make a fit end as a command has to: on SIGTERM, on Ctrl-C, and with the ranks that were started for it.

    Raises:
        KeyboardInterrupt: the user stopped the fit (Lightning itself exits with 1).
        SystemExit: 143 after SIGTERM.
    """
    try:
        with _on_sigterm(trainer):
            yield
    except BaseException as error:
        _end_ranks(trainer)
        if isinstance(error, SystemExit) and isinstance(error.__context__, KeyboardInterrupt):
            raise KeyboardInterrupt from None
        if type(error).__name__ == "SIGTERMException":  # Lightning's, an exit without a code
            raise SystemExit(TERMINATED) from None
        raise


@contextlib.contextmanager
def _on_sigterm(trainer: Any) -> Iterator[None]:
    """Lightning calls the handler it finds after its own, and has none before the loops begin and after they end."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return
    last_resort = threading.Timer(LIMIT_S, _end_all)
    last_resort.daemon = True

    def leave(*_: Any) -> None:
        raise SystemExit(TERMINATED)

    def terminate(*_: Any) -> None:
        first = not last_resort.ident
        if first:
            last_resort.start()
            signal.setitimer(signal.ITIMER_REAL, PATIENCE_S)
        if not (first and trainer.received_sigterm):
            leave()

    before = signal.signal(signal.SIGTERM, terminate), signal.signal(signal.SIGALRM, leave)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGTERM, before[0])
        signal.signal(signal.SIGALRM, before[1])
        last_resort.cancel()


def _end_ranks(trainer: Any) -> None:
    """End the ranks this process started: once it has raised, they may wait for it in a collective for ever."""
    end = time.monotonic() + RANKS_S
    for rank in getattr(trainer.strategy.launcher, "procs", ()):
        if isinstance(rank, subprocess.Popen):
            with contextlib.suppress(subprocess.TimeoutExpired):
                rank.wait(max(0.0, end - time.monotonic()))
            rank.kill()


def _end_all() -> None:
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                child.kill()
    os._exit(TERMINATED)

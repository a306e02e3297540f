"""Ends a training on a signal or after an exception: in time, and without leaving processes behind."""

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
from lightning.pytorch.callbacks import Callback

INTERRUPTED, TERMINATED = 130, 143
"""Exit codes after Ctrl-C and SIGTERM, as in shells: 128 plus the signal's number."""
AGAIN_S = 0.5
"""Python drops exceptions that a signal raises in fork hooks and finalizers, so Ctrl-C is raised again at this interval
until it takes effect."""
PATIENCE_S = 4.0
"""After SIGTERM Lightning ends a training once its batch is done. One that hangs is interrupted after this time."""
LIMIT_S = 8.0
"""If the interrupt has no effect either, the process and its children are killed after this time."""
RANKS_S = 2.0
"""Time for the other ranks to end by themselves after this one has raised."""


@contextlib.contextmanager
def ends(trainer: Any) -> Iterator[None]:
    """Make a fit end like a command: on SIGTERM, on Ctrl-C, and together with the ranks started for it.

    Raises:
        KeyboardInterrupt: the user stopped the fit (Lightning itself exits with 1).
        SystemExit: 143 after SIGTERM.
    """
    signals = _Signals(trainer)
    try:
        with signals.heard():
            yield
    except BaseException as error:
        _end_ranks(trainer)
        # Errors of a training after SIGTERM are consequences, for instance of its workers being gone.
        if signals.code == TERMINATED:
            raise SystemExit(TERMINATED) from None
        by_lightning = isinstance(error, SystemExit) and isinstance(error.__context__, KeyboardInterrupt)
        if signals.code == INTERRUPTED or by_lightning:
            raise KeyboardInterrupt from None
        raise


class _Signals(Callback):
    """Handles SIGINT and SIGTERM in a fit. They must reach Python: in a call that never returns, only SIGKILL helps.

    Lightning has its own SIGTERM handler only while the loops run, and calls ours after it.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.code: int | None = None
        """The exit code after a signal; None before one."""
        self._last_resort = threading.Timer(LIMIT_S, lambda: _end_all(self.code or TERMINATED))
        self._last_resort.daemon = True

    @contextlib.contextmanager
    def heard(self) -> Iterator[None]:
        if not _may_set_handlers():
            yield
            return
        self._trainer.callbacks.append(self)
        handlers = {signal.SIGTERM: self._on_sigterm, signal.SIGINT: self._on_sigint, signal.SIGALRM: self._on_alarm}
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a background job ignores it
            del handlers[signal.SIGINT]
        before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            for number, handler in before.items():
                signal.signal(number, handler)
            self._last_resort.cancel()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """With several ranks, replace Lightning's SIGTERM handler, which may wait in a collective forever.

        Instead the first rank leaves at once, as on Ctrl-C, and ends those that were started for it.
        """
        if trainer.world_size > 1 and _may_set_handlers():
            by_others = {"TORCHELASTIC_RUN_ID", "SLURM_PROCID"} & set(os.environ)
            leaves = trainer.is_global_zero or by_others
            signal.signal(signal.SIGTERM, self._leave if leaves else signal.SIG_IGN)

    def _begin(self, code: int, alarm_s: float) -> bool:
        """Start the timers if this is the first signal; returns whether it is."""
        if self.code is not None:
            return False
        self.code = code
        self._last_resort.start()
        signal.setitimer(signal.ITIMER_REAL, alarm_s, alarm_s)
        return True

    def _on_sigterm(self, *_: Any) -> None:
        first = self._begin(TERMINATED, PATIENCE_S)
        if not (first and self._trainer.received_sigterm):
            raise SystemExit(TERMINATED)

    def _leave(self, *_: Any) -> None:
        self._begin(TERMINATED, PATIENCE_S)
        raise SystemExit(TERMINATED)

    def _on_sigint(self, *_: Any) -> None:
        self._begin(INTERRUPTED, AGAIN_S)
        raise KeyboardInterrupt

    def _on_alarm(self, *_: Any) -> None:
        if self.code != INTERRUPTED:
            raise SystemExit(TERMINATED)
        # Once Lightning handles Ctrl-C it ignores further ones, and then marks the fit as interrupted.
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN and not self._trainer.interrupted:
            raise KeyboardInterrupt


def _may_set_handlers() -> bool:
    return threading.current_thread() is threading.main_thread()


def _end_ranks(trainer: Any) -> None:
    """End the ranks that this process started: once it has raised, they may wait for it in a collective forever."""
    end = time.monotonic() + RANKS_S
    launched = getattr(trainer.strategy.launcher, "procs", [])
    ranks = [rank for rank in launched if isinstance(rank, subprocess.Popen)]
    if ranks:
        launched.clear()  # a thread of Lightning's kills this process once it sees that a rank was killed
    for rank in ranks:
        with contextlib.suppress(subprocess.TimeoutExpired):
            rank.wait(max(0.0, end - time.monotonic()))
        rank.kill()


def _end_all(code: int) -> None:
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                child.kill()
    os._exit(code)

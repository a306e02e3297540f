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
from lightning.pytorch.callbacks import Callback

INTERRUPTED, TERMINATED = 130, 143
"""Exit codes after Ctrl-C and SIGTERM, as shells have them: 128 and the signal's number."""
AGAIN_S = 0.5
"""An exception that a signal raises is lost in the hooks of a fork and in finalizers: Ctrl-C is raised until heard."""
PATIENCE_S = 4.0
"""After SIGTERM Lightning ends a training once its batch is done. One that hangs is interrupted after this time…"""
LIMIT_S = 8.0
"""… and where not even that gets through, the process and its children are ended after this time."""
RANKS_S = 2.0
"""What the other ranks get to end by themselves, once this one has raised."""


@contextlib.contextmanager
def ends(trainer: Any) -> Iterator[None]:
    """Make a fit end as a command has to: on SIGTERM, on Ctrl-C, and with the ranks that were started for it.

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
        # What a training raises once it was told to end is a consequence: of its workers being gone, for instance.
        if signals.code == TERMINATED:
            raise SystemExit(TERMINATED) from None
        by_lightning = isinstance(error, SystemExit) and isinstance(error.__context__, KeyboardInterrupt)
        if signals.code == INTERRUPTED or by_lightning:
            raise KeyboardInterrupt from None
        raise


class _Signals(Callback):
    """What SIGINT and SIGTERM do to a fit. They have to reach Python: in a call that never returns only SIGKILL helps.

    Lightning calls the handler of SIGTERM it finds after its own. It has none before the loops and after them.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.code: int | None = None
        """How the process will end, once a signal came."""
        self._last_resort = threading.Timer(LIMIT_S, lambda: _end_all(self.code or TERMINATED))
        self._last_resort.daemon = True

    @contextlib.contextmanager
    def heard(self) -> Iterator[None]:
        if not _may_set_handlers():
            yield
            return
        self._trainer.callbacks.append(self)
        handlers = {signal.SIGTERM: self._on_sigterm, signal.SIGINT: self._on_sigint, signal.SIGALRM: self._on_alarm}
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in the background
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
        """Lightning's own handler waits for all ranks in a collective, where they may wait for each other for ever.

        So with several ranks the first one leaves at once, as on Ctrl-C, and takes along those started for it.
        """
        if trainer.world_size > 1 and _may_set_handlers():
            by_others = {"TORCHELASTIC_RUN_ID", "SLURM_PROCID"} & set(os.environ)
            leaves = trainer.is_global_zero or by_others
            signal.signal(signal.SIGTERM, self._leave if leaves else signal.SIG_IGN)

    def _begin(self, code: int, alarm_s: float) -> bool:
        """Whether this is the first signal; then the clocks are started."""
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
        # Once Lightning has heard Ctrl-C it ignores all further ones, and then marks the fit.
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN and not self._trainer.interrupted:
            raise KeyboardInterrupt


def _may_set_handlers() -> bool:
    return threading.current_thread() is threading.main_thread() and hasattr(signal, "setitimer")


def _end_ranks(trainer: Any) -> None:
    """End the ranks this process started: once it has raised, they may wait for it in a collective for ever."""
    end = time.monotonic() + RANKS_S
    for rank in getattr(trainer.strategy.launcher, "procs", ()):
        if isinstance(rank, subprocess.Popen):
            with contextlib.suppress(subprocess.TimeoutExpired):
                rank.wait(max(0.0, end - time.monotonic()))
            rank.kill()


def _end_all(code: int) -> None:
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                child.kill()
    os._exit(code)

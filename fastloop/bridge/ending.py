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

TERMINATED = 143
"""Exit code after SIGTERM, as shells have it: 128 + 15."""
PATIENCE_S = 4.0
"""After SIGTERM Lightning ends a training once its batch is done. One that hangs is interrupted after this time…"""
LIMIT_S = 8.0
"""… and where not even that gets through, the process and its children are ended after this time."""
AGAIN_S = 1.0
"""A Ctrl-C that was not heard is repeated after this time."""
RANKS_S = 2.0
"""What the other ranks get to end by themselves, once this one has raised."""


@contextlib.contextmanager
def ends(trainer: Any) -> Iterator[None]:
    """Make a fit end as a command has to: on SIGTERM, on Ctrl-C, and with the ranks that were started for it.

    Raises:
        KeyboardInterrupt: the user stopped the fit (Lightning itself exits with 1).
        SystemExit: 143 after SIGTERM.
    """
    try:
        with _Terminate(trainer).heard():
            yield
    except BaseException as error:
        _end_ranks(trainer)
        if isinstance(error, SystemExit) and isinstance(error.__context__, KeyboardInterrupt):
            raise KeyboardInterrupt from None
        if type(error).__name__ == "SIGTERMException":  # Lightning's, an exit without a code
            raise SystemExit(TERMINATED) from None
        raise


class _Terminate(Callback):
    """What SIGTERM and SIGINT do to a fit. They have to reach Python: in a call that never returns only SIGKILL helps.

    Lightning calls the handler it finds after its own. It has none before the loops begin and after they end.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._last_resort = threading.Timer(LIMIT_S, _end_all)
        self._last_resort.daemon = True

    @contextlib.contextmanager
    def heard(self) -> Iterator[None]:
        if not _may_set_handlers():
            yield
            return
        self._trainer.callbacks.append(self)
        handlers: dict[signal.Signals, Any] = {signal.SIGTERM: self._on_sigterm, signal.SIGALRM: self._on_alarm}
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            handlers[signal.SIGINT] = self._on_sigint
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

    def _on_sigint(self, *_: Any) -> None:
        """Interrupt, and again until it is heard: Python drops what is raised inside a destructor, and torch's loader
        iterators join their workers in theirs, at the end of every epoch."""
        signal.setitimer(signal.ITIMER_REAL, AGAIN_S, AGAIN_S)
        raise KeyboardInterrupt

    def _on_alarm(self, *_: Any) -> None:
        if self._last_resort.ident is not None:
            self._leave()
        if self._trainer.interrupted:
            signal.setitimer(signal.ITIMER_REAL, 0)
        else:
            raise KeyboardInterrupt

    def _on_sigterm(self, *_: Any) -> None:
        first = self._last_resort.ident is None
        if first:
            self._last_resort.start()
            signal.setitimer(signal.ITIMER_REAL, PATIENCE_S)
        if not (first and self._trainer.received_sigterm):
            self._leave()

    def _leave(self, *_: Any) -> None:
        if self._last_resort.ident is None:
            self._last_resort.start()
        raise SystemExit(TERMINATED)


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


def _end_all() -> None:
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                child.kill()
    os._exit(TERMINATED)

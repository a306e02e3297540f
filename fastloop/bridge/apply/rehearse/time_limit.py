"""A time limit for work in the user's own process: raises in Python code; ends the process if native code hangs.

SIGTERM also ends such work, and so does an alarm of the user's own.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from fastloop.bridge import namespaces
from fastloop.errors import describe, walk_causes

GRACE_S = 60.0
"""If native code does not return to Python within this time after the limit, the process ends."""
SILENT_S = 2.0
"""A wait longer than this is announced to the user."""
REPEAT_S = 20.0
RETRY_S, AGAIN_S, MOST_LATE_S = 1e-3, 1.0, 5.0
"""Seconds until another try if nothing may be raised where the work is now; until a check whether native code ignored
the exception, which is then raised again; and after the limit, until it is raised anywhere."""
_WHOLE = frozenset({"__enter__", "__exit__", "__del__", "__torch_dispatch__", "run_node"})
"""Functions that nothing may interrupt: they change a mode, or run below native code that expects no exception."""
_CALLED_BACK = (
    *("/weakref.py", "/contextlib.py", "/torch/_library/", "/torch/_subclasses/", "/torch/_ops.py"),
    *("/torch/overrides.py", "/torch/utils/", "/torch/multiprocessing/", "/torch/_dynamo/utils.py"),
)
"""Files whose functions native code calls where it expects no exception: there it ends the process or is ignored."""


class TimeLimit(Exception):
    """The work took longer than its limit."""

    def __init__(self, message: str = "it took longer than its limit") -> None:
        super().__init__(message)


@contextlib.contextmanager
def limited(seconds: float, *, cause: str, do: str) -> Iterator[None]:
    """Raise `TimeLimit` in this thread after `seconds`; end the process with a message if that has no effect.

    Args:
        cause: what hung, for the message.
        do: what the user should do, for the message.
    """
    last_words = threading.Timer(seconds + GRACE_S, _end_process, (seconds + GRACE_S, cause, do))
    last_words.daemon = True
    last_words.start()
    try:
        with _alarm(seconds):
            yield
    finally:
        last_words.cancel()
        last_words.join()


@contextlib.contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    """Raise by a signal, which also interrupts waiting for a lock. Only the main thread receives signals, and an alarm
    of the user's own keeps its timer and its handler."""
    is_main = threading.current_thread() is threading.main_thread()
    is_used = signal.getsignal(signal.SIGALRM) is not signal.SIG_DFL or signal.getitimer(signal.ITIMER_REAL)[0] > 0
    if not is_main or is_used:
        with _interrupted(seconds):
            yield
        return

    within, latest, is_over = _find_caller(), time.monotonic() + seconds + MOST_LATE_S, False
    raised: weakref.ref[TimeLimit] | None = None

    def ring(_number: int, frame: FrameType | None) -> None:
        nonlocal raised
        if is_over:
            return
        if raised is not None and raised() is not None:
            # The exception is still being handled: nothing may interrupt the clean-up.
            signal.setitimer(signal.ITIMER_REAL, AGAIN_S)
            return
        if time.monotonic() < latest and not _may_raise_in(frame, within):
            signal.setitimer(signal.ITIMER_REAL, RETRY_S)
            return
        error = TimeLimit(f"it took longer than {seconds:.3g} s")
        raised = weakref.ref(error)
        signal.setitimer(signal.ITIMER_REAL, AGAIN_S)
        try:
            raise error
        finally:
            del error  # its own traceback would keep it alive

    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        is_over = True  # first: nothing can interrupt an assignment
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)


@contextlib.contextmanager
def _interrupted(seconds: float) -> Iterator[None]:
    """Raise in this thread, at its next line of Python code that may be interrupted."""
    this, within, done, is_over = threading.get_ident(), _find_caller(), threading.Event(), False
    raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc

    def ring() -> None:
        wait_s, latest = seconds, time.monotonic() + seconds + MOST_LATE_S
        while not (done.wait(wait_s) or is_over):
            if time.monotonic() >= latest or _may_raise_in(sys._current_frames().get(this), within):
                raise_in(ctypes.c_ulong(this), ctypes.py_object(TimeLimit))
                return
            wait_s = RETRY_S

    thread = threading.Thread(target=ring, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over = True
        done.set()
        thread.join()


def _find_caller() -> FrameType | None:
    """The frame of the ``with`` that is being entered."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_filename in (__file__, contextlib.__file__):
        frame = frame.f_back
    return frame


def _may_raise_in(frame: FrameType | None, within: FrameType | None) -> bool:
    """Whether an exception raised in this frame ends the work and has no other effect: an interrupted ``__exit__``
    would leave torch in the mode that it should have ended.

    Args:
        within: the frame that the limited work was called from.
    """
    if frame is None or any(part in frame.f_code.co_filename for part in _CALLED_BACK):
        return False
    while frame is not None and frame is not within:
        if frame.f_code.co_name in _WHOLE or frame.f_code.co_filename == weakref.__file__:
            return False
        frame = frame.f_back
    return True


def _end_process(seconds: float, cause: str, do: str) -> None:
    sys.stderr.write(
        f"fastloop: got {cause}, which has hung for {seconds:.0f} s\n"
        "  why it is stuck in native code, which only ending the process can stop\n"
        f"  do  {do}\n"
    )
    sys.stderr.flush()
    faulthandler.dump_traceback(all_threads=True)
    os._exit(1)


@contextlib.contextmanager
def leaves_on_sigterm(trainer: Any) -> Iterator[None]:
    """End the training at once when SIGTERM arrives; Lightning does so only after a batch. What we do between two
    batches can take a minute, and a preempted job often has half of that. With several ranks nothing changes: they must
    stop together, so Lightning ends them after the batch."""
    theirs = signal.getsignal(signal.SIGTERM)
    if trainer.world_size > 1 or not callable(theirs) or threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, frame: FrameType | None) -> None:
        theirs(number, frame)
        if trainer.received_sigterm:
            signal.signal(signal.SIGTERM, theirs)  # a second one must not interrupt what is put back
            raise namespaces.load(namespaces.find_namespace(trainer), "utilities.exceptions.SIGTERMException")

    signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, theirs)


@contextlib.contextmanager
def announced(what: str, say: Callable[[str], None]) -> Iterator[None]:
    """Report what is running once it has taken two seconds, and again every twenty."""
    done, began = threading.Event(), time.monotonic()

    def speak() -> None:
        wait = SILENT_S
        while not done.wait(wait):
            say(f"{what} ({time.monotonic() - began:.0f} s so far)")
            wait = REPEAT_S

    thread = threading.Thread(target=speak, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def explain(error: Exception) -> str:
    """Describe the error. A compile may wrap a `TimeLimit` raised inside it in its own error; an exception that a
    signal handler raised passes through."""
    limit = find_limit(error)
    return describe(error) if limit is None else str(limit)


def find_limit(error: BaseException) -> TimeLimit | None:
    """The `TimeLimit` that this error is, or that caused it; None if there is none."""
    return next((each for each in walk_causes(error) if isinstance(each, TimeLimit)), None)

"""A time limit for work in the user's own process: raises in Python code; ends the process if native code hangs.

SIGTERM also ends such work. The user's own alarm rings in it.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import math
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
EARLY_S = 1e-3
"""A timer may ring before its time by no more than this."""
_Handler = Callable[[int, FrameType | None], Any]
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
    """Raise by a signal, which also interrupts waiting for a lock. Only the main thread receives signals."""
    if threading.current_thread() is not threading.main_thread():
        with _interrupted(seconds):
            yield
        return

    within, limit, is_over, theirs = _find_caller(), time.monotonic() + seconds, False, _TheirAlarm()
    raised: weakref.ref[TimeLimit] | None = None

    def ring(number: int, frame: FrameType | None) -> None:
        nonlocal raised
        if is_over:
            return
        waits_since = theirs.note_signal(limit)
        if theirs.is_raising or (raised is not None and raised() is not None):
            # An exception is on its way out: nothing may interrupt what puts things back.
            signal.setitimer(signal.ITIMER_REAL, AGAIN_S)
            return
        latest = MOST_LATE_S + (limit if waits_since is None else waits_since)
        if time.monotonic() < latest and not _may_raise_in(frame, within):
            signal.setitimer(signal.ITIMER_REAL, RETRY_S)
            return
        if waits_since is not None:
            theirs.pass_on(number, frame, ring, limit)
            return
        error = TimeLimit(f"it took longer than {seconds:.3g} s")
        raised = weakref.ref(error)
        signal.setitimer(signal.ITIMER_REAL, AGAIN_S)
        try:
            raise error
        finally:
            del error  # its own traceback would keep it alive

    theirs.replace(ring, limit)
    try:
        yield
    finally:
        is_over = True  # first: nothing can interrupt an assignment
        theirs.put_back()


class _TheirAlarm:
    """The user's own SIGALRM, with its handler and timer, while our limit uses both. It still rings on time, or a
    little later where nothing may be raised, since the user's handler may raise. If what it raised was ignored, as
    torch does in parts of a compile, it rings again."""

    def __init__(self) -> None:
        self._handler: _Handler | int | None = signal.SIG_DFL
        self._due, self._every_s = math.inf, 0.0
        self._waits_since: float | None = None
        self._raising: weakref.ref[object] | None = None

    @property
    def is_raising(self) -> bool:
        """Whether what the user's handler raised is on its way out."""
        return self._raising is not None and self._raising() is not None

    def replace(self, ring: _Handler, limit: float) -> None:
        """Let `ring` handle the signal, which comes at `limit`, or at the user's own time if that is earlier."""
        self._handler = signal.getsignal(signal.SIGALRM)
        left, self._every_s = signal.setitimer(signal.ITIMER_REAL, 0)
        now = time.monotonic()
        self._due = now + left if left else math.inf
        signal.signal(signal.SIGALRM, ring)
        signal.setitimer(signal.ITIMER_REAL, max(RETRY_S, min(limit, self._due) - now))

    def put_back(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL if self._handler is None else self._handler)  # None: set from C
        due = self._due if self._waits_since is None or self.is_raising else self._waits_since
        if due < math.inf:
            signal.setitimer(signal.ITIMER_REAL, max(1e-3, due - time.monotonic()), self._every_s)

    def note_signal(self, limit: float) -> float | None:
        """Return since when a signal of the user's waits; None if none does. One that came before `limit` is theirs."""
        now = time.monotonic()
        if self._waits_since is None and (now < limit - EARLY_S or now >= self._due - EARLY_S):
            self._waits_since = now
        return self._waits_since

    def pass_on(self, number: int, frame: FrameType | None, ring: _Handler, limit: float) -> None:
        """Call the user's handler, which finds its own timer, and may change that and the handler."""
        late_s, self._waits_since = time.monotonic() + EARLY_S - self._due, None
        if late_s >= 0:  # an interval's next time; those that it missed came as one
            self._due += self._every_s * (1 + late_s // self._every_s) if self._every_s else math.inf
        self.put_back()
        mark = set[object]()  # lives as long as this frame, which an exception's traceback keeps
        self._raising = weakref.ref(mark)
        try:
            if callable(self._handler):
                self._handler(number, frame)
            else:
                signal.raise_signal(number)  # the system's own, which ends the process, or none
        except BaseException:
            self._waits_since = time.monotonic()
            limit = self._waits_since + AGAIN_S
            raise
        finally:
            self.replace(ring, limit)


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
    limit = find_cause(error, is_time_limit)
    return describe(error) if limit is None else str(limit)


def is_time_limit(error: BaseException) -> bool:
    return isinstance(error, TimeLimit)


def find_cause(error: BaseException, is_wanted: Callable[[BaseException], bool]) -> BaseException | None:
    """The error itself or one in its chain of causes, if it is wanted; else None."""
    return next(filter(is_wanted, walk_causes(error)), None)

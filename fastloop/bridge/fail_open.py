"""Protects the user's training from our own mistakes: the off switch, and hooks that fail open."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import signal
import threading
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Protocol, TypeVar

from fastloop.errors import FastLoopError, is_out_of_memory, let_through
from fastloop.ladder import collect_cards

Hook = TypeVar("Hook", bound=Callable[..., Any])


def is_disabled(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether FASTLOOP_DISABLE switches everything off."""
    return environ.get("FASTLOOP_DISABLE", "") not in ("", "0")


class Guarded(Protocol):
    """An object whose hooks fail open."""

    off: bool

    def stop_watching(self, why: str) -> None: ...


def fail_open(hook: Hook) -> Hook:
    """Turn an exception in our own code into one warning; training goes on without us. Errors meant for the user pass
    through, and so does an exception that a signal handler raised while our code ran."""

    @functools.wraps(hook)
    def guarded(self: Guarded, *args: Any, **kwargs: Any) -> Any:
        if self.off:
            return None
        try:
            return hook(self, *args, **kwargs)
        except FastLoopError:
            raise
        except Exception as error:
            let_through(error)
            self.stop_watching(f"{hook.__name__}: {type(error).__name__}: {error}")
            return None

    return guarded  # type: ignore[return-value]


@contextlib.contextmanager
def ignoring_dead_workers() -> Iterator[None]:
    """Ignore the death of loader workers. A SIGTERM to the whole process group ends them as well, and once a training
    has ended, torch's SIGCHLD handler would only raise in the middle of the report."""
    handler = signal.getsignal(signal.SIGCHLD)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, handler)


# -- one-line explanations of exceptions with unclear messages ---------------------------------------------------------


def explain_exception(
    exception: BaseException, module: Any, rungs: Collection[str], held: Collection[str] = ()
) -> str | None:
    """Return one line that explains an exception in a run with these rungs; None if we cannot add to its message.

    Args:
        held: rungs that wait for the first step to end.
    """
    text = str(exception)
    if held and is_out_of_memory(exception):
        without = f"out of memory in step 1, which runs without {', '.join(held)}"
        return f"{without}; to switch them on from the start, write rehearsal: off"
    if "did not receive grad for rank" in text:
        return _name_unused_parameters(text, module)
    explained = {part: line for rung in rungs for part, line in collect_cards()[rung].explains.items()}
    places = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(exception.__traceback__)]
    return next((line for part, line in explained.items() if any(part in each for each in (text, *places))), None)


def _name_unused_parameters(text: str, module: Any) -> str | None:
    """Name the parameters without a gradient, which DDP lists by index; None if that fails."""
    match = re.search(r"did not receive grad for rank \d+: ([\d ]+)", text)
    if match is None or module is None:
        return None
    ignored = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
    names = [name for name, parameter in module.named_parameters() if parameter.requires_grad and name not in ignored]
    unused = [names[int(index)] for index in match[1].split() if int(index) < len(names)]
    return f"parameters without a gradient: {', '.join(unused)}" if unused else None

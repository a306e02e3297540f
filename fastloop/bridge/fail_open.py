"""What keeps our own mistakes away from somebody else's training: the switch, and hooks that fail open."""

from __future__ import annotations

import functools
import inspect
import os
import re
import traceback
from collections.abc import Callable, Collection
from itertools import pairwise
from types import FrameType
from typing import Any, Protocol, TypeVar

from fastloop.errors import FastLoopError
from fastloop.ladder import cards

Hook = TypeVar("Hook", bound=Callable[..., Any])


def disabled() -> bool:
    """Whether FASTLOOP_DISABLE switches everything off."""
    return os.environ.get("FASTLOOP_DISABLE", "") not in ("", "0")


class Guarded(Protocol):
    """Whose hooks fail open."""

    off: bool

    def stop_watching(self, why: str) -> None: ...


def fail_open(hook: Hook) -> Hook:
    """An exception in our own code is one warning, and training goes on without us. Errors meant for a person pass, and
    so does what a signal's handler raised while our code ran."""

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


def let_through(error: BaseException) -> None:
    """Raise what a signal's handler raised, where that is what `error` is or came from; it is not ours to swallow.

    Python runs a handler wherever the main thread is, so inside our hooks too. torch's for SIGCHLD raises that a worker
    of the loader was killed, and says so once only; handlers of the user's raise what they like.
    """
    seen: set[int] = set()
    found: BaseException | None = error
    while found is not None and id(found) not in seen:
        if _came_by_signal(found):
            raise found
        seen.add(id(found))
        found = found.__cause__ or found.__context__


def _came_by_signal(error: BaseException) -> bool:
    """Whether a frame of its traceback was called as handlers are: with a number and the frame that it interrupted."""
    outer = error.__traceback__
    while outer is not None and (inner := outer.tb_next) is not None:
        given = _list_arguments(inner.tb_frame)
        if any(isinstance(number, int) and frame is outer.tb_frame for number, frame in pairwise(given)):
            return True
        outer = inner
    return False


def _list_arguments(frame: FrameType) -> list[Any]:
    """What a frame's function was called with, as far as it still has it."""
    code = frame.f_code
    starred = bool(code.co_flags & inspect.CO_VARARGS)
    names = code.co_varnames[: code.co_argcount]
    rest = code.co_varnames[code.co_argcount + code.co_kwonlyargcount :][:starred]
    values = frame.f_locals
    return [*(values.get(name) for name in names), *(each for name in rest for each in values.get(name, ()))]


# -- exceptions whose text leaves the user guessing, explained in one line ---------------------------------------------


def hint(exception: BaseException, module: Any, rungs: Collection[str]) -> str | None:
    """One line that adds what the exception, in a run with these rungs, does not say; None: we know nothing better."""
    text = str(exception)
    if "did not receive grad for rank" in text:
        return _unused_parameters(text, module)
    explained = {part: line for rung in rungs for part, line in cards()[rung].explains.items()}
    places = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(exception.__traceback__)]
    return next((line for part, line in explained.items() if any(part in each for each in (text, *places))), None)


def _unused_parameters(text: str, module: Any) -> str | None:
    """DDP counts the parameters that got no gradient; people know them by name."""
    match = re.search(r"did not receive grad for rank \d+: ([\d ]+)", text)
    if match is None or module is None:
        return None
    ignored = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
    names = [name for name, parameter in module.named_parameters() if parameter.requires_grad and name not in ignored]
    unused = [names[int(index)] for index in match[1].split() if int(index) < len(names)]
    return f"parameters without a gradient: {', '.join(unused)}" if unused else None

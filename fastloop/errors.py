"""The errors fastloop raises: each says what it got, why that cannot be, and what to do."""

from __future__ import annotations

import inspect
import re
from itertools import pairwise
from types import FrameType
from typing import Any


class FastLoopError(Exception):
    """Base of all errors meant for a person.

    Args:
        got: what was found, with file, line and full key where there are any.
        why: why it cannot be used.
        do: what to write or run instead.
        key: full key of the setting at fault (``rungs.workers.count``), so that the loader can add file and line.
    """

    exit_code = 1

    def __init__(self, *, got: str, why: str, do: str, key: str | None = None) -> None:
        self.got, self.why, self.do, self.key = got, why, do, key
        super().__init__(f"got {got}\n  why {why}\n  do  {do}")

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return (_rebuild, (type(self), self.got, self.why, self.do, self.key))


class ConfigError(FastLoopError):
    """A configuration or a command line that cannot be used (exit code 2)."""

    exit_code = 2


class NotApplicable(Exception):
    """Raised inside ``plan`` or an action: this rung cannot apply here; the message is the reason shown to the user."""


def require_positive(key: str, value: object, *, why: str, do: str) -> None:
    """Raise `ConfigError` where a rung's number is not above 0; ``auto`` and None are let through.

    Args:
        key: of the setting, below ``rungs``: ``workers.count``.
    """
    if isinstance(value, (int, float)) and not value > 0:
        raise ConfigError(key=key, got=f"{key}={value}", why=why, do=do)


def _rebuild(kind: type[FastLoopError], got: str, why: str, do: str, key: str | None) -> FastLoopError:
    return kind(got=got, why=why, do=do, key=key)


# -- what is raised while our code runs, and not by it -----------------------------------------------------------------

_NO_MEMORY = re.compile(r"\bout of memory\b|(CUBLAS|CUDNN)_STATUS_ALLOC_FAILED|can't allocate memory", re.IGNORECASE)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the device had no memory left, in any of torch's words for it. Python's own MemoryError is the host's."""
    return isinstance(error, RuntimeError) and bool(_NO_MEMORY.search(str(error)))


def let_through(error: BaseException) -> None:
    """Raise what a signal's handler raised, where that is what `error` is or came from; it is not ours to swallow.

    Python runs a handler wherever the main thread is, so inside our hooks and feeds too. torch's for SIGCHLD raises
    that a worker of the loader was killed, and says so once only; handlers of the user's raise what they like.
    """
    seen: set[int] = set()
    found: BaseException | None = error
    while found is not None and id(found) not in seen:
        if _came_by_signal(found):
            raise found
        seen.add(id(found))
        found = found.__cause__ or found.__context__


def describe(error: Exception) -> str:
    """One line for a person: the reason itself where a rung gave one. Raises what `let_through` does."""
    let_through(error)
    text = " ".join(str(error).split())
    return text if isinstance(error, NotApplicable) else f"{type(error).__name__}: {text[:300]}"


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

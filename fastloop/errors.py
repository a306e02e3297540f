"""The errors that fastloop raises: each says what it got, why that is wrong, and what to do."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from types import FrameType
from typing import Any


class FastLoopError(Exception):
    """Base of all errors meant for users.

    Args:
        got: what was found, with file, line and full key if known.
        why: why it cannot be used.
        do: what to write or run instead.
        key: full key of the setting at fault (``rungs.workers.count``), so that the loader can add file and line.
    """

    exit_code = 1

    def __init__(self, *, got: str, why: str, do: str, key: str | None = None) -> None:
        self.got, self.why, self.do, self.key = got, why, do, key
        super().__init__(f"got {got}\n  why {why}\n  do  {do}")

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return partial(type(self), got=self.got, why=self.why, do=self.do, key=self.key), ()


class ConfigError(FastLoopError):
    """A configuration or a command line that cannot be used (exit code 2)."""

    exit_code = 2


class NotApplicable(Exception):
    """Raised inside ``plan`` or an action: this rung cannot apply here; the message is the reason shown to the user."""


def require_positive(key: str, value: object, *, why: str, do: str) -> None:
    """Raise `ConfigError` if a rung's number is not above 0; ``auto`` and None are accepted.

    Args:
        key: the setting's key below ``rungs``: ``workers.count``.
    """
    if isinstance(value, (int, float)) and not value > 0:
        raise ConfigError(key=key, got=f"{key}={value}", why=why, do=do)


# -- errors that are raised while our code runs, but not by it ---------------------------------------------------------

_NO_MEMORY = re.compile(
    r"\bout of memory\b|OutOfMemory|\bCU[A-Z]+_\w*ALLOC\w*_FAILED|StatusAllocFailed|failed to CUDA malloc"
    r"|can't allocate memory",
    re.IGNORECASE,
)
_FROM_WORKER = re.compile(r"^Caught \w+ in DataLoader worker")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the device ran out of memory in this process, in any of torch's wordings; Python's MemoryError concerns
    the host."""
    text = str(error)
    return isinstance(error, RuntimeError) and bool(_NO_MEMORY.search(text)) and not _FROM_WORKER.match(text)


def let_through(error: BaseException) -> None:
    """If a signal handler raised `error` or its cause, raise that exception again: we must not swallow it.

    Python runs a handler wherever the main thread is, so it may be inside our hooks and feeds. torch's SIGCHLD handler
    raises only once after a loader worker was killed; the user's handlers may raise anything.
    """
    for each in walk_causes(error):
        if _comes_from_handler(each):
            raise getattr(each, "inner_exception", each)  # torch's compilers raise their own, with the same traceback


def walk_causes(error: BaseException) -> Iterator[BaseException]:
    """Yield the error itself and each one in its chain of causes, once: ``raise error from error`` is its own cause."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield cause
        cause = cause.__cause__ or cause.__context__


_STYLE = re.compile(r"\x1b\[[\d;]*m")
"""What makes a terminal write bold or in color, as in messages of torch.load."""


def name_kind(value: object) -> str:
    """Name a value's class, with its article: "a Batch", "an Index"."""
    name = type(value).__name__
    return f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}"


def describe(error: Exception) -> str:
    """Describe an error in one line: a rung's own reason if there is one. Raises what `let_through` raises."""
    let_through(error)
    text = " ".join(_STYLE.sub("", str(error)).split())
    if isinstance(error, NotApplicable):
        return text
    return f"{type(error).__name__}: {text if len(text) <= 300 else f'{text[:299]}…'}"


_BROUGHT = re.compile(
    r"(?:Caught \w+ in (?P<there>[^\n]+)\.\nOriginal|-- (?P<process>Process \d+) terminated with [^\n]+\n) ?Traceback "
)
"""How torch's messages begin for an error from a worker or a spawned process; the whole traceback follows."""
_CHAINED = re.compile(r"\n(?:During handling of the above exception|The above exception was the direct cause)[^\n]*\n")


def quote(error: BaseException, *, briefly: bool = False) -> str:
    """Describe an error of the user's code in one line: its type and message; for an error in a worker process, those
    of the worker's own error.

    Args:
        briefly: keep only the first line of the message, and the second if the first only announces it.
    """
    text, kind, where = _STYLE.sub("", str(error)).strip(), type(error).__name__, ""
    if (brought := _BROUGHT.match(text)) is not None:
        lines = _CHAINED.split(text)[-1].splitlines()
        frames = [place for place, line in enumerate(lines) if line.startswith("  File ")]
        own = [line for line in lines[frames[0] :] if line.strip() and not line.startswith(" ")] if frames else []
        kind, _, rest = own[0].partition(": ") if own else (kind, "", "")
        text, where = "\n".join([rest, *own[1:]]), f" (in {brought['there'] or brought['process']})"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if briefly:
        lines = lines[: 2 if lines and lines[0].endswith(":") else 1]
    said = " ".join(" ".join(lines).split())
    return f"{kind}: {said}{where}" if said else f"{kind}{where}"


def _comes_from_handler(error: BaseException) -> bool:
    """Whether a function in the error's traceback was called as a signal handler: with a number and the frame that it
    interrupted."""
    outer = error.__traceback__
    while outer is not None and (inner := outer.tb_next) is not None:
        given = _list_arguments(inner.tb_frame)
        if any(isinstance(number, int) and frame is outer.tb_frame for number, frame in pairwise(given)):
            return True
        outer = inner
    return False


def _list_arguments(frame: FrameType) -> list[Any]:
    """Return the arguments of a frame's function, if the frame still holds them."""
    code = frame.f_code
    starred = bool(code.co_flags & inspect.CO_VARARGS)
    names = code.co_varnames[: code.co_argcount]
    rest = code.co_varnames[code.co_argcount + code.co_kwonlyargcount :][:starred]
    values = frame.f_locals
    return [*(values.get(name) for name in names), *(each for name in rest for each in values.get(name, ()))]

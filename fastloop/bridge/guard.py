"""What keeps our own mistakes away from somebody else's training: the switch, and hooks that fail open."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from fastloop.errors import FastLoopError

Hook = TypeVar("Hook", bound=Callable[..., Any])


def disabled() -> bool:
    """Whether FASTLOOP_DISABLE switches everything off."""
    return os.environ.get("FASTLOOP_DISABLE", "") not in ("", "0")


class Guarded(Protocol):
    """Whose hooks fail open."""

    off: bool

    def stop_watching(self, why: str) -> None: ...


def fail_open(hook: Hook) -> Hook:
    """An exception in our own code is one warning, and training goes on without us; errors meant for a person pass."""

    @functools.wraps(hook)
    def guarded(self: Guarded, *args: Any, **kwargs: Any) -> Any:
        if self.off:
            return None
        try:
            return hook(self, *args, **kwargs)
        except FastLoopError:
            raise
        except Exception as error:
            self.stop_watching(f"{hook.__name__}: {type(error).__name__}: {error}")
            return None

    return guarded  # type: ignore[return-value]

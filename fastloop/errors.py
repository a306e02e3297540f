"""The errors fastloop raises: each says what it got, why that cannot be, and what to do."""

from __future__ import annotations


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
    """Raise `ConfigError` where a rung's number is below 1; ``auto`` and None are let through.

    Args:
        key: of the setting, below ``rungs``: ``workers.count``.
    """
    if isinstance(value, int) and value < 1:
        raise ConfigError(key=key, got=f"{key}={value}", why=why, do=do)


def _rebuild(kind: type[FastLoopError], got: str, why: str, do: str, key: str | None) -> FastLoopError:
    return kind(got=got, why=why, do=do, key=key)

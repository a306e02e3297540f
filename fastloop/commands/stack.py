"""A stack of rungs: what a climb has put on top of the configuration it began with."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

Stack = Mapping[str, Mapping[str, Any]]
"""Settings by rung."""


def plus(stack: Stack, patch: Mapping[str, Any]) -> Stack:
    """A stack with a patch ``{"rungs": {rung: settings}}`` on top."""
    rungs: Mapping[str, Mapping[str, Any]] = patch.get("rungs") or {}
    return {**stack, **{rung: {**stack.get(rung, {}), **settings} for rung, settings in rungs.items()}}


def patch(rung: str, **settings: Any) -> dict[str, Any]:
    """What switches one rung on, with these settings."""
    return {"rungs": {rung: {"enabled": True, **settings}}}


def overrides(stack: Stack) -> tuple[str, ...]:
    """The stack as ``key=value`` arguments."""
    return tuple(f"rungs.{rung}.{key}={json.dumps(value)}" for rung, settings in stack.items()
                 for key, value in settings.items())  # fmt: skip

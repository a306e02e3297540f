"""What a command gives back, or ends with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Text for people, one object for programs, and the exit code."""

    text: str
    json: Mapping[str, Any] | None = None
    """None: this process has nothing to say, as the ranks beside the first one."""
    exit_code: int = 0


def leave(error: BaseException, json: Mapping[str, Any]) -> None:
    """Let what ends a command carry the object for programs as far as there is one: ``--json`` gets it all the same."""
    vars(error)["fastloop_json"] = json


def left(error: BaseException) -> Mapping[str, Any] | None:
    """What `leave` gave it."""
    return vars(error).get("fastloop_json")


class Failed(Exception):
    """A training that raised or was stopped: what to print to stderr, and the exit code."""

    def __init__(self, text: str, *, exit_code: int = 1) -> None:
        self.exit_code = exit_code
        super().__init__(text)

"""What a command gives back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Text for people, one object for programs, and the exit code."""

    text: str
    json: Mapping[str, Any] = field(default_factory=dict)
    exit_code: int = 0

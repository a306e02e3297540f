"""What rehearsals on this machine have shown, for the next run of the same model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from fastloop.records.store import SCHEMA


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A rung that failed in a rehearsal."""

    rung: str = ""
    why: str = ""
    date: str = ""


@dataclass(frozen=True, kw_only=True)
class RehearsalsFile:
    """``rehearsals.json`` in the cache, by fingerprint of rung, model and versions."""

    schema: ClassVar[int] = SCHEMA
    failures: Mapping[str, Failure] = field(default_factory=dict)
    first_call_s: Mapping[str, float] = field(default_factory=dict)
    """What a rung's first call took longer than its second: compiling, mostly."""

"""What a measurement of ceilings found: ``headspace.json``. ``None`` = not known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from fastloop.records.store import SCHEMA
from fastloop.records.trial import Trial


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """The training as it is, before the other trials and after them."""

    samples_per_s: float | None = None
    """The geometric mean of both."""
    runs: tuple[float, ...] = ()
    """Samples per second of each."""
    drift_pct: float | None = None
    """How far the second was above the first."""
    window_too_short: bool = False
    why: str | None = None
    """Why one of them failed."""


@dataclass(frozen=True, kw_only=True)
class Ceiling:
    """The rate without data (``replayed``), without data and copies (``resident``) or exchange (``no_exchange``)."""

    samples_per_s: float | None = None
    ratio: float | None = None
    """To the baseline. What the exchange alone costs is ``no_exchange`` to ``replayed``."""
    why: str | None = None
    """Why there is none, or what to hold against it."""


@dataclass(frozen=True, kw_only=True)
class CeilingsFile:
    """``headspace.json``."""

    schema: ClassVar[int] = SCHEMA

    run_dir: str
    baseline: Baseline
    ceilings: Mapping[str, Ceiling] = field(default_factory=dict)
    trials: tuple[Trial, ...] = ()
    """In the order they ran."""

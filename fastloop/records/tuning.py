"""What a search for the best value of one number found. ``None`` = not known."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from fastloop.records.card import Patch, Setting
from fastloop.records.experiment import Hardware
from fastloop.records.store import SCHEMA


@dataclass(frozen=True, kw_only=True)
class Point:
    """What one value gave."""

    value: Setting = None
    """A number; in a file also another setting."""
    step_ms: float | None = None
    """Of an optimizer step, without what queues gave or took; None where it was not trained or could not be."""
    samples_per_s: float | None = None
    ok: bool = True
    """False: it failed, or the rung was inactive."""
    why: str | None = None


@dataclass(frozen=True, kw_only=True)
class LoaderTime:
    """What the loader alone takes for a step with one value."""

    value: int
    loader_ms: float


@dataclass(frozen=True, kw_only=True)
class TuningFile:
    """``tune.json``."""

    schema: ClassVar[int] = SCHEMA
    run_dir: str = ""
    name: str = ""
    what: str | None = None
    """The rung."""
    key: str | None = None
    """``rungs.workers.count``"""
    hardware: Hardware = field(default_factory=Hardware)
    points: tuple[Point, ...] = ()
    """By value."""
    as_it_is: Setting = None
    """The value that stands for the training without the rung."""
    loaders: tuple[LoaderTime, ...] = ()
    """Where the loader was measured alone."""
    rest_ms: float | None = None
    """What the step takes without its loader, where that was measured."""
    tolerance_pct: float | None = None
    yours: int | None = None
    """What the user wrote for this number, where it is not the default."""
    best: Setting = None
    """None: no value beats the training without the rung by more than the tolerance."""
    patch: Patch | None = None
    why: str = ""
    seconds: float | None = None
    partial: bool = False

"""The result of a search for the best value of one number. ``None`` = unknown."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from fastloop.records.card import Patch, Setting
from fastloop.records.experiment import Hardware
from fastloop.records.store import SCHEMA


@dataclass(frozen=True, kw_only=True)
class Point:
    """The result for one value."""

    value: Setting = None
    """A number; a file may also contain another type of setting."""
    step_ms: float | None = None
    """Time of an optimizer step, corrected for queued batches; None if not trained, or training failed."""
    samples_per_s: float | None = None
    ok: bool = True
    """False: it failed, or the rung was inactive."""
    why: str | None = None


@dataclass(frozen=True, kw_only=True)
class LoaderTime:
    """The loader's time per step with one value, measured alone."""

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
    """Sorted by value."""
    as_it_is: Setting = None
    """The value that represents the training without the rung."""
    loaders: tuple[LoaderTime, ...] = ()
    """Present if the loader was measured alone."""
    rest_ms: float | None = None
    """Time of the step without its loader, if measured."""
    tolerance_pct: float | None = None
    yours: int | None = None
    """The user's setting of this number, if it is not the default."""
    best: Setting = None
    """None: no value beats the training without the rung by more than the tolerance."""
    patch: Patch | None = None
    why: str = ""
    seconds: float | None = None
    partial: bool = False

"""Each rank's own measurements, from ``Measurement.ranks``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from fastloop.records.measurement import Measurement
from fastloop.records.store import decode


@dataclass(frozen=True, kw_only=True)
class Rank:
    """One rank's own figures; None if it did not measure them."""

    rank: int | None = None
    host: str | None = None
    step_ms: Mapping[str, float | None] | None = None
    """Mean and spread."""
    parts_ms: Mapping[str, float | None] | None = field(default_factory=dict)
    partial: bool | None = None
    ended_by: str | None = None

    @property
    def mean_ms(self) -> float | None:
        """The mean step time in milliseconds."""
        mean = (self.step_ms or {}).get("mean")
        return mean if mean is not None and math.isfinite(mean) else None

    @property
    def end(self) -> str:
        """The exception that ended the fit; empty if it ended normally."""
        return self.ended_by or ("an exception" if self.partial else "")

    def part_ms(self, part: str) -> float | None:
        """Return the mean time of one part of the step."""
        found = (self.parts_ms or {}).get(part)
        return found if found is not None and math.isfinite(found) else None


def read_ranks(seen: Measurement) -> list[Rank]:
    """Return all ranks of a measurement."""
    return [decode(rank, Rank) or Rank() for rank in seen.ranks]

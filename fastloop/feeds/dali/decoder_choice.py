"""Chooses between CPU and GPU decoding by the training's own batches.

Which is faster depends on the model: the CPU may not keep up with it, and a GPU that decodes has less time for it. So
if the training waits for pictures that the CPU decodes, the GPU decodes for a while, and what was faster stays.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

LEAST_STEPS = 2_000
"""Optimizer steps of a run from which on a trial is worth its cost: about two seconds, and some slower batches."""
SETTLING, TIMED = 100, 40
"""Batches of an epoch or a decoder that are not timed (compiles, rehearsals, full queues), and then those that are."""
WAITS = 0.1
"""Share of a batch's time spent waiting for its pictures from which on the other decoder is tried."""
FASTER = 0.97
"""The other decoder stays if a batch takes at most this share of its time before."""


@dataclass
class DecoderChoice:
    """The course of one choice. Each rank chooses by itself: its batches stay the same."""

    first: str
    """The decoder that is used, and the one that may be tried."""
    other: str
    now: str = ""
    is_over: bool = False
    why: str | None = None
    _ms: dict[str, float] = field(default_factory=dict)
    _left: int = field(default_factory=lambda: SETTLING)
    _times: list[tuple[float, float]] = field(default_factory=list)
    """Of each timed batch: its time, and how much of it was spent waiting, in seconds."""

    def __post_init__(self) -> None:
        self.now = self.now or self.first

    def evidence(self) -> Mapping[str, Any]:
        """Return the milliseconds per batch by decoder, as far as measured, and the reason for the choice."""
        return {"decode_ms": dict(self._ms), "decode_why": self.why}

    def note(self, took_s: float, waited_s: float) -> str | None:
        """Note one batch; returns the decoder to change to, or None."""
        if self.is_over:
            return None
        if self._left:
            self._left -= 1
            return None
        self._times.append((took_s, waited_s))
        if len(self._times) < TIMED:
            return None
        took, waited = (median(each) for each in zip(*self._times, strict=True))
        self._times.clear()
        self._ms[self.now] = 1e3 * took
        if self.now == self.first:
            if waited >= WAITS * took:
                return self._change(self.other)
            self._settle(f"training waits for pictures for {waited / took:.0%} of a batch's time")
            return None
        before, after = self._ms[self.first], self._ms[self.other]
        told = (
            f"a batch takes {after:.1f} ms if the {_name(self.other)} decodes, {before:.1f} if the {_name(self.first)}"
        )
        self._settle(told)
        return None if after <= FASTER * before else self._change(self.first)

    def refuse(self, why: str) -> None:
        """The other decoder does not work here."""
        self.now = self.first
        self._settle(why)

    def _change(self, decoder: str) -> str:
        self.now, self._left = decoder, SETTLING
        return decoder

    def _settle(self, why: str) -> None:
        self.why, self.is_over = why, True


def _name(decoder: str) -> str:
    return "CPU" if decoder == "cpu" else "GPU"

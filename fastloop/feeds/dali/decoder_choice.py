"""Chooses between CPU and GPU decoding by timing the training's own batches.

Which is faster depends on the model: the CPU may not keep up with it, and a GPU that decodes has less time for it. So
if a long training waits for pictures, the other decoder is tried for a while, and the faster one is kept.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch

from fastloop.errors import NotApplicable
from fastloop.feeds.images.reading import ImageSource

SETTLING = 100
"""Batches that are not timed, at the start and after each change: compiles, rehearsals, queues that were full."""
BLOCK, BLOCKS = 8, 5
"""Batches that are timed together, since the host may run ahead of the device, and the number of such blocks. The
median block counts, so a validation or a checkpoint within one block does not matter."""
WAITS = 0.1
"""The other decoder is tried if at least this share of the time is spent waiting for pictures."""
FASTER = 0.97
"""The other decoder is kept if a batch takes at most this share of the time that it took before."""
ROOM, SPARE, LOOKED_AT = 0.1, 2.0, 16
"""Whole pictures may take this share of the GPU's memory, if all are as large as the largest of the `LOOKED_AT` that
are inspected. Before the GPU's decoder is tried in mid-training, this share must be free, and `SPARE` times the
pictures."""


@dataclass
class DecoderChoice:
    """One choice between two decoders. Each rank chooses by itself: its batches hold the same samples either way."""

    first: str
    """The decoder in use, and the one that may be tried."""
    other: str
    synchronize: Callable[[], object]
    """Waits until the device has done all work so far."""
    clock: Callable[[], float] = time.perf_counter
    now: str = field(init=False)
    is_over: bool = False
    """Whether the decoder is settled, so that nothing more is tried."""
    why: str | None = field(default=None, init=False)
    _ms: dict[str, float] = field(default_factory=dict)
    _left: int = field(default_factory=lambda: SETTLING)
    _began: float = 0.0
    """When the current block began."""
    _waits: list[float] = field(default_factory=list)
    """The wait for each batch of the current block, in seconds."""
    _blocks: list[tuple[float, float]] = field(default_factory=list)
    """For each finished block: its time, and how much of it was spent waiting, in seconds."""

    def __post_init__(self) -> None:
        self.now = self.first

    def evidence(self) -> Mapping[str, Any]:
        """Return the milliseconds per batch by decoder, as far as measured, and the reason for the choice."""
        return {"decode_ms": dict(self._ms), "decode_why": self.why}

    def note(self, waited_s: float) -> str | None:
        """Note that one more batch was trained on, and how long training waited for its pictures; return the decoder to
        change to, or None."""
        if self.is_over:
            return None
        if self._left:
            self._left -= 1
            if not self._left:
                self._begin_block()
            return None
        self._waits.append(waited_s)
        if len(self._waits) < BLOCK:
            return None
        began, waited_s = self._began, sum(self._waits)
        self._begin_block()
        self._blocks.append((self._began - began, waited_s))
        if len(self._blocks) < BLOCKS:
            return None
        took, waited = (median(each) for each in zip(*self._blocks, strict=True))
        self._ms[self.now] = 1e3 * took / BLOCK
        if self.now == self.first:
            if waited >= WAITS * took:
                return self._change(self.other)
            self._settle(f"training waits for images for {waited / took:.0%} of its time")
            return None
        before, after = self._ms[self.first], self._ms[self.other]
        self._settle(
            f"a batch takes {after:.1f} ms if the {_name(self.other)} decodes, {before:.1f} if the {_name(self.first)}"
        )
        return None if after <= FASTER * before else self._change(self.first)

    def refuse(self, decoder: str, why: str) -> None:
        """Keep to the other of the two, because this one does not work on this machine."""
        self.now = self.first if decoder == self.other else self.other
        self._settle(f"the {_name(decoder)} does not decode: {why}")

    def _begin_block(self) -> None:
        self.synchronize()
        self._began = self.clock()
        self._waits.clear()

    def _change(self, decoder: str) -> str:
        self.now, self._left = decoder, SETTLING
        self._blocks.clear()
        return decoder

    def _settle(self, why: str) -> None:
        self.why, self.is_over = why, True


def check_room(device: torch.device, source: ImageSource, pictures: int, *, in_training: bool) -> None:
    """Raise NotApplicable if `pictures` whole pictures on this GPU could take memory that the training will need.

    Args:
        in_training: whether the training has all the memory that it needs, so that what is free now tells.
    """
    from PIL import Image

    pixels = [0]
    for path in source.list_paths(LOOKED_AT):
        with contextlib.suppress(OSError), Image.open(path) as picture:
            pixels.append(picture.width * picture.height)
    needed = 3 * max(pixels) * pictures
    free, total = torch.cuda.mem_get_info(device)
    if not in_training and needed > ROOM * total:
        raise NotApplicable(f"images may take {needed / 2**30:.1f} of its {total / 2**30:.0f} GiB")
    if in_training and free < max(ROOM * total, SPARE * needed):
        raise NotApplicable(f"images may take {needed / 2**30:.1f} GiB there, but only {free / 2**30:.1f} are free")


def _name(decoder: str) -> str:
    return "CPU" if decoder == "cpu" else "GPU"

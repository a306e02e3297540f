"""Stands in for CUDA graphs on the CPU: a replay runs the work again and writes over what was recorded."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch


class FakeRecorder:
    """As `fastloop.feeds.step_graph.recording.CudaRecorder`, with the faults that a test plants."""

    syncs: Sequence[str] = ()
    """What it finds to wait for the device."""
    raises: Exception | None = None
    """Comes out of recording, once the work has run."""
    error = 0.0
    """Added to what a replay writes."""
    slow_s = 0.0
    """That a replay takes at least."""
    busy_s = 0.0
    """That the device works on after the host has launched everything."""
    recordings = 0
    replays = 0
    bakes: Sequence[dict[str, Any]] = ()
    """Attributes of objects: a replay has the numbers that were in them when it was recorded, as on a device."""
    full: str | None = None
    """Why the device has no room for a recording."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        yield

    def find_syncs(self, work: Callable[[], object]) -> list[str]:
        work()
        return list(self.syncs)

    def record(self, work: Callable[[], Sequence[torch.Tensor]]) -> Any:
        baked = {id(holder): (holder, _read_numbers(holder)) for holder in self.bakes}
        type(self).recordings += 1
        static = work()
        if self.raises is not None:
            raise self.raises

        def replay() -> None:
            type(self).replays += 1
            time.sleep(self.slow_s)
            now_set = [(holder, _read_numbers(holder)) for holder, _ in baked.values()]
            for holder, numbers in baked.values():
                holder.update(numbers)
            try:
                made = work()
            finally:
                for holder, numbers in now_set:
                    holder.update(numbers)
            for place, now in zip(static, made, strict=True):
                place.detach().copy_(now.detach() + self.error if now.is_floating_point() else now)

        return static, replay

    def note_memory(self) -> Callable[[], str | None]:
        return lambda: self.full

    def wait(self) -> None:
        time.sleep(self.busy_s)


def _read_numbers(holder: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in holder.items() if isinstance(value, (int, float))}

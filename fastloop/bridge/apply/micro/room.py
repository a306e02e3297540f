"""The memory that a search for a micro-batch may take, next to what training will need later."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import torch

from fastloop.bridge.apply.rehearse.optimizer_twins import count_state_bytes
from fastloop.bridge.apply.state.untouched import preserve_state

GIB, MUCH = 2**30, 2
"""A CUDA context takes less than this many GiB."""


class Room:
    """The memory of one rank's device.

    Args:
        target: the share of it that may be used.

    Attributes:
        bytes: what this process may hold, after subtracting what other processes hold; None unless on CUDA.
    """

    def __init__(self, module: Any, strategy: Any, target: float) -> None:
        self._module, self._strategy, self._device = module, strategy, strategy.root_device
        self.bytes = self._read_bytes(target)

    def describe(self) -> str:
        """Describe the room, and who else holds much of the device's memory."""
        assert self.bytes is not None
        others = self._read_others()
        held = f" ({others / GIB:.1f} GiB are held by others)" if others > MUCH * GIB else ""
        return f"{self.bytes / GIB:.1f} GiB{held}"

    @contextlib.contextmanager
    def ballast(self) -> Iterator[None]:
        """Allocate as much as the optimizers' state will take, plus one gradient held until the next piece."""
        if self.bytes is None:
            yield
            return
        held = torch.empty(self._count_later_bytes(), dtype=torch.uint8, device=self._device)
        try:
            yield
        finally:
            del held

    def reset_peak(self) -> int:
        """Forget the peak so far; returns `count_retries`."""
        if self.bytes is None:
            return 0
        _reset_peak(self._device)
        return self.count_retries()

    def count_retries(self) -> int:
        """Allocations that succeeded only after cached memory was given back."""
        return int(torch.cuda.memory_stats(self._device).get("num_alloc_retries", 0))

    def give_back(self) -> None:
        """Give cached memory back to the device."""
        if self.bytes is not None:
            _give_back(self._device)

    def _read_bytes(self, target: float) -> float | None:
        if self._device.type != "cuda":
            return None
        return target * torch.cuda.mem_get_info(self._device)[1] - self._read_others()

    def _read_others(self) -> float:
        free, total = torch.cuda.mem_get_info(self._device)
        return float(total - free - torch.cuda.memory_reserved(self._device))

    def _count_later_bytes(self) -> int:
        with preserve_state(self._module):
            later = [count_state_bytes(optimizer) for optimizer in self._strategy.optimizers]
        return sum([*later, *(each.nbytes for each in self._module.parameters() if each.requires_grad)])


@contextlib.contextmanager
def giving_back(device: torch.device) -> Iterator[None]:
    """Give memory that only the body of ``with`` took back to the device, and forget its peak. If it took no more than
    the training holds, nothing is given back: taking it again costs seconds."""
    if device.type != "cuda":
        yield
        return
    held = torch.cuda.memory_reserved(device)
    try:
        yield
    finally:
        if torch.cuda.memory_reserved(device) > held:
            _give_back(device)
        else:
            torch.cuda.reset_peak_memory_stats(device)


def _give_back(device: torch.device) -> None:
    gc.collect()
    _reset_peak(device)


def _reset_peak(device: torch.device) -> None:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)

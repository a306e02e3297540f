"""A look at the step now and then, long after the timed window: has the training got slower?"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from fastloop.evidence.clock import RARE, Clock, Window
from fastloop.evidence.drift import LOOK_STEPS, Drift

now = time.monotonic


class Later:
    """Opens a short window of its own when a look is due, on a clock of its own.

    Args:
        read_board: ``sm_clock_mhz`` and ``foreign_processes`` as the GPU says; None where it says nothing.
        warn: takes the one warning.
        switch: makes the loop's marks go to another clock.
    """

    def __init__(self, device: torch.device, *, read_board: Callable[[], Mapping[str, Any] | None],
                 warn: Callable[[str], None], switch: Callable[[Clock], None]) -> None:  # fmt: skip
        self.device, self.drift = device, Drift()
        self._read_board, self._warn, self._switch = read_board, warn, switch
        self.clock: Clock | None = None
        """The clock of the look that is going on."""

    def reference(self, window: Window | None, step: int) -> None:
        """The timed window is over: later looks are compared with it."""
        if window is not None:
            self._compare(window, step, self._read_board())

    def between_steps(self, step: int) -> None:
        """Begin or end a look where it is time."""
        if self.clock is not None:
            if self.clock.total_steps > LOOK_STEPS:
                self.end(step)
        elif self.drift.due(now()):
            self.clock = Clock(self.device, warmup_steps=0)
            self._switch(self.clock)

    def end(self, step: int) -> None:
        """End the look that is going on; one that the training's end cut short tells nothing."""
        if self.clock is not None:
            board = self._read_board()  # before the look's last synchronisation, while the GPU is at work
            window, self.clock = self.clock.close(), None
            if window is not None and window.steps >= LOOK_STEPS // 2:
                self._compare(window, step, board)

    def _compare(self, window: Window, step: int, board: Mapping[str, Any] | None) -> None:
        rare_s = sum(window.parts_s.get(part, 0.0) for part in RARE)
        board = board or {}
        usual = sorted(window.step_s)[: max(2, len(window.step_s) * 95 // 100)]  # steps with a validation in them
        spread = 1e3 * statistics.stdev(usual) if len(usual) > 1 else None
        said = self.drift.look(
            now(), step, 1e3 * (window.wall_s / window.steps - rare_s), 1e3 * window.parts_s.get("data_wait", 0.0),
            board.get("sm_clock_mhz"), board.get("foreign_processes"), steps=window.steps, step_std_ms=spread,
        )  # fmt: skip
        if said is not None:
            self._warn(said)

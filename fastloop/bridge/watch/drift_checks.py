"""An occasional check of the step, long after the timed window: has the training become slower?"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from fastloop.evidence.clock.drift import CHECK_STEPS, Drift, StepCheck
from fastloop.evidence.clock.one_time import OneTime
from fastloop.evidence.clock.step_clock import RARE, Clock, Window

now = time.monotonic


class DriftChecks:
    """Opens a short window on a separate clock when a check is due.

    Args:
        read_board: ``sm_clock_mhz`` and ``foreign_processes`` from the GPU; None if it does not report them.
        warn: receives a warning.
        switch: sends the loop's marks to another clock.
        one_time: collects one-time costs, which belong to no step.
        foresee_end: returns a warning that memory will run out soon, or None; called after each check.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        read_board: Callable[[], Mapping[str, Any] | None],
        warn: Callable[[str], None],
        switch: Callable[[Clock], None],
        one_time: OneTime,
        foresee_end: Callable[[], str | None] = lambda: None,
    ) -> None:
        self.device, self.drift, self._one_time, self._foresee_end = device, Drift(), one_time, foresee_end
        self._read_board, self._warn, self._switch = read_board, warn, switch
        self.clock: Clock | None = None
        """The clock of the check in progress, if any."""

    def reference(self, window: Window | None, step: int) -> None:
        """Take the finished timed window as the reference of later checks."""
        if window is not None:
            self._compare(window, step, self._read_board())

    def between_steps(self, step: int) -> None:
        """Begin or end a check if it is time."""
        if self.clock is not None:
            if self.clock.total_steps > CHECK_STEPS:
                self.end(step)
        elif self.drift.due(now()):
            self.clock = Clock(self.device, warmup_steps=0, one_time=self._one_time)
            self._switch(self.clock)

    def end(self, step: int) -> None:
        """End the check in progress; one that the training's end cut short is dropped."""
        if self.clock is not None:
            board = self._read_board()  # before the check's last synchronization, while the GPU is at work
            window, self.clock = self.clock.close(), None
            if window is not None and window.steps >= CHECK_STEPS // 2:
                self._compare(window, step, board)
                if (warning := self._foresee_end()) is not None:
                    self._warn(warning)

    def _compare(self, window: Window, step: int, board: Mapping[str, Any] | None) -> None:
        rare_s = sum(window.parts_s.get(part, 0.0) for part in RARE)
        count = max(2, len(window.step_s) * 95 // 100)
        usual = sorted(window.step_s)[:count]  # leaves out steps with a validation in them
        spread = 1e3 * statistics.stdev(usual) if len(usual) > 1 else None
        check = StepCheck(
            step=step,
            step_ms=1e3 * (window.wall_s / window.steps - rare_s),
            steps=window.steps,
            step_std_ms=spread,
            data_wait_ms=1e3 * window.parts_s.get("data_wait", 0.0),
            **(board or {}),
        )
        if (warning := self.drift.add(now(), check)) is not None:
            self._warn(warning)

"""Notices a script that ends by itself before the window of a training opens: all later trainings must be shorter."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from fastloop.experiments.ab.arms import Ask
from fastloop.experiments.climb.interface import Result, Runner
from fastloop.experiments.trials.trial import forget
from fastloop.records.card import Stack


class EndsSooner(Exception):
    """The script ended by itself after `steps` optimizer steps."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        super().__init__(f"the script ends after {steps} steps")


def find_early_end(result: Result, asked: int | None) -> int | None:
    """Return the steps after which a training ended by itself, sooner than asked and before its window opened; None if
    it did not."""
    if result.step_ms or not asked or not result.ended_at or result.ended_at >= asked:
        return None
    return result.ended_at


class HeedingRunner:
    """A Runner that raises `EndsSooner` for the first training with an early end.

    Args:
        runner: does the actual work.
        is_news: whether an end after this many steps may be the script's own end and is not known yet.
    """

    def __init__(self, runner: Runner, is_news: Callable[[int], bool]) -> None:
        self._runner, self._is_news = runner, is_news

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def run(
        self,
        at: str,
        stack: Stack,
        ask: Ask,
        *,
        what: str,
        need_s: float,
        slowest_ms: float = math.inf,
        ladder: str | None = None,
    ) -> Result:
        """Run one training."""
        result = self._runner.run(at, stack, ask, what=what, need_s=need_s, slowest_ms=slowest_ms, ladder=ladder)
        end = None if ask.variation == "loader" else find_early_end(result, ask.steps)
        if end is not None and self._is_news(end):
            if result.trial is not None:
                forget(result.trial.run_dir)  # else it would be found again in place of a shorter one
            raise EndsSooner(end)
        return result

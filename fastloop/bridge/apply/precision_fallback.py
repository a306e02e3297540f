"""Repeats a step without lower precision if it fails because of it.

A rehearsal plays modules, and not what a training_step or validation_step does with their outputs: numpy knows no
bfloat16, and some kernels take only float32.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from fastloop.bridge.apply.live_plan import LivePlan
from fastloop.bridge.apply.state.untouched import Kept, keep_random_streams
from fastloop.errors import NotApplicable, let_through
from fastloop.records.plan import Step

KEY = "precision.plugin"
_NARROW = re.compile(r"bfloat16|float16|\bHalf\b", re.IGNORECASE)


class PrecisionFallback:
    """Runs the steps of one fit, validation, test or prediction on its only rank.

    Args:
        give_up: turns a rung off for the rest of the run, for a reason.
    """

    def __init__(self, module: Any, live: LivePlan, give_up: Callable[[Step, str], None]) -> None:
        self._module, self._live, self._give_up = module, live, give_up
        self._tried: Step | None = None
        """The rung with which a step has worked."""

    def run(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run one step. The first one with the rung leaves no trace if it fails; of a later one random draws, running
        statistics and logged values stay."""
        rung = self._find_rung()
        if rung is None:
            return call(*args, **kwargs)
        put_back = self._keep_state() if rung is not self._tried else None
        try:
            result = call(*args, **kwargs)
        except Exception as error:
            let_through(error)
            if not _NARROW.search(str(error)):
                raise
            why = f"a step failed with it: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
        else:
            self._tried = rung
            return result
        if put_back is not None:
            put_back()
        # Outside the handler, which keeps the failed step's tensors alive.
        self._give_up(rung, f"{why}; the step was repeated without it")
        return call(*args, **kwargs)

    def _find_rung(self) -> Step | None:
        """The rung that lowers the precision now, and can be undone in mid-run; None if there is none."""
        ours = (
            step for step in self._live.plan.planned if KEY in step.change.wants and step.change.rehearse is not None
        )
        return next((step for step in ours if step.rung not in self._live.held), None)

    def _keep_state(self) -> Callable[[], None] | None:
        """Save what a step changes; returns a function that restores it, None if that is impossible."""
        kept, streams = Kept(), keep_random_streams()
        try:
            kept.keep_module(self._module)
        except NotApplicable:
            return None

        def put_back() -> None:
            kept.restore()
            streams()

        return put_back

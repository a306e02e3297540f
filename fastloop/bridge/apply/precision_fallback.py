"""Repeats a step without lower precision if it fails because of it.

A rehearsal plays modules, but not what a training_step or validation_step does with their outputs. That can fail: numpy
has no bfloat16, and some kernels take only float32.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from fastloop.bridge.apply.live_plan import LivePlan
from fastloop.bridge.apply.state.checkpoints import end_checkpoints
from fastloop.bridge.apply.state.untouched import StateSnapshot, keep_random_streams
from fastloop.errors import let_through
from fastloop.feeds.batch_tree import iterate_tensors
from fastloop.feeds.lower_precision import WideOutputs
from fastloop.records.plan import Step

KEY, MODE = "precision.plugin", "bf16-mixed"
_NARROW = re.compile(r"bfloat16|float16|\bHalf\b", re.IGNORECASE)


class PrecisionFallback:
    """Runs the steps of one fit, validation, test or prediction. Their outputs are converted back to float32.

    Steps are repeated only in runs with one rank, since several would have to repeat them together; and only under
    bf16-mixed, whose plugin has no loss scaler: its optimizer step simply continues after the closure.

    Args:
        live: the plan, including rungs that were switched on again later.
        is_on: whether a rung has changed the run.
        give_up: turns a rung off for the rest of the run, with a reason.
    """

    def __init__(
        self, trainer: Any, live: LivePlan, *, is_on: Callable[[str], bool], give_up: Callable[[Step, str], None]
    ) -> None:
        self._trainer, self._live, self._is_on, self._give_up = trainer, live, is_on, give_up
        self._tried: set[Any] = set()
        """Stages in which a step has worked with the rung."""
        self._outputs: WideOutputs | None = None

    def run(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run one step, and repeat it without lower precision if that made it fail. If it is the first step of its
        stage with the rung, the module and random streams are restored first; of a later step, random draws and running
        statistics stay. Logged values stay in either case."""
        rung, module = self._find_rung(), self._trainer.lightning_module
        if rung is None:
            return call(*args, **kwargs)
        if self._outputs is None:
            self._outputs = WideOutputs(module)
        # A step that calls optimizers itself may have made updates.
        before = self._outputs.note()
        if not module.automatic_optimization or self._trainer.world_size > 1:
            return self._outputs.widen(call(*args, **kwargs), before)
        stage, marks = self._trainer.state.stage, _read_marks(args)
        put_back = self._keep_state() if stage not in self._tried else None
        try:
            result = call(*args, **kwargs)
        except Exception as error:
            let_through(error)
            has_changed = _read_marks(args) != marks  # such a batch cannot be run again
            if has_changed or not _NARROW.search(str(error)):
                raise
            end_checkpoints(error)
            why = f"a step failed with it: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
        else:
            self._tried.add(stage)
            return self._outputs.widen(result, before)
        if put_back is not None:
            put_back()
        # Outside the handler, which keeps the failed step's tensors alive.
        self._give_up(rung, f"{why}; the step was repeated without it")
        return call(*args, **kwargs)

    def _find_rung(self) -> Step | None:
        """The rung that lowers the precision now."""
        ours = (step for step in self._live.plan.steps if step.change.wants.get(KEY) == MODE)
        return next((step for step in ours if self._is_on(step.rung)), None)

    def _keep_state(self) -> Callable[[], None] | None:
        """Save what a step changes; returns a function that restores it, None if that is impossible."""
        kept, streams = StateSnapshot(), keep_random_streams()
        try:
            kept.capture_module(self._trainer.lightning_module)
        except Exception as error:
            let_through(error)
            return None

        def put_back() -> None:
            kept.restore()
            streams()

        return put_back


def _read_marks(args: Any) -> list[Any]:
    """Return values that differ once a step has changed its arguments: each tensor's identity and version."""
    return [
        (id(each), None if each.is_inference() else each._version)
        for arg in args
        if not isinstance(arg, int)
        for each in iterate_tensors(arg)
    ]

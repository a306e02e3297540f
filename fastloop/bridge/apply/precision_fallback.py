"""Repeats a step without lower precision if it fails because of it.

A rehearsal plays modules, but not what a training_step or validation_step does with their outputs. That can fail: numpy
has no bfloat16, and some kernels take only float32. Nor does it play their backward: an autograd.Function of the user
may multiply by what autocast left in float32.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

from fastloop.bridge.apply.live_plan import LivePlan
from fastloop.bridge.apply.state.checkpoints import end_checkpoints
from fastloop.bridge.apply.state.untouched import StateSnapshot, keep_random_streams
from fastloop.bridge.attributes import attribute
from fastloop.errors import FastLoopError, describe, let_through
from fastloop.feeds.batch_tree import iterate_tensors
from fastloop.feeds.lower_precision import WideOutputs
from fastloop.feeds.splitting import get_loss
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
        self._again: Callable[[], Any] | None = None
        """Runs the stage's first step again, from the state before it, until its backward is done."""

    def run(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run one step, and repeat it without lower precision if that made it fail. If it is the first step of its
        stage with the rung, the module and random streams are restored first; of a later step, random draws and running
        statistics stay. Logged values stay in either case."""
        rung, module, self._again = self._find_rung(), self._trainer.lightning_module, None
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
            why = f"a step failed with it: {describe(error)}"
        else:
            self._tried.add(stage)
            if put_back is not None and self._trainer.training and _read_marks(args) == marks:
                self._again = partial(self._repeat, put_back, partial(call, *args, **kwargs))
            return self._outputs.widen(result, before)
        if put_back is not None:
            put_back()
        # Outside the handler, which keeps the failed step's tensors alive.
        self._give_up(rung, f"{why}; the step was repeated without it")
        return call(*args, **kwargs)

    def run_backward(self, call: Callable[..., Any], *args: Any, repeats: bool = True) -> Any:
        """Run a strategy's backward. If that fails because of lower precision, the first step is repeated without it.

        Args:
            repeats: whether the last step was the whole batch.
        Raises:
            FastLoopError: the backward of a step that cannot be repeated fails because of lower precision.
        """
        rung, self._again, again = self._find_rung(), None, self._again if repeats else None
        if rung is None:
            return call(*args)
        plugin = self._trainer.strategy.precision_plugin
        with attribute(plugin, "backward", partial(self._try_backward, rung, plugin.backward, again)):
            return call(*args)

    def _try_backward(
        self, rung: Step, backward: Callable[..., Any], again: Callable[[], Any] | None, *args: Any, **kwargs: Any
    ) -> None:
        """The plugin's backward: the hooks around it run once, whether it is repeated or not."""
        parameters = list(self._trainer.lightning_module.parameters())
        before = [None if each.grad is None or again is None else each.grad.clone() for each in parameters]
        try:
            backward(*args, **kwargs)
        except Exception as error:
            let_through(error)
            if not _NARROW.search(str(error)):
                raise
            end_checkpoints(error)
            if again is None:
                raise _explain_backward(rung, error) from error
            why = f"a backward failed with it: {describe(error)}"
        else:
            return
        for parameter, gradient in zip(parameters, before, strict=True):
            parameter.grad = gradient
        self._give_up(rung, f"{why}; the step was repeated without it")
        loss = get_loss(again()) / self._trainer.accumulate_grad_batches
        self._trainer.lightning_module.on_before_backward(loss)  # what it had changed in the module was put back, too
        self._trainer.strategy.precision_plugin.backward(loss, *args[1:], **kwargs)

    def _repeat(self, put_back: Callable[[], None], step: Callable[[], Any]) -> Any:
        """Run a step again. It has logged already."""
        put_back()
        with attribute(self._trainer.lightning_module, "log", lambda *_args, **_kwargs: None):
            return step()

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


def _explain_backward(rung: Step, error: Exception) -> FastLoopError:
    return FastLoopError(
        got=f"a backward that fails in lower precision: {describe(error)}",
        why=f"{rung.rung} lowers the precision, and this step cannot be repeated without it",
        do=f"write rungs.{rung.rung}.enabled: false",
    )


def _read_marks(args: Any) -> list[Any]:
    """Return values that differ once a step has changed its arguments: each tensor's identity and version."""
    return [
        (id(each), None if each.is_inference() else each._version)
        for arg in args
        if not isinstance(arg, int)
        for each in iterate_tensors(arg)
    ]

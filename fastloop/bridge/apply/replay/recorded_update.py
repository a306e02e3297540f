"""Replays the optimizer's update after a replayed step, in place of the step of a fused optimizer.

Lightning calls `optimizer.step(closure)`; the closure trains, and zeroing, clipping and hooks run in it as always. Only
what torch does after that is replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from fastloop.bridge.apply.rehearse.optimizer_twins import OPTIMIZER_LIMIT
from fastloop.bridge.apply.rehearse.played import Played, measure_deviation
from fastloop.bridge.apply.staging import set_attribute
from fastloop.errors import NotApplicable
from fastloop.feeds.step_graph.recording import CudaRecorder
from fastloop.feeds.step_graph.static_update import StaticUpdate

HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
OURS = "fastloop."
MOST_MISSED = 32
"""Give up after more updates than this that the recording did not hold for, and more than it held for."""


class RecordedUpdate:
    """The recorded update of one optimizer, which is on until `let_go`.

    Args:
        gradients: see StaticUpdate; they hold the gradients of a step.

    Raises:
        NotApplicable: it cannot be recorded, or its results differ.
    """

    def __init__(
        self,
        optimizer: Any,
        gradients: Sequence[tuple[torch.nn.Parameter, torch.Tensor]],
        recorder: CudaRecorder,
    ) -> None:
        of_all = (_global_optimizer_pre_hooks, _global_optimizer_post_hooks)
        every = [hook for hooks in (*(getattr(optimizer, name) for name in HOOKS), *of_all) for hook in hooks.values()]
        if not all(getattr(hook, "__module__", "").startswith(OURS) for hook in every):
            raise NotApplicable("the optimizer's step has a hook")
        self.replays = self._missed = 0
        self.refused = ""
        """Why no update is replayed from here on."""
        self._optimizer, self._static = optimizer, StaticUpdate(optimizer, gradients)
        self._compare(recorder)
        self._uninstall = set_attribute(optimizer, "step", partial(self._step, optimizer.step))
        optimizer.step._wrapped_by_lr_sched = True  # a scheduler made from here on need not wrap it

    def let_go(self) -> None:
        """Let torch update the parameters from here on."""
        self._uninstall()

    def _compare(self, recorder: CudaRecorder) -> None:
        """Record, and make the same update by torch and by the recording; restores everything."""
        written = self._static.written
        before = [each.clone() for each in written]

        def play(update: Callable[[], None]) -> Played:
            update()
            played = Played(outputs=[now.float() - old.float() for now, old in zip(written, before, strict=True)])
            put_back()
            return played

        def put_back() -> None:
            for each, old in zip(written, before, strict=True):
                each.copy_(old)

        with torch.no_grad(), self._static.handed_over():
            try:
                usual = play(self._static.run)
                self._static.record(recorder)
                put_back()
                deviation = measure_deviation(usual, play(self._static.replay))
            finally:
                put_back()
                recorder.wait()
        if not deviation.finite or deviation.largest > OPTIMIZER_LIMIT:
            raise NotApplicable(f"a replayed update deviates by {deviation.largest:.2g}")

    def _step(self, step: Callable[[], Any], closure: Callable[[], Any] | None = None) -> Any:
        """The optimizer's `step`, given its own, which a scheduler may have wrapped."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not self._static.holds():
            self._note_missed()
            step()
            return loss
        self._static.replay()
        self.replays += 1
        self._optimizer._opt_called = True  # as a scheduler's wrapper notes
        for hook in self._optimizer._optimizer_step_post_hooks.values():  # ours: they count
            hook(self._optimizer, (), {})
        return loss

    def _note_missed(self) -> None:
        self._missed += 1
        if self._missed > max(MOST_MISSED, self.replays):
            self.refused = "gradients or settings of the optimizer are others in each step"
            self.let_go()

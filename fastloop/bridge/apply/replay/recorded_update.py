"""Replays the optimizer's update after a replayed step, in place of a fused optimizer's own step.

Lightning calls `optimizer.step(closure)`; the closure trains, and zeroing, clipping and hooks run in it as usual. Only
what torch does after that is replaced.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from fastloop.bridge.apply.rehearse.optimizer_twins import OPTIMIZER_LIMIT
from fastloop.bridge.apply.rehearse.played import RunResults, compare_results
from fastloop.bridge.attributes import replace_method
from fastloop.errors import NotApplicable, describe
from fastloop.feeds.step_graph.recording import CudaRecorder
from fastloop.feeds.step_graph.static_step import Gradients, StaticStep
from fastloop.feeds.step_graph.static_update import StaticUpdate

STALE = 3
"""A new recording is made after this many updates in a row for which the old one was not valid."""
TRIES = (0, 8, 64)
"""Replayed steps after which a recording is tried: before that, a parameter may have no state yet, or get a new one."""
SCHEDULED = "_wrapped_by_lr_sched"
"""torch's mark for a `step` that a scheduler has wrapped; one that has it is not wrapped again."""


class RecordedUpdates:
    """The updates of a fit's optimizer."""

    def __init__(self) -> None:
        self._count = self._tries = 0
        self._refused = ""
        self._update: RecordedUpdate | None = None

    def evidence(self) -> dict[str, Any]:
        """How many updates were replayed, and why not more."""
        running = 0 if self._update is None else self._update.replays
        return {"replayed_updates": self._count + running, "update_refused": self._refused}

    def are_due(self, replays: int) -> bool:
        """Whether to record an update, after `replays` replayed steps, because there is no valid recording. Drops a
        stale one."""
        if self._update is not None and self._update.missed >= STALE:
            self.drop()
            self._refused = "the optimizer's gradients, state or settings change at every step"
        return self._update is None and self._tries < len(TRIES) and replays >= TRIES[self._tries]

    def record(self, optimizer: Any, step: StaticStep, recorder: CudaRecorder) -> None:
        """Record an update, between two updates."""
        self._tries += 1
        try:
            self._update, self._refused = RecordedUpdate(optimizer, step.gradients, recorder), ""
        except Exception as error:
            self._refused = describe(error)

    def drop(self) -> None:
        """Let torch update the parameters, until there is another recording."""
        if self._update is not None:
            self._count += self._update.replays
            self._update.let_go()
            self._update = None


class RecordedUpdate:
    """One recording, which replaces the optimizer's `step` until `let_go`.

    Args:
        gradients: see StaticUpdate; they hold the gradients of a step.

    Raises:
        NotApplicable: it cannot be recorded, or its results differ.
    """

    def __init__(self, optimizer: Any, gradients: Gradients, recorder: CudaRecorder) -> None:
        self._optimizer, self._usual = optimizer, optimizer.step
        own = vars(optimizer).get("step")
        if own is not None and not (hasattr(own, SCHEDULED) and own.__wrapped__ is type(optimizer).step):
            raise NotApplicable("the optimizer's step is not torch's own")
        if self._has_hooks():
            raise NotApplicable("the optimizer's step has a hook")
        self.replays = self.missed = 0
        """Number of replayed updates, and of updates since the last of them that could not be replayed."""
        self._static = StaticUpdate(optimizer, gradients)
        _compare(self._static, recorder)
        self._is_on, self._put_back = True, replace_method(optimizer, "step", self._step)
        setattr(optimizer.step, SCHEDULED, True)

    def let_go(self) -> None:
        """Let torch update the parameters from now on, also if somebody has wrapped our `step`."""
        self._is_on = False
        self._put_back()

    def _step(self, closure: Callable[[], Any] | None = None) -> Any:
        """The optimizer's `step`."""
        if not self._is_on or closure is None or self._has_hooks() or not self._static.has_settings():
            self.missed += 1
            return self._usual(closure)
        with torch.enable_grad():
            loss = closure()
        if not self._static.has_addresses():
            self.missed += 1
            self._usual()
            return loss
        self._static.replay()
        self.replays, self.missed = self.replays + 1, 0
        self._optimizer._opt_called = True  # as a scheduler's wrapper notes
        for hook in self._optimizer._optimizer_step_post_hooks.values():  # our own, which count
            hook(self._optimizer, (), {})
        return loss

    def _has_hooks(self) -> bool:
        """Whether one of the user's hooks runs before or after the step."""
        mine, theirs = self._optimizer._optimizer_step_post_hooks, self._optimizer._optimizer_step_pre_hooks
        every = chain(theirs.values(), _global_optimizer_pre_hooks.values(), _global_optimizer_post_hooks.values())
        return any(True for _ in every) or not all(is_from(("fastloop.",), hook) for hook in mine.values())


def is_from(packages: tuple[str, ...], hook: Any) -> bool:
    """Whether the hook is defined in one of these packages, and not in a recipe."""
    module = getattr(hook, "__module__", type(hook).__module__)
    return module.startswith(packages) and ".recipe_modules." not in module


@torch.no_grad()
def _compare(static: StaticUpdate, recorder: CudaRecorder) -> None:
    """Record an update, and compare its replay with the same update by torch. Restores everything.

    Raises:
        NotApplicable: they differ.
    """
    parameters, state = static.parameters, static.state
    before = [each.clone() for each in (*parameters, *state)]

    def put_back() -> None:
        for each, old in zip((*parameters, *state), before, strict=True):
            each.copy_(old)

    def play(update: Callable[[], None]) -> tuple[RunResults, list[float]]:
        update()
        changes = [now - old for now, old in zip((*parameters, *state), before, strict=True)]
        moved, kept = changes[: len(parameters)], changes[len(parameters) :]
        counted = [float(each) for each in kept if not each.dim()]
        put_back()
        # Compared separately: a counter goes up by 1, and a parameter changes by about its learning rate.
        return RunResults(outputs=moved, gradients={str(n): each for n, each in enumerate(kept) if each.dim()}), counted

    with static.handed_over():
        try:
            usual, counted = play(static.run_eagerly)
            static.record(recorder)
            put_back()
            replayed, counted_again = play(static.replay)
        finally:
            put_back()
            recorder.wait()
    deviation = compare_results(usual, replayed)
    if counted != counted_again or not deviation.finite or deviation.largest > OPTIMIZER_LIMIT:
        raise NotApplicable(f"a replayed update deviates by {deviation.largest:.2g}")

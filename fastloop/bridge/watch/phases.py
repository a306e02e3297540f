"""Maps the Trainer's profiler actions to phases of the step.

Lightning 2.5 and 2.6 open a profiler action around the loader call, each hook and each call of the strategy. The time
of an action with an unknown name counts toward the phase around it.
"""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Set
from typing import Any

import torch

from fastloop.bridge import namespaces
from fastloop.evidence.clock.step_clock import RARE, Clock

NEXT = "].train_dataloader_next"
"""The end of an action's name; before it is the name of the loop's class, which may be the user's."""
VALIDATION_NEXT = "].val_next"
"""The same in validation."""
BODY = "run_training_batch"
PIECE = "[fastloop]"
"""Prefix of the phases that fastloop's own code runs inside one of Lightning's calls."""
OUR_CALLBACKS = ("FastLoop", "Beats", "NoExchange", "ProgressLines", "_Signals")
"""Callbacks of fastloop itself, as opposed to the user's."""
_STRATEGY = {"batch_to_device": "h2d", "training_step": "forward", "backward": "backward"}
_WHOLE = {"optimizer_step": "optimizer", "save_checkpoint": "checkpoint"}
_LONGER = {
    **dict.fromkeys(
        ("on_validation_model_zero_grad", "on_validation_model_eval", "on_validation_start"), "begin:validation"
    ),
    "on_validation_model_train": "end:validation",
    "on_train_epoch_end": "begin:epoch_gap",
}
_HOOKS = ("on_", "lr_scheduler_step")
"""Prefixes of hooks that run the user's own code between the parts of a step."""


def find_phase(name: str) -> str | None:
    """Return the phase of an action; None if it belongs to the phase around it.

    The prefixes ``begin:`` and ``end:`` mark phases that outlast the action.
    """
    if name in _WHOLE:
        return _WHOLE[name]
    if name.startswith(PIECE):
        return name.removeprefix(PIECE)
    owner, _, hook = name.rpartition(".")
    if hook in _LONGER:
        return _LONGER[hook]
    if owner.startswith("[Strategy]"):
        return _STRATEGY.get(hook)
    if owner.startswith("[LightningModule]") and hook == "optimizer_step":
        return "optimizer"
    ours = owner.removeprefix("[Callback]").partition("{")[0] in OUR_CALLBACKS
    theirs = owner.startswith(("[Callback]", "[LightningModule]", "[LightningDataModule]"))
    if theirs and hook.startswith(_HOOKS) and not ours:
        return "callbacks_logging"
    return None


def list_empty_hook_actions(trainer: Any, module: Any) -> set[str]:
    """Return the actions of hooks that are not overridden; Lightning opens them anyway."""
    space = namespaces.find_namespace(trainer)
    owners = [(f"[LightningModule]{type(module).__name__}", module, namespaces.load(space, "core.LightningModule"))]
    base = namespaces.load(space, "callbacks.Callback")
    owners += [(f"[Callback]{callback.state_key}", callback, base) for callback in trainer.callbacks]
    found: dict[bool, set[str]] = {True: set(), False: set()}
    for name, owner, base in owners:
        for hook in dir(base):
            if hook.startswith("on_"):
                own = hook in vars(owner) or getattr(type(owner), hook) is not getattr(base, hook)
                found[own].add(f"{name}.{hook}")
    return found[False] - found[True]


def list_hooks(trainer: Any) -> set[str]:
    """Return the names of Lightning's hooks."""
    space = namespaces.find_namespace(trainer)
    bases = [namespaces.load(space, name) for name in ("core.LightningModule", "callbacks.Callback")]
    return {name for base in bases for name in dir(base)} - set(dir(torch.nn.Module))


NOTHING = contextlib.nullcontext()
"""Created once, because the Trainer opens some twenty contexts per step."""


class _Phase:
    """A phase that lasts as long as its action."""

    def __init__(self, marks: Marks, name: str, phase: str) -> None:
        self.marks, self.name, self.phase = marks, name, phase
        self.is_hook, self.is_forward = phase == "callbacks_logging", phase == "forward"
        self.is_work = phase in ("forward", "backward")
        self.saves = self.is_hook and "Checkpoint" in name
        """Whether the hook saves checkpoints. Its work after a save, such as deleting an older one, is part of it."""
        self.saved = False
        self._since = 0.0
        self._back: Callable[[], None] | None = None
        self._work: Any = None

    def __enter__(self) -> None:
        if self.is_hook:
            self._since = time.perf_counter()
            self.marks.saver = self if self.saves else None
            if not self.marks.in_detail():
                return
        elif self.phase == "checkpoint" and self.marks.saver is not None and self.marks.saver.saved:
            return  # a second save within the hook: the phase of the first is still open
        elif self.is_forward and self.marks.around_forward is not None:
            self._back = self.marks.around_forward()
        if self.is_work and self.marks.may_count(self.phase) and not self.marks.counts:
            self.marks.counts, self._work = True, self.marks.around_work
            self._work.__enter__()
        self.marks.enter(self.phase)

    def __exit__(self, *raised: object) -> None:
        if self.phase == "checkpoint" and self.marks.saver is not None:
            self.marks.saver.saved = True
            return
        if self.saved:
            self.saved, self._since = False, time.perf_counter()
            self.marks.leave()
        self.marks.saver = None
        if self.is_hook and not self.marks.in_detail():
            self.marks.add_hook_time(self.name, time.perf_counter() - self._since)
            return
        self.marks.leave()
        if self._work is not None:
            self._work.__exit__(*raised)
            self.marks.counts, self._work = False, None
        if self.is_hook:
            self.marks.add_if_in_window(self.name, time.perf_counter() - self._since)
        if self._back is not None:
            self._back()
            self._back = None


class _Turn:
    """An action that begins or ends a longer phase."""

    def __init__(self, turn: Callable[[], None], *, at_exit: bool) -> None:
        self.turn, self.at_exit = turn, at_exit

    def __enter__(self) -> None:
        if not self.at_exit:
            self.turn()

    def __exit__(self, *_: object) -> None:
        if self.at_exit:
            self.turn()


class _ValidationNext:
    """The wait for a validation batch, which is timed within the phase of validation."""

    def __init__(self, marks: Marks) -> None:
        self.marks, self._since = marks, 0.0

    def __enter__(self) -> None:
        self._since = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        if self.marks.in_window:
            self.marks.validation_loading_s += time.perf_counter() - self._since


class _Body:
    """The work of one batch."""

    def __init__(self, marks: Marks) -> None:
        self.marks = marks

    def __enter__(self) -> None:
        self.marks.in_work = True
        self.marks.clock.body()

    def __exit__(self, *_: object) -> None:
        self.marks.clock.issued()
        self.marks.in_work = False
        self.marks.after_work()


class Marks:
    """Turns actions into marks on a clock. Names are mapped once; an action that is not marked costs one look-up.

    Attributes:
        hooks_s: host seconds by action: in every step for hooks outside the batch's work, for others in detailed steps.
        validation_loading_s: host seconds spent waiting for validation batches.
        ranges: a trace that is being recorded, which gets the same phases by name.
        in_window: whether the window is open. What is timed outside its whole steps is taken out when it closes.
        after_work: called when a batch's work has been issued.
        in_work: whether a batch's work is running.
        saver: the hook that is running now, if it saves checkpoints.
        around_work: a reusable context, a FlopCount, that is entered for every forward, and for every backward unless
            it `reforms_backward`.
        counts: whether that context is entered now.
        empty_hooks: actions of hooks that are not overridden; Lightning opens them anyway.
        around_forward: called before a marked ``training_step``; returns a function that is called after it.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.hooks_s: defaultdict[str, float] = defaultdict(float)
        self.validation_loading_s = 0.0
        self.ranges: Any = None
        self.in_work = self.in_window = False
        self.after_work: Callable[[], None] = lambda: None
        self.saver: _Phase | None = None
        self.around_work: Any = None
        self.counts = False
        self.empty_hooks: Set[str] = frozenset()
        self.around_forward: Callable[[], Callable[[], None]] | None = None
        self._contexts: dict[str, Any] = {}
        self._body = _Body(self)

    def profile(self, name: str) -> Any:
        """Return the context for an action."""
        if name == BODY:
            return self._body
        clock = self.clock
        if clock.in_body and not clock.detailed and self.ranges is None and self.around_work is None:
            return NOTHING  # the case for nearly all actions
        if not self.is_marking():
            return NOTHING
        try:
            context = self._contexts[name]
        except KeyError:
            context = self._contexts[name] = self._make_phase(name)
        if (
            clock.phase in RARE
            and context is not NOTHING
            and not (isinstance(context, (_Turn, _ValidationNext)) or context.phase == "checkpoint")
        ):
            return NOTHING
        return context

    def is_marking(self) -> bool:
        """Whether a phase that begins now would be marked."""
        clock = self.clock
        timed = clock.open and (clock.detailed or not clock.in_body)
        return timed or self.ranges is not None or self.around_work is not None

    def may_count(self, phase: str) -> bool:
        """Whether the work of a phase is counted."""
        work = self.around_work
        return work is not None and not (phase == "backward" and work.reforms_backward)

    def in_detail(self) -> bool:
        """Whether every hook is marked separately."""
        return self.clock.detailed or self.ranges is not None

    def add_hook_time(self, name: str, seconds: float) -> None:
        """Add the time of a hook that is not marked separately."""
        self.add_if_in_window(name, seconds)
        self.clock.hooks_s += seconds

    def add_if_in_window(self, name: str, seconds: float) -> None:
        """Record how long a hook took, if the window is open."""
        if self.in_window:
            self.hooks_s[name] += seconds

    def enter(self, phase: str) -> None:
        if self.ranges is not None:
            self.ranges.push(phase)
        self.clock.enter(phase)

    def leave(self) -> None:
        self.clock.leave()
        if self.ranges is not None:
            self.ranges.pop()

    def _make_phase(self, name: str) -> Any:
        if name.endswith(VALIDATION_NEXT):
            return _ValidationNext(self)
        phase = find_phase(name)
        if phase is None or (phase == "callbacks_logging" and name in self.empty_hooks):
            return NOTHING
        turn, _, inner = phase.rpartition(":")
        if turn == "begin":
            return _Turn(lambda: self._begin(inner), at_exit=False)
        if turn == "end":
            return _Turn(lambda: self._end(inner), at_exit=True)
        return _Phase(self, name, phase)

    def _begin(self, phase: str) -> None:
        if self.clock.phase != phase:
            self.clock.rest(phase)

    def _end(self, phase: str) -> None:
        if self.clock.phase == phase:
            self.clock.rest("host_other")

"""The live objects of one run, and the changes to them that an action of a rung may ask for."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from fastloop.bridge import namespaces
from fastloop.bridge.apply.staging import Staging, set_attribute
from fastloop.feeds.batch_norm.groups import BatchGroups
from fastloop.records.facts import Facts
from fastloop.records.plan import Undo


class LiveSite:
    """What an action is handed: see `fastloop.records.plan.Site`."""

    def __init__(
        self, trainer: Any, strategy: Any, facts: Facts, scaler_state: Mapping[str, Any] | None = None
    ) -> None:
        self.trainer, self.strategy, self.facts, self.scaler_state = trainer, strategy, facts, scaler_state
        self.staging = Staging(trainer, strategy)
        self.recorded: Mapping[str, Sequence[tuple[Sequence[Any], Mapping[str, Any]]]] = {}
        self.changed_sizes: list[Mapping[int, int]] = []
        self.groups = BatchGroups()
        self._notes: list[Callable[[], None]] = []

    @property
    def module(self) -> Any:
        return self.strategy.lightning_module

    @property
    def wrapped(self) -> Any:
        return self.strategy.model

    @property
    def optimizers(self) -> list[Any]:
        return list(self.strategy.optimizers)

    @property
    def device(self) -> torch.device:
        return self.strategy.root_device  # type: ignore[no-any-return]

    def set_precision(self, mode: str) -> Undo:
        plugin = namespaces.load(namespaces.of(self.strategy), "plugins.precision.MixedPrecision")
        before = self.strategy._precision_plugin
        self.strategy.precision_plugin = own = plugin(mode, self.device.type)
        if self.scaler_state is not None:  # Lightning restored it before this plugin was there to take it
            own.load_state_dict(self.scaler_state)
        return lambda: setattr(self.strategy, "_precision_plugin", before)

    def scale_rates(self, factor: float) -> Undo:
        schedulers = [config.scheduler for config in self.strategy.lr_scheduler_configs]

        def scale(by: float) -> None:
            for group in (group for optimizer in self.optimizers for group in optimizer.param_groups):
                group.update({key: group[key] * by for key in _RATES if key in group})
            for each in _walk_schedulers(schedulers):
                for name in ("base_lrs", "max_lrs", "_last_lr"):
                    if isinstance(rates := getattr(each, name, None), list):
                        setattr(each, name, [rate * by for rate in rates])

        scale(factor)
        return lambda: scale(1 / factor)

    def set_ddp(self, settings: Mapping[str, Any]) -> Undo:
        before = dict(self.strategy._ddp_kwargs)
        self.strategy._ddp_kwargs = {**before, **settings}
        return lambda: setattr(self.strategy, "_ddp_kwargs", before)

    def convert_inputs(self, convert: Callable[[Any], Any]) -> Undo:
        conversions = self.staging.conversions
        conversions.append(convert)
        return lambda: conversions.remove(convert) if convert in conversions else None

    def note_in_step(self, note: Callable[[], None]) -> None:
        self._notes.append(note)

    def take_notes(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """`step`, which leads to the module's training_step, with the notes that are due taken inside the latter."""
        if not self._notes:
            return step
        original = self.module.training_step

        def noting(*args: Any, **kwargs: Any) -> Any:
            while self._notes:
                self._notes.pop(0)()
            return original(*args, **kwargs)

        def noted_step(*args: Any, **kwargs: Any) -> Any:
            with attribute(self.module, "training_step", noting):
                return step(*args, **kwargs)

        return noted_step


_RATES = ("lr", "initial_lr", "max_lr", "min_lr")
"""Of an optimizer's group; OneCycleLR keeps its own there."""


def _walk_schedulers(schedulers: Sequence[Any]) -> Iterator[Any]:
    """Those of a SequentialLR or ChainedScheduler too."""
    for each in schedulers:
        yield each
        yield from _walk_schedulers(getattr(each, "_schedulers", ()))


@contextlib.contextmanager
def attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set an instance attribute for a moment, and leave the instance as it was."""
    undo = set_attribute(owner, name, value)
    try:
        yield
    finally:
        undo()

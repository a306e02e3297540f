"""The live objects of one run, and the changes that a rung's actions may make to them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from fastloop.bridge import namespaces
from fastloop.bridge.apply.loop.thin_loop import thin
from fastloop.bridge.apply.staging import Staging
from fastloop.bridge.attributes import attribute
from fastloop.evidence.clock.one_time import OneTime
from fastloop.feeds.batch_norm.groups import BatchGroups
from fastloop.records.facts import Facts
from fastloop.records.plan import Applied, Undo


class LiveSite:
    """The live objects that an action receives; see `fastloop.records.plan.Site`.

    Args:
        scaler_state: the loss scaler's state in the checkpoint that the run resumes; None if there is none.
        warn: receives a line that the user must not miss.
        say: receives a line about progress.
        one_time: collects one-time costs, which belong to no step.
    """

    def __init__(
        self,
        trainer: Any,
        strategy: Any,
        facts: Facts,
        scaler_state: Mapping[str, Any] | None,
        *,
        warn: Callable[[str], None],
        say: Callable[[str], None],
        one_time: OneTime,
    ) -> None:
        self.trainer, self.strategy, self.facts, self.scaler_state = trainer, strategy, facts, scaler_state
        self.warn, self.say, self.one_time = warn, say, one_time
        self.staging = Staging(trainer, strategy)
        self.recorded: Mapping[str, Sequence[tuple[Sequence[Any], Mapping[str, Any]]]] = {}
        self.changed_sizes: list[Mapping[int, int]] = []
        self.step_bytes: int | None = None
        """Peak device memory of tensors in the first step, in bytes; None if unknown."""
        self.groups = BatchGroups()
        self.graph_passes: list[Callable[[Any], Any]] = []
        self.graph_steps: Callable[[bool], Applied] = lambda _asked: Applied(undo=lambda: None)
        self.every_batch: list[Callable[[], None]] = []
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

    def set_precision(self, mode: str, *, cache_weights: bool = False) -> Undo:
        space, before = namespaces.find_namespace(self.strategy), self.strategy._precision_plugin
        if mode.endswith("-true"):
            self.strategy.precision_plugin = namespaces.load(space, "plugins.precision.HalfPrecision")(mode)
            restore = _remember_dtypes(self.module)  # Lightning converts the module after this
        else:
            plugin = namespaces.load(space, "plugins.precision.MixedPrecision")
            self.strategy.precision_plugin = own = plugin(mode, self.device.type)
            own.clip_gradients = partial(_clip_unscaled, own)
            if cache_weights:
                dtype = torch.bfloat16 if mode == "bf16-mixed" else torch.float16
                own.autocast_context_manager = partial(torch.autocast, self.device.type, dtype=dtype)
            if self.scaler_state is not None:  # Lightning restored it before this plugin existed
                own.load_state_dict(self.scaler_state)

        def undo() -> None:
            self.strategy._precision_plugin = before
            if mode.endswith("-true"):
                restore()

        return undo

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
        return _add(self.staging.conversions, convert)

    def note_in_step(self, note: Callable[[], None]) -> None:
        self._notes.append(note)

    def note_each_batch(self, note: Callable[[], None]) -> Undo:
        return _add(self.every_batch, note)

    def thin_loop(self) -> Applied:
        return thin(self.trainer, self.module, self.note_each_batch)

    def take_notes(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `step`, so that pending notes are called inside the module's training_step."""
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


def _add(items: list[Any], item: Any) -> Undo:
    items.append(item)
    return lambda: items.remove(item) if item in items else None


_RATES = ("lr", "initial_lr", "max_lr", "min_lr")
"""Keys of an optimizer's param group that hold learning rates; OneCycleLR stores its own there."""


def _walk_schedulers(schedulers: Sequence[Any]) -> Iterator[Any]:
    """Yield all schedulers, including those inside a SequentialLR or ChainedScheduler."""
    for each in schedulers:
        yield each
        yield from _walk_schedulers(getattr(each, "_schedulers", ()))


def _clip_unscaled(plugin: Any, optimizer: Any, clip_val: float = 0.0, *args: Any, **kwargs: Any) -> None:
    """Clip gradients also for optimizers that the user made fused, which unscale gradients in their own step.

    Lightning 2.6.6 refuses that (#21435), with and without a loss scaler. Unscaling first, as for all other optimizers,
    gives gradients their true norm; the step then only gets the scaler's check for infinities, and unscales nothing.
    """
    if clip_val > 0 and plugin.scaler is not None and getattr(optimizer, "_step_supports_amp_scaling", False):
        plugin.scaler.unscale_(optimizer)
    super(type(plugin), plugin).clip_gradients(optimizer, clip_val, *args, **kwargs)


def _remember_dtypes(module: torch.nn.Module) -> Undo:
    """Return an undo that restores the current dtypes of parameters and buffers; what rounding lost stays lost."""
    known = [
        (held, name, tensor.dtype)
        for part in module.modules()
        for held in (part._parameters, part._buffers)
        for name, tensor in held.items()
        if tensor is not None and tensor.is_floating_point()
    ]

    def undo() -> None:
        for held, name, dtype in known:
            tensor = held.get(name)
            if tensor is not None and tensor.dtype != dtype:
                tensor.data = tensor.data.to(dtype)
                if tensor.grad is not None:
                    tensor.grad.data = tensor.grad.data.to(dtype)

    return undo

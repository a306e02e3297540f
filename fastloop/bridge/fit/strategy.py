"""One mixin for Lightning's Strategy, combined with whatever strategy the Trainer has."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fastloop.bridge import namespaces
from fastloop.errors import ConfigError, NotApplicable
from fastloop.records.plan import Undo

if TYPE_CHECKING:
    from fastloop.bridge.apply.applier import Applier


@functools.cache
def make_mixin(space: str) -> type:
    """Make the mixin for one Lightning namespace. It must inherit from that namespace's Strategy: CPython refuses to
    replace the class of a live object by one with a different layout, and with the wrong base the method order is
    silently wrong.
    """
    base: Any = namespaces.load(space, "strategies.Strategy")

    class FastLoopStrategyMixin(base):  # type: ignore[misc]
        """Passes calls to its applier; without one it changes nothing. It can be copied and pickled."""

        fastloop: Applier | None = None
        fastloop_made_by: tuple[Callable[[Any], type], Any]
        """The function that makes this class again, and its argument."""

        def setup(self, trainer: Any) -> None:
            if self.fastloop is not None:
                self.fastloop.model_built(trainer, self)
            super().setup(trainer)

        def configure_ddp(self) -> None:
            if self.fastloop is not None:
                self.fastloop.before_wrap()
            super().configure_ddp()
            if self.fastloop is not None:
                self.fastloop.wrapped()

        def process_dataloader(self, dataloader: Any) -> Any:
            dataloader = super().process_dataloader(dataloader)
            return dataloader if self.fastloop is None else self.fastloop.loader(dataloader)

        def batch_to_device(self, batch: Any, device: Any = None, dataloader_idx: int = 0) -> Any:
            move = super().batch_to_device
            if self.fastloop is None:
                return move(batch, device, dataloader_idx)
            return self.fastloop.to_device(batch, lambda own: move(own, device, dataloader_idx), dataloader_idx)

        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            if self.fastloop is None:
                return super().training_step(*args, **kwargs)
            return self.fastloop.training_step(super().training_step, *args, **kwargs)

        def validation_step(self, *args: Any, **kwargs: Any) -> Any:
            return _run_evaluation(self.fastloop, super().validation_step, *args, **kwargs)

        def test_step(self, *args: Any, **kwargs: Any) -> Any:
            return _run_evaluation(self.fastloop, super().test_step, *args, **kwargs)

        def predict_step(self, *args: Any, **kwargs: Any) -> Any:
            return _run_evaluation(self.fastloop, super().predict_step, *args, **kwargs)

        def backward(self, closure_loss: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            run = functools.partial(super().backward, **kwargs)
            if self.fastloop is None:
                return run(closure_loss, optimizer, *args)
            return self.fastloop.backward(run, closure_loss, optimizer, *args)

        def __reduce_ex__(self, protocol: Any) -> Any:
            # These classes are made at run time, so pickle cannot find them by name; it rebuilds them from their base.
            _, _, state, *items = super().__reduce_ex__(2)
            # An applier holds the objects of one run, to which a copy does not belong.
            own = {name: value for name, value in state.items() if name != "fastloop"}
            return (_unpickle, self.fastloop_made_by, own, *items)

    return FastLoopStrategyMixin


def _run_evaluation(applier: Applier | None, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return step(*args, **kwargs) if applier is None else applier.run_step(step, *args, **kwargs)


@functools.cache
def mix_in(strategy: type) -> type:
    """Put the mixin in front of a strategy's class. The new name contains the old one, so that logs stay readable."""
    bases = (make_mixin(namespaces.find_namespace(strategy)), strategy)
    names = {"__module__": __name__, "fastloop_made_by": (mix_in, strategy)}
    return type(f"FastLoop_{strategy.__name__}", bases, names)


def _unpickle(make: Callable[[Any], type], of: Any) -> Any:
    kind: Any = make(of)
    return kind.__new__(kind)


def extend(strategy: Any) -> Undo:
    """Put the mixin in front of a live strategy's class, unless it is there already. Undo gives it its class back.

    Raises:
        NotApplicable: its class cannot be extended.
    """
    kind: Any = type(strategy)
    if hasattr(kind, "fastloop_made_by"):
        return lambda: None
    try:
        strategy.__class__ = mix_in(kind)
    except Exception as error:  # slots, a metaclass, a different layout: CPython then refuses the new class
        raise NotApplicable(f"the strategy {kind.__name__} cannot be extended: {error}") from error
    return lambda: setattr(strategy, "__class__", kind)


@functools.cache
def _make_single(space: str) -> type:
    base: Any = mix_in(namespaces.load(space, "strategies.SingleDeviceStrategy"))

    class FastLoopStrategy(base):  # type: ignore[misc]
        """``strategy="fastloop"``: trains on the one device that the accelerator offers.

        A strategy selected by name is made without a device. Lightning offers the accelerator's devices to any
        strategy that has ``parallel_devices``; without that attribute, training would silently run on the CPU.
        """

        strategy_name = "fastloop"
        fastloop_made_by = (_make_single, space)

        @property
        def parallel_devices(self) -> list[Any]:
            return []

        @parallel_devices.setter
        def parallel_devices(self, devices: list[Any]) -> None:
            _refuse_several("devices", len(devices), "it drives one device")
            if devices:
                self._root_device = devices[0]

        @property
        def num_nodes(self) -> int:
            return 1

        @num_nodes.setter
        def num_nodes(self, nodes: int) -> None:
            _refuse_several("num_nodes", nodes, "each node would train on its own")

    return FastLoopStrategy


def _refuse_several(argument: str, count: int, why: str) -> None:
    if count > 1:
        raise ConfigError(
            got=f'strategy="fastloop" with {count} {argument.removeprefix("num_")}',
            why=why,
            do=f'write {argument}=1, or strategy="fastloop_ddp"',
        )


def register() -> None:
    """Register the names `fastloop`, `fastloop_ddp` and `fastloop_fsdp` in every Lightning namespace. Idempotent."""
    for space, registry in namespaces.find_everywhere("strategies.StrategyRegistry"):
        if "fastloop" not in registry:
            ddp, fsdp = (namespaces.load(space, f"strategies.{name}") for name in ("DDPStrategy", "FSDPStrategy"))
            registry.register("fastloop", _make_single(space), description="one device, rungs switched by FastLoop")
            registry.register("fastloop_ddp", mix_in(ddp), description="DDP, rungs switched by FastLoop")
            registry.register("fastloop_fsdp", mix_in(fsdp), description="FSDP, rungs switched by FastLoop")
            fsdp.get_registered_strategies().append("fastloop_fsdp")  # so that Lightning refuses it on a CPU too

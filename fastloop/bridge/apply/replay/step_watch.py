"""Watches a training_step for what a replay of its kernels would leave out: logged values, and what it asks Python."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from fastloop.bridge.attributes import attribute

_STATIC = ("strategy", "world_size", "global_rank", "local_rank", "node_rank", "datamodule", "training", "num_devices")
"""Trainer attributes that a step may read: they are the same at each step."""


@dataclass(frozen=True)
class LogCall:
    """One call of ``module.log``, to be repeated at each replay."""

    name: str
    value: Any
    args: tuple[Any, ...]
    options: dict[str, Any]


class StepWatch:
    """Wraps one forward: collects what it logs, and notices what a replay would leave out."""

    def __init__(self, module: Any, device: torch.device) -> None:
        self.fault: str | None = None
        self.calls: list[LogCall] = []
        self._module, self._device, self._open = module, device, ExitStack()
        self._draws = self._read_draws()

    def notice(self, what: str | None) -> None:
        """Remember as the fault what the step used or changed; only the first is kept."""
        if what is not None and self.fault is None:
            self.fault = f"training_step uses or changes {what}, which a replay would skip"

    def find_host_draws(self) -> None:
        """Notice random numbers that were drawn on the host."""
        if self._draws != self._read_draws():
            self.notice("host random numbers")

    def _read_draws(self) -> list[Any]:
        numpy = sys.modules.get("numpy")
        host = torch.get_rng_state().tolist() if self._device.type != "cpu" else None
        return [random.getstate(), host, None if numpy is None else str(numpy.random.get_state())]

    def __enter__(self) -> None:
        self.calls = []
        with ExitStack() as opening:
            opening.enter_context(attribute(self._module, "log", self._take_log))
            for part in self._module.modules():
                if (trainer := vars(part).get("_trainer")) is not None:
                    opening.enter_context(attribute(part, "_trainer", _WatchedTrainer(trainer, self.notice)))
            self._open = opening.pop_all()

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def _take_log(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        if not isinstance(value, torch.Tensor) or value.device != self._device:
            self.notice(f"a value for self.log({name!r}) that is not a tensor on the device")
            return
        self.calls.append(LogCall(name, value.detach(), args, options))


class _WatchedTrainer:
    """A Trainer that reports each attribute read from it, except those that are the same at each step."""

    def __init__(self, trainer: Any, notice: Callable[[str], None]) -> None:
        self._trainer, self._notice = trainer, notice

    def __getattr__(self, name: str) -> Any:
        if name not in _STATIC:
            self._notice(f"trainer.{name}")
        return getattr(self._trainer, name)


class WatchedIndex(int):
    """A batch_idx that reports when it is used."""

    notice: Callable[[str], None]

    @classmethod
    def of(cls, value: Any, notice: Callable[[str], None]) -> Any:
        if type(value) is not int:
            return value
        watched = cls(value)
        watched.notice = notice
        return watched


def _watch(name: str) -> Callable[..., Any]:
    original = getattr(int, name)

    def used(self: WatchedIndex, *args: Any) -> Any:
        self.notice("batch_idx")
        return original(self, *args)

    return used


_USES = """add sub mul mod floordiv truediv neg eq ne lt le gt ge bool index int float hash str repr format"""
for _name in _USES.split():
    setattr(WatchedIndex, f"__{_name}__", _watch(f"__{_name}__"))

"""What a recorded step takes for granted: its tensors' addresses, the modules' modes, and the plain values it reads.

A recording keeps the numbers that Python had when it was made. A hook that sets ``self.beta`` or ``dropout.p`` between
two steps changes an eager step; a replay does not see it, so the recording is dropped and made anew.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from fastloop.bridge import namespaces
from fastloop.bridge.apply.rehearse.untouched import Kept
from fastloop.evidence.samples.sample_code import list_called

PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype)
_ENTRY = ("training_step", "forward")
"""Hooks of Lightning's that run in a step."""


class Guard:
    """Remembers all of it for one recording.

    Args:
        module: the LightningModule.
        kept: the objects that the module keeps.
    """

    def __init__(self, module: torch.nn.Module, trainer: Any, kept: Kept) -> None:
        self._parts, self._trainer = list(module.modules()), trainer
        names = list_read_names(module, kept.list_kinds())
        self._read = [(holder, name) for holder in kept.list_holders() for name in holder if name in names]
        self._before = self._look()

    def holds(self) -> bool:
        """Whether everything is as it was."""
        return self._look() == self._before

    def _look(self) -> list[Any]:
        found: list[Any] = [self._trainer.accumulate_grad_batches]
        for part in self._parts:
            found.append(part.training)
            found += map(id, part._modules.values())
            for each in part._parameters.values():
                if each is not None:
                    found += (each.data_ptr(), each.requires_grad)
            found += (buffer.data_ptr() for buffer in part._buffers.values() if buffer is not None)
        for holder, name in self._read:
            value = holder.get(name)
            found.append(value if isinstance(value, PLAIN) else id(value))
            if isinstance(value, torch.Tensor):
                found.append(value.data_ptr())
        return found


def list_read_names(module: torch.nn.Module, kinds: Iterable[type]) -> set[str]:
    """Names that the code of a step may read: all that stand in the methods of these classes, hooks aside, and in the
    functions that training_step calls."""
    lightning = namespaces.load(namespaces.find_namespace(module), "core.module.LightningModule")
    hooks = {*dir(lightning)} - {*_ENTRY}
    bases = {base for kind in kinds for base in kind.__mro__} - {*lightning.__mro__}
    names: set[str] = set()
    for base in bases:
        for name, member in vars(base).items():
            function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
            if name not in hooks and inspect.isfunction(function):
                names.update(_list_names(function.__code__))
    for function in list_called(getattr(type(module), "training_step", None), type(module)):
        names.update(_list_names(function.__code__))
    return names - hooks  # what Lightning has under these names, the watched run replaces


def _list_names(code: Any) -> Iterator[str]:
    """Names in a function's code, and its texts, which may be keys; functions inside it included."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, str):
            yield constant
        elif inspect.iscode(constant):
            yield from _list_names(constant)

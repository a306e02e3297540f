"""What a recorded step takes for granted: its tensors' addresses, the modules' modes, and the plain values it reads.

A recording keeps the numbers that Python had when it was made. A hook that sets ``self.beta``, ``dropout.p`` or a
global variable between two steps changes an eager step; a replay does not see it, so the recording is dropped and made
anew. A step that uses something that cannot be checked before each step, such as the clock or a file, is not recorded.
"""

from __future__ import annotations

from typing import Any

import torch

from fastloop.bridge.apply.read_model import is_metric
from fastloop.bridge.apply.replay.step_code import list_outer_values, list_read_names, list_step_functions
from fastloop.bridge.apply.state.untouched import StateSnapshot
from fastloop.evidence.samples.sample_code import is_installed

PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype)
_LOOKED_AT = {"training", "_modules", "_parameters", "_buffers"}
_MISSING = object()
MOST_MEMBERS = 64
"""A longer list counts as unchanged as long as it is the same object."""


class Guard:
    """Remembers all of this for one recording.

    Args:
        module: the LightningModule.
        kept: the objects that the module keeps.
    """

    def __init__(self, module: torch.nn.Module, trainer: Any, kept: StateSnapshot) -> None:
        # A step that updates a metric is not recorded, so only other steps change it.
        self._parts, self._trainer = [part for part in module.modules() if not is_metric(part)], trainer
        buffers = {id(part._buffers) for part in self._parts}
        names = list_read_names(module, kept.list_kinds()) - _LOOKED_AT
        self._read: list[tuple[Any, str]] = [
            (holder, name)
            for owner, holder in kept.list_holders()
            for name in holder
            if not is_metric(owner)
            if name in names and id(holder) not in buffers and _may_change(owner, holder[name])
        ]
        self._read += [
            (holder, name)
            for owner, holder in kept.list_holders()
            if owner is not holder and not is_metric(owner)
            for name in (_list_class_values(type(owner)) & names) - holder.keys()  # an attribute may hide it later
        ]
        kinds = {type(owner) for owner, holder in kept.list_holders() if owner is not holder}
        bases = {base for kind in kinds for base in kind.__mro__ if not is_installed(base)}
        self._read += [
            (vars(base), name) for base in bases for name in _list_class_values(base) & names & {*vars(base)}
        ]
        self._read += list_outer_values(list_step_functions(module, kept), names)
        self._before = self._look()

    def holds(self) -> bool:
        """Whether everything is as it was when the step was recorded."""
        return self._look() == self._before

    def explain(self) -> str:
        """Name something that has changed."""
        before, now = self._before[-len(self._read) :], self._look()[-len(self._read) :]
        changed = (name for (_, name), old, new in zip(self._read, before, now, strict=False) if old != new)
        return next(changed, "a parameter, a buffer, or the mode of a module")

    def _look(self) -> list[Any]:
        """Read everything. Runs at every step: a hundred modules may take at most a tenth of a millisecond."""
        found: list[Any] = [self._trainer.accumulate_grad_batches]
        for part in self._parts:
            state = part.__dict__
            found.append(state["training"])
            if children := state["_modules"]:
                found += map(id, children.values())
            if parameters := state["_parameters"]:
                found += [(each.data_ptr(), each.requires_grad) for each in parameters.values() if each is not None]
            if buffers := state["_buffers"]:
                found += [each.data_ptr() for each in buffers.values() if each is not None]
        for holder, name in self._read:
            found.append(_show(holder.get(name, _MISSING)))
        return found


def _show(value: Any) -> Any:
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, list) and len(value) <= MOST_MEMBERS:
        return id(value), [each if isinstance(each, PLAIN) else id(each) for each in value]
    return _locate(value)


def _list_class_values(kind: type) -> set[str]:
    """Names of plain values in a user's class and its bases."""
    bases = [base for base in kind.__mro__ if not is_installed(base)]
    return {name for base in bases for name, value in vars(base).items() if isinstance(value, PLAIN)}


def _locate(value: Any) -> Any:
    return (id(value), value.data_ptr()) if isinstance(value, torch.Tensor) else id(value)


def _may_change(owner: Any, value: Any) -> bool:
    """Whether code may change the attribute. In torch's own layers, hooks set floats such as a dropout rate, but not
    sizes or strides."""
    return isinstance(value, float) or not type(owner).__module__.startswith("torch.nn.")

"""What a recorded step takes for granted: its tensors' addresses, the modules' modes, and the plain values it reads.

A recording keeps the numbers that Python had when it was made. A hook that sets ``self.beta``, ``dropout.p`` or a
global variable between two steps changes an eager step; a replay does not see it, so the recording is dropped and made
anew. What nobody can look at before each step, such as the clock or a file, forbids a recording.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from fastloop.bridge import namespaces
from fastloop.bridge.apply.rehearse.untouched import Kept
from fastloop.evidence.samples.sample_code import list_called, list_closure, list_globals, list_names

PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype)
_LOOKED_AT = {"training", "_modules", "_parameters", "_buffers"}
_ENTRY = ("training_step", "forward")
"""Hooks of Lightning's that run in a step."""
_OUTSIDE = ("time", "datetime", "os", "io", "pathlib", "socket", "subprocess", "logging", "wandb", "mlflow")
"""Modules whose values change by themselves, or whose calls have an effect each time."""
_CALLS = ("print", "open", "input")


class Guard:
    """Remembers all of it for one recording.

    Args:
        module: the LightningModule.
        kept: the objects that the module keeps.
    """

    def __init__(self, module: torch.nn.Module, trainer: Any, kept: Kept) -> None:
        self._parts, self._trainer = [part for part in module.modules() if not _is_metric(part)], trainer
        buffers = {id(part._buffers) for part in self._parts}
        names = list_read_names(module, kept.list_kinds()) - _LOOKED_AT
        self._read = [
            (holder, name)
            for owner, holder in kept.list_holders()
            for name in holder
            if not _is_metric(owner)
            if name in names and id(holder) not in buffers and _may_change(owner, holder[name])
        ]
        self._read += list_read_globals(list_step_functions(module, kept))
        self._before = self._look()

    def holds(self) -> bool:
        """Whether everything is as it was."""
        return self._look() == self._before

    def explain(self) -> str:
        """Name what is not as it was."""
        before, now = self._before[-len(self._read) :], self._look()[-len(self._read) :]
        changed = (name for (_, name), old, new in zip(self._read, before, now, strict=False) if old != new)
        return next(changed, "a parameter, a buffer, or the mode of a module")

    def _look(self) -> list[Any]:
        """Runs at every step: a hundred modules may take a tenth of a millisecond, not more."""
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
            value = holder.get(name)
            found.append(value if isinstance(value, PLAIN) else _locate(value))
        return found


def _locate(value: Any) -> Any:
    return (id(value), value.data_ptr()) if isinstance(value, torch.Tensor) else id(value)


def _is_metric(owner: Any) -> bool:
    """Whether it is from torchmetrics. A step that updates one is not recorded, so only other steps change it."""
    return any(base.__module__.startswith("torchmetrics.") for base in type(owner).__mro__)


def _may_change(owner: Any, value: Any) -> bool:
    """Of torch's own layers, hooks set numbers such as a dropout's rate; sizes and strides stay as they are."""
    return isinstance(value, float) or not type(owner).__module__.startswith("torch.nn.")


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


def list_step_functions(module: torch.nn.Module, kept: Kept) -> list[Any]:
    """The user's functions that may run in a step: training_step, the forward passes of modules, functions that objects
    keep, and what all of these call."""
    methods = [(type(module), "training_step"), *((kind, "forward") for kind in kept.list_kinds())]
    starts = [(inspect.getattr_static(kind, name, None), kind) for kind, name in methods]
    starts += [(function, type(module)) for function in kept.list_functions()]
    return list(dict.fromkeys(called for start, kind in starts for called in list_called(start, kind)))


def find_outside(functions: Iterable[Any]) -> str | None:
    """What a step reads or writes outside of the module: the clock, a file, the terminal, a Trainer that is a global
    variable; or None."""
    for function in functions:
        code = function.__code__
        found = [(name, _find_module(value)) for name, value in (*list_globals(function), *list_closure(function))]
        for name, module in (*found, *((name, name) for name in _list_imports(code))):
            if module.partition(".")[0] in _OUTSIDE or module.endswith(".trainer.trainer"):
                return f"{name} in {function.__qualname__}"
        if called := next((name for name in _CALLS if name in list_names(code)), None):
            return f"{called} in {function.__qualname__}"
    return None


def _find_module(value: Any) -> str:
    name = value.__name__ if inspect.ismodule(value) else getattr(value, "__module__", None)
    return name if isinstance(name, str) else ""


def _list_imports(code: Any) -> Iterator[str]:
    yield from (each.argval for each in dis.get_instructions(code) if each.opname == "IMPORT_NAME")


def list_read_globals(functions: Iterable[Any]) -> list[tuple[dict[str, Any], str]]:
    """Global variables that functions read, each as its module's dict and its name; no modules, classes, functions."""
    found: dict[tuple[int, str], tuple[dict[str, Any], str]] = {}
    for function in functions:
        for name, value in list_globals(function):
            if not (isinstance(value, type) or inspect.ismodule(value) or inspect.isroutine(value)):
                found[id(function.__globals__), name] = function.__globals__, name
    return list(found.values())


def _list_names(code: Any) -> Iterator[str]:
    """Names in a function's code, and its texts, which may be keys; functions inside it included."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, str):
            yield constant
        elif inspect.iscode(constant):
            yield from _list_names(constant)

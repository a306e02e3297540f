"""Restores all state that a forward pass changes, so that a model can run any number of times without a trace.

A backward pass by ``torch.autograd.grad`` does not touch gradients, their hooks or DDP. What remains is state that a
forward pass may change: random streams, torch's settings, buffers, any Python objects that modules and hooks keep, and
global variables that ``forward``, ``training_step`` and the functions they call write to. Items taken from an iterator
cannot be put back, so a model that keeps one is refused. A whole ``training_step`` may also write to parameters (those
of a student's teacher).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import io
import random
import sys
import types
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch

from fastloop.bridge import namespaces
from fastloop.bridge.apply.state.checkpoints import end_checkpoints
from fastloop.bridge.apply.state.contents import keep_contents
from fastloop.bridge.apply.state.flags import keep_flags
from fastloop.bridge.apply.state.names import READERS, list_inner, restore_names
from fastloop.bridge.apply.state.outer import list_changeable, restore_variable
from fastloop.errors import NotApplicable, name_kind
from fastloop.evidence.samples.sample_code import is_installed

MOST_OBJECTS = 100_000
"""Limit for the Python objects that a model keeps; checking more would take longer than a step."""
MOST_COPIED_BYTES = 2**32
"""Limit for a copy of the parameters on the host."""
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
OURS = ("_compiled_call_impl", "_parameters", "_modules", *HOOKS)
"""Attributes of a module that no forward pass changes, or that are not the user's."""
_PLAIN = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type,
    types.BuiltinFunctionType,
    types.ModuleType,
    torch.dtype,
)
_CDATA: Any = ctypes.c_int.__mro__[-2]
"""The base class of all ctypes values, including those in multiprocessing's shared memory."""
_CACHE = functools._lru_cache_wrapper
_NOT_WALKED = ("torch.", *(f"{name}." for name in namespaces.NAMES))


@contextlib.contextmanager
def preserve_state(*modules: torch.nn.Module) -> Iterator[StateSnapshot]:
    """Restore the modules' state, their optimizers' settings and all random streams afterwards, bit for bit.

    Raises:
        NotApplicable: the modules keep more objects than can be restored, or iterators.
    """
    streams, flags, kept = keep_random_streams(), keep_flags(), StateSnapshot()
    for module in modules:
        kept.capture_module(module)
        kept.capture_rates(getattr(getattr(module, "_trainer", None), "strategy", None))
    try:
        yield kept
    except BaseException as error:
        end_checkpoints(error)
        raise
    finally:
        try:
            kept.restore()
        finally:
            streams()
            flags()


def keep_random_streams() -> Callable[[], None]:
    """Save the states of all random streams; returns a function that restores them."""
    numpy = sys.modules.get("numpy")
    python, host = random.getstate(), torch.get_rng_state()
    arrays = numpy.random.get_state() if numpy is not None else None
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]

    def restore() -> None:
        random.setstate(python)
        torch.set_rng_state(host)
        if numpy is not None:
            numpy.random.set_state(arrays)
        if devices:
            torch.cuda.set_rng_state_all(devices)

    return restore


@contextlib.contextmanager
def preserve_parameters(parameters: Iterable[torch.Tensor]) -> Iterator[None]:
    """Restore parameters that a training_step writes to. Exceptions raised inside are passed on, even if the device is
    lost.

    Raises:
        NotApplicable: a parameter was written to.
    """
    known = list(parameters)
    prints, memory = list(read_prints(known)), [each.detach() for each in known]
    few = sum(each.nbytes for each in known) <= MOST_COPIED_BYTES
    copies = [each.to("cpu", copy=True) for each in memory] if few else []

    @torch.no_grad()
    def put_back() -> bool:
        """Put the parameters back; returns whether there was anything to put back."""
        if list(read_prints(known)) == prints:
            return False
        for parameter, own in zip(known, memory, strict=True):
            parameter.data = own  # `parameter.data = ...` gives it other memory
        for own, copied in zip(memory, copies, strict=False):
            own.copy_(copied)
        return True

    try:
        yield
    except BaseException:
        with contextlib.suppress(Exception):
            put_back()
        raise
    if put_back():
        raise NotApplicable("training_step changes parameters")


def read_prints(parameters: Iterable[torch.Tensor]) -> Iterator[tuple[Any, ...]]:
    """Yield, for each parameter, values that show whether it was written to: its version, its address, and its norm,
    because writes through ``.data`` do not change the version."""
    known = [each.detach() for each in parameters if not torch.nn.parameter.is_lazy(each)]
    numbers = [each if each.is_floating_point() or each.is_complex() else each.float() for each in known]
    norms = [torch.linalg.vector_norm(each) for each in numbers]
    for each, norm in zip(known, norms, strict=True):
        yield each._version, each.data_ptr(), str(norm.item())  # as text: then nan equals nan


class StateSnapshot:
    """Copies the contents of objects, each object once, and restores them. Refuses iterators: what a step takes from
    one cannot be put back."""

    def __init__(self) -> None:
        self._streams: list[tuple[str, Callable[[], str], str]] = []
        """Random generators: a name, how to read their state, and what it was."""
        self._seen: dict[int, Any] = {}
        """Every visited object, kept alive so that no other object gets its id."""
        self._undos: list[Callable[[], object]] = []
        self._attributes: list[tuple[Any, dict[str, Any]]] = []
        self._containers: list[tuple[Any, list[Any]]] = []
        self._names: list[tuple[type, Any, dict[str, Any]]] = []
        """Slots of objects, attributes of classes and of tensors: how to read them, their owner, and what they were."""

    def find_change(self) -> str | None:
        """Name one attribute (with its owner's class), container or random stream that has changed, or None."""
        for owner, before in self._attributes:
            now = vars(owner)
            for name in {**before, **now}:
                if name not in OURS and now.get(name, now) is not before.get(name, before):
                    return f"{type(owner).__name__}.{name}"
        for kind, owner, before in self._names:
            now = READERS[kind](owner)
            for name in {**before, **now}:
                if now.get(name, now) is not before.get(name, before):
                    return f"{(owner if isinstance(owner, type) else type(owner)).__name__}.{name}"
        for value, members in self._containers:
            if not _holds(value, members):
                return f"{name_kind(value)} that the model keeps"
        return next((f"the state of {name}" for name, read, before in self._streams if read() != before), None)

    def list_holders(self) -> list[tuple[Any, dict[Any, Any]]]:
        """All saved objects that have attributes, each with its ``__dict__``, and all saved dicts, each with itself."""
        dicts = [(value, value) for value, _ in self._containers if isinstance(value, dict)]
        return [*((owner, vars(owner)) for owner, _ in self._attributes), *dicts]

    def list_lists(self) -> list[list[Any]]:
        """All saved lists."""
        return [value for value, _ in self._containers if isinstance(value, list)]

    def list_kinds(self) -> set[type]:
        """The classes of all objects with attributes that were saved."""
        return {type(owner) for owner, _ in self._attributes}

    def list_functions(self) -> list[Any]:
        """All functions among the objects that were saved."""
        return [value for value in self._seen.values() if isinstance(value, types.FunctionType)]

    def restore(self) -> None:
        """Restore everything, the last entry first.

        Raises:
            Exception: the first error of an undo, after all of them have run.
        """
        failed: list[Exception] = []
        with torch.no_grad():
            for undo in reversed(self._undos):
                try:
                    undo()
                except Exception as error:
                    failed.append(error)
        if failed:
            raise failed[0]

    def capture_module(self, root: torch.nn.Module) -> None:
        """Save a module with all its submodules, and the objects that their hooks keep."""
        for module in root.modules():
            if id(module) in self._seen:
                continue
            self._note(module)
            attributes = {name: value for name, value in vars(module).items() if name not in OURS}
            self._capture_attributes(module, attributes)
            for value in attributes.values():
                self.capture(value)
            for registry in HOOKS:
                for hook in getattr(module, registry, {}).values():
                    self._capture_callable(hook)
            for parameter in module.parameters(recurse=False):
                self._capture_names(torch.Tensor, parameter)
            if not is_installed(type(module)):
                self._capture_outer(type(module))

    def capture_rates(self, strategy: Any) -> None:
        """Save the settings in the groups of a strategy's optimizers, and where its schedulers are."""
        for optimizer in getattr(strategy, "optimizers", ()):
            self.capture(optimizer.param_groups)
        for config in getattr(strategy, "lr_scheduler_configs", ()):
            now = vars(config.scheduler)
            self._undos.append(partial(_restore_attributes, now, dict(now)))

    def _capture_outer(self, kind: type) -> None:
        for space, name, value in list_changeable(kind):
            self._undos.append(partial(restore_variable, space, name, value))
            if isinstance(value, type) and id(value) not in self._seen and not is_installed(value):
                self._note(value)
                self._capture_names(type, value)
            self.capture(value)

    def _capture_attributes(self, owner: Any, before: dict[str, Any]) -> None:
        self._attributes.append((owner, before))
        self._undos.append(partial(_restore_attributes, owner.__dict__, before))
        for base in type(owner).__mro__:
            if id(base) not in self._seen and not is_installed(base):
                self._note(base)
                self._capture_names(type, base)

    def _capture_names(self, kind: type, owner: Any) -> None:
        if before := READERS[kind](owner):
            self._names.append((kind, owner, before))
        self._undos.append(partial(restore_names, kind, owner, before))
        for member in list_inner(before):
            self.capture(member)

    def _note(self, value: Any) -> None:
        self._seen[id(value)] = value
        if len(self._seen) > MOST_OBJECTS:
            raise NotApplicable(f"the model keeps more than {MOST_OBJECTS:,} Python objects")

    def capture(self, value: Any) -> None:
        """Save an object and everything it refers to."""
        if isinstance(value, _PLAIN) or id(value) in self._seen:
            return
        if isinstance(value, torch.nn.Module):
            self.capture_module(value)
            return
        self._note(value)
        if isinstance(value, torch.Tensor):
            self._capture_tensor(value)
        elif isinstance(value, torch.Generator):
            self._capture_stream(value, value.get_state, value.set_state)
        elif isinstance(value, random.Random):
            self._capture_stream(value, value.getstate, value.setstate)
        elif isinstance(value, (list, deque, set, dict)):
            self._capture_container(value)
        elif isinstance(value, (tuple, frozenset)):
            for member in value:
                self.capture(member)
        elif isinstance(value, (types.FunctionType, types.MethodType)):
            self._capture_callable(value)
        elif isinstance(value, partial):
            for member in (value.func, *value.args, *value.keywords.values()):
                self.capture(member)
        elif isinstance(value, (bytearray, array)):
            self._undos.append(partial(value.__setitem__, slice(None), value[:]))
        elif isinstance(value, _CDATA):
            self._undos.append(partial(ctypes.memmove, ctypes.addressof(value), bytes(value), ctypes.sizeof(value)))
        elif isinstance(value, _CACHE):
            self._capture_cache(value)
        elif type(value).__module__.partition(".")[0] == "numpy":
            self._capture_array(value)
        elif hasattr(type(value), "__next__") and not isinstance(value, io.IOBase):
            raise NotApplicable(f"the model keeps an iterator ({type(value).__name__}): items taken from it are gone")
        elif not _is_foreign(f"{type(value).__module__}."):
            self._capture_object(value)

    def _capture_object(self, value: Any) -> None:
        if hasattr(value, "__dict__"):
            before = dict(vars(value))
            self._capture_attributes(value, before)
            for member in before.values():
                self.capture(member)
        self._capture_names(object, value)

    def _capture_tensor(self, tensor: torch.Tensor) -> None:
        if isinstance(tensor, torch.nn.Parameter) or torch.nn.parameter.is_lazy(tensor):
            return
        if torch._debug_has_internal_overlap(tensor) == 1:
            return  # expanded: nothing can write to it in place
        self._undos.append(keep_contents(tensor))

    def _capture_stream(self, owner: Any, read: Callable[[], Any], write: Callable[[Any], object]) -> None:
        before = read()
        self._undos.append(partial(write, before))
        self._streams.append((f"{name_kind(owner)} that the model keeps", lambda: _show(read()), _show(before)))

    def _capture_array(self, value: Any) -> None:
        if hasattr(value, "get_state") and hasattr(value, "set_state"):
            self._capture_stream(value, value.get_state, value.set_state)
        elif (bits := getattr(value, "bit_generator", None)) is not None:
            self._capture_stream(value, lambda: bits.state, partial(setattr, bits, "state"))
        elif isinstance(value, sys.modules["numpy"].ndarray) and value.flags.writeable:
            self._undos.append(partial(value.__setitem__, ..., value.copy()))

    def _capture_cache(self, value: Any) -> None:
        """On restore, empty a ``functools.lru_cache`` that has taken results of a changed module; they are then
        computed again."""
        missed = value.cache_info().misses
        self._undos.append(lambda: value.cache_clear() if value.cache_info().misses != missed else None)
        self.capture(value.__wrapped__)

    def _capture_container(self, value: Any) -> None:
        before = list(value.items() if isinstance(value, dict) else value)
        self._containers.append((value, before))

        def restore() -> None:
            if _holds(value, before):
                return
            value.clear()
            if isinstance(value, dict):
                value.update(dict(before))  # a dict, because Counter.update would count the pairs
            else:
                value.update(before) if isinstance(value, set) else value.extend(before)

        self._undos.append(restore)
        for member in before:
            self.capture(member)

    def _capture_callable(self, hook: Any) -> None:
        """Save what a hook may write to: the object it is a method of, or its closure variables."""
        self.capture(getattr(hook, "__self__", None))
        function = getattr(hook, "__func__", hook)
        for cell in getattr(function, "__closure__", None) or ():
            try:
                content = cell.cell_contents
            except ValueError:  # a variable without a value yet
                continue
            self._undos.append(partial(setattr, cell, "cell_contents", content))
            self.capture(content)
        if not isinstance(function, types.FunctionType) and not isinstance(hook, types.MethodType):
            self.capture(function)


def _show(state: Any) -> str:
    return str(state.tolist() if isinstance(state, torch.Tensor) else state)


def _is_foreign(module: str) -> bool:
    """Whether a class of this module belongs to torch, Lightning or fastloop, recipes excepted."""
    return module.startswith(_NOT_WALKED) or (module.startswith("fastloop.") and ".recipe_modules." not in module)


def _holds(container: Any, before: list[Any]) -> bool:
    """Whether the container still has the same members."""
    now = list(container.items() if isinstance(container, dict) else container)
    return len(now) == len(before) and all(_is_same(old, new) for old, new in zip(before, now, strict=True))


def _is_same(old: Any, new: Any) -> bool:
    """Whether these are the same object, or for a mapping's items the same key and value."""
    if isinstance(old, tuple) and isinstance(new, tuple) and len(old) == len(new) == 2:
        return old[0] is new[0] and old[1] is new[1]
    return old is new


def _restore_attributes(now: dict[str, Any], before: dict[str, Any]) -> None:
    for name in [name for name in now if name not in before and name not in OURS]:
        del now[name]
    for name, value in before.items():
        if now.get(name, now) is not value:
            now[name] = value

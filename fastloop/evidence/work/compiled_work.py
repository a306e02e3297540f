"""The work of compiled code: its calls are recorded while a step runs, and counted afterwards without data.

Fused operators are invisible, and a compiled step must not change. So the shapes of a call's arguments are kept, and
after the step the module's uncompiled code runs forward and backward on tensors without data (torch's fake tensors),
under the same count as an eager step. This computes nothing, allocates nothing on the device, draws no random numbers
and compiles nothing. Where blocks of a model are compiled one by one, the model is run as a whole. Where no module is
compiled but functions are, their captured graphs are run.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fastloop.errors import let_through
from fastloop.evidence.work.captured_graphs import note_calls
from fastloop.evidence.work.flops import FlopCount, Work

SOURCE = "the compiled modules' calls of one step, run again without data"
GRAPHS = "the graphs that torch.compile captured for one step, run again without data"
MOST_CALLS = 256
"""Limit per step: more are not worth the time."""


@dataclass(frozen=True, kw_only=True)
class _Call:
    module: torch.nn.Module
    """The module, as its user wrote it."""
    is_compiled: bool
    is_inside: bool
    """Whether it was made inside the call of a module that is recorded too."""
    in_backward: bool
    fake: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    grad: bool
    autocast: tuple[str, torch.dtype, bool]
    tensors: frozenset[int]
    """Identities of the arguments that are tensors: a graph gets parameters as arguments."""


def find_compiled(module: torch.nn.Module) -> list[torch.nn.Module]:
    """The outermost modules inside this one that are compiled, by ``torch.compile(module)`` or ``module.compile()``."""
    if type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None:
        return [module]
    return [each for child in module.children() for each in find_compiled(child)]


def find_enclosing(root: torch.nn.Module) -> list[torch.nn.Module]:
    """The outermost modules below the root that can be called, are not compiled and contain compiled ones."""
    found: list[torch.nn.Module] = []
    for child in root.children():
        if (inside := find_compiled(child)) and inside != [child]:
            is_called = type(child).forward is not torch.nn.Module.forward
            found += [child] if is_called else find_enclosing(child)
    return found


class CompiledWork:
    """Records the calls of compiled modules between ``open`` and ``close``, and counts their work in ``count``.

    Args:
        preserve_state: a context manager for running a module again; it restores the module's state afterwards.
    """

    def __init__(
        self,
        root: torch.nn.Module,
        preserve_state: Callable[[torch.nn.Module], contextlib.AbstractContextManager[object]],
    ) -> None:
        self.why: str | None = None
        """Why there is no count."""
        self._root, self._preserve_state = root, preserve_state
        self._calls: list[_Call] = []
        self.was_called = False
        self.enclosing = 0
        """Calls of enclosing modules that are running now."""
        self._source = SOURCE
        self._undos: list[Callable[[], None]] = []

    def open(self) -> None:
        """Begin to record calls of compiled modules, or if there are none, of captured graphs."""
        compiled = find_compiled(self._root)
        if not compiled:
            self._source, noted = GRAPHS, contextlib.ExitStack()
            noted.enter_context(note_calls(lambda graph, args: self._note_safely(graph, args, {}, is_compiled=True)))
            self._undos.append(noted.close)
        for module in compiled:
            is_wrapper = type(module).__name__ == "OptimizedModule"
            self._wrap(module, "forward" if is_wrapper else "_compiled_call_impl", encloses=False)
        for module in find_enclosing(self._root):
            self._wrap(module, "forward", encloses=True)

    def _wrap(self, module: torch.nn.Module, name: str, *, encloses: bool) -> None:
        own, call = vars(module), getattr(module, name)
        had, own[name] = own.get(name), _Noting(self, module, call, encloses=encloses)
        self._undos.append(lambda: _put_back(own, name, had))

    def close(self) -> None:
        """Restore the modules. Safe to call twice."""
        while self._undos:
            self._undos.pop()()

    def count(self, samples: int) -> Mapping[str, Any]:
        """The work of the recorded calls, in the form of ``Measurement.flops``. Call it between two steps."""
        calls, self._calls = self._calls, []
        if not calls and self.why is None:
            what = "modules were not called" if self._source == SOURCE else "functions did not run"
            self.why = f"the compiled {what} in the counted step"
        work = None
        if self.why is None:
            work = self._count_calls([each for each in calls if not each.is_inside])
            if work is None and not all(each.is_compiled for each in calls):
                self.why = None  # what encloses them cannot run without data, but they may
                work = self._count_calls([each for each in calls if each.is_compiled])
        source = self._source
        return {"per_sample": None, "source": source, "why": self.why} if work is None else work.per(samples, source)

    def _count_calls(self, calls: Sequence[_Call]) -> Work | None:
        """Count these calls; None if one cannot run, and `why` then says so."""
        count, lacks_backward = FlopCount(), False
        for call in calls:
            try:
                before = count.work.total
                lacks_backward |= self._count_call(call, count) and count.work.total > before
            except Exception as error:  # whatever the user's code raises without data
                let_through(error)
                what = " ".join(f"{type(error).__name__}: {error}".split())[:160]
                self.why = f"{type(call.module).__name__} is compiled, and cannot run without data: {what}"
                return None
        counted = [*find_compiled(self._root), *(call.module for call in calls)]
        inside = {id(each) for module in counted for each in module.parameters()}.union(
            *(each.tensors for each in calls)
        )
        # Beside compiled functions, frozen layers may run eager, such as a teacher's.
        rest = (each for each in self._root.parameters() if each.requires_grad or self._source == GRAPHS)
        has_rest = any(id(each) not in inside for each in rest)
        return dataclasses.replace(count.work, at_least=count.work.at_least or lacks_backward or has_rest)

    def note(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, is_compiled: bool
    ) -> None:
        """Record the shapes of a call."""
        from torch._subclasses.fake_tensor import FakeTensorMode

        self.was_called = True
        if self.why is not None:
            return
        if len(self._calls) >= MOST_CALLS:
            self.why = f"compiled modules were called more than {MOST_CALLS} times in a step"
            return
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        given = [each for each in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        device = next((each.device.type for each in (*module.parameters(), *given)), "cpu")
        call = _Call(
            module=_unwrap(module),
            is_compiled=is_compiled,
            # Activation checkpointing calls a block again in the backward, as a part of what encloses it.
            is_inside=is_compiled and (self.enclosing > 0 or self._is_again()),
            in_backward=torch._C._current_graph_task_id() >= 0,
            fake=fake,
            args=_make_fake(fake, args),
            kwargs=_make_fake(fake, dict(kwargs)),
            grad=torch.is_grad_enabled(),
            autocast=(device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)),
            tensors=frozenset(map(id, given)),
        )
        if self._source == GRAPHS and (place := self._find_without_gradient(call)) is not None:
            self._calls[place] = dataclasses.replace(self._calls[place], is_inside=True)
            call = dataclasses.replace(call, is_inside=False)
        self._calls.append(call)

    def _note_safely(self, *call: Any, is_compiled: bool) -> None:
        try:
            self.note(*call, is_compiled=is_compiled)
        except Exception as error:  # recording must never break the step
            let_through(error)
            self.why = f"the shapes of a call cannot be kept: {type(error).__name__}"

    def _find_without_gradient(self, again: _Call) -> int | None:
        """Return the place of the call without gradients that a reentrant checkpoint makes `again` in the backward,
        then with another graph; None if the call is not such a one."""
        if not (again.in_backward and again.grad):
            return None
        if any(each.module is again.module and each.grad and not each.in_backward for each in self._calls):
            return None
        shapes = _list_shapes(again.args)
        kept = ((place, each) for place, each in enumerate(self._calls) if not (each.grad or each.is_inside))
        return next((place for place, each in kept if _list_shapes(each.args) == shapes), None)

    def _is_again(self) -> bool:
        in_backward = torch._C._current_graph_task_id() >= 0
        return in_backward and (self._source == GRAPHS or not all(each.is_compiled for each in self._calls))

    def _count_call(self, call: _Call, count: FlopCount) -> bool:
        """Count one call; returns whether its backward is missing."""
        device, dtype, enabled = call.autocast
        with (
            self._preserve_state(self._root),
            torch.compiler.set_stance("force_eager"),
            _without_compiled_calls(call.module),
            torch.autocast(device, dtype=dtype, enabled=enabled),
            torch.set_grad_enabled(call.grad),
        ):
            return _run(call, count, is_part=self._source == GRAPHS)


class _Noting:
    """Wraps a compiled call, outside the compiled code, or the forward of a module that encloses such calls. Copies and
    pickles contain the call itself."""

    def __init__(
        self, notes: CompiledWork, module: torch.nn.Module, call: Callable[..., Any], *, encloses: bool
    ) -> None:
        self.notes, self.module, self.call, self.encloses = notes, module, call, encloses

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self.call(*args, **kwargs)
        self.notes._note_safely(self.module, args, kwargs, is_compiled=not self.encloses)
        self.notes.enclosing += self.encloses
        try:
            return self.call(*args, **kwargs)
        finally:
            self.notes.enclosing -= self.encloses

    def __reduce_ex__(self, protocol: Any) -> Any:
        return (return_itself, (self.call,))


def return_itself(kept: Any) -> Any:
    """Return the argument. Pickle and copy use this, so that a copy of a wrapper is the wrapped object."""
    return kept


def _list_shapes(args: Any) -> list[tuple[int, ...]]:
    leaves = torch.utils._pytree.tree_leaves(args)
    return [tuple(each.shape) for each in leaves if isinstance(each, torch.Tensor)]


def _put_back(own: dict[str, Any], name: str, had: Any) -> None:
    if isinstance(own.get(name), _Noting):
        own.pop(name) if had is None else own.update({name: had})


def _unwrap(module: torch.nn.Module) -> torch.nn.Module:
    inner: Any = getattr(module, "_orig_mod", module) if type(module).__name__ == "OptimizedModule" else module
    return inner  # type: ignore[no-any-return]


def _make_fake(fake: Any, value: Any) -> Any:
    """The same arguments without data; tensors that require a gradient become leaves that require one."""

    def change(each: Any) -> Any:
        if not isinstance(each, torch.Tensor):
            return each
        return fake.from_tensor(each.detach()).requires_grad_(each.requires_grad)

    return torch.utils._pytree.tree_map(change, value)


@contextlib.contextmanager
def _without_compiled_calls(module: torch.nn.Module) -> Iterator[None]:
    """Uses the modules' uncompiled code: `force_eager` does not affect fastloop's compiled calls."""
    kept = [vars(each) for each in module.modules() if vars(each).get("_compiled_call_impl") is not None]
    calls = [own.pop("_compiled_call_impl") for own in kept]
    try:
        yield
    finally:
        for own, call in zip(kept, calls, strict=True):
            own["_compiled_call_impl"] = call


def _run(call: _Call, count: FlopCount, *, is_part: bool) -> bool:
    """Run forward and backward of one call; return whether a backward was expected but no output leads to one.

    Args:
        is_part: it may be a part of a step, all of whose outputs go on to the loss; a scalar is not always the loss.
    """
    values = {
        name: call.fake.from_tensor(each.detach()).requires_grad_(each.requires_grad)
        for name, each in (*call.module.named_parameters(), *call.module.named_buffers())
    }
    given = [each for each in torch.utils._pytree.tree_leaves((call.args, call.kwargs)) if _wants_gradient(each)]
    with call.fake, _AnswersTests(), count:  # type: ignore[no-untyped-call]
        # A leaf that requires a gradient must not be changed in place, which a first layer may do.
        args, kwargs = torch.utils._pytree.tree_map(
            lambda each: each.clone() if _wants_gradient(each) else each, (call.args, dict(call.kwargs))
        )
        output = torch.func.functional_call(call.module, values, args, kwargs)
        live = [each for each in _find_tensors(output) if _wants_gradient(each)]
        if not is_part:
            live = [each for each in live if not each.dim()] or live  # a loss, if the module computes one
        wanted = [*given, *filter(_wants_gradient, values.values())]
        if live and wanted:
            ones = [torch.ones_like(each) for each in live]
            torch.autograd.grad(live, wanted, ones, allow_unused=True)
    return call.grad and bool(wanted) and not live


def _find_tensors(output: Any, levels: int = 4) -> Iterator[torch.Tensor]:
    """The tensors of a module's output, also those in objects and mappings of classes that PyTorch does not know."""
    for each in torch.utils._pytree.tree_leaves(output):
        if isinstance(each, torch.Tensor):
            yield each
        elif levels and (isinstance(each, Mapping) or hasattr(each, "__dict__")):
            members = [*each.values()] if isinstance(each, Mapping) else [*vars(each).values()]
            yield from _find_tensors(members, levels - 1)


class _AnswersTests(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Answers True where code tests a tensor without data, such as whether a mask leaves nothing out: Hugging Face's
    models do, and the work is the same either way."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].dtype is torch.bool:
            return True
        return func(*args, **(kwargs or {}))


def _wants_gradient(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad and value.is_floating_point()

"""Records calls of modules while a step runs, and replays them, forward and backward, without a trace."""

from __future__ import annotations

import contextlib
import copy
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.modules.dropout import _DropoutNd

from fastloop.bridge.apply.rehearse import memory
from fastloop.bridge.apply.rehearse.played import RunResults, read_streams, synchronize
from fastloop.bridge.apply.rehearse.surroundings import surrounded
from fastloop.bridge.apply.site import LiveSite
from fastloop.bridge.apply.state.untouched import preserve_state, read_prints
from fastloop.errors import NotApplicable, describe
from fastloop.feeds.batch_norm.groups import BatchGroups
from fastloop.feeds.batch_tree import is_container, iterate_tensors, map_tensors, rebuild

MOST_SPREAD = 2
"""A slice's copy keeps its strides if it takes at most this many times the memory of its elements."""
MOST_CALLS = 4
"""Limit per module: a discriminator is called on real and on generated samples, with different arguments."""


@dataclass(frozen=True)
class Call:
    """One call of a module in training."""

    name: str
    """The module's name; empty for the LightningModule itself."""
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    grad: bool
    """Whether a backward pass may follow."""
    is_of_batch: bool
    """Whether an argument is a tensor of the batch itself."""
    sources: Mapping[int, tuple[int, int]]
    """Argument tensors, by position, that are outputs of an earlier call: its number and the output's position."""
    trained: tuple[bool, ...]
    """Whether each parameter of the module required a gradient: toggled optimizers change that within a step."""
    groups: int = 1
    """Number of user batches in the call, if BatchNorm normalizes them separately."""


class CallRecorder:
    """Records the calls of some modules in training, with copies of their arguments."""

    def __init__(self, module: torch.nn.Module, names: Sequence[str], groups: BatchGroups) -> None:
        self.groups = groups
        self.calls: list[Call] = []
        self.problem: str | None = None
        """Why the recorded calls cannot be replayed."""
        self.is_whole = True
        """Whether every call in training was recorded."""
        self._left_out = 0
        """Calls beyond `MOST_CALLS`."""
        self._prints: dict[str, Any] = {}
        self._current: dict[str, int] = {}
        """The number of each module's call in progress."""
        self._of_batch: dict[int, torch.Tensor] = {}
        self._made: dict[Any, tuple[tuple[int, int], torch.Tensor]] = {}
        """Outputs by memory address, which also finds detached ones. Kept alive, so that the memory is not reused."""
        self._hooks: list[Any] = []
        for name in names:
            inner = module.get_submodule(name)
            try:
                self._hooks.append(inner.register_forward_pre_hook(_Hook(self._make_before(name)), with_kwargs=True))
                self._hooks.append(inner.register_forward_hook(_Hook(self._make_after(name))))
            except RuntimeError as error:  # of a ScriptModule
                self.problem = f"calls of {name or 'the module'} cannot be recorded: {error}"

    @property
    def is_recording(self) -> bool:
        return bool(self._hooks)

    @property
    def repeats(self) -> float:
        """How many times as many calls were made as recorded, as in a window that runs batch by batch."""
        return 1 + self._left_out / max(1, len(self.calls))

    def note_batch(self, batch: Any) -> None:
        """Remember the tensors of the batch that is about to be trained on."""
        self._of_batch = {id(each): each for each in iterate_tensors(batch)}

    def stop(self) -> None:
        """Remove the hooks. Idempotent."""
        self._of_batch = {}
        self._made.clear()
        while self._hooks:
            self._hooks.pop().remove()

    def _read_prints(self, module: torch.nn.Module) -> Any:
        """`read_prints` of the module's parameters; they may be of kinds that have no norm."""
        try:
            return list(read_prints(module.parameters()))
        except Exception as error:
            self.problem = f"parameters cannot be read: {describe(error)}"
            return None

    def _make_before(self, name: str) -> Callable[..., None]:
        def before(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._prints[name] = self._read_prints(module)
            self._current.pop(name, None)
            if not module.training:
                self.is_whole = False  # such as a frozen teacher's call, whose time is part of the step
                return
            if sum(call.name == name for call in self.calls) >= MOST_CALLS:
                self.is_whole = False
                self._left_out += 1
                return
            try:
                trained = tuple(parameter.requires_grad for parameter in module.parameters())
                own = any(id(each) in self._of_batch for each in iterate_tensors([args, kwargs]))
                given = enumerate(iterate_tensors([args, kwargs]))
                sources = {place: self._made[key][0] for place, each in given if (key := _locate(each)) in self._made}
                copies = copy_value(args), copy_value(kwargs)
                self._current[name] = len(self.calls)
                grad, groups = torch.is_grad_enabled(), self.groups.count
                self.calls.append(Call(name, *copies, grad, own, sources, trained, groups))
            except Exception as error:  # any error from copying a user's type
                what = f"an argument of {name or 'the module'}"
                self.problem = f"{what} cannot be copied: {type(error).__name__}: {error}"

        return before

    def _make_after(self, name: str) -> Callable[..., None]:
        def after(module: torch.nn.Module, _args: Any, output: Any) -> None:
            if (index := self._current.pop(name, None)) is not None:
                for place, each in enumerate(each for each in _find_tensors(output) if each.is_floating_point()):
                    if (key := _locate(each)) is not None:
                        self._made[key] = (index, place), each
            if self._read_prints(module) != self._prints.get(name):
                self.problem = f"{name or 'the module'} changes its own parameters in forward"

        return after


class _Hook:
    """A hook that does nothing in a copied or unpickled module."""

    def __init__(self, call: Callable[..., None]) -> None:
        self.call = call

    is_paused = False

    def __call__(self, *args: Any) -> None:
        if not _Hook.is_paused:
            self.call(*args)

    def __reduce__(self) -> tuple[type[_Hook], tuple[Callable[..., None]]]:
        return _Hook, (_do_nothing,)


def _do_nothing(*_: Any) -> None:
    pass


@contextlib.contextmanager
def unrecorded() -> Iterator[None]:
    """Make recorders ignore calls inside ``with``, which belong to trials and not to a step."""
    _Hook.is_paused = True
    try:
        yield
    finally:
        _Hook.is_paused = False


def _locate(tensor: torch.Tensor) -> tuple[int, tuple[int, ...], torch.dtype] | None:
    """Address, shape and type; None for a tensor without an address, such as a sparse one."""
    try:
        return tensor.data_ptr(), tuple(tensor.shape), tensor.dtype
    except (RuntimeError, NotImplementedError):
        return None


def copy_with_strides(tensor: torch.Tensor) -> torch.Tensor:
    """Return a differentiable copy with the same strides. For a slice such as ``tokens[:, :-1]``, ``clone`` would
    return a contiguous tensor, and code compiled for that does not fit the slice. A copy of a small part of much
    memory, such as ``hidden[:, 0]``, is contiguous all the same."""
    copied = tensor.clone()
    if tensor.layout is not torch.strided or tensor.is_nested or copied.stride() == tensor.stride():
        return copied
    sizes, strides = tensor.shape, tensor.stride()
    span = 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    if not 0 < span <= MOST_SPREAD * tensor.numel():
        return copied
    return tensor.as_strided((span,), (1,)).clone().as_strided(sizes, strides, 0)


def copy_value(value: Any) -> Any:
    """Deep-copy a value. Tensors require gradients as the originals do; objects are copied by their ``clone`` if
    any."""
    if isinstance(value, torch.Tensor):
        return copy_with_strides(value.detach()).requires_grad_(value.requires_grad)
    if isinstance(value, (torch.nn.Module, str, bytes, int, float, type(None))):
        return value
    if is_container(value):
        with contextlib.suppress(TypeError):
            return rebuild(value, copy_value)
    return value.clone() if callable(getattr(value, "clone", None)) else copy.deepcopy(value)


class CallReplayer:
    """Replays recorded calls in the contexts of a training step, and with the current conversions of the batch."""

    def __init__(self, site: LiveSite, calls: Sequence[Call]) -> None:
        self._site, self._calls, self._device = site, calls, site.device
        self._cotangents: dict[tuple[int, int], torch.Tensor] = {}
        self._random = torch.Generator(device=site.device)
        self.modules = [site.module.get_submodule(name) for name in dict.fromkeys(call.name for call in calls)]

    def has_dropout(self) -> bool:
        """Whether `replay` without dropout gives different results."""
        return any(isinstance(each, _DropoutNd) and each.p > 0 for module in self.modules for each in module.modules())

    def replay(self, *, seed: int | None = None, dropout: bool = True) -> RunResults:
        """Replay all calls, forward and backward, and restore everything afterwards.

        Args:
            seed: a seed for the random streams; None to use their current states.
            dropout: if False, switch dropout off, so that replays can be compared whatever random numbers they draw.

        Raises:
            Exception: whatever the modules raise.
        """
        played = RunResults()
        with preserve_state(*self.modules), torch.enable_grad(), self._without_tensor_hooks():
            if seed is not None:
                torch.manual_seed(seed)
            if not dropout:
                for each in (each for module in self.modules for each in module.modules()):
                    each.training = each.training and not isinstance(each, _DropoutNd)
            if "torch._inductor.cudagraph_trees" in sys.modules:  # the call itself would import it, which takes seconds
                torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
            made: dict[tuple[int, int], torch.Tensor] = {}
            streams, held = read_streams(self._device), memory.forget_peak(self._device)
            for index, call in enumerate(self._calls):
                args, kwargs = _hand_on(made, call, [copy_value(call.args), copy_value(dict(call.kwargs))])
                if call.is_of_batch:
                    args, kwargs = map(self._site.staging.convert, (args, kwargs))
                synchronize(self._device)
                began = time.perf_counter()
                self._replay_one(index, call, args, kwargs, played)
                played.launch_ms += 1e3 * (time.perf_counter() - began)
                synchronize(self._device)
                played.ms += 1e3 * (time.perf_counter() - began)
                latest = played.outputs[len(made) :]
                made |= {(index, place): each for place, each in enumerate(latest)}
            if held is not None:
                played.peak_bytes = (memory.read_peak(self._device) or 0) - held
            played.is_random = not all(map(torch.equal, streams, read_streams(self._device)))
        return played

    def _replay_one(self, index: int, call: Call, args: Any, kwargs: Any, played: RunResults) -> None:
        module = self._site.module.get_submodule(call.name)
        with _toggled(module, call.trained), self._site.groups.of(call.groups):
            with surrounded(self._site), torch.set_grad_enabled(call.grad):
                # A first layer may change its input in place, which is forbidden for leaves that require gradients.
                output = module(*map_tensors(args, _take_off_leaf), **map_tensors(kwargs, _take_off_leaf))
            self._finish_one(index, call, module, (args, kwargs), output, played)

    def _finish_one(self, index: int, call: Call, module: Any, inputs: Any, output: Any, played: RunResults) -> None:
        found = [each for each in _find_tensors(output) if each.is_floating_point()]
        if not found:
            raise NotApplicable(f"{call.name or 'the module'} returns no tensor to compare")
        if live := [(place, each) for place, each in enumerate(found) if each.requires_grad]:
            self._run_backward(index, call, module, inputs, live, played)
        played.outputs += [each.detach() for each in found]

    def _run_backward(self, index: int, call: Call, module: Any, inputs: Any, live: Any, played: RunResults) -> None:
        wanted = {
            f"{call.name}.{name}": parameter for name, parameter in module.named_parameters() if parameter.requires_grad
        }
        wanted |= {f"{index}:{place}": each for place, each in enumerate(iterate_tensors(inputs)) if each.requires_grad}
        with torch.enable_grad():
            gradients = torch.autograd.grad(
                [each for _, each in live],
                list(wanted.values()),
                [self._make_cotangent(index, place, each) for place, each in live],
                allow_unused=True,
            )
        for name, gradient in zip(wanted, gradients, strict=True):
            if gradient is not None:
                gradient = gradient.to_dense() if gradient.is_sparse else gradient
                known = played.gradients.get(name)
                played.gradients[name] = gradient.detach() if known is None else known + gradient

    def _make_cotangent(self, index: int, place: int, output: torch.Tensor) -> torch.Tensor:
        """The output's gradient for the backward: the same for each replay, whatever the precision."""
        key = (index, place)
        if key not in self._cotangents:
            self._random.manual_seed(index * 1000 + place)
            made = torch.randn(output.shape, generator=self._random, device=output.device)
            self._cotangents[key] = made if output.dim() else torch.ones_like(made)
        if (usual := self._cotangents[key]).shape != output.shape:
            raise ValueError(f"an output has a different shape: {tuple(output.shape)} instead of {tuple(usual.shape)}")
        return usual.to(output.dtype)

    @contextlib.contextmanager
    def _without_tensor_hooks(self) -> Iterator[None]:
        """Disable hooks on parameters, which would get gradients that belong to no step."""
        hooked = [
            (parameter, parameter._backward_hooks)
            for module in self.modules
            for parameter in module.parameters()
            if parameter._backward_hooks
        ]
        for parameter, _ in hooked:
            parameter._backward_hooks = None
        try:
            yield
        finally:
            for parameter, hooks in hooked:
                parameter._backward_hooks = hooks

    @contextlib.contextmanager
    def perturbed(self, error: float) -> Iterator[None]:
        """Change every parameter by a random relative error, as rounding would."""
        self._random.manual_seed(1)
        parameters = {id(each): each for module in self.modules for each in module.parameters()}.values()
        before = [each.detach().clone() for each in parameters]
        with torch.no_grad():
            for each in parameters:
                if each.is_floating_point():
                    noise = torch.randn(each.shape, generator=self._random, device=each.device)
                    each.mul_(1 + error * noise.to(each.dtype))
        try:
            yield
        finally:
            with torch.no_grad():
                for each, value in zip(parameters, before, strict=True):
                    each.copy_(value)


def _hand_on(made: Mapping[tuple[int, int], torch.Tensor], call: Call, given: Any) -> Any:
    """Replace arguments that are outputs of earlier calls by this replay's, in their current type and layout."""
    places = itertools.count()

    def swap(tensor: torch.Tensor) -> torch.Tensor:
        now = made.get(call.sources.get(next(places), (-1, -1)))
        return tensor if now is None else now.detach().clone().requires_grad_(tensor.requires_grad)

    return map_tensors(given, swap) if call.sources else given


def _take_off_leaf(tensor: torch.Tensor) -> torch.Tensor:
    return copy_with_strides(tensor) if tensor.requires_grad else tensor


@contextlib.contextmanager
def _toggled(module: torch.nn.Module, trained: Sequence[bool]) -> Iterator[None]:
    """Set requires_grad of the parameters as it was in the call."""
    before = [(parameter, parameter.requires_grad) for parameter in module.parameters()]
    for (parameter, _), wanted in zip(before, trained, strict=True):
        parameter.requires_grad_(wanted)
    try:
        yield
    finally:
        for parameter, wanted in before:
            parameter.requires_grad_(wanted)


def _find_tensors(output: Any) -> Iterator[torch.Tensor]:
    """The tensors in an output; for an object that is not a container, those in its attributes."""
    found = list(iterate_tensors(output))
    if not found and hasattr(output, "__dict__"):
        found = list(iterate_tensors(vars(output)))
    yield from found

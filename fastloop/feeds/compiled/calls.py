"""Routes a module's calls through a compiled function, and back to eager if that does not work or does not pay off."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.compiler import is_compiling
from torch.utils.hooks import RemovableHandle

from fastloop.errors import let_through
from fastloop.evidence.model import dynamo_graphs
from fastloop.feeds import call_shapes
from fastloop.feeds.call_shapes import STORM, GraphLimit, Sizes
from fastloop.feeds.compiled.graph_passes import Frozen, GraphPass, choose_backend, hash_masks
from fastloop.records.plan import Undo

MOST_KINDS = 6
"""Limit on the kinds of calls of one module; kinds differ in argument dtypes and in which tensors need a gradient."""


class CompiledCall:
    """Routes a module's calls through a compiled function. That is a plain function around ``_call_impl``, because
    ``module.compile()`` captures nothing for torch's own nn.Sequential.

    Makes at most two graphs in training and two in evaluation. Dimensions known to vary are dynamic from the first
    graph on. A call that fits no graph runs eagerly; if most calls do, all later ones run eagerly. If a compiled call
    fails, it is repeated eagerly, and the module is not compiled again.

    Args:
        codes: code objects by a module's class and shapes, and the tensors frozen in their graphs; filled here, one
            dictionary for all modules of a fit.
        dynamic: which dimensions are dynamic. None: those observed to vary; True: all; False: none.
        is_tried: whether this is a trial that needs to see failures; then no call is repeated.
        mode: mode of torch.compile, or ``eager``: graphs run as the passes leave them.
        passes: passes that change the graphs, in this order.
        changes: maps from sizes in the first batch to sizes in other batches; argument sizes are assumed to change
            alike.

    Attributes:
        graphs: graphs that Dynamo captured in these calls; each piece between graph breaks counts.
        forced: calls that ran eagerly because torch's stance was ``force_eager``.
        hooked: calls that ran eagerly because the module or one inside had got hooks since its graphs were made.
        failure: why the module fell back to eager; empty if it did not.
        below, is_in: the callable that this one replaced, and whether this one is active; see `put_in`.
        budgets: one for training (True) and one for evaluation (False), with separate graphs and sizes; also one for
            each further kind of call, such as calls that need a gradient for their input.
    """

    def __init__(
        self,
        module: Any,
        name: str,
        codes: dict[Any, Any],
        *,
        mode: str,
        dynamic: bool | None,
        is_tried: Callable[[], bool] = lambda: False,
        passes: Sequence[GraphPass] = (),
        changes: Iterable[Mapping[int, int]] = (),
    ) -> None:
        self.module, self.name = module, name or type(module).__name__
        self.dynamic, self.is_tried, self._changes = dynamic, is_tried, changes
        self.graphs, self.forced, self.hooked, self.failure = 0, 0, 0, ""
        self.below: Any = None
        self.is_in = False
        self.budgets: dict[Any, GraphLimit] = {True: GraphLimit(), False: GraphLimit()}
        self._usual: dict[bool, Any] = {}
        """The kind of the first call in training, and in evaluation."""
        self._owners: list[tuple[dict[str, Any], str]] = []
        """The dictionary that holds each parameter, and its name there."""
        self._trained = self._read_trained()
        """Which parameters required gradients in the last call."""
        self._missed = False
        self._varying: dict[str, list[int]] = {}
        self._buffers = list(module.buffers())
        self._codes, self._mode, self._passes = codes, mode, tuple(passes)
        self._seen: dict[str, tuple[torch.Tensor, int, int]] = {}
        """Tensors frozen in graphs, with version and memory address at the last check."""
        self._holders: dict[str, tuple[Mapping[str, Any], str]] = {}
        """For those that are buffers: the dictionary that holds each, and its name there."""
        self._hooks, self._newest_hook, self._has_late_hooks = _list_hooks(module), -1, False
        """The hooks in the graphs, the id of the next hook at our last search, and whether it found later hooks."""
        self._make(call_shapes.describe_kind(module))

    def _make(self, kind: Any, barred: frozenset[str] = frozenset()) -> None:
        """Make the compiled function; its graphs freeze none of the tensors in `barred`."""
        module = self.module

        def call(*args: Any, **kwargs: Any) -> Any:
            if not is_compiling():  # this line is in no graph, so it only runs if no graph fitted
                self._missed = True
            return module._call_impl(*args, **kwargs)

        # Dynamo counts recompiles per code object and gives up after 8. Modules of one class and shapes share a code
        # object, and with it their graphs; all other modules, and every later fit, get a separate one. So do modules
        # with hooks: Dynamo would run them by the graphs of a module without.
        self._kind, masks = kind, hash_masks(module, barred) if self._passes else ()
        made = call.__code__.replace(co_name=self.name), Frozen(barred)
        call.__code__, self._frozen = self._codes.setdefault((kind, masks, barred, self._hooks), made)
        how = choose_backend(self._mode, self._passes, self._frozen)
        self.compiled = torch.compile(call, dynamic=self.dynamic, **how)

    @property
    def shows_operators(self) -> bool:
        """Whether its graphs run torch's operators one by one, so that their work can be counted while they run."""
        return self._mode == "eager"

    @property
    def spent(self) -> str:
        """Why most training calls run eagerly; empty while graphs run most."""
        every = [budget for key, budget in self.budgets.items() if key is True or (key is not False and key[0])]
        ended = [budget for budget in every if budget.spent]
        most = sum(each.calls for each in ended) > STORM * sum(each.calls for each in every)
        if self.hooked > STORM * (self.hooked + sum(each.calls for each in every)):
            return f"{self.name}: it got hooks after its graphs were made"
        return f"{self.name}: {ended[0].spent}" if most else ""

    def note_shapes(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Learn from a call of the first batch, before anything is compiled."""
        sizes = call_shapes.read_sizes(args, kwargs)
        self._note(sizes)
        for became in self._changes:
            self._note({way: tuple(became.get(size, size) for size in shape) for way, shape in sizes.items()})

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            return self.module._call_impl(*args, **kwargs)
        if dynamo_graphs.is_forced_eager():  # by our own check, or by the user: it says nothing about the graphs
            self.forced += 1
            return self.module._call_impl(*args, **kwargs)
        if self._find_late_hooks():
            self.hooked += 1
            return self.module._call_impl(*args, **kwargs)
        if (trained := self._read_trained()) != self._trained:
            self._trained = trained
            self._touch_parameters()
        tensors = call_shapes.find_tensors(args, kwargs)
        budget = self._find_budget(tensors)
        if budget is None or budget.spent:
            if budget is not None:
                budget.count(captured=False, eager=True)
            return self.module._call_impl(*args, **kwargs)
        if self._frozen.copies and (changed := self._find_changed(tensors)):
            for each in self.budgets.values():
                each.forget_graphs()
            self._seen.clear()
            self._make(self._kind, self._frozen.barred | changed)
        sizes: Sizes = {way: tensor.shape for way, tensor in tensors.items()}
        is_new = not budget.fits(sizes)
        # Activation checkpointing repeats a call in the backward: it must run as before, and ends in an exception.
        is_again = torch._C._current_graph_task_id() >= 0
        if is_new and is_again:
            return self.module._call_impl(*args, **kwargs)
        if is_new:
            if self.is_tried():  # on calls of the first batch
                self.note_shapes(args, kwargs)
            else:
                self._note(sizes)
            if not budget.deserves():
                budget.count(captured=False, eager=True)
                return self.module._call_impl(*args, **kwargs)
            budget.expect(sizes, self._varying)
            self._buffers = list(self.module.buffers())
        held = _Held(tensors.values(), self._buffers, keep=is_new)
        try:
            return self._run(budget, tensors, is_new, args, kwargs)
        except Exception as error:
            let_through(error)
            if is_again or self.is_tried() or not held.restore():
                raise
            failure = f"{self.name}: {type(error).__name__}: {_take_first_paragraph(str(error))}"
        # Outside the handler, which keeps the failed call's tensors alive.
        result = self.module._call_impl(*args, **kwargs)
        self.failure = failure
        vars(self.module).pop("_compiled_call_impl", None)
        return result

    def _run(
        self, budget: GraphLimit, tensors: dict[str, Any], is_new: bool, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        captured, self._missed = dynamo_graphs.count_captured(), False
        stance: Any = contextlib.nullcontext()
        if budget.exhausted:
            stance = torch.compiler.set_stance("eager_on_recompile")
        elif is_new:
            stance = _backward_at_once()
            # Not in later calls: in torch 2.15 a marked tensor does not fit a graph that was made without marks.
            for way in self._varying.keys() & tensors.keys():
                torch._dynamo.maybe_mark_dynamic(tensors[way], self._varying[way])
        self._frozen.module, self._frozen.tensors = self.module, tensors
        try:
            with stance:
                return self.compiled(*args, **kwargs)
        finally:
            self._frozen.tensors = {}
            captured = dynamo_graphs.count_captured() - captured
            self.graphs += captured
            budget.count(captured=captured > 0, eager=self._missed)

    def _find_late_hooks(self) -> bool:
        """Whether there are hooks that the graphs do not run, since Dynamo does not look for new ones. Searches only
        after a hook was registered anywhere, or if the last search found such hooks."""
        if RemovableHandle.next_id == self._newest_hook and not self._has_late_hooks:
            return False
        self._newest_hook, hooks = RemovableHandle.next_id, _list_hooks(self.module)
        has_graphs = any(budget.graphs for budget in self.budgets.values())
        if not has_graphs and hooks != self._hooks:
            self._hooks = hooks
            self._make(self._kind)
        self._has_late_hooks = has_graphs and not hooks <= self._hooks
        return self._has_late_hooks

    def _read_trained(self) -> tuple[bool, ...]:
        """Return which parameters require gradients."""
        try:
            if self._owners:
                return tuple([held[name].requires_grad for held, name in self._owners])
        except (AttributeError, KeyError):  # one was removed, as pruning does
            pass
        parts = [part._parameters for part in self.module.modules()]
        self._owners = [(held, name) for held in parts for name, each in held.items() if each is not None]
        return tuple([held[name].requires_grad for held, name in self._owners])

    def _touch_parameters(self) -> None:
        """Let Dynamo look at the parameters again: it does not check tensors while their dictionary is unchanged, and
        would run a graph without gradients for what was unfrozen since."""
        for held, name in self._owners:
            held[name], kept = None, held[name]
            held[name] = kept

    def _find_changed(self, tensors: Mapping[str, torch.Tensor]) -> frozenset[str]:
        """Return the paths of tensors whose numbers differ from those frozen in the graphs."""
        changed = set[str]()
        for way, copy in self._frozen.copies.items():
            if way[0] == "." and way not in self._holders:
                path, _, name = way[1:].rpartition(".")
                self._holders[way] = self.module.get_submodule(path)._buffers, name
            holder, name = self._holders.get(way, (tensors, way))
            if (now := holder.get(name)) is None:  # then no graph that holds it fits this call
                continue
            seen, version = self._seen.get(way), _count_changes([now])
            if seen is not None and seen[0] is now and seen[1] == version and seen[2] == now.data_ptr():
                continue
            if now.dtype != copy.dtype or now.device != copy.device or not torch.equal(now, copy):
                changed.add(way)
            self._seen[way] = now, version, now.data_ptr()
        return frozenset(changed)

    def _find_budget(self, tensors: Mapping[str, torch.Tensor]) -> GraphLimit | None:
        """Return the budget for this kind of call; None if there are too many kinds."""
        training = self.module.training
        kind = (
            training,
            torch.is_grad_enabled(),
            self._trained,
            *((tensor.dtype, tensor.requires_grad) for tensor in tensors.values()),
        )
        if self._usual.setdefault(training, kind) == kind:
            return self.budgets[training]
        if kind not in self.budgets and len(self.budgets) >= MOST_KINDS:
            return None
        return self.budgets.setdefault(kind, GraphLimit())

    def _note(self, sizes: Sizes) -> None:
        """Learn which dimensions to mark dynamic. Lengths that vary in training also vary in evaluation."""
        self.budgets[self.module.training].seen.note(sizes)
        if self.dynamic:
            self._varying |= {way: list(range(len(shape))) for way, shape in sizes.items()}
        elif self.dynamic is None:
            self._varying = call_shapes.merge(*(budget.seen.varying for budget in self.budgets.values()))

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()  # copied and pickled modules are eager: a copy must not call the original


def put_in(calls: Sequence[CompiledCall]) -> Undo:
    """Route these modules' calls through their compiled functions. Undo restores the latest earlier callable that is
    still active, whatever the order in which callables are undone, and even if one was paused."""
    for call in calls:
        call.below = vars(call.module).get("_compiled_call_impl")
        call.module._compiled_call_impl, call.is_in = call, True

    def undo() -> None:
        for call in calls:
            own, was_in, call.is_in = vars(call.module), call.is_in, False
            if not was_in or own.get("_compiled_call_impl", call) is not call:
                continue
            own.pop("_compiled_call_impl", None)
            below = call.below
            while isinstance(below, CompiledCall) and not below.is_in:
                below = below.below
            if below is not None:
                own["_compiled_call_impl"] = below

    return undo


def sum_up(calls: Sequence[CompiledCall]) -> dict[str, Any]:
    """Collect the evidence of all modules: graphs, failures, and the calls of the budget with the most eager ones."""
    most = max((budget for call in calls for budget in call.budgets.values()), key=lambda budget: budget.eager)
    return {
        "graphs": sum(call.graphs for call in calls),
        "forced_eager": sum(call.forced for call in calls),
        "hooked": sum(call.hooked for call in calls),
        "failures": [call.failure for call in calls if call.failure],
        "eager_calls": most.eager,
        "of_calls": most.calls,
        "spent": [call.spent for call in calls if call.spent],
    }


_VERSION = operator.attrgetter("_version")


class _Held:
    """Tensors that a call may change in place, so that a failed call can be repeated on unchanged ones.

    Args:
        keep: whether to copy the buffers. This pays when a compile may fail: compiled code bumps their version
            counters before it runs.
    """

    def __init__(self, inputs: Iterable[torch.Tensor], buffers: list[torch.Tensor], *, keep: bool) -> None:
        self._inputs, self._buffers = list(inputs), buffers
        self._changes = _count_changes(self._inputs), _count_changes(buffers)
        self._kept = [buffer.detach().clone() for buffer in buffers] if keep else []

    def restore(self) -> bool:
        """Restore the buffers if copies were kept; return whether everything is unchanged again."""
        inputs, buffers = self._changes
        if _count_changes(self._inputs) != inputs:
            return False
        if _count_changes(self._buffers) == buffers:
            return True
        with torch.no_grad():
            for buffer, kept in zip(self._buffers, self._kept, strict=False):
                buffer.copy_(kept)
        return bool(self._kept)


def _count_changes(tensors: Iterable[torch.Tensor]) -> int:
    """Count in-place changes of the tensors, which only grow; -1 if an inference tensor, which has no counter, is among
    them."""
    try:
        return sum(map(_VERSION, tensors))
    except RuntimeError:
        return -1


_HOOKS = ("forward_pre_hooks", "forward_hooks", "backward_pre_hooks", "backward_hooks")


def _list_hooks(module: torch.nn.Module) -> frozenset[int]:
    """Return the ids of a module's hooks, of those of modules inside, and of global ones. No id is used twice."""
    everywhere = vars(torch.nn.modules.module)
    groups = [everywhere.get(f"_global_{name}", ()) for name in _HOOKS]
    groups += [hooks for each in module.modules() for name in _HOOKS if (hooks := vars(each).get(f"_{name}"))]
    return frozenset(number for hooks in groups for number in hooks)


def _backward_at_once() -> Any:
    """Compile the backward together with the forward, so that the call can still be repeated if this fails."""
    from torch._functorch import config

    if not hasattr(config, "force_non_lazy_backward_lowering"):  # not in every torch version
        return contextlib.nullcontext()
    return config.patch(force_non_lazy_backward_lowering=True)


def _take_first_paragraph(message: str) -> str:
    """Return the first paragraph on one line, without the hints after a blank line."""
    return " ".join(message.strip().split("\n\n")[0].split())[:200]

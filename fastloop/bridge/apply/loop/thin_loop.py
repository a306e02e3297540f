"""Leaves out work that Lightning does for every batch without effect; values, hooks and their order stay the same.

Measured on Lightning 2.6.6 with a model of two small layers, in CPU time of a busy two-core machine, n = 10,
alternating (benchmarks/host.py --only own). Lightning adds 250 us [238, 287] to a hand-written step of 115 us; with
this module 91 us [81, 104]. With a logged value it adds 530 us [491, 726]; with this module 179 us [160, 243].
Approximate savings:

    hooks           44 writes of hooks' names through ``torch.nn.Module.__setattr__``, and contexts   -90 us
    the loop        repeats known checks; clips nothing; divides the loss by 1: `flat_loop`           -50 us
    arguments       the signature of training_step is read anew for each batch                        -20 us
    logged values   each ``self.log`` moves its name's state to the device where it already is       -230 us per value

Lightning reads values logged with prog_bar=True off the device at each batch, even without a bar, so the host never
runs ahead. Here they are read on access; Lightning's own bars access them ten times a second, and at the last batch.

All changes are made on instances, after a check of what they replace; where a version of Lightning differs, its own
code stays.
"""

from __future__ import annotations

import inspect
import math
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch

from fastloop.bridge import namespaces
from fastloop.bridge.apply.loop.flat_loop import FlatLoop, HookCalls
from fastloop.bridge.apply.loop.known_loops import explain_unknown
from fastloop.bridge.attributes import replace_method
from fastloop.records.plan import Applied, Undo

REFRESH_S = 0.1
"""Minimum time between two updates of a progress bar."""
BARS = ("TQDMProgressBar", "RichProgressBar")


class ThinLoop:
    """The training loop of one fit."""

    def __init__(self, trainer: Any, module: Any) -> None:
        self._trainer, self._module = trainer, module
        self._loop, self._results = trainer.fit_loop.epoch_loop, 0
        self._flat: FlatLoop | None = None
        self._direct_hooks = 0
        self._refused: str | None = None
        self._undos: list[Undo] = []
        self._moves: list[_Moved] = []
        self._connector: Any = getattr(trainer, "_logger_connector", None)
        self._flatten()
        self._read_signature_once()
        self._read_numbers_late()
        self._refresh_less()

    def note_results(self) -> None:
        """Before a batch: thin the results of values that were logged for the first time."""
        loops = self._loop, getattr(self._loop, "val_loop", None)
        results = [found for loop in loops if isinstance(found := getattr(loop, "_results", None), dict)]
        if (known := sum(map(len, results))) != self._results:
            self._results = known
            for result in (result for found in results for result in found.values()):
                if getattr(result, "is_tensor", False) and "to" not in vars(result):
                    self._moves.append(_Moved(result))
                    self._set(result, "to", self._moves[-1])

    def evidence(self) -> dict[str, Any]:
        """Counts of batches in the flat loop, or why it is not used, and of skipped moves of logged values."""
        moves = {"moves_left_out": sum(move.left_out for move in self._moves)}
        batches = {"flat_batches": 0 if self._flat is None else self._flat.batches, "direct_hooks": self._direct_hooks}
        return {**moves, **batches, **({} if self._refused is None else {"loop_refused": self._refused})}

    def undo(self) -> None:
        """Restore Lightning's own behavior."""
        while self._undos:
            self._undos.pop()()
        if isinstance(late := getattr(self._connector, "_progress_bar_metrics", None), LateNumbers):
            self._connector._progress_bar_metrics = dict(late)

    def _flatten(self) -> None:
        trainer, module = self._trainer, self._module
        self._refused = explain_unknown(trainer, module)
        if self._refused is not None:
            return
        calls = HookCalls(trainer, module)
        owners = self._loop, self._loop.automatic_optimization, trainer.precision_plugin
        for each in calls.bind_to(*owners):
            self._set(*each)
        if trainer.world_size > 1:  # ranks agree before every batch whether to stop
            self._direct_hooks = 1
            return
        self._flat = FlatLoop(trainer, module, calls)
        for each in self._flat.functions():
            self._set(*each)

    def _read_signature_once(self) -> None:
        original = getattr(self._loop, "_build_kwargs", None)
        if original is None or "_build_kwargs" in vars(self._loop):
            return
        if len(inspect.signature(original).parameters) != 3:
            return
        known: list[Any] = [None, ()]

        def build(kwargs: Any, batch: Any, batch_idx: int) -> Any:
            step = self._module.training_step
            function = getattr(step, "__func__", step)
            if function is not known[0] or kwargs:
                made = original(kwargs, batch, batch_idx)
                known[:] = function, list(made)
                return made
            kwargs.update(zip(known[1], (batch, batch_idx), strict=False))
            return kwargs

        self._set(self._loop, "_build_kwargs", build)

    def _read_numbers_late(self) -> None:
        """Keep the values for the progress bar on the device until they are read."""
        results: Any = getattr(self._loop, "_results", None)
        needs = ("metrics", "valid_items", "_get_cache", "_forked_name")
        if not all(callable(getattr(results, name, None)) for name in needs):
            return
        if type(getattr(self._connector, "_progress_bar_metrics", None)) is not dict:
            return
        original, late = results.metrics, LateNumbers(self._connector._progress_bar_metrics)
        self._connector._progress_bar_metrics = late

        def metrics(on_step: bool) -> Any:
            shown = [each for each in results.values() if each.meta.prog_bar]
            if not shown or self._connector._progress_bar_metrics is not late:
                return original(on_step)
            for each in shown:
                each.meta.prog_bar = False
            try:
                made = original(on_step)
            finally:
                for each in shown:
                    each.meta.prog_bar = True
            for _, each in results.valid_items():
                if each.meta.prog_bar and isinstance(value := results._get_cache(each, on_step), torch.Tensor):
                    name = results._forked_name(each, on_step)[1]
                    # Lightning refuses a value that is not a single number.
                    made["pbar"][name] = value if value.numel() == 1 else original(on_step)["pbar"][name]
            return made

        self._set(results, "metrics", metrics)

    def _refresh_less(self) -> None:
        bar: Any = getattr(self._trainer, "progress_bar_callback", None)
        name, space = "on_train_batch_end", namespaces.find_namespace(self._trainer)
        theirs = [getattr(namespaces.load(space, f"callbacks.{kind}"), name) for kind in BARS]
        if (has := getattr(type(bar), name, None)) not in theirs or name in vars(bar):
            return
        if has is theirs[0] and bar.refresh_rate > 1:  # in batches; an update between them would show nothing
            return
        original, latest_s = getattr(bar, name), -math.inf

        def look(trainer: Any, *args: Any) -> None:
            nonlocal latest_s
            ends = trainer.is_last_batch or trainer.global_step == trainer.max_steps
            if ends or time.perf_counter() - latest_s >= REFRESH_S:
                original(trainer, *args)
                latest_s = time.perf_counter()

        self._set(bar, name, look)

    def _set(self, owner: Any, name: str, call: Any) -> None:
        self._undos.append(replace_method(owner, name, call))


class LateNumbers(dict[str, Any]):
    """A dictionary of numbers that may still be on a device; they are read off it on access."""

    def settle(self) -> None:
        """Read the numbers that are still on a device."""
        for name, value in dict.items(self):
            if isinstance(value, torch.Tensor):
                dict.__setitem__(self, name, value.item())

    def __copy__(self) -> dict[str, Any]:
        return dict(self)

    def __deepcopy__(self, memo: Any) -> dict[str, Any]:
        return dict(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return OrderedDict, (list(self.items()),)  # a checkpoint with it loads without us, even weights_only


def _look_first(name: str) -> Callable[..., Any]:
    original = getattr(dict, name)

    def look(self: LateNumbers, *args: Any) -> Any:
        self.settle()
        return original(self, *args)

    return look


# `__iter__` too: without it, `{**numbers}` and `dict(numbers)` would copy the tensors.
_READS = "__getitem__ __iter__ __repr__ __eq__ __ne__ __or__ items values get setdefault pop popitem copy"
for _name in _READS.split():
    setattr(LateNumbers, _name, _look_first(_name))


class _Moved:
    """Replaces ``to`` of a result: does nothing if the last call moved the result to the same device."""

    def __init__(self, result: Any) -> None:
        self._result, self._move, self._there = result, result.to, None
        self.left_out = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and args[0] == self._there:
            self.left_out += 1
            return self._result
        self._there = args[0] if len(args) == 1 and not kwargs else None
        return self._move(*args, **kwargs)


def thin(trainer: Any, module: Any, note_each_batch: Callable[[Callable[[], None]], Callable[[], None]]) -> Applied:
    """Thin the training loop until the undo."""
    loop = ThinLoop(trainer, module)
    stop = note_each_batch(loop.note_results)

    def undo() -> None:
        stop()
        loop.undo()

    return Applied(undo=undo, probe=loop.evidence)

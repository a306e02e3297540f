"""Finds what training_step itself keeps from batch to batch, and what would change with the number of its calls.

A count of calls, a moving average in a buffer, or a learning rate that training_step sets advances once a call. What
adds up over samples is the same in any pieces, and what each call overwrites has no memory: both may stay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from fastloop.bridge.apply.read_model import is_metric
from fastloop.bridge.apply.state.untouched import StateSnapshot
from fastloop.errors import NotApplicable, name_kind
from fastloop.evidence.samples.sample_code import is_installed

MOST_READ = 2**20
"""Elements of a tensor that are compared; of a larger one, as many at equal distances."""
COUNTS_ALIKE = 0.25
"""Relative difference up to which two changes of a whole number are the same: rounding may move one prediction."""
ROUNDING = 8
"""Differences of up to this many roundings are none: a power iteration that has converged changes by as much."""
MOST_NAMED = 3
Values = dict[tuple[int, Any], torch.Tensor]
"""Numbers, by the container that holds them (its id) and their key there."""


class KeptState:
    """The numbers and tensors that a module's objects and its optimizers' groups hold, parameters excepted. Left out
    are statistics of BatchNorm and InstanceNorm, which are judged elsewhere, and metrics, whose states add up.

    Args:
        kept: the objects that the module keeps.
    """

    def __init__(self, module: torch.nn.Module, kept: StateSnapshot) -> None:
        self._names = _name_containers(module)
        self._groups = {id(group) for each in list_optimizers(module) for group in each.param_groups}
        left_out = _list_left_out(module)
        holders: list[tuple[Any, Any]] = [*kept.list_holders(), *((each, each) for each in kept.list_lists())]
        self._holders = [
            (owner, holder) for owner, holder in holders if not is_metric(owner) and id(holder) not in left_out
        ]
        self._before = self.read()

    def read(self) -> Values:
        """Copy all numbers as they are now."""
        return {
            (id(holder), key): number
            for owner, holder in self._holders
            for key, value in _list_entries(owner, holder)
            if (number := _read_number(value)) is not None
        }

    def find_changed(self, pieces: Values, whole: Values, limit: float) -> set[tuple[int, Any]]:
        """What differs after the pieces from what it is after the whole batch.

        Args:
            limit: relative difference up to which two changes of a value are the same.
        """
        return {
            key
            for key, number in pieces.items()
            if key in whole and _differs(self._before.get(key), number, whole[key], limit)
        }

    def leave_out_forgotten(
        self, found: set[tuple[int, Any]], pieces: Values, run_last: Callable[[], Values], limit: float
    ) -> set[tuple[int, Any]]:
        """Leave out what depends on the last piece alone, and what is never the same twice, such as a time.

        Args:
            run_last: runs the last piece without the others before it; returns what it has changed.
        """
        rest = {key for key in found if key[0] not in self._groups}
        always = found - rest
        if not rest:
            return always
        try:
            first, second = run_last(), run_last()
        except NotApplicable:  # other ranks would have to run it, too
            return found
        for key in rest:
            before = self._before.get(key)
            alone, again = first.get(key), second.get(key)
            if alone is None or again is None:
                continue
            if not _differs(before, alone, again, limit) and _differs(before, alone, pieces[key], limit):
                always.add(key)
        return always

    def name(self, found: set[tuple[int, Any]]) -> str | None:
        """Name what was found; None if there is nothing."""
        order = [key for owner, holder in self._holders for key in _list_keys(owner, holder) if key in found]
        names = [*dict.fromkeys(self._name_one(*key) for key in order)]
        names.sort(key=lambda name: name == "the learning rate")
        if len(names) > MOST_NAMED:
            names = [*names[:MOST_NAMED], f"{len(names) - MOST_NAMED} more"]
        return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:]))) or None

    def _name_one(self, holder: int, key: Any) -> str:
        if holder in self._groups:
            return "the learning rate" if key == "lr" else f"the optimizer's {key}"
        if (name := self._names.get((holder, key)) or self._names.get((holder, None))) is not None:
            return name
        owner = next(owner for owner, each in self._holders if id(each) == holder)
        if isinstance(owner, (dict, list)):
            return f"{name_kind(owner)} that the model keeps"
        prefix = self._names.get((holder, ""), type(owner).__name__)
        return f"{prefix}.{key}" if prefix else str(key)


def list_optimizers(module: torch.nn.Module) -> list[Any]:
    """The optimizers of a module that a Trainer trains."""
    strategy = getattr(getattr(module, "_trainer", None), "strategy", None)
    return [*getattr(strategy, "optimizers", ())]


def _list_entries(owner: Any, holder: Any) -> Iterator[tuple[Any, Any]]:
    """The keys and values of a dict or list; of an object, also class attributes, which its own may hide later."""
    yield from list(enumerate(holder) if isinstance(holder, list) else holder.items())
    if owner is not holder:
        for base in type(owner).__mro__:
            if not is_installed(base):
                yield from ((name, value) for name, value in vars(base).items() if name not in holder)


def _list_keys(owner: Any, holder: Any) -> list[tuple[int, Any]]:
    return [(id(holder), key) for key, _ in _list_entries(owner, holder)]


def _list_left_out(module: torch.nn.Module) -> set[int]:
    """Containers that may change: their changes are right, or judged elsewhere."""
    parts = list(module.modules())
    metrics = [part for part in parts if is_metric(part)]
    norms = {id(part._buffers) for part in parts if isinstance(part, torch.nn.modules.batchnorm._NormBase)}
    return norms | {id(value) for metric in metrics for value in vars(metric).values()}


def _name_containers(module: torch.nn.Module) -> dict[tuple[int, Any], str]:
    """Names of entries, as (container, key); with None as the key of all its entries; with "" of what goes before the
    key."""
    names: dict[tuple[int, Any], str] = {}
    for path, part in module.named_modules():
        dot = f"{path}." if path else ""
        for key, value in vars(part).items():
            if isinstance(value, (dict, list)):
                names[id(value), None] = f"{dot}{key}"
            elif hasattr(value, "__dict__"):
                names[id(vars(value)), ""] = f"{dot}{key}"
        names.pop((id(part._buffers), None), None)
        names.update({(id(part._buffers), key): f"{dot}{key}" for key in part._buffers})
        names[id(vars(part)), ""] = path
        if type(part).__name__ == "_SpectralNorm":
            names[id(part._buffers), None] = f"spectral_norm of {path.partition('.parametrizations.')[0]}"
            for key in part._buffers:
                names.pop((id(part._buffers), key))
        for hook in part._forward_pre_hooks.values():
            if type(hook).__name__ == "SpectralNorm":
                weight: Any = getattr(hook, "name", "weight")
                for holder, key in (
                    (part._buffers, f"{weight}_u"),
                    (part._buffers, f"{weight}_v"),
                    (vars(part), weight),
                ):
                    names[id(holder), key] = f"spectral_norm of {path}"
    return names


def _read_number(value: Any) -> torch.Tensor | None:
    """Copy a number or a tensor of numbers to the host; None if it is neither."""
    if isinstance(value, (bool, int, float)):
        return torch.tensor(float(value) if isinstance(value, float) or abs(value) >= 2**63 else value)
    if type(value).__module__ == "numpy" and getattr(value, "dtype", None) is not None and value.dtype.kind in "biuf":
        value = torch.as_tensor(value.astype("int64" if value.dtype.kind in "biu" else "float64"))
    if not isinstance(value, torch.Tensor) or isinstance(value, torch.nn.Parameter):
        return None
    if torch.nn.parameter.is_lazy(value) or value.layout != torch.strided or value.is_quantized or not value.numel():
        return None
    value = torch.view_as_real(value.detach().resolve_conj()) if value.is_complex() else value.detach()
    flat = value.reshape(-1)[:: -(-value.numel() // MOST_READ)]
    copied: torch.Tensor = flat.to("cpu", copy=True)
    return copied.reshape(value.shape if flat.numel() == value.numel() else -1)


def _differs(before: torch.Tensor | None, first: torch.Tensor, second: torch.Tensor, limit: float) -> bool:
    """Whether a value that was `before` has changed differently in `first` and `second`. Other shapes are those of
    other samples."""
    if first.shape != second.shape or torch.equal(first, second):
        return False
    floats = first.is_floating_point()
    narrow = max((torch.finfo(each.dtype).eps for each in (first, second) if each.is_floating_point()), default=0.0)
    if first.dtype == torch.float64:
        narrow = max(narrow, torch.finfo(torch.float32).eps)  # it may be made from a narrower number
    one, two = (each.double().nan_to_num() for each in (first, second))
    start = torch.zeros_like(one) if before is None or before.shape != first.shape else before.double().nan_to_num()
    most = max(float((each - start).abs().max()) for each in (one, two))
    floor = ROUNDING * narrow * max(float(each.abs().max()) for each in (one, two))
    return float((one - two).abs().max()) > max((limit if floats else COUNTS_ALIKE) * most, floor)

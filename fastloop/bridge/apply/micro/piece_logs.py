"""Logs once for the whole batch what training_step logs for each micro-batch.

Without it Lightning would show the last micro-batch's value as the step's, weighted as if it covered all samples.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import torch

from fastloop.feeds.lower_precision import is_16_bit_float
from fastloop.feeds.splitting import Piece, average

_EXTREMES = {"max": torch.max, "min": torch.min}


class _Call(NamedTuple):
    value: Any
    weight: float
    """The batch_size that the user logs with, else the samples of the piece."""
    share: Any
    """The piece's weight in a mean: `weight`, or the weight of its loss, such as its share of tokens."""
    forward: Any
    """A torchmetrics object's value for this piece."""


class PieceLogs:
    """Collects the calls of ``module.log`` while the pieces run, and makes one call per name at the end.

    Combines values by ``reduce_fx``: a mean weighted by samples, a sum, or an extreme over the pieces. That is correct
    if ``reduce_fx`` of the parts gives the value of the whole batch.

    Args:
        by_weight: names of means that are weighted as the pieces' losses are.
    """

    def __init__(self, module: Any, pieces: Sequence[Piece], by_weight: Collection[str] = ()) -> None:
        self.module, self.piece, self.by_weight = module, pieces[0], by_weight
        self._calls: dict[str, list[_Call]] = {}
        self._options: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {}

    def take(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        """Replaces ``module.log``."""
        if args:
            names = _list_positional(type(self.module).log)
            options, args = {**dict(zip(names, args, strict=False)), **options}, args[len(names) :]
        size = options.get("batch_size")
        if isinstance(value, torch.Tensor) and not options.get("enable_graph"):
            value = value.detach()
        weight = self.piece.samples if size is None else size
        share = self.piece.weight if name in self.by_weight else weight
        call = _Call(value, weight, share, getattr(value, "_forward_cache", None))
        self._calls.setdefault(name, []).append(call)
        self._options[name] = args, options

    def flush(self, *, hides_rows: bool = False) -> None:
        """Log each name once.

        Args:
            hides_rows: Lightning sees only some of the step's samples, so pass their number as batch_size.
        """
        for name, calls in self._calls.items():
            args, options = self._options[name]
            if hides_rows or options.get("batch_size") is not None:
                options["batch_size"] = sum(call.weight for call in calls)
            value = _combine(calls, options.get("reduce_fx", "mean"))
            if isinstance(calls[-1].forward, torch.Tensor) and calls[-1].forward.is_floating_point():
                # A torchmetrics object has seen every piece, but its value for the step is the last piece's.
                value._forward_cache = _combine([call._replace(value=call.forward) for call in calls], "mean")
            self.module.log(name, value, *args, **options)


@functools.cache
def _list_positional(log: Callable[..., Any]) -> tuple[str, ...]:
    """Names of the positional arguments of a ``log`` method, after self, name and value."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(name for name, parameter in inspect.signature(log).parameters.items() if parameter.kind in kinds)[3:]


def _combine(calls: Sequence[_Call], reduce: Any) -> Any:
    values = [call.value for call in calls]
    if len(values) == 1 or not all(isinstance(value, (int, float, torch.Tensor)) for value in values):
        return values[-1]
    how = reduce.lower() if isinstance(reduce, str) else getattr(reduce, "__name__", "")
    if how in ("mean", "avg"):
        weighed = [value.float() if is_16_bit_float(value) else value for value in values]
        return average(weighed, [call.share for call in calls])
    if how == "sum":
        return sum(values[1:], start=values[0])
    if how in _EXTREMES:
        return _EXTREMES[how](torch.stack([torch.as_tensor(value) for value in values]))
    return values[-1]  # Lightning supports no other reduction and will report it

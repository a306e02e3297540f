"""The results of running modules or optimizers once, and the deviation between two runs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from fastloop.evidence.model.gradient_distance import view_as_real
from fastloop.judge.rehearsal import Deviation


@dataclass
class RunResults:
    """The results of running modules' calls, or optimizers, once."""

    ms: float = 0.0
    outputs: list[torch.Tensor] = field(default_factory=list)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    """Gradients of parameters by name, and of inputs by call and position; summed over the calls."""
    is_random: bool = False
    """Whether random numbers were drawn."""
    launch_ms: float = 0.0
    """The part of `ms` in which the host launched the work; the rest is its wait for the device."""
    peak_bytes: int | None = None
    """Peak device memory of tensors, above what was held before; None if unknown."""


def read_streams(device: torch.device) -> list[torch.Tensor]:
    """The states of the random streams that modules on this device draw from."""
    host = torch.get_rng_state()
    return [host, torch.cuda.get_rng_state(device)] if device.type == "cuda" else [host]


def synchronize(device: torch.device) -> None:
    """Wait for the device if it runs asynchronously."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def raise_if_device_lost(device: torch.device, error: Exception) -> None:
    """Raise `error`, which is the user's own, if the device is lost: nothing after it could run."""
    try:
        synchronize(device)
    except Exception:
        raise error from None


def compare_results(unchanged: RunResults, changed: RunResults) -> Deviation:
    """How far the second run deviates from the first.

    Raises:
        ValueError: the outputs differ in number or shapes.
    """
    shapes = [[tuple(each.shape) for each in played.outputs] for played in (unchanged, changed)]
    if shapes[0] != shapes[1]:
        raise ValueError(f"the outputs have different shapes: {shapes[1]} instead of {shapes[0]}")
    names = unchanged.gradients.keys() | changed.gradients.keys()
    pairs = [(unchanged.gradients.get(name), changed.gradients.get(name)) for name in names]
    outputs = _compare(list(zip(unchanged.outputs, changed.outputs, strict=True)))
    gradients = _compare(pairs)
    return Deviation(
        outputs=outputs.apart,
        gradients=gradients.apart if pairs else None,
        finite=outputs.finite and gradients.finite,
        outputs_norm=outputs.norm,
        gradients_norm=gradients.norm,
        outputs_cosine=outputs.cosine,
        gradients_cosine=gradients.cosine,
    )


class _Compared(NamedTuple):
    """Two lists of tensors: the norms of the differences and of the second ones, divided by that of the first ones."""

    apart: float = 0.0
    norm: float = 1.0
    finite: bool = True
    """The second values are finite wherever the first are."""
    cosine: float = 1.0
    """Mean of the tensors' cosines, because a single tensor may make up nearly the whole norm of all values."""


def _compare(pairs: Sequence[tuple[torch.Tensor | None, torch.Tensor | None]]) -> _Compared:
    if not pairs:
        return _Compared()
    # Uses only kernels that training has loaded already: loading others takes a tenth of a second.
    norms = torch.stack([torch.stack(torch._foreach_norm([b - a, a, b])) for a, b in _align(pairs)]).tolist()
    apart, norm, other = (math.hypot(*column) for column in zip(*norms, strict=True))
    if 0 < norm < math.inf and max(apart, other) < math.inf:
        return _Compared(apart / norm, other / norm, cosine=_average_cosines(norms))
    return _compare_exactly(pairs)


def _average_cosines(norms: Sequence[Sequence[float]]) -> float:
    """The mean cosine of pairs of tensors, given the norms of their difference, of the first and of the second.
    A tensor that is lost, or new, counts as turned by a right angle."""
    found = [(a**2 + b**2 - apart**2) / (2 * a * b) if a * b > 0 else 0.0 for apart, a, b in norms if a + b > 0]
    return statistics.fmean(found) if found else 1.0


def _align(pairs: Sequence[tuple[torch.Tensor | None, torch.Tensor | None]]) -> Iterator[list[torch.Tensor]]:
    """The pairs as real float32 numbers, one pair at a time: copies of all would double a 16-bit model's memory."""
    for first, second in pairs:
        known = [torch.zeros_like(b) if a is None else a for a, b in ((first, second), (second, first))]  # type: ignore[arg-type]
        yield [view_as_real(each).float() for each in known]


def _compare_exactly(pairs: Sequence[tuple[torch.Tensor | None, torch.Tensor | None]]) -> _Compared:
    """Compare in double precision, which has room for very small numbers, where the first values are finite."""
    sums: list[torch.Tensor] = []
    for a, b in _align(pairs):
        whole = torch.isfinite(a)
        broken = (whole & ~torch.isfinite(b)).any()
        squares = [torch.where(whole, each, 0.0).double().square().sum() for each in (b - a, a, b)]
        sums.append(torch.stack([*squares, broken.double()]))
    every = torch.stack(sums)
    apart, norm, other, broken = every.sum(0).tolist()
    if broken:
        return _Compared(math.inf, math.inf, finite=False)
    if norm == 0:
        return _Compared(0.0 if apart == 0 else math.inf)
    return _Compared(
        math.sqrt(apart / norm), math.sqrt(other / norm), cosine=_average_cosines(every[:, :3].sqrt().tolist())
    )

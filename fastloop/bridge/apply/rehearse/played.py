"""The results of running modules or optimizers once, and the deviation between two runs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from fastloop.judge.rehearsal import Deviation


@dataclass
class Played:
    """The results of playing calls once."""

    ms: float = 0.0
    outputs: list[torch.Tensor] = field(default_factory=list)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    """Gradients of parameters by name, and of inputs by call and position; summed over the calls."""
    is_random: bool = False
    """Whether random numbers were drawn."""
    launch_ms: float = 0.0
    """The part of `ms` in which the host launched the work; the rest is its wait for the device."""
    peak_bytes: int | None = None
    """The most device memory that it took; None: not known."""


def read_streams(device: torch.device) -> list[torch.Tensor]:
    """The states of the random streams that modules on this device draw from."""
    host = torch.get_rng_state()
    return [host, torch.cuda.get_rng_state(device)] if device.type == "cuda" else [host]


def synchronize(device: torch.device) -> None:
    """Wait for the device if it runs asynchronously."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure_deviation(unchanged: Played, changed: Played) -> Deviation:
    """How far the second run deviates from the first.

    Raises:
        ValueError: the outputs differ in number or shapes.
    """
    shapes = [[tuple(each.shape) for each in played.outputs] for played in (unchanged, changed)]
    if shapes[0] != shapes[1]:
        raise ValueError(f"the outputs have different shapes: {shapes[1]} instead of {shapes[0]}")
    names = unchanged.gradients.keys() | changed.gradients.keys()
    pairs = [(unchanged.gradients.get(name), changed.gradients.get(name)) for name in names]
    outputs, outputs_norm, all_finite = _compare(list(zip(unchanged.outputs, changed.outputs, strict=True)))
    gradients, gradients_norm, finite = _compare(pairs)
    return Deviation(
        outputs=outputs,
        gradients=gradients if pairs else None,
        finite=all_finite and finite,
        outputs_norm=outputs_norm,
        gradients_norm=gradients_norm,
    )


def _compare(pairs: Sequence[tuple[torch.Tensor | None, torch.Tensor | None]]) -> tuple[float, float, bool]:
    """The norms of all differences and of the second values, both divided by that of the first values, and whether the
    second values are finite wherever the first are."""
    if not pairs:
        return 0.0, 1.0, True
    # By kernels that training has loaded already: loading others takes a tenth of a second.
    norms = [torch.stack(torch._foreach_norm([b - a, a, b])) for a, b in _align(pairs)]
    apart, norm, other = (math.hypot(*column) for column in zip(*torch.stack(norms).tolist(), strict=True))
    if 0 < norm < math.inf and max(apart, other) < math.inf:
        return apart / norm, other / norm, True
    return _compare_exactly(pairs)


def _align(pairs: Sequence[tuple[torch.Tensor | None, torch.Tensor | None]]) -> Iterator[list[torch.Tensor]]:
    """The pairs as real float32 numbers, one pair at a time: copies of all would double a 16-bit model's memory."""
    for first, second in pairs:
        known = [torch.zeros_like(b) if a is None else a for a, b in ((first, second), (second, first))]  # type: ignore[arg-type]
        yield [torch.view_as_real(each) if each.is_complex() else each.float() for each in known]


def _compare_exactly(pairs: Sequence[tuple[torch.Tensor | None, torch.Tensor | None]]) -> tuple[float, float, bool]:
    """The same in double precision, which has room for very small numbers, and without those that are not finite."""
    sums: list[torch.Tensor] = []
    for a, b in _align(pairs):
        whole = torch.isfinite(a)
        broken = (whole & ~torch.isfinite(b)).any()
        squares = [torch.where(whole, each, 0.0).double().square().sum() for each in (b - a, a, b)]
        sums.append(torch.stack([*squares, broken.double()]))
    apart, norm, other, broken = torch.stack(sums).sum(0).tolist()
    if broken:
        return math.inf, math.inf, False
    if norm == 0:
        return (0.0 if apart == 0 else math.inf), 1.0, True
    return math.sqrt(apart / norm), math.sqrt(other / norm), True

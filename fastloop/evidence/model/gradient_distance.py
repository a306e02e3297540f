"""The distance between two gradients, tensor by tensor and as a whole, in float64."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

Gradient = Mapping[str, torch.Tensor]
"""Gradients by parameter name."""

LISTED = 5
LOST_SHARE = 1e-4
"""A tensor whose elements are this small compared with the mean element may truly be zero: the bias before a
BatchNorm."""
NOTABLE, OFF = 1e-2, 0.5
"""A tensor with this share of the norm must keep at least this part of itself, whatever rounding does to the rest."""


def measure_gradient_distance(base: Gradient, arm: Gradient, device: torch.device | None = None) -> dict[str, Any]:
    """Measure how far a gradient is from the base's.

    Args:
        device: a CUDA device that computes it, tensor by tensor, in a tenth of the time; None: the host.

    Returns:
        ``deviation``   ``||arm - base|| / ||base||``; a missing tensor counts as zeros
        ``layers``      the root mean square of the deviations of single matrices (and filters), each over its own
                        norm: every layer has the same weight, however small its share of the whole
        ``kept``        how much of the base's gradient the arm's contains, ``<arm, base> / ||base||^2``: it stays near
                        1 however far rounding scatters the rest, but not if a factor is lost
        ``worst``       the tensors that differ most: ``name``, ``deviation`` over its own norm, ``share`` of the norm
        ``lost``        tensors of the base that are not practically zero there, but missing or all zeros in the arm
        ``astray``      tensors with a notable share of the norm that keep less than half, or more than twice as much
        ``finite``      whether all elements of the arm's gradient are finite
    """
    rows = {name: _measure_row(base.get(name), arm.get(name), device) for name in {**base, **arm}}
    norm = math.sqrt(math.fsum(row["base"] ** 2 for row in rows.values()))
    apart = math.sqrt(math.fsum(row["apart"] ** 2 for row in rows.values()))
    typical = norm / math.sqrt(sum(tensor.numel() for tensor in base.values()) or 1)
    known = [name for name in base if rows[name]["base"] > LOST_SHARE * typical * math.sqrt(base[name].numel())]
    lost = [name for name in known if rows[name]["arm"] == 0]
    layers = [(rows[name]["apart"] / rows[name]["base"]) ** 2 for name in known if base[name].ndim > 1]
    astray = [
        name
        for name, row in rows.items()
        if row["base"] > NOTABLE * norm and not OFF <= row["along"] / row["base"] ** 2 <= 1 / OFF
    ]
    largest = sorted((name for name in rows if rows[name]["apart"] > 0), key=lambda name: -rows[name]["apart"])
    return {
        "deviation": apart / norm if norm else (0.0 if apart == 0 else math.inf),
        "layers": math.sqrt(math.fsum(layers) / len(layers)) if layers else None,
        "kept": math.fsum(row["along"] for row in rows.values()) / norm**2 if norm else None,
        "worst": [
            {
                "name": name,
                "deviation": _divide(rows[name]["apart"], rows[name]["base"]),
                "share": _divide(rows[name]["base"], norm),
            }
            for name in largest[:LISTED]
        ],
        "lost": lost,
        "astray": astray,
        "finite": is_finite(arm),
    }


def is_finite(gradient: Gradient) -> bool:
    """Whether all elements are finite."""
    stored = (each.coalesce().values() if each.is_sparse else each for each in gradient.values())
    return all(bool(torch.isfinite(each).all()) for each in stored)


def view_as_real(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or a complex one's real and imaginary parts in a last dimension of 2."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _measure_row(base: torch.Tensor | None, arm: torch.Tensor | None, device: torch.device | None) -> dict[str, float]:
    """Norms of one tensor in both gradients and of their difference, and the inner product."""
    left, right = (
        None if tensor is None else view_as_real(tensor.detach()).to(device or "cpu").to(torch.float64)
        for tensor in (base, arm)
    )
    norms = [0.0 if side is None else float(side.norm()) for side in (left, right)]
    if left is None or right is None or left.shape != right.shape:
        return {"base": norms[0], "arm": norms[1], "apart": math.hypot(*norms), "along": 0.0}
    return {
        "base": norms[0],
        "arm": norms[1],
        "apart": float((right - left).norm()),
        "along": float((left * right).sum()),
    }


def _divide(part: float, whole: float) -> float | None:
    return part / whole if whole else None

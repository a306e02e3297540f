"""The device memory that plays and steps take. Nothing is read on a CPU."""

from __future__ import annotations

import torch

from fastloop.bridge.apply.rehearse.played import RunResults
from fastloop.bridge.apply.site import LiveSite
from fastloop.judge import rehearsal as judge


def forget_peak(device: torch.device) -> int | None:
    """Reset the peak; returns the bytes that tensors take now, None on a CPU."""
    if device.type != "cuda":
        return None
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def read_peak(device: torch.device) -> int | None:
    """Peak bytes of tensors since `forget_peak`; None on a CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def read_available(device: torch.device) -> int:
    """Bytes that tensors of this process may take."""
    return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)


def explain_no_room(site: LiveSite, usual: RunResults, changed: RunResults) -> str | None:
    """Why a step will not fit once its modules are changed, although one play of them did: a step also keeps gradients,
    the optimizer's temporary tensors, and what other modules keep for the backward. None if it will."""
    if site.step_bytes is None or usual.peak_bytes is None or changed.peak_bytes is None:
        return None
    return judge.explain_no_room(changed.peak_bytes - usual.peak_bytes, read_available(site.device) - site.step_bytes)

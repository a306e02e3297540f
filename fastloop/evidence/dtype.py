"""Which dtype arithmetic has at the place this is called from."""

from __future__ import annotations

import torch


def product_dtype(device: torch.device) -> str:
    """Dtype of a 1x1 matrix product of float32 numbers here and now: what autocast makes of it."""
    one = torch.ones(1, 1, device=device)
    return str((one @ one).dtype)

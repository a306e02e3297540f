"""The current CUDA stream, without the object that torch makes of it at every call."""

from __future__ import annotations

import functools
from typing import Any

import torch


def current_stream(device: torch.device) -> Any:
    """``torch.cuda.current_stream``, which takes 4 us on an H200's host: longer than all else of a mark together."""
    ask = getattr(torch._C, "_cuda_getCurrentStream", None)  # private
    if ask is None or device.index is None:
        return torch.cuda.current_stream(device)
    return _stream(*ask(device.index))


@functools.cache
def _stream(stream_id: int, device_index: int, device_type: int) -> Any:
    stream: Any = torch.cuda.Stream
    return stream(stream_id=stream_id, device_index=device_index, device_type=device_type)

"""Format of stored samples: one record of plain bytes, verified at each read; never a pickle.

A record has a header (magic, CRC-32 and length of the rest, the sample's key), then JSON for the sample's structure,
then the bytes of its arrays and pictures, each aligned to 16.
"""

from __future__ import annotations

import json
import struct
import sys
import zlib
from collections.abc import Callable
from typing import Any

from fastloop.errors import name_kind
from fastloop.evidence.machine import read_versions

FORMAT = 1
"""Incremented with every change of the format, so that records of older versions are never read."""
_HEAD = struct.Struct("<4sIQ16sI")
RECORD_HEAD = _HEAD.size
"""Bytes that identify a record."""
_MAGIC = b"FLs1"
_ALIGN = 16
_PICTURES = ("1", "L", "RGB", "RGBA", "CMYK", "YCbCr", "HSV", "LAB", "I", "F", "I;16")
"""PIL modes whose pictures consist only of their pixels; P also has a palette."""


def describe_versions() -> str:
    """Describe the versions of Python and of the packages that make samples. Imports none of them."""
    found = read_versions(("numpy", "pillow", "torch", "torchvision"))
    return ", ".join(f"{name} {version}" for name, version in found.items())


class CannotKeep(Exception):
    """A sample could not be restored unchanged from a record; the message names the part."""


def pack(key: bytes, sample: Any) -> bytes:
    """Make the record of a sample: None, booleans, numbers, strings, bytes, NumPy arrays, CPU tensors and PIL pictures,
    in tuples, lists, and dictionaries with strings or integers for keys.

    Args:
        key: 16 bytes that identify the sample.

    Raises:
        CannotKeep: it contains anything else.
    """
    buffers: list[bytes] = []
    meta = json.dumps(_describe(sample, buffers), separators=(",", ":")).encode("ascii")
    parts, length = [meta], len(meta)
    for buffer in buffers:
        parts += [bytes(-length % _ALIGN), buffer]
        length += -length % _ALIGN + len(buffer)
    crc = 0
    for part in parts:
        crc = zlib.crc32(part, crc)
    return b"".join((_HEAD.pack(_MAGIC, crc, length, key, len(meta)), *parts))


def unpack(key: bytes, record: memoryview) -> tuple[Any] | None:
    """Restore the sample of a record from copies, in a 1-tuple; None if the record is damaged or has another key."""
    if not is_ours(record):
        return None
    _, crc, length, written_for, meta = _HEAD.unpack_from(record)
    content = record[_HEAD.size :]
    if written_for != key or len(content) != length or meta > length or zlib.crc32(content) != crc:
        return None
    place = meta

    def take(size: int) -> memoryview:
        nonlocal place
        place += -place % _ALIGN
        place += size
        return content[place - size : place]

    return (_restore(json.loads(bytes(content[:meta])), take),)


def is_ours(record: bytes | memoryview) -> bool:
    """Whether these bytes begin like a record."""
    return len(record) >= _HEAD.size and bytes(record[:4]) == _MAGIC


def _describe(value: Any, buffers: list[bytes]) -> Any:
    """Describe a value for JSON, with its bytes in `buffers`. Exact types only: a subclass would lose its type."""
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind is bytes:
        buffers.append(value)
        return {"b": len(value)}
    if kind in (list, tuple):
        return {"l" if kind is list else "t": [_describe(each, buffers) for each in value]}
    if kind is dict:
        if all(type(key) in (str, int) for key in value):
            return {"d": [[key, _describe(each, buffers)] for key, each in value.items()]}
        raise CannotKeep("a dictionary whose keys are neither strings nor integers")
    for describe in (_describe_array, _describe_tensor, _describe_picture):
        if (found := describe(value, buffers)) is not None:
            return found
    raise CannotKeep(f"a {kind.__module__}.{kind.__qualname__}")


def _restore(described: Any, take: Callable[[int], memoryview]) -> Any:
    if not isinstance(described, dict):
        return described
    ((kind, what),) = described.items()
    if kind == "b":
        return bytes(take(what))
    if kind == "l":
        return [_restore(each, take) for each in what]
    if kind == "t":
        return tuple(_restore(each, take) for each in what)
    if kind == "d":
        return {key: _restore(each, take) for key, each in what}
    return _RESTORE[kind](*what, take)


# -- arrays, tensors and pictures: if a value has such a type, its library is already imported ------------------------


def _describe_array(value: Any, buffers: list[bytes]) -> Any:
    numpy: Any = sys.modules.get("numpy")
    if numpy is None or not (type(value) is numpy.ndarray or isinstance(value, numpy.generic)):
        return None
    if value.dtype.kind not in "biufcSU" or value.dtype.hasobject:
        raise CannotKeep(f"an array of {value.dtype}")
    if not value.flags.c_contiguous:
        raise CannotKeep("an array that is not contiguous: make it contiguous")
    buffers.append(value.tobytes())
    return {"a" if type(value) is numpy.ndarray else "n": [value.dtype.str, list(value.shape), len(buffers[-1])]}


def _restore_array(dtype: str, shape: list[int], size: int, take: Callable[[int], memoryview]) -> Any:
    import numpy

    return numpy.frombuffer(bytearray(take(size)), dtype=dtype).reshape(shape) if size else numpy.empty(shape, dtype)


def _describe_tensor(value: Any, buffers: list[bytes]) -> Any:
    torch: Any = sys.modules.get("torch")
    if torch is None or type(value) is not torch.Tensor:
        return None
    if value.device.type != "cpu" or value.layout is not torch.strided or value.requires_grad or value.is_quantized:
        raise CannotKeep("a tensor that is on a device, sparse, quantized or requires gradients")
    if value.is_conj() or value.is_neg():
        raise CannotKeep("a tensor that is conjugated or negated lazily: call resolve_conj() or resolve_neg()")
    if not value.is_contiguous():
        raise CannotKeep("a tensor that is not contiguous: make it contiguous()")
    buffers.append(value.reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b"")
    return {"T": [str(value.dtype).removeprefix("torch."), list(value.shape), len(buffers[-1])]}


def _restore_tensor(dtype: str, shape: list[int], size: int, take: Callable[[int], memoryview]) -> Any:
    import torch

    kind = getattr(torch, dtype)
    return (
        torch.frombuffer(bytearray(take(size)), dtype=kind).reshape(shape) if size else torch.empty(shape, dtype=kind)
    )


def _describe_picture(value: Any, buffers: list[bytes]) -> Any:
    pillow: Any = sys.modules.get("PIL.Image")
    if pillow is None or not isinstance(value, pillow.Image):
        return None
    if type(value) is not pillow.Image:
        raise CannotKeep(f"{name_kind(value)}, which is still tied to its file: convert() it first")
    if value.mode not in _PICTURES:
        raise CannotKeep(f"an image of mode {value.mode}: convert() it first")
    buffers.append(value.tobytes())
    about = [value.mode, list(value.size), len(buffers[-1])]
    return {"p": [*about, _describe(dict(value.info), buffers)]}


def _restore_picture(mode: str, size: list[int], length: int, info: Any, take: Callable[[int], memoryview]) -> Any:
    from PIL import Image

    picture = Image.frombytes(mode, (size[0], size[1]), take(length))
    picture.info = _restore(info, take)
    return picture


_RESTORE: dict[str, Callable[..., Any]] = {
    "a": _restore_array,
    "n": lambda *about: _restore_array(*about)[()],
    "T": _restore_tensor,
    "p": _restore_picture,
}

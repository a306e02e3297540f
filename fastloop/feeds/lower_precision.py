"""What a lower precision leaves alone: parts kept in float32, attention where cuDNN would plan anew; and its proof."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch.compiler import is_compiling
from torch.utils._pytree import tree_map

from fastloop.errors import NotApplicable
from fastloop.records.plan import Site, Undo


def keep_in_float32(root: torch.nn.Module, name: str, device_type: str, note: Callable[[str], object]) -> Undo:
    """Run a submodule, or a method of one, without autocast and on float32 copies of its shorter arguments, also of
    those in lists, tuples and dictionaries.

    Args:
        root: the LightningModule.
        name: below it: ``criterion``, ``compute_loss``, ``head.compute_loss``.
        note: told the name at each call, but for those inside compiled code. A builtin such as ``set.add``: what other
            functions hold, a rehearsal puts back.

    Raises:
        NotApplicable: there is no such part, or it is none that can be called.
    """
    owner, method = _find(root, name)
    if method in vars(owner):
        raise NotApplicable(f"{name} is already overridden on its object; your choice stands")
    original = getattr(type(owner), method)
    takes_self = not isinstance(inspect.getattr_static(type(owner), method), (staticmethod, classmethod))

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_compiling():
            note(name)
        with torch.autocast(device_type, enabled=False):
            args, kwargs = tree_map(_lengthen, (args, kwargs))
            return original(self, *args, **kwargs) if takes_self else original(*args, **kwargs)

    # A bound method, so that copies of the model call themselves. It is pickled by its name: as the original.
    vars(owner)[method] = own = MethodType(call, owner)

    def undo() -> None:
        if vars(owner).get(method) is own:
            del vars(owner)[method]

    return undo


def keep_cudnn_out(site: Site) -> Undo | None:
    """Where batches vary in size, take cuDNN's attention out of the choice, and let the next best kernel run.

    In 16-bit precisions torch prefers it, and for each size that it has not seen it makes a plan of its own: 130 ms a
    step on an H200 for a BERT whose batches are padded to their longest sentence. Of 32-bit tensors it takes none.
    """
    if site.device.type != "cuda" or not any(site.changed_sizes):
        return None
    if not torch.backends.cuda.cudnn_sdp_enabled():  # type: ignore[no-untyped-call]
        return None
    torch.backends.cuda.enable_cudnn_sdp(False)
    return lambda: torch.backends.cuda.enable_cudnn_sdp(True)


def read_product_dtype(device: torch.device) -> str:
    """Dtype of a 1x1 matrix product of float32 numbers here and now: what autocast makes of it."""
    one = torch.ones(1, 1, device=device)
    return str((one @ one).dtype)


def _find(root: torch.nn.Module, name: str) -> tuple[Any, str]:
    """The object that has the method, and the method."""
    above, _, last = name.rpartition(".")
    try:
        owner = root.get_submodule(above)
    except AttributeError:
        owner = None
    part = None if owner is None else getattr(owner, last, None)
    if isinstance(part, torch.nn.Module):
        return part, "forward"
    if not callable(getattr(type(owner), last, None)):
        raise NotApplicable(f"the model has no module or method {name!r} that could be kept in float32")
    return owner, last


def _lengthen(value: Any) -> Any:
    short = isinstance(value, torch.Tensor) and value.dtype in (torch.float16, torch.bfloat16)
    return value.float() if short else value

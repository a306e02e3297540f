"""Exceptions to a lower precision (parts kept in float32, attention without cuDNN), and a probe of its dtype."""

from __future__ import annotations

import functools
import inspect
from collections import deque
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch.compiler import is_compiling
from torch.utils._pytree import tree_map

from fastloop.errors import NotApplicable, let_through
from fastloop.records.plan import Site, Undo

_MOST_ENTRIES = 64
"""Larger dictionaries are not searched for outputs."""


def keep_in_float32(root: torch.nn.Module, name: str, device_type: str, note: Callable[[str], object]) -> Undo:
    """Run a submodule or a method without autocast, with its 16-bit arguments converted to float32, also those inside
    lists, tuples and dictionaries.

    Args:
        root: the LightningModule.
        name: path below it: ``criterion``, ``compute_loss``, ``head.compute_loss``.
        note: receives the name at each call outside compiled code. Pass a builtin such as ``set.add``: a rehearsal
            would roll back whatever other functions hold.

    Raises:
        NotApplicable: there is no such part, or it is not callable.
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

    # A bound method, so that copies of the model call themselves. Pickle stores its name, and so the original.
    vars(owner)[method] = own = MethodType(call, owner)

    def undo() -> None:
        if vars(owner).get(method) is own:
            del vars(owner)[method]

    return undo


def keep_cudnn_out(site: Site) -> Undo | None:
    """Disable cuDNN's attention if batches vary in size, so that torch picks the next best kernel.

    In 16-bit precisions torch prefers cuDNN, which makes a new plan for each new size: 130 ms a step on an H200 for a
    BERT whose batches are padded to their longest sentence. It does not run on 32-bit tensors.
    """
    if site.device.type != "cuda" or not any(site.changed_sizes):
        return None
    if not torch.backends.cuda.cudnn_sdp_enabled():  # type: ignore[no-untyped-call]
        return None
    torch.backends.cuda.enable_cudnn_sdp(False)
    return lambda: torch.backends.cuda.enable_cudnn_sdp(True)


def read_product_dtype(device: torch.device, module: torch.nn.Module | None = None) -> str:
    """Return the dtype of a 1x1 matrix product, which shows what autocast does at this point. The factors have torch's
    default dtype, or float64, which autocast leaves alone, if the module's first parameter has that."""
    first = None if module is None else next(module.parameters(), None)
    is_double = first is not None and first.dtype == torch.float64
    one = torch.ones(1, 1, device=device, dtype=torch.float64 if is_double else None)
    return str((one @ one).dtype)


class WideOutputs:
    """Converts the 16-bit tensors that a step returns, or appends to lists of the module, to float32, which they would
    be without autocast. NumPy has no bfloat16, so scripts that collect outputs for the end of an epoch would fail.

    Args:
        module: the LightningModule. If it has 16-bit parameters or buffers itself, nothing is changed.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._is_wide = not any(is_16_bit_float(each) for each in (*module.parameters(), *module.buffers()))

    def note(self) -> list[tuple[Any, int]]:
        """Return the module's lists, also those in small dictionaries, with their lengths before a step."""
        if not self._is_wide:
            return []
        found = []
        for name, value in vars(self._module).items():
            if name[:1] == "_":
                continue
            if type(value) in (list, deque):
                found.append((value, len(value)))
            elif type(value) is dict and len(value) <= _MOST_ENTRIES:
                found += [(each, len(each)) for each in value.values() if type(each) in (list, deque)]
        return found

    def widen(self, result: Any, before: list[tuple[Any, int]]) -> Any:
        """Convert a step's 16-bit outputs to float32, except the loss, which still needs its backward. Items appended
        to the module's lists since `note`, which returned `before`, are converted in place."""
        if not self._is_wide:
            return result
        for kept, length in before:
            for place in range(length, len(kept)):
                if (wide := _widen_output(kept[place])) is not kept[place]:
                    kept[place] = wide
        has_graph = isinstance(result, torch.Tensor) and result.requires_grad
        return result if has_graph else _widen_output(result, but="loss")


def _widen_output(output: Any, but: str | None = None) -> Any:
    """Convert 16-bit tensors to float32, as `_widen` does, also those in a dictionary, which is changed in place unless
    it refuses. The key `but` is left alone."""
    if not isinstance(output, dict) or len(output) > _MOST_ENTRIES:
        return _widen(output)
    for key, member in list(output.items()):
        if key != but and (wide := _widen(member)) is not member:
            try:
                output[key] = wide
            except Exception as error:  # of the user's class
                let_through(error)
    return output


def _widen(value: Any) -> Any:
    """Convert a 16-bit tensor, or those in a plain list or tuple, to float32; return the same object if it has none."""
    if isinstance(value, torch.Tensor):
        return value if value.is_leaf and value.requires_grad else _lengthen(value)
    if type(value) in (list, tuple):
        members = [_lengthen(each) for each in value]
        changed = any(new is not old for new, old in zip(members, value, strict=True))
        return type(value)(members) if changed else value
    return value


def _find(root: torch.nn.Module, name: str) -> tuple[Any, str]:
    """Return the object that has the method, and the method's name."""
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


def is_16_bit_float(value: Any) -> bool:
    """Whether a value is a tensor of 16-bit floating-point numbers."""
    return isinstance(value, torch.Tensor) and value.dtype in (torch.float16, torch.bfloat16)


def _lengthen(value: Any) -> Any:
    return value.float() if is_16_bit_float(value) else value

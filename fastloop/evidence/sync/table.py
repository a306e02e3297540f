"""Which calls make the host wait for the device, their labels, and what to write instead."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch

_READ = "keep the detached tensor and copy many at once, every 50 steps or at the end of the epoch"
_DECIDE = "decide on the device (torch.where, or multiply by a mask), or check only every 50 steps"
_SIZE = "keep sizes and positions as Python numbers from the start, or select on the device with index_select or gather"
_SHAPE = "keep the shape: torch.where(mask, x, 0), or multiply by the mask and divide by its sum"
_MOVE = "create it on the device once and keep it (register_buffer), or copy from pinned memory with non_blocking=True"

_READS = (".item()", ".tolist()", "float(tensor)", "int(tensor)", "complex(tensor)", ".cpu()", ".to('cpu')", ".numpy()")
_TRUTHS = ("bool of a tensor", ".is_nonzero()", "torch.equal", "torch.allclose", "x in tensor")
ADVICE: dict[str, str] = {
    **dict.fromkeys((*_READS, "np.asarray(tensor)", "copy to the host"), _READ),
    **dict.fromkeys(_TRUTHS, _DECIDE),
    **dict.fromkeys(("a tensor as index or size", "index by a 0-d tensor", "a tensor as slice bound"), _SIZE),
    **dict.fromkeys(("boolean mask", "masked_select", "nonzero", "torch.where(mask)"), _SHAPE),
    "printing a tensor": "print every 50 steps, or keep the detached tensor and print it at the end of the epoch",
    "a tensor in an f-string": "format every 50 steps, or keep the detached tensor until the end of the epoch",
    "assignment by boolean mask": "torch.where(mask, new, old), or masked_fill for a single value",
    "unique": "find unique values on the host before the batch is copied, or count with scatter_add",
    "bincount": "count with scatter_add into a tensor of known size",
    "repeat_interleave": "pass output_size",
    "one_hot": "pass num_classes",
    "torch.tensor of tensors": "torch.stack keeps them on the device",
    "torch.tensor on the device": "create it with torch.full or torch.zeros on the device, or keep it as a buffer",
    "copy to the device": _MOVE,
    "linalg with an error check": "the _ex variant (inv_ex, cholesky_ex, solve_ex) does not wait to check for errors",
    "synchronize()": "take it out of the step; time with CUDA events that are read later",
    "barrier()": "take it out of the step: ranks already synchronize in the gradient exchange",
    "self.log(prog_bar=True)": "drop prog_bar: the logger still gets the value, every log_every_n_steps",
    "self.log to a logger": "log on_epoch only, or raise log_every_n_steps",
    "self.log(sync_dist=True)": "on_step=False, on_epoch=True reduces once an epoch; or drop sync_dist in training",
    "self.log of a number": "log a tensor that is on the device already, or a number through self.logger.log_metrics",
    "progress bar": "Trainer(enable_progress_bar=False), or a higher refresh rate",
    "Lightning's SIGTERM check": "nothing in your code: Lightning checks all ranks for a SIGTERM after every batch",
    "loss scaler": "bf16-mixed needs no loss scaler",
    "check for NaN": "detect_anomaly=False outside of debugging",
    "copy of a batch to the device": "pinned memory lets it overlap the step: pin_memory=True in your DataLoader",
    "Lightning callback": "run it less often: every_n_train_steps, every_n_epochs, or its own interval",
}
OUR_ADVICE = "nothing in your code: turn that rung off if it costs more than it saves"
OTHER_ADVICE = "move it out of the step, or do it every 50 steps"

_CALLS: dict[str, str] = {
    "item": ".item()",
    "tolist": ".tolist()",
    "numpy": ".numpy()",
    "cpu": ".cpu()",
    "__array__": "np.asarray(tensor)",
    "__bool__": "bool of a tensor",
    "__int__": "int(tensor)",
    "__float__": "float(tensor)",
    "__complex__": "complex(tensor)",
    "__index__": "a tensor as index or size",
    "__contains__": "x in tensor",
    "is_nonzero": ".is_nonzero()",
    "equal": "torch.equal",
    "allclose": "torch.allclose",
    "__repr__": "printing a tensor",
    "__format__": "a tensor in an f-string",
    "nonzero": "nonzero",
    "argwhere": "nonzero",
    "masked_select": "masked_select",
    "unique": "unique",
    "unique_consecutive": "unique",
    "bincount": "bincount",
    **dict.fromkeys(
        ("inverse", "cholesky", "linalg_inv", "linalg_solve", "linalg_cholesky", "linalg_eigh"),
        "linalg with an error check",
    ),
}
_TEXTS = tuple(
    (re.compile(pattern), what)
    for pattern, what in (
        *((rf"\b{name}\(", what) for name, what in _CALLS.items() if not name.startswith("__")),
        (r"\bfloat\(", "float(tensor)"),
        (r"\bint\(", "int(tensor)"),
        (r"\bprint\(|\brepr\(", "printing a tensor"),
        (r"\brepeat_interleave\(", "repeat_interleave"),
        (r"\bone_hot\(", "one_hot"),
        (r"\.to\(['\"]cpu", ".to('cpu')"),
        (r"\btorch\.(as_)?tensor\(", "torch.tensor on the device"),
        (r"\.(to|cuda)\(", "copy to the device"),
        (r"\bwhere\([^,]*\)", "torch.where(mask)"),
        (r"\bbackward\(|\bgrad\(", "in the backward"),
        (r"\]\s*=[^=]", "assignment by boolean mask"),
        (r"^\s*(if|while|assert|not)\b|[<>]=?|==|!=", "bool of a tensor"),
        (r"\[", "boolean mask"),
    )
)
_LOG_CAUSES = {
    "prog_bar": "self.log(prog_bar=True)",
    "logger": "self.log to a logger",
    "sync_dist": "self.log(sync_dist=True)",
    "number": "self.log of a number",
    "sigterm": "Lightning's SIGTERM check",
    "scaler": "loss scaler",
    "checks": "check for NaN",
    "callback": "Lightning callback",
    "transfer": "copy of a batch to the device",
}


def name_call(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any, on_cuda: bool) -> str | None:
    """The label of a torch call that made the host wait; None if it did not wait.

    On the CPU nothing ever waits: there, calls that would wait on a GPU get a label.
    """
    name = getattr(function, "__name__", "")
    test = _TESTS.get(name)
    what = test(args, kwargs, out, on_cuda) if test is not None else _CALLS.get(name)
    if what is None or not on_cuda or what.startswith("copy to") or name in ("to", "tensor", "as_tensor"):
        return what
    values = (value for arg in args for value in (arg if isinstance(arg, (tuple, list)) else (arg,)))
    return what if any(isinstance(value, torch.Tensor) and value.is_cuda for value in values) else None


def is_known(name: str) -> bool:
    """Whether a function of this name may wait."""
    return name in _CALLS or name in _TESTS


def guess(text: str, through: tuple[str, ...]) -> str:
    """A guess at the label from the line's source and the torch functions below it, if nothing else is known."""
    for function in through:
        if function in _CALLS:
            return _CALLS[function]
    return next((what for pattern, what in _TEXTS if pattern.search(text)), "a synchronization")


def name_cause(kind: str, name: str | None) -> str:
    """The label of a synchronization by the framework; see `call_site.Cause`."""
    if kind == "prog_bar" and name is None:
        return "progress bar"
    return _LOG_CAUSES[kind]


def _is_mask(index: Any) -> bool:
    if isinstance(index, torch.Tensor):
        return index.dtype in (torch.bool, torch.uint8)
    return isinstance(index, list) and bool(index) and isinstance(index[0], bool)


def _get(args: tuple[Any, ...], *_: Any) -> str | None:
    parts = args[1] if isinstance(args[1], tuple) else (args[1],)
    for part in parts:
        if _is_mask(part):
            return "boolean mask"
        if isinstance(part, torch.Tensor) and part.dim() == 0 and not part.is_floating_point():
            return "index by a 0-d tensor"
        if isinstance(part, slice) and any(isinstance(end, torch.Tensor) for end in (part.start, part.stop, part.step)):
            return "a tensor as slice bound"
    return None


def _set(args: tuple[Any, ...], *_: Any) -> str | None:
    what = _get(args)
    if what != "boolean mask":
        return what
    # A Python number becomes a masked fill; see canDispatchToMaskedFill in torch's TensorAdvancedIndexingUtils.h
    return "assignment by boolean mask" if isinstance(args[2], torch.Tensor) else None


def _describe_move(args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any, on_cuda: bool) -> str | None:
    if kwargs.get("non_blocking"):
        return None
    if on_cuda:
        # In `a.copy_(b)` the source is b; in all others it is the tensor they are called on.
        source = next((value for value in reversed(args[:2]) if isinstance(value, torch.Tensor)), None)
        if source is None or not isinstance(out, torch.Tensor) or source.is_cuda == out.is_cuda:
            return None
        return ".to('cpu')" if source.is_cuda else "copy to the device"
    # `x.to(self.device)` is usually no copy on a GPU, and a torch.device argument is mostly this case.
    targets = [value for value in (*args[1:], kwargs.get("device")) if isinstance(value, str)]
    return ".to('cpu')" if any(target.startswith("cpu") for target in targets) else None


def _to(args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any, on_cuda: bool) -> str | None:
    return _describe_move(args[:1] if on_cuda else args, kwargs, out, on_cuda)


def _describe_new_tensor(args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any, on_cuda: bool) -> str | None:
    data = args[0] if args else kwargs.get("data")
    if isinstance(data, (list, tuple)) and data and isinstance(data[0], torch.Tensor):
        return "torch.tensor of tensors" if data[0].is_cuda or not on_cuda else None
    if isinstance(data, torch.Tensor):
        return None
    if on_cuda:
        return "torch.tensor on the device" if out.is_cuda else None
    return "torch.tensor on the device" if isinstance(kwargs.get("device"), torch.device) else None


def _describe_mask(args: tuple[Any, ...], kwargs: Mapping[str, Any], *_: Any) -> str | None:
    return "torch.where(mask)" if len(args) + len(kwargs) == 1 else None


def _describe_repeat(args: tuple[Any, ...], kwargs: Mapping[str, Any], *_: Any) -> str | None:
    by = args[1] if len(args) > 1 else kwargs.get("repeats", args[0])
    return "repeat_interleave" if isinstance(by, torch.Tensor) and kwargs.get("output_size") is None else None


def _describe_one_hot(args: tuple[Any, ...], kwargs: Mapping[str, Any], *_: Any) -> str | None:
    return "one_hot" if kwargs.get("num_classes", args[1] if len(args) > 1 else -1) == -1 else None


_TESTS: dict[str, Callable[[tuple[Any, ...], Mapping[str, Any], Any, bool], str | None]] = {
    "__getitem__": _get,
    "__setitem__": _set,
    "to": _to,
    "cuda": _to,
    "type": _to,
    "copy_": _describe_move,
    "tensor": _describe_new_tensor,
    "as_tensor": _describe_new_tensor,
    "where": _describe_mask,
    "repeat_interleave": _describe_repeat,
    "one_hot": _describe_one_hot,
}

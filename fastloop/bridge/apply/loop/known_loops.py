"""Checks that a run uses Lightning's own loop with a known source, so that `flat_loop` may replace it."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import logging
import operator
from collections.abc import Iterator
from typing import Any

import torch

from fastloop.bridge import namespaces

HOOKS_PER_BATCH = (
    "on_train_batch_start",
    "on_train_batch_end",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
)
"""Hooks of modules and callbacks that are empty unless overridden."""
KNOWN = {
    "d274099d56f95325": "2.5.0 and 2.5.1",
    "02491551a8407987": "2.5.2 and 2.5.3",
    "867be07b2b198fe3": "2.5.4 to 2.5.6",
    "2f31c77b27c07c16": "2.6.0 to 2.6.6",
}
"""Digests of the functions below, and the versions of Lightning that have them."""
_STANDS_FOR = {
    "trainer.call": ("_call_lightning_module_hook", "_call_strategy_hook", "_call_callback_hooks"),
    "core.LightningModule": (
        "_call_batch_hook",
        "_on_before_batch_transfer",
        "_apply_batch_transfer_handler",
        "configure_gradient_clipping",
        "clip_gradients",
        *HOOKS_PER_BATCH,
    ),
    "callbacks.Callback": HOOKS_PER_BATCH,
    "strategies.Strategy": ("batch_to_device",),
    "plugins.precision.Precision": ("clip_gradients", "train_step_context", "forward_context"),
    "plugins.precision.MixedPrecision": ("clip_gradients",),
    "loops.optimization.automatic": ("Closure", "ClosureResult"),
}
_STANDS_FOR_LIVE = {
    "fit_loop.epoch_loop": ("advance", "on_advance_end", "update_lr_schedulers", "_should_accumulate"),
    "fit_loop.epoch_loop.automatic_optimization": (
        "run",
        "_make_closure",
        "_make_step_fn",
        "_make_zero_grad_fn",
        "_make_backward_fn",
        "_optimizer_step",
        "_on_before_zero_grad",
        "_optimizer_zero_grad",
        "_training_step",
    ),
    "_logger_connector": ("on_batch_start", "on_batch_end", "update_train_step_metrics", "log_metrics"),
}
"""Methods of a Trainer's own objects, where a user may have set different ones."""
_MODULES_OWN = ("_call_batch_hook", "_on_before_batch_transfer", "_apply_batch_transfer_handler")
_WRAPPED_BY_PYTHON = contextlib.contextmanager(lambda: iter(())).__code__


def explain_unknown(trainer: Any, module: Any) -> str | None:
    """Why Lightning's own loop must stay; None if the replacement makes no visible difference."""
    space, owner = namespaces.find_namespace(trainer), type(module)
    if not isinstance(trainer.profiler, namespaces.load(space, "profilers.PassThroughProfiler")):
        return f"{trainer.profiler.__class__.__name__} records every hook"  # ours wraps the user's profiler
    if logging.getLogger(f"{space}.trainer.call").isEnabledFor(logging.DEBUG):
        return "Lightning logs each call of a hook"
    if any("__setattr__" in vars(kind) for kind in owner.__mro__[: owner.__mro__.index(torch.nn.Module)]):
        return f"{owner.__name__} defines __setattr__"
    try:
        if (name := next(_list_overrides(trainer, module, space), None)) is not None:
            return f"{name} is overridden"
        digest = _digest(tuple(_list_functions(trainer, space)))
    except (AttributeError, OSError, TypeError) as error:
        return f"the source of Lightning's loop cannot be read: {error}"
    return None if digest in KNOWN else f"fastloop does not know this Lightning version's loop ({digest})"


def _list_functions(trainer: Any, space: str) -> Iterator[Any]:
    for path, names in _STANDS_FOR.items():
        yield from (getattr(namespaces.load(space, path), name) for name in names)
    for path, names in _STANDS_FOR_LIVE.items():
        owner = operator.attrgetter(path)(trainer)
        yield from (getattr(live := getattr(owner, name), "__func__", live) for name in names)


def _list_overrides(trainer: Any, module: Any, space: str) -> Iterator[str]:
    """User code that Lightning's loop would call and ours would not: private methods of the module, changed loops."""
    base = namespaces.load(space, "core.LightningModule")
    for name in _MODULES_OWN:
        if getattr(getattr(module, name), "__func__", None) is not getattr(base, name):
            yield f"{type(module).__name__}.{name}"
    for path in ("fit_loop", *_STANDS_FOR_LIVE):
        owner = operator.attrgetter(path)(trainer)
        if not type(owner).__module__.startswith(f"{space}."):
            yield type(owner).__name__
        yield from (f"{path}.{name}" for name in vars(owner) if inspect.isroutine(getattr(type(owner), name, None)))


@functools.cache
def _digest(functions: tuple[Any, ...]) -> str:
    text = "".join(map(_read_text, functions)).replace("lightning.pytorch", "pytorch_lightning")
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _read_text(function: Any) -> str:
    """The source of a function; raises if it is wrapped, as Python would return the inner function's source."""
    if hasattr(function, "__wrapped__") and getattr(function, "__code__", None) is not _WRAPPED_BY_PYTHON:
        raise TypeError(f"{function.__qualname__} is wrapped")
    return inspect.getsource(function)

"""Finds modules that may implement attention by hand: their own code has a softmax and matrix products."""

from __future__ import annotations

import contextlib
import dis
import types
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch

from fastloop.evidence.samples.sample_code import walk_code

PRODUCTS = frozenset({"matmul", "bmm", "baddbmm", "einsum", "__matmul__"})
SDPA = "scaled_dot_product_attention"
DEPTH = 4
"""Depth to which calls of the module's methods, and of global functions, are followed."""


def list_candidates(model: torch.nn.Module) -> list[str]:
    """List inner modules with a softmax and matrix products in their own code, not only in their submodules."""
    return [name for name, module in model.named_modules() if name and _attends(module)]


def list_sdpa(model: torch.nn.Module) -> list[str]:
    """List modules that call ``scaled_dot_product_attention`` in their own code, and torch's MultiheadAttention."""
    own = (torch.nn.MultiheadAttention,)
    return [name for name, module in model.named_modules() if isinstance(module, own) or SDPA in _read_names(module)]


def list_switchable(model: torch.nn.Module) -> list[str]:
    """List the outermost Hugging Face models that run eager attention and can switch to another one."""
    found: list[str] = []
    inside: set[int] = set()
    for name, module in model.named_modules():
        if id(module) not in inside and callable(getattr(module, "set_attn_implementation", None)):
            inside |= {id(each) for each in module.modules()}
            config = getattr(module, "config", None)
            returns_weights = getattr(config, "output_attentions", False)  # only eager attention returns weights
            if getattr(config, "_attn_implementation", None) == "eager" and not returns_weights:
                found.append(name)
    return found


def switch_models(model: torch.nn.Module) -> list[Any]:
    """Switch these models to ``sdpa`` with their own method; return those that were switched."""
    found: list[Any] = []
    for module in (cast(Any, model.get_submodule(name)) for name in list_switchable(model)):
        with contextlib.suppress(ValueError):  # this model has only eager attention
            module.set_attn_implementation("sdpa")
            found.append(module)
    return found


def switch_back_for_weights(model: Any) -> Callable[[], None]:
    """Switch a model back to eager attention at the first call that requests attention weights; return the undo."""

    def look(_module: Any, _args: Any, kwargs: dict[str, Any]) -> None:
        if kwargs.get("output_attentions") and model.config._attn_implementation == "sdpa":
            model.set_attn_implementation("eager")

    undo = contextlib.ExitStack()
    for module in model.modules():  # users may call the inner model directly
        if hasattr(module, "set_attn_implementation"):
            undo.callback(module.register_forward_pre_hook(look, with_kwargs=True).remove)
    return undo.close


def _attends(module: torch.nn.Module) -> bool:
    names = _read_names(module)
    softmax = "softmax" in names or any(isinstance(each, torch.nn.Softmax) for each in module.children())
    return softmax and bool(PRODUCTS & names)


def _read_names(module: torch.nn.Module) -> frozenset[str]:
    """Return the names that a module's forward uses; ``@`` counts as ``__matmul__``."""
    forward = getattr(type(module), "forward", None)
    if not isinstance(forward, types.FunctionType) or type(module).__module__.startswith("torch.nn."):
        return frozenset()
    return frozenset(_follow(forward, type(module), DEPTH, set()))


def _follow(function: types.FunctionType, kind: type, depth: int, seen: set[types.CodeType]) -> Iterator[str]:
    if function.__code__ in seen:
        return
    seen.add(function.__code__)
    for code in walk_code(function.__code__):
        names = {*code.co_names, *code.co_freevars}
        yield from names
        if any(map(_is_matmul, dis.get_instructions(code))):
            yield "__matmul__"
        for name in names if depth else ():
            called = vars(kind).get(name) or getattr(kind, name, None) or function.__globals__.get(name)
            called = getattr(called, "__func__", called)
            if isinstance(called, types.FunctionType) and not (called.__module__ or "").startswith("torch."):
                yield from _follow(called, kind, depth - 1, seen)


def _is_matmul(step: dis.Instruction) -> bool:
    in_3_10 = step.opname in ("BINARY_MATRIX_MULTIPLY", "INPLACE_MATRIX_MULTIPLY")
    return in_3_10 or (step.opname == "BINARY_OP" and step.argrepr.startswith("@"))

"""Counts the floating-point operations of a step by kind, while the step runs.

Uses a light dispatch mode. ``torch.utils.flop_counter.FlopCounterMode`` installs module hooks and decomposes unknown
operators, so it counts a different step from the one the user runs; this one runs every operator unchanged, looks at
shapes and uses torch's public formulas where they are correct. Where torch would choose another backward because of the
mode, `reforms_backward` says so after the forward.

Recomputation (activation checkpointing, and the scores that a fused attention recomputes in its backward) is counted
separately, so a model has the same count eager, compiled, checkpointed or with fused attention.
Source: https://github.com/pytorch/pytorch/blob/main/torch/utils/flop_counter.py
"""

from __future__ import annotations

import contextlib
import inspect
import re
import sys
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

MOST_NAMES = 5
STEP = "one eager step of this run"
"""Default source of a count."""
_CHECKPOINT, _ENGINE = checkpoint.__file__, torch.autograd.graph.__file__
_PLAIN_NAMESPACES = re.compile(r"aten|prims?|inductor_prims|profiler|c10d|_?c10d_functional|_dtensor|fsdp|symm_mem")
_HEAVY = re.compile(
    r"(?!_thnn_fused)(.*(rnn|lstm|gru)|_?fft_|.*(sparse|int4|int8|grouped|mixed_dtypes|_int_|scaled_|cslt_).*mm"
    r"|sspaddmm|hspmm|_?linalg_(?!vector_norm|cross|diagonal|check)|cholesky|lu_|ormqr|geqrf|triangular_solve"
    r"|matrix_exp|_?(cdist|euclidean_dist|trilinear)|mkldnn_|mkl_|miopen_|fbgemm_|.*attention|_transformer_encoder_layer"
    r"|(linear|bilinear|matmul|einsum|tensordot|conv([123]d|_transpose[123]d?))$)"
)
"""torch's operators that do heavy work: if they have no formula, the count becomes "at least". Those in the last line
arrive undecomposed only from tensor subclasses (jagged ones, for instance)."""


_KEEPS_COMPILED = hasattr(TorchDispatchMode, "ignore_compile_internals")
"""Whether compiled code can run on under a dispatch mode."""
_RUNS_HIGHER_ORDER = hasattr(TorchDispatchMode, "supports_higher_order_operators")
"""Whether flex_attention can run under a dispatch mode; it raises in torch 2.8 and older."""
_REFORMED = ("prod", "cumprod", "masked_fill", "masked_fill_")
"""Operators whose backward torch computes by another formula, with other rounding, under any dispatch mode. Found by
comparing all of torch's operators; the last two only if the value is a tensor."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """Counted floating-point operations; a multiplication and an addition are two."""

    matmul: int = 0
    convolution: int = 0
    attention: int = 0
    recomputed: int = 0
    """Forward work repeated for the backward; not included in the other fields."""
    at_least: bool = False
    """A heavy operator without a formula ran, or a part of the step was not counted."""
    uncounted: tuple[str, ...] = ()
    """Names of such operators, at most five."""
    misaligned: int = 0
    """Part of ``matmul`` in products of 16-bit matrices of which one has rows that are no multiple of 16 bytes."""
    misaligned_size: int = 0
    """The length of such rows in the products with the most operations."""

    @property
    def total(self) -> int:
        """The model's own work, without recomputation."""
        return self.matmul + self.convolution + self.attention

    def per(self, samples: int, source: str = STEP) -> Mapping[str, Any]:
        """This work per sample, in the form of ``Measurement.flops``; ``source`` says where it was counted."""
        if samples <= 0 or not self.total:
            had = "nothing with a formula" if self.uncounted else "no product, convolution or attention"
            what = "part of the step" if self.at_least and not self.uncounted else "step"
            why = f"the counted {what} had {had}" if samples > 0 else "the samples of the counted step are not known"
            has_none = not (self.total or self.uncounted or self.at_least)
            return {"per_sample": None, "source": source, "why": why, "no_products": has_none}
        kinds = {name: getattr(self, name) / samples for name in ("matmul", "convolution", "attention", "recomputed")}
        found = {"per_sample": self.total / samples, **kinds}
        found |= {"at_least": self.at_least, "uncounted": list(self.uncounted), "source": source}
        if self.misaligned:
            found |= {"misaligned": self.misaligned / samples, "misaligned_size": self.misaligned_size}
        return found


class FlopCount(TorchDispatchMode):
    """Counts the operators that run inside ``with``; may be entered repeatedly, and counts cumulatively.

    It also sees the backward, in whichever thread the autograd engine runs it. It changes no operator, installs no
    hooks and holds no tensors. Do not use it together with torch.compile: see ``may_count``.
    """

    supports_higher_order_operators = True  # else flex_attention raises under a mode that does not support it

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.forward: Counter[str] = Counter()
        self.backward: Counter[str] = Counter()
        self.recomputed = 0
        self.ambiguous = False
        """A graph of the backward was built (``create_graph``) in a way that hides which work is recomputation."""
        self.reforms_backward = False
        """The backward of an operator would be computed differently under this mode."""
        self._reforming = set[Any]()
        self._creates_graph = False
        self._uncounted: dict[str, None] = {}
        self._misaligned: Counter[int] = Counter()
        """Operations of misaligned products by the length of a row."""
        self._known: dict[Any, Callable[..., tuple[str, int, int]] | None] = {}
        self._lock = threading.Lock()  # the engine has a thread per device

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        # This keeps compiled code; otherwise one step under a mode disables torch.compile for the rest of the process.
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # True imports torch._dynamo at the first operator, which costs seconds. torch versions without the method above
        # need it: otherwise Dynamo would trace this class if code is compiled under the mode, as flex_attention is.
        return not _KEEPS_COMPILED

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # Inference mode has no autograd layer that would decompose `linear` before this point.
        if torch.is_inference_mode_enabled() and not types and func._can_decompose():
            with self:
                return func.decompose(*args, **kwargs)
        out = func(*args, **kwargs)
        try:
            formula = self._known[func]
        except KeyError:
            formula = self._known[func] = self._find_formula(func)
        if formula is not None:
            self._add(func, formula, args, kwargs, out)
        elif func in self._reforming and isinstance(out, torch.Tensor) and out.is_floating_point():
            self.reforms_backward = self.reforms_backward or torch.is_grad_enabled()
        return out

    @property
    def work(self) -> Work:
        """The work counted so far."""
        both = self.forward + self.backward
        names = tuple(self._uncounted)[:MOST_NAMES]
        return Work(
            matmul=both["matmul"],
            convolution=both["convolution"],
            attention=both["attention"],
            recomputed=self.recomputed,
            at_least=bool(names) or self.ambiguous,
            uncounted=names,
            misaligned=self._misaligned.total(),
            misaligned_size=max(self._misaligned, key=self._misaligned.__getitem__, default=0),
        )

    def per(self, samples: int, source: str = STEP) -> Mapping[str, Any]:
        """The work counted so far, in the form of ``Measurement.flops``; a step without a backward gives no count, for
        instance if ``training_step`` returned None."""
        if self.reforms_backward:
            why = (
                "the backward of prod, cumprod or masked_fill would round differently while its operations are counted"
            )
            return {"per_sample": None, "source": source, "why": why}
        if self.work.total and not self.backward.total():
            return {"per_sample": None, "source": source, "why": "the counted step had no backward"}
        return self.work.per(samples, source)

    def _find_formula(self, func: Any) -> Callable[..., tuple[str, int, int]] | None:
        """The function that counts this operator; None for one that is cheap or cannot be counted."""
        packet = getattr(func, "_overloadpacket", None)
        name = func.__name__ if packet is None else packet.__name__
        namespace = getattr(func, "namespace", "higher_order")
        if name in _REFORMED and getattr(func, "_overloadname", "") != "Scalar":
            self._reforming.add(func)
        if packet in flop_registry or (namespace == "aten" and name in _OWN):
            return _OWN.get(name) or _make_formula(name, flop_registry[packet])
        if packet is None or not _PLAIN_NAMESPACES.fullmatch(namespace) or (namespace == "aten" and _HEAVY.match(name)):
            self._uncounted[f"{namespace}.{name}" if packet is not None else name] = None
        return None

    def _add(self, func: Any, formula: Callable[..., tuple[str, int, int]], args: Any, kwargs: Any, out: Any) -> None:
        try:
            if any(isinstance(value, torch.Tensor) and "sparse" in str(value.layout) for value in args):
                raise ValueError("the formulas are for dense operands")
            kind, flops, again = formula(*args, out_val=out, **kwargs)
            flops, again = int(flops), int(again)
            row = _find_misaligned_row(*args, out) if kind == "matmul" else None
        except Exception:  # counting must never break the step
            self._uncounted[f"{func.namespace}.{func.__name__.split('.')[0]}"] = None
            return
        with self._lock:
            phase = self._find_phase()
            self.recomputed += again
            if phase is None:
                self.recomputed += flops
            else:
                phase[kind] += flops
                if row is not None:
                    self._misaligned[row] += flops

    def _find_phase(self) -> Counter[str] | None:
        """The counter for the current operator; None for recomputation. Reads the stack down to the engine's call."""
        if torch._C._current_graph_task_id() == -1:
            return self.forward
        # The caller of __torch_dispatch__; None if an engine thread called it.
        frame, depth = sys._getframe(2).f_back, 0
        while frame is not None and not (frame.f_code.co_filename == _ENGINE and "engine" in frame.f_code.co_name):
            if frame.f_code.co_filename == _CHECKPOINT:
                return None
            frame, depth = frame.f_back, depth + 1
        if depth and torch.is_grad_enabled():
            # Python code that the engine called and that builds a graph: custom checkpointing. If the whole backward
            # builds one (create_graph), it may also be the backward of a custom Function.
            self.ambiguous = self.ambiguous or self._creates_graph
            return None
        self._creates_graph = self._creates_graph or torch.is_grad_enabled()
        return self.backward


def may_count(module: torch.nn.Module) -> str | None:
    """Why the user's live step must not be counted; None if it may.

    Fused operators are invisible, and in older torch one step under a dispatch mode disables torch.compile for the rest
    of the process. In newer torch, graphs that fastloop's own calls run operator by operator count like eager code.
    Call this after at least one whole step, because a function under ``torch.compile`` is visible only after it has
    run. A disposable process counts under ``torch.compiler.set_stance("force_eager")`` instead. In the user's process
    that does not work for later fits either: there is no way to know in advance whether a function compiled earlier
    takes part in the step, and if one does, other code would compute the step, with other rounding and the memory use
    of eager mode.
    """
    shown = 0
    for name, part in module.named_modules():
        where = f"`{name}`" if name else "the module"
        call: Any = getattr(part, "_compiled_call_impl", None)
        if _KEEPS_COMPILED and getattr(call, "shows_operators", False):
            shown += call.graphs
        elif call is not None or type(part).__name__ == "OptimizedModule":
            return f"{where} is compiled: fused operators cannot be counted, and counting may turn torch.compile off"
        if str(getattr(vars(part).get("forward"), "__module__", "")).startswith("torch.cuda.graphs"):
            return f"{where} replays a CUDA graph, whose operators are not visible"
    if not _RUNS_HIGHER_ORDER and _mentions(module, r"flex_attention\s*\("):
        return "this version of torch cannot run flex_attention while operators are counted"
    if not getattr(module, "automatic_optimization", True) and _mentions(module, r"prod\s*\("):
        return "training_step runs its own backwards, and one through prod or cumprod would round differently"
    dynamo = sys.modules.get("torch._dynamo.utils")
    counters = getattr(dynamo, "counters", None) or {}
    others = shown == 0 or counters["stats"]["unique_graphs"] > shown
    if others and any(counters[name] for name in ("stats", "frames") if name in counters):
        return "torch.compile is in use: fused operators cannot be counted, and counting may turn it off"
    if torch.cuda._initialized and torch.cuda.is_current_stream_capturing():
        return "a CUDA graph is being captured"
    return None


def _find_misaligned_row(*values: Any) -> int | None:
    """The length of a row, in elements, of the first 16-bit matrix whose rows are no multiple of 16 bytes."""
    matrices = (each for each in values if isinstance(each, torch.Tensor) and each.dim() > 1 and each.itemsize == 2)
    rows = (max(each.stride()[-2:]) for each in matrices)
    return next((row for row in rows if row > 1 and row % 8), None)  # 1: a single column


def _mentions(module: torch.nn.Module, pattern: str) -> bool:
    """Whether the pattern occurs in the code of the user's modules."""
    kinds = {
        type(part) for part in module.modules() if not type(part).__module__.startswith(("torch.", "torchmetrics."))
    }
    for kind in kinds:
        with contextlib.suppress(OSError, TypeError):  # it has no source
            if re.search(pattern, inspect.getsource(kind)):
                return True
    return False


def _make_formula(name: str, formula: Callable[..., int]) -> Callable[..., tuple[str, int, int]]:
    kind = "attention" if "attention" in name else "convolution" if "conv" in name else "matmul"

    def count(*args: Any, **kwargs: Any) -> tuple[str, int, int]:
        flops = formula(*args, **kwargs)
        # One of the five products of such a backward recomputes the scores.
        again = flops // 5 if kind == "attention" and name.endswith("backward") else 0
        return kind, flops - again, again

    return count


def _count_attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> tuple[str, int, int]:
    """Queries [B, H, S, D], keys [B, h, T, D], values [B, h, T, V]; torch's formula rejects h < H (grouped queries)."""
    scores = 2 * prod(query.shape[:-1]) * key.shape[-2]
    return "attention", scores * (query.shape[-1] + value.shape[-1]), 0


def _count_attention_backward(_grad: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> tuple[str, int, int]:
    _kind, forward, _again = _count_attention(query, key, value)
    return "attention", 2 * forward, 2 * prod(query.shape) * key.shape[-2]


def _count_convolution_backward(grad: Any, x: Any, weight: Any, *rest: Any, **_: Any) -> tuple[str, int, int]:
    """Each gradient costs as much as the forward; torch's formula multiplies grouped ones by the groups."""
    _bias, _stride, _padding, _dilation, transposed, _output_padding, _groups, output_mask = rest
    forward = 2 * x.shape[0] * prod((x if transposed else grad).shape[2:]) * prod(weight.shape)
    return "convolution", forward * (bool(output_mask[0]) + bool(output_mask[1])), 0


def _count_inner(a: Any, *_: Any, **__: Any) -> tuple[str, int, int]:
    """Dot product, and matrix [M, K] by vector [K]."""
    return "matmul", 2 * prod(a.shape), 0


def _count_added(_start: Any, a: Any, b: Any, *_: Any, **__: Any) -> tuple[str, int, int]:
    return "matmul", 2 * prod(a.shape) * (b.shape[-1] if b.dim() > 1 else 1), 0


_FUSED = (
    "flash_attention",
    "efficient_attention",
    "cudnn_attention",
    "flash_attention_for_cpu",
    "fused_attention_overrideable",
)
_OWN: dict[str, Callable[..., tuple[str, int, int]]] = {
    **{f"_scaled_dot_product_{kind}": _count_attention for kind in _FUSED},
    **{f"_scaled_dot_product_{kind}_backward": _count_attention_backward for kind in _FUSED},
    "convolution_backward": _count_convolution_backward,
    "dot": _count_inner,
    "vdot": _count_inner,
    "mv": _count_inner,
    "addmv": _count_added,
    "addbmm": _count_added,
    "_addmm_activation": _count_added,
}
"""Formulas that torch lacks, or has wrong for some shapes."""

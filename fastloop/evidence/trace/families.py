"""Assigns a kernel or an operator to a family of work, by its name.

The order of the rules matters: cuDNN calls a fused attention kernel `cudnn_..._sdpa_..._wgmma`, a batch normalization
`cudnn::bn_fw_...`, a convolution `..._implicit_gemm_...`, so the narrower family is tested first. Names of cuBLAS'
newer matrix products (`nvjet_...`) do not describe them.
"""

from __future__ import annotations

import re
from functools import lru_cache

_KERNELS = (
    ("nccl", r"nccl|nvshmem|(one|two)_shot_all_?reduce|multimem_"),
    ("copy", r"^mem(cpy|set)|copy_kernel|catarraybatchedcopy"),
    ("attention", r"flash|fmha|sdpa|attention|attn"),
    (
        "optimizer",
        r"multi_?tensor|fused_?(adam|sgd|adagrad|lamb|lion)|amp_(non_finite|update_scale)"
        r"|(?<![a-z])(adamw?|sgd|adagrad|rmsprop|lamb|lion|muon)(?![a-z])",
    ),
    (
        "normalisation",
        r"(batch|layer|group|instance|rms)_?norm|welford|rowwisemoments|gammabeta|cucompute(grad|part)"
        r"|(?<![a-z0-9])bn_|_bn_(fw|bw)",
    ),
    ("elementwise", r"softmax|pooling|max_?pool|avg_?pool|dropout"),
    (
        "convolution",
        r"conv(?!ert)|cudnn|implicit|winograd|[dw]grad|fprop|im2col|col2im|nchwtonhwc|nhwctonchw"
        r"|depthwise",
    ),
    ("gemm", r"gemm|gemv|cutlass|cublas|xmma|wgmma|nvjet|splitk|matmul|cijk_|(?<![a-z])dot_kernel"),
    (
        "elementwise",
        r"elementwise|pointwise|reduce|at::native|at_cuda_detail|cub::|thrust|index|gather|scatter"
        r"|embedding|fill|scan|sort|loss|foreach|triton",
    ),
)

_TRITON = (
    ("optimizer", r"^triton_for_|_(fused_)?(adam|adamw|sgd)(_|$)"),
    ("attention", r"attention|sdpa|flex"),
    ("convolution", r"^triton_tem_.*conv"),
    ("gemm", r"^triton_tem_|^triton_mm|_splitk"),
    ("normalisation", r"(batch|layer|group|instance|rms)_?norm"),
    ("copy", r"^(triton_[a-z]+|cpp)_fused_+(to_copy|clone|copy|cat|view|permute|transpose|t|_)+_*\d*$"),
)
"""An Inductor pointwise kernel is named after every operator it contains: `triton_poi_fused_convolution_relu` adds the
bias. Only Inductor's templates (`tem`) multiply or convolve."""

_OPERATORS = (
    ("nccl", r"^(c10d::|nccl:|gloo:|_c10d_functional::)"),
    ("attention", r"attention"),
    ("optimizer", r"::_(foreach|fused_(adam|sgd|adagrad))|optimizer\.step"),
    ("convolution", r"^(aten|mkldnn)::\w*conv(?!ert)"),
    ("normalisation", r"(batch|layer|group|instance|rms)_norm"),
    (
        "gemm",
        r"^\w+::_?(addmm|mm|bmm|baddbmm|addbmm|matmul|linear|mv|addmv|addr|dot|vdot|einsum|scaled_mm|int_mm"
        r"|mkldnn_linear|_?linear_pointwise\w*|linear_backward|mkl_linear)_?$",
    ),
    ("copy", r"^aten::(copy_|_to_copy|to|clone|contiguous|cat|stack|_copy_from\w*|pin_memory|_pin_memory)$"),
    (
        "other",
        r"^aten::(view|_unsafe_view|reshape|_reshape_alias|t|transpose|permute|as_strided|expand|select|slice"
        r"|unsqueeze|squeeze|detach_?|empty\w*|new_empty\w*|resize_|alias|narrow|flatten|unflatten|chunk|split"
        r"|lift_fresh|result_type|is_nonzero|item|_local_scalar_dense|numpy_T|unbind|set_)$",
    ),
    ("elementwise", r"^(aten|prims|torchvision|mkldnn|quantized|inductor|profiler_custom)::"),
)


def _compile_rules(rules: tuple[tuple[str, str], ...]) -> tuple[tuple[str, re.Pattern[str]], ...]:
    return tuple((family, re.compile(pattern, re.IGNORECASE)) for family, pattern in rules)


_KERNEL_RULES, _TRITON_RULES, _OPERATOR_RULES = map(_compile_rules, (_KERNELS, _TRITON, _OPERATORS))


@lru_cache(maxsize=65536)
def classify_kernel(name: str) -> str:
    """Family of a device kernel, a copy or a fill; one of ``measurement.FAMILIES``."""
    if name.startswith(("triton_", "cpp_fused")):
        return _find_first(_TRITON_RULES, name, "elementwise")
    return _find_first(_KERNEL_RULES, name, "other")


@lru_cache(maxsize=65536)
def classify_operator(name: str) -> str:
    """Family of an operator that ran on the CPU, for its self time, excluding the operators it called."""
    if name.startswith("cpp_fused"):
        return _find_first(_TRITON_RULES, name, "elementwise")
    return _find_first(_OPERATOR_RULES, name, "other")


_SOFTMAX = re.compile(r"(?<!log)(?<!log_)softmax", re.IGNORECASE)
_OF_LOSS = re.compile(r"log_?softmax|softmax_warp_\w+<[^>]*?, \d+, true", re.IGNORECASE)
"""torch uses its warp kernel for both: the first flag marks log_softmax."""


@lru_cache(maxsize=65536)
def is_softmax(name: str) -> bool:
    """Whether a device kernel is a softmax as in attention, and not that of a loss."""
    return bool(_SOFTMAX.search(name)) and not _OF_LOSS.search(name) and classify_kernel(name) != "attention"


def _find_first(rules: tuple[tuple[str, re.Pattern[str]], ...], name: str, default: str) -> str:
    return next((family for family, pattern in rules if pattern.search(name)), default)

"""What can be switched on: rungs that are off, apply to what was measured, and are not there already.

Nobody is told to switch on what is on. A rung that is on and had no effect is said to have had none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from fastloop.diagnose.reading import families, kernels, micro_batches, number, precision
from fastloop.measurement import Measurement

NO_EFFECT = {False: "is on but did not take (its verdict says why)", None: "is on, and nothing shows that it took"}
MOST_TIMES_LARGER = 8
"""A micro-batch is not proposed to grow by more than this at once: its activations have to fit."""

DOES = {
    "pin": "pinned memory lets the copy engine read it directly",
    "prefetch": "prefetch copies the next batches beside the running step",
    "batch": "larger micro-batches at the same global batch launch fewer and larger kernels",
    "amp": "bf16 runs matrix products on the tensor cores and moves half the bytes",
    "layout": "channels_last spares the convolutions their transposes",
    "fused": "one fused kernel updates all parameters",
    "compile": "compiling merges elementwise kernels: fewer launches, less traffic",
    "overlap": "the rung's bucket settings can hide more of the exchange behind the backward",
}


class Remedy(NamedTuple):
    """A patch, or None, and the words for it."""

    patch: Mapping[str, Any] | None
    says: str


def choose(seen: Measurement, enabled: tuple[str, ...], rungs: Sequence[str], instead: str, *,
           together: bool = False) -> Remedy:  # fmt: skip
    """The first of these rungs that is off and applies, or with `together` all that are; else what to do instead."""
    free = [rung for rung in rungs if available(seen, enabled, rung)]
    if free:
        free = free if together else free[:1]
        return Remedy({"rungs": {rung: settings(seen, rung) for rung in free}}, "; ".join(DOES[rung] for rung in free))
    idle = [f"{rung} {NO_EFFECT[took(seen, rung)]}" for rung in rungs if rung in enabled and not took(seen, rung)]
    return Remedy(None, f"no rung helps: {'; '.join([*idle, instead])}")


def available(seen: Measurement, enabled: tuple[str, ...], rung: str) -> bool:
    """Whether a rung is off, can apply here as far as was seen, and is not what the script does anyway."""
    return rung not in enabled and APPLIES[rung](seen)


def settings(seen: Measurement, rung: str) -> dict[str, Any]:
    """A rung's fields in a patch."""
    if rung != "batch":
        return {"enabled": True}
    assert seen.micro_batch
    times = min(micro_batches(seen), MOST_TIMES_LARGER)
    return {"enabled": True, "micro_batch": seen.micro_batch * times}


def took(seen: Measurement, rung: str) -> bool | None:
    """Whether an enabled rung left evidence of an effect; None where nothing tells."""
    found = seen.evidence.get("loader" if rung == "workers" else rung) or {}
    key = next((key for key in TELLING[rung] if found.get(key) is not None), None)
    return None if key is None else found[key] not in (0, False, "torch.float32", "highest")


def _loader(seen: Measurement) -> Mapping[str, Any]:
    return seen.evidence.get("loader") or {}


def _own(seen: Measurement, what: str) -> bool:
    """Whether the user's own script already does this."""
    return bool((seen.evidence.get("model") or {}).get(what))


def _compiled(seen: Measurement) -> bool:
    names = [str(kernel.get("name")) for kernel in (kernels(seen) or {}).get("top") or ()]
    return _own(seen, "compiled") or any(name.startswith("triton") for name in names)


def _convolves(seen: Measurement) -> bool:
    counted = number(seen.flops.get("convolution")) or number((seen.evidence.get("model") or {}).get("convs"))
    return bool(counted or families(seen).get("convolution"))


def _on_gpu(seen: Measurement) -> bool:
    return seen.device == "cuda"


APPLIES: Mapping[str, Callable[[Measurement], bool]] = {
    "workers": lambda seen: _loader(seen).get("num_workers") == 0 and bool(_loader(seen).get("map_style")),
    "pin": lambda seen: _on_gpu(seen) and _loader(seen).get("num_workers") is not None
                        and not _loader(seen).get("pin_memory"),
    "prefetch": _on_gpu,
    "batch": lambda seen: micro_batches(seen) > 1,
    "amp": lambda seen: _on_gpu(seen) and precision(seen) in ("fp32", "tf32"),
    "layout": lambda seen: _on_gpu(seen) and _convolves(seen) and not _own(seen, "channels_last"),
    "fused": lambda seen: _on_gpu(seen) and not _own(seen, "fused"),
    "compile": lambda seen: _on_gpu(seen) and not _compiled(seen),
    "overlap": lambda seen: seen.world_size > 1,
}  # fmt: skip
TELLING: Mapping[str, tuple[str, ...]] = {
    "workers": ("num_workers",), "pin": ("pinned_tensors",), "prefetch": ("ahead_batches",),
    "batch": ("changed_steps",), "amp": ("dtype", "matmul_precision"), "layout": ("channels_last_convs",),
    "fused": ("fused_groups",), "compile": ("graphs",), "overlap": ("gradient_as_bucket_view", "bucket_cap_mb"),
}  # fmt: skip
"""Per rung the evidence that tells whether it took. The judge is the rung's own `verify`; this is for a hint."""

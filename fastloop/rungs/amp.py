"""Mixed precision: run matrix work in bfloat16, float16 or TF32 on the tensor cores.

Faster because  tensor cores multiply bf16 many times as fast as fp32, and activations take half the bytes.
Costs           rounding: results differ from fp32 in the third digit; 16-mixed needs a loss scaler.
Don't use when  the loss subtracts nearly equal numbers, or the step is not device-bound.
Evidence        the dtype of a matrix product inside your own training_step; the matmul flag for tf32
Source          https://docs.pytorch.org/docs/stable/amp.html
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from fastloop.errors import NotApplicable
from fastloop.records.card import DEVICE, Card, ClimbState, Variant
from fastloop.records.facts import Facts
from fastloop.records.measurement import Measurement
from fastloop.records.plan import Action, Applied, Change, Site, Undo, Verdict
from fastloop.records.readings import on_gpu, precision

DTYPES = {"bf16-mixed": "torch.bfloat16", "16-mixed": "torch.float16"}


def _variants(state: ClimbState) -> Iterator[Variant]:
    """TF32 is for those whom bfloat16 breaks."""
    yield Variant()
    if state.on_cuda and state.ended.get("amp") in ("parity", "crashed"):
        yield Variant(name="tf32", settings=({"mode": "tf32"},))


CARD = Card(
    family="compute",
    does="bf16 runs matrix products on the tensor cores and moves half the bytes",
    evidence={"dtype": "torch.float32", "matmul_precision": "highest"},
    answers={"fp32_math": 1, "32-bit_math": 1, "memory_bound": 3, "memory_bound:convolutions": 1, DEVICE: 1},
    applies=lambda seen: on_gpu(seen) and precision(seen) in ("fp32", "tf32"),
    variants=_variants,
    plan_shows_refusal=True,
    owns_trainer_keys={"precision": "mode"},
)
"""What other files know of this rung."""


@dataclass(frozen=True, kw_only=True)
class Amp:
    """Lightning's own mixed-precision plugin, or TF32 for float32 matrix products."""

    enabled: bool = False
    mode: Literal["bf16-mixed", "16-mixed", "tf32"] = "bf16-mixed"

    def plan(self, facts: Facts) -> Change:
        """Ask for the precision plugin, unless the user already chose a precision."""
        if facts.own_precision:
            raise NotApplicable(f"the Trainer already runs precision {facts.precision}; your choice stands")
        if self.mode == "tf32":
            return self._plan_tf32(facts)
        if facts.autocasts:
            raise NotApplicable(f"{', '.join(facts.autocasts)} enters autocast itself; precision has one owner")
        if not facts.plain_gradients:
            raise NotApplicable(f"{facts.strategy} has its own precision handling; write Trainer(precision=…) instead")
        if facts.device == "mps":
            raise NotApplicable("mixed precision is not tested on mps")
        notes = []
        if facts.device == "cuda" and self.mode == "bf16-mixed" and (facts.compute_capability or (8, 0)) < (8, 0):
            notes.append(f"{facts.device_name} only emulates bfloat16: slower; 16-mixed suits it")
        return Change(
            wants={"precision.plugin": self.mode},
            actions=(Action(when="model", do=self._set_precision),),
            parity="approximate",
            notes=tuple(notes),
            evaluation=True,
            facts={"precision": self.mode},
            rehearse="modules",
        )

    def _set_precision(self, site: Site) -> Applied:
        """Put Lightning's plugin in, and note the dtype of a matrix product inside the user's training_step."""
        dtypes: list[str] = []
        undo_plugin, undo_attention = site.set_precision(self.mode), _keep_cudnn_out(site)
        site.note_in_step(lambda: dtypes.append(product_dtype(site.device)))

        def undo() -> None:
            undo_plugin()
            if undo_attention is not None:
                undo_attention()

        seen = {"cudnn_attention": False} if undo_attention is not None else {}
        return Applied(undo=undo, probe=lambda: {"dtype": dtypes[0] if dtypes else None, **seen})

    def _plan_tf32(self, facts: Facts) -> Change:
        if facts.device != "cuda":
            raise NotApplicable(f"tf32 needs CUDA; this run is on {facts.device}")
        if (facts.compute_capability or (8, 0)) < (8, 0):
            raise NotApplicable(f"{facts.device_name} has no TF32 (compute capability 8.0 and later have)")
        return Change(
            actions=(Action(keys=("torch.matmul_precision",), when="model", do=_allow_tf32),),
            parity="approximate",
            evaluation=True,
            rehearse="modules",
        )

    def verify(self, seen: Measurement) -> Verdict:
        """Taken when a matrix product inside the user's training_step had the planned dtype."""
        evidence = seen.evidence.get("amp", {})
        if self.mode == "tf32":
            found = evidence.get("matmul_precision")
            return Verdict(took=None if found is None else found == "high", why=f"float32 matmul precision was {found}")
        dtype = evidence.get("dtype")
        if dtype is None:
            return Verdict(took=None, why="no training_step ran")
        why = f"matrix products in training_step ran in {dtype}"
        if evidence.get("cudnn_attention") is False:
            why += ", attention without cuDNN: it plans anew for each length"
        return Verdict(took=dtype == DTYPES[self.mode], why=why)


def product_dtype(device: Any) -> str:
    """Dtype of a 1x1 matrix product of float32 numbers here and now: what autocast makes of it."""
    import torch

    one = torch.ones(1, 1, device=device)
    return str((one @ one).dtype)


def _keep_cudnn_out(site: Site) -> Undo | None:
    """Where batches vary in size, take cuDNN's attention out of the choice, and let the next best kernel run.

    In 16-bit precisions torch prefers it, and for each size that it has not seen it makes a plan of its own: 130 ms a
    step on an H200 for a BERT whose batches are padded to their longest sentence. Of 32-bit tensors it takes none.
    """
    import torch

    if site.device.type != "cuda" or not any(site.changed_sizes):
        return None
    if not torch.backends.cuda.cudnn_sdp_enabled():  # type: ignore[no-untyped-call]
        return None
    torch.backends.cuda.enable_cudnn_sdp(False)
    return lambda: torch.backends.cuda.enable_cudnn_sdp(True)


def _allow_tf32(_site: Site | None) -> Applied:
    """Allow TF32 in float32 matrix products; the flag is global to the process, so the undo matters."""
    import torch

    before = torch.get_float32_matmul_precision()
    if before != "highest":
        raise NotApplicable(f"float32 matmul precision is already {before!r}; your choice stands")
    torch.set_float32_matmul_precision("high")

    def probe() -> Mapping[str, Any]:
        return {"matmul_precision": torch.get_float32_matmul_precision()}

    return Applied(undo=lambda: torch.set_float32_matmul_precision(before), probe=probe)

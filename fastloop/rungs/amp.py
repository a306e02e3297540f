"""Run matrix math in bfloat16, float16 or TF32 on the tensor cores.

Faster because  tensor cores multiply bf16 many times faster than fp32, and activations take half the bytes.
Costs           rounding: results differ from fp32 in the third digit; 16-mixed needs a loss scaler. bf16-true and
                16-true also round the weights, and lose updates that are small relative to them.
Don't use when  the step is not device-bound. If a loss subtracts nearly equal numbers, list it in keep_fp32.
Evidence        the dtype of a matrix product inside your own training_step; the matmul flag for tf32
Source          https://docs.pytorch.org/docs/stable/amp.html
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from fastloop.errors import NotApplicable
from fastloop.records.card import DEVICE, Card, ClimbState, Variant
from fastloop.records.facts import Facts
from fastloop.records.measurement import Measurement
from fastloop.records.plan import Action, Applied, Change, Site, Verdict
from fastloop.records.readings import on_gpu, read_precision


def _list_variants(state: ClimbState) -> Iterator[Variant]:
    """Try bfloat16; try TF32 only if bfloat16 failed."""
    yield Variant()
    if state.on_cuda and state.ended.get("amp") in ("parity", "crashed"):
        yield Variant(name="tf32", settings=({"mode": "tf32"},))


CARD = Card(
    family="compute",
    does="bf16 runs matrix products on the tensor cores and moves half the bytes",
    answers={"fp32_math": 1, "32-bit_math": 1, "memory_bound": 3, "memory_bound:convolutions": 1, DEVICE: 1},
    applies=lambda seen: on_gpu(seen) and read_precision(seen) in ("fp32", "tf32"),
    variants=_list_variants,
    plan_shows_refusal=True,
    owns_trainer_keys={"precision": "mode"},
    explains=dict.fromkeys(
        ("BFloat16", "c10::Half", " Half", "unsafe to autocast"),
        "under rungs.amp layers return 16-bit tensors: call .float() on them there, list that method or module in"
        " rungs.amp.keep_fp32, or write rungs.amp.enabled: false",
    ),
)


FIRST_CALL_S = 0.25
"""Seconds that CUDA takes to load and plan other kernels: 0.2 to 0.4 s for small networks on an H200."""


@dataclass(frozen=True, kw_only=True)
class Amp:
    """Lightning's own precision plugins, or TF32 for float32 matrix products."""

    enabled: bool = False
    mode: Literal["bf16-mixed", "16-mixed", "bf16-true", "16-true", "tf32"] = "bf16-mixed"
    keep_fp32: tuple[str, ...] = ()
    """Modules and methods of the LightningModule that stay in float32 under mixed precision, such as compute_loss."""
    cache_weights: bool = False
    """Under mixed precision, cast each weight once per training_step instead of at each use. For modules that are
    called in a loop."""

    def plan(self, facts: Facts) -> Change:
        """Request the precision plugin, unless the user already chose a precision."""
        if facts.own_precision:
            raise NotApplicable(f"the Trainer already uses precision {facts.precision}; your choice stands")
        is_mixed = self.mode.endswith("-mixed")
        if (self.keep_fp32 or self.cache_weights) and not is_mixed:
            raise NotApplicable(f"keep_fp32 and cache_weights are for mixed precision, not for mode {self.mode}")
        if self.mode == "tf32":
            return self._plan_tf32(facts)
        self._refuse_16_bits(facts, is_mixed=is_mixed)
        return Change(
            wants={"precision.plugin": self.mode},
            actions=(Action(when="model", do=self._set_precision),),
            parity="approximate" if is_mixed else "changes-training",
            notes=tuple(self._list_notes(facts, is_mixed=is_mixed)),
            evaluation=True,
            facts={"precision": self.mode},
            rehearse="modules" if is_mixed else None,  # with true precision, optimizers hold the converted weights
            check=_refuse_line_search if is_mixed else None,
            first_call_s=FIRST_CALL_S if facts.device == "cuda" else 0.0,
            only_device=True,
        )

    def _refuse_16_bits(self, facts: Facts, *, is_mixed: bool) -> None:
        if facts.autocasts:
            raise NotApplicable(f"{', '.join(facts.autocasts)} enters autocast itself; your choice stands")
        if not facts.plain_gradients:
            raise NotApplicable(f"{facts.strategy} has its own precision handling; write Trainer(precision=…) instead")
        refused, kept = set(facts.refused_losses), set(self.keep_fp32)
        if is_mixed and facts.device == "cuda" and refused > kept:  # other names in keep_fp32 may enclose these losses
            raise NotApplicable(
                f"{min(refused - kept)} computes binary_cross_entropy, which torch refuses under autocast: use"
                " binary_cross_entropy_with_logits on outputs without sigmoid, or list it in keep_fp32"
            )
        if unseen := facts.own_line_searches if is_mixed else facts.line_searches:
            raise NotApplicable(f"{unseen[0]} may create an LBFGS optimizer, which can diverge on 16-bit losses")
        if self.mode == "16-mixed" and facts.handles_grads:
            raise NotApplicable(f"{facts.handles_grads[0]} reads gradients before they are unscaled; use bf16-mixed")
        if facts.device == "mps":
            raise NotApplicable("mixed precision is not tested on mps")

    def _list_notes(self, facts: Facts, *, is_mixed: bool) -> Iterator[str]:
        is_bf16 = "bf16" in self.mode
        if not is_mixed:
            lost = "bfloat16: updates below 1/256" if is_bf16 else "float16: updates below 1/2048"
            yield f"weights are also {lost} of a weight are lost; {self.mode.replace('true', 'mixed')} keeps them"
            if facts.micro_batches or facts.accumulate > 1:
                yield "the gradients of the batches of a step are summed in 16 bits"
        if facts.device == "cuda" and is_bf16 and (facts.compute_capability or (8, 0)) < (8, 0):
            yield f"{facts.device_name} only emulates bfloat16: slower; use 16-mixed"

    def _set_precision(self, site: Site) -> Applied:
        """Install Lightning's plugin, and record the dtype of a matrix product inside the user's training_step."""
        from fastloop.feeds.lower_precision import keep_cudnn_out, keep_in_float32, read_product_dtype

        dtypes, called = list[str](), set[str]()
        with ExitStack() as undos:
            for name in self.keep_fp32:
                undos.callback(keep_in_float32(site.module, name, site.device.type, called.add))
            undos.callback(site.set_precision(self.mode, cache_weights=self.cache_weights))
            if (undo_attention := keep_cudnn_out(site)) is not None:
                undos.callback(undo_attention)
            undo = undos.pop_all().close
        site.note_in_step(lambda: dtypes.append(read_product_dtype(site.device, site.module)))

        def probe() -> Mapping[str, Any]:
            return {
                "dtype": dtypes[0] if dtypes else None,
                "cudnn_attention": None if undo_attention is None else False,
                "never_called": [name for name in self.keep_fp32 if name not in called],
            }

        return Applied(undo=undo, probe=probe)

    def _plan_tf32(self, facts: Facts) -> Change:
        if facts.device != "cuda":
            raise NotApplicable(f"tf32 needs CUDA; this run is on {facts.device}")
        if (facts.compute_capability or (8, 0)) < (8, 0):
            raise NotApplicable(f"{facts.device_name} has no TF32 (it needs compute capability 8.0 or later)")
        action = Action(keys=("torch.matmul_precision",), when="model", do=_allow_tf32)
        return Change(actions=(action,), parity="approximate", evaluation=True, rehearse="modules")

    def verify(self, seen: Measurement) -> Verdict:
        """The rung took effect if a matrix product inside the user's training_step had the planned dtype."""
        evidence = seen.evidence.get("amp", {})
        if self.mode == "tf32":
            found = evidence.get("matmul_precision")
            return Verdict(took=None if found is None else found == "high", why=f"float32 matmul precision was {found}")
        if (dtype := evidence.get("dtype")) is None:
            return Verdict(took=None, why="no training_step ran")
        why = f"matrix products in training_step ran in {dtype}"
        if evidence.get("cudnn_attention") is False:
            why += ", attention without cuDNN: it replans for each length"
        if never := evidence.get("never_called"):
            why += f"; kept in float32, but never called: {', '.join(never)}"
        elif self.keep_fp32:
            why += f", those of {', '.join(self.keep_fp32)} in torch.float32"
        return Verdict(took=dtype == ("torch.bfloat16" if "bf16" in self.mode else "torch.float16"), why=why)


def _refuse_line_search(site: Site) -> None:
    for optimizer in site.optimizers:
        if any(base.__name__ == "LBFGS" for base in type(optimizer).__mro__):
            raise NotApplicable("the optimizer is LBFGS, which can diverge on 16-bit losses")


def _allow_tf32(_site: Site | None) -> Applied:
    """Allow TF32 in float32 matrix products; the flag is global to the process, so the undo matters."""
    import torch

    before = torch.get_float32_matmul_precision()
    if before != "highest":
        raise NotApplicable(f"float32 matmul precision is already {before!r}; your choice stands")
    torch.set_float32_matmul_precision("high")
    undo = partial(torch.set_float32_matmul_precision, before)
    return Applied(undo=undo, probe=lambda: {"matmul_precision": torch.get_float32_matmul_precision()})

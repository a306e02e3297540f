"""Mixed precision: run matrix work in bfloat16, float16 or TF32 on the tensor cores.

Faster because  tensor cores multiply bf16 many times as fast as fp32, and activations are half the bytes.
Costs           rounding: results differ from fp32 in the third digit; 16-mixed needs a loss scaler.
Don't use when  the loss subtracts nearly equal numbers, or the step is not device-bound.
Evidence        the dtype a matrix product has inside your own training_step; the matmul flag for tf32
Source          https://docs.pytorch.org/docs/stable/amp.html
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from fastloop.errors import NotApplicable
from fastloop.measurement import Measurement
from fastloop.records import Action, Applied, Change, Facts, Verdict

DTYPES = {"bf16-mixed": "torch.bfloat16", "16-mixed": "torch.float16"}


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
            raise NotApplicable(f"{facts.strategy} brings a precision of its own; write Trainer(precision=…) instead")
        if facts.device == "mps":
            raise NotApplicable("mixed precision is not tested on mps")
        notes = []
        if facts.device == "cuda" and self.mode == "bf16-mixed" and (facts.compute_capability or (8, 0)) < (8, 0):
            notes.append(f"{facts.device_name} only emulates bfloat16: slower; 16-mixed suits it")
        return Change(wants={"precision.plugin": self.mode}, parity="approximate", notes=tuple(notes), evaluation=True,
                      facts={"precision": self.mode})  # fmt: skip

    def _plan_tf32(self, facts: Facts) -> Change:
        if facts.device != "cuda":
            raise NotApplicable(f"tf32 needs CUDA; this run is on {facts.device}")
        if (facts.compute_capability or (8, 0)) < (8, 0):
            raise NotApplicable(f"{facts.device_name} has no TF32 (compute capability 8.0 and later have)")
        return Change(actions=(Action(keys=("torch.matmul_precision",), when="model", do=_allow_tf32),),
                      parity="approximate", evaluation=True)  # fmt: skip

    def verify(self, seen: Measurement) -> Verdict:
        """Taken when a matrix product inside the user's training_step had the planned dtype."""
        evidence = seen.evidence.get("amp", {})
        if self.mode == "tf32":
            found = evidence.get("matmul_precision")
            return Verdict(took=None if found is None else found == "high", why=f"float32 matmul precision was {found}")
        dtype = evidence.get("dtype")
        if dtype is None:
            return Verdict(took=None, why="no training_step ran")
        return Verdict(took=dtype == DTYPES[self.mode], why=f"matrix products in training_step ran in {dtype}")


def _allow_tf32(_site: Any) -> Applied:
    """Allow TF32 in float32 matrix products; the flag is global to the process, so the undo matters."""
    import torch

    before = torch.get_float32_matmul_precision()
    if before != "highest":
        raise NotApplicable(f"float32 matmul precision is already {before!r}; your choice stands")
    torch.set_float32_matmul_precision("high")

    def probe() -> Mapping[str, Any]:
        return {"matmul_precision": torch.get_float32_matmul_precision()}

    return Applied(undo=lambda: torch.set_float32_matmul_precision(before), probe=probe)

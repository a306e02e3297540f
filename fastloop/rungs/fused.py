"""Update all parameters in one fused optimizer kernel.

Faster because  one kernel per parameter group replaces a dozen elementwise kernels over all parameters.
Costs           nothing in memory; last-digit rounding differs from the unfused update.
Don't use when  the optimizer is under 2 % of the step, or its class has no fused form.
Evidence        `fused` in every parameter group of the optimizer that stepped
Source          https://docs.pytorch.org/docs/stable/generated/torch.optim.AdamW.html
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fastloop.errors import NotApplicable
from fastloop.records import Action, Applied, Change, Facts, Measurement, Verdict


@dataclass(frozen=True, kw_only=True)
class Fused:
    """The fused form of the user's own optimizer object, flipped in place so that schedulers keep their hold."""

    enabled: bool = False

    def plan(self, facts: Facts) -> Change:
        """Ask for the flip once the optimizers exist and hold their restored state."""
        if facts.clip and facts.precision in ("16-mixed", "bf16-mixed"):
            # Lightning 2.6.6 refuses to clip for fused optimizers under AMP; fixed upstream by Lightning #21436.
            raise NotApplicable(f"gradient clipping with {facts.precision}: Lightning refuses fused optimizers there")
        if facts.device not in ("cuda", "cpu"):
            raise NotApplicable(f"no fused optimizers on {facts.device}")
        return Change(parity="approximate",
                      actions=(Action(keys=("optimizer.fused",), when="train_start", do=_fuse),))  # fmt: skip

    def verify(self, seen: Measurement) -> Verdict:
        """Taken when every parameter group says fused after it stepped."""
        evidence = seen.evidence.get("fused", {})
        if "groups" not in evidence:
            return Verdict(took=None, why="no optimizer was seen")
        return Verdict(took=evidence["fused_groups"] == evidence["groups"] and evidence["stepped"] > 0,
                       why=f"{evidence['fused_groups']} of {evidence['groups']} parameter groups are fused,"
                           f" {evidence['stepped']} parameters stepped")  # fmt: skip


def _refuse(optimizer: Any) -> None:
    name = type(optimizer).__name__
    if not type(optimizer).__module__.startswith("torch.optim") or \
            "fused" not in inspect.signature(type(optimizer).__init__).parameters:  # fmt: skip
        raise NotApplicable(f"{name} has no fused form")
    for group in optimizer.param_groups:
        if group.get("fused"):
            raise NotApplicable(f"{name} is already fused")
        if group.get("fused") is False or group.get("foreach"):
            raise NotApplicable(f"{name} was made with foreach or fused set; your choice stands")
        if group.get("differentiable"):
            raise NotApplicable(f"{name} is differentiable, which a fused update is not")
        if any(not parameter.is_floating_point() for parameter in group["params"]):
            raise NotApplicable(f"{name} holds parameters that are not real floating point")


def _fuse(site: Any) -> Applied:
    """Flip the optimizers in place: a new optimizer object would leave every scheduler talking to the old one."""
    for optimizer in site.optimizers:
        _refuse(optimizer)
    undos = [_flip(optimizer) for optimizer in site.optimizers]

    def probe() -> Mapping[str, Any]:
        groups = [group for optimizer in site.optimizers for group in optimizer.param_groups]
        return {"groups": len(groups), "fused_groups": sum(group.get("fused") is True for group in groups),
                "stepped": sum(len(optimizer.state) for optimizer in site.optimizers)}  # fmt: skip

    return Applied(undo=lambda: [undo() for undo in undos] and None, probe=probe)


def _flip(optimizer: Any) -> Any:
    """Make one optimizer fused; returns the undo, which moves step counters back to the host as unfused ones keep them."""
    groups = [(group, group.get("fused"), group.get("foreach")) for group in optimizer.param_groups]
    defaults = {key: optimizer.defaults.get(key) for key in ("fused", "foreach")}
    scaling = getattr(optimizer, "_step_supports_amp_scaling", None)

    def set_steps(on_device: bool) -> None:
        for parameter, state in optimizer.state.items():
            if hasattr(state.get("step"), "to"):
                state["step"] = state["step"].to(parameter.device if on_device else "cpu")

    for group, _, _ in groups:
        group["fused"], group["foreach"] = True, False
    optimizer.defaults.update(fused=True, foreach=False)
    optimizer._step_supports_amp_scaling = True  # how torch marks optimizers whose kernel unscales gradients itself
    set_steps(on_device=True)

    def undo() -> None:
        for group, fused, foreach in groups:
            group["fused"], group["foreach"] = fused, foreach
        for group in optimizer.param_groups[len(groups):]:  # groups a finetuning callback added meanwhile
            group["fused"], group["foreach"] = defaults["fused"], defaults["foreach"]
        optimizer.defaults.update(defaults)
        if scaling is None:
            optimizer.__dict__.pop("_step_supports_amp_scaling", None)
        else:
            optimizer._step_supports_amp_scaling = scaling
        set_steps(on_device=False)

    return undo

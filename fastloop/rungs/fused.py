"""Update all parameters in one fused optimizer kernel.

Faster because  one kernel per parameter group replaces a dozen elementwise kernels over all parameters.
Costs           nothing in memory; last-digit rounding differs from the unfused update.
Don't use when  the optimizer is under 2 % of the step, or its class has no fused form.
Evidence        `fused` in every parameter group, and the steps those optimizers have made since
Source          https://docs.pytorch.org/docs/stable/generated/torch.optim.AdamW.html
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fastloop.errors import NotApplicable
from fastloop.records.card import Card
from fastloop.records.facts import Facts
from fastloop.records.measurement import Measurement
from fastloop.records.plan import Action, Applied, Change, Site, Undo, Verdict, say_count
from fastloop.records.readings import does_already, on_gpu, read_fusing_ms

USUAL = {"fused": None, "foreach": None, "capturable": False, "differentiable": False}
"""Optimizer settings with which the user leaves the choice of implementation to torch."""


CARD = Card(
    family="compute",
    does="one fused kernel updates all parameters",
    answers={"optimizer": 1, "launch_bound": 3},
    follows={"memory_bound": 4, "fp32_math": 4, "compute_bound": 3},
    applies=lambda seen: (on_gpu(seen) or bool(read_fusing_ms(seen))) and not does_already(seen, "fused"),
)


@dataclass(frozen=True, kw_only=True)
class Fused:
    """The fused form of the user's own optimizer object, switched in place so that schedulers still refer to it."""

    enabled: bool = False

    def plan(self, facts: Facts) -> Change:
        """Request the switch once the optimizers exist and their state is restored."""
        if facts.device not in ("cuda", "cpu"):
            raise NotApplicable(f"no fused optimizers on {facts.device}")
        action = Action(keys=("optimizer.fused",), when="train_start", do=_fuse)
        return Change(parity="approximate", actions=(action,), rehearse="optimizers", check=_check_optimizers)

    def verify(self, seen: Measurement) -> Verdict:
        """The rung took effect if every parameter group is fused and the optimizers have stepped since."""
        evidence = seen.evidence.get("fused", {})
        if "groups" not in evidence:
            return Verdict(took=None, why="no optimizer was seen")
        groups = f"{evidence['fused_groups']} of {evidence['groups']} parameter groups"
        steps = evidence["steps"]
        why = f"{groups} fused, {say_count(steps, 'optimizer step')} ran this way"
        if evidence.get("made_anew"):
            why = f"{steps} steps were fused, then your code recreated the optimizers: {groups} are fused now"
        if unfused := evidence.get("unfused"):
            why += f"; torch's usual update took over: {unfused}"
        return Verdict(took=evidence["fused_groups"] == evidence["groups"] and steps > 0, why=why)


def _refuse(optimizer: Any, site: Site) -> None:
    name, device = type(optimizer).__name__, site.facts.device
    if (
        not type(optimizer).__module__.startswith("torch.optim")
        or "fused" not in inspect.signature(type(optimizer).__init__).parameters
    ):
        raise NotApplicable(f"{name} has no fused form")
    if name == "Adagrad" and device != "cpu":
        raise NotApplicable(f"Adagrad has no fused form on {device}")
    for key, module in site.module.named_modules():
        if hasattr(module, "embedding_dim") and getattr(module, "sparse", False):
            raise NotApplicable(f"{key} produces sparse gradients, which fused optimizers do not support")
    for group in optimizer.param_groups:
        for setting, usual in USUAL.items():
            if group.get(setting, usual) is not usual:
                raise NotApplicable(f"{name} was created with {setting}={group[setting]}; your choice stands")
        if any(not parameter.is_floating_point() for parameter in group["params"]):
            raise NotApplicable(f"{name} has parameters that are not real floating point")


def _check_optimizers(site: Site) -> None:
    for optimizer in site.optimizers:
        _refuse(optimizer, site)


def _fuse(site: Site) -> Applied:
    """Switch the optimizers in place: with a new optimizer object, schedulers would still refer to the old one."""
    _check_optimizers(site)
    steps, flipped = [0], [*site.optimizers]
    unfused: list[str] = []
    undos = [_flip(optimizer, steps, unfused) for optimizer in flipped]

    def probe() -> Mapping[str, Any]:
        fused = [group.get("fused") is True for optimizer in site.optimizers for group in optimizer.param_groups]
        kept = all(any(optimizer is own for own in flipped) for optimizer in site.optimizers)
        found: dict[str, Any] = {"groups": len(fused), "fused_groups": sum(fused), "steps": steps[0]}
        if unfused:
            found["unfused"] = " and ".join(dict.fromkeys(unfused))
        return found if kept else {**found, "made_anew": True}

    def undo() -> None:
        for put_back in undos:
            put_back()

    def clean(checkpoint: dict[str, Any]) -> None:
        # With fused=True in the checkpoint, a later run without fastloop would be fused too.
        for state in checkpoint.get("optimizer_states", ()):
            for group in state["param_groups"]:
                group.update(fused=None, foreach=None)

    return Applied(undo=undo, probe=probe, clean=clean)


def _flip(optimizer: Any, steps: list[int], unfused: list[str]) -> Undo:
    """Make one optimizer fused, count its fused steps, and note why groups are fused no longer; return the undo.

    `_step_supports_amp_scaling` stays unset, so that a loss scaler unscales gradients before the step as for the
    unfused optimizer: hooks and callbacks that read or clip gradients then see the same numbers."""
    from fastloop.feeds.fused_layouts import fit_layouts, unfuse

    defaults = {key: optimizer.defaults.get(key) for key in ("fused", "foreach")}

    def count(*_: Any) -> None:
        steps[0] += any(group.get("fused") for group in optimizer.param_groups)

    def undo() -> None:
        counting.remove()
        free_layouts()
        optimizer.defaults.update(defaults)
        for group in optimizer.param_groups:  # including those that a finetuning callback added meanwhile
            unfuse(group, optimizer.state)

    for group in optimizer.param_groups:
        group.update(fused=True, foreach=False)
    optimizer.defaults.update(fused=True, foreach=False)
    for parameter, state in optimizer.state.items():
        if hasattr(state.get("step"), "to"):
            state["step"] = state["step"].to(parameter.device)
    free_layouts = fit_layouts(optimizer, unfused.append)
    counting = optimizer.register_step_post_hook(count)
    return undo

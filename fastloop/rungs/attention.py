"""Replace hand-written attention with one fused kernel (scaled_dot_product_attention).

Faster because  a fused kernel never writes the scores [tokens, tokens] to memory, and a causal one skips half of them.
Costs           a second to capture each kind of attention module; different rounding and dropout random numbers.
Don't use when  masks are modified through ``.data``, or fully masked rows count in the loss.
Evidence        attentions replaced in captured graphs, and the calls that ran them; Hugging Face models switched
Source          https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.scaled_dot_product_attention.html
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from fastloop.errors import NotApplicable
from fastloop.records.card import DEVICE, Card
from fastloop.records.facts import Facts
from fastloop.records.measurement import Measurement
from fastloop.records.plan import Action, Applied, Change, Site, Verdict, say_count
from fastloop.records.readings import attends_by_hand, on_gpu

KERNELS = {
    "FLASH_ATTENTION": "flash",
    "CUDNN_ATTENTION": "cudnn",
    "EFFICIENT_ATTENTION": "mem_efficient",
    "MATH": "math",
}
"""Torch's name of each kernel, and of its flag. The first kernel that supports a call runs it: some do not support
masks, or some head widths."""

CAPTURE_S = 1.0
"""Seconds that capturing graphs takes in the first call, including the import of torch's compiler."""

CARD = Card(
    family="compute",
    does="a fused kernel computes attention and never writes its scores to memory",
    answers={"attention": 1, "memory_bound": 0, "elementwise": 0, DEVICE: 0},
    follows={"fp32_math": 0, "compute_bound": 0},
    applies=lambda seen: on_gpu(seen) and attends_by_hand(seen),
    plan_shows_refusal=True,
)


@dataclass(frozen=True, kw_only=True)
class Attention:
    """scaled_dot_product_attention in place of softmax(q @ k.T) @ v, found in captured graphs by what they compute."""

    enabled: bool = False
    backend: Literal["auto", "flash", "cudnn", "efficient"] = "auto"
    """The kernel to try first; auto = torch's own order."""

    def plan(self, facts: Facts) -> Change:
        """Request the replacement, or only the order of kernels if no attention is written by hand."""
        if facts.compiled_by_user:
            raise NotApplicable(
                f"{', '.join(facts.compiled_by_user[:3])} is compiled by your own code, so its graphs cannot be changed"
            )
        if facts.double_backward:
            raise NotApplicable(
                f"{facts.double_backward[0]} may take gradients of gradients (create_graph), which fused kernels do not"
                " support"
            )
        if self.backend != "auto" and facts.device != "cuda":
            raise NotApplicable(f"backend {self.backend} needs CUDA; this run is on {facts.device}")
        if not facts.attends_by_hand and not facts.attends_by_call:
            raise NotApplicable("no inner module has a softmax between two matrix products")
        if not facts.attends_by_hand and self.backend == "auto":
            ready = facts.attends_by_call[0]
            raise NotApplicable(
                f"{ready} already calls scaled_dot_product_attention, and with backend: auto torch picks the kernel"
            )
        action = Action(keys=("model.attention",), when="model", do=self._attend)
        return Change(
            parity="approximate", evaluation=True, actions=(action,), rehearse="modules", first_call_s=CAPTURE_S
        )

    def _attend(self, site: Site) -> Applied:
        from torch._dynamo.utils import counters

        from fastloop.feeds.attention import candidates
        from fastloop.feeds.attention.rewriting import ReplaceAttention
        from fastloop.feeds.compiled.calls import CompiledCall, put_in, sum_up

        switched = candidates.switch_models(site.module)
        inside = {id(each) for model in switched for each in model.modules()}
        by_hand = {name: site.module.get_submodule(name) for name in candidates.list_candidates(site.module)}
        by_hand = {name: module for name, module in by_hand.items() if id(module) not in inside}
        replace = ReplaceAttention(site.module)
        codes: dict[Any, Any] = {}
        calls = [
            CompiledCall(
                module,
                name,
                codes,
                mode="eager",
                dynamic=None,
                passes=[replace],
                changes=site.changed_sizes,
                is_tried=lambda: bool(site.recorded),
            )
            for name, module in by_hand.items()
        ]
        undo = contextlib.ExitStack()
        undo.enter_context(_order(self.backend))
        for model in switched:
            undo.callback(model.set_attn_implementation, "eager")
            undo.callback(candidates.switch_back_for_weights(model))
        undo.callback(put_in(calls))
        site.graph_passes.append(replace)
        undo.callback(lambda: site.graph_passes.remove(replace) if replace in site.graph_passes else None)
        before = counters["inductor"]["fuse_attention"]

        def probe() -> Mapping[str, Any]:
            ran = sum(budget.calls - budget.eager for call in calls for budget in call.budgets.values())
            return {
                "modules": len(calls),
                "replaced": replace.replaced,
                "causal": replace.causal,
                "missed": list(dict.fromkeys(replace.missed)),
                "calls": ran,
                "switched": sum(model.config._attn_implementation == "sdpa" for model in switched),
                "by_inductor": counters["inductor"]["fuse_attention"] - before,
                **({key: sum_up(calls)[key] for key in ("failures", "hooked")} if calls else {"failures": []}),
            }

        return Applied(undo=undo.close, probe=probe)

    def verify(self, seen: Measurement) -> Verdict:
        """The rung took effect if an attention was replaced in a graph, or a model was switched."""
        evidence = seen.evidence.get("attention", {})
        if "replaced" not in evidence:
            return Verdict(took=None, why="no step ran")
        if evidence["failures"]:
            return Verdict(took=False, why=f"fell back to your own attention: {evidence['failures'][0]}")
        why = []
        if count := evidence["replaced"]:
            causal = f", {evidence['causal']} of them causal without a mask" if evidence["causal"] else ""
            why.append(f"{say_count(count, 'attention')} in captured graphs became one fused call each{causal}")
        if count and (calls := evidence["calls"]):
            why.append(f"{say_count(calls, 'call')} of {say_count(evidence['modules'], 'module')} ran in such graphs")
        if hooked := evidence.get("hooked"):
            why.append(
                f"{say_count(hooked, 'call')} ran your own attention: hooks were added after the graphs were made"
            )
        if switched := evidence["switched"]:
            why.append(f"{say_count(switched, 'Hugging Face model')} switched to sdpa")
        if fused := evidence["by_inductor"]:
            why.append(f"Inductor fused {fused} with its own patterns")
        if took := bool(count or switched or fused):
            why += [f"left as written: {reason}" for reason in evidence["missed"][:1]]
        else:
            what = evidence["missed"][0] if evidence["missed"] else "none was called, or the graph has no softmax"
            why.append(f"no attention was replaced: {what}")
        return Verdict(took=took, why="; ".join(why))


@contextlib.contextmanager
def _order(backend: str) -> Any:
    """Enable the kernels inside the context, in the configured order."""
    if backend == "auto":
        yield
        return
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    on = [name for name, flag in KERNELS.items() if getattr(torch.backends.cuda, f"{flag}_sdp_enabled")()]
    first = sorted(on, key=lambda name: not name.startswith(backend.upper()))
    with sdpa_kernel([getattr(SDPBackend, name) for name in first], set_priority=True):
        yield

"""Compile the model's inner modules with Inductor, in place.

Faster because  elementwise work is fused into few kernels and Python no longer launches each operator.
Costs           seconds to minutes at the first step, and once more if sizes vary; calls that fit neither graph, such as
                an epoch's short last batch, run eagerly.
Don't use when  the run is too short to pay back the compile time, or something other than sizes changes at every step.
Evidence        graphs Dynamo captured since the rung was applied; recompiles by cause, graph breaks by cause and line
Source          https://docs.pytorch.org/docs/stable/generated/torch.compile.html
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from fastloop.errors import NotApplicable
from fastloop.evidence.model import dynamo_graphs
from fastloop.evidence.sync import call_site
from fastloop.records.card import DEVICE, Card, ClimbState, Settings, Variant
from fastloop.records.facts import Facts
from fastloop.records.measurement import Measurement
from fastloop.records.plan import Action, Applied, Change, PayBack, Site, Verdict, say_count
from fastloop.records.readings import compiles, count_micro_batches, on_gpu

CUDA_GRAPHS = ("reduce-overhead", "max-autotune")  # accumulation would overwrite their buffers (pytorch #169545)


def _list_variants(state: ClimbState) -> Iterator[Variant]:
    """Also try CUDA graphs for launch-bound runs, unless a step has several backward passes: buffers are static."""
    graphs = state.on_cuda and state.launch_bound and state.one_backward
    yield Variant(settings=({}, {"mode": "reduce-overhead"}) if graphs else ({},))


def _advise_cuda_graphs(seen: Measurement, on: bool) -> str | None:
    if not on or count_micro_batches(seen) > 1:
        return None
    return (
        "compile's mode reduce-overhead replays CUDA graphs instead of launching kernels; otherwise give each launch"
        " more work: a larger batch (which changes the training), larger kernels"
    )


def _pad_products(seen: Measurement) -> tuple[Settings, str] | None:
    """Inductor measures whether a product is faster with padded matrices."""
    if compiles(seen):
        return None
    return {"enabled": True}, "compiling pads such matmuls where that is faster"


CARD = Card(
    family="compute",
    does="compiling merges elementwise kernels: fewer launches, less traffic",
    answers={
        "memory_bound": 1,
        "memory_bound:convolutions": 3,
        "elementwise": 1,
        "optimizer": 2,
        "misaligned_matmuls": 1,
        "launch_bound": 4,
        DEVICE: 3,
    },
    follows={"fp32_math": 3, "compute_bound": 1},
    advice={"launch_bound": _advise_cuda_graphs},
    remedies={"misaligned_matmuls": _pad_products},
    applies=lambda seen: on_gpu(seen) and not compiles(seen),
    variants=_list_variants,
    first_start_s=80.0,
    plan_shows_refusal=True,
    explains={
        "torch/_functorch/_aot_autograd/": "compiled code of rungs.compile failed where it cannot fall back to eager"
        " (in the backward, or after it changed something in place): write rungs.compile.enabled: false"
    },
)


@dataclass(frozen=True, kw_only=True)
class Compile:
    """torch.compile of the user's own inner modules; checkpoint keys and the module's class do not change."""

    enabled: bool = False
    mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = "default"
    dynamic: Literal["auto"] | bool | None = "auto"
    """Which dimensions to compile as dynamic: auto (or null) = those observed to vary, true = all, false = none."""

    scope: Literal["auto", "model", "blocks"] = "auto"
    """What to compile: model = everything; blocks = repeated modules, such as a transformer's layers, once for all of
    the same shape; auto = model, or blocks if only that can pay back (see pay_back) or works."""

    pay_back: PayBack = "auto"
    """required = compile only if the rest of the run can save more time than the compile takes; auto = required if a
    shipped ladder turned this rung on."""

    def plan(self, facts: Facts) -> Change:
        """Request an in-place compile of the modules that do the work: the whole model, or each repeated block once."""
        if facts.compiled_by_user:
            raise NotApplicable(f"{', '.join(facts.compiled_by_user[:3])} is already compiled by your own code")
        if facts.double_backward:
            raise NotApplicable(
                f"{facts.double_backward[0]} may take gradients of gradients (create_graph), which compiled code does"
                " not support"
            )
        if facts.keeps_graph:
            raise NotApplicable(
                f"{facts.keeps_graph[0]} keeps the graph (retain_graph), which compiled backwards overwrite"
            )
        if facts.compiler is None:
            raise NotApplicable("Inductor needs a C++ compiler, and none was found: install gcc or g++")
        if not facts.compile_targets:
            raise NotApplicable("no inner module to compile: the LightningModule has no submodule with parameters")
        several = facts.micro_batches or facts.accumulate > 1 or facts.accumulation_scheduled
        if several and self.mode in CUDA_GRAPHS and facts.device == "cuda":
            raise NotApplicable(
                f"mode {self.mode} replays CUDA graphs, which overwrite gradients under accumulation;"
                " write mode: default"
            )
        blocks = facts.repeated_blocks
        if self.scope == "blocks" and not blocks:
            raise NotApplicable("no list of layers repeats a block; write scope: model")
        of_blocks = self._want(*itertools.chain(*blocks), kinds=tuple(names[0] for names in blocks))
        if self.scope == "blocks":
            return of_blocks
        cheaper = of_blocks if blocks else None
        if cheaper is None and facts.compile_targets == ("",) and facts.inner_modules:
            cheaper = replace(self._want(*facts.inner_modules), first_call_of=facts.inner_modules)
        return self._want(*facts.compile_targets, cheaper=cheaper if self.scope == "auto" else None)

    def _want(self, *targets: str, kinds: tuple[str, ...] = (), cheaper: Change | None = None) -> Change:
        names = ", ".join([name or "the module's own forward" for name in targets][:4])
        return Change(
            parity="approximate",
            evaluation=True,
            actions=(Action(keys=("model.compile",), when="model", do=_Compiling(self, targets)),),
            notes=(f"compiles {names}" + (f", once for each of {len(kinds)} shapes" if kinds else ""),),
            rehearse="modules",
            pay_back=self.pay_back,
            first_call_of=kinds,
            cheaper=cheaper,
        )

    def verify(self, seen: Measurement) -> Verdict:
        """The rung took effect if at least one graph was captured and no module fell back to eager."""
        evidence = seen.evidence.get("compile", {})
        if "graphs" not in evidence:
            return Verdict(took=None, why="no step ran")
        if evidence["failures"]:
            return Verdict(took=False, why=f"fell back to eager: {evidence['failures'][0]}")
        count = evidence["graphs"]
        whose = f" for {evidence['modules']} modules" if evidence.get("modules", 1) > 1 else ""
        why = [f"{say_count(count, 'graph')} captured{whose}{'' if count else ': nothing was compiled'}"]
        if not count and evidence.get("forced_eager"):
            why.append('torch.compiler.set_stance("force_eager") was on')
        why += [f"recompiled: {reason}" for reason in evidence["recompiles"][:2]]
        why += [f"graph break: {reason}" for reason in evidence["breaks"][:2]]
        if eager := evidence.get("eager_calls"):
            here = "in one of them " if whose else ""  # the one with the most
            why.append(f"{here}{eager} of {evidence['of_calls']} calls ran eagerly: no graph fit them")
        if (hooked := evidence.get("hooked")) and not evidence.get("spent"):
            why.append(f"{say_count(hooked, 'call')} ran eagerly: hooks were added after the graphs were made")
        why += [f"{spent}: eager from then on" for spent in evidence.get("spent", ())]
        if evidence["limit_hit"]:
            why.append("recompile limit hit: eager from then on")
        ended = evidence["limit_hit"] or evidence.get("spent")
        return Verdict(took=count > 0 and not ended, why="; ".join(why))


@dataclass(frozen=True)
class _Compiling:
    """The action: compile these modules as the rung is configured. Not a `partial`, because equal plans must have equal
    actions."""

    rung: Compile
    targets: tuple[str, ...]

    def __call__(self, site: Site) -> Applied:
        from fastloop.feeds.compiled.calls import CompiledCall, put_in, sum_up

        before, codes = dynamo_graphs.count(), dict[Any, Any]()
        calls = [
            CompiledCall(
                site.module.get_submodule(name),
                name,
                codes,
                mode=self.rung.mode,
                dynamic=None if self.rung.dynamic == "auto" else self.rung.dynamic,
                passes=site.graph_passes,
                changes=site.changed_sizes,
                is_tried=lambda: bool(site.recorded),
            )
            for name in self.targets
        ]
        for name, call in zip(self.targets, calls, strict=True):
            for args, kwargs in site.recorded.get(name, ()):
                call.note_shapes(args, kwargs)

        def probe() -> Mapping[str, Any]:
            counted = dynamo_graphs.count_since(before, call_site.name_line)
            return {**counted, **sum_up(calls), "modules": len(calls)}

        return Applied(undo=put_in(calls), probe=probe)

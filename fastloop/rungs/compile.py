"""Compile the model's inner modules with Inductor, in place.

Faster because  elementwise work is fused into few kernels and Python no longer launches each operator.
Costs           seconds to minutes at the first step, and again for each new shape (a ragged last batch, evaluation).
Don't use when  a run is shorter than the compile time pays back, or shapes change at every step.
Evidence        graphs Dynamo captured since the rung was applied, with recompiles and graph breaks by cause
Source          https://docs.pytorch.org/docs/stable/generated/torch.compile.html
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from fastloop.errors import NotApplicable
from fastloop.evidence import graphs
from fastloop.records import Action, Applied, Change, Facts, Measurement, Verdict

CUDA_GRAPHS = ("reduce-overhead", "max-autotune")
"""Modes that replay CUDA graphs, whose static buffers accumulation would overwrite (pytorch #169545)."""


@dataclass(frozen=True, kw_only=True)
class Compile:
    """torch.compile of the user's own inner modules; checkpoint keys and the module's class stay."""

    enabled: bool = False
    mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = "default"
    dynamic: bool | None = None
    """Compile for changing shapes: null = only after a shape changed once."""

    def plan(self, facts: Facts) -> Change:
        """Ask for an in-place compile of the modules that hold the work."""
        if facts.compiled_by_user:
            raise NotApplicable(f"{', '.join(facts.compiled_by_user[:3])} is already compiled by you; not doubled")
        if facts.compiler is None:
            raise NotApplicable("Inductor needs a C++ compiler and none was found; install gcc or g++")
        if not facts.compile_targets:
            raise NotApplicable("no inner module to compile: the LightningModule holds no submodule with parameters")
        if self.mode in CUDA_GRAPHS and facts.device == "cuda" and (facts.micro_batches or facts.accumulate > 1):
            raise NotApplicable(f"mode {self.mode} replays CUDA graphs, which overwrite gradients under accumulation;"
                                " write mode: default")  # fmt: skip
        return Change(parity="approximate", evaluation=True,
                      actions=(Action(keys=("model.compile",), when="model", do=self._compile),),
                      notes=(f"compiles {', '.join(facts.compile_targets[:4])} at the first step",))  # fmt: skip

    def _compile(self, site: Any) -> Applied:
        before, failures = graphs.count(), list[str]()
        names = site.facts.compile_targets
        modules = [site.module.get_submodule(name) for name in names]
        for name, module in zip(names, modules, strict=True):
            _compile_in_place(module, name, failures, mode=self.mode, dynamic=self.dynamic)

        def undo() -> None:
            for module in modules:
                module._compiled_call_impl = None

        def probe() -> Mapping[str, Any]:
            return {**graphs.since(before), "failures": failures}

        return Applied(undo=undo, probe=probe)

    def verify(self, seen: Measurement) -> Verdict:
        """Taken when at least one graph was captured and no module fell back to eager."""
        evidence = seen.evidence.get("compile", {})
        if "graphs" not in evidence:
            return Verdict(took=None, why="no step ran")
        if evidence["failures"]:
            return Verdict(took=False, why=f"fell back to eager: {evidence['failures'][0]}")
        why = [f"{evidence['graphs']} graphs captured"]
        why += [f"recompiled: {reason}" for reason in evidence["recompiles"][:2]]
        why += [f"graph break: {reason}" for reason in evidence["breaks"][:1]]
        if evidence["limit_hit"]:
            why.append("recompile limit hit: running eager from there")
        took = evidence["graphs"] > 0 and not evidence["limit_hit"]
        return Verdict(took=took, why="; ".join(why) if evidence["graphs"] else "0 graphs captured: nothing was compiled")


def _compile_in_place(module: Any, name: str, failures: list[str], *, mode: str, dynamic: bool | None) -> None:
    """Route calls of the module through a compiled function, and back to eager for good should the backend fail.

    ``module.compile()`` captures nothing for torch's own classes (nn.Sequential and friends are on Dynamo's skip
    list); a plain function around ``_call_impl`` is captured for every class. Checked by the graphs counted.
    """
    import torch
    from torch._dynamo.exc import TorchDynamoException

    def call(*args: Any, **kwargs: Any) -> Any:
        return module._call_impl(*args, **kwargs)

    compiled: Callable[..., Any] = torch.compile(call, mode=None if mode == "default" else mode, dynamic=dynamic)

    def guarded(*args: Any, **kwargs: Any) -> Any:
        try:
            return compiled(*args, **kwargs)
        except TorchDynamoException as error:
            failures.append(f"{name}: {type(error).__name__}: {str(error).strip().splitlines()[0]}")
            module._compiled_call_impl = None
            return module._call_impl(*args, **kwargs)

    module._compiled_call_impl = guarded

"""Compile the model's inner modules with Inductor, in place.

Faster because  elementwise work is fused into few kernels and Python no longer launches each operator.
Costs           seconds to minutes at the first step and for each new shape; an epoch's short last batch runs eager.
Don't use when  a run is shorter than the compile time pays back, or shapes change at every step.
Evidence        graphs Dynamo captured since the rung was applied, with recompiles and graph breaks by cause
Source          https://docs.pytorch.org/docs/stable/generated/torch.compile.html
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import CodeType
from typing import Any, Literal

from fastloop.errors import NotApplicable
from fastloop.evidence import graphs
from fastloop.feeds.ragged import EagerWhenShort
from fastloop.measurement import Measurement
from fastloop.records import Action, Applied, Change, Facts, Verdict

CUDA_GRAPHS = ("reduce-overhead", "max-autotune")  # accumulation would overwrite their buffers (pytorch #169545)


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
        several = facts.micro_batches or facts.accumulate > 1 or facts.accumulation_scheduled
        if several and self.mode in CUDA_GRAPHS and facts.device == "cuda":
            raise NotApplicable(f"mode {self.mode} replays CUDA graphs, which overwrite gradients under accumulation;"
                                " write mode: default")  # fmt: skip
        names = ", ".join([name or "the module's own forward" for name in facts.compile_targets][:4])
        action = Action(keys=("model.compile",), when="model", do=self._compile)
        return Change(parity="approximate", evaluation=True, actions=(action,),
                      notes=(f"compiles {names} at the first step",))  # fmt: skip

    def _compile(self, site: Any) -> Applied:
        before, codes = graphs.count(), dict[Any, CodeType]()
        calls = [_Call(site.module.get_submodule(name), name, self, codes) for name in site.facts.compile_targets]
        for call in calls:
            call.module._compiled_call_impl = call

        def undo() -> None:
            for call in calls:
                vars(call.module).pop("_compiled_call_impl", None)

        def probe() -> Mapping[str, Any]:
            failures = [call.failure for call in calls if call.failure]
            return {**graphs.since(before), "graphs": sum(call.graphs for call in calls), "failures": failures,
                    "eager_calls": max(call.compiled.eager for call in calls)}  # fmt: skip

        return Applied(undo=undo, probe=probe)

    def verify(self, seen: Measurement) -> Verdict:
        """Taken when at least one graph was captured and no module fell back to eager."""
        evidence = seen.evidence.get("compile", {})
        if "graphs" not in evidence:
            return Verdict(took=None, why="no step ran")
        if evidence["failures"]:
            return Verdict(took=False, why=f"fell back to eager: {evidence['failures'][0]}")
        count = evidence["graphs"]
        why = [f"{count} graphs captured" if count else "0 graphs captured: nothing was compiled"]
        why += [f"recompiled: {reason}" for reason in evidence["recompiles"][:2]]
        why += [f"graph break: {reason}" for reason in evidence["breaks"][:1]]
        why += [f"{eager} short batches ran eager"] if (eager := evidence.get("eager_calls")) else []
        if evidence["limit_hit"]:
            why.append("recompile limit hit: running eager from there")
        return Verdict(took=count > 0 and not evidence["limit_hit"], why="; ".join(why))


class _Call:
    """A module's calls by way of a compiled function, and back to eager for good should the backend fail. A plain
    function around ``_call_impl``, since ``module.compile()`` captures nothing for torch's own nn.Sequential."""

    def __init__(self, module: Any, name: str, settings: Compile, codes: dict[Any, CodeType]) -> None:
        import torch

        def call(*args: Any, **kwargs: Any) -> Any:
            return module._call_impl(*args, **kwargs)

        self.module, self.name = module, name or type(module).__name__
        self.graphs, self.failure = 0, ""
        # Dynamo counts recompiles per code object and gives up after 8. Modules of one class and shapes share a code
        # object, and with it their graphs; all others, and every later fit, get one of their own.
        alike = (type(module), *(parameter.shape for parameter in module.parameters()))
        call.__code__ = codes.setdefault(alike, call.__code__.replace(co_name=self.name))
        mode = None if settings.mode == "default" else settings.mode
        self.compiled = EagerWhenShort(module, torch.compile(call, mode=mode, dynamic=settings.dynamic))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from torch._dynamo.exc import TorchDynamoException

        captured = graphs.captured()
        try:
            return self.compiled(*args, **kwargs)
        except TorchDynamoException as error:
            message = " ".join(str(error).strip().split("\n\n")[0].split())  # hints come after a blank line
            self.failure = f"{self.name}: {type(error).__name__}: {message[:200]}"
            vars(self.module).pop("_compiled_call_impl", None)
            return self.module._call_impl(*args, **kwargs)
        finally:
            self.graphs += graphs.captured() - captured

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()  # copied and pickled modules are eager: a copy must not call the original

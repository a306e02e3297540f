"""Hide gradient exchange behind the backward pass: DDP's buckets, views, static graph and communication hooks.

Faster because  gradients travel while later layers still compute, in views instead of copies, or in half the bytes.
Costs           compressing hooks round the gradients; static_graph assumes that every step uses the same parameters.
Don't use when  there is one device, or the exchange is already hidden: on fast links a compressing hook costs time.
Evidence        the settings read back from the living DDP object; exchanges the hook ran
Source          https://docs.pytorch.org/docs/stable/ddp_comm_hooks.html
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from fastloop.errors import ConfigError, NotApplicable
from fastloop.measurement import Measurement
from fastloop.records import Action, Applied, Change, Facts, Parity, Verdict

PARITY: dict[str, Parity] = {"none": "exact", "bf16": "approximate", "fp16": "approximate",
                             "powersgd": "changes-training"}  # fmt: skip
FIRST_BUCKET_BYTES = 2**20
"""DDP's first bucket is this small, whatever bucket_cap_mb says, so that the exchange begins early."""


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """How DistributedDataParallel exchanges gradients. No fixed setting is right: measure yours."""

    enabled: bool = False
    gradient_as_bucket_view: bool = True
    """Gradients live inside the exchange buckets: one copy and one set of gradients less."""
    bucket_cap_mb: int | None = None
    """MiB per bucket; null = DDP's own 25."""
    static_graph: bool = False
    """Every step uses the same parameters in the same order."""
    comm_hook: Literal["none", "bf16", "fp16", "powersgd"] = "none"
    """How gradients are compressed on their way."""

    def __post_init__(self) -> None:
        if self.bucket_cap_mb is not None and self.bucket_cap_mb < 1:
            raise ConfigError(key="overlap.bucket_cap_mb", got=f"overlap.bucket_cap_mb={self.bucket_cap_mb}",
                              why="a bucket holds at least 1 MiB", do="write a positive number or null")  # fmt: skip

    def plan(self, facts: Facts) -> Change:
        """Ask for DDP settings and, once the model is wrapped, the hook."""
        if not facts.is_ddp:
            raise NotApplicable(f"needs DDP with several devices; the strategy is {facts.strategy}")
        if facts.world_size < 2:
            raise NotApplicable("one process has no gradients to exchange")
        if self.static_graph and (facts.micro_batches or facts.accumulate > 1 or facts.accumulation_scheduled):
            # pytorch #143580: the first backward under no_sync trips an internal assert.
            raise NotApplicable("static_graph with several backward passes per step fails inside DDP;"
                                " turn static_graph off or do without accumulation and micro-batches")  # fmt: skip
        if self.gradient_as_bucket_view and facts.detaches_grads:
            raise NotApplicable(f"{', '.join(facts.detaches_grads)} calls detach_() on gradients, which bucket views"
                                " forbid; set gradients to None, or gradient_as_bucket_view: false")  # fmt: skip
        if self.comm_hook != "none" and facts.user_comm_hook:
            raise NotApplicable("the strategy already has your own ddp_comm_hook; it stands")
        wants: dict[str, Any] = {"ddp.gradient_as_bucket_view": self.gradient_as_bucket_view}
        if self.bucket_cap_mb is not None:
            wants["ddp.bucket_cap_mb"] = self.bucket_cap_mb
        if self.static_graph:
            wants["ddp.static_graph"] = True
        actions: tuple[Action, ...] = ()
        if self.comm_hook != "none":
            actions = (Action(keys=("ddp.comm_hook",), when="wrapped", do=self._register_hook),)
        return Change(wants=wants, actions=actions, parity=PARITY[self.comm_hook])

    def _register_hook(self, site: Any) -> Applied:
        """Register on the wrapped model itself: Lightning ignores ddp_comm_hook on the CPU."""
        counted, sizes = [0], (each.nbytes for each in site.module.parameters() if each.requires_grad)
        if self.comm_hook == "powersgd" and site.facts.device == "cpu" and sum(sizes) > FIRST_BUCKET_BYTES:
            # Each of its exchanges starts another when it ends, which gloo's threads order differently on each rank.
            raise NotApplicable("over gloo, powersgd with more than one bucket of gradients waits for ever; it needs"
                                " NCCL (the bucket settings are in place)")  # fmt: skip
        try:
            state, hook = _hook(self.comm_hook)
            site.wrapped.register_comm_hook(state, _counting(hook, counted))
        except (TypeError, ValueError, RuntimeError, ImportError) as error:
            raise NotApplicable(f"the {self.comm_hook} hook cannot be registered: {error}"
                                " (the bucket settings are in place)") from error  # fmt: skip

        def probe() -> Mapping[str, Any]:
            return {"comm_hook": self.comm_hook, "hook_calls": counted[0]}

        return Applied(undo=lambda: None, probe=probe)  # the wrapper, and the hook with it, ends with the fit

    def verify(self, seen: Measurement) -> Verdict:
        """Taken when DDP has the settings and a hook, if asked for, was called."""
        evidence = seen.evidence.get("overlap", {})
        if "gradient_as_bucket_view" not in evidence:
            return Verdict(took=None, why="no DDP wrapper was seen")
        took = evidence["gradient_as_bucket_view"] == self.gradient_as_bucket_view
        took &= self.bucket_cap_mb is None or evidence["bucket_cap_mb"] == self.bucket_cap_mb
        took &= not self.static_graph or evidence["static_graph"]
        took &= self.comm_hook == "none" or evidence.get("hook_calls", 0) > 0
        found = ", ".join(f"{key} {value}" for key, value in evidence.items())
        return Verdict(took=took, why=f"DDP ran with {found}")


def _hook(name: str) -> tuple[Any, Callable[..., Any]]:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    if name == "powersgd":
        # PowerSGD needs some plain steps first: with bucket views it refuses to start before the second.
        return powerSGD_hook.PowerSGDState(process_group=None, start_powerSGD_iter=10), powerSGD_hook.powerSGD_hook
    return None, {"bf16": default_hooks.bf16_compress_hook, "fp16": default_hooks.fp16_compress_hook}[name]


def _counting(hook: Callable[..., Any], counted: list[int]) -> Callable[..., Any]:
    """The same hook, counting its calls; it keeps the name and annotations DDP checks before it accepts a hook."""
    import functools

    @functools.wraps(hook)
    def counting(state: Any, bucket: Any) -> Any:
        counted[0] += 1
        return hook(state, bucket)

    return counting

"""Hide gradient exchange behind the backward pass: DDP's buckets, views, static graph and communication hooks.

Faster because  gradients are exchanged while the backward still runs, without extra copies, or in half the bytes.
Costs           compressing hooks round the gradients; static_graph assumes that every step uses the same parameters.
Don't use when  there is one device, or the exchange is already hidden: on fast links a compressing hook costs time.
Evidence        the settings read back from the live DDP object; exchanges run by the hook
Source          https://docs.pytorch.org/docs/stable/ddp_comm_hooks.html
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from fastloop.errors import NotApplicable, require_positive
from fastloop.records.card import Card, Tunable, Variant
from fastloop.records.facts import Facts
from fastloop.records.measurement import Measurement
from fastloop.records.plan import Action, Applied, Change, Parity, Site, Verdict

PARITY: dict[str, Parity] = {"bf16": "approximate", "fp16": "approximate", "powersgd": "changes-training"}
FIRST_BUCKET_BYTES = 2**20
"""Size of DDP's first bucket, regardless of bucket_cap_mb, so that the exchange starts early."""
CARD = Card(
    family="sync",
    does="the rung's bucket settings can hide more of the exchange behind the backward",
    answers={"comm_exposed": 1},
    advice={
        "comm_exposed": "try rungs.overlap.comm_hook: bf16, which helps on slow links and costs time on fast ones, or"
        " exchange less often (accumulate_grad_batches, which changes the training)"
    },
    applies=lambda seen: seen.world_size > 1,
    variants=(
        Variant(tune=True),
        Variant(name="bf16", settings=({"comm_hook": "bf16"},)),
        Variant(name="powersgd", settings=({"comm_hook": "powersgd"},), changes_training=True),
    ),
    tunes=Tunable(field="bucket_cap_mb", values=lambda _space: (10, 25, 50, 100), least_devices=2),
    explains={
        "Can't detach views in-place": "a gradient was detached in place, which rungs.overlap.gradient_as_bucket_view"
        " forbids: set it to false"
    },
)


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """How DistributedDataParallel exchanges gradients. No setting is right for every model: measure yours."""

    enabled: bool = False
    gradient_as_bucket_view: bool = True
    """Store gradients inside the exchange buckets, which saves one copy and one set of gradients."""
    bucket_cap_mb: int | None = None
    """MiB per bucket; null = DDP's default of 25."""
    static_graph: bool = False
    """Promise that every step uses the same parameters in the same order."""
    comm_hook: Literal["none", "bf16", "fp16", "powersgd"] = "none"
    """How to compress gradients for the exchange."""

    def __post_init__(self) -> None:
        why, do = "a bucket holds at least 1 MiB", "write a positive number or null"
        require_positive("overlap.bucket_cap_mb", self.bucket_cap_mb, why=why, do=do)

    def plan(self, facts: Facts) -> Change:
        """Request DDP settings and, once the model is wrapped, the hook."""
        if not facts.is_ddp:
            raise NotApplicable(f"needs DDP with several devices; the strategy is {facts.strategy}")
        if facts.world_size < 2:
            raise NotApplicable("one process has no gradients to exchange")
        if self.static_graph and (facts.micro_batches or facts.accumulate > 1 or facts.accumulation_scheduled):
            # pytorch #143580: the first backward under no_sync trips an internal assert.
            raise NotApplicable(
                "static_graph with several backward passes per step fails inside DDP;"
                " turn off static_graph, or accumulation and micro-batches"
            )
        if self.gradient_as_bucket_view and facts.detaches_grads:
            raise NotApplicable(
                f"{', '.join(facts.detaches_grads)} calls detach_() on gradients, which bucket views"
                " forbid; set gradients to None, or gradient_as_bucket_view: false"
            )
        if self.gradient_as_bucket_view and facts.uses_grads:
            raise NotApplicable(
                f"your code uses gradients ({', '.join(facts.uses_grads)}), and bucket views would overwrite any that"
                " it keeps; for the rung's other settings, set gradient_as_bucket_view: false"
            )
        if self.comm_hook != "none" and facts.user_comm_hook:
            raise NotApplicable("the strategy already has your own ddp_comm_hook, which stays")
        actions = [Action(when="before_wrap", do=self._set_keywords), Action(when="wrapped", do=_read_back)]
        if self.comm_hook != "none":
            actions.append(Action(keys=("ddp.comm_hook",), when="wrapped", do=self._register_hook))
        wants = {f"ddp.{name}": value for name, value in self._list_ddp_keywords().items()}
        return Change(wants=wants, actions=tuple(actions), parity=PARITY.get(self.comm_hook, "exact"))

    def _list_ddp_keywords(self) -> dict[str, Any]:
        """Return DistributedDataParallel's arguments that differ from its defaults."""
        cap = {} if self.bucket_cap_mb is None else {"bucket_cap_mb": self.bucket_cap_mb}
        static = {"static_graph": True} if self.static_graph else {}
        return {"gradient_as_bucket_view": self.gradient_as_bucket_view, **cap, **static}

    def _set_keywords(self, site: Site) -> Applied:
        return Applied(undo=site.set_ddp(self._list_ddp_keywords()))

    def _register_hook(self, site: Site) -> Applied:
        """Register on the wrapped model, which is gone after the fit: Lightning ignores ddp_comm_hook on the CPU."""
        counted, sizes = [0], (each.nbytes for each in site.module.parameters() if each.requires_grad)
        if self.comm_hook == "powersgd" and site.facts.device == "cpu" and sum(sizes) > FIRST_BUCKET_BYTES:
            # Each of its exchanges starts another one when done, and gloo's threads order these differently per rank.
            raise NotApplicable(
                "over gloo, powersgd hangs with more than one bucket; it needs NCCL (bucket settings are in place)"
            )
        try:
            site.wrapped.register_comm_hook(*_make_hook(self.comm_hook, counted))
        except (TypeError, ValueError, RuntimeError, ImportError) as error:
            raise NotApplicable(
                f"the {self.comm_hook} hook cannot be registered: {error} (the bucket settings are in place)"
            ) from error
        return Applied(undo=lambda: None, probe=lambda: {"comm_hook": self.comm_hook, "hook_calls": counted[0]})

    def verify(self, seen: Measurement) -> Verdict:
        """The rung took effect if DDP has the settings, and the hook, if configured, was called."""
        evidence = seen.evidence.get("overlap", {})
        if "gradient_as_bucket_view" not in evidence:
            return Verdict(took=None, why="no DDP wrapper was seen")
        took = evidence["gradient_as_bucket_view"] == self.gradient_as_bucket_view
        took &= self.bucket_cap_mb is None or evidence["bucket_cap_mb"] == self.bucket_cap_mb
        took &= not self.static_graph or evidence["static_graph"]
        took &= self.comm_hook == "none" or evidence.get("hook_calls", 0) > 0
        found = ", ".join(f"{key} {value}" for key, value in evidence.items())
        return Verdict(took=took, why=f"DDP ran with {found}")


def _read_back(site: Site) -> Applied:
    """Change nothing; read back the settings of the live DDP object."""
    model = site.wrapped

    def probe() -> Mapping[str, Any]:
        return {
            "gradient_as_bucket_view": model.gradient_as_bucket_view,
            "static_graph": model.static_graph,
            "bucket_cap_mb": model.bucket_bytes_cap // 2**20,
        }

    return Applied(undo=lambda: None, probe=probe)


def _make_hook(name: str, counted: list[int]) -> tuple[Any, Callable[..., Any]]:
    """Return state and hook for DDP; the hook counts its calls, and keeps the annotations that DDP checks."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    # PowerSGD needs some plain steps first: with bucket views it refuses to start before the second step.
    state = powerSGD_hook.PowerSGDState(process_group=None, start_powerSGD_iter=10) if name == "powersgd" else None
    hooks = {"bf16": default_hooks.bf16_compress_hook, "fp16": default_hooks.fp16_compress_hook}
    hook: Callable[..., Any] = hooks.get(name, powerSGD_hook.powerSGD_hook)

    @functools.wraps(hook)
    def counting(state: Any, bucket: Any) -> Any:
        counted[0] += 1
        return hook(state, bucket)

    return state, counting

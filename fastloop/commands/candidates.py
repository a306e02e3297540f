"""Which rung a climb tries next, and why none is left. Pure: the same costs and history give the same answer."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from fastloop.commands.stack import Stack, patch
from fastloop.predict import NEAR, WORTH_PCT, Costs, ceilings_ms
from fastloop.report.climbed import ODD, UNDECIDED, broken, unanswered

FAMILY = {"workers": "feed", "pin": "feed", "prefetch": "feed", "amp": "compute", "layout": "compute",
          "fused": "compute", "compile": "compute", "batch": "fill", "overlap": "sync"}  # fmt: skip
RUNGS = {"feed": ("workers", "pin", "prefetch"), "compute": ("amp", "layout", "fused", "compile", "batch"),
         "sync": ("overlap",)}  # fmt: skip
"""By the ceiling that says what they can gain at most; within it in this order. ``batch`` fills the same device that
the compute rungs make faster, so it has their ceiling."""
UNMEASURED = 0.5
"""The ceiling of computing is what no rung can reach; against those that a trial has reached it counts half."""
RETRIES = 1
"""Times that a rung that was not faster is tried again, once the stack has grown: some pay only on top of others."""
AGAIN = ("small", "not_faster", UNDECIDED)
"""Ends after which that is worth it; a screen whose pairs contradict each other is made again at once. A crash, a gate
that failed and a plan that says no stay what they are."""

LOST_PCT = -50.0
"""Of the step: what was predicted to make it so much longer is not tried again."""

Component = Literal["loader", "replayed", "gap"]


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """Something to put on the stack."""

    rung: str
    key: str
    """Tells it from other attempts with the same rung; names its folder."""
    patches: tuple[Mapping[str, Any], ...]
    """Ways to set it, the likeliest first."""
    component: Component = "replayed"
    """The cost that it changes, and so the trial that predicts it."""
    every: bool = True
    """Try every patch; else only until one runs (a micro-batch that fits)."""
    tunes: str | None = None
    """What to search for once it is on the stack."""
    refused: str | None = None
    """Why there is no need to try."""

    @property
    def family(self) -> str:
        return FAMILY[self.rung.partition("+")[0]]


@dataclass(frozen=True, kw_only=True)
class Start:
    """What does not change during a climb."""

    enabled: frozenset[str] = frozenset()
    """Rungs that the configuration has on already: the user's word stands."""
    devices: int = 1
    allow: frozenset[str] = frozenset()
    on_cuda: bool = False
    cpus: int = 1
    """For each rank."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Rungs that the training without them already shows to be refused by their plan, and why."""
    micro_batch: int | None = None
    """Samples of a loader batch on one rank."""
    rank_batch: int | None = None
    """Samples of an optimizer step on one rank."""

    @property
    def batches_per_step(self) -> float:
        return max(1.0, self.rank_batch / self.micro_batch) if self.rank_batch and self.micro_batch else 1.0


@dataclass(frozen=True, kw_only=True)
class Known:
    """Where a climb stands."""

    start: Start
    costs: Costs
    stack: Stack
    rows: Sequence[Mapping[str, Any]] = ()
    """What was tried, the rows of ``climb.json``."""

    @property
    def height(self) -> int:
        return height(self.rows)

    def pct(self, ms: float) -> float:
        return 100 * ms / self.costs.now_ms


def height(rows: Sequence[Mapping[str, Any]]) -> int:
    """Rungs that were kept."""
    return sum(bool(row["kept"]) for row in rows)


def choose(known: Known) -> Candidate | str:
    """What to try next: of the family with the largest ceiling its next open rung; or why there is nothing to try."""
    ceilings = {family: ms for family, ms in ceilings_ms(known.costs).items() if known.pct(ms) >= WORTH_PCT}
    ranked = sorted(ceilings, key=lambda family: ceilings[family] * (UNMEASURED if family == "compute" else 1))
    for family in reversed(ranked):
        for rung in RUNGS[family]:
            if rung not in known.start.enabled:
                for candidate in _ways(rung, known):
                    if _is_open(candidate.key, known):
                        refused = candidate.refused or known.start.refused.get(rung)
                        return dataclasses.replace(candidate, refused=refused)
    return _together(known) or _nothing_left(known, ceilings)


def _nothing_left(known: Known, ceilings: Mapping[str, float]) -> str:
    none = "" if known.height or broken(known.rows) or unanswered(known.rows) else "nothing to gain: "
    if not ceilings:
        return f"{none}no ceiling is above {WORTH_PCT:g} %"
    left = ", ".join(f"{'at most ' if family == 'compute' else ''}{known.pct(ms):.0f} % in {family}"
                     for family, ms in ceilings.items())  # fmt: skip
    return f"{none}no rung is left that could gain {WORTH_PCT:g} % (without bounds it would be {left})"


def _ways(rung: str, known: Known) -> Iterator[Candidate]:
    """What can be done with one rung at this point, the plain thing first."""
    start, stack = known.start, known.stack
    if rung == "workers":
        yield from _workers(known)
    elif rung in ("pin", "prefetch"):
        yield Candidate(rung=rung, key=rung, patches=(patch(rung),), tunes="prefetch" if rung == "prefetch" else None)
    elif rung == "amp":
        yield Candidate(rung=rung, key=rung, patches=(patch(rung),))
        if start.on_cuda and _ended("amp", known) in ("parity", "crashed"):
            yield Candidate(rung=rung, key="amp-tf32", patches=(patch(rung, mode="tf32"),))
    elif rung == "compile":
        # Graphs replay launches; static buffers forbid several backward passes for one step.
        graphs = start.on_cuda and known.costs.launch_bound and start.batches_per_step == 1 and "batch" not in stack
        modes = ({}, {"mode": "reduce-overhead"}) if graphs else ({},)
        yield Candidate(rung=rung, key=rung, patches=tuple(patch(rung, **mode) for mode in modes))
    elif rung == "batch":
        yield _batch(start)
    elif rung == "overlap":
        hooks = ("bf16", "powersgd") if "changes-training" in start.allow else ("bf16",)
        yield Candidate(rung=rung, key=rung, patches=(patch(rung),), tunes="overlap")
        yield from (Candidate(rung=rung, key=f"overlap-{hook}", patches=(patch(rung, comm_hook=hook),))
                    for hook in hooks)  # fmt: skip
    else:
        yield Candidate(rung=rung, key=rung, patches=(patch(rung),))


def _workers(known: Known) -> Iterator[Candidate]:
    if "workers" not in known.stack:
        yield Candidate(rung="workers", key="workers", patches=(patch("workers"),), component="loader", tunes="workers")
        return
    settings, costs = known.stack["workers"], known.costs
    if known.pct(costs.gap_ms) >= WORTH_PCT and not settings.get("persistent"):
        yield Candidate(rung="workers", key="workers-persistent", patches=(patch("workers", persistent=True),),
                        component="gap")  # fmt: skip
    more = not costs.loaders_ms or max(count for count, _ in costs.loaders_ms) > settings.get("count", 0)
    waits = costs.replayed_ms is not None and costs.core_ms > NEAR * costs.replayed_ms
    if waits and more and _last_tuned(known) < known.height:
        yield Candidate(rung="workers", key="workers-count", patches=(), component="loader", tunes="workers")


def _last_tuned(known: Known) -> int:
    """How high the stack was when the number of workers was searched for the last time; -1 if never."""
    tuned = [row for row in known.rows if row["try"] == "workers-count" or (
        "rungs.workers.count" in (row["tuned"] or {}) and (row["kept"] or row["rung"] == "workers"))]
    return max((row["at"] + row["kept"] for row in tuned), default=-1)


def _batch(start: Start) -> Candidate:
    whole, micro = start.rank_batch, start.micro_batch
    if whole is None or micro is None or whole <= micro:
        refused = "a step is one micro-batch already: a larger one would change the global batch"
        return Candidate(rung="batch", key="batch", patches=(), refused=refused)
    sizes = [size for size in (whole, whole // 2) if size > micro and not size % micro]
    return Candidate(rung="batch", key="batch", patches=tuple(patch("batch", micro_batch=size) for size in sizes),
                     every=False, tunes="batch" if whole >= 4 * micro else None)  # fmt: skip


def _together(known: Known) -> Candidate | None:
    """Rungs that are each predicted to gain too little, where all of them may gain enough. One trial predicts them."""
    latest = {row["try"]: row for row in known.rows if row["try"] in FAMILY and row["rung"] != "workers"}
    now = [row for row in latest.values() if row["at"] == known.height and row["ended"] == "small"]
    small = [row for row in now if known.pct(row["predicted_saved_ms"]) > WORTH_PCT / 10]
    if len(small) < 2 or known.pct(sum(row["predicted_saved_ms"] for row in small)) < WORTH_PCT:
        return None
    merged = {"rungs": {rung: settings for row in small for rung, settings in row["patch"]["rungs"].items()}}
    names = "+".join(merged["rungs"])
    return Candidate(rung=names, key=names, patches=(merged,)) if _is_open(names, known) else None


def _ended(key: str, known: Known) -> str | None:
    return next((str(row["ended"]) for row in reversed(known.rows) if row["try"] == key), None)


def _is_open(key: str, known: Known) -> bool:
    """Whether an attempt was never made, or may be made once more since the stack has grown."""
    made = [row for row in known.rows if row["try"] == key]
    if not made:
        return True
    if key == "workers-count":
        return True  # it says itself when there is something new to search for
    last = made[-1]
    lost = last["ended"] == "small" and known.pct(last["predicted_saved_ms"] or 0.0) < LOST_PCT
    again = last["ended"] == ODD or (last["ended"] in AGAIN and last["at"] < known.height and not lost)
    return again and len(made) <= RETRIES

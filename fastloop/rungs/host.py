"""Cut host overhead: a shorter path through Lightning's loop, scheduled garbage collection, optional CUDA graphs.

Faster because  the shorter path saves 0.15 ms per step and as much per logged value; garbage is collected only at
                chosen steps; step_graph replays all kernels of a forward, of a backward, and of a fused optimizer's
                update, in one call each.
Costs           with step_graph: memory for a second set of activations, and a few steps' time to record and compare.
Don't use when  step_graph is on and a library that training_step calls reads files, the clock or its own settings in
                each step: your own code is searched for that, but a replay ignores what libraries read.
Evidence        replayed steps and their deviation, batches on the short path, garbage collections; or why none
Source          https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal

from fastloop.errors import NotApplicable, require_positive
from fastloop.evidence.gpu.forks import set_thresholds_of_children
from fastloop.records.card import Card, ClimbState, Settings, Variant
from fastloop.records.facts import Facts
from fastloop.records.measurement import Measurement
from fastloop.records.plan import Action, Applied, Change, Site, Verdict, say_count
from fastloop.records.readings import on_gpu, waits_in_own_code


def _list_variants(state: ClimbState) -> Iterator[Variant]:
    """Try step graphs if the device waits for kernel launches: faster kernels would not shorten the step then."""
    if state.on_cuda and state.launch_bound and state.one_backward:
        yield Variant(settings=({"step_graph": "auto"},), first=True, together=True)


def _shorten_loop(does: str, _seen: Measurement) -> tuple[Settings, str]:
    return {"enabled": True}, does


def _replay_steps(seen: Measurement) -> tuple[Settings, str] | None:
    """Propose replays against launch overhead, unless the measurement rules them out: the shorter loop alone saves
    little of it."""
    if waits_in_own_code(seen) or seen.world_size > 1 or seen.precision == "16-mixed":
        return None
    return {"enabled": True, "step_graph": "auto"}, REPLAYS


REPLAYS = "a CUDA graph replays steps of equal shapes without launching each kernel, and Lightning's loop gets shorter"
LOOP = {
    "bar_sync": "host reads values for progress bars ten times a second instead of after every batch",
    "garbage": "host collects garbage at chosen steps only",
    "log_calls": "host takes a shorter path through self.log",
    "loop": "host takes a shorter path through Lightning's loop",
}

CARD = Card(
    family="compute",
    does=REPLAYS,
    answers={"launch_bound": 2, **dict.fromkeys(LOOP, 1)},
    applies=on_gpu,
    remedies={"launch_bound": _replay_steps, **{cause: partial(_shorten_loop, does) for cause, does in LOOP.items()}},
    variants=_list_variants,
)

AUTO_STEPS = 100
"""Batches between two garbage collections: one over the objects of a hundred steps takes about a millisecond."""
FULL_S, FULL_SHARE = 60.0, 0.005
"""Full collections, over all objects, are at least these seconds apart, and rare enough to take at most this share of
the time. With PyTorch Geometric imported one takes 0.3 s: too long for every 100 steps of 12 ms (an H200)."""
MOST_YOUNG = 100_000
"""Number of new objects after which Python still collects by itself, such as in a long validation. Worker processes
keep their own threshold."""


@dataclass(frozen=True, kw_only=True)
class Host:
    """Less overhead in the training loop itself."""

    enabled: bool = False
    gc_every_steps: int | Literal["auto"] | None = "auto"
    """Batches between two passes of the garbage collector; null = Python's own schedule."""
    step_graph: bool | Literal["auto"] = False
    """Replay recorded steps; auto = if that is faster."""

    def __post_init__(self) -> None:
        why, do = "a pass needs at least one batch", "write a positive number, auto or null"
        require_positive("host.gc_every_steps", self.gc_every_steps, why=why, do=do)

    def plan(self, facts: Facts) -> Change:
        """Request the enabled parts, once the optimizers exist."""
        refused = _explain_no_graph(facts) if self.step_graph else "step_graph is false"
        actions = [Action(keys=("host.loop",), when="train_start", do=_thin_loop)]
        if self.gc_every_steps is not None:
            actions.append(Action(keys=("host.gc",), when="train_start", do=self._pace_garbage))
        if refused is None:
            actions.append(Action(keys=("host.step_graph",), when="train_start", do=self._graph_the_steps))
        if self.step_graph is True and refused:
            raise NotApplicable(f"no step graph: {refused}")
        return Change(
            parity="exact" if refused else "approximate",
            actions=tuple(actions),
            notes=() if refused is None or not self.step_graph else (f"no step graph: {refused}",),
        )

    def verify(self, seen: Measurement) -> Verdict:
        """The rung took effect if steps were replayed or another part ran; ``step_graph: true`` needs replays."""
        evidence = seen.evidence.get("host", {})
        if not evidence:
            return Verdict(took=None, why="no step ran")
        replays, parts = evidence.get("replayed_steps", 0), []
        if replays:
            parts.append(f"{say_count(replays, 'step')} replayed, {evidence['eager_steps']:,} ran eagerly")
            parts.append(f"a replay deviates by {evidence['deviation']:.2g}")
            if updates := evidence.get("replayed_updates"):
                parts.append(f"{say_count(updates, 'update')} of the optimizer replayed")
            elif why := evidence.get("update_refused"):
                parts.append(f"no update of the optimizer was replayed: {why}")
        elif "replayed_steps" in evidence:
            parts.append(f"no step was replayed: {evidence.get('graph_refused') or 'too few steps'}")
        if replays and (why := evidence.get("graph_refused")):
            parts.append(f"no step was replayed after that: {why}")
        words = {
            "flat_batches": ("batch", "took the short path through Lightning's loop"),
            "moves_left_out": ("device move", "of logged values skipped"),
            "gc_passes": ("garbage collection", "at chosen steps"),
        }
        parts += ["hooks were called directly"] if evidence.get("direct_hooks") else []
        parts += [f"{say_count(n, noun)} {rest}" for name, (noun, rest) in words.items() if (n := evidence.get(name))]
        parts += [evidence[why] for why in ("loop_refused", "gc_refused") if why in evidence]
        is_mostly = 2 * replays >= evidence.get("eager_steps", 0) and replays > 0  # a few replays make no run faster
        took = is_mostly or (self.step_graph is not True and any(map(evidence.get, (*words, "direct_hooks"))))
        return Verdict(took=took, why="; ".join(parts) or "there was no overhead it could remove")

    def _graph_the_steps(self, site: Site) -> Applied:
        return site.graph_steps(self.step_graph is True)

    def _pace_garbage(self, site: Site) -> Applied:
        """Collect young objects every few batches, and all objects once in a while."""
        if not gc.isenabled() or not gc.get_threshold()[0]:  # Python has two ways to turn it off
            why = "your script turned the garbage collector off; your choice stands"
            return Applied(undo=lambda: None, probe=lambda: {"gc_refused": why})
        every = AUTO_STEPS if self.gc_every_steps == "auto" else self.gc_every_steps or 1
        before, passes = gc.get_threshold(), _Passes(every)

        def undo() -> None:
            stop()
            gc.set_threshold(*before)
            set_thresholds_of_children(None)

        set_thresholds_of_children(before)
        gc.set_threshold(max(MOST_YOUNG, before[0]), *before[1:])
        stop = site.note_each_batch(passes.count_batch)
        return Applied(undo=undo, probe=lambda: {"gc_passes": passes.done, "gc_every_steps": every})


class _Passes:
    """The garbage collector's passes, one every few batches."""

    def __init__(self, every: int) -> None:
        self.done = self._batches = 0
        self._every, self._full_at_s = every, time.monotonic() + FULL_S

    def count_batch(self) -> None:
        self._batches += 1
        if self._batches % self._every:
            return
        began_s = time.monotonic()
        is_full = began_s >= self._full_at_s
        gc.collect(2 if is_full else 1)
        self.done += 1
        if is_full:
            now_s = time.monotonic()
            self._full_at_s = now_s + max(FULL_S, (now_s - began_s) / FULL_SHARE)


def _thin_loop(site: Site) -> Applied:
    return site.thin_loop()


def _explain_no_graph(facts: Facts) -> str | None:
    """Return why steps cannot be replayed, judging by facts known before the run; None if nothing forbids it."""
    if facts.device != "cuda":
        return f"CUDA graphs need CUDA; this run is on {facts.device}"
    if facts.world_size > 1 or not facts.plain_gradients:
        return f"{facts.strategy} exchanges gradients, which a recording does not support"
    if not facts.automatic_optimization:
        return "manual optimization steps inside training_step"
    if facts.accumulation_scheduled:
        return "the number of batches in a step changes"
    if facts.steps_with_iterator:
        return "training_step fetches its own batches"
    if facts.grad_hooks:
        return "parameters have hooks on their gradients"
    if facts.averages_weights_by_swa:
        return "StochasticWeightAveraging runs an epoch without backward"
    if facts.precision == "16-mixed":
        return "the loss scale of 16-mixed changes between steps"
    return None

"""What a rung would save, before it is screened: from a trial of the one cost that it changes, its number tuned."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastloop.commands.arms import Ask
from fastloop.commands.candidates import Candidate, Known
from fastloop.commands.choosing import TOLERANCE
from fastloop.commands.lab import Lab, Seen
from fastloop.commands.lengths import Length, length
from fastloop.commands.search import Given
from fastloop.commands.stack import Stack, plus
from fastloop.commands.trial import Variation
from fastloop.predict import NEAR, WORTH_PCT, Costs, saved_ms
from fastloop.records import PARITY_ORDER, Parity
from fastloop.stats import Pool

PREFETCH, DEEPER = 2, 4
"""Batches to copy ahead: by default, and where that does not hide the copies."""
COMPILE_S = 60.0
"""More than another start, as long as no compile of this training was timed."""


@dataclass(frozen=True, kw_only=True)
class Scene:
    """What an attempt is made with."""

    lab: Lab
    known: Known
    warmup: int
    """As configured."""
    start_s: float
    """What a training takes besides its steps."""
    pool: Pool

    def length(self, fast_ms: float, slow_ms: float, stack: Stack, workers: int, *,
               fill_read: bool = False) -> Length:  # fmt: skip
        """Of trainings whose steps take so long, of which the one with the longest queues is this stack."""
        return length(fast_ms, slow_ms, queued=queued(stack, workers), warmup=self.warmup, screen=True,
                      batches_per_step=batches_per_step(self.known, stack), fill_read=fill_read)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Look:
    """What a trial of the changed cost says of one way to set a rung."""

    patch: Mapping[str, Any]
    then: Costs | None = None
    saved_ms: float | None = None
    ended: str | None = None
    """What rules it out; None: nothing so far."""
    why: str = ""
    tuned: Mapping[str, Any] | None = None
    parity_class: Parity = "exact"
    start_s: float = 0.0


# -- predicting -------------------------------------------------------------------------------------------------------


def predicted(scene: Scene, candidate: Candidate, at: str) -> Look:
    """The most promising way to set it."""
    looks = []
    for number, patch in enumerate(candidate.patches, 1):
        looks.append(_look(scene, candidate, patch, f"{at}/predict-{number}"))
        if looks[-1].ended is None and not candidate.every:
            break
    usable = [look for look in looks if look.ended is None]
    return max(usable, key=lambda look: math.inf if look.saved_ms is None else look.saved_ms, default=looks[0])


def _look(scene: Scene, candidate: Candidate, patch: Mapping[str, Any], at: str) -> Look:
    """Measure the cost that the rung changes."""
    known, costs = scene.known, scene.known.costs
    if candidate.component == "gap":
        then = costs.but(outside_ms=costs.outside_ms - costs.gap_ms, gap_ms=0.0)
        return Look(patch=patch, then=then, saved_ms=saved_ms(costs, then), start_s=scene.start_s)
    stack, expected = plus(known.stack, patch), costs.replayed_ms or costs.now_ms
    variation: Variation = candidate.component
    took = scene.length(expected, expected, {}, 0)
    if costs.beside:  # workers with nothing to load would leave the training thread more of the CPUs than it will have
        variation, expected = "as_it_is", costs.now_ms
        took = scene.length(expected, expected, stack, costs.workers, fill_read=True)
    need_s = took.seconds(expected, scene.start_s) + (COMPILE_S if "compile" in patch["rungs"] else 0.0)
    seen = scene.lab.run(at, stack, Ask(variation=variation, steps=took.steps, warmup=took.warmup),
                         what=f"{candidate.key}: predicting", need_s=need_s)  # fmt: skip
    if not seen.ok:
        return Look(patch=patch, ended="crashed", why=seen.cause or "it failed")
    rungs = list(patch["rungs"])
    if reasons := [seen.skipped[rung] for rung in rungs if rung in seen.skipped]:
        return Look(patch=patch, ended="inactive", why=reasons[0])
    then = _then(costs, candidate, seen)
    start_s = max(scene.start_s, seen.seconds - took.steps * (seen.step_ms or 0) / 1e3)
    look = Look(patch=patch, then=then, saved_ms=saved_ms(costs, then), start_s=start_s,
                parity_class=_class(seen, rungs))  # fmt: skip
    if look.parity_class == "changes-training" and look.parity_class not in known.start.allow:
        return dataclasses.replace(look, ended="class", why="it changes the training: --allow changes-training")
    return look


def _then(costs: Costs, candidate: Candidate, seen: Seen) -> Costs:
    """The costs with the one that was measured in the place of today's."""
    resident = costs.resident_ms if candidate.family == "feed" else None
    alone = costs.alone_ms if candidate.family == "sync" else None
    return costs.but(replayed_ms=seen.rest_ms if costs.beside else seen.core_ms, resident_ms=resident, alone_ms=alone,
                     mfu=seen.mfu, launch_bound=seen.launch_bound)  # fmt: skip


def _class(seen: Seen, rungs: Sequence[str]) -> Parity:
    return max((seen.classes.get(rung, "exact") for rung in rungs), key=PARITY_ORDER.index)


# -- tuning -----------------------------------------------------------------------------------------------------------


def tuned(scene: Scene, candidate: Candidate, look: Look, at: str) -> Look:
    """With its number by measured step time, where another one could matter."""
    if candidate.tunes is None or look.then is None or look.ended or not _worth_tuning(scene, candidate, look.then):
        return look
    if candidate.tunes == "prefetch":
        return _deeper(scene, candidate, look, at)
    known = scene.known
    took = scene.length(known.costs.now_ms, known.costs.now_ms, plus(known.stack, look.patch), look.then.workers)
    each_s = took.seconds(known.costs.now_ms, look.start_s or scene.start_s)
    found = scene.lab.tune(f"{at}/tune", plus(known.stack, look.patch), candidate.tunes, took,
                           _given(known, candidate.tunes, look), what=f"{candidate.key}: tuning",
                           need_s=each_s)  # fmt: skip
    if not found.patch:
        return look
    number = None if found.best is None else {found.key: found.best}
    rungs = {rung: {**settings, **found.patch["rungs"].get(rung, {})} for rung, settings in look.patch["rungs"].items()}
    patch = {"rungs": rungs}
    if plus(known.stack, patch) in (known.stack, plus(known.stack, look.patch)):
        return dataclasses.replace(look, tuned=number)
    return dataclasses.replace(_look(scene, candidate, patch, f"{at}/predict-tuned"), tuned=number)


def _given(known: Known, what: str, look: Look) -> Given:
    """What a search need not train: the stack without the rung, and the micro-batch that the look was at."""
    costs, start, then = known.costs, known.start, look.then
    if what != "batch":
        return Given(ms={0: costs.now_ms})
    micro = start.micro_batch or 1
    size = look.patch["rungs"]["batch"].get("micro_batch")
    known_ms = {micro: costs.replayed_ms, size: None if then is None else then.replayed_ms}
    loader_ms = costs.loader_ms if costs.beside and costs.loader_ms is not None else 0.0
    ms = {value: max(each, loader_ms) + costs.outside_ms for value, each in known_ms.items()
          if value and each is not None}  # fmt: skip
    return Given(ms=ms, micro=micro, window=round(start.batches_per_step), beside=costs.beside)


def _deeper(scene: Scene, candidate: Candidate, look: Look, at: str) -> Look:
    """With more batches copied ahead, where that hides more of the copies."""
    deep = _look(scene, candidate, {"rungs": {"prefetch": {"enabled": True, "depth": DEEPER}}}, f"{at}/predict-deeper")
    rest, deep_rest = (each.then.replayed_ms if each.then is not None else None for each in (look, deep))
    better = deep.ended is None and None not in (rest, deep_rest) and \
        (deep_rest or 0.0) < (rest or 0.0) * (1 - TOLERANCE["prefetch"])  # fmt: skip
    depth = DEEPER if better else PREFETCH
    return dataclasses.replace(deep if better else look, tuned={"rungs.prefetch.depth": depth})


def _worth_tuning(scene: Scene, candidate: Candidate, then: Costs) -> bool:
    """Whether the step would wait for what the number can change."""
    rest, costs = then.replayed_ms, scene.known.costs
    if candidate.tunes == "prefetch":
        if rest is None or costs.resident_ms is None or rest <= NEAR * costs.resident_ms:
            return False
        hidden = saved_ms(costs, then.but(replayed_ms=costs.resident_ms))
        return hidden is not None and scene.known.pct(hidden) >= WORTH_PCT
    if candidate.tunes == "overlap":
        return rest is not None and costs.alone_ms is not None and rest > NEAR * costs.alone_ms
    gain = saved_ms(costs, then)
    return gain is None or scene.known.pct(gain) >= WORTH_PCT


def queued(stack: Stack, workers: int) -> int:
    """Batches that this stack keeps ready: by its workers, and on the device."""
    ahead = int(stack["prefetch"].get("depth", PREFETCH)) if "prefetch" in stack else 0
    return workers * int(stack.get("workers", {}).get("prefetch_factor", 2)) + ahead


def batches_per_step(known: Known, stack: Stack) -> float:
    """Loader batches of an optimizer step: one where the batch rung merges them."""
    return 1.0 if "batch" in stack else known.start.batches_per_step

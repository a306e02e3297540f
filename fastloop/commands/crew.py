"""How many workers a climb takes: by what their loaders do alone, and by trainings only where loading stays the limit.

One trial asks the loader with several counts. What it does with each is also the prediction of what the rung saves, so
there is nothing to predict, to search for and to predict again. And it is remembered: where another rung makes the rest
of the step so fast that this number would hold it up, it takes the next one along: alone, neither would save a thing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from fastloop.commands.arms import Ask
from fastloop.commands.candidates import Candidate
from fastloop.commands.choosing import FASTER, HEADROOM, TOLERANCE, choose, grid, promising, worth_asking
from fastloop.commands.lab import Seen
from fastloop.commands.look import Look, Scene
from fastloop.commands.stack import Stack, patch, plus
from fastloop.predict import saved_ms

FORESIGHT = 4.0
"""Times that other rungs may make the rest of the step faster: beyond that no further count is asked."""
LOADER_S, LOADER_BATCHES = 4.5, 6
"""What one count takes besides the start: seconds, and rounds of all its workers."""
COUNT = "rungs.workers.count"


def counted(scene: Scene, candidate: Candidate, at: str) -> Look:
    """The workers rung with the number to take, and what it would save."""
    costs, nothing = scene.known.costs, patch("workers")
    if not costs.loaders_ms:
        seen = _asked(scene, candidate, at)
        if not seen.ok or not (seen.loaders_ms or seen.skipped):
            return Look(patch=nothing, ended="crashed", why=seen.cause or "the loader does not tell what it takes")
        if "workers" in seen.skipped:
            return Look(patch=nothing, ended="inactive", why=seen.skipped["workers"])
        costs = costs.but(loaders_ms=tuple(seen.loaders_ms.items()), fill_read=seen.fill_read)
    loaders_ms = dict(costs.loaders_ms)
    count, why = _best(scene, candidate, loaders_ms, at)
    if count is None:
        return Look(patch=nothing, ended="crashed", why=why)
    if len(promising(loaders_ms, costs.replayed_ms)) > 1:  # trainings have told: more are no faster
        costs = costs.but(loaders_ms=tuple((each, ms) for each, ms in costs.loaders_ms if each <= count))
    if count == _count(scene):
        return Look(patch=nothing, ended="small", why=f"{count} workers are the number already", tuned={COUNT: count})
    then = costs.but(loader_ms=loaders_ms[count], workers=count)
    return Look(patch=patch("workers", count=count), then=then, saved_ms=saved_ms(scene.known.costs, then),
                tuned={COUNT: count}, start_s=scene.start_s)  # fmt: skip


def fed(scene: Scene, look: Look) -> Look:
    """Another rung, with as many workers as the step that it makes faster needs."""
    now, then = scene.known.costs, look.then
    count, loaders_ms = _count(scene), dict(now.loaders_ms)
    if look.ended or "workers" in look.patch["rungs"] or count is None:
        return look
    if then is None or then.replayed_ms is None or now.loader_ms is None:
        return look
    more = {each: ms for each, ms in loaders_ms.items() if each > count and ms < FASTER * now.loader_ms}
    if not more or now.loader_ms <= HEADROOM * then.replayed_ms:
        return look
    enough = promising(more, then.replayed_ms)
    best = enough[0] if len(enough) == 1 else min(more, key=lambda each: more[each])
    rungs = {**look.patch["rungs"], "workers": {"count": best}}
    then = then.but(loader_ms=more[best], workers=best)
    return dataclasses.replace(look, patch={"rungs": rungs}, then=then, saved_ms=saved_ms(now, then),
                               tuned={**(look.tuned or {}), COUNT: best})  # fmt: skip


def _count(scene: Scene) -> int | None:
    """The number that this climb has chosen; None where it is not up to it."""
    settings = scene.known.stack.get("workers", {})
    return int(settings["count"]) if "count" in settings else None


def _asked(scene: Scene, candidate: Candidate, at: str) -> Seen:
    """The loader alone, with all counts that are worth it."""
    known, costs = scene.known, scene.known.costs
    one_ms = None if costs.loader_ms is None else costs.loader_ms * max(1, costs.workers)
    enough_ms = None if costs.replayed_ms is None else HEADROOM * costs.replayed_ms
    ample_ms = None if enough_ms is None else enough_ms / FORESIGHT
    counts = worth_asking(grid("workers", cpus=known.start.cpus), one_ms, enough_ms)
    slow_s = LOADER_BATCHES * (one_ms or costs.now_ms) / 1e3 / known.start.batches_per_step
    return scene.lab.run(f"{at}/predict-1", plus(known.stack, patch("workers")),
                         Ask(variation="loader", counts=counts, enough_ms=ample_ms),
                         what=f"{candidate.key}: predicting",
                         need_s=scene.start_s + len(counts) * (LOADER_S + slow_s))  # fmt: skip


def _best(scene: Scene, candidate: Candidate, loaders_ms: Mapping[int, float], at: str) -> tuple[int | None, str]:
    """The count to take, or None and why."""
    counts = promising(loaders_ms, scene.known.costs.replayed_ms)
    if len(counts) == 1:
        return counts[0], ""
    trained = [_trained(scene, candidate, count, loaders_ms[count], at) for count in counts]
    ms = {count: seen.step_ms for count, seen in zip(counts, trained, strict=True) if seen.ok and seen.step_ms}
    causes = [seen.cause for seen in trained if seen.cause]
    return choose(ms, TOLERANCE["workers"]), causes[0] if causes else "the runs were too short to measure a rate"


def _trained(scene: Scene, candidate: Candidate, count: int, loader_ms: float, at: str) -> Seen:
    """A training with one count."""
    costs = scene.known.costs
    stack: Stack = plus(scene.known.stack, patch("workers", count=count))
    expected = max(costs.replayed_ms or 0.0, loader_ms) + costs.outside_ms
    took = scene.length(expected, expected, stack, count, fill_read=True)
    return scene.lab.run(f"{at}/count-{count}", stack, Ask(steps=took.steps, warmup=took.warmup),
                         what=f"{candidate.key}: training with {count}",
                         need_s=took.seconds(expected, scene.start_s))  # fmt: skip

"""How a run chooses its micro-batches: by a number or by a search, and with which rungs switched on."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial, reduce
from typing import Any

from fastloop.bridge.apply.live_plan import LivePlan
from fastloop.bridge.apply.micro.choice import PieceChoice
from fastloop.bridge.apply.micro.search import SizeSearch
from fastloop.bridge.apply.rehearse.budget import is_costly, is_quick
from fastloop.bridge.apply.rehearse.rehearsal import ApplierHandle
from fastloop.bridge.apply.site import LiveSite
from fastloop.errors import let_through
from fastloop.records.plan import Plan, Step


def make_choice(site: LiveSite, plan: Plan, live: LivePlan, handle: ApplierHandle) -> PieceChoice:
    """Make the `PieceChoice` for the rung that wants micro-batches.

    Args:
        plan: the plan for the train loader.
    """
    rung, wants = plan.owner("step.micro_batch") or "", plan.wants
    micro: int | SizeSearch = wants["step.micro_batch"]
    if wants["step.micro_batch"] == "auto":
        micro = _make_search(site, wants, live.held_steps, handle, lambda line: site.warn(f"{rung}: {line}"))
    return PieceChoice(micro, rung, wants, site, live)


def _make_search(
    site: LiveSite, wants: Mapping[str, Any], held: Sequence[Step], handle: ApplierHandle, warn: Callable[[str], None]
) -> SizeSearch:
    """Make the search that finds the micro-batch on the first step.

    Args:
        wants: all wants of the plan for the train loader.
        held: rungs that wait for the rehearsal.
    """
    quick = [step for step in held if is_quick(step)]
    names = sorted(step.rung for step in held)
    compiles = next((step.rung for step in held if is_costly(step)), None)
    return SizeSearch(
        target=wants["step.target_memory"],
        whole=wants["step.whole_batches"],
        quick=partial(_switch_on, site, quick, handle),
        waiting=[] if site.facts.compiled_by_user else [step.rung for step in quick],
        key=(names, site.facts.precision, site.facts.world_size, wants.get("step.batch_norm")),
        compiles=compiles if wants.get("step.batch_norm") == "groups" else None,
        say=site.say,
        warn=warn,
    )


@contextlib.contextmanager
def _switch_on(site: LiveSite, steps: Sequence[Step], handle: ApplierHandle) -> Iterator[Callable[[Any], Any]]:
    """Inside ``with``, switch on rungs that wait for the rehearsal; yields a function that converts batches."""
    before = list(site.staging.conversions)
    try:
        for step in steps:
            try:
                handle.apply(step)
            except Exception as error:  # the rehearsal will report it
                let_through(error)
                handle.unapply(step)
        new = [convert for convert in site.staging.conversions if convert not in before]
        yield lambda batch: reduce(lambda now, convert: convert(now), new, batch)
    finally:
        for step in reversed(steps):
            handle.unapply(step)

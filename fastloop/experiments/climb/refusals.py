"""Finds the rungs that a plan would refuse, and why, from a training without them. That saves trials."""

from __future__ import annotations

import os

from fastloop.errors import NotApplicable
from fastloop.evidence import machine
from fastloop.ladder import Ladder, collect_cards
from fastloop.records.facts import Facts, LoaderFacts
from fastloop.records.measurement import Measurement

PLAIN = "32-true"
"""Lightning's default precision."""


def find_refusals(result: Measurement) -> dict[str, str]:
    """Return the rungs whose plan would leave them out, with the reason."""
    facts, known, refused = _assume_facts(result), collect_cards(), {}
    for name, rung in Ladder().rungs():
        if known[name].plan_shows_refusal:
            try:
                rung.plan(facts)
            except NotApplicable as reason:
                refused[name] = str(reason)
    return refused


def _assume_facts(result: Measurement) -> Facts:
    """Return facts in which unknown properties are no obstacle, since a trial with the rung would reveal one."""
    loader, model = result.evidence.get("loader") or {}, result.evidence.get("model") or {}
    precision = result.precision or PLAIN
    return Facts(
        device=result.device,
        precision=precision,
        own_precision=precision != PLAIN,
        compiler=machine.find_cxx_compiler(os.environ),
        compiled_by_user=("the model",) if model.get("compiled") else (),
        compile_targets=("unknown",),
        convs=() if model.get("convs") == 0 else ("unknown",),
        attends_by_hand=() if model.get("attends_by_hand") == 0 else ("unknown",),
        classes=0 if model.get("classes") == 0 else 1,
        loader=LoaderFacts(
            kind=str(loader.get("kind")),
            map_style=loader.get("map_style") is not False,
            num_workers=loader.get("num_workers") or 0,
            pin_memory=loader.get("pin_memory") is True,
        ),
    )

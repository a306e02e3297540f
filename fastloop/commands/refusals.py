"""Which rungs a training would refuse, and why, as far as one without them shows: no trial has to find that out."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from fastloop import facts as machine
from fastloop.errors import NotApplicable
from fastloop.ladder import Ladder
from fastloop.records import Facts, LoaderFacts

SHOWN = ("workers", "pin", "prefetch", "amp", "layout", "compile")
"""Rungs whose plan turns on what a measurement tells. What it says of them holds on top of any other rung."""
PLAIN = "32-true"
"""Lightning's precision where nobody chose one."""


def refusals(measurement: Mapping[str, Any]) -> dict[str, str]:
    """The rungs that their own plan would leave out, and its reason."""
    ladder, facts = Ladder(), _facts(measurement)
    refused = {}
    for rung in SHOWN:
        try:
            getattr(ladder, rung).plan(facts)
        except NotApplicable as reason:
            refused[rung] = str(reason)
    return refused


def _facts(found: Mapping[str, Any]) -> Facts:
    """What is not known is taken to be no obstacle: a trial with the rung finds out."""
    evidence, precision = found.get("evidence") or {}, found.get("precision") or PLAIN
    loader, model = evidence.get("loader") or {}, evidence.get("model") or {}
    return Facts(
        device=found.get("device") or "cpu", precision=precision, own_precision=precision != PLAIN,
        compiler=machine.cxx_compiler(os.environ), compiled_by_user=("the model",) if model.get("compiled") else (),
        compile_targets=("unknown",), convs=() if model.get("convs") == 0 else ("unknown",),
        loader=LoaderFacts(kind=str(loader.get("kind")), map_style=loader.get("map_style") is not False,
                           num_workers=loader.get("num_workers") or 0, pin_memory=loader.get("pin_memory") is True),
    )  # fmt: skip

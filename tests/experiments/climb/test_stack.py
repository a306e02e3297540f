"""Stacks of rungs."""

from __future__ import annotations

from fastloop.config.loading import load
from fastloop.experiments.climb.candidates import apply_patch, list_overrides, make_patch


def test_a_patch_lies_on_top_and_changes_nothing_below() -> None:
    below = apply_patch({}, make_patch("workers"))
    above = apply_patch(below, {"rungs": {"workers": {"count": 4}, "amp": {"enabled": True}}})
    assert above == {"workers": {"enabled": True, "count": 4}, "amp": {"enabled": True}}
    assert below == {"workers": {"enabled": True}}


def test_it_is_written_as_the_command_line_takes_it() -> None:
    stack = apply_patch(
        apply_patch({}, make_patch("compile", mode="reduce-overhead", dynamic=None)),
        make_patch("batch", micro_batch=256),
    )
    rungs = load("resnet50", overrides=list_overrides(stack)).ladder
    assert rungs.enabled() == ("batch", "compile") and rungs.batch.micro_batch == 256
    assert rungs.compile.mode == "reduce-overhead" and rungs.compile.dynamic is None

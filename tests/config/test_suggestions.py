"""What is suggested for a mistyped name, and what is not."""

from __future__ import annotations

import pytest

from fastloop.config.suggestions import find_nearest
from fastloop.ladder import Ladder

RUNGS = ("workers", "pin", "prefetch", "batch", "amp", "layout", "fused", "compile", "overlap")


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("wokers", "workers"),
        ("ampp", "amp"),
        ("anp", "amp"),
        ("apm", "amp"),
        ("AMP", "amp"),
        ("bacth", "batch"),
        ("pin_memory", "pin"),
        ("batch_size", "batch"),
        ("comp", "compile"),
    ],
)
def test_a_near_name_is_suggested(written: str, meant: str) -> None:
    assert find_nearest(written, RUNGS) == meant


@pytest.mark.parametrize("written", ["cache", "attention", "loss", "shard", "nodes", "ba", "", "precision"])
def test_a_far_name_is_not(written: str) -> None:
    assert find_nearest(written, RUNGS) is None


def test_a_rung_to_come_is_taken_for_no_other() -> None:
    here = [name for name, _ in Ladder().rungs()]
    assert [find_nearest(name, here) for name in Ladder.coming] == [None] * len(Ladder.coming)
    assert not set(here) & set(Ladder.coming)


def test_the_name_is_given_as_it_is_known() -> None:
    assert find_nearest("hf_hom", ["HF_HOME", "HOME"]) == "HF_HOME"

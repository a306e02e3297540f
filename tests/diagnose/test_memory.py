"""What is said of memory that creeps, and when nothing is."""

from __future__ import annotations

from typing import Any

import pytest

from tests.diagnose.scenes import findings, scene

LEAK = {"name": "Net.kept", "tensors": 180, "holds_graphs": False, "where": "train.py:42"}
PACE = {"of": "GPU", "mib_per_1000_steps": 1234.0, "steps_left": 60_312}


@pytest.mark.parametrize(
    ("found", "says"),
    [
        (
            {**LEAK, **PACE},
            "GPU memory grew by 1,234 MiB per 1,000 steps and will run out in about 60,000 more steps; Net.kept",
        ),
        ({**LEAK, "holds_graphs": True}, "Net.kept keeps the graphs of 180 steps (train.py:42): add .detach()"),
        (
            {**LEAK, **PACE, "where": None, "steps_left": None},
            "per 1,000 steps; Net.kept keeps 180 tensors: keep numbers",
        ),
        (PACE, "no list in the module, a callback or a logger explains it"),
    ],
    ids=["tensors", "graphs", "no line", "no keeper"],
)
def test_the_line_that_keeps_them_is_named(found: dict[str, Any], says: str) -> None:
    *others, last = findings(scene(100.0, data_wait=60.0, evidence={"memory": found}))
    assert last.bottleneck == "memory_creep" and says in last.why and last.patch is None
    assert [each.bottleneck for each in others][:1] == ["data_wait"], "it costs no time, so it is no headline"


@pytest.mark.parametrize("found", [{}, {**LEAK, **PACE, "steps_left": 3_000_000}], ids=["none", "it lasts"])
def test_what_is_not_worth_a_line(found: dict[str, Any]) -> None:
    assert all(each.bottleneck != "memory_creep" for each in findings(scene(100.0, evidence={"memory": found})))

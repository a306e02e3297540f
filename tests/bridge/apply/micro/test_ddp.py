"""Micro-batches under DDP where ranks differ, and where DDP has settings: equal to plain accumulation, and no hang."""

from __future__ import annotations

import pytest

from tests.bridge.apply.micro.ddp_ranks import CASES, results
from tests.models import distance

STAYS = {
    "other sizes: auto": "ranks start with batches of different sizes: 5 to 8",
    "static: split": "static_graph with several backward passes per step fails inside DDP; turn it off",
    "tokens in windows: merge": "windows run batch by batch: the loss is not a mean over samples",
    "padded in windows: merge": "windows run batch by batch: ",
}
"""Cases that run as the user wrote them, and why."""
pytestmark = pytest.mark.multirank


@pytest.mark.parametrize("case", [f"{name}: {how}" for name, case in CASES.items() for how in case[-1].split()])
def test_two_ranks_train_as_without_us(case: str) -> None:
    plain_case = case.split(": ")[0] + ": plain"
    for ranks in results():
        ours, plain = ranks[case], ranks[plain_case]
        assert distance(plain["weights"], ours["weights"]) < (1e-9 if "norms" in case else 1e-13)
        assert ours["samples"] == plain["samples"] and ours["took"] is (case not in STAYS)
        assert STAYS.get(case, "") in ours["why"]
        assert case not in STAYS or distance(plain["weights"], ours["weights"]) == 0
    first, second = (
        {key: each for key, each in rank[case]["weights"].items() if "running" not in key} for rank in results()
    )
    assert distance(first, second) == 0


def test_one_rank_alone_takes_a_smaller_size() -> None:
    first, second = (rank["padded: auto"]["why"] for rank in results())
    assert "micro-batches of 4/4;" in first and "4 did not fit longer samples that came later" not in first
    assert "micro-batches of 2/2/2/2;" in second and "; 4 did not fit longer samples that came later" in second


@pytest.mark.parametrize("case", ["both grow", "one cannot"])
def test_ranks_that_need_a_rung_for_other_sizes_agree(case: str) -> None:
    first, second = (ranks[case] for ranks in results())
    assert first["size"] == second["size"] == 16 and first["took"] == second["took"] == [True, True, True]
    assert distance(first["weights"], second["weights"]) == 0


def test_the_control_sees_another_training() -> None:
    for ranks in results():
        assert distance(ranks["clipped: plain"]["weights"], ranks["short last batches: plain"]["weights"]) > 1e-3

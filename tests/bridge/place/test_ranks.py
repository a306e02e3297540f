"""Two ranks: each goes on in its own part of the epoch, whoever wrote the checkpoint."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest

from tests import models
from tests.bridge.place.resumed import SAMPLES
from tests.bridge.place.two_ranks import results

pytestmark = [pytest.mark.multirank, pytest.mark.usefixtures("quick_starts")]


def drawn(rank: dict[str, Any], case: str, epoch: int) -> list[list[int]]:
    return [numbers for when, numbers, _ in rank[case]["trained"] if when == epoch]


@pytest.mark.parametrize(("case", "behind"), [("resumed", 2), ("alone", 2), ("rows", 2), ("threads", 2)])
def test_each_rank_goes_on(case: str, behind: int) -> None:
    """D15: with another seed, by which Lightning seeds its DistributedSampler. In ``alone`` rank 0 saved and the other
    knew nothing of it: nothing waited."""
    ranks = results()
    for rank in ranks:
        assert drawn(rank, case, 1) == drawn(rank, "whole", 1)[behind:] and not drawn(rank, case, 0)
        assert rank[case]["trained"] == [each for each in rank["whole"]["trained"] if each[0] == 1][behind:]
        assert models.distance(rank["whole"]["ends"][1], rank[case]["ends"][0]) == 0
    done = [number for rank in ranks for part in drawn(rank, "whole", 1)[:behind] for number in part]
    rest = [number for rank in ranks for part in drawn(rank, case, 1) for number in part]
    assert sorted(done + rest) == list(range(SAMPLES))


def test_alone_each_rank_starts_anew() -> None:
    """The negative control: without us samples come twice, and others never."""
    ranks = results()
    done = {number for rank in ranks for part in drawn(rank, "whole", 1)[:2] for number in part}
    rest = {number for rank in ranks for part in drawn(rank, "without us", 1) for number in part}
    assert done & rest and done | rest != set(range(SAMPLES))


def test_windows() -> None:
    """Merged before, accumulated now."""
    for rank in results():
        resumed, whole = (list(chain(*drawn(rank, f"{case} windows", 1))) for case in ("resumed", "whole"))
        assert resumed == whole[16:] and len(resumed) == 14
        assert models.distance(rank["whole windows"]["ends"][1], rank["resumed windows"]["ends"][0]) < 1e-6


def test_a_sampler_of_the_users_in_lightnings_wrapper() -> None:
    """Its draws come from streams that all ranks share, or Lightning itself would mix up its parts."""
    for rank in results():
        assert drawn(rank, "resumed weighted", 1) == drawn(rank, "whole weighted", 1)[2:]
        assert len(drawn(rank, "resumed weighted", 1)) == 2

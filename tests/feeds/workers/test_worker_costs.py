"""What workers cost, from the times of batches."""

from __future__ import annotations

import pytest

from fastloop.feeds.workers.in_worker import TIMED
from fastloop.feeds.workers.worker_costs import LOSES, WorkerCosts


def costs(made_ms: float, epochs: list[list[float]], start_ms: float = 0.0) -> WorkerCosts:
    """After epochs in which each batch was waited for so long."""
    found = WorkerCosts()
    found.provide(2)
    found.made_ms[0] = made_ms
    for waits_ms in epochs:
        found.begin_epoch(start_ms)
        for wait_ms in waits_ms:
            found.note(wait_ms, was_ready=False)
        found.end_epoch()
    return found


@pytest.mark.parametrize(
    ("made_ms", "waits_ms", "start_ms", "loses"),
    [
        (1.0, [4.0, 0.2], 0.0, True),  # two batches an epoch: 4.2 ms for what takes 2
        (2.0, [4.0, 0.2], 0.0, False),
        (1.0, [4.0, *[0.1] * 9], 0.0, False),  # ten batches: 4.9 ms for what takes 10
        (1.0, [1.0, 0.1], 5.0, True),  # the start counts
        (1.0, [LOSES, LOSES], 0.0, False),
    ],
)
def test_waits_of_whole_epochs_are_weighed_against_making_the_batches(
    made_ms: float, waits_ms: list[float], start_ms: float, loses: bool
) -> None:
    found = costs(made_ms, [waits_ms] * TIMED, start_ms).explain_loss_of_epochs()
    assert (found is not None) is loses


def test_a_loss_is_told_with_its_figures_and_not_too_early() -> None:
    assert costs(1.0, [[4.0, 0.2]] * 4).explain_loss_of_epochs() is None, "eight batches are too few"
    said = costs(1.0, [[4.0, 0.2]] * 5).explain_loss_of_epochs()
    assert said == "a batch takes 1 ms to make, but in epochs this short, each was waited for 2.1 ms with workers"
    assert costs(0.0, [[4.0, 0.2]] * 5).explain_loss_of_epochs() is None, "no worker has told its time"


def test_ready_batches_alone_are_compared_with_making_them() -> None:
    found = costs(1.0, [])
    for _ in range(TIMED):
        assert found.compare_ready() is None
        found.note(50.0, was_ready=False)
        found.note(2.0, was_ready=True)
    assert found.compare_ready() == (2.0, 1.0)


def test_more_workers_find_room_and_persistent_ones_keep_theirs() -> None:
    found = costs(1.0, [])
    kept = found.made_ms
    found.provide(1)
    assert found.made_ms is kept
    found.provide(3)
    assert len(found.made_ms) == 3 and list(kept) == [1.0, 0.0]

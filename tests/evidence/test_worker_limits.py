"""How many workers fit, and how often they would be started."""

from __future__ import annotations

from typing import Any

import pytest

from fastloop.evidence.worker_limits import count_draws, count_epoch_batches, fit_in_shm
from fastloop.records.facts import Facts, LoaderFacts


@pytest.mark.parametrize(
    ("workers", "ahead", "room", "expected"),
    [
        (4, 2, 1000, (4, 2)),
        (4, 2, 134, (4, 2)),  # 100 of them: 8 made, one in use, one on its way
        (4, 2, 133, (4, 1)),
        (4, 2, 80, (4, 1)),
        (4, 2, 67, (3, 1)),
        (4, 3, 40, (1, 1)),
        (4, 2, 39, None),
        (1, 8, 80, (1, 4)),
        (4, 2, 0, None),
    ],
)
def test_as_many_workers_as_fit_come_before_batches_ahead(workers: int, ahead: int, room: int, expected: Any) -> None:
    """Batches of 10 bytes; a quarter of the room stays free."""
    fitting = fit_in_shm(workers, ahead, 10, room)
    assert fitting == expected
    assert fitting is None or (fitting[0] * fitting[1] + 2) * 10 <= 0.75 * room


def test_batches_that_share_nothing_fit_anywhere() -> None:
    assert fit_in_shm(4, 2, 0, 100) == (4, 2)


@pytest.mark.parametrize(
    ("loader", "run", "expected"),
    [
        ({"batches": 50}, {}, 50),
        ({"batches": None}, {}, None),
        ({"batches": 50}, {"limit_train_batches": 7}, 7),
        ({"batches": 50}, {"limit_train_batches": 70}, 50),
        ({"batches": 50}, {"limit_train_batches": 0.5}, 25),
        ({"batches": 50}, {"limit_train_batches": None}, 50),
        ({"batches": 50}, {"max_epochs": 1}, None),
        ({"batches": 50}, {"max_epochs": 2}, 50),
        ({"batches": 50}, {"max_steps": 50}, None),
        ({"batches": 50}, {"max_steps": 51}, 50),
        ({"batches": 50}, {"max_steps": 25, "accumulate": 2}, None),
    ],
)
def test_the_batches_of_an_epoch_that_is_followed_by_others(
    loader: dict[str, Any], run: dict[str, Any], expected: int | None
) -> None:
    assert count_epoch_batches(LoaderFacts(kind="DataLoader", **loader), Facts(**run)) == expected


@pytest.mark.parametrize(
    ("limits", "draws"),
    [
        ({"max_epochs": 3}, 3 * 100 * 8 * 2),
        ({"max_epochs": 3, "limit_train_batches": 0.5}, 3 * 50 * 8 * 2),
        ({"max_epochs": 3, "max_steps": 10, "accumulate": 4}, 40 * 8 * 2),
        ({"max_steps": 10}, 10 * 8 * 2),
        ({}, None),
    ],
)
def test_samples_of_a_run(limits: dict[str, Any], draws: int | None) -> None:
    loader = LoaderFacts(kind="DataLoader", batches=100, batch_size=8)
    assert count_draws(loader, Facts(world_size=2, **limits)) == draws
    assert count_draws(LoaderFacts(kind="DataLoader", batches=100), Facts(max_epochs=2)) is None

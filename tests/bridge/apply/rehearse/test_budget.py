"""What trying rungs costs is bounded by the run's expected time, whatever the time goes to."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import pytest
import torch

from fastloop.bridge.apply.rehearse import recorded_calls
from tests.bridge.apply.rehearse.test_rehearsal import Brief, config, fit, plant, read

LATER = pytest.mark.timeout(250)


@LATER
@pytest.mark.parametrize(("steps", "plays"), [(40, False), (100, True)])
def test_nothing_is_played_where_three_plays_are_more_than_the_share(
    steps: int, plays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, lambda old: old)
    calls: list[int] = []
    played = recorded_calls.Player.play
    monkeypatch.setattr(recorded_calls.Player, "play", lambda self, **how: (calls.append(1), played(self, **how))[1])
    loop, _, _ = fit(config("amp"), steps=steps, by_ladder=("amp",))
    took, why = read(loop)
    assert bool(calls) is plays
    assert plays or (took is False and f"5 % of the {steps - 1} batches that are left" in why)


@LATER
@pytest.mark.parametrize("wait_s", [0.0, 4.0])
def test_time_around_the_modules_counts_too(wait_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a play copies and puts back may take longer than the modules do."""
    plant(monkeypatch, lambda old: old)
    usual = recorded_calls.untouched
    waited: list[float] = []

    @contextlib.contextmanager
    def untouched(*modules: torch.nn.Module) -> Iterator[None]:
        time.sleep(wait_s)
        waited.append(wait_s)
        with usual(*modules):
            yield

    monkeypatch.setattr(recorded_calls, "untouched", untouched)
    loop, _, _ = fit(config("amp"), Brief(), steps=100_000, by_ladder=("amp",), max_time={"seconds": 60})
    took, why = read(loop)
    assert waited
    assert (took is False and "too short to try it" in why) if wait_s else "too short" not in why

"""What trials give back to the device."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from fastloop.bridge.apply.micro.room import giving_back


@pytest.mark.parametrize(("after", "given_back"), [(200, 1), (100, 0), (60, 0)])
@pytest.mark.parametrize("fails", [False, True])
def test_only_memory_that_a_trial_added_is_given_back(
    after: int, given_back: int, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its peak is forgotten either way: it is none of the training's."""
    reserved, called = [100, after], Counter[str]()
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _device: reserved.pop(0))
    for name in ("empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda *_, name=name: called.update([name]))
    try:
        with giving_back(torch.device("cuda", 0)):
            if fails:
                raise torch.OutOfMemoryError("planted")
    except torch.OutOfMemoryError:
        assert fails
    assert called == Counter(empty_cache=given_back, reset_peak_memory_stats=1)


def test_nothing_is_asked_of_a_cpu() -> None:
    with giving_back(torch.device("cpu")):
        held = torch.ones(2)
    assert held.sum() == 2

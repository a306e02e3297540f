"""The current stream: one object per stream, and torch's own way where its private one is missing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fastloop.evidence.clock import step_clock


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, int]]:
    made: list[dict[str, int]] = []

    def new(**which: int) -> Any:
        made.append(which)
        return SimpleNamespace(**which)

    step_clock._open_stream.cache_clear()
    monkeypatch.setattr(torch.cuda, "Stream", new)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"torch's of {device}")
    yield made  # type: ignore[misc]
    step_clock._open_stream.cache_clear()


def test_one_object_per_stream(monkeypatch: pytest.MonkeyPatch, made: list[dict[str, int]]) -> None:
    current = [7]
    monkeypatch.setattr(torch._C, "_cuda_getCurrentStream", lambda index: (current[0], index, 1), raising=False)
    device = torch.device("cuda", 2)
    first = step_clock.find_current_stream(device)
    assert step_clock.find_current_stream(device) is first and (first.stream_id, first.device_index) == (7, 2)
    current[0] = 9  # the user has entered another one
    assert step_clock.find_current_stream(device).stream_id == 9 and len(made) == 2


def test_without_the_private_function_or_an_index(monkeypatch: pytest.MonkeyPatch, made: list[dict[str, int]]) -> None:
    assert step_clock.find_current_stream(torch.device("cuda")) == "torch's of cuda"
    monkeypatch.setattr(torch._C, "_cuda_getCurrentStream", None, raising=False)
    assert step_clock.find_current_stream(torch.device("cuda", 0)) == "torch's of cuda:0" and made == []

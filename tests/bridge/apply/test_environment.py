"""Which variables are set for CUDA, and when none is."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from fastloop import FastLoop
from fastloop.bridge.apply.environment import set_variables
from fastloop.config.loading import load_callback_config
from fastloop.feeds.dali.pictures import QUEUES
from fastloop.ladder import Ladder
from fastloop.rungs.dali import Dali

WITH_DALI = Ladder(dali=Dali(enabled=True))


@pytest.fixture(autouse=True)
def variables(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(os, "environ", {"PATH": os.environ["PATH"], "HOME": "/"})
    yield


@pytest.mark.parametrize(
    ("ladder", "own", "started", "expected"),
    [
        (WITH_DALI, None, False, "32"),
        (WITH_DALI, "1", False, "1"),
        (WITH_DALI, None, True, None),
        (Ladder(), None, False, None),
    ],
    ids=["set", "the user's", "too late", "off"],
)
def test_variables(
    ladder: Ladder, own: str | None, started: bool, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: started)
    if own is not None:
        os.environ[QUEUES] = own
    before = dict(os.environ)
    set_variables(ladder)
    assert os.environ.get(QUEUES) == expected
    assert {**os.environ, QUEUES: None} == {**before, QUEUES: None}


@pytest.mark.parametrize("by", ["the user", "a command", "a command's callback"])
def test_each_way_to_configure_a_callback_sets_them(by: str) -> None:
    config, _ = load_callback_config({"rungs": {"dali": {"enabled": True}}})
    if by == "the user":
        FastLoop({"rungs": {"dali": {"enabled": True}}})
    elif by == "a command":
        FastLoop.of(config, out=None)
    else:
        loop = FastLoop()
        assert QUEUES not in os.environ
        loop.obey(config, out=None)
    assert os.environ[QUEUES] == "32"


def test_a_callback_that_is_switched_off_sets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastloop.bridge.fit.callback.is_disabled", lambda: True)
    FastLoop("full")
    assert QUEUES not in os.environ

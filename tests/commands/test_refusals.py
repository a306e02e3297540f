"""What a training without a rung already says of it, in the words of the rung's own plan."""

from __future__ import annotations

from typing import Any

import pytest

from fastloop.commands import refusals as module
from fastloop.commands.refusals import refusals

LOADER = {"kind": "DataLoader", "num_workers": 0, "map_style": True, "pin_memory": False}
MODEL = {"compiled": False, "convs": 20}


@pytest.fixture(autouse=True)
def compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.machine, "cxx_compiler", lambda environ: "/usr/bin/g++")


def seen(loader: Any = LOADER, model: Any = MODEL, **changes: Any) -> dict[str, Any]:
    return {"device": "cuda", "precision": "32-true", "evidence": {"loader": loader, "model": model}, **changes}


@pytest.mark.parametrize(
    ("measurement", "rung", "why"),
    [
        (seen(LOADER | {"num_workers": 4}), "workers", "the loader already has 4 workers; your number stands"),
        (seen(LOADER | {"map_style": False}), "workers", "an iterable dataset would be read whole"),
        (seen(LOADER | {"pin_memory": True}), "pin", "the loader already pins its memory"),
        (seen(precision="bf16-mixed"), "amp", "the Trainer already runs precision bf16-mixed"),
        (seen(model=MODEL | {"convs": 0}), "layout", "the model has no 2-D convolution"),
        (seen(model=MODEL | {"compiled": True}), "compile", "the model is already compiled by you"),
    ],
)
def test_what_shows_has_the_reason_of_the_plan(measurement: dict[str, Any], rung: str, why: str) -> None:
    found = refusals(measurement)
    assert list(found) == [rung] and found[rung].startswith(why)


def test_without_a_device_there_is_nothing_to_copy() -> None:
    assert set(refusals(seen(device="cpu"))) == {"pin", "prefetch"}


def test_without_a_compiler_nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.machine, "cxx_compiler", lambda environ: None)
    assert "no" not in refusals(seen()) and "C++ compiler" in refusals(seen())["compile"]


@pytest.mark.parametrize("unknown", [{}, None])
def test_what_is_not_known_refuses_nothing(unknown: Any) -> None:
    blank = {"kind": None, "num_workers": None, "map_style": None, "pin_memory": None}
    assert refusals(seen(blank, {"compiled": None, "convs": None}, precision=None)) == {}
    assert refusals({"device": "cuda", "evidence": unknown}) == {}

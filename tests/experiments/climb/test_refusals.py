"""What a training without a rung already says of it, in the words of the rung's own plan."""

from __future__ import annotations

from typing import Any

import pytest

from fastloop.experiments.climb import refusals as module
from fastloop.experiments.climb.refusals import find_refusals
from fastloop.records.measurement import Measurement
from fastloop.records.store import decode

LOADER = {"kind": "DataLoader", "num_workers": 0, "map_style": True, "pin_memory": False}
MODEL = {"compiled": False, "convs": 20}


@pytest.fixture(autouse=True)
def compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.machine, "find_cxx_compiler", lambda environ: "/usr/bin/g++")


def read_result(loader: Any = LOADER, model: Any = MODEL, **changes: Any) -> Measurement:
    return measured(
        **{"device": "cuda", "precision": "32-true", "evidence": {"loader": loader, "model": model}} | changes
    )


def measured(**content: Any) -> Measurement:
    found = decode(content, Measurement)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("measurement", "rung", "why"),
    [
        (read_result(LOADER | {"num_workers": 4}), "workers", "the loader already has 4 workers; your setting stands"),
        (read_result(LOADER | {"map_style": False}), "workers", "every worker would read the whole iterable dataset"),
        (read_result(LOADER | {"pin_memory": True}), "pin", "the loader already pins its memory"),
        (read_result(precision="bf16-mixed"), "amp", "the Trainer already uses precision bf16-mixed"),
        (read_result(model=MODEL | {"attends_by_hand": 0}), "attention", "no inner module has a softmax between two"),
        (read_result(model=MODEL | {"classes": 0}), "loss", "no layer has 8,192 outputs or more"),
        (read_result(model=MODEL | {"convs": 0}), "layout", "the model has no 2-D convolution"),
        (read_result(model=MODEL | {"compiled": True}), "compile", "the model is already compiled by your own code"),
    ],
)
def test_what_shows_has_the_reason_of_the_plan(measurement: Measurement, rung: str, why: str) -> None:
    found = find_refusals(measurement)
    assert rung in found and found[rung].startswith(why) and set(found) <= {rung, "attention"}


def test_without_a_device_there_is_nothing_to_copy() -> None:
    assert set(find_refusals(read_result(device="cpu"))) == {"pin", "prefetch"}


def test_without_a_compiler_nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.machine, "find_cxx_compiler", lambda environ: None)
    assert "no" not in find_refusals(read_result()) and "C++ compiler" in find_refusals(read_result())["compile"]


@pytest.mark.parametrize("unknown", [{}, None])
def test_what_is_not_known_refuses_nothing(unknown: Any) -> None:
    blank = {"kind": None, "num_workers": None, "map_style": None, "pin_memory": None}
    assert find_refusals(read_result(blank, {"compiled": None, "convs": None}, precision=None)) == {}
    assert find_refusals(measured(device="cuda", evidence=unknown)) == {}

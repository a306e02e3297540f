"""A loader alone, with a feed that copies its batches to a real device."""

from __future__ import annotations

import pytest
import torch

from fastloop.bridge.fit import recipe_modules
from fastloop.bridge.trials import loader_alone
from fastloop.bridge.trials.loader_alone import measure
from fastloop.experiments.trials.trial import Job
from tests.trainings import SLOW

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
    pytest.mark.timeout(150),
    pytest.mark.alone,
]


@pytest.mark.parametrize("rungs", [("prefetch", "pin", "workers"), ("pin", "workers"), ("prefetch",)], ids="+".join)
def test_a_known_loader(rungs: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(recipe_modules.FOLDER, "")
    monkeypatch.setattr(loader_alone, "LEAST_S", 1.2)
    known = ("recipe.load_ms=80", "run.accelerator=gpu", "rungs.workers.count=2")
    config = Job(conf=str(SLOW), overrides=(*known, *(f"rungs.{rung}.enabled=true" for rung in rungs))).config()
    found = measure(config, None)
    batch_ms = 40 if "workers" in rungs else 80
    assert found["inactive"] == {} and found["queue_drained"]
    assert 0.8 * batch_ms < found["ms_per_step"] < 1.5 * batch_ms


def test_several_numbers_of_workers_beside_a_device_feed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(recipe_modules.FOLDER, "")
    monkeypatch.setattr(loader_alone, "LEAST_S", 1.2)
    known = ("recipe.load_ms=80", "run.accelerator=gpu", "rungs.prefetch.enabled=true", "rungs.pin.enabled=true")
    found = measure(Job(conf=str(SLOW), overrides=known).config(), None, (1, 2, 4), 50.0)
    assert [each["count"] for each in found["counts"]] == [1, 2] and found["inactive"] == {}
    assert all(each["queue_drained"] for each in found["counts"])
    assert found["counts"][0]["ms_per_step"] > 0.8 * 80 and found["counts"][1]["ms_per_step"] < 50

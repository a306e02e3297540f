"""The pin rung. What it does on a GPU is tried in tests/gpu; here its plan, its verdict and a CPU left alone."""

from __future__ import annotations

import dataclasses
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from torch.utils.data import DataLoader

from fastloop.bridge.apply.staging import Staging
from fastloop.errors import NotApplicable
from fastloop.feeds.lazy_loader import clone
from fastloop.records.facts import Facts, LoaderFacts
from fastloop.records.measurement import Measurement
from fastloop.rungs.pin import Pin
from tests.runs import Net, batches, both, distance, numbered, run

PIN: dict[str, Any] = {"pin": {}}
CPU = "needs CUDA; this run is on cpu, where nothing is copied to a device"


def facts(**loader: Any) -> Facts:
    return Facts(device="cuda", loader=LoaderFacts(**{"kind": "DataLoader", **loader}))


@pytest.fixture
def as_if_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the rung plan on the CPU; torch then warns that pinning does nothing, and hands the batch through."""
    planned = Pin.plan
    monkeypatch.setattr(Pin, "plan", lambda rung, facts: planned(rung, dataclasses.replace(facts, device="cuda")))


def test_plan() -> None:
    change = Pin(enabled=True).plan(facts())
    assert change.wants == {"loader.pin_memory": True} and change.parity == "exact" and not change.notes
    assert Pin(enabled=True).plan(Facts(device="cuda")).waits_for == "the train loader"


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (Facts(), CPU),
        (Facts(device="mps"), "needs CUDA; this run is on mps, where nothing is copied to a device"),
        (facts(is_dataloader=False, kind="Own"), "Own is not a DataLoader: pin its batches where you create them"),
        (facts(pin_memory=True), "the loader already pins its memory"),
    ],
)
def test_plan_refuses(given: Facts, reason: str) -> None:
    with pytest.raises(NotApplicable) as refused:
        Pin(enabled=True).plan(given)
    assert str(refused.value) == reason


def test_takes(as_if_on_cuda: None, monkeypatch: pytest.MonkeyPatch) -> None:
    on_cpu = {"tensors": 3, "pinned_tensors": 0, "batch_type": "Own"}
    verify = Pin(enabled=True).verify
    verdict = verify(Measurement(evidence={"pin": {**on_cpu, "pinned_tensors": 2}}))
    assert verdict.took is True and verdict.why == "2 of 3 tensors of each batch were pinned"
    # D12: a batch type of the user's without pin_memory().
    verdict = verify(Measurement(evidence={"pin": on_cpu}))
    assert verdict.took is False
    assert verdict.why == ("none of the 3 tensors of a Own was pinned; give it a pin_memory() method")
    assert verify(Measurement()).took is None
    unseen = verify(Measurement(evidence={"pin": {**on_cpu, "tensors": 0}}))
    assert unseen.took is None and unseen.why == "a Own has no tensors to pin"

    # In a real run: the tensors of the first train batch are looked at, once.
    looks: list[Any] = []
    look = Staging.look_for_pinned
    monkeypatch.setattr(Staging, "look_for_pinned", lambda self, batch: looks.append(batch) or look(self, batch))
    cuda = SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: True))
    monkeypatch.setattr("fastloop.bridge.apply.staging.torch", cuda)
    ours = run(PIN, batches(), max_epochs=1)
    assert ours.seen("pin") == {"tensors": 3, "pinned_tensors": 0, "batch_type": "list"} and len(looks) == 3
    assert ours.verdict("pin").took is False


def test_does_not_take_on_the_cpu() -> None:
    ours = run(PIN, batches(), max_epochs=1)
    assert ours.reason("pin") == CPU and ours.verdict("pin").took is False and ours.verdict("pin").why == CPU
    assert ours.seen("pin") == {}


def test_parity(as_if_on_cuda: None) -> None:
    plain, ours = both(PIN, partial(batches, shuffle=True), max_epochs=3)
    assert ours.reason("pin") is None and ours.verdict("pin").parity_class == "exact"
    assert ours.module.samples == plain.module.samples and distance(plain, ours) == 0
    assert distance(plain, run(PIN, batches(), max_epochs=3)) > 0  # the control: another order


@pytest.mark.parametrize("module", [Net, None])
def test_undo(as_if_on_cuda: None, module: Any) -> None:
    class Raises(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise RuntimeError("planted")

    loader, before = batches(), dict(vars(batches()))
    if module is None:
        with pytest.raises(RuntimeError, match="planted"):
            run(PIN, loader, Raises, max_epochs=1)
    else:
        ours = run(PIN, loader, max_epochs=1)
        assert ours.trainer.train_dataloader is loader
        assert type(ours.trainer.strategy).__name__ == "SingleDeviceStrategy"
        ours.trainer.fit_loop.max_epochs = 2
        ours.trainer.fit(ours.module, loader)
    assert loader.pin_memory is False and vars(loader).keys() == before.keys()
    assert clone(loader, {"pin_memory": True}).pin_memory is True
    assert isinstance(loader, DataLoader) and len(loader.dataset) == len(numbered())

"""When rows are picked at once, and what other rungs see of it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from fastloop.errors import NotApplicable
from fastloop.feeds.device_store import wanted
from fastloop.feeds.rows import engine
from fastloop.feeds.rows.wanted import PickedRows, plan_rows
from fastloop.records.facts import Facts, LoaderFacts, RowFacts
from fastloop.rungs.cache import Cache

ROWS = RowFacts(what="TensorDataset", count=1000, devices=("cpu",))


def facts(loader: dict[str, Any] | None = None, **settings: Any) -> Facts:
    known = {"kind": "DataLoader", "batch_size": 10, "batches": 100, "num_workers": 2, "rows": ROWS, **(loader or {})}
    return Facts(loader=LoaderFacts(**known), **settings)


def plan(given: Facts, **settings: Any) -> Any:
    return Cache(enabled=True, **settings).plan(given)


def test_plan() -> None:
    change = plan(facts())
    assert change.wants == {"loader.engine": PickedRows(device="cpu", share=0.02, follows="epochs")}
    assert change.parity == "exact"
    assert change.notes == ("picks each batch of TensorDataset at once without a call per sample",)
    after = change.facts["loader"]
    assert (after.engine, after.on_device, after.num_workers) == ("the row picker", False, 0)

    change = plan(facts(device="cuda"), size_gb=0.5)
    rows = PickedRows(device="cuda", most_bytes=500_000_000, share=0.02, follows="epochs")
    assert change.wants == {"loader.engine": rows}
    assert change.notes == ("picks each batch of TensorDataset at once on the device, which holds all 1,000 rows",)
    assert change.facts["loader"].on_device
    settings: tuple[dict[str, Any], ...] = ({"num_workers": 0}, {"persistent_workers": True})
    assert [plan(facts(each)).wants["loader.engine"].follows for each in settings] == ["batches", "nothing"]


def test_a_gpu_is_asked_for_little_unless_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two in a hundred of what is free there; a quarter if the device was asked for."""
    monkeypatch.setattr(wanted, "measure_free", lambda _device: 10_000)
    asked: list[int] = []

    class Made:
        def __init__(self, loader: Any, _device: Any, most_bytes: int, *, follows: str) -> None:
            self.loader, self.follows = loader, follows
            asked.append(most_bytes)

        def evidence(self) -> dict[str, Any]:
            return {}

    monkeypatch.setattr(engine, "RowEngine", Made)
    for settings in ({}, {"store": "device"}, {"size_gb": 3.0}):
        want = plan(facts(device="cuda"), **settings).wants["loader.engine"]
        here = dataclasses.replace(want, device="cpu", live=[])
        here.check("the user's")
        assert here.make("our copy").loader == "our copy", "the one that was checked"
    assert asked == [200, 2500, 3 * 10**9], "once each"


REFUSED: dict[str, tuple[Facts, str]] = {
    "other samples": (facts({"rows": "Doubled does more"}), "Doubled does more"),
    "another device": (
        facts({"rows": RowFacts(what="T", count=1, devices=("cuda",))}),
        "T holds tensors on cuda, and this run is on cpu",
    ),
    "changed by training": (facts({"changes_within": ("Net writes x",)}), "training changes the data: Net writes x"),
    "changed between epochs": (facts({"may_change": ("set_epoch",)}), "may change between epochs: set_epoch"),
    "own collate function": (facts({"custom_collate": True}), "your code builds the batches"),
    "own transfer": (facts(transfer_hooks=("on_before_batch_transfer",)), "needs batches before they are on the"),
    "a sampler that looks": (facts({"sampler_hazards": ("it reads losses",)}), "it reads losses"),
    "an engine": (facts({"engine": "DALI"}), "DALI already loads the samples"),
    "loaders made anew": (facts(reload_every_n_epochs=1), "each copy of the rows would stay"),
    "mps": (facts(device="mps"), "this run is on mps"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    given, why = REFUSED[name]
    assert given.loader is not None
    with pytest.raises(NotApplicable) as caught:
        plan_rows(given, given.loader)
    assert why in str(caught.value)


def test_the_reason_is_that_of_rows() -> None:
    """And not that they are no pictures."""
    with pytest.raises(NotApplicable, match="rows cannot be picked at once: your code builds the batches"):
        plan(facts({"custom_collate": True}))


def test_validation() -> None:
    assert plan(facts(evaluates=True), size_gb=1.0).wants["evaluation.engine"].most_bytes == 10**9
    assert plan(facts(evaluates=True)).wants == {
        "evaluation.engine": PickedRows(device="cpu", share=0.02, follows="epochs")
    }
    assert plan(facts({"rows": "Doubled does more"}, evaluates=True)).wants == {}
    assert plan(facts({"custom_collate": True}, evaluates=True)).wants == {}

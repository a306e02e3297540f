"""Looking at the loaders of a running fit."""

from __future__ import annotations

import concurrent.futures
import hashlib
import time
from typing import Any

import lightning as L
import pytest
from torch.utils.data import DataLoader, Dataset, IterableDataset

from fastloop.bridge.watch import loader_state
from tests.models import trainer
from tests.runs import Net, batches, feed_on_cpu, numbered, run


class Look(L.Callback):
    """Waits until the queues are as full as they can be, then notes what is to be seen."""

    def __init__(self) -> None:
        self.seen: dict[str, Any] = {}

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx != 2:
            return
        full = loader_state.count_queued_batches(trainer)
        end = time.monotonic() + 100
        while loader_state.count_batches_owed(trainer) and time.monotonic() < end:
            time.sleep(0.02)
        self.seen = {
            "queued": full,
            "owed": loader_state.count_batches_owed(trainer),
            **loader_state.gather_evidence(trainer),
        }


class Own:
    """A loader that is no DataLoader."""

    def __iter__(self) -> Any:
        return iter([[*batch] for batch in batches(80)])


def look(rungs: Any, loader: Any) -> dict[str, Any]:
    eyes = Look()
    run(rungs, loader, callbacks=(eyes,), max_epochs=1)
    return eyes.seen


def test_without_workers() -> None:
    seen = look(None, batches(80))
    assert (seen["queued"], seen["owed"], seen["num_workers"], seen["kind"]) == (0, 0, 0, "DataLoader")
    assert seen["map_style"] is True


def test_with_workers_and_a_feed(monkeypatch: pytest.MonkeyPatch) -> None:
    feed_on_cpu(monkeypatch)
    workers = {"workers": {"count": 2, "prefetch_factor": 2}}
    seen = look(workers, batches(160))
    assert (seen["queued"], seen["owed"], seen["num_workers"]) == (4, 0, 2)
    seen = look({**workers, "prefetch": {"depth": 3}}, batches(160))
    assert (seen["queued"], seen["owed"], seen["num_workers"]) == (7, 0, 2)


@pytest.mark.parametrize("keeps", [True, False])
def test_validation_loaders(keeps: bool) -> None:
    class Validates(Net):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.log("val", self.loss(batch))

    def fit(val: Any) -> dict[str, Any]:
        done = trainer(max_epochs=1)
        done.fit(Validates(), batches(16), val)
        return loader_state.gather_evidence(done)

    seen = fit([batches(16, num_workers=1, persistent_workers=keeps), batches(16, num_workers=2)])
    assert (seen["validation_workers"], seen["validation_keeps_workers"]) == (1, False)
    seen = fit(batches(16, num_workers=1, persistent_workers=keeps))
    assert (seen["validation_workers"], seen["validation_keeps_workers"]) == (1, keeps)
    assert fit(batches(16))["validation_workers"] == 0 and "validation_workers" not in fit(None)
    assert "validation_workers" not in fit(Own()), "a loader that shows no workers"
    assert fit(batches(16))["validation_rows"] == "TensorDataset"
    assert "validation_rows" not in fit([batches(16), DataLoader(list(batches(16).dataset), 8)])


class Hashes(Dataset[Any]):
    """Each sample is made by several threads, which release the GIL."""

    def __init__(self, threads: int) -> None:
        self.threads = threads

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        if not hasattr(self, "pool"):
            self.pool = concurrent.futures.ThreadPoolExecutor(self.threads)
        list(self.pool.map(hashlib.sha256, [bytes(2_000_000)] * self.threads))
        return numbered()[index % 20]


@pytest.mark.parametrize("threads", [1, 4])
def test_threads_inside_workers_are_seen(threads: int) -> None:
    seen = run({}, DataLoader(Hashes(threads), 4, num_workers=2, persistent_workers=True)).seen("loader")[
        "worker_threads"
    ]
    assert seen >= 4 if threads == 4 else seen < 3


def test_loaders_that_show_nothing() -> None:
    class Stream(IterableDataset):
        def __iter__(self) -> Any:
            return iter([tuple(member) for member in batches(80).dataset])

    own = look(None, Own())
    assert own["kind"] == "Own" and own["num_workers"] is None and own["owed"] == 0
    assert look(None, DataLoader(Stream(), batch_size=8))["map_style"] is False


def test_before_a_fit_there_is_nothing() -> None:
    fresh = trainer()
    assert (
        loader_state.find_loaders(fresh) == []
        and loader_state.gather_evidence(fresh) == {}
        and loader_state.count_batches_owed(fresh) == 0
    )
    assert list(loader_state.find_iterators(fresh)) == []
    Net()

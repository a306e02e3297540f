"""Trainings with one cost taken away: the loader is asked no more, the copy is gone, ranks keep their gradients."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from fastloop import FastLoop
from fastloop.bridge.trials import ceilings
from fastloop.bridge.trials.ceilings import FEWEST, MOST, NoExchange, Replay, replay
from fastloop.errors import FastLoopError
from fastloop.evidence import machine
from fastloop.feeds.batch_tree import count_rows
from fastloop.feeds.device_prefetcher import DeviceFeed
from fastloop.feeds.lazy_loader import LazyLoader
from tests import models
from tests.bridge.launch import python
from tests.runs import feed_on_cpu, watching

pytestmark = pytest.mark.usefixtures("quick_starts")
PROGRAM = Path(__file__).with_name("ranks_apart.py")


class Counted(Dataset[Any]):
    """Numbered samples of x [8]; counts how often one is read, in whatever process."""

    def __init__(self, size: int = 64) -> None:
        self.size, self.reads = size, torch.zeros((), dtype=torch.int64).share_memory_()

    @property
    def read(self) -> int:
        return int(self.reads)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        self.reads.add_(1)
        return {"x": torch.full((8,), index / self.size), "number": torch.tensor(index)}


class Net(L.LightningModule):
    """Takes members out of its batch, as people do, and notes what it got."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(8, 1)
        self.sizes: list[int] = []
        self.places: list[int] = []
        self.numbers: list[list[int]] = []
        self.before = self.after = 0

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.before += 1
        return {**batch, "x": batch["x"] + 1}

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.after += 1
        return batch

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x = batch.pop("x")
        self.sizes.append(len(x))
        self.places.append(x.data_ptr())
        self.numbers.append(batch.pop("number").tolist())
        assert float(x.max()) <= 2, "its before-hook ran twice on one batch"
        return self.net(x).pow(2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def fit(
    loader: Any,
    module: Any = None,
    *,
    on_device: bool | None = False,
    rungs: Any = None,
    val: Any = None,
    **settings: Any,
) -> tuple[Any, FastLoop | None]:
    """A fit on replayed batches; as it is with ``on_device=None``."""
    loop = None if rungs is None else watching(rungs)
    module = Net() if module is None else module
    trainer = models.trainer(callbacks=[loop] if loop else [], num_sanity_val_steps=0, **settings)
    if on_device is not None:
        replay(trainer, on_device=on_device)
    torch.manual_seed(0)
    trainer.fit(module, loader, val)
    return module, loop


def loaded(size: int = 64, batch_size: int = 8, **settings: Any) -> tuple[Counted, DataLoader[Any]]:
    data = Counted(size)
    return data, DataLoader(data, batch_size=batch_size, **settings)


@pytest.mark.parametrize("rungs", [None, {}, {"workers": {"count": 1}}], ids=["without us", "watched", "workers"])
def test_the_dataset_is_not_read_while_training(rungs: Any, newborns: Callable[[], list[Any]]) -> None:
    data, loader = loaded(size=800)
    module, _ = fit(loader, rungs=rungs, max_steps=90)
    assert data.read <= (MOST + 4) * 8, "a worker is a little ahead"
    assert len(module.sizes) == 90
    assert len({tuple(numbers) for numbers in module.numbers}) == MOST
    assert not newborns(), "the workers that loaded them are gone"


def test_as_it_is_the_dataset_is_read() -> None:
    data, loader = loaded(size=800)
    fit(loader, on_device=None, max_steps=90)
    assert data.read >= 90 * 8


@pytest.mark.parametrize(("size", "kept", "read"), [(20, 2, 20), (24, 3, 24), (8, 1, 8), (4, 1, 4)])
def test_only_full_batches_are_replayed_and_epochs_stay_as_long(size: int, kept: int, read: int) -> None:
    data, loader = loaded(size=size)
    plain, _ = fit(DataLoader(Counted(size), batch_size=8), on_device=None, max_epochs=4)
    module, _ = fit(loader, max_epochs=4)
    assert len(module.sizes) == len(plain.sizes) and set(module.sizes) == {min(size, 8)}
    assert len({tuple(numbers) for numbers in module.numbers}) == kept and data.read == read


def test_batches_are_kept_as_memory_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    data, loader = loaded()
    monkeypatch.setattr(ceilings.machine, "read_memory_bytes", lambda: 3 * 8 * (32 + 8) / ceilings.MEMORY_SHARE)
    fit(loader, max_steps=20)
    assert data.read == 3 * 8
    data.reads.zero_()
    monkeypatch.setattr(ceilings.machine, "read_memory_bytes", lambda: 1)
    fit(loader, max_steps=20)
    assert data.read == FEWEST * 8


def test_a_slow_loader_is_not_asked_for_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceilings, "LOAD_S", 0.0)
    data, loader = loaded(size=20, batch_size=4)
    module, _ = fit(loader, max_steps=10, max_epochs=-1)
    assert data.read == FEWEST * 4 and len(module.sizes) == 10


def test_validation_reads_its_own_data() -> None:
    data, loader = loaded()
    held_out = Counted(16)
    module = Net()
    module.validation_step = lambda batch, batch_idx: None  # type: ignore[method-assign]
    fit(loader, module, val=DataLoader(held_out, batch_size=8), max_epochs=3)
    assert held_out.read == 3 * 16 and data.read == 64


def test_an_endless_dataset_is_replayed_without_end() -> None:
    class Stream(IterableDataset[Any]):
        read = 0

        def __iter__(self) -> Any:
            while True:
                type(self).read += 1
                yield {"x": torch.zeros(8), "number": torch.tensor(0)}

    module, _ = fit(DataLoader(Stream(), batch_size=4), max_steps=50, max_epochs=-1)
    assert len(module.sizes) == 50 and Stream.read == MOST * 4


@pytest.mark.parametrize("persistent", [False, True])
def test_a_reload_loads_nothing_again(persistent: bool, newborns: Callable[[], list[Any]]) -> None:
    reads: list[Counted] = []

    class Data(L.LightningDataModule):
        def train_dataloader(self) -> Any:
            reads.append(Counted(24))
            workers = {"num_workers": 1, "persistent_workers": True} if persistent else {}
            return DataLoader(reads[-1], batch_size=8, **workers)

    trainer, module = models.trainer(max_epochs=3, reload_dataloaders_every_n_epochs=1), Net()
    replay(trainer)
    trainer.fit(module, datamodule=Data())
    assert len(reads) == 3 and len(module.sizes) == 9
    assert persistent or [each.read for each in reads] == [24, 0, 0]
    assert not newborns()


def test_several_loaders_are_each_replayed() -> None:
    (first, one), (second, two) = loaded(), loaded(batch_size=4, size=32)

    class Both(Net):
        on_before_batch_transfer = L.LightningModule.on_before_batch_transfer

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            assert len(batch["b"]["x"]) == 4
            return super().training_step(batch["a"], batch_idx)

    module, _ = fit({"a": one, "b": two}, Both(), max_epochs=5)
    assert len(module.sizes) == 40 and (first.read, second.read) == (64, 32)


# -- on the device ----------------------------------------------------------------------------------------------------


def test_resident_batches_never_move() -> None:
    module, _ = fit(loaded()[1], on_device=True, max_steps=30, max_epochs=-1)
    assert len(set(module.places)) == FEWEST, "the same tensors every time"
    assert (module.before, module.after) == (FEWEST, 30)


def test_replayed_batches_are_prepared_for_every_step() -> None:
    module, _ = fit(loaded()[1], max_steps=30, max_epochs=-1)
    assert (module.before, module.after) == (30, 30) and len({tuple(numbers) for numbers in module.numbers}) == MOST


def test_evaluation_keeps_its_hooks() -> None:
    seen: list[float] = []
    module = Net()
    module.validation_step = lambda batch, batch_idx: seen.append(float(batch["x"].min()))  # type: ignore[method-assign]
    fit(loaded()[1], module, on_device=True, val=loaded(size=8)[1], max_epochs=2)
    assert seen == [1.0, 1.0], "prepared by the hook, not handed through"


def test_hooks_that_expect_all_loaders_at_once_are_refused() -> None:
    with pytest.raises(FastLoopError, match="the batches of all loaders at once"):
        fit({"a": loaded()[1], "b": loaded()[1]}, on_device=True, max_steps=3)


# -- under rungs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("on_device", [False, True], ids=["replayed", "resident"])
def test_merged_windows_run_as_micro_batches(on_device: bool) -> None:
    data, loader = loaded(size=8 * 4 * 5 + 8)
    module, loop = fit(
        loader, on_device=on_device, rungs={"batch": {"micro_batch": 16}}, max_epochs=3, accumulate_grad_batches=4
    )
    assert loop is not None and loop.measurement is not None
    evidence = loop.measurement.evidence["batch"]
    assert evidence["merged_batches"] == 4 and list(evidence["micro_batches"]) == [16, 16] and "problem" not in evidence
    assert set(module.sizes) == {16} and loop.measurement.total_steps == 3 * 6
    assert data.read == len(data), "the epoch once, its short window too, which is not replayed"


@pytest.mark.parametrize("on_device", [False, True], ids=["replayed", "resident"])
def test_the_feed_copies_replayed_batches_and_no_resident_ones(
    on_device: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    feed_on_cpu(monkeypatch)
    data, loader = loaded()
    module, loop = fit(loader, on_device=on_device, rungs={"prefetch": {}}, max_steps=30, max_epochs=-1)
    assert loop is not None and loop.measurement is not None
    fed = loop.measurement.evidence["prefetch"]["batches"]
    assert (fed == 0) is on_device and (fed >= 30) is not on_device
    assert module.after == 30 and data.read == 64 and (module.before == FEWEST) is on_device


def test_replayed_batches_need_no_more_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, where a feed reads the loader whose workers may grow, each trial of `full` once ended in step 0."""
    feed_on_cpu(monkeypatch)
    monkeypatch.setattr(machine, "count_usable_cpus", lambda: 8)
    rungs = {"prefetch": {}, "workers": {"grow": True}}
    module, loop = fit(loaded(num_workers=1)[1], rungs=rungs, max_steps=30, max_epochs=-1)
    assert loop is not None and module.after == 30
    step = loop.plan.step("workers")
    assert step is not None and "loader.most_workers" in step.change.wants, "they could have grown"


def test_no_queue_has_to_pass_before_the_window() -> None:
    found = []
    for on_device in (None, False):
        _, loop = fit(
            loaded(size=400)[1],
            on_device=on_device,
            max_steps=40,
            rungs={"workers": {"count": 1, "prefetch_factor": 16}},
        )
        assert loop is not None and loop.measurement is not None
        found.append((loop.measurement.evidence["loader"]["queued_batches"], loop.measurement.window_too_short))
    assert found == [(16, True), (0, False)]


class Engine:
    """Delivers batches of its own, and notes that it was ended."""

    ended = False

    def load(self, _seed: int) -> Iterator[Any]:
        try:
            for number in range(8):
                yield {"x": torch.full((4,), float(number))}
        finally:
            self.ended = True


@pytest.mark.parametrize("compares", [False, True], ids=["ceiling", "comparison"])
def test_a_ceiling_replays_what_an_engine_delivers(compares: bool) -> None:
    """A comparison of gradients replays the user's own samples: an engine draws other crops."""

    class Strategy:
        root_device = torch.device("cpu")

        def process_dataloader(self, given: Any) -> Any:
            return LazyLoader(given, engine=engine)

    engine, (data, loader) = Engine(), loaded()
    trainer = SimpleNamespace(strategy=Strategy(), state=SimpleNamespace(stage="train"), current_epoch=0, num_devices=1)
    replay(trainer, count=(lambda: 2) if compares else None)
    stands_in = trainer.strategy.process_dataloader(loader)
    assert engine.ended is not compares and data.read == (16 if compares else 0)
    assert len(stands_in) == len(loader) and ("number" in stands_in.batches[0]) is compares


def test_a_replay_answers_like_its_loader() -> None:
    _, loader = loaded(batch_size=4)
    batches = [{"x": torch.zeros(4)}, {"x": torch.ones(4)}]
    stands_in = Replay(loader, batches, given=loader)
    assert len(stands_in) == 16 and stands_in.batch_size == 4 and stands_in.num_workers == 0
    first, second, third = list(stands_in)[:3]
    assert first["x"] is third["x"] is batches[0]["x"] and first is not third and second["x"] is batches[1]["x"]
    assert count_rows(first) == 4 and not isinstance(stands_in, DeviceFeed)


# -- ranks ------------------------------------------------------------------------------------------------------------


def test_one_rank_has_no_exchange_to_leave_out() -> None:
    with pytest.raises(FastLoopError, match="no DDP exchange"):
        models.trainer(max_steps=2, callbacks=[NoExchange()]).fit(Net(), loaded()[1])


@pytest.mark.multirank
def test_without_exchange_ranks_part(tmp_path: Path) -> None:
    python(PROGRAM, cwd=tmp_path)
    seen = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    assert seen["replayed-0"]["weights"] == seen["replayed-1"]["weights"], "the control: DDP keeps ranks alike"
    assert seen["no_exchange-0"]["weights"] != seen["no_exchange-1"]["weights"]
    runs = ("as_it_is", "replayed", "no_exchange")
    assert [seen[f"{name}-0"]["exchanges"] for name in runs] == [8, 8, 0]
    for rank in (0, 1):  # half of the 64 samples, in each of two epochs or once and for all
        assert [seen[f"{name}-{rank}"]["reads"] for name in runs] == [64, 32, 32]
    assert {each["steps"] for each in seen.values()} == {8}

"""The feed that a run's findings propose is one that the run's own loader can have."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from fastloop import FastLoop
from fastloop.bridge.fit import own_loader
from fastloop.evidence import machine
from tests import models

pytest.importorskip("torchvision")
from torchvision import transforms as T

from tests.feeds.dali.folders import make_folder, read_folder


class Rows(Dataset[torch.Tensor]):
    def __init__(self) -> None:
        self.shift = 0

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index + self.shift)])


class Short(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(1, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-4)


class Moves(Short):
    def on_train_epoch_end(self) -> None:
        self.trainer.train_dataloader.dataset.shift += 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Short, Moves])
def test_workers_that_start_anew_are_kept_where_that_is_safe(kind: type[Short]) -> None:
    def fit(config: Any) -> FastLoop:
        watch = FastLoop({"watch": {"warmup_steps": 2}, **config}, quiet=True)
        models.trainer(callbacks=[watch], max_epochs=8).fit(kind(), DataLoader(Rows(), 4, num_workers=1))
        return watch

    watch = fit({})
    finding = next(each for each in watch.findings if each.bottleneck == "epoch_gap")
    patch = {"rungs": {"workers": {"enabled": True, "persistent": True, "across_epochs": True}}}
    assert finding.patch == (patch if kind is Short else None)
    assert finding.patch is None or fit(finding.patch).verdicts[0].took is True


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return (torch.tensor([float(number)]) for number in range(8))


@pytest.mark.parametrize("workers", [1, 2])
def test_a_stream_that_each_worker_yields_whole_is_noted(workers: int) -> None:
    """D4: the epoch is as long as it is without us; it is said what is in it."""
    watch = FastLoop(quiet=True)
    trainer = models.trainer(callbacks=[watch], max_epochs=2)
    trainer.fit(Short(), DataLoader(Stream(), 4, num_workers=workers))
    assert trainer.global_step == 2 * workers * 2 and watch.measurement is not None
    said = watch.measurement.evidence["loader"].get("repeats")
    assert (said is None) if workers == 1 else "Stream.__iter__" in said and "train on every sample 2 times" in said


def test_a_run_whose_facts_cannot_be_read_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise AttributeError("num_devices")

    monkeypatch.setattr(own_loader.read_facts, "read_run_facts", fail)
    watch = FastLoop({"watch": {"warmup_steps": 1}}, quiet=True)
    models.trainer(callbacks=[watch], max_epochs=2).fit(Short(), DataLoader(Rows(), 4, num_workers=1))
    assert watch.measurement is not None and watch.measurement.evidence["loader"]["can_keep_workers"] is False


@pytest.mark.usefixtures("quick_starts")
@pytest.mark.parametrize(
    ("settings", "may"),
    [({}, True), ({"persistent_workers": True}, True), ({"multiprocessing_context": "spawn"}, False)],
)
def test_whether_a_loader_can_have_more_workers(settings: dict[str, Any], may: bool) -> None:
    watch = FastLoop({"watch": {"warmup_steps": 1}}, quiet=True)
    loader = DataLoader(Rows(), 4, num_workers=1, **settings)
    models.trainer(callbacks=[watch], max_epochs=2).fit(Short(), loader)
    assert watch.measurement is not None and watch.measurement.evidence["loader"]["can_have_more"] is may


class Pairs(Short):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step(torch.cat([batch["few"], batch["many"]]), batch_idx)


def test_an_epoch_of_several_loaders_has_the_batches_that_lightning_counts() -> None:
    """Not those of the first loader, which begins again while the longer one lasts."""
    watch = FastLoop({"watch": {"warmup_steps": 1}}, quiet=True)
    loaders = {"few": DataLoader(Rows(), 4), "many": DataLoader(Rows(), 1)}
    settings: dict[str, Any] = {"limit_train_batches": 0.5, "reload_dataloaders_every_n_epochs": 1, "max_epochs": 2}
    models.trainer(callbacks=[watch], **settings).fit(Pairs(), CombinedLoader(loaders, "max_size_cycle"))
    assert watch.measurement is not None
    assert watch.measurement.evidence["refused"]["workers"].startswith("epochs of 4 batches are too short")


class Archive(Rows):
    """Reads its samples from a file that is opened once, so that workers would share its position."""

    def __init__(self) -> None:
        super().__init__()
        self.file = open(__file__, "rb")  # noqa: SIM115


class Validates(Short):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pass


@pytest.mark.parametrize(("kind", "why"), [(Rows, None), (Archive, "dataset.file is an open file handle")])
def test_workers_for_validation_are_advised_where_its_dataset_can_have_some(kind: type[Rows], why: str | None) -> None:
    """They read wrong samples of a zip file, and the training ended."""
    watch = FastLoop({"watch": {"warmup_steps": 1}}, quiet=True)
    trainer = models.trainer(callbacks=[watch], max_epochs=2)
    trainer.fit(Validates(), DataLoader(Rows(), 4), DataLoader(kind(), 4))
    assert watch.measurement is not None
    told = watch.measurement.evidence["loader"]["validation_obstacle"]
    assert told is None if why is None else told.startswith("the dataset cannot be copied to workers") and why in told


class Both(Short):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step(torch.cat([*batch.values()]), batch_idx)


@pytest.mark.parametrize(
    ("workers", "told"),
    [
        ((1, 0), {"'rows' (Rows)": None}),
        ((0, 1), {"'stream' (Stream)": "would read the whole iterable"}),
        ((1, 1), None),
    ],
)
def test_the_loader_without_workers_is_named_among_several(workers: tuple[int, int], told: Any) -> None:
    """The advice was to shard a stream that had workers."""
    watch = FastLoop({"watch": {"warmup_steps": 1}}, quiet=True)
    stream, rows = DataLoader(Stream(), 4, num_workers=workers[0]), DataLoader(Rows(), 4, num_workers=workers[1])
    loaders = CombinedLoader({"stream": stream, "rows": rows}, "min_size")
    models.trainer(callbacks=[watch], max_epochs=2).fit(Both(), loaders)
    assert watch.measurement is not None
    found = watch.measurement.evidence["loader"].get("without_workers")
    assert (found or {}).keys() == (told or {}).keys()
    for name, why in (told or {}).items():
        assert found[name] is None if why is None else why in found[name]


class Slow(Rows):
    """Takes its time for a row, as reading a file would."""

    def __init__(self) -> None:
        super().__init__()
        self.hard: list[int] = []

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.004)
        return super().__getitem__(index)


class Mines(Short):
    """Tells the dataset which samples were hard."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.trainer.train_dataloader.dataset.hard.append(batch_idx)
        return super().training_step(batch, batch_idx)


@pytest.mark.timeout(200)
@pytest.mark.parametrize("kind", [Short, Mines])
def test_workers_are_not_advised_where_they_would_be_refused(kind: type[Short]) -> None:
    watch = FastLoop({"watch": {"warmup_steps": 2}}, quiet=True)
    models.trainer(callbacks=[watch], max_epochs=2).fit(kind(), DataLoader(Slow(), 4))
    finding = watch.findings[0]
    assert finding.bottleneck == "data_wait"
    assert finding.patch == ({"rungs": {"workers": {"enabled": True}}} if kind is Short else None)
    assert ("workers does not apply (workers would load from an outdated copy" in finding.why) is (kind is Mines)


class Mean(L.LightningModule):
    """Hardly any work, so that the run waits for its pictures."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(3, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.net(batch[0].mean(dim=(2, 3))).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def collate(samples: Any) -> Any:
    return default_collate(samples)


@pytest.mark.timeout(200)
@pytest.mark.parametrize("own_collate", [False, True])
def test_what_the_loader_cannot_have_is_not_advised(
    own_collate: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DALI where it can make the batches; the cache where the batches are made by a collate function of the user's."""
    pytest.importorskip("nvidia.dali", reason="DALI is not installed")
    monkeypatch.setattr(machine, "count_usable_cpus", lambda: 1)  # workers alone would not keep up
    monkeypatch.setattr(machine, "read_cpu_wait_s", lambda: None)  # a batch takes less than a busy machine's 3 ms
    steps = (T.Resize((200, 200)), T.RandomHorizontalFlip(), T.ToTensor())
    loader = DataLoader(
        read_folder(make_folder(tmp_path), *steps), 4, shuffle=True, collate_fn=collate if own_collate else None
    )

    def fit(config: Any) -> FastLoop:
        watch = FastLoop({"watch": {"warmup_steps": 1}, "rehearsal": "off", **config}, quiet=True)
        models.trainer(callbacks=[watch], max_epochs=4).fit(Mean(), loader)
        return watch

    watch = fit({})
    assert watch.measurement is not None and watch.plan.steps == ()
    assert ("dali" in watch.measurement.evidence["refused"]) is own_collate
    finding = watch.findings[0]
    feed = "cache" if own_collate else "dali"
    assert finding.bottleneck == "data_wait" and finding.patch == {"rungs": {feed: {"enabled": True}}}
    assert (
        f"ms an image on one core, which {'cache' if own_collate else 'dali or cache'} would shorten);" in finding.why
    )
    assert fit(finding.patch).verdicts[0].took is True

"""What a configuration would do. The numbers of whole plans are checked by hand in tests/commands/test_run.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from fastloop.bridge.fit import dry_run
from fastloop.bridge.fit.recipe_modules import FOLDER
from fastloop.config.loading import load
from fastloop.experiments.trials import trial_process
from fastloop.experiments.trials.trial import Job
from fastloop.records import store
from fastloop.records.facts import LoaderFacts
from fastloop.records.plan import Change, Plan, Step
from fastloop.records.run_files import PlanFile
from tests.models import Regression, pairs
from tests.trainings import NET


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(FOLDER, "")
    return tmp_path


def planned(monkeypatch: pytest.MonkeyPatch, loader: Any, *overrides: str, module: Any = None) -> dry_run.DryRun:
    """The dry run of a recipe with this train loader."""

    class Data(L.LightningDataModule):
        def train_dataloader(self) -> Any:
            return loader

    monkeypatch.setattr(dry_run, "build_recipe", lambda config: (module or Regression(), Data()))
    return dry_run.plan_dry(load(str(NET), overrides=overrides))


def test_a_plain_loader(monkeypatch: pytest.MonkeyPatch, here: Path) -> None:
    made = planned(monkeypatch, DataLoader(pairs(), batch_size=8), "trainer.accumulate_grad_batches=2")
    assert (made.samples_per_step, made.batches_in_flight, made.bytes_in_flight) == (16, 1, 8 * 9 * 4)
    assert made.facts.loader is not None and made.facts.loader.sample_bytes == 36
    assert list(here.iterdir()) == []
    batch = ("rungs.batch.enabled=true", "trainer.accumulate_grad_batches=2")
    for more, samples, accumulate in (((), 16, 2), (("rungs.batch.global_batch=32",), 32, 4)):
        other = planned(monkeypatch, DataLoader(pairs(), batch_size=8), *batch, *more)
        assert (other.samples_per_step, other.facts.accumulate) == (samples, accumulate)


@pytest.mark.parametrize(("is_trial", "status"), [(True, "planned"), (False, "skipped")])
def test_a_trial_plans_what_does_not_pay_back(is_trial: bool, status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its training would have it, too; a run of 20 steps has no time to search for a micro-batch."""

    class Data(L.LightningDataModule):
        def train_dataloader(self) -> Any:
            return DataLoader(pairs(), batch_size=8)

    class Plain(Regression):
        def training_step(self, batch: Any) -> Any:  # type: ignore[override]
            return self.net(batch[0]).square().mean()

    monkeypatch.setattr(dry_run, "build_recipe", lambda config: (Plain(), Data()))
    asked = ("run.max_steps=20", "trainer.accumulate_grad_batches=2")
    config = load(str(NET), more=("full",), overrides=asked)
    answer = trial_process._do(Job(variation="plan", conf=str(NET)), config, Path()) if is_trial else None
    made = store.decode(answer, PlanFile) if is_trial else PlanFile.of(dry_run.plan_dry(config).plan)
    (batch,) = [row for row in made.rungs if row.rung == "batch"]
    assert batch.status == status and ("too short" in (batch.reason or "")) is not is_trial


@pytest.mark.parametrize("several", [False, True])
def test_several_train_loaders_keep_no_place(several: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Said before training; of one loader, the control, nothing is."""
    loader = DataLoader(pairs(), batch_size=8)
    made = planned(monkeypatch, {"a": loader, "b": loader} if several else loader, "rungs.workers.enabled=true")
    (step,) = made.plan.steps
    notes = [note for note in step.change.notes if "resumed mid-epoch starts that epoch over" in note]
    assert step.status == "planned" and [note.rpartition(": ")[2] for note in notes] == (
        ["Lightning counts the batches of 2 train loaders as one"] if several else []
    )


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Any:
        raise AssertionError("a sample was taken")


class ByName(Dataset[Any]):
    """Samples by letters, and none by number."""

    def __len__(self) -> int:
        return 26

    def __getitem__(self, name: str) -> torch.Tensor:
        return torch.zeros(ord(name) - ord("a") + 1, dtype=torch.float64)


@pytest.mark.parametrize(
    ("loader", "samples", "batches", "size"),
    [
        (DataLoader(Endless(), batch_size=4), 4, 1, None),
        (DataLoader(pairs(), batch_size=None), None, 1, None),
        (DataLoader(ByName(), batch_size=2, sampler=list("abc")), 2, 1, 16),
        (DataLoader(pairs(), batch_size=2, collate_fn=lambda samples: 1 / 0), 2, 1, None),
        ([torch.zeros(4, 8)], None, None, None),
        (DataLoader(pairs(), batch_size=2, num_workers=3, prefetch_factor=4), 2, 13, 13 * 72),
    ],
    ids=["iterable", "unbatched", "by name", "collate that fails", "a list", "own workers"],
)
def test_what_cannot_be_known_is_none(
    loader: Any, samples: int | None, batches: int | None, size: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = planned(monkeypatch, loader)
    assert (made.samples_per_step, made.batches_in_flight, made.bytes_in_flight) == (samples, batches, size)


def test_batches_on_the_device_count() -> None:
    change = Change(wants={"feed.depth": 2, "loader.num_workers": 3, "loader.prefetch_factor": 2, "loader.window": 4})
    made = Plan(steps=(Step(rung="prefetch", status="planned", change=change),))
    own = LoaderFacts(kind="DataLoader", batch_size=8, sample_bytes=10)
    held = dry_run._count_batches_in_flight(made, object(), own)
    assert held == 3 * 2 + 2 + 1 and dry_run._count_bytes(made, own, held) == 9 * 4 * 8 * 10


def test_layers_made_late_are_planned_for(monkeypatch: pytest.MonkeyPatch) -> None:
    class Late(Regression):
        def setup(self, stage: str) -> None:
            assert stage == "fit" and self.trainer.datamodule is not None
            self.extra = torch.nn.Conv2d(1, 1, 1)

        def configure_model(self) -> None:
            self.norm = torch.nn.BatchNorm1d(8)

    facts = planned(monkeypatch, DataLoader(pairs()), module=Late()).facts
    assert facts.convs == ("extra",) and facts.batchnorms == ("norm",)


def test_resuming_is_a_fact(monkeypatch: pytest.MonkeyPatch) -> None:
    assert planned(monkeypatch, DataLoader(pairs()), "run.resume=x.ckpt").facts.resuming
    assert not planned(monkeypatch, DataLoader(pairs())).facts.resuming

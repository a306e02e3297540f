"""Workers of validation loaders that stay between validations: the same training and numbers, without restarts."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from fastloop import FastLoop
from fastloop.evidence.samples.state_mark import StateMark
from fastloop.records.measurement import Measurement
from fastloop.records.readings import read_loader


class Numbers(Dataset):
    """Each sample also names the process that made it."""

    def __init__(self, count: int = 8) -> None:
        self.count, self.offset = count, 0.0

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index + self.offset, float(os.getpid())])


class Noise(Numbers):
    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.cat([torch.rand(1), torch.tensor([float(os.getpid())])])


class Net(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.trained, self.validated = torch.nn.Linear(1, 1), [], []
        self.makers: list[set[float]] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = (self.layer(batch[:, :1]) + torch.rand(1)).square().mean()
        self.trained.append(loss.item())
        return loss

    def on_validation_start(self) -> None:
        self.makers.append(set())

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.validated.append(self.layer(batch[:, :1]).sum().item())
        self.makers[-1] |= set(batch[:, 1].tolist())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.001)


class MovesOn(L.Callback):
    """Validates on other samples in each epoch."""

    def __init__(self, dataset: Numbers) -> None:
        self.dataset = dataset

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.dataset.offset += 1


def load(dataset: Dataset | None = None, workers: int = 2, **how: Any) -> DataLoader:
    return DataLoader(dataset or Numbers(), batch_size=2, num_workers=workers, **how)


def fit(rungs: Any, val: Any = None, train_workers: int = 1, callbacks: tuple[Any, ...] = (), **how: Any) -> Any:
    """Returns the module, and FastLoop or None."""
    watcher = None
    if rungs is not None:
        config = {"rungs": rungs, "rehearsal": "off", "watch": {"warmup_steps": 2}}
        watcher = FastLoop(rungs if isinstance(rungs, str) else config, quiet=True)
    torch.manual_seed(0)
    module, quiet = Net(), dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
    callbacks = (*callbacks, *([watcher] if watcher else []))
    how = {"max_epochs": 3, "enable_model_summary": False, **how}
    trainer = L.Trainer(accelerator="cpu", callbacks=[*callbacks], **quiet, **how)
    trainer.fit(module, load(workers=train_workers, shuffle=True), load() if val is None else val)
    module.trained.append(torch.rand(1).item())  # the random stream after the fit
    return module, watcher


def count_shared(module: Net, first: int) -> int:
    """Of how many validations from `first` on the workers also made the one before."""
    makers = module.makers[first:]
    return sum(before == after for before, after in itertools.pairwise(makers))


@pytest.fixture
def no_orphans() -> Any:
    def children() -> set[str]:
        return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())

    before = children()
    yield
    assert not children() - before


@pytest.mark.parametrize("rungs", ["safe", {"workers": {"enabled": True, "persistent": True}}], ids=["safe", "named"])
@pytest.mark.parametrize("train_workers", [0, 1])
def test_the_numbers_are_those_of_a_plain_run(rungs: Any, train_workers: int, no_orphans: None) -> None:
    plain, _ = fit(None, train_workers=train_workers)
    kept, watcher = fit(rungs, train_workers=train_workers)
    assert (kept.trained, kept.validated) == (plain.trained, plain.validated)
    if rungs != "safe" or train_workers:  # else the first batches show that no workers are needed
        assert count_shared(plain, 1) == 0  # the control: new workers each time
        assert count_shared(kept, 1) == 2 and kept.makers[0] != kept.makers[1]  # not those of the sanity check
        verdict = next(each for each in watcher.verdicts if each.rung == "workers")
        assert verdict.took is True and "your 2 workers for validation were kept between validations" in verdict.why


def refuse_random() -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    return load(Noise()), (), {}


def refuse_changing() -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    dataset = Numbers()
    return load(dataset), (MovesOn(dataset),), {}


class Lazy(Numbers):
    """Reads a file at its first sample."""

    def __getitem__(self, index: int) -> torch.Tensor:
        if not hasattr(self, "labels"):
            self.labels = list(range(self.count))
        return torch.tensor([self.labels[index], float(os.getpid())])


def refuse_lazy() -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    return load(Lazy()), (), {}


def refuse_cut_short() -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    return load(), (), {"limit_val_batches": 2}


def refuse_reloads() -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    return load(), (), {"reload_dataloaders_every_n_epochs": 1}


@pytest.mark.parametrize(
    "make",
    [
        refuse_random,
        refuse_changing,
        refuse_lazy,
        refuse_cut_short,
        refuse_reloads,
    ],
)
def test_they_stay_only_where_nothing_can_change(make: Callable[[], Any], no_orphans: None) -> None:
    """Where nothing can, see above."""
    val, callbacks, how = make()
    plain, _ = fit(None, val, callbacks=callbacks, **how)
    val, callbacks, how = make()
    module, _ = fit("safe", val, callbacks=callbacks, **how)
    assert module.validated == plain.validated and module.trained == plain.trained
    assert count_shared(module, 1) == 0


class Unseen(L.Callback):
    """Changes the dataset in a way that reading code does not show."""

    def __init__(self, name: str) -> None:
        self.name = name

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        globals()[self.name].offset = trainer.current_epoch + 5.0


OUTSIDE = Numbers()


@pytest.mark.parametrize("looks", [True, False])
def test_a_change_that_reading_code_does_not_show_restarts_them(
    looks: bool, no_orphans: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not looks:  # the control
        monkeypatch.setattr(StateMark, "find_change", lambda _: None)
    OUTSIDE.offset = 0.0
    plain, _ = fit(None, load(OUTSIDE), callbacks=(Unseen("OUTSIDE"),))
    OUTSIDE.offset = 0.0
    module, _ = fit("safe", load(OUTSIDE), callbacks=(Unseen("OUTSIDE"),))
    assert (module.validated == plain.validated) is looks and (count_shared(module, 1) < 2) is looks


class Reads(L.Callback):
    """Reads the validation loader by itself, before and within validations."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def _find(self, trainer: Any) -> Any:
        return getattr(trainer.fit_loop.epoch_loop, "val_" + "loop")._combined_loader.flattened[0]

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self.seen.append(sum(1 for _ in self._find(trainer)))

    def on_validation_batch_end(self, trainer: Any, *_: Any) -> None:
        self.seen.append(next(iter(self._find(trainer)))[0, 0].item())


def test_code_of_the_users_may_read_them_meanwhile(no_orphans: None) -> None:
    plain_reads, reads = Reads(), Reads()
    plain, _ = fit(None, load(Numbers(4)), callbacks=(plain_reads,), max_epochs=2)
    module, _ = fit("safe", load(Numbers(4)), callbacks=(reads,), max_epochs=2)
    assert count_shared(module, 1) == 1
    assert module.validated == plain.validated and reads.seen == plain_reads.seen


@pytest.mark.parametrize("settings", [{}, {"persistent": False}], ids=["auto", "off"])
def test_a_rung_that_was_only_named_leaves_them_alone(settings: dict[str, Any]) -> None:
    module, _ = fit({"workers": {"enabled": True, **settings}}, train_workers=0)
    assert count_shared(module, 1) == 0


def test_they_stay_where_training_keeps_its_own_workers() -> None:
    """The rung changes nothing else then, and says so."""
    train = load(workers=1, shuffle=True, persistent_workers=True)
    torch.manual_seed(0)
    module, watcher = Net(), FastLoop("safe", quiet=True)
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    val = load()
    trainer = L.Trainer(accelerator="cpu", max_epochs=3, callbacks=[watcher], **quiet)
    trainer.fit(module, train, val)
    step = next(step for step in watcher.plan.steps if step.rung == "workers")
    assert step.status == "planned" and "the train loader is unchanged" in step.change.notes[0]
    verdict = next(each for each in watcher.verdicts if each.rung == "workers")
    assert verdict.took is True and verdict.why.startswith("your 2 workers for validation were kept")
    assert count_shared(module, 1) == 2
    assert trainer.val_dataloaders is val and not val.persistent_workers and val._iterator is None


def test_a_run_without_the_rung_is_told_of_it() -> None:
    module, watcher = fit({})
    assert isinstance(watcher.measurement, Measurement)
    assert read_loader(watcher.measurement)["can_keep_for_validation"] is True and count_shared(module, 1) == 0
    _, watcher = fit({}, load(Noise()))
    assert read_loader(watcher.measurement)["can_keep_for_validation"] is False

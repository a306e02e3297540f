"""What looks at, or changes, datasets while training goes on, read from code and attributes."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch.utils.data import Dataset

from fastloop.evidence.samples.between_epochs import list_changes_between_epochs
from tests.evidence.batches.test_sampler_hazards import DATA, Feeds, Keeps

# -- between epochs ---------------------------------------------------------------------------------------------------


class Levels(Dataset):
    def __init__(self) -> None:
        self.level, self.cache = 0, {}

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        self.cache[index] = self._load(index)
        return self.cache[index]

    def _load(self, index: int) -> int:
        self.last = index
        return index


class Curriculum(Levels):
    def harder(self) -> None:
        self.level += 1


class Reaches(L.Callback):
    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        trainer.train_dataloader.dataset.level = trainer.current_epoch


class Makes(L.LightningModule):
    """Makes its data, and no hook of its that runs later names it."""

    def setup(self, stage: str) -> None:
        self.train_dataset = Levels()

    def train_dataloader(self) -> Any:
        return self.train_dataset

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return batch


class Resamples(L.LightningModule):
    """Has a layer with a name of data, or leaves it out."""

    def __init__(self, up_sampler: Any) -> None:
        super().__init__()
        self.up_sampler = up_sampler

    def forward(self, x: Any) -> Any:
        return x if self.up_sampler is None else self.up_sampler(x)


class Sharpens(Feeds):
    def on_train_epoch_end(self, *args: Any) -> None:
        self.held.level += 1


def test_what_changes_nothing_between_epochs() -> None:
    module = Makes()
    module.setup("fit")
    assert (
        list_changes_between_epochs(module.train_dataset, [module, Feeds([]), L.pytorch.callbacks.ModelCheckpoint()])
        == ()
    )
    assert list_changes_between_epochs(DATA, [module]) == ()
    for layer in (torch.nn.Linear(2, 2), None):
        assert list_changes_between_epochs(Levels(), [Resamples(layer)]) == ()


def test_what_may_change_a_dataset_between_epochs_is_named() -> None:
    dataset = Levels()
    assert list_changes_between_epochs(Curriculum(), []) == ("dataset.level is changed by its harder()",)
    assert list_changes_between_epochs(dataset, [Reaches()]) == ("Reaches.on_train_epoch_start names train_dataloader",)
    assert list_changes_between_epochs(dataset, [Sharpens(dataset)]) == ("dataset is held by Sharpens (held)",)
    assert list_changes_between_epochs(dataset, [Keeps(dataset)]) == ()
    drawing = Resamples([0, 1])
    assert list_changes_between_epochs(dataset, [drawing]) == ("Resamples.forward names up_sampler",)

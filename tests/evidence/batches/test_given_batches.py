"""Training that changes its batches, where these may be the dataset's own objects."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from torch.utils.data import DataLoader, TensorDataset

from fastloop.evidence.batches.given_batches import UNKNOWN, Shared, list_batch_changes

ROWS = TensorDataset(torch.ones(4, 2))
ALONE = DataLoader(ROWS, batch_size=None)
ZIPPED = DataLoader(ROWS, 2, collate_fn=lambda batch: tuple(zip(*batch, strict=True)))
STACKED = DataLoader(ROWS, 2)


class Halves(L.LightningModule):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        batch[0].mul_(0.5)


class HalvesByHelper(L.LightningModule):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        halve(batch)


class HalvesCopy(L.LightningModule):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        rows = batch.clone()
        rows.mul_(0.5)
        batch = batch * 0.5
        return rows + batch


class HalvesAtEnd(L.Callback):
    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        outputs["loss"] = module.loss = trainer.loss = 0
        batch["rows"].mul_(0.5)


class HalvesAnyArguments(L.Callback):
    def on_train_batch_start(self, *args: Any) -> None:
        halve(args[2]["rows"])


class CountsAtEnd(L.Callback):
    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        outputs["loss"] = module.loss = trainer.loss = 0


class KeepsLast(L.LightningModule):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.last = batch

    def on_train_epoch_end(self) -> None:
        self.last["rows"] -= 1


class SetsItem(L.LightningModule):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        batch["rows"] = batch["rows"] / 2


class SetsItemBefore(L.LightningModule):
    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        batch["rows"] = batch["rows"] / 2
        return batch


class Passes(L.LightningDataModule):
    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        return batch


def halve(rows: Any) -> None:
    rows.mul_(0.5)


def say(other: Any, hook: str) -> tuple[str, ...]:
    return (f"{type(other).__name__}.{hook} changes its batch, which may be the dataset's own",)


def test_a_step_that_changes_its_batch_may_change_the_dataset_where_none_is_stacked() -> None:
    for module in (Halves(), HalvesByHelper()):
        for loader in (ALONE, ZIPPED):
            assert list_batch_changes(loader, [module]) == say(module, "training_step")
        assert list_batch_changes(STACKED, [module]) == ()
    assert list_batch_changes(ALONE, [HalvesCopy()]) == ()


@pytest.mark.parametrize(
    ("other", "hook"),
    [
        (HalvesAtEnd(), "on_train_batch_end"),
        (HalvesAnyArguments(), "on_train_batch_start"),
        (LambdaCallback(on_train_batch_end=lambda t, m, o, batch, i: halve(batch["rows"])), "on_train_batch_end"),
        (KeepsLast(), "on_train_epoch_end"),
    ],
)
def test_every_hook_that_is_given_a_batch_or_was_is_read(other: Any, hook: str) -> None:
    assert list_batch_changes(ZIPPED, [L.LightningModule(), other]) == say(other, hook)
    assert list_batch_changes(ZIPPED, [other], Shared) == (), "batches share nothing with the dataset"


def test_what_hooks_change_of_outputs_trainer_and_module_is_no_batch() -> None:
    assert list_batch_changes(ZIPPED, [CountsAtEnd()]) == ()


def test_batches_are_only_made_where_training_changes_them() -> None:
    asked = []

    def find_shared() -> Shared:
        asked.append(1)
        return Shared()

    assert list_batch_changes(ZIPPED, [HalvesCopy()], find_shared) == () and not asked
    assert list_batch_changes(ZIPPED, [Halves()], find_shared) == () and asked


def test_containers_are_made_anew_before_a_step_and_tensors_on_their_way_to_a_device() -> None:
    dictionaries, tensors, arrays = Shared(containers=0), Shared(tensors=1), Shared(objects=1)
    assert list_batch_changes(ZIPPED, [SetsItem()], lambda: dictionaries) == ()
    assert list_batch_changes(ZIPPED, [SetsItem()], lambda: UNKNOWN) == say(SetsItem(), "training_step")
    early = SetsItemBefore()
    assert list_batch_changes(ZIPPED, [early], lambda: dictionaries) == say(early, "on_before_batch_transfer")
    own = [SetsItem(), Passes()]
    assert list_batch_changes(ZIPPED, own, lambda: dictionaries) == say(own[0], "training_step")
    halves = HalvesByHelper()
    for shared, copies, expected in (
        (Shared(tensors=0), True, ()),
        (Shared(tensors=0), False, say(halves, "training_step")),
        (Shared(objects=0), True, say(halves, "training_step")),
        (tensors, False, ()),
        (arrays, False, ()),
    ):
        assert list_batch_changes(ZIPPED, [halves], lambda found=shared: found, copies_tensors=copies) == expected

"""Whatever the training may change of what samples are made from is found; what it may not, is not."""

from __future__ import annotations

import argparse
import functools
import os
from collections.abc import Iterator
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from torch.utils.data import BatchSampler, DataLoader, Dataset, Sampler, TensorDataset, get_worker_info

from fastloop.evidence.samples.between_epochs import (
    list_changes_between_epochs,
    list_changes_during_epochs,
    list_remembered,
)

LEVEL, OTHER = 0, 0
CONFIG = {"level": 0}
OPTIONS = argparse.Namespace(level=0)


class Plain(Dataset):
    level = 0

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return index + self.level


class ByGlobal(Plain):
    def __getitem__(self, index: int) -> Any:
        return index + LEVEL


class ByConfig(Plain):
    def __getitem__(self, index: int) -> Any:
        return index + _read_config()


class ByOptions(Plain):
    def __init__(self) -> None:
        self.options = OPTIONS


class ByEnvironment(Plain):
    def __getitem__(self, index: int) -> Any:
        return index + int(os.environ.get("LEVEL", "0"))


class BySeed(Plain):
    def __getitem__(self, index: int) -> Any:
        return index + torch.initial_seed()


class ByWorkersSeed(Plain):
    def __getitem__(self, index: int) -> Any:
        return index + get_worker_info().seed


class WithProperty(Plain):
    @property
    def hardness(self) -> int:
        return self._hardness

    @hardness.setter
    def hardness(self, value: int) -> None:
        self._hardness = value


class OfClass(Plain):
    @classmethod
    def harden(cls) -> None:
        cls.level += 1


class SetsGlobal(L.Callback):
    def on_train_epoch_start(self, *args: Any) -> None:
        global LEVEL
        LEVEL += 1


class SetsOther(L.Callback):
    """Changes what no sample reads, and draws."""

    def __init__(self, held: Any = None) -> None:
        self.held, self.count, self.losses = held, 0, []

    def on_train_epoch_start(self, *args: Any) -> None:
        global OTHER
        OTHER += 1
        self.count += CONFIG["level"]
        self.losses.append(self.count)
        torch.manual_seed(OTHER)


class SetsConfig(L.Callback):
    def on_train_epoch_start(self, *args: Any) -> None:
        CONFIG["level"] += 1


class SetsOptions(L.Callback):
    def __init__(self) -> None:
        self.options = OPTIONS

    def on_train_epoch_start(self, *args: Any) -> None:
        self.options.level += 1


class SetsEnvironment(L.Callback):
    def on_train_epoch_start(self, *args: Any) -> None:
        os.environ["LEVEL"] = "1"


class SetsClass(L.Callback):
    def on_train_epoch_start(self, *args: Any) -> None:
        Plain.level += 1


class SetsImported(L.Callback):
    def on_train_epoch_start(self, *args: Any) -> None:
        from tests.evidence.samples import test_between_epochs as samples

        samples.LEVEL = 1


class AsksHelper(L.Callback):
    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        _raise_level(trainer)


class AsksByName(L.Callback):
    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        getattr(trainer, "datamodule", None).level = 1


class Miner:
    def __init__(self, held: Any) -> None:
        self.held = held

    def step(self, *args: Any) -> None:
        self.held.level += 1


class AsksMiner(L.Callback):
    def __init__(self, held: Any) -> None:
        self.miner = Miner(held)

    def on_train_epoch_start(self, *args: Any) -> None:
        self.miner.step()


class Teaches(Sampler):
    def __init__(self, data: Any) -> None:
        self.data = data

    def __iter__(self) -> Iterator[int]:
        self.data.level += 1
        yield from range(len(self.data))


class Orders(Teaches):
    def __iter__(self) -> Iterator[int]:
        self.last = [self.data[index] for index in range(8)]
        yield from self.last


class Collate:
    strength = 0

    def __call__(self, samples: list[Any]) -> Any:
        return [sample + self.strength for sample in samples]


def _read_config() -> int:
    return CONFIG["level"]


def _raise_level(trainer: Any) -> None:
    trainer.train_dataloader.dataset.level += 1


def _set_level(held: Any, *args: Any) -> None:
    held.level += 1


PLAIN, COLLATE = Plain(), Collate()


@pytest.mark.parametrize(
    ("dataset", "other", "found"),
    [
        (ByGlobal(), SetsGlobal(), "LEVEL is changed by SetsGlobal.on_train_epoch_start"),
        (ByGlobal(), SetsImported(), "the module of Collate.__call__ is changed by SetsImported"),
        (ByConfig(), SetsConfig(), "CONFIG is changed by SetsConfig.on_train_epoch_start"),
        (ByOptions(), SetsOptions(), "dataset.options is changed by SetsOptions.on_train_epoch_start"),
        (ByEnvironment(), SetsEnvironment(), "os is changed by SetsEnvironment.on_train_epoch_start"),
        (PLAIN, SetsClass(), "Plain is changed by SetsClass.on_train_epoch_start"),
        (PLAIN, AsksHelper(), "AsksHelper.on_train_epoch_start names train_dataloader"),
        (PLAIN, AsksByName(), "AsksByName.on_train_epoch_start names datamodule"),
        (PLAIN, AsksMiner(PLAIN), "dataset is held by AsksMiner (miner)"),
        (PLAIN, AsksMiner(DataLoader(PLAIN)), "dataset is held by AsksMiner (miner)"),
        (PLAIN, LambdaCallback(on_train_epoch_start=Miner(PLAIN).step), "dataset is held by LambdaCallback (on_"),
        (PLAIN, LambdaCallback(on_train_epoch_end=functools.partial(_set_level, PLAIN)), "dataset is held by Lambda"),
        (PLAIN, AsksMiner(COLLATE), "collate_fn is held by AsksMiner (miner)"),
        (BySeed(), None, "BySeed.__getitem__ reads its worker's seed"),
        (ByWorkersSeed(), None, "ByWorkersSeed.__getitem__ reads its worker's seed"),
        (WithProperty(), None, "dataset._hardness is changed by its hardness()"),
        (OfClass(), None, "dataset.level is changed by its harden()"),
    ],
)
def test_what_changes_samples_is_found(dataset: Any, other: Any, found: str) -> None:
    changers = list_changes_between_epochs(dataset, [] if other is None else [other], collate=COLLATE)
    assert len(changers) == 1 and changers[0].startswith(found)


class ByTorch(Plain):
    def __getitem__(self, index: int) -> Any:
        return torch.tensor(index)


def test_what_changes_nothing_that_samples_read_is_not() -> None:
    for dataset in (PLAIN, ByTorch(), ByGlobal(), ByConfig(), ByOptions(), ByEnvironment()):
        others = [SetsOther(), SetsOther(Miner(dataset)), AsksMiner(Plain()), LambdaCallback(on_fit_end=print)]
        assert list_changes_between_epochs(dataset, others, collate=COLLATE, worker_init=_read_config) == ()
    assert list_changes_between_epochs(PLAIN, [SetsEnvironment(), SetsGlobal(), SetsConfig()]) == ()


def test_a_sampler_and_what_workers_start_with() -> None:
    assert list_changes_between_epochs(PLAIN, [], sampler=BatchSampler(Orders(PLAIN), 2, False)) == ()
    teaching = list_changes_between_epochs(PLAIN, [], sampler=BatchSampler(Teaches(PLAIN), 2, False))
    assert teaching == ("dataset is changed by Teaches.__iter__",)
    assert list_changes_between_epochs(PLAIN, [SetsConfig()], worker_init=_read_config) == (
        "CONFIG is changed by SetsConfig.on_train_epoch_start",
    )


class Caches(Plain):
    def __init__(self) -> None:
        self.cache: dict[int, Any] = {}

    def __getitem__(self, index: int) -> Any:
        if index not in self.cache:
            self.cache[index] = torch.rand(())
        return self.cache[index]


class SetsDefault(Caches):
    def __getitem__(self, index: int) -> Any:
        return self.cache.setdefault(index, torch.rand(()))


class OpensLate(Plain):
    file: Any = None

    def __getitem__(self, index: int) -> Any:
        if self.file is None:
            self.file = [index]
        made = {}
        made[index] = self.file[0]
        return made


def test_what_samples_leave_behind() -> None:
    assert list_remembered(Caches()) == list_remembered(SetsDefault()) == ("dataset.cache",)
    assert list_remembered(PLAIN, COLLATE) == list_remembered(OpensLate()) == ()


class Buffer:
    def __init__(self) -> None:
        self.rows = [0]

    def add(self, row: int) -> None:
        self.rows.append(row)


class Replays(Plain):
    def __init__(self) -> None:
        self.buffer = Buffer()

    def __getitem__(self, index: int) -> Any:
        return self.buffer.rows[-1]


class Agent:
    def __init__(self, buffer: Buffer) -> None:
        self.memory = buffer

    def play(self) -> None:
        self.memory.add(1)


class Acts(L.LightningModule):
    """Fills the buffer in each step, by what it holds."""

    def __init__(self, held: Any) -> None:
        super().__init__()
        self.held = held

    def training_step(self, *args: Any) -> None:
        self.held.play()


class ActsBetween(L.LightningModule):
    """The same, when no batch is loaded."""

    def __init__(self, held: Any) -> None:
        super().__init__()
        self.held = held

    def on_train_epoch_start(self) -> None:
        self.held.play()


class Only(L.LightningModule):
    """Holds what the dataset holds, and changes nothing of it."""

    def __init__(self, held: Any) -> None:
        super().__init__()
        self.held = held

    def training_step(self, *args: Any) -> int:
        return len(self.held.memory.rows)


class Steps(L.Callback):
    def on_train_batch_end(self, *args: Any) -> None:
        CONFIG["level"] += 1


class Sets(L.LightningModule):
    def __init__(self, data: Any) -> None:
        super().__init__()
        self.data = data

    def training_step(self, *args: Any) -> None:
        self.data.level = 3


class Reaches(L.LightningModule):
    """Changes the data by way of its Trainer."""

    def training_step(self, *args: Any) -> None:
        self.trainer.datamodule.train.level += 1

    def on_train_batch_end(self, *args: Any) -> None:
        self.trainer.train_dataloader.dataset.harden()


class ReachesByName(L.LightningModule):
    def training_step(self, *args: Any) -> None:
        data = self.trainer.datamodule.train
        data.level += 1

    def on_train_batch_end(self, *args: Any) -> None:
        for data in self.trainer.train_dataloader.dataset.datasets:
            data.level = 3


class Looks(L.LightningModule):
    def training_step(self, *args: Any) -> Any:
        words, data = self.trainer.datamodule.words.decode(args), self.trainer.datamodule.train
        self.counts[data.level] = 1
        self.log("size", len(self.trainer.train_dataloader.dataset))
        self.dataset_losses[self.trainer.datamodule.number] = 1
        self.counts[self.dataset_names[0]].update(args)
        return words


class LooksByName(L.LightningModule):
    """Gives names to the data and its parts, also several one after the other."""

    def __init__(self, data: Any) -> None:
        super().__init__()
        self.data = data

    def training_step(self, *args: Any) -> Any:
        data = self.data
        for rows in self.data.rows:
            args = rows
        rows = self.trainer.train_dataloader.dataset
        with args[0] as rows:
            return data.level, rows

    def on_train_batch_end(self, *args: Any) -> Any:
        data = self.trainer.datamodule.train
        data = data.level
        return data


class AddsByName(L.LightningModule):
    """Changes the data itself, by another name."""

    def __init__(self, data: Any) -> None:
        super().__init__()
        self.data = data

    def training_step(self, *args: Any) -> None:
        rows = self.data.rows
        rows += [1]

    def on_train_batch_end(self, *args: Any) -> None:
        rows = self.data.rows
        rows.append(1)


def test_a_name_for_the_data_is_no_change_of_it() -> None:
    buffer = Buffer()
    assert list_changes_during_epochs(buffer, [LooksByName(buffer)]) == ()
    assert list_changes_during_epochs(buffer, [AddsByName(buffer)]) == (
        "dataset is changed by AddsByName.training_step",
        "dataset.rows is changed by AddsByName.training_step",
        "dataset is changed by AddsByName.on_train_batch_end",
        "dataset.rows is changed by AddsByName.on_train_batch_end",
    )


def test_what_training_changes_by_way_of_its_trainer() -> None:
    assert list_changes_during_epochs(Plain(), [Reaches()]) == (
        "datamodule is changed by Reaches.training_step",
        "train_dataloader is changed by Reaches.on_train_batch_end",
    )
    assert list_changes_during_epochs(Plain(), [ReachesByName()]) == (
        "datamodule is changed by ReachesByName.training_step",
        "train_dataloader is changed by ReachesByName.on_train_batch_end",
    )
    assert list_changes_during_epochs(Plain(), [Looks(), AsksHelper()]) == (), "it reads, and it acts between epochs"


def test_what_training_changes_while_batches_are_loaded() -> None:
    replays, plain = Replays(), Plain()
    assert list_changes_during_epochs(replays, [Acts(Agent(replays.buffer))]) == (
        "dataset.buffer is changed by its add(), called in training",
    )
    assert list_changes_during_epochs(plain, [Sets(plain)]) == ("dataset is changed by Sets.training_step",)
    assert list_changes_during_epochs(ByConfig(), [Steps()]) == ("CONFIG is changed by Steps.on_train_batch_end",)


def test_what_changes_nothing_while_batches_are_loaded() -> None:
    """Between epochs workers start anew; and to hold an object is not to change it."""
    replays = Replays()
    for other in (ActsBetween(Agent(replays.buffer)), Only(Agent(replays.buffer)), Acts(Agent(Buffer()))):
        assert list_changes_during_epochs(replays, [other]) == ()
    for other in (SetsConfig(), Steps(), SetsGlobal(), LambdaCallback(on_fit_end=print)):
        assert list_changes_during_epochs(Plain(), [other]) == ()
    assert list_changes_during_epochs(ByConfig(), [SetsConfig()]) == ()


class GrowsBatches(L.Callback):
    """Its own name for the Trainer."""

    def on_train_batch_end(self, t: Any, *args: Any) -> None:
        t.train_dataloader.batch_sampler.batch_size = 8


class ReadsBatches(L.Callback):
    def on_train_batch_end(self, t: Any, *args: Any) -> None:
        self.size = t.train_dataloader.batch_sampler.batch_size
        args[0].train_dataloader.size = 8


class Holds(L.LightningModule):
    def __init__(self, held: Any) -> None:
        super().__init__()
        self.held = held


class KeepsReport(L.Callback):
    """Its helper's first argument is not the Trainer."""

    def __init__(self) -> None:
        self.report = argparse.Namespace(dataset_sizes=[])

    def on_train_batch_end(self, *args: Any) -> None:
        self.keep(self.report)

    def keep(self, report: Any) -> None:
        report.dataset_sizes.append(3)


class Grows(Holds):
    def training_step(self, *args: Any) -> None:
        self.held.batch_sampler.batch_size = 8


class HandsOn(Holds):
    def training_step(self, *args: Any) -> None:
        raise_level(self.held)


class HandsOnToRead(Holds):
    def training_step(self, *args: Any) -> None:
        read_level(self.held)


def raise_level(data: Any) -> None:
    data.level += 1


def read_level(data: Any) -> Any:
    return data.level


class Owner:
    def __init__(self) -> None:
        self.rows, self.notes = torch.zeros(4, 2), torch.zeros(4)


class Adds(Holds):
    def training_step(self, *args: Any) -> None:
        self.held.rows.add_(1)


class AddsNotes(Holds):
    def training_step(self, *args: Any) -> None:
        self.held.notes.add_(1)


def test_what_training_changes_of_the_loader_and_by_other_ways_to_the_data() -> None:
    plain, owner = Plain(), Owner()
    loader = DataLoader(plain, 4)
    assert list_changes_during_epochs(plain, [GrowsBatches()], loader=loader) == (
        "train_dataloader is changed by GrowsBatches.on_train_batch_end",
    )
    assert list_changes_during_epochs(plain, [Grows(loader)], loader=loader) == (
        "the loader is changed by Grows.training_step",
        "batch_sampler is changed by Grows.training_step",
    )
    assert list_changes_during_epochs(plain, [HandsOn(plain)]) == ("dataset is changed by HandsOn.training_step",)
    rows = TensorDataset(owner.rows)
    assert list_changes_during_epochs(rows, [Adds(owner)]) == ("dataset.tensors[0] is changed by Adds.training_step",)
    by_lambda = LambdaCallback(on_train_batch_end=lambda t, *_: t.datamodule.sampler.clear())
    assert list_changes_during_epochs(plain, [by_lambda]) == (
        "datamodule is changed by LambdaCallback.on_train_batch_end",
    )
    for other in (ReadsBatches(), Grows(DataLoader(plain, 4)), HandsOnToRead(plain), Adds(owner), KeepsReport()):
        assert list_changes_during_epochs(plain, [other], loader=loader) == (), "it reads, or it is another's"
    assert list_changes_during_epochs(rows, [AddsNotes(owner)]) == ()


class ByModel(Plain):
    """Mines hard samples by the model's present weights."""

    def __init__(self, held: Any) -> None:
        self.held = held


MODEL = torch.nn.Linear(4, 4)


class ByGlobalModel(Plain):
    def __getitem__(self, index: int) -> Any:
        return MODEL(torch.ones(4))


class Trains(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))


def test_parts_of_the_model_that_is_trained() -> None:
    model = Trains()
    for held, name in (
        (model.net, "dataset.held"),
        (model.net[1], "dataset.held"),
        ([1, model.net[0].weight], "dataset.held[1]"),
    ):
        said = (f"{name} is being trained",)
        assert (
            list_changes_during_epochs(ByModel(held), [model]) == said
            and list_changes_between_epochs(ByModel(held), [model]) == said
        )
    assert list_changes_during_epochs(ByGlobalModel(), [model]) == (), "not yet a part of it"
    model.net.append(MODEL)
    assert list_changes_during_epochs(ByGlobalModel(), [model]) == ("MODEL is being trained",)
    model.net[0].requires_grad_(False)
    assert list_changes_during_epochs(ByModel(model.net[0]), [model]) == (), "frozen"
    assert list_changes_during_epochs(ByModel(torch.nn.Linear(4, 4)), [model]) == (), "another model"


# -- views -------------------------------------------------------------------------------------------------------------


class ByRows(Plain):
    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def __getitem__(self, index: int) -> Any:
        return self.rows[index]


class Banked(L.LightningModule):
    """Keeps what it computed in a memory bank."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bank", torch.zeros(8, 4))
        self.register_buffer("scale", torch.ones(8, 4))
        self.array = np.zeros((8, 4))
        self.net = torch.nn.Linear(4, 4)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.bank[batch] = 1.0 * self.scale[batch]
        self.array[batch] = 1


class Memory(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.zeros(8, 4))

    def forward(self, x: Any, index: Any) -> Any:
        self.kept[index] = x
        return x


class HoldsMemory(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.memory = Memory()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.memory(*batch)


class WritesBank(L.Callback):
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        pl_module.scale[batch] = 2


VIEWS = [
    lambda bank: bank,
    lambda bank: bank.numpy(),
    lambda bank: bank.T[1:].detach(),
    lambda bank: list(bank.numpy()[2:4]),
    lambda bank: torch.from_numpy(bank.numpy()[3:]),
    lambda bank: bank.numpy()[::-1][1:],
]


@pytest.mark.parametrize("view", VIEWS)
def test_views_of_what_training_changes(view: Any) -> None:
    module = Banked()
    for rows in (view(module.bank), view(torch.from_numpy(module.array))):
        dataset = ByRows(rows)
        (within,), (between,) = (
            list_changes_during_epochs(dataset, [module]),
            list_changes_between_epochs(dataset, [module]),
        )
        assert within == between and within.startswith("dataset.rows") and within.endswith("by Banked.training_step")
    memory = HoldsMemory()
    assert "is changed by Memory.forward" in list_changes_during_epochs(ByRows(view(memory.memory.kept)), [memory])[0]
    weight = view(module.net.weight.detach())
    assert list_changes_during_epochs(ByRows(weight), [module])[0].endswith(" is being trained")


def test_a_callback_that_writes_to_the_modules_buffer() -> None:
    module = Banked()
    dataset = ByRows(module.scale.numpy())
    assert list_changes_during_epochs(dataset, [module]) == (), "it is only read"
    assert list_changes_during_epochs(dataset, [module, WritesBank()]) == (
        "dataset.rows is changed by WritesBank.on_train_batch_end",
    )


def test_other_memory_is_not_what_training_changes() -> None:
    module = Banked()
    stored = torch.zeros(16, 4)
    module.bank = stored[:8]
    for rows in (stored[8:].numpy(), module.bank.clone(), module.array.copy()):
        assert (
            list_changes_during_epochs(ByRows(rows), [module])
            == ()
            == list_changes_between_epochs(ByRows(rows), [module])
        )

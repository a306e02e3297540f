"""Accumulation windows merged into loader batches: what a merged run shares with the accumulating run."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch import callbacks as lightnings
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, Dataset, IterableDataset

from fastloop.bridge.apply import read_facts
from fastloop.bridge.apply.micro import accumulation, choice, search_run, windows
from fastloop.bridge.apply.micro.batches import MicroBatches
from fastloop.bridge.apply.micro.choice import PieceChoice
from fastloop.feeds.batch_tree import BatchWindow
from tests.models import distance as apart
from tests.models import weights
from tests.runs import KeepsTrainers, Net, Run, batches, both, distance, feed_on_cpu, run

MERGE = {"batch": {"micro_batch": 16}}
RAGGED = partial(batches, 84, shuffle=True)  # 11 batches, the last one short; windows of 4, 4 and 3
EVEN = partial(batches, 96, shuffle=True)  # 12 batches
ACCUMULATE = {"accumulate_grad_batches": 4}


def one_cycle(optimizer: Any, module: Any) -> Any:
    steps = module.trainer.estimated_stepping_batches
    return {"scheduler": OneCycleLR(optimizer, 0.02, total_steps=steps), "interval": "step"}


def every(frequency: int, optimizer: Any, module: Any) -> Any:
    return {"scheduler": StepLR(optimizer, 4, gamma=0.8), "interval": "step", "frequency": frequency}


def plateau(optimizer: Any, module: Any) -> Any:
    scheduler = ReduceLROnPlateau(optimizer, patience=0, threshold=10.0)
    return {"scheduler": scheduler, "monitor": "val_loss", "interval": "epoch"}


def merged_like(plain: Run, merged: Run, tolerance: float = 1e-6) -> bool:
    """The same optimizer steps: samples, learning rates, validations and weights."""
    assert merged.seen("batch")["merged_batches"] == 4 and merged.verdict("batch").took
    assert merged.trainer.global_step == plain.trainer.global_step
    return (
        merged.module.samples == plain.module.samples
        and merged.record.validated == plain.record.validated
        and merged.record.rates == pytest.approx(plain.record.rates, rel=1e-12)
        and distance(plain, merged) < tolerance
    )


@pytest.mark.parametrize(
    ("module", "drop_last", "precision", "tolerance"),
    [
        (partial(Net, SGD, momentum=0.9), False, "32-true", 1e-6),
        (partial(Net, SGD, momentum=0.9), True, "64-true", 1e-14),
        (partial(Net, AdamW, one_cycle, lr=0.01), False, "64-true", 1e-14),
        (partial(Net, AdamW, one_cycle, lr=0.01), True, "32-true", 1e-6),
        (partial(Net, SGD, partial(every, 2)), False, "64-true", 1e-14),
        (partial(Net, SGD, partial(every, 2)), True, "32-true", 1e-6),
    ],
)
def test_weights_after_100_steps(module: Any, drop_last: bool, precision: Any, tolerance: float) -> None:
    plain, merged = both(
        MERGE, partial(RAGGED, drop_last=drop_last), module, max_epochs=34, precision=precision, **ACCUMULATE
    )
    assert plain.trainer.global_step >= 100 and merged_like(plain, merged, tolerance)


def test_the_comparison_sees_a_whole_window_weighed_as_one() -> None:
    """The control: one mean over a window with a short batch is not what accumulation computes."""
    plain = run(None, RAGGED(), max_epochs=4, **ACCUMULATE)
    naive = run(None, batches(84, 32, shuffle=True), max_epochs=4)
    assert plain.trainer.global_step == naive.trainer.global_step and plain.module.samples == naive.module.samples
    assert distance(plain, naive) > 1e-3


def test_the_reported_loss_of_a_short_window_is_its_own_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the accumulating run, though both train on a smaller loss there."""

    def read_losses(rungs: Any) -> Sequence[float]:
        loop = run(rungs, RAGGED(), max_epochs=2, **ACCUMULATE).loop
        assert loop is not None and loop.measurement is not None
        return loop.measurement.loss

    plain = read_losses({})
    assert len(plain) == 6 and read_losses(MERGE) == pytest.approx(plain, rel=1e-5)
    monkeypatch.setattr(windows.MergedWindows, "find_whole", lambda _windows, batch: (batch, 1.0))
    control = read_losses(MERGE)
    assert control[:2] == pytest.approx(plain[:2], rel=1e-5) and control[2] == pytest.approx(plain[2] * 3 / 4, rel=1e-5)


@pytest.mark.parametrize("frequency", [2, 4, 8, 11])
def test_scheduler_frequencies_count_batches_as_before(frequency: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the short last window ends at a batch that is no multiple of four."""
    module = partial(Net, SGD, partial(every, frequency))
    plain, merged = both(MERGE, RAGGED, module, max_epochs=9, **ACCUMULATE)
    assert merged_like(plain, merged) and len(set(plain.record.rates)) > 1
    # The control: windows counted as batches.
    monkeypatch.setattr(accumulation._InBatches, "__rmod__", lambda frequency, windows: windows % int(frequency))
    assert run(MERGE, RAGGED(), module, max_epochs=9, **ACCUMULATE).record.rates != plain.record.rates


def test_a_plateau_scheduler() -> None:
    plain, merged = both(MERGE, RAGGED, partial(Net, SGD, plateau), val=batches, max_epochs=5, **ACCUMULATE)
    assert merged_like(plain, merged) and len(set(plain.record.rates)) > 1


@pytest.mark.parametrize(
    ("train", "settings", "validations"),
    [
        (EVEN, {"val_check_interval": 4}, 9),
        (EVEN, {"val_check_interval": 8}, 3),
        (RAGGED, {"val_check_interval": 8}, 3),
        (EVEN, {"val_check_interval": 0.34}, 9),
        (RAGGED, {"val_check_interval": 11}, 3),
        (EVEN, {"val_check_interval": 8, "check_val_every_n_epoch": None}, 4),
        (RAGGED, {"check_val_every_n_epoch": 2}, 1),
        (RAGGED, {"limit_train_batches": 6}, 3),
        (EVEN, {"limit_train_batches": 0.5}, 3),
        (RAGGED, {"limit_train_batches": 0.7, "val_check_interval": 4}, None),
        (EVEN, {"max_steps": 4}, 1),
        (EVEN, {"max_steps": 4, "val_check_interval": 4}, 4),
        (EVEN, {"limit_train_batches": 8, "val_check_interval": 4, "reload_dataloaders_every_n_epochs": 1}, 6),
    ],
)
def test_what_counts_batches(train: Any, settings: dict[str, Any], validations: int | None) -> None:
    settings = {"max_epochs": 3, **ACCUMULATE, **settings}
    plain, merged = both(MERGE, train, val=batches, **settings)
    if validations is None:  # seven batches: a window, and three of four that would be validated
        assert "the short last window" in str(merged.reason("batch"))
        assert merged.record.hooks == plain.record.hooks and distance(plain, merged) == 0
        return
    assert merged_like(plain, merged) and len(plain.record.validated) == validations


@pytest.mark.parametrize(
    ("interval", "said"),
    [
        (
            6,
            "val_check_interval=6 is not a multiple of accumulate_grad_batches=4: validation would move;"
            " write a multiple",
        ),
        (
            0.5,
            "val_check_interval=0.5 (6 batches) is not a multiple of accumulate_grad_batches=4: validation would move;"
            " write a multiple",
        ),
    ],
)
def test_validation_inside_a_window_is_refused(interval: Any, said: str) -> None:
    plain, merged = both(MERGE, EVEN, val=batches, max_epochs=2, val_check_interval=interval, **ACCUMULATE)
    assert merged.reason("batch") == said and merged.verdict("batch").took is False
    assert merged.record.hooks == plain.record.hooks and distance(plain, merged) == 0


@pytest.mark.parametrize(("train", "second"), [(EVEN, EVEN), (RAGGED, partial(batches, 24, 8))])
@pytest.mark.parametrize(
    "settings", [{"max_epochs": 2}, {"limit_train_batches": 0.7}, {"reload_dataloaders_every_n_epochs": 1}]
)
def test_several_train_loaders_are_given_up(train: Any, second: Any, settings: dict[str, Any]) -> None:
    class Two(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch["a"], batch_idx) + self.loss(batch["b"])

    def two() -> dict[str, Any]:
        return {"a": train(), "b": second()}

    plain, merged = both(MERGE, two, Two, **{"max_epochs": 3, **ACCUMULATE, **settings})
    assert merged.reason("batch") == "windows of several train loaders cannot be merged"
    assert merged.record.hooks == plain.record.hooks and distance(plain, merged) == 0
    assert merged.trainer.global_step == plain.trainer.global_step


class Skips(Net):
    """Skips some batches, in a form that its code does not show, but none of the first window."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return [loss, None][40 in batch[2]]


class Shows(Skips):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if 40 in batch[2]:
            return None
        return Net.training_step(self, batch, batch_idx)


def test_a_step_that_skips_batches() -> None:
    """Where its code shows it, nothing is merged; else a window is lost, and the later ones run batch by batch."""
    plain, merged = both(MERGE, EVEN, Shows, max_epochs=2, **ACCUMULATE)
    assert (
        merged.verdict("batch").took is False
        and "the whole merged window would be skipped" in merged.verdict("batch").why
    )
    assert distance(plain, merged) == 0
    with pytest.warns(UserWarning, match="training_step returned no loss for a merged window"):
        found = run({"batch": {"micro_batch": 32}}, EVEN(), Skips, max_epochs=4, **ACCUMULATE)
    assert found.seen("batch")["apart_steps"] >= 9
    assert "from optimizer step" in found.verdict("batch").why
    assert found.loop is not None and found.loop.plan.step("batch").change.parity == "changes-training"  # type: ignore[union-attr]


class Divides(Net):
    """Divides its loss as one does with manual optimization."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) / self.trainer.accumulate_grad_batches


class Ramps(Net):
    """Weights its loss by the place in the epoch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * (batch_idx + 1) / self.trainer.num_training_batches


@pytest.mark.parametrize("module", [Divides, Ramps])
def test_a_step_that_reads_the_trainers_numbers_of_batches(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, ours = both(MERGE, EVEN, module, **ACCUMULATE)
    name = "accumulate_grad_batches" if module is Divides else "num_training_batches"
    assert f"training_step reads trainer.{name}, which changes if windows are merged" in ours.verdict("batch").why
    assert distance(plain, ours) == 0
    monkeypatch.setattr(read_facts, "list_read_counts", lambda _module: ())
    assert distance(plain, run(MERGE, EVEN(), module, **ACCUMULATE)) > 1e-2, "the control"


class Extra(Net):
    """A member that has nothing to do with the samples."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [*batch, torch.zeros(5, 2)]


@pytest.mark.parametrize("train", [EVEN, partial(batches, 80), RAGGED])
def test_batches_that_cannot_be_concatenated_run_one_by_one(train: Any) -> None:
    """Bit for bit as without us, also in a short last window and with a short last batch."""
    plain, merged = both(MERGE, train, Extra, max_epochs=2, **ACCUMULATE)
    assert merged.verdict("batch").took is False and merged.verdict("batch").why == (
        "windows run batch by batch: a tensor of shape (5, 2) in a batch of 8 samples; hooks still see one batch per"
        " window"
    )
    assert merged.module.samples == plain.module.samples and distance(plain, merged) == 0
    assert merged.trainer.global_step == plain.trainer.global_step
    assert merged.seen("batch")["apart_steps"] == merged.seen("batch")["steps"] == plain.trainer.global_step


class Sentences(Dataset):
    """Numbered sentences of some lengths, of which windows after the first have several."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = lengths

    def __len__(self) -> int:
        return 8 * len(self.lengths)

    def __getitem__(self, index: int) -> Any:
        return torch.arange(1.0, self.lengths[index // 8] + 1) / (index + 1), index


def pad(samples: Any) -> Any:
    """To the longest of the batch."""
    return {
        "x": torch.nn.utils.rnn.pad_sequence([x for x, _ in samples], batch_first=True),
        "n": torch.tensor([n for _, n in samples]),
    }


class Reads(Net):
    """Sees the padding: a mean over it would differ. Counts what the hooks get."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(2, 1)
        self.shown: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = batch["x"]
        each = self.net(torch.stack([x.mean(1), x.std(1)], 1)).square().squeeze(1)
        self.log("mean", each.mean(), on_epoch=True)
        self._since_step += batch["n"].tolist()
        return each.mean()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.shown.append(len(batch["x"]))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("lengths", "apart"), [([5, 5, 5, 5, 4, 6, 5, 3, 7, 7, 7, 7], 1), ([5] * 12, 0)])
def test_padded_lengths_that_differ_later(lengths: list[int], apart: int, workers: int) -> None:
    """The first window is merged; one of several lengths runs batch by batch; hooks get batches of the user's kind."""

    def train() -> DataLoader[Any]:
        return DataLoader(Sentences(lengths), batch_size=8, collate_fn=pad, num_workers=workers)

    plain, merged = both(MERGE, train, Reads, max_epochs=2, **ACCUMULATE)
    assert merged_like(plain, merged)
    assert merged.module.shown == [32, 8 if apart else 32, 32] * 2 and set(plain.module.shown) == {8}
    assert merged.seen("batch")["apart_steps"] == 2 * apart
    said = (
        "2 of 6 windows run batch by batch: batches of several shapes, such as padded lengths: samples of [4] and [6]"
    )
    assert (said in merged.verdict("batch").why) == bool(apart)
    assert merged.trainer.callback_metrics["mean_epoch"] == pytest.approx(plain.trainer.callback_metrics["mean_epoch"])
    assert merged.loop is not None and merged.loop.measurement is not None
    assert merged.loop.measurement.micro_batch == 32
    # The control: padded to the longest of the window it would be another training.
    whole = run(None, DataLoader(Sentences(lengths), batch_size=32, collate_fn=pad), Reads, max_epochs=2)
    assert (distance(plain, whole) > 1e-4) == bool(apart)


class Drawn(Dataset):
    """Draws for each sample, and its loader's collate function once a batch, as MixUp does."""

    def __init__(self) -> None:
        self.data = batches(96).dataset

    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> Any:
        x, y, n = self.data[index]
        return x + 0.1 * torch.randn(8), y, n


def mix(samples: Any) -> Any:
    x, y, n = torch.utils.data.default_collate(samples)
    share = torch.rand(())
    return share * x + (1 - share) * x.flip(0), share * y + (1 - share) * y.flip(0), n


class Fed(Net):
    """Keeps what it was fed."""

    def __init__(self) -> None:
        super().__init__()
        self.fed: list[torch.Tensor] = []

    def loss(self, batch: Any) -> torch.Tensor:
        self.fed.append(batch[0].detach().clone())
        return super().loss(batch)


@pytest.mark.parametrize("workers", [0, 1])
def test_each_batch_has_its_own_draws(workers: int) -> None:
    """Bit for bit what the plain run was fed: samples, augmentations and MixUp, batch by batch."""

    def train() -> DataLoader[Any]:
        return DataLoader(Drawn(), batch_size=8, shuffle=True, collate_fn=mix, num_workers=workers)

    plain, merged = both({"batch": {"micro_batch": 32}}, train, Fed, max_epochs=2, **ACCUMULATE)
    assert merged.verdict("batch").took and [len(x) for x in merged.module.fed] == [32] * 6
    assert torch.equal(torch.cat(plain.module.fed), torch.cat(merged.module.fed))
    assert distance(plain, merged) < 1e-6
    # The control: the joined indices collated at once.
    at_once = run(None, DataLoader(Drawn(), batch_size=32, collate_fn=mix), Fed, max_epochs=2)
    assert not torch.equal(torch.cat(plain.module.fed), torch.cat(at_once.module.fed))


class Mixes(Fed):
    """MixUp on the device, in the transfer hooks; counts its draws."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.calls.append(f"before {len(batch[0])}")
        return batch

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.calls.append(f"after {len(batch[0])}")
        share = torch.rand(())
        return [share * batch[0], share * batch[1], batch[2]]


@pytest.mark.parametrize("workers", [0, 2])
def test_transfer_hooks_get_the_users_batches(workers: int) -> None:
    plain, merged = both(
        {"batch": {"micro_batch": 32}}, partial(batches, 84, num_workers=workers), Mixes, max_epochs=2, **ACCUMULATE
    )
    assert merged_like(plain, merged) and merged.module.calls == plain.module.calls
    assert torch.equal(torch.cat(plain.module.fed), torch.cat(merged.module.fed))
    assert [len(x) for x in merged.module.fed] == [32, 32, 16, 4] * 2
    assert "on_before_batch_transfer" not in vars(merged.module)


def drop(samples: Any) -> Any:
    return torch.utils.data.default_collate([sample for sample in samples if int(sample[2]) % 11])


@pytest.mark.parametrize("module", [Mixes, Extra])
def test_windows_behind_a_feed(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Staged ahead of time, batch by batch, with their hooks; and of several lengths, apart from then on."""
    feed_on_cpu(monkeypatch)
    rungs = {**MERGE, "prefetch": {"depth": 2}}
    plain, merged = both(MERGE, EVEN, module, max_epochs=2, **ACCUMULATE)
    fed = run(rungs, EVEN(), module, max_epochs=2, **ACCUMULATE)
    assert fed.seen("prefetch")["batches"] == 6 and fed.verdict("batch").why == merged.verdict("batch").why
    assert fed.module.samples == plain.module.samples and distance(plain, merged) < 1e-6
    if module is Extra:  # what draws on its way draws earlier behind a feed
        assert distance(merged, fed) == 0


def test_a_conversion_in_mid_run_reaches_a_window_that_came_apart() -> None:
    """A rung that a rehearsal keeps converts the batch at hand, which was on the device before it."""
    nothing: Any = None
    micro = MicroBatches(PieceChoice(32, "batch", {}, site=nothing, live=nothing))
    apart = BatchWindow([torch.zeros(2, 3), torch.ones(2, 4)])
    shown = micro.show_window(apart)
    assert (
        shown is apart[-1]
        and micro.windows.find_whole(shown)[0] is apart
        and micro.windows.find_whole(apart[0])[0] is apart[0]
    )
    converted = micro.windows.convert(shown, lambda batch: batch + 1)
    whole = micro.windows.find_whole(converted)[0]
    assert [float(batch.max()) for batch in whole] == [1, 2] and converted is whole[-1]
    joined = micro.show_window(BatchWindow([torch.zeros(2, 3), torch.ones(1, 3)]))
    assert joined.shape == (3, 3)
    again = micro.windows.convert(joined, lambda batch: batch + 1)
    assert float(again.sum()) == 12 and micro.windows.find_whole(again) == (again, 1.0)


def test_a_collate_function_that_drops_samples() -> None:
    plain, merged = both(MERGE, partial(EVEN, collate_fn=drop), max_epochs=3, **ACCUMULATE)
    assert merged_like(plain, merged) and sum(map(len, plain.module.samples)) < 3 * 96


def test_an_iterable_dataset_is_refused() -> None:
    class Stream(IterableDataset):
        def __iter__(self) -> Any:
            return iter([tuple(member) for member in batches().dataset])

    plain, merged = both(MERGE, lambda: DataLoader(Stream(), batch_size=8), max_epochs=2, **ACCUMULATE)
    assert str(merged.reason("batch")).startswith("DataLoader yields ready-made batches, so an accumulation window")
    assert distance(plain, merged) == 0


def test_a_checkpoint_every_so_many_steps_and_an_average_of_weights(tmp_path: Path) -> None:
    def callbacks(name: str) -> tuple[Any, ...]:
        saves = ModelCheckpoint(tmp_path / name, every_n_train_steps=2, save_top_k=-1)
        averaging = getattr(lightnings, "WeightAveraging", None)  # since Lightning 2.6
        return (saves, averaging(use_buffers=True)) if averaging else (saves,)

    runs = [
        run(rungs, RAGGED(), max_epochs=3, callbacks=callbacks(name), enable_checkpointing=True, **ACCUMULATE)
        for name, rungs in (("plain", None), ("merged", MERGE))
    ]
    assert merged_like(*runs)
    names = sorted(path.name for path in (tmp_path / "plain").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "merged").iterdir()) and len(names) == 4
    for name in names:
        plain, merged = (torch.load(tmp_path / kind / name, weights_only=False) for kind in ("plain", "merged"))
        assert merged["loops"] == plain["loops"] and merged["global_step"] == plain["global_step"]
        assert apart(plain["state_dict"], merged["state_dict"]) < 1e-6
        assert merged["callbacks"].keys() - {"FastLoop"} == plain["callbacks"].keys()


@pytest.mark.parametrize("at", ["epoch", "step"])
@pytest.mark.parametrize(("first", "then"), [(None, MERGE), (MERGE, None), (MERGE, MERGE)])
def test_either_run_resumes_the_others_checkpoint(tmp_path: Path, first: Any, then: Any, at: str) -> None:
    """In the middle of an epoch Lightning starts the data anew; in both runs it is the same data. Where both are
    merged, the resumed run goes on in its data instead, as if nothing had happened."""
    train = partial(batches, 84)

    def fit(rungs: Any, epochs: int, ckpt: Any = None, save: Path | None = None) -> Run:
        saver = (ModelCheckpoint(save, every_n_train_steps=4, save_top_k=-1),) if save else ()
        return run(
            rungs,
            train(),
            partial(Net, AdamW, one_cycle_of_12, lr=0.01),
            max_epochs=epochs,
            ckpt=ckpt,
            callbacks=saver,
            enable_checkpointing=bool(save),
            val=batches(),
            **ACCUMULATE,
        )

    saved = tmp_path / "last.ckpt"
    half = fit(first, 2, save=tmp_path / "half" if at == "step" else None)
    if at == "epoch":
        half.trainer.save_checkpoint(saved)
    else:
        saved = next((tmp_path / "half").glob("*step=4*"))  # one window into the second epoch
    goes_on = at == "step" and first == then
    reference = fit(None, 4) if goes_on else fit(None, 4, ckpt=saved)
    resumed = fit(then, 4, ckpt=saved)
    if goes_on:
        assert reference.module.samples[4:] == resumed.module.samples and len(resumed.module.samples) == 8
        assert reference.record.rates[4:] == pytest.approx(resumed.record.rates)
        assert distance(reference, resumed) < 1e-6
        return
    assert resumed.record.rates == pytest.approx(reference.record.rates) and len(reference.record.rates) >= 6
    assert resumed.module.samples == reference.module.samples
    assert resumed.record.validated == reference.record.validated
    assert distance(reference, resumed) < 1e-6
    progress = [done.trainer.fit_loop.epoch_loop.batch_progress.state_dict() for done in (reference, resumed)]
    assert progress[0] == progress[1]


def one_cycle_of_12(optimizer: Any, module: Any) -> Any:
    return {"scheduler": OneCycleLR(optimizer, 0.02, total_steps=20), "interval": "step"}


def attributes(trainer: L.Trainer) -> dict[str, Any]:
    loop = trainer.fit_loop
    return {
        "accumulate": trainer.accumulate_grad_batches,
        "limit": trainer.limit_train_batches,
        "interval": trainer.val_check_interval,
        "val_batch": trainer.val_check_batch,
        "batches": loop.max_batches,
        "progress": copy.deepcopy(loop.epoch_loop.batch_progress.state_dict()),
        "frequencies": [type(config.frequency) for config in trainer.lr_scheduler_configs],
        "strategy": type(trainer.strategy).__name__,
    }


def test_after_the_fit_everything_is_as_in_the_plain_run() -> None:
    settings = {"val": batches, "max_epochs": 2, "val_check_interval": 8, "limit_train_batches": 11, **ACCUMULATE}
    plain, merged = both(MERGE, RAGGED, partial(Net, SGD, partial(every, 2)), **settings)
    assert attributes(merged.trainer) == attributes(plain.trainer)
    for done in (plain, merged):
        done.trainer.fit_loop.max_epochs = 4
        done.trainer.fit(done.module, batches(84))
    assert merged.seen("batch")["merged_batches"] == 4
    assert attributes(merged.trainer) == attributes(plain.trainer) and merged.module.samples == plain.module.samples
    assert distance(plain, merged) < 1e-6
    assert weights(merged.module).keys() == weights(plain.module).keys()


def test_after_a_fit_that_raised(tmp_path: Path) -> None:
    class Raises(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.trainer.global_step == 1:
                raise RuntimeError("planted")
            return super().training_step(batch, batch_idx)

    fits = KeepsTrainers()

    for rungs in (None, MERGE):
        with pytest.raises(RuntimeError, match="planted"):
            run(rungs, RAGGED(), partial(Raises, SGD, partial(every, 2)), callbacks=(fits,), **ACCUMULATE)
    plain, merged = map(attributes, fits.trainers)
    # The plain run stopped in the first batch of a window, the merged one in the window: both were about to begin it.
    assert plain.pop("progress")["total"]["completed"] == merged.pop("progress")["total"]["completed"] == 4
    assert merged == plain


@pytest.mark.parametrize("fits", [False, True])
def test_a_first_step_that_only_rungs_make_fit_runs_batch_by_batch(fits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A micro-batch that amp makes fit: amp starts after the first step, which would run out of memory without it."""
    tried = list[int]()

    def play(_run: Any, piece: Any) -> float:
        tried.append(piece.samples)
        if not fits and len(tried) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return 1.0

    monkeypatch.setattr(choice, "LIMITED", ("cpu",))
    monkeypatch.setattr(search_run.SearchRun, "_play", play)
    ours = run({**MERGE, "amp": {}}, EVEN(), Net, max_epochs=2, **ACCUMULATE)
    seen = ours.seen("batch")
    assert (
        tried == [16] * (1 if fits else 2)
        and ours.verdict("amp").took
        and ours.verdict("batch").took
        and ours.trainer.global_step == 6
    )
    assert (seen["apart_steps"], seen["changed_steps"]) == ((0, 6) if fits else (1, 5)), seen
    assert fits or "micro-batches of 16 only fit once these rungs start, after the first step: amp" in seen["apart_why"]

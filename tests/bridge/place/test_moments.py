"""When a checkpoint is written: in mid-batch, in mid-window, at an epoch's end, at max_steps; and what resumes it."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from tests import models
from tests.bridge.place.resumed import BATCH, SAMPLES, Recorded, fit, place, shuffled
from tests.runs import batches, feed_on_cpu, numbered, watching

pytestmark = pytest.mark.usefixtures("on_cpu")
FEED = {"prefetch": {"depth": 2}}
WORKERS = {"workers": {"count": 2, "persistent": True}, "prefetch": {"depth": 2}}
MERGED = {**FEED, "batch": {"micro_batch": 64}}
RUNGS = {"feed": FEED, "workers": WORKERS}
ALL = list(range(SAMPLES))


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    feed_on_cpu(monkeypatch)


def seeded(kind: type[Recorded] = Recorded, *settings: Any) -> Recorded:
    torch.manual_seed(0)
    return kind(*settings)


@functools.cache
def train_whole(rungs: str, shuffle_seed: int | None = None, **settings: Any) -> Recorded:
    """A run that nothing ends early: the same one for all moments at which others end."""
    return fit(RUNGS[rungs], shuffled(shuffle_seed), seed=5, **settings)[0]


@pytest.mark.parametrize(
    ("kind", "accumulate", "fails_at", "behind"),
    [
        *(("feed", *case) for case in ((1, 0, 0), (1, 4, 4), (3, 1, 0), (3, 4, 3), (3, 5, 3), (3, 6, 6), (3, 7, 6))),
        *(("workers", *case) for case in ((1, 0, 0), (1, 4, 4), (3, 5, 3), (3, 7, 6))),
    ],
)
def test_what_was_on_its_way_is_not_done(
    tmp_path: Path, kind: str, accumulate: int, fails_at: int, behind: int
) -> None:
    """The batch in training_step when it fails, and the window whose gradients are lost with the process."""
    settings: dict[str, Any] = {"accumulate_grad_batches": accumulate}
    whole, rungs = train_whole(kind, **settings), RUNGS[kind]
    module = seeded()
    module.raises_at = (1, fails_at)
    saves = OnExceptionCheckpoint(str(tmp_path), "failed")
    with pytest.raises(RuntimeError, match="planted"):
        fit(rungs, shuffled(), seed=5, module=module, callbacks=(saves,), **settings)
    assert place(tmp_path / "failed.ckpt")["batches"] == behind
    resumed, trainer = fit(FEED, shuffled(), seed=6, ckpt=tmp_path / "failed.ckpt", **settings)
    assert resumed.trained == [each for each in whole.trained if each[0] == 1][behind:]
    assert models.distance(whole.ends[1], resumed.ends[0]) == 0
    assert trainer.global_step == 2 * -(-8 // accumulate)


def test_a_window_is_lost_without_it(tmp_path: Path) -> None:
    """The negative control: Lightning alone goes on inside the window whose gradients it does not have."""
    module = seeded()
    module.raises_at = (0, 4)
    saves = OnExceptionCheckpoint(str(tmp_path), "failed")
    with pytest.raises(RuntimeError, match="planted"):
        fit(
            None,
            batches(SAMPLES),
            seed=5,
            module=module,
            callbacks=(saves,),
            accumulate_grad_batches=3,
        )
    resumed, _ = fit(None, batches(SAMPLES), seed=5, ckpt=tmp_path / "failed.ckpt", accumulate_grad_batches=3)
    assert len([each for each in resumed.trained if each[0] == 0]) == 4  # five are missing in the weights


@pytest.mark.parametrize("first", [FEED, MERGED], ids=["alone", "merged"])
def test_resumed_inside_of_what_is_a_window_now(tmp_path: Path, first: Any) -> None:
    """One batch a step before, three now: the first window has what is left of it, merged or not."""
    whole, _ = fit(FEED, shuffled(), seed=5, save=tmp_path, max_epochs=1)
    found = [
        fit(rungs, shuffled(), seed=6, ckpt=tmp_path / "step=2.ckpt", max_epochs=1, accumulate_grad_batches=3)
        for rungs in (FEED, first)
    ]
    for module, trainer in found:
        assert module.drawn(0) == whole.drawn(0)[2 * BATCH :]
        assert [len(step) for step in module.samples] == [8, 24, 12] and trainer.global_step == 2 + 3
    assert models.distance(found[0][0].ends[0], found[1][0].ends[0]) < 1e-6


@pytest.mark.parametrize(
    ("rungs", "accumulate"),
    [(FEED, 1), (FEED, 3), (WORKERS, 1), (MERGED, 3)],
    ids=["feed-1", "feed-3", "workers-1", "merged-3"],
)
def test_one_cycle_asks_for_the_loader_early(tmp_path: Path, rungs: Any, accumulate: int) -> None:
    """``estimated_stepping_batches`` makes the loader while the strategy is set up, before anything is restored."""

    def make() -> Recorded:
        return seeded(Recorded, torch.optim.SGD, schedule)

    def schedule(optimizer: Any, module: Any) -> Any:
        cycle = OneCycleLR(optimizer, 0.1, total_steps=module.trainer.estimated_stepping_batches)
        return {"scheduler": cycle, "interval": "step"}

    settings: dict[str, Any] = {"accumulate_grad_batches": accumulate}
    whole, trainer = fit(rungs, shuffled(), seed=5, save=tmp_path, module=make(), **settings)
    steps = trainer.global_step
    step = steps // 2 + 1
    resumed, after = fit(FEED, shuffled(), seed=6, ckpt=tmp_path / f"step={step}.ckpt", module=make(), **settings)
    done = (step - steps // 2) * accumulate
    assert resumed.drawn(1) == whole.drawn(1)[done * BATCH :] and after.global_step == steps
    assert models.distance(whole.ends[1], resumed.ends[0]) < 1e-6


def test_killed_twice_in_one_epoch(tmp_path: Path) -> None:
    whole, _ = fit(FEED, shuffled(), seed=5, save=tmp_path / "a", max_epochs=1)
    once, _ = fit(WORKERS, shuffled(), seed=6, ckpt=tmp_path / "a" / "step=2.ckpt", save=tmp_path / "b", max_epochs=1)
    twice, _ = fit(FEED, shuffled(), seed=7, ckpt=tmp_path / "b" / "step=5.ckpt", max_epochs=1)
    assert once.trained == whole.trained[2:] and twice.trained == whole.trained[5:]


def test_epochs_that_follow_draw_from_the_loaders_own_generator(tmp_path: Path) -> None:
    """It goes on where it was, also behind a checkpoint of an epoch's end."""
    whole, _ = fit(WORKERS, shuffled(3), seed=5, save=tmp_path, max_epochs=3)
    for step, rungs in ((11, FEED), (16, FEED), (17, WORKERS)):
        resumed, _ = fit(rungs, shuffled(4), seed=6, ckpt=tmp_path / f"step={step}.ckpt", max_epochs=3)
        assert resumed.trained == whole.trained[step:]


@pytest.mark.parametrize(
    ("rungs", "when"),
    [(FEED, "epoch"), (FEED, "validation"), (WORKERS, "validation"), (MERGED, "epoch")],
    ids=["feed-epoch", "feed-validation", "workers-validation", "merged-epoch"],
)
def test_the_end_of_an_epoch(tmp_path: Path, rungs: Any, when: str) -> None:
    """The next one begins with its first batch, whether Lightning saved after the validation or after the epoch."""
    saves = ModelCheckpoint(tmp_path, filename="{epoch}", save_on_train_epoch_end=when == "epoch", save_top_k=-1)

    class Validates(Recorded):
        def val_dataloader(self) -> Any:
            return batches(8)

    settings: dict[str, Any] = {"accumulate_grad_batches": 3}
    fit(rungs, shuffled(), seed=5, module=seeded(Validates), callbacks=(saves,), max_epochs=3, **settings)
    for epoch in (0, 1):
        ckpt = tmp_path / f"epoch={epoch}.ckpt"
        assert place(ckpt)["over"]
        resumed, trainer = fit(FEED, shuffled(), seed=6, module=seeded(Validates), ckpt=ckpt, max_epochs=3, **settings)
        assert [sorted(resumed.drawn(each)) for each in range(3)] == [[]] * (epoch + 1) + [ALL] * (2 - epoch)
        assert trainer.global_step == 9


@pytest.mark.parametrize(
    ("kind", "step"), [("feed", 3), ("feed", 8), ("feed", 11), ("feed", 16), ("workers", 8), ("workers", 11)]
)
def test_counted_in_steps(tmp_path: Path, kind: str, step: int) -> None:
    """``max_steps`` stops in mid-epoch or at its end; a checkpoint of then goes on there."""
    whole, rungs = train_whole(kind, 3, max_steps=24, max_epochs=-1), RUNGS[kind]
    loop = watching(rungs)
    _, trainer = fit(None, shuffled(3), seed=5, max_steps=step, max_epochs=-1, loop=loop)
    trainer.save_checkpoint(tmp_path / "after.ckpt")
    resumed, again = fit(rungs, shuffled(4), seed=6, ckpt=tmp_path / "after.ckpt", max_steps=24, max_epochs=-1)
    assert [each[1:] for each in resumed.trained] == [each[1:] for each in whole.trained[step:]]
    assert again.global_step == 24


@pytest.mark.parametrize(
    ("rungs", "when"),
    [(FEED, "epoch"), (FEED, "validation"), (WORKERS, "epoch"), (MERGED, "validation")],
    ids=["feed-epoch", "feed-validation", "workers-epoch", "merged-validation"],
)
def test_the_end_of_an_epoch_counted_in_steps(tmp_path: Path, rungs: Any, when: str) -> None:
    class Validates(Recorded):
        def val_dataloader(self) -> Any:
            return batches(8)

    saves = ModelCheckpoint(tmp_path, filename="{epoch}", save_on_train_epoch_end=when == "epoch", save_top_k=-1)
    settings: dict[str, Any] = {"accumulate_grad_batches": 3, "max_steps": 9, "max_epochs": -1}
    kind = Validates if when == "validation" else Recorded
    whole, _ = fit(rungs, shuffled(3), seed=5, module=seeded(kind), callbacks=(saves,), **settings)
    for epoch in (0, 1):
        ckpt = tmp_path / f"epoch={epoch}.ckpt"
        resumed, trainer = fit(rungs, shuffled(4), seed=6, module=seeded(kind), ckpt=ckpt, **settings)
        assert resumed.samples == whole.samples[3 * (epoch + 1) :] and trainer.global_step == 9
        assert resumed.trained == [each for each in whole.trained if each[0] > epoch]


@pytest.mark.parametrize(
    ("rungs", "batch"), [(FEED, 1), (FEED, 3), (FEED, 4), (WORKERS, 4)], ids=["feed-1", "feed-3", "feed-4", "workers-4"]
)
def test_saved_in_mid_window(tmp_path: Path, rungs: Any, batch: int) -> None:
    """At the end of a batch that made no step: resumed at the window's first batch."""

    class Saves(L.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, seen: Any, batch_idx: int) -> None:
            if batch_idx == batch and trainer.current_epoch == 0:
                trainer.save_checkpoint(tmp_path / "mid.ckpt")

    settings: dict[str, Any] = {"accumulate_grad_batches": 3, "max_epochs": 1}
    whole, trainer = fit(rungs, shuffled(), seed=5, callbacks=(Saves(),), **settings)
    resumed, again = fit(FEED, shuffled(), seed=6, ckpt=tmp_path / "mid.ckpt", **settings)
    assert resumed.trained == whole.trained[batch // 3 * 3 :]
    assert models.distance(whole.ends[0], resumed.ends[0]) == 0
    loops = [vars(done.fit_loop.epoch_loop.batch_progress) for done in (trainer, again)]
    assert loops[0] == loops[1]


def test_validation_in_mid_epoch(tmp_path: Path) -> None:
    class Validates(Recorded):
        def val_dataloader(self) -> Any:
            return batches(8)

    saves = ModelCheckpoint(tmp_path, monitor="val_loss", save_top_k=-1, filename="{step}")
    settings: dict[str, Any] = {"val_check_interval": 3, "max_epochs": 1}
    whole, _ = fit(FEED, shuffled(), seed=5, module=seeded(Validates), callbacks=(saves,), **settings)
    resumed, _ = fit(WORKERS, shuffled(), seed=6, module=seeded(Validates), ckpt=tmp_path / "step=3.ckpt", **settings)
    assert resumed.trained == whole.trained[3:]


class Endless(torch.utils.data.Sampler[Any]):
    """A batch sampler that does not say how many it has, so that Lightning itself looks a batch ahead."""

    def __iter__(self) -> Any:
        yield from torch.randperm(SAMPLES).view(-1, 6).tolist()


@pytest.mark.parametrize("rungs", [FEED, {"workers": {"count": 2}, **FEED}], ids=["feed", "workers"])
@pytest.mark.parametrize(
    "make",
    [
        lambda: DataLoader(numbered(SAMPLES), batch_sampler=Endless()),
        lambda: DataLoader(
            numbered(SAMPLES),
            batch_size=None,
            sampler=BatchSampler(RandomSampler(numbered(SAMPLES)), batch_size=6, drop_last=False),
        ),
        lambda: DataLoader(numbered(SAMPLES), 6, shuffle=True, num_workers=2, persistent_workers=True),
    ],
    ids=["without length", "unbatched", "workers of the user's"],
)
def test_other_loaders(tmp_path: Path, rungs: Any, make: Any) -> None:
    whole, _ = fit(rungs, make(), seed=5, save=tmp_path)
    for step in (4, 13):
        resumed, _ = fit(FEED, make(), seed=6, ckpt=tmp_path / f"step={step}.ckpt")
        epoch = step // 10
        assert resumed.drawn(epoch) == whole.drawn(epoch)[step % 10 * 6 :]
        assert all(sorted(resumed.drawn(later)) == ALL for later in range(epoch + 1, 2))


def test_an_epoch_that_was_stopped_early_is_over(tmp_path: Path) -> None:
    """Lightning then begins the next one, and so does the sampler."""

    class Stops(L.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            trainer.should_stop = trainer.global_step == 3

    loop = watching(FEED)
    _, trainer = fit(None, shuffled(), seed=5, loop=loop, callbacks=(Stops(),))
    assert trainer.global_step == 3
    trainer.save_checkpoint(tmp_path / "stopped.ckpt")
    assert place(tmp_path / "stopped.ckpt")["batches"] == 3
    resumed, _ = fit(FEED, shuffled(), seed=6, ckpt=tmp_path / "stopped.ckpt")
    assert sorted(resumed.drawn(1)) == ALL


@pytest.mark.parametrize("limit", [5, 0.7])
def test_part_of_an_epoch(tmp_path: Path, limit: Any) -> None:
    settings: dict[str, Any] = {"limit_train_batches": limit, "max_epochs": 3}
    whole, _ = fit(WORKERS, shuffled(3), seed=5, save=tmp_path, **settings)
    for step in (2, 5, 7):
        resumed, _ = fit(FEED, shuffled(3), seed=6, ckpt=tmp_path / f"step={step}.ckpt", **settings)
        assert resumed.drawn(step // 5) == whole.drawn(step // 5)[step % 5 * BATCH :]
        assert len(resumed.trained) == 15 - step


def test_loaders_that_are_made_anew_each_epoch(tmp_path: Path) -> None:
    class Data(L.LightningDataModule):
        def train_dataloader(self) -> Any:
            return shuffled()

    settings: dict[str, Any] = {"reload_dataloaders_every_n_epochs": 1, "max_epochs": 3}
    whole, _ = fit(FEED, Data(), seed=5, save=tmp_path, **settings)
    resumed, _ = fit(FEED, Data(), seed=6, ckpt=tmp_path / "step=11.ckpt", **settings)
    assert resumed.drawn(1) == whole.drawn(1)[3 * BATCH :] and sorted(resumed.drawn(2)) == ALL


def test_the_next_fit_starts_afresh(tmp_path: Path) -> None:
    """What a checkpoint said serves the fit that resumed it, and no other."""
    fit(FEED, shuffled(), seed=5, save=tmp_path, max_epochs=1)
    loop = watching(FEED)
    module, trainer = fit(None, shuffled(), seed=6, ckpt=tmp_path / "step=3.ckpt", max_epochs=1, loop=loop)
    assert len(module.trained) == 5
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, shuffled())
    assert sorted(module.drawn(1)) == ALL
    trainer.validate(module, batches(8), ckpt_path=tmp_path / "step=3.ckpt", **models.WEIGHTS_ONLY)
    trainer.fit_loop.max_epochs = 3
    trainer.fit(module, shuffled())
    assert sorted(module.drawn(2)) == ALL

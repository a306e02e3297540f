"""The prefetch rung. Copies and streams are tried in tests/gpu; here everything around them, on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import lightning as L
import psutil
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint
from torch.utils.data import DataLoader, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from fastloop import FastLoop
from fastloop.bridge.apply.staging import Staging
from fastloop.bridge.watch.loader_state import read_batch_sizes
from fastloop.errors import ConfigError, NotApplicable
from fastloop.feeds.device_prefetcher import DeviceFeed
from fastloop.records.facts import Facts, LoaderFacts
from fastloop.records.measurement import Measurement
from fastloop.rungs.prefetch import Prefetch
from tests.runs import Holds, KeepsTrainers, Net, Run, batches, both, distance, feed_on_cpu, numbered, run

PREFETCH: dict[str, Any] = {"prefetch": {"depth": 2}}
CPU = "needs CUDA; this run is on cpu, where there is no copy to overlap"


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    feed_on_cpu(monkeypatch)


def facts(loader: dict[str, Any] | None = None, **others: Any) -> Facts:
    record = None if loader is None else LoaderFacts(**{"kind": "DataLoader", **loader})
    return Facts(**{"device": "cuda", **others}, loader=record)


def test_plan() -> None:
    change = Prefetch(enabled=True, depth=3).plan(facts({}))
    assert change.wants == {"feed.depth": 3} and change.parity == "exact" and change.notes == ()
    assert Prefetch(enabled=True, depth="auto").plan(facts({})).wants == {"feed.depth": 2}
    assert Prefetch(enabled=True).plan(facts()).waits_for == "the train loader"
    assert Prefetch(enabled=True).plan(facts({"draws_random": ("Crop",), "num_workers": 2})).parity == "exact"
    noisy = Prefetch(enabled=True).plan(facts({"draws_random": ("Crop",)}))
    assert noisy.parity == "approximate" and noisy.notes == (
        "samples are loaded early in this process: training_step gets different CPU random numbers",
    )
    timed = Prefetch(enabled=True).plan(facts({}, timed_hooks=("on_before_batch_transfer",)))
    assert timed.parity == "approximate" and timed.notes == (
        "your on_before_batch_transfer draws random numbers or reads the step, and now runs before that step: both may"
        " differ",
    )
    holds = {"holds_training": ("collate_fn.__self__",)}
    reads = Prefetch(enabled=True).plan(facts(holds))
    assert reads.parity == "approximate"
    assert "what they read from collate_fn.__self__ may be out of date" in reads.notes[0]
    copies = Prefetch(enabled=True).plan(facts({**holds, "num_workers": 2}))
    assert copies.parity == "exact" and copies.notes == (), "workers hold copies in any case"
    kept = Prefetch(enabled=True).plan(facts({"changes_within": ("a is changed by B.c",), "num_workers": 2}))
    assert kept.parity == "exact", "your own workers made their samples from copies before, too"
    early = Prefetch(enabled=True).plan(facts({"sampler_draws": ("Bag.__iter__",), "num_workers": 2}))
    assert early.parity == "approximate" and early.notes[0].startswith("Bag.__iter__ draws random numbers between")


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (facts({}, device="cpu"), CPU),
        (facts({}, device="mps"), "needs CUDA; this run is on mps, where there is no copy to overlap"),
        (facts({"changes_within": ("a is changed by B.c",)}), "prefetching would load too early: a is changed by B.c"),
        (facts({}, steps_with_iterator=True), "training_step(dataloader_iter) fetches and moves its own batches"),
    ],
)
def test_plan_refuses(given: Facts, reason: str) -> None:
    with pytest.raises(NotApplicable) as refused:
        Prefetch(enabled=True).plan(given)
    assert str(refused.value) == reason


@pytest.mark.parametrize("depth", [0, -1])
def test_an_impossible_depth_is_a_config_error(depth: int) -> None:
    with pytest.raises(ConfigError, match=r"prefetch\.depth") as error:
        FastLoop({"rungs": {"prefetch": {"enabled": True, "depth": depth}}})
    assert "prefetching needs a depth of at least 1" in str(error.value)


def test_takes(on_cpu: None) -> None:
    ours = run(PREFETCH, batches(64), max_epochs=2)
    # The first batch of an epoch has to be waited for; all others were fetched before. Nothing is copied on the CPU.
    assert ours.seen("prefetch") == {"batches": 16, "ahead_batches": 14, "copied_bytes": 0}
    assert ours.verdict("prefetch").took is False
    assert ours.verdict("prefetch").why == "the batches were already on the device: nothing to copy ahead"
    verify, seen = Prefetch(enabled=True).verify, {"batches": 16, "ahead_batches": 14, "copied_bytes": 16 * 2**21}
    taken = verify(Measurement(evidence={"prefetch": seen}))
    assert taken.took is True
    assert taken.why == "14 of 16 batches were on the device before the step needed them (2.0 MiB each)"
    assert verify(Measurement(evidence={"prefetch": {**seen, "ahead_batches": 0}})).took is False
    assert verify(Measurement()).why == "no batch was prefetched"


def test_does_not_take_on_the_cpu() -> None:
    ours = run(PREFETCH, batches(), max_epochs=1)
    assert ours.reason("prefetch") == CPU and ours.verdict("prefetch").took is False


class Hooks(Net):
    """Every transfer hook changes the batch, so that one run twice or never shows in the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, int]] = []

    def _note(self, hook: str, batch: Any) -> None:
        self.calls.append((hook, int(batch[2][0])))

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self._note("before", batch)
        return [batch[0] + 1, *batch[1:]]

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        self._note("transfer", batch)
        return [batch[0] * 2, *batch[1:]]

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self._note("after", batch)
        return [batch[0] - 3, *batch[1:]]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self._note("step", batch)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._note("validate", batch)
        super().validation_step(batch, batch_idx)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("settings", [{}, {"limit_train_batches": 2}, {"accumulate_grad_batches": 2}, {"max_steps": 7}])
def test_parity(on_cpu: None, workers: int, settings: dict[str, Any]) -> None:
    """Exact, also where an epoch is left early and where validation comes between."""
    plain, ours = both(
        PREFETCH,
        partial(batches, 40, shuffle=True, num_workers=workers),
        Hooks,
        val=batches,
        max_epochs=3,
        val_check_interval=1.0,
        **settings,
    )
    assert ours.seen("prefetch")["ahead_batches"] > 0 and ours.verdict("prefetch").parity_class == "exact"
    assert ours.module.samples == plain.module.samples and distance(plain, ours) == 0
    assert ours.record.hooks == plain.record.hooks
    assert torch.equal(plain.trainer.callback_metrics["val_loss"], ours.trainer.callback_metrics["val_loss"])
    for hook in ("before", "transfer", "after", "step", "validate"):
        called = [number for name, number in ours.module.calls if name == hook]
        expected = [number for name, number in plain.module.calls if name == hook]
        # Batches that were fetched ahead and not used any more had their first two hooks.
        assert called == expected or (hook in ("before", "transfer") and settings)


class Reads(Holds):
    def __getitem__(self, index: int) -> Any:
        x, *rest = super().__getitem__(index)
        return (x + self.level, *rest)


class Raises(Net):
    """Changes the data in a way that no reading of its code finds."""

    data: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_step in (2, 8):
            exec("self.data[0].level += 1")
        return super().training_step(batch, batch_idx)


def read_levels(dataset: Any) -> DataLoader[Any]:
    Raises.data = [dataset]
    return DataLoader(dataset, 4, shuffle=True)


@pytest.mark.parametrize("rungs", [{}, {"workers": {"count": 1}}, {"nodes": {"threads": 2}}])
def test_batches_on_the_device_are_made_anew_once_their_data_changed(on_cpu: None, rungs: dict[str, Any]) -> None:
    plain, ours = both({**PREFETCH, **rungs}, lambda: read_levels(Reads(level=0)), Raises, max_epochs=2)
    assert distance(plain, ours) == 0 and ours.module.samples == plain.module.samples
    assert "dataset changed while batches waited on the device" in str(ours.reason("prefetch"))
    assert all("dataset changed while" in str(ours.reason(rung)) for rung in rungs)
    assert ours.loop is not None and ours.loop.plan.parity == "exact"
    again, _ = both(PREFETCH, lambda: read_levels(Reads(level=1)), Raises, max_epochs=2)
    assert distance(plain, again) > 0, "else this test shows nothing"


def test_the_order_and_the_sizes_of_batches_are_known_behind_the_feed(on_cpu: None) -> None:
    """Workers make the next epoch's first batches, and samples are counted as the loader draws them."""
    sizes = []
    look = LambdaCallback(on_train_batch_end=lambda trainer, *_: sizes.append(read_batch_sizes(trainer)))
    rungs = {**PREFETCH, "workers": {"count": 2, "persistent": True, "across_epochs": True}}
    ours = run(rungs, batches(60, shuffle=True), max_epochs=4, callbacks=(look,))
    assert ours.seen("prefetch")["batches"] == 32 and set(sizes) == {(8, 4)}
    assert "3 epochs started with prefetched batches" in ours.verdict("workers").why


def test_hooks_run_in_order_and_ahead(on_cpu: None) -> None:
    ours = run({"prefetch": {"depth": 1}}, batches(32), Hooks, max_epochs=1)
    assert ours.module.calls == [
        ("before", 0),
        ("transfer", 0),
        ("before", 8),
        ("transfer", 8),
        ("after", 0),
        ("step", 0),
        ("before", 16),
        ("transfer", 16),
        ("after", 8),
        ("step", 8),
        ("before", 24),
        ("transfer", 24),
        ("after", 16),
        ("step", 16),
        ("after", 24),
        ("step", 24),
    ]


def test_hooks_see_batches_in_the_runs_precision(on_cpu: None) -> None:
    class Sees(Hooks):
        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            assert batch[0].dtype == torch.float64
            return super().on_before_batch_transfer(batch, dataloader_idx)

    plain, ours = both(PREFETCH, batches, Sees, precision="64-true")
    assert distance(plain, ours) == 0 and ours.seen("prefetch")["batches"] == 3


def test_parity_sees_a_hook_that_runs_twice(on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control."""
    monkeypatch.setattr(Staging, "take_over_first_hook", lambda self, is_ahead: lambda: None)
    plain, ours = both(PREFETCH, batches, Hooks, max_epochs=2)
    assert distance(plain, ours) > 1e-3


class Data(L.LightningDataModule):
    """A DataModule's hooks come before the module's."""

    def train_dataloader(self) -> Any:
        return batches(40)

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] + 5, *batch[1:]]


def test_a_datamodules_hooks(on_cpu: None) -> None:
    plain, ours = (run(rungs, None, datamodule=Data(), max_epochs=2) for rungs in (None, PREFETCH))
    assert distance(plain, ours) == 0 and distance(plain, run(None, batches(40), max_epochs=2)) > 1e-3
    assert "on_before_batch_transfer" not in vars(ours.trainer.datamodule)


@pytest.mark.parametrize("raises", [False, True])
@pytest.mark.parametrize("own", [False, True])
def test_undo(on_cpu: None, raises: bool, own: bool, offspring: Callable[[], list[psutil.Process]]) -> None:
    class Maybe(Hooks):
        broken = raises

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            assert type(self.trainer.fit_loop._combined_loader.flattened[0]) is DeviceFeed
            if self.broken and batch_idx == 1:
                raise RuntimeError("planted")
            return super().training_step(batch, batch_idx)

    module, fits = Maybe(), KeepsTrainers()
    if own:  # a hook the user put on the instance
        module.on_before_batch_transfer = mine = partial(Hooks.on_before_batch_transfer, module)  # type: ignore[method-assign]

    loader = batches(40, num_workers=2, persistent_workers=True)
    before = dict(vars(loader))
    if raises:
        with pytest.raises(RuntimeError, match="planted"):
            run(PREFETCH, loader, lambda: module, callbacks=(fits,), max_epochs=1)
    else:
        run(PREFETCH, loader, lambda: module, callbacks=(fits,), max_epochs=1)
    (trainer,) = fits.trainers
    for _ in range(2):
        assert vars(module).get("on_before_batch_transfer") is (mine if own else None)
        assert dict(vars(loader)) == before and type(trainer.strategy).__name__ == "SingleDeviceStrategy"
        module.broken = False
        trainer.fit(module, loader)
    assert trainer.train_dataloader is loader
    assert not [child for child in offspring() if "resource_tracker" not in " ".join(child.cmdline())]


def stateful(workers: int) -> Any:
    torch.manual_seed(3)
    return StatefulDataLoader(numbered(40), batch_size=2, shuffle=True, num_workers=workers)


@pytest.mark.parametrize(("depth", "workers"), [(1, 0), (3, 0), (3, 2)])
def test_a_resumed_epoch_misses_and_repeats_nothing(
    on_cpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, depth: int, workers: int
) -> None:
    """Saved after batch 7 of the second epoch: a resumed run must use the other 13, in order."""

    def fit(epochs: int, ckpt: Any = None, save: str | None = None) -> Run:
        callbacks = (ModelCheckpoint(tmp_path / save, every_n_train_steps=27, save_top_k=-1),) if save else ()
        return run(
            {"prefetch": {"depth": depth}},
            stateful(workers),
            max_epochs=epochs,
            ckpt=ckpt,
            callbacks=callbacks,
            enable_checkpointing=bool(save),
        )

    whole = fit(2, save="tracked")
    assert whole.seen("prefetch")["ahead_batches"] > 0
    resumed = fit(2, ckpt=next((tmp_path / "tracked").iterdir()))
    assert resumed.module.samples == whole.module.samples[27:] and len(resumed.module.samples) == 13
    assert sorted(chain.from_iterable(whole.module.samples[20:27] + resumed.module.samples)) == list(range(40))
    assert distance(whole, resumed) == 0

    # The control: the loader's own state is ahead of the training by what the feed has fetched.
    monkeypatch.setattr(
        "fastloop.bridge.apply.staging.StatefulDeviceFeed",
        lambda inner, consumed, **settings: DeviceFeed(inner, **settings),
    )
    fit(2, save="untracked")
    lost = fit(2, ckpt=next((tmp_path / "untracked").iterdir()))
    assert lost.module.samples != whole.module.samples[27:] and len(lost.module.samples) < 13


class Stream(IterableDataset):
    """Knows where it stands, and not how long it is."""

    def __init__(self) -> None:
        self.next = self.start = 0

    def __iter__(self) -> Any:
        for number in range(self.start, 40):
            self.next = number + 1
            yield tuple(member[number] for member in numbered(40).tensors)
        self.start = 0

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["next"]


@pytest.mark.parametrize("depth", [1, 3])
def test_a_resumed_stream_without_length(on_cpu: None, tmp_path: Path, depth: int) -> None:
    """Lightning looks one batch ahead here by itself, and without the feed's tracking that batch is lost."""

    def fit(rungs: Any, ckpt: Any = None, save: str | None = None) -> Run:
        callbacks = (ModelCheckpoint(tmp_path / save, every_n_train_steps=7),) if save else ()
        return run(
            rungs,
            StatefulDataLoader(Stream(), batch_size=2),
            max_epochs=1,
            max_steps=7 if save else -1,
            ckpt=ckpt,
            callbacks=callbacks,
            enable_checkpointing=bool(save),
        )

    rungs = {"prefetch": {"depth": depth}}
    used = {name: fit(which, save=name).module.samples for name, which in (("plain", None), ("fed", rungs))}
    assert used["plain"] == used["fed"] and len(used["fed"]) == 7
    rest = fit(rungs, next((tmp_path / "fed").iterdir())).module.samples
    assert list(chain.from_iterable(used["fed"] + rest)) == list(range(40))
    lost = fit(None, next((tmp_path / "plain").iterdir())).module.samples
    assert list(chain.from_iterable(used["plain"] + lost)) != list(range(40))

"""Train loaders in a real Trainer: several, reloaded, in the user's own CombinedLoader; everything given back."""

from __future__ import annotations

import copy
import gc
import multiprocessing
import pickle
import weakref
from collections.abc import Iterator
from itertools import cycle
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Sampler, SequentialSampler

from fastloop.bridge.apply.loaders import _read_plain_sizes
from fastloop.errors import ConfigError, NotApplicable
from fastloop.records.facts import Facts
from fastloop.records.plan import Change
from fastloop.rungs.pin import Pin
from fastloop.rungs.workers import Workers
from tests.runs import Net, Run, batches, both, distance, feed_on_cpu, numbered, run

WORKERS = {"workers": {"count": 2}}


class Reloads(Net):
    """Hands out a new loader each time."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[weakref.ref[Any]] = []

    def train_dataloader(self) -> Any:
        loader = batches(20, shuffle=True)
        self.made.append(weakref.ref(loader))
        return loader


class Hooks(Net):
    """Notes its transfer hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, Any]] = []

    def _note(self, hook: str, batch: Any) -> None:
        first = batch["a"] if isinstance(batch, dict) else batch
        self.calls.append((hook, first[2].tolist()))

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self._note("before", batch)
        return batch

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        self._note("transfer", batch)
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self._note("after", batch)
        return batch


class Two(Hooks):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch["a"], batch_idx) + self.loss(batch["b"])


class TwoPlain(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch["a"], batch_idx) + self.loss(batch["b"])


def two() -> dict[str, Any]:
    return {"a": batches(40, shuffle=True), "b": batches(24, 8)}


def same(plain: Run, ours: Run) -> bool:
    return (
        plain.module.samples == ours.module.samples
        and distance(plain, ours) == 0
        and plain.record.hooks == ours.record.hooks
    )


def test_reloaded_loaders_are_changed_again_and_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    feed_on_cpu(monkeypatch)
    alive: list[int] = []

    class Counts(L.Callback):
        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            gc.collect()
            alive.append(sum(made() is not None for made in module.made))

    settings: dict[str, Any] = {"max_epochs": 4, "reload_dataloaders_every_n_epochs": 1}
    plain, ours = both({**WORKERS, "prefetch": {}}, lambda: None, Reloads, callbacks=lambda: (Counts(),), **settings)
    assert same(plain, ours) and ours.seen("prefetch")["batches"] == 12 and ours.seen("workers")["live_workers"] == 2
    assert (
        len(alive) == 8 and alive[4] == 1 and max(alive[4:]) <= 2
    )  # the last generation and this one, not one for each epoch


def test_a_users_own_workers_do_not_pile_up_over_reloads(monkeypatch: pytest.MonkeyPatch) -> None:  # D7, D20
    feed_on_cpu(monkeypatch)
    workers: list[int] = []

    class Keeps(Net):
        def train_dataloader(self) -> Any:
            return batches(20, shuffle=True, num_workers=2, persistent_workers=True, pin_memory=True)

        def on_train_epoch_end(self) -> None:
            workers.append(len(multiprocessing.active_children()))

    rungs = {"workers": {"persistent": "auto"}, "prefetch": {}, "pin": {}}
    plain, ours = both(rungs, lambda: None, Keeps, max_epochs=3, reload_dataloaders_every_n_epochs=1)
    assert same(plain, ours) and workers == [2] * 6 and not multiprocessing.active_children()
    loader = ours.seen("loader")
    assert loader["reload_every_n_epochs"] == 1 and loader["worker_restarts"] == 2, "each reload starts new ones"


def test_transfer_hooks_survive_a_reload(monkeypatch: pytest.MonkeyPatch) -> None:
    feed_on_cpu(monkeypatch)

    class Both(Hooks, Reloads):
        def __init__(self) -> None:
            Hooks.__init__(self)
            self.made = []

    plain, ours = both({"prefetch": {}}, lambda: None, Both, max_epochs=3, reload_dataloaders_every_n_epochs=1)
    assert ours.reason("prefetch") is None and ours.seen("prefetch")["batches"] == 9
    for hook in ("before", "transfer", "after"):
        assert [call for call in ours.module.calls if call[0] == hook] == [
            call for call in plain.module.calls if call[0] == hook
        ]
    assert "on_before_batch_transfer" not in vars(ours.module)


@pytest.mark.parametrize("reload", [0, 1])
def test_several_loaders_with_transfer_hooks(monkeypatch: pytest.MonkeyPatch, reload: int) -> None:
    """The hooks expect one batch of all loaders: the feed is given up, and the plain run's calls remain."""
    feed_on_cpu(monkeypatch)
    plain, ours = both({**WORKERS, "prefetch": {}}, two, Two, max_epochs=2, reload_dataloaders_every_n_epochs=reload)
    assert str(ours.reason("prefetch")).startswith("with several train loaders, your transfer hooks expect")
    assert same(plain, ours) and ours.module.calls == plain.module.calls and len(plain.module.calls) == 30
    assert ours.verdict("workers").took and ours.seen("prefetch")["batches"] == 0


def test_several_loaders_without_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    feed_on_cpu(monkeypatch)
    plain, ours = both({**WORKERS, "prefetch": {}}, two, TwoPlain, max_epochs=2)
    assert same(plain, ours) and ours.seen("prefetch")["batches"] == 20


class Moves(Sampler[int]):
    """Counts its epochs behind the last index, and draws each index from a generator of its own."""

    def __init__(self) -> None:
        self.epoch, self.generator = 0, torch.Generator().manual_seed(0)

    def __len__(self) -> int:
        return 20

    def __iter__(self) -> Iterator[int]:
        for _ in range(20):
            yield (int(torch.randint(20, (), generator=self.generator)) + self.epoch) % 20
        self.epoch += 1


@pytest.mark.parametrize("limit", [1.0, 3], ids=["all", "limited"])
@pytest.mark.parametrize("batch_size", [4, None])
@pytest.mark.parametrize("rung", ["workers", "prefetch", "nodes"])
def test_a_sampler_is_asked_for_no_more_batches_than_the_loop_takes(
    rung: str, batch_size: int | None, limit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    feed_on_cpu(monkeypatch)

    def train() -> DataLoader[Any]:
        if batch_size is not None:
            return batches(batch_size=batch_size, sampler=Moves())
        data: Any = [tuple(part[None] for part in sample) for sample in numbered()]
        return DataLoader(data, batch_size=None, sampler=Moves())

    plain, ours = both({rung: {}}, train, max_epochs=3, limit_train_batches=limit)
    assert ours.reason(rung) is None and same(plain, ours)


@pytest.mark.parametrize("rung", ["workers", "prefetch"])
def test_a_sampler_that_starts_anew_in_mid_epoch_is_asked_for_what_is_left(
    rung: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    feed_on_cpu(monkeypatch)
    saving = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=7, save_top_k=-1)
    settings: dict[str, Any] = {"max_epochs": 3, "enable_checkpointing": True}
    run(None, batches(batch_size=4, sampler=Moves()), callbacks=(saving,), **settings)
    settings |= {"ckpt": tmp_path / "step=7.ckpt", "enable_checkpointing": False}
    plain, ours = both({rung: {}}, lambda: batches(batch_size=4, sampler=Moves()), **settings)
    assert len(ours.module.samples) == 8 and same(plain, ours)


class Looks(L.Callback):
    """Reads the train loader itself, in mid-epoch and after it, and a copy of it."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def _read(self, loader: Any) -> None:
        self.seen.append(sum(1 for _ in loader))

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self._read(trainer.train_dataloader)
            self._read(copy.deepcopy(trainer.train_dataloader))
            self._read(pickle.loads(pickle.dumps(trainer.train_dataloader)))

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self._read(trainer.train_dataloader)


@pytest.mark.parametrize("rung", ["workers", "prefetch"])
def test_a_callback_that_reads_the_train_loader_gets_all_of_it(rung: str, monkeypatch: pytest.MonkeyPatch) -> None:
    feed_on_cpu(monkeypatch)
    looks = Looks()
    rungs: Any = {"workers": {"count": 2, "persistent": False}, "prefetch": {}}
    ours = run({rung: rungs[rung]}, batches(batch_size=4), callbacks=(looks,), max_epochs=2, limit_train_batches=3)
    assert ours.reason(rung) is None and looks.seen == [5] * 8


def test_a_stream_that_outlives_an_epoch_loses_nothing_to_the_feed(monkeypatch: pytest.MonkeyPatch) -> None:
    feed_on_cpu(monkeypatch)
    plain, ours = both({"prefetch": {}}, lambda: cycle(batches(batch_size=4)), max_epochs=3, limit_train_batches=3)
    assert ours.seen("prefetch")["batches"] == 9 and same(plain, ours)


class Scales(DataLoader[Any]):
    """Changes its batches, in a generator."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        for x, y, number in super().__iter__():
            yield 2 * x, y, number


class Pairs(DataLoader[Any]):
    """Makes one batch of two, and draws where it is asked for its iterator."""

    def __len__(self) -> int:
        return super().__len__() // 2

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        torch.rand(1)
        each = super().__iter__()
        return ([torch.cat(parts) for parts in zip(*two, strict=True)] for two in zip(each, each, strict=True))


class Goes(DataLoader[Any]):
    """Has one iterator, over a sampler without end, for all epochs."""

    def __init__(self, *given: Any, **settings: Any) -> None:
        super().__init__(*given, **settings)
        self.__dict__["batch_sampler"] = _Repeats(self.batch_sampler)
        self.going = super().__iter__()

    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        for _ in range(5):
            yield next(self.going)


class _Repeats:
    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from self.sampler


@pytest.mark.parametrize(("kind", "workers"), [(Scales, 0), (Scales, 1), (Pairs, 0), (Pairs, 1), (Goes, 0)])
def test_loaders_with_iterators_of_their_own_draw_as_they_would(
    kind: Any, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    feed_on_cpu(monkeypatch)

    def train() -> Any:
        return kind(numbered(24), batch_size=4, shuffle=True, num_workers=workers)

    plain, ours = both({"prefetch": {}}, train, max_epochs=2)
    assert ours.seen("prefetch")["batches"] == 2 * len(train()) and same(plain, ours)


def test_of_several_loaders_the_shorter_ones_are_asked_beyond_their_end() -> None:
    def train() -> dict[str, Any]:
        longer = DataLoader(numbered(24), 4, sampler=RandomSampler(range(24), generator=torch.Generator()))
        return {"a": longer, "b": batches(batch_size=4, sampler=Moves())}

    plain, ours = both(WORKERS, train, TwoPlain, max_epochs=2)
    assert ours.verdict("workers").took and same(plain, ours)


def test_one_of_several_loaders_has_workers_already() -> None:
    def train() -> dict[str, Any]:
        return {"a": batches(40, shuffle=True), "b": batches(24, 8, num_workers=1)}

    seen: list[list[int]] = []

    class Look(L.Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            seen.append([loader.num_workers for loader in trainer.fit_loop._combined_loader.flattened])

    plain, ours = both(WORKERS, train, TwoPlain, max_epochs=2, callbacks=lambda: (Look(),))
    assert same(plain, ours) and seen == [[0, 1], [2, 2]] and ours.verdict("workers").took


def collate_local(samples: Any) -> Any:
    class Local:
        """Of a class that no worker can send."""

    return torch.utils.data.default_collate(samples), Local()


class TwoAndMore(TwoPlain):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        batch = {key: each[0] if isinstance(each, (list, tuple)) else each for key, each in batch.items()}
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("alone", [True, False], ids=["one_of_them", "all_of_them"])
def test_workers_that_end_for_one_of_several_loaders_stay_for_the_others(alone: bool) -> None:
    def train() -> dict[str, Any]:
        first = batches(40, shuffle=True, **({} if alone else {"collate_fn": collate_local}))
        return {"a": first, "b": batches(24, 8, collate_fn=collate_local)}

    seen: list[list[int]] = []

    class Look(L.Callback):
        def on_train_end(self, trainer: Any, module: Any) -> None:
            seen.append([loader.num_workers for loader in trainer.fit_loop._combined_loader.flattened])

    plain, ours = both(WORKERS, train, TwoAndMore, max_epochs=2, callbacks=lambda: (Look(),))
    assert same(plain, ours) and seen == [[0, 0], [2, 0] if alone else [0, 0]]
    verdict = ours.verdict("workers")
    assert verdict.took is alone and ("went on without workers" in verdict.why) is alone
    assert (ours.reason("workers") is None) is alone


@pytest.mark.parametrize("mode", ["min_size", "max_size_cycle", "max_size"])
def test_the_users_combined_loader_is_given_back(mode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    feed_on_cpu(monkeypatch)

    class Maybe(TwoPlain):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return (
                Net.training_step(self, batch["a"], batch_idx)
                if batch["b"] is None
                else super().training_step(batch, batch_idx)
            )

    combined = [CombinedLoader(two(), mode) for _ in range(2)]
    user = list(combined[1].flattened)
    before = [dict(vars(loader)) for loader in user]
    given = iter(combined)
    plain, ours = both({**WORKERS, "prefetch": {}}, lambda: next(given), Maybe, max_epochs=2)
    assert same(plain, ours) and ours.verdict("workers").took
    assert ours.seen("workers")["live_workers"] == 4, "of both loaders"
    assert [id(loader) for loader in combined[1].flattened] == [id(loader) for loader in user]
    assert [dict(vars(loader)) for loader in user] == before


def test_the_same_combined_loader_on_every_reload() -> None:
    """Lightning leaves our copies in it; the next reload finds the user's loaders behind them."""

    class Keeps(TwoPlain):
        def __init__(self) -> None:
            super().__init__()
            self.combined = CombinedLoader(two(), "min_size")
            self.kinds: list[str] = []

        def train_dataloader(self) -> Any:
            return self.combined

        def on_train_epoch_start(self) -> None:
            self.kinds += [type(getattr(loader, "inner", loader)).__name__ for loader in self.combined.flattened]

    plain, ours = both(WORKERS, lambda: None, Keeps, max_epochs=3, reload_dataloaders_every_n_epochs=1)
    assert same(plain, ours) and set(ours.module.kinds) == {"DataLoader"}
    assert all(type(loader) is DataLoader and loader.num_workers == 0 for loader in ours.module.combined.flattened)


def test_a_loader_that_cannot_be_changed_is_left_alone() -> None:
    class Stubborn(DataLoader):
        @property
        def prefetch_factor(self) -> int | None:
            return None

        @prefetch_factor.setter
        def prefetch_factor(self, value: Any) -> None:
            if value is not None:
                raise RuntimeError("is mine")

    plain, ours = both(WORKERS, lambda: Stubborn(numbered(20), batch_size=8), max_epochs=2)
    assert ours.reason("workers") == "RuntimeError: is mine" and same(plain, ours)
    with pytest.raises(ConfigError, match="is mine"):
        run(WORKERS, Stubborn(numbered(20), batch_size=8), strict=True)


def test_workers_count_as_seen_though_the_feed_ends_them_early(monkeypatch: pytest.MonkeyPatch) -> None:
    feed_on_cpu(monkeypatch)
    ours = run({**WORKERS, "prefetch": {"depth": 3}}, batches(20), max_epochs=1)
    assert ours.verdict("workers").took and ours.seen("workers")["live_workers"] == 2


@pytest.mark.parametrize(
    ("sampler", "sizes"),
    [
        (BatchSampler(SequentialSampler(range(20)), 8, False), (8, 4)),
        (BatchSampler(SequentialSampler(range(20)), 8, True), (8, 8)),
        (BatchSampler(RandomSampler(range(16)), 8, False), (8, 8)),
        (BatchSampler(iter(range(16)), 8, False), None),
        (None, None),
        (type("Own", (BatchSampler,), {})(SequentialSampler(range(20)), 8, False), None),
    ],
)
def test_sizes_are_known_for_torchs_own_batch_sampler(sampler: Any, sizes: Any) -> None:
    assert _read_plain_sizes(sampler) == sizes


@pytest.mark.parametrize("micro", [3, 16])
def test_all_data_rungs_together(micro: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """Workers draw ahead, the feed fetches ahead, windows are merged and cut; then half of it resumed."""
    feed_on_cpu(monkeypatch)
    rungs = {**WORKERS, "prefetch": {"depth": 3}, "batch": {"micro_batch": micro}}

    def fit(which: Any, epochs: int, **settings: Any) -> Run:
        return run(
            which, batches(84, shuffle=True), max_epochs=epochs, accumulate_grad_batches=4, val=batches(), **settings
        )

    plain, ours = fit(None, 3), fit(rungs, 3)
    assert [verdict.took for verdict in ours.loop.verdicts if verdict.rung != "prefetch"] == [True, True]  # type: ignore[union-attr]
    assert ours.module.samples == plain.module.samples and distance(plain, ours) < 1e-6
    assert ours.record.validated == plain.record.validated
    fit(rungs, 1).trainer.save_checkpoint(tmp_path / "half.ckpt")
    halves = [fit(which, 2, ckpt=tmp_path / "half.ckpt") for which in (None, rungs)]
    assert halves[1].module.samples == halves[0].module.samples and distance(*halves) < 1e-6


def test_validation_loaders_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    feed_on_cpu(monkeypatch)
    kinds: list[Any] = []

    class Look(L.Callback):
        def on_validation_start(self, trainer: Any, module: Any) -> None:
            kinds.append((type(trainer.val_dataloaders), trainer.val_dataloaders.num_workers))

    plain, ours = both(
        {**WORKERS, "prefetch": {}}, batches, Hooks, val=batches, callbacks=lambda: (Look(),), max_epochs=2
    )
    assert same(plain, ours) and set(kinds) == {(DataLoader, 0)}
    assert sorted(ours.module.calls) == sorted(plain.module.calls)
    assert torch.equal(plain.trainer.callback_metrics["val_loss"], ours.trainer.callback_metrics["val_loss"])


class Doubled:
    """Stands in for a dataset, and counts what it is asked for."""

    def __init__(self, inner: Any, factor: int) -> None:
        self.inner, self.factor, self.asked, self.closed = inner, factor, 0, 0

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int) -> Any:
        self.asked += 1
        x, y, number = self.inner[index]
        return x, y, number * self.factor

    def close(self) -> None:
        """Of the user's, for all anybody knows."""
        self.closed += 1


class Threads:
    """Stands in for a loader: asks its batch sampler, and its dataset, itself."""

    def __init__(self, loader: Any) -> None:
        self.loader, self.batches = loader, 0
        self.seeds: list[int] = []

    def load(self, seed: int) -> Any:
        self.seeds.append(seed)
        for indices in self.loader.batch_sampler:
            self.batches += 1
            yield self.loader.collate_fn([self.loader.dataset[index] for index in indices])

    def evidence(self) -> dict[str, int]:
        return {"batches": self.batches, "seeds": len(set(self.seeds))}


class Wraps:
    def __init__(self, factor: int, made: list[Any]) -> None:
        self.factor, self.made, self.closed = factor, made, 0

    def wrap(self, dataset: Any) -> Any:
        self.made.append(Doubled(dataset, self.factor))
        return self.made[-1]

    def evidence(self) -> dict[str, int]:
        return {"asked": self.made[-1].asked}

    def close(self) -> None:
        self.closed += 1


class Refuses:
    def wrap(self, dataset: Any) -> Any:
        raise NotApplicable("there is no room")


class Makes:
    def make(self, loader: Any) -> Any:
        return Threads(loader)


def test_datasets_are_wrapped_in_order_and_an_engine_loads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    wants = {"dataset.cache": Wraps(2, made), "dataset.uint8": Wraps(-1, made), "loader.engine": Makes()}

    def plan(_self: Workers, facts: Facts) -> Change:
        waits = Change(waits_for="the train loader", may_want=tuple(wants))
        return waits if facts.loader is None else Change(wants=wants)

    monkeypatch.setattr(Workers, "plan", plan)
    plain, ours = both({"workers": {}}, lambda: batches(12, 4, shuffle=True), max_epochs=2)
    inner, outer = made
    assert outer.inner is inner and inner.asked == outer.asked == 24
    assert [[-2 * value for value in batch] for batch in plain.module.samples] == ours.module.samples
    assert ours.loop is not None and ours.loop.measurement is not None
    found = ours.loop.measurement.evidence["workers"]
    assert found["asked"] == 24 and found["batches"] == 6 and found["seeds"] == 2
    assert [want.closed for want in wants.values() if isinstance(want, Wraps)] == [1, 1], "undone with the rest"
    assert inner.closed == outer.closed == 0, "a dataset's own close() is none of ours"


def test_a_dataset_that_cannot_be_wrapped_takes_no_other_rung_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def plan(_self: Pin, facts: Facts) -> Change:
        return Change(waits_for="it") if facts.loader is None else Change(wants={"dataset.cache": Refuses()})

    monkeypatch.setattr(Pin, "plan", plan)
    plain, ours = both({"pin": {}, **WORKERS}, lambda: batches(12, 4, shuffle=True), max_epochs=2)
    assert ours.reason("pin") == "there is no room" and ours.reason("workers") is None
    assert plain.module.samples == ours.module.samples and ours.verdict("workers").took is True

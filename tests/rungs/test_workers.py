"""The workers rung: who gets worker processes, who must not, and that samples and their order stay."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import psutil
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import BatchSampler, DataLoader, Dataset, SequentialSampler

from fastloop import FastLoop
from fastloop.errors import ConfigError, NotApplicable
from fastloop.evidence import machine
from fastloop.evidence.worker_limits import find_obstacle_to_next_epoch, is_cut_short
from fastloop.feeds.lazy_loader import LazyLoader, clone
from fastloop.feeds.workers import more_workers, packed_list, tried_workers
from fastloop.feeds.workers.packed_list import PackedList, Packing
from fastloop.feeds.workers.tried_workers import TriedWorkers
from fastloop.records.facts import Facts
from fastloop.records.measurement import Measurement
from fastloop.report.run.summary import list_loop_changes
from fastloop.rungs.workers import Workers, choose_count
from tests.models import weights
from tests.rungs.loaders import ByEpoch, Centers, Data, Nested, Odd, Stream, facts, run_and_draw
from tests.rungs.two_ranks import results
from tests.runs import Counts, Holds, KeepsTrainers, Net, Run, batches, both, distance, feed_on_cpu, numbered, run

pytestmark = pytest.mark.usefixtures("quick_starts")
WORKERS = {"workers": {"count": 2}}


def wants(count: int, persistent: bool = False, prefetch_factor: int = 2) -> dict[str, Any]:
    return {
        "loader.num_workers": count,
        "loader.prefetch_factor": prefetch_factor,
        "loader.persistent_workers": persistent,
    }


HEAVY = {"sample_bytes": 2**20, "batch_size": 8}
LITTLE = (
    "/dev/shm has room for only {} MiB: fewer workers are used if their batches do not fit; give the container"
    " --shm-size=8g"
)


@pytest.mark.parametrize(
    ("settings", "given", "expected", "notes"),
    [
        ({}, facts({}), wants(7), []),
        ({}, facts({}, cpu_count=1), wants(1), []),
        ({}, facts({}, cpu_count=64), wants(8), []),
        ({}, facts({}, cpu_count=8, local_ranks=4), wants(1), []),
        ({"count": 3, "prefetch_factor": 4}, facts({}), wants(3, prefetch_factor=4), []),
        ({"persistent": True}, facts({}), wants(7, persistent=True), []),
        (
            {"persistent": True},
            facts({}, reload_every_n_epochs=1),
            wants(7),
            ["persistent workers are off: the Trainer reloads its loaders, and the old workers would stay"],
        ),
        ({"count": 3, "start_method": "spawn"}, facts({}), {**wants(3), "loader.multiprocessing_context": "spawn"}, []),
        (
            {"count": 8},
            facts({}, cpu_count=2, local_ranks=2),
            wants(8),
            ["8 workers for each of 2 ranks on 2 usable CPUs: they compete for CPUs and may slow down training"],
        ),
        ({"count": 3}, facts({}, shm_free_bytes=64 * 2**20), wants(3), [LITTLE.format(64)]),
        ({"count": 3}, facts({}, shm_free_bytes=2**30), wants(3), []),
        # 8 MiB a batch: 16 fit into 171 MiB, of which a quarter stays free; two lie beside those of the workers.
        ({"count": 8}, facts(HEAVY, shm_free_bytes=171 * 2**20), wants(8, prefetch_factor=1), [LITTLE.format(171)]),
        ({"count": 8}, facts(HEAVY, shm_free_bytes=54 * 2**20), wants(3, prefetch_factor=1), [LITTLE.format(54)]),
        ({"count": 8}, facts(HEAVY, shm_free_bytes=2**29), wants(8), [LITTLE.format(512)]),
        (
            {"count": 8},
            facts(HEAVY, shm_free_bytes=171 * 2**20, local_ranks=4, cpu_count=32),
            wants(2, prefetch_factor=1),
            [LITTLE.format(171)],
        ),
        (
            {},
            facts({"sampler_draws": ("Bag.__iter__",)}),
            wants(7),
            [
                "Bag.__iter__ draws random numbers between samples, and now does so before the training draws its"
                " own: both may differ",
            ],
        ),
        (
            {},
            facts({"draws_random": ("RandomCrop", "a", "b", "c")}),
            wants(7),
            ["random augmentations may differ from a run without workers (RandomCrop, a, b)"],
        ),
        (
            {},
            facts({"asks_process": ("Mine.__getitem__",)}),
            wants(7),
            ["Mine.__getitem__ reads its worker or process id, so samples may differ from a run without workers"],
        ),
    ],
)
def test_plan(settings: dict[str, Any], given: Facts, expected: dict[str, Any], notes: list[str]) -> None:
    change = Workers(enabled=True, **settings).plan(given)
    kept_off = {"launch.free_cpus": given.local_ranks} if given.cpu_count > 2 * given.local_ranks else {}
    room = [f"{given.local_ranks} of {given.cpu_count} CPUs are left for the training's own threads"]
    assert change.wants == {**expected, **kept_off} and not change.actions
    assert sorted(change.notes) == sorted([*notes, *(room if kept_off else [])])
    draws = given.loader and (given.loader.draws_random or given.loader.sampler_draws or given.loader.asks_process)
    assert change.parity == ("approximate" if draws else "exact")


@pytest.mark.parametrize(
    ("settings", "loader", "reason"),
    [
        ({}, {"is_dataloader": False, "kind": "list"}, "list is not a DataLoader: its workers, if any, cannot be set"),
        ({}, {"num_workers": 3}, "the loader already has 3 workers; your setting stands"),
        ({"count": 3}, {"num_workers": 3}, "the loader already has 3 workers; your setting stands"),
        (
            {"count": 5},
            {"num_workers": 3, "worker_hazards": ("a is x",)},
            "the dataset cannot be copied to workers: a is x",
        ),
        (
            {"grow": True},
            {"num_workers": 3, "start_method": "spawn"},
            "the loader already has 3 workers; your setting stands: workers are started with spawn here, which is slow",
        ),
        (
            {"grow": True},
            {"num_workers": 3, "persistent_workers": True, "may_change": ("a is changed by B.c",)},
            "the loader already has 3 workers; your setting stands: new workers would get a newer copy of the dataset"
            " than yours have: a is changed by B.c",
        ),
        (
            {"grow": True},
            {"num_workers": 3, "sampler_draws": ("Bag.__iter__",)},
            "the loader already has 3 workers; your setting stands: more workers would read the sampler further ahead,"
            " and Bag.__iter__ draws random numbers between samples",
        ),
        (
            {"grow": True},
            {"num_workers": 3, "map_style": False},
            "the loader already has 3 workers; your setting stands: every worker would read the whole iterable dataset"
            " and repeat its samples, unless the dataset splits itself with torch.utils.data.get_worker_info; if yours"
            " does, set num_workers yourself",
        ),
        ({"grow": True}, {"num_workers": 7}, "the loader already has 7 workers; your setting stands"),
        (
            {},
            {"map_style": False},
            "every worker would read the whole iterable dataset and repeat its samples, unless the dataset splits"
            " itself with torch.utils.data.get_worker_info; if yours does, set num_workers yourself",
        ),
        (
            {},
            {"stateful": True},
            "DataLoader shuffles differently with workers, and its saved position is tied to their"
            " number; set num_workers yourself before the run starts",
        ),
        (
            {},
            {"changes_within": ("a is changed by B.c",)},
            "workers would load from an outdated copy: a is changed by B.c",
        ),
        ({}, {"worker_hazards": ("a is x", "b is y")}, "the dataset cannot be copied to workers: a is x; b is y"),
        (
            {},
            {"worker_hazards": ("a (Pool) is x", "b (Pool) is x", "c (File) is y", "d (Pool) is x")},
            "the dataset cannot be copied to workers: a (Pool) is x (and 2 more like it); c (File) is y",
        ),
        ({}, {"sampler_hazards": ("a is x",)}, "workers read the sampler ahead of training: a is x"),
        (
            {},
            {"own_iterator": True},
            "DataLoader creates its own iterators, so what workers send cannot be checked first; set num_workers"
            " yourself",
        ),
        (
            {"start_method": "spawn"},
            {"spawn_hazard": "dataset.f (<lambda>) cannot be pickled"},
            "workers are started with spawn here, and dataset.f (<lambda>) cannot be pickled",
        ),
        (
            {},
            {"spawn_hazard": "dataset.f (<lambda>) cannot be pickled", "start_method": "forkserver"},
            "workers are started with forkserver here, and dataset.f (<lambda>) cannot be pickled",
        ),
    ],
)
def test_plan_refuses(settings: dict[str, Any], loader: dict[str, Any], reason: str) -> None:
    with pytest.raises(NotApplicable) as refused:
        Workers(enabled=True, **settings).plan(facts(loader))
    assert str(refused.value) == reason


@pytest.mark.skipif(torch.multiprocessing.get_sharing_strategy() != "file_descriptor", reason="sends no descriptors")
def test_no_workers_where_their_batches_could_not_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker cannot make its socket there, and torch's loader waits for its batch for ever."""
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        for length in (75, 76):
            place = Path(f"{short}/".ljust(length, "x"))
            place.mkdir()
            monkeypatch.setattr(tempfile, "tempdir", str(place))
            monkeypatch.setitem(multiprocessing.current_process()._config, "tempdir", None)
            ours = run(WORKERS, batches(64))
            assert ours.verdict("workers").took is (length == 75)
        assert f"paths below {place} are too long; set TMPDIR to a shorter directory" in (ours.reason("workers") or "")
        with pytest.raises(RuntimeError, match="timed out"):  # what the training would wait for
            next(iter(batches(64, num_workers=1, timeout=2)))


@pytest.mark.parametrize(("ranks", "cpus"), [(1, 2), (2, 4), (4, 8), (1, 3), (4, 9)])
def test_few_cpus_are_not_kept_free(ranks: int, cpus: int) -> None:
    change = Workers(enabled=True).plan(facts({}, cpu_count=cpus, local_ranks=ranks))
    assert change.wants.get("launch.free_cpus") == {3: 1, 9: 4}.get(cpus)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity here")
def test_workers_leave_room_for_launching(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read back from the kernel: of the CPUs that the worker believes to have, only the first is there."""
    real = os.sched_getaffinity
    first = min(real(0))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: real(pid) if pid else {first, 1000, 1001})
    monkeypatch.setattr(machine, "count_usable_cpus", lambda: 3)
    plain, ours = both(WORKERS, partial(batches, 64, shuffle=True), max_epochs=2)
    assert ours.seen("workers")["worker_cpus"] == 1 and ours.verdict("workers").parity_class == "exact"
    assert ours.module.samples == plain.module.samples and distance(plain, ours) == 0
    monkeypatch.setattr(machine, "count_usable_cpus", lambda: 2)
    assert run(WORKERS, batches(64)).seen("workers")["worker_cpus"] == len(real(0)), "the control"


def test_long_lists_are_packed_or_named() -> None:
    """D8."""
    change = Workers(enabled=True).plan(facts({"packable": 10**7, "long_lists": ("dataset.samples holds 10",)}))
    assert change.wants["dataset.packed"] == Packing(samples=10**7) and change.parity == "exact"
    assert "10000000 file names are packed into arrays, which workers share instead of copying" in change.notes
    change = Workers(enabled=True).plan(facts({"long_lists": ("dataset.paths holds 1.2 million Python objects",)}))
    assert "dataset.packed" not in change.wants and change.notes[0] == (
        "worker memory grows: dataset.paths holds 1.2 million Python objects, and each worker copies what it reads;"
        " use arrays"
    )


def test_workers_read_packed_files_in_a_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("torchvision.datasets")
    image = pytest.importorskip("PIL.Image")
    (tmp_path / "x").mkdir()
    for number in range(12):
        image.new("L", (8, 1), number).save(tmp_path / "x" / f"{number:02d}.png")
    monkeypatch.setattr(packed_list, "LONG", 12)
    wrapped: list[Any] = []
    wrap = Packing.wrap
    monkeypatch.setattr(Packing, "wrap", lambda it, dataset: wrapped.append(wrap(it, dataset)) or wrapped[-1])
    folder = datasets.ImageFolder(tmp_path, transform=read_grey)

    def collate(rows: Any) -> Any:
        x = torch.stack([x for x, _ in rows])
        return x / 12, x[:, :1], x[:, 0].long()

    plain, ours = both(WORKERS, lambda: DataLoader(folder, 4, shuffle=True, collate_fn=collate), max_epochs=2)
    assert ours.verdict("workers").took and [type(each.samples) for each in wrapped] == [PackedList]
    assert ours.module.samples == plain.module.samples and distance(plain, ours) == 0
    assert type(folder.samples) is list and folder.samples == wrapped[0].samples


def read_grey(picture: Any) -> torch.Tensor:
    return torch.tensor(list(picture.convert("L").tobytes()), dtype=torch.float32)


def test_plan_waits_and_counts() -> None:
    assert Workers(enabled=True).plan(facts()).waits_for == "the train loader"
    assert Workers(enabled=True).plan(facts({"spawn_hazard": "x"})).wants  # fork pickles nothing
    shares = [choose_count(facts(cpu_count=cpus, local_ranks=ranks)) for cpus, ranks in ((1, 1), (2, 1), (9, 2))]
    assert shares == [1, 1, 3]


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"count": 0}, "without a worker this rung is off"),
        ({"count": -2}, "without a worker this rung is off"),
        ({"prefetch_factor": 0}, "each worker must keep at least one batch ready"),
        ({"count": "many"}, ""),
        ({"start_method": "thread"}, ""),
    ],
)
def test_impossible_settings_are_config_errors(settings: dict[str, Any], why: str) -> None:
    """D2: before anything starts, with the full key."""
    with pytest.raises(ConfigError) as error:
        FastLoop({"rungs": {"workers": {"enabled": True, **settings}}})
    assert why in str(error.value) and f"workers.{next(iter(settings))}" in str(error.value)


CHANGES = {"may_change": ("a is changed by b", "c")}


@pytest.mark.parametrize(
    ("settings", "loader", "run", "persistent"),
    [
        ({}, {"batches": 32}, {}, True),
        ({}, {"batches": 999}, {}, True),
        ({}, {"batches": 1000}, {}, False),
        ({}, {"batches": 5000}, {"limit_train_batches": 40}, True),
        ({}, {"batches": 5000}, {"limit_train_batches": 0.01}, True),
        ({}, {"batches": None}, {}, False),
        ({}, {"batches": 32}, {"max_epochs": 1}, False),
        ({}, {"batches": 32}, {"max_steps": 16, "accumulate": 2}, False),
        ({}, {"batches": 32}, {"max_steps": 17, "accumulate": 2}, True),
        ({}, {"batches": 100, **CHANGES}, {}, False),
        ({}, {"batches": 100}, {"reload_every_n_epochs": 1}, False),
        ({"count": 2}, {"batches": 32, **CHANGES}, {}, False),
        ({"persistent": False}, {"batches": 32, **CHANGES}, {}, False),
        ({"persistent": True}, {"batches": 32, **CHANGES}, {}, True),
        ({}, {"batches": 32, **CHANGES}, {"max_epochs": 1}, False),
    ],
)
def test_workers_are_kept_where_epochs_are_short_and_nothing_changes_the_dataset(
    settings: dict[str, Any], loader: dict[str, Any], run: dict[str, Any], persistent: bool
) -> None:
    change = Workers(enabled=True, **settings).plan(facts(loader, **run))
    assert change.wants["loader.persistent_workers"] is persistent and change.parity == "exact"


@pytest.mark.parametrize(
    ("run", "why"),
    [
        ({}, "a is changed by b; if that is fine, write workers.persistent: true"),
        (
            {"reload_every_n_epochs": 2},
            "the Trainer reloads its loaders, and the old workers would stay; to start them anyway, set workers.count",
        ),
    ],
)
def test_epochs_too_short_to_start_workers_in_each_go_without(run: dict[str, Any], why: str) -> None:
    with pytest.raises(NotApplicable) as refused:
        Workers(enabled=True).plan(facts({"batches": 32, **CHANGES}, **run))
    assert str(refused.value) == (
        f"epochs of 32 batches are too short to restart workers in each, and keeping them is not safe: {why}"
    )


BY_LADDER = {"by_ladder": frozenset({"workers"})}


@pytest.mark.parametrize(
    ("settings", "loader", "run", "kept"),
    [
        ({}, {}, {}, False),
        ({"persistent": True}, {"draws_random": ("a draws",)}, {}, True),
        ({"persistent": True}, {"batches": None}, {}, True),
        ({"persistent": False}, {}, {}, False),
        ({"persistent": True, "count": 3}, {}, {}, True),
        ({"persistent": True}, {"persistent_workers": True}, {}, False),
        ({"persistent": True}, {"map_style": False}, {}, False),
        ({"persistent": True}, {"stateful": True}, {}, False),
        # A ladder keeps them where epochs are short.
        ({}, {}, BY_LADDER, True),
        ({}, {"draws_random": ("a draws",)}, BY_LADDER, True),
        ({"persistent": False}, {}, BY_LADDER, False),
        ({"count": 3}, {}, BY_LADDER, True),
        ({}, {"batches": 5000}, BY_LADDER, False),
        ({}, {}, {"max_epochs": 1, **BY_LADDER}, False),
        ({}, CHANGES, BY_LADDER, False),
        ({}, {}, {"reload_every_n_epochs": 1, **BY_LADDER}, False),
    ],
)
def test_your_own_workers_are_kept_where_you_or_a_ladder_ask_for_it(
    settings: dict[str, Any], loader: dict[str, Any], run: dict[str, Any], kept: bool
) -> None:
    rung, given = Workers(enabled=True, **settings), facts({"num_workers": 3, "batches": 32, **loader}, **run)
    if not kept:
        with pytest.raises(NotApplicable, match="your setting stands"):
            rung.plan(given)
        return
    change = rung.plan(given)
    assert change.wants == {"loader.persistent_workers": True}
    assert given.loader is not None and change.parity == ("approximate" if given.loader.draws_random else "exact")
    told = "random augmentations may differ from a run that restarts them in each epoch (a draws)"
    assert (told in change.notes) is bool(given.loader.draws_random)


def test_a_batch_that_fits_nowhere_means_no_workers() -> None:
    with pytest.raises(NotApplicable, match=r"a batch takes 8\.0 MiB and /dev/shm has 16 MiB free: too little"):
        Workers(enabled=True).plan(facts(HEAVY, shm_free_bytes=2**24))


@pytest.mark.timeout(200)
@pytest.mark.parametrize("changed", [False, True])
def test_short_epochs_keep_their_workers_in_a_fit(changed: bool) -> None:
    """Started once for five epochs, or not at all where a callback may change the dataset between them."""

    class Pids(Net):
        def on_train_epoch_start(self) -> None:
            self.pids = [*getattr(self, "pids", []), sorted(child.pid for child in multiprocessing.active_children())]

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.pids[-1] = sorted(child.pid for child in multiprocessing.active_children())
            return super().training_step(batch, batch_idx)

    class Changes(L.Callback):
        def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
            if trainer.train_dataloader is None:
                raise AssertionError

    plain, ours = both(
        {"workers": {}},
        partial(batches, shuffle=True),
        Pids,
        max_epochs=5,
        callbacks=lambda: (Changes(),) if changed else (),
    )
    assert ours.module.samples == plain.module.samples and distance(plain, ours) == 0
    assert ours.module.pids[0] == ours.module.pids[-1] and bool(ours.module.pids[0]) is not changed
    assert ours.verdict("workers").took is not changed and ours.verdict("workers").parity_class == "exact"
    if changed:
        assert "Changes.on_train_epoch_start names train_dataloader" in (ours.reason("workers") or "")


@pytest.mark.timeout(200)
@pytest.mark.parametrize("ladder", [True, False])
def test_a_ladders_workers_have_to_pay(ladder: bool) -> None:
    """Tiny batches that are made sooner than handed over. Named by the user, they only have to work."""

    class Trains(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            time.sleep(0.01)  # the next batch lies ready after it
            return super().training_step(batch, batch_idx)

    off = ("pin", "prefetch", "overlap", "cache")
    rungs = {**{rung: {"enabled": False} for rung in off}, "workers": {"count": 2}}
    config = {"base": "safe", "rungs": rungs} if ladder else {"rungs": {"workers": {"enabled": True}}}
    loop = FastLoop({**config, "strict": True}, quiet=True)
    plain = run(None, batches(160, shuffle=True), max_epochs=6)
    ours = run(None, batches(160, shuffle=True), Trains, max_epochs=6, callbacks=(loop,))
    (verdict,) = (each for each in loop.verdicts if each.rung == "workers")
    assert ours.module.samples == plain.module.samples and distance(plain, ours) == 0
    assert verdict.took is not ladder and verdict.parity_class == "exact"
    assert ("ms to make, but taking it from a worker took" in verdict.why) is ladder


def collate_local(samples: Any) -> Any:
    class Local:
        pass

    return [*torch.utils.data.default_collate(samples), Local()]


@pytest.mark.timeout(200)
@pytest.mark.parametrize("feed", [False, True])
def test_a_batch_that_cannot_be_sent_ends_no_training(feed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A class made in a function, of which torch's worker prints that it cannot be pickled; the loader then waits."""
    if feed:
        feed_on_cpu(monkeypatch)
    rungs = {**WORKERS, **({"prefetch": {}} if feed else {})}
    plain, ours = both(rungs, partial(batches, shuffle=True, collate_fn=collate_local), max_epochs=3)
    assert ours.module.samples == plain.module.samples and distance(plain, ours) == 0
    assert "Can't pickle local object 'collate_local.<locals>.Local'" in (ours.reason("workers") or "")
    assert ours.verdict("workers").took is False


@pytest.mark.timeout(200)
def test_shared_memory_that_turns_out_too_small_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """256 KiB a batch, which nobody knows before there is one."""

    def widen(samples: Any) -> Any:
        x, y, n = torch.utils.data.default_collate(samples)
        return x, y, n, torch.zeros(2**16)

    monkeypatch.setattr(machine, "read_shm_free_bytes", lambda: 2**20 + 2**19)
    rungs = {"workers": {"count": 4, "persistent": False}}
    plain, ours = both(rungs, partial(batches, 40, shuffle=True, collate_fn=widen), max_epochs=2)
    assert ours.module.samples == plain.module.samples and distance(plain, ours) == 0
    assert ours.verdict("workers").took is True
    assert "2 workers with prefetch_factor 1: memory has room for 2 MiB of batches" in ours.verdict("workers").why


@pytest.mark.timeout(200)
@pytest.mark.parametrize("attempt", range(3))
def test_a_killed_worker_is_torchs_to_tell(attempt: int) -> None:
    """Its signal comes wherever the main thread is: in the loop, in our hooks, in the loader."""

    killed: list[Any] = []

    class Kills(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 2 + attempt:
                killed.extend(multiprocessing.active_children())
                for child in killed:
                    child.kill()
            return super().training_step(batch, batch_idx)

    with pytest.warns() as warned, pytest.raises(RuntimeError, match=r"^DataLoader worker \(pid"):
        ours = run(WORKERS, batches(400), Kills)
        raise AssertionError(f"{killed} {ours.trainer.state} {ours.trainer.global_step} {ours.loop and ours.loop.plan}")
    assert len(killed) == 2
    assert any("use fewer workers (rungs.workers.count" in str(warning.message) for warning in warned)
    assert not any("stopped watching" in str(warning.message) for warning in warned)


@pytest.mark.parametrize("rung", ["workers", "prefetch"])
def test_a_sampler_that_hears_of_losses_is_not_asked_early(rung: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Hears(SequentialSampler):
        def hear(self, loss: float) -> None:
            self.loss = loss

    feed_on_cpu(monkeypatch)
    data = numbered(20)
    ours = run({rung: {}}, DataLoader(data, batch_size=8, sampler=Hears(data)))
    assert "sampler.sampler.loss is changed by its hear()" in (ours.reason(rung) or "")


@pytest.mark.parametrize("rungs", [WORKERS, {"prefetch": {}}])
def test_the_loader_of_the_trainer_stays_a_dataloader(rungs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """To ``isinstance``, of the user's own class too; ``type`` tells the truth."""
    feed_on_cpu(monkeypatch)
    seen: list[Any] = []

    class Looks(Net):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            seen.append(self.trainer.fit_loop._combined_loader.flattened[0])

    run(rungs, Named(6), Looks)
    assert isinstance(seen[0], DataLoader) and isinstance(seen[0], Named)
    assert isinstance(seen[0], LazyLoader) and type(seen[0]) is not Named


def test_takes() -> None:
    ours = run(WORKERS, batches(64), max_epochs=2)
    assert ours.verdict("workers").took is True
    assert ours.verdict("workers").why == "2 live worker processes fed the window"
    own = run({"workers": {}}, batches(64, num_workers=1), max_epochs=1)
    assert own.verdict("workers").took is False
    assert own.verdict("workers").why == "the loader already has a worker; your setting stands"
    rung = Workers(enabled=True)
    assert rung.verify(Measurement(evidence={"workers": {"live_workers": 0}})).took is False
    assert rung.verify(Measurement()).took is None


def test_workers_fed_no_window_in_a_fit_that_ended_before_it() -> None:
    """A fit that died in its third step was reported with workers that had fed the window."""
    rung, fed = Workers(enabled=True), {"workers": {"live_workers": 2}}
    assert rung.verify(Measurement(evidence=fed, steps=40, total_steps=61)).why == (
        "2 live worker processes fed the window"
    )
    before = rung.verify(Measurement(evidence=fed, steps=0, total_steps=2))
    assert before.took is True and before.why == "2 live worker processes made the batches"
    assert rung.verify(Measurement(total_steps=0)).why == "no step ran"
    assert rung.verify(Measurement(total_steps=2)).why == "the loader's iterator could not be inspected"


def test_your_number_gives_way_to_one_in_the_configuration() -> None:
    """Samples and their order stay, and so do the random streams of the training."""
    change = Workers(enabled=True, count=5).plan(facts({"num_workers": 3, "draws_random": ("a",)}))
    assert change.wants["loader.num_workers"] == 5 and change.parity == "approximate"
    assert {
        "they replace your 3 workers",
        "random augmentations may differ from a run with yours (a)",
    } <= {*change.notes}
    assert "loader.prefetch_factor" not in change.wants, "yours stays"
    kept = facts({"num_workers": 3, "persistent_workers": True, "batches": 5000})
    assert Workers(enabled=True, count=5).plan(kept).wants["loader.persistent_workers"] is True
    one = Workers(enabled=True, grow=True).plan(facts({"num_workers": 1}))
    assert one.notes == ("up to 7 workers replace your worker if the training waits for batches",)
    plain, ours = both(WORKERS, lambda: batches(64, shuffle=True, num_workers=1), max_epochs=2)
    assert distance(plain, ours) == 0.0 and ours.verdict("workers").why == "2 live worker processes fed the window"


@pytest.mark.parametrize(("own", "most"), [(3, 7), (0, 15)])
def test_a_number_that_may_grow(own: int, most: int) -> None:
    given = facts({"num_workers": own, "draws_random": ("a",)}, cpu_count=most + 1)
    assert "loader.most_workers" not in Workers(enabled=True, count="auto").plan(facts({}, cpu_count=16)).wants
    change = Workers(enabled=True, grow=True).plan(given)
    assert change.wants["loader.most_workers"] == most and change.parity == "approximate"
    assert "loader.most_workers" not in Workers(enabled=True, grow=True, count=2).plan(given).wants


@pytest.mark.parametrize(
    ("limit", "batches", "may"),
    [
        (None, 9, True),
        (1.0, 9, True),
        (9, 9, True),
        (1, 9, False),
        (0.5, 9, False),
        (0.5, None, False),
        (9, None, False),
    ],
)
def test_epochs_that_are_cut_short_keep_their_number(limit: Any, batches: int | None, may: bool) -> None:
    """More workers would ask the sampler further past the end, and some samplers go on from there."""
    given = facts({"num_workers": 3, "batches": batches}, limit_train_batches=limit)
    assert is_cut_short(given.loader, given) is not may  # type: ignore[arg-type]
    change = Workers(enabled=True, count=5).plan(given)
    assert change.parity == ("exact" if may else "approximate")
    if may:
        assert Workers(enabled=True, grow=True).plan(given).wants["loader.most_workers"] == 7
    else:
        with pytest.raises(NotApplicable, match="further past limit_train_batches"):
            Workers(enabled=True, grow=True).plan(given)


@pytest.mark.parametrize("own", [0, 2])
@pytest.mark.parametrize("is_faster", [True, False, None])
def test_more_workers_in_a_fit(own: int, is_faster: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two become four after some batches: the training is the same, and the verdict says what it brought."""

    class Grows(more_workers.Pace):
        seen = 0

        def note(self, waited_s: float, took_s: float, ready: int | None = None) -> None:
            self.seen += 1

        def find_more(self, most: int, left: Any, *, loses: bool, stay: bool) -> tuple[int, bool] | None:
            assert left.in_epoch is not None and 0 <= left.in_epoch <= left.in_run
            return (4, True) if self.seen == 3 else None

        @property
        def batch_s(self) -> float | None:
            if self.workers < 4:
                return 0.2
            return {True: 0.1, False: 0.2, None: None}[is_faster]

    monkeypatch.setattr(more_workers, "Pace", Grows)
    monkeypatch.setattr(machine, "count_usable_cpus", lambda: 5)
    monkeypatch.setattr("fastloop.rungs.workers.MOST", 2)
    train = partial(batches, 256, shuffle=True, num_workers=own)
    plain, ours = both({"workers": {"grow": True}}, train, max_epochs=2)
    verdict = ours.verdict("workers")
    says = {
        True: "4 workers instead of 2: a batch",
        False: "2 workers again: with 4",
        None: "4 workers instead of 2; the run",
    }
    assert verdict.why.startswith(says[is_faster]), verdict
    assert distance(plain, ours) == 0.0 and verdict.took is (True if own == 0 else is_faster)
    _, again = both({"workers": {"grow": True}}, train, max_epochs=2)
    said = {
        True: "4 workers from the start instead of 2, as an earlier run found: a batch every 100 ms instead of 200 ms",
        False: "2 workers again",
        None: "4 workers from the start instead of 2, as an earlier run found",
    }
    assert distance(plain, again) == 0.0 and again.verdict("workers").why.startswith(said[is_faster])
    other = partial(batches, 128, shuffle=True, num_workers=own)
    assert "from the start" not in both({"workers": {"grow": True}}, other, max_epochs=2)[1].verdict("workers").why


AHEAD = {"num_workers": 3, "batches": 50, "map_style": True}


@pytest.mark.parametrize(
    ("loader", "machine", "obstacle"),
    [
        ({}, {}, None),
        ({"num_workers": 0}, {}, None),
        ({"persistent_workers": True}, {}, None),
        ({"may_change": ("a changes",)}, {}, "a changes"),
        ({"changes_within": ("b changes",)}, {}, "b changes"),
        ({"sampler_draws": ("c",)}, {}, "c"),
        ({"not_ahead": "d is shared"}, {}, "d is shared"),
        ({"worker_hazards": ("e counts",)}, {}, "each worker keeps its own state: e counts"),
        ({}, {"limit_train_batches": 9}, "limit_train_batches ends epochs before the loader does"),
        ({}, {"shm_free_bytes": 2**26}, "/dev/shm has room for only 64 MiB, and validation needs that"),
    ],
)
def test_the_next_epoch_ahead(loader: dict[str, Any], machine: dict[str, Any], obstacle: str | None) -> None:
    change = Workers(enabled=True, persistent=True, across_epochs=True).plan(facts({**AHEAD, **loader}, **machine))
    assert change.wants.get("loader.next_epoch") is (None if obstacle else True)
    said = f"no batches are prefetched across epochs: {obstacle}"
    assert (said in change.notes) is (obstacle is not None), change.notes


@pytest.mark.parametrize(
    ("settings", "loader", "machine"),
    [
        ({"persistent": False}, {}, {}),  # workers end with the epoch
        ({"across_epochs": False}, {}, {}),
        ({}, {"batches": None}, {}),
        ({}, {}, {"max_epochs": 1}),
        # Kept by the user, they draw the same numbers as plainly, unless another one's turn comes first.
        ({}, {"persistent_workers": True, "draws_random": ("a",)}, {}),
    ],
)
def test_no_next_epoch_ahead(settings: dict[str, Any], loader: dict[str, Any], machine: dict[str, Any]) -> None:
    rung = Workers(**{"enabled": True, "persistent": True, "across_epochs": True, **settings})
    try:
        change = rung.plan(facts({**AHEAD, **loader}, **machine))
    except NotApplicable:
        return
    assert "loader.next_epoch" not in change.wants and not any("next epoch" in note for note in change.notes)


@pytest.mark.parametrize("validates", [False, True])
@pytest.mark.parametrize("own", [0, 2])
def test_the_next_epoch_ahead_in_a_fit(own: int, validates: bool) -> None:
    """The training is the same, with validation, whose workers' seeds are drawn in between."""
    rungs = {"workers": {"count": 2, "persistent": True, "across_epochs": True}}
    train = partial(batches, 64, shuffle=True, num_workers=own)
    val = {"val": partial(batches, 16, num_workers=1)} if validates else {}
    plain, ours = both(rungs, train, max_epochs=3, **val)
    assert distance(plain, ours) == 0.0
    said = ours.verdict("workers").why.split("; ")
    assert said[1] == "2 epochs started with prefetched batches", said
    assert said[2:] == ["your worker for validation was kept between validations"] * validates


@pytest.mark.parametrize(
    ("settings", "ahead"),
    [
        ({"check_val_every_n_epoch": 2}, 3),
        ({"check_val_every_n_epoch": 3}, 3),
        ({"val_check_interval": 0.5}, 0),  # it draws while the epoch lasts
    ],
)
@pytest.mark.parametrize("shuffle", [False, True])
def test_validation_draws_before_the_next_epoch(settings: dict[str, Any], ahead: int, shuffle: bool) -> None:
    rungs = {"workers": {"persistent": True, "across_epochs": True}}
    val = partial(batches, 16, num_workers=1, shuffle=shuffle)
    ours = run(rungs, batches(64, shuffle=True, num_workers=2), max_epochs=4, val=val(), **settings)
    said = ours.verdict("workers").why.split("; ")
    assert said[0] == "your workers were kept between epochs"
    assert (f"{ahead} epochs started with prefetched batches" in said) is bool(ahead), said


class Waits(L.Callback):
    """Leaves workers the time to make what they were asked for."""

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        time.sleep(0.5)


class Made(Holds):
    """Writes down each sample that is made."""

    path: Path

    def __getitem__(self, index: int) -> Any:
        with self.path.open("ab") as file:
            file.write(b".")
        return super().__getitem__(index)


def test_nothing_is_made_for_an_epoch_that_does_not_come(tmp_path: Path) -> None:
    loader = DataLoader(Made(path=tmp_path / "made"), 4, shuffle=True, num_workers=2)
    rungs = {"workers": {"persistent": True, "across_epochs": True}}
    ours = run(rungs, loader, max_epochs=3, callbacks=[Waits()])
    assert ours.verdict("workers").why.endswith("; 2 epochs started with prefetched batches")
    assert (tmp_path / "made").stat().st_size == 3 * 40, "nor are samples that write read twice beforehand"


@pytest.mark.parametrize(
    "loader", [{"stateful": True}, {"own_iterator": True}, {"map_style": False}, {"is_dataloader": False}]
)
def test_loaders_with_ways_of_their_own_begin_their_epochs_themselves(loader: dict[str, Any]) -> None:
    given = facts({**AHEAD, "persistent_workers": True, **loader})
    assert given.loader is not None
    why = find_obstacle_to_next_epoch(given.loader, given)
    assert why == "DataLoader is not a plain map-style DataLoader"


@pytest.mark.parametrize("in_order", [False, True])
def test_workers_that_deliver_in_any_order_make_nothing_ahead(in_order: bool) -> None:
    """A batch of the next epoch could come before this one's last."""
    loader = batches(64, num_workers=2, in_order=in_order)
    why = run({"workers": {"persistent": True, "across_epochs": True}}, loader, max_epochs=2).verdict("workers").why
    assert ("prefetched batches" in why) is in_order


@pytest.mark.parametrize("ahead", [0, 1])
def test_workers_that_the_user_keeps_make_the_next_epoch_ahead(ahead: int) -> None:
    """They count as the rung's only by what they made ahead."""
    rungs = {"workers": {"across_epochs": True}}
    loader = batches(64, shuffle=True, num_workers=2, persistent_workers=True)
    verdict = run(rungs, loader, max_epochs=2, callbacks=[] if ahead else [Draws()]).verdict("workers")
    wrong = ", until the sampler drew a different order than predicted"
    said = "1 epoch started with prefetched batches" if ahead else f"0 epochs started with prefetched batches{wrong}"
    assert (verdict.took, verdict.why) == (bool(ahead), said)


class Draws(L.Callback):
    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        torch.rand(3)


HIDDEN: dict[str, Callable[[], float]] = {"noise": lambda: float(torch.rand(1))}


class Hides(Holds):
    """Draws by a function that no reading of its code finds."""

    def __getitem__(self, index: int) -> Any:
        row = super().__getitem__(index)
        return row if self.still else (row[0] + 0.0 * HIDDEN["noise"](), *row[1:])


@pytest.mark.parametrize("still", [False, True])
def test_samples_that_draw_unseen_are_not_called_exact(still: bool) -> None:
    """Their worker sees that its random stream moved."""
    ours = run(WORKERS, DataLoader(Hides(still=still), 8))
    assert ours.loop is not None
    step = ours.loop.plan.step("workers")
    assert ours.verdict("workers").took and step is not None
    assert step.change.parity == ("exact" if still else "approximate") == ours.verdict("workers").parity_class
    assert still or any("samples draw random numbers" in note for note in step.change.notes)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("still", [False, True])
def test_samples_that_torch_rounds_differently_in_workers_are_not_called_exact(
    still: bool, threads: int, with_threads: Callable[[int], None]
) -> None:
    with_threads(threads)
    plain, ours = both({"workers": {"count": 1}}, lambda: DataLoader(Centers(still=still), 8), max_epochs=2)
    is_exact = still or threads == 1
    assert ours.verdict("workers").took and (distance(plain, ours) == 0) is is_exact
    assert ours.loop is not None and ours.loop.plan.parity == ("exact" if is_exact else "approximate")
    changes = list_loop_changes(ours.loop.plan, ours.loop.verdicts)
    said = "samples are rounded differently: torch uses 1 thread in workers, but 2 here"
    assert len(changes) == (not is_exact) and all(said in line for line in changes)


def test_where_rounding_cannot_be_tried_the_code_speaks(with_threads: Callable[[int], None], tmp_path: Path) -> None:
    with_threads(2)
    for data, parity in ((Holds(), "exact"), (Centers(still=False), "approximate")):
        ours = run({"workers": {"count": 1}}, DataLoader(Saves(data, tmp_path / "made"), 8))
        assert ours.loop is not None and ours.loop.plan.parity == parity
        changes = "".join(list_loop_changes(ours.loop.plan, ours.loop.verdicts))
        said = "samples may be rounded differently, which could not be tested: Centers.__getitem__ may sum numbers"
        assert (said in changes) is (parity == "approximate")


class Saves(Dataset[Any]):
    """Writes a file for each sample, so that no sample is made to try it."""

    def __init__(self, inner: Any, place: Path) -> None:
        self.inner, self.place = inner, place

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int) -> Any:
        self.place.with_suffix(f".{index}").write_text("made")
        return self.inner[index]


class ReadsTable(Holds):
    """Adds to each sample what a large table holds."""

    def __getitem__(self, index: int) -> Any:
        x, *rest = super().__getitem__(index)
        return (x + self.table[index], *rest)


class WritesTable(Net):
    """Changes the table in a way that no reading of its code finds."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 2:
            exec("self.given[0][:] = 1")
        return super().training_step(batch, batch_idx)


def test_batches_of_before_a_change_that_was_found_late_are_said() -> None:
    plain, ours = (_fit_with_table(rungs) for rungs in (None, {"workers": {"count": 1}}))
    assert ours.loop is not None and "dataset.table changed while" in str(ours.reason("workers"))
    assert ours.loop.plan.parity == "changes-training" and plain.loop is None
    (line,) = list_loop_changes(ours.loop.plan, ours.loop.verdicts)
    assert line.startswith("workers was on for the first steps: ")
    assert line.endswith("up to 3 batches were loaded from data that has changed since")


def _fit_with_table(rungs: Any) -> Run:
    module, table = WritesTable(), np.zeros(100_000, dtype=np.float32)
    module.given = [table]
    return run(rungs, DataLoader(ReadsTable(table=table), 4), module, max_epochs=1)


class Named(DataLoader):
    def __init__(self, secret: int, **settings: Any) -> None:
        super().__init__(numbered(20), batch_size=secret, **settings)


class Chunks(BatchSampler):
    def __init__(self, size: int, extra: str) -> None:
        super().__init__(SequentialSampler(range(20)), size, drop_last=False)
        self.extra = extra


class FromModule(Net):
    def train_dataloader(self) -> Any:
        return batches(shuffle=True)


@pytest.mark.parametrize(
    ("train", "module"),
    [
        (partial(batches, shuffle=True), Net),
        (partial(batches, drop_last=True, shuffle=True), Net),
        (lambda: batches(shuffle=True, generator=torch.Generator().manual_seed(3)), Net),
        (lambda: Named(6), Net),
        (lambda: batches(24, shuffle=True, generator=torch.Generator().manual_seed(3)), Net),
        (lambda: DataLoader(numbered(20), batch_sampler=Odd()), Net),
        (lambda: DataLoader(numbered(20), batch_sampler=Chunks(6, "e")), Net),
        (lambda: CombinedLoader({"a": batches(shuffle=True)}, "max_size"), Nested),
        (lambda: None, FromModule),
        (Data, Net),
    ],
)
def test_parity(train: Any, module: Any) -> None:
    """Exact: the same samples in the same order for three epochs, bit-equal weights, the same RNG stream after."""
    plain, drawn = run_and_draw(None, train, module)
    for persistent in (False, True):
        ours, drawn_too = run_and_draw({"workers": {"count": 2, "persistent": persistent}}, train, module)
        assert ours.verdict("workers").took and ours.verdict("workers").parity_class == "exact", persistent
        assert ours.module.samples == plain.module.samples and len(plain.module.samples) >= 6, persistent
        assert distance(plain, ours) == 0 and torch.equal(drawn, drawn_too), persistent
        assert ours.record.hooks == plain.record.hooks, persistent


@pytest.mark.parametrize("epochs", [1, 2])
def test_workers_are_kept_only_where_a_second_epoch_began(epochs: int) -> None:
    """A fit that ends in its first epoch, against all plans, has kept nothing."""

    class Stops(L.Callback):
        def on_train_epoch_end(self, trainer: Any, *_: Any) -> None:
            trainer.should_stop = trainer.current_epoch + 1 >= epochs

    ours = run({"workers": {"persistent": True}}, batches(num_workers=1), max_epochs=3, callbacks=[Stops()])
    kept = "your workers were kept between epochs"
    verdict = ours.verdict("workers")
    assert (verdict.took, verdict.why) == (
        (True, kept) if epochs > 1 else (False, f"{kept.replace('kept', 'not kept')}: no second epoch began with them")
    )


@pytest.mark.parametrize("generator", [None, 3])
def test_parity_of_own_workers_that_are_kept(generator: int | None) -> None:
    """Order and random streams stay those of workers that start anew; torch's own flag is the control."""

    def make(**more: Any) -> Any:
        drawn = None if generator is None else torch.Generator().manual_seed(generator)
        return batches(shuffle=True, num_workers=2, generator=drawn, **more)

    plain, ours = both({"workers": {"persistent": True}}, make, max_epochs=3)
    assert ours.verdict("workers").took and ours.verdict("workers").parity_class == "exact"
    assert ours.verdict("workers").why == "your workers were kept between epochs"
    assert ours.module.samples == plain.module.samples and len(plain.module.samples) >= 6
    assert distance(plain, ours) == 0
    flagged = run(None, make(persistent_workers=True), max_epochs=3)
    assert flagged.module.samples != plain.module.samples


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_that_go_with_an_epochs_last_batch_leave_the_next_epoch_whole(
    persistent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lightning asks for no batch beyond an epoch's last one, so nothing runs between that one and the next epoch."""
    plain = run(None, batches(shuffle=True), max_epochs=3)
    epoch, seen = len(batches()), []

    def leave(self: TriedWorkers) -> Any:
        seen.append(1)
        return tried_workers._Fewer(0, 0, "planted", lambda *_: None) if len(seen) == epoch else None

    monkeypatch.setattr(TriedWorkers, "_find_loss", leave)
    ours = run({"workers": {"count": 2, "persistent": persistent}}, batches(shuffle=True), max_epochs=3)
    assert len(seen) == epoch, "no workers after it"
    assert ours.module.samples == plain.module.samples and distance(plain, ours) == 0


def test_parity_sees_another_order() -> None:
    """The control."""
    plain, other = run(None, batches(shuffle=True), max_epochs=3), run(WORKERS, batches(), max_epochs=3)
    assert other.module.samples != plain.module.samples and distance(plain, other) > 0


def test_parity_where_hooks_draw_random_numbers() -> None:
    class Draws(Net):
        def on_train_start(self) -> None:
            self.drawn = torch.rand(3).tolist()

    plain, ours = both(WORKERS, partial(batches, shuffle=True), Draws, max_epochs=2)
    assert ours.module.samples == plain.module.samples and ours.module.drawn == plain.module.drawn


class Noisy(Dataset):
    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Any:
        x, y, n = numbered(20)[index]
        return x + torch.randn(8), y, n


def test_parity_is_approximate_where_the_dataset_draws() -> None:
    plain, ours = both(WORKERS, lambda: DataLoader(Noisy(), batch_size=8), max_epochs=2)
    assert ours.verdict("workers").took and ours.verdict("workers").parity_class == "approximate"
    assert ours.module.samples == plain.module.samples and distance(plain, ours) > 0


def test_undo(offspring: Callable[[], list[psutil.Process]]) -> None:
    loader = batches(20, shuffle=True)
    before, kind = dict(vars(loader)), []

    class Raises(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            kind.append(type(self.trainer.strategy).__name__)
            if self.trainer.current_epoch == 1:
                raise RuntimeError("planted")
            return super().training_step(batch, batch_idx)

    settings = {"workers": {"count": 2, "persistent": True}}
    ours = run(settings, loader, max_epochs=2)
    raised, fits = Raises(), KeepsTrainers()

    with pytest.raises(RuntimeError, match="planted"):
        run(settings, loader, lambda: raised, max_epochs=2, callbacks=(fits,))
    assert set(kind) == {"FastLoop_SingleDeviceStrategy"}
    for trainer in (ours.trainer, fits.trainers[0]):
        assert type(trainer.strategy).__name__ == "SingleDeviceStrategy" and "fastloop" not in vars(trainer.strategy)
    assert dict(vars(loader)) == before
    assert ours.trainer.train_dataloader is loader
    ours.trainer.fit_loop.max_epochs = 4
    ours.trainer.fit(ours.module, loader)
    assert ours.verdict("workers").took and ours.trainer.current_epoch == 4 and dict(vars(loader)) == before
    assert weights(ours.module).keys() == weights(Net()).keys()
    assert not [child for child in offspring() if "resource_tracker" not in " ".join(child.cmdline())]


def test_an_iterable_dataset_is_refused_for_it_would_be_doubled() -> None:
    """D4, with the proof that it would have happened."""
    plain, ours = both(WORKERS, lambda: DataLoader(Stream(), batch_size=8), max_epochs=1)
    assert str(ours.reason("workers")).startswith("every worker would read the whole iterable dataset")
    assert ours.module.samples == plain.module.samples
    doubled = clone(DataLoader(Stream(), batch_size=8), {"num_workers": 2, "prefetch_factor": 2})
    drawn = sorted(number for batch in doubled for number in batch[2].tolist())
    assert drawn == sorted([*range(16), *range(16)])


class Env:
    __module__ = "lmdb"


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (lambda: Holds(env=Env()), "dataset.env is an open lmdb handle; open it in __getitem__ instead"),
        (lambda: Counts(count=0), "dataset.count changes between epochs or samples, and workers hold copies of it"),
    ],
)
def test_datasets_that_workers_would_break(data: Any, reason: str) -> None:
    """D11 and open handles: skipped with the place, and training goes on."""
    ours = run(WORKERS, DataLoader(data(), batch_size=8), max_epochs=1)
    assert ours.reason("workers") == f"the dataset cannot be copied to workers: {reason}"
    assert ours.verdict("workers").took is False and ours.trainer.global_step == 5
    with pytest.raises(ConfigError, match=r"rungs\.workers\n  why with strict: true, a rung that"):
        run(WORKERS, DataLoader(data(), batch_size=8), strict=True)


def test_workers_hold_copies_indeed() -> None:
    """The control of the above: the count stays where it was in the process that trains."""
    counted = {workers: Counts(count=0) for workers in (0, 2)}
    for workers, data in counted.items():
        list(DataLoader(data, batch_size=8, num_workers=workers))
    assert (counted[0].count, counted[2].count) == (40, 0)


def test_spawn_names_what_cannot_travel() -> None:
    """D10: the attribute path, whoever asked for spawn."""
    spawn = {"workers": {"count": 1, "start_method": "spawn"}}
    ours = run(spawn, DataLoader(Holds(steps=[str.upper, lambda text: text]), batch_size=8), max_epochs=1)
    reason = str(ours.reason("workers"))
    assert reason.startswith("workers are started with spawn here, and dataset.steps[1] (")
    assert "<lambda>) cannot" in reason
    assert ours.trainer.global_step == 5
    collate = DataLoader(numbered(16), batch_size=8, collate_fn=lambda rows: torch.utils.data.default_collate(rows))
    assert "collate_fn (" in str(run(spawn, collate, max_epochs=1).reason("workers"))
    user = DataLoader(Holds(f=lambda: 0), batch_size=8)
    user.__dict__["_DataLoader__multiprocessing_context"] = torch.multiprocessing.get_context("spawn")
    assert "dataset.f (" in str(run(WORKERS, user, max_epochs=1).reason("workers"))


@pytest.mark.usefixtures("quick_starts")
def test_spawn_works_where_all_can_travel() -> None:
    plain, ours = both({"workers": {"count": 1, "start_method": "spawn"}}, partial(batches, shuffle=True))
    assert ours.verdict("workers").took and ours.module.samples == plain.module.samples


@pytest.mark.parametrize("train", [lambda: batches(0), lambda: batches(4, drop_last=True)])
@pytest.mark.parametrize("rungs", [WORKERS, {**WORKERS, "batch": {"micro_batch": 2}}])
def test_no_batches_at_all(train: Any, rungs: Any, capsys: Any) -> None:
    """D16: Lightning says so and stops; we report no rate."""
    ours = run(rungs, train(), max_epochs=1)
    assert ours.loop is not None and ours.trainer.global_step == 0
    assert ours.loop.measurement is None or ours.loop.measurement.samples_per_s is None
    assert not any(verdict.took for verdict in ours.loop.verdicts)
    said = capsys.readouterr()
    assert "inf" not in (said.out + said.err).replace("info", "")


def test_a_resumed_run_goes_on_with_the_right_epoch(tmp_path: Path) -> None:
    def fit(rungs: Any, epochs: int, ckpt: Any = None, workers: int = 0, save: bool = False) -> Run:
        loader = DataLoader(numbered(20), batch_size=8, sampler=ByEpoch(), num_workers=workers)
        callbacks = (ModelCheckpoint(tmp_path, save_last=True),) if save else ()
        return run(rungs, loader, max_epochs=epochs, ckpt=ckpt, callbacks=callbacks, enable_checkpointing=save)

    fit(None, 2, save=True)
    last = tmp_path / "last.ckpt"
    whole = fit(None, 4).module.samples
    ours = fit(WORKERS, 4, last)
    assert ours.verdict("workers").took and ours.module.samples == whole[6:]
    # The control: the user's own workers, where this Lightning asks for the iterator before it sets the epoch.
    if tuple(map(int, L.__version__.split(".")[:3])) == (2, 6, 6):
        assert fit(None, 4, last, workers=2).module.samples[:3] == whole[:3]


@pytest.mark.multirank
def test_two_ranks_keep_their_samples_and_shuffle_anew_each_epoch() -> None:
    """D15: the DistributedSampler that Lightning put in stays, and its epoch is set."""
    ranks = results()
    for rank in ranks:
        plain, ours = rank["plain"], rank["workers"]
        assert ours["took"] == {"workers": True} and ours["strategy"] == "DDPStrategy"
        assert ours["samples"] == plain["samples"]
        assert all(torch.equal(plain["weights"][name], ours["weights"][name]) for name in plain["weights"])
        epochs = [list(chain.from_iterable(ours["samples"][first : first + 3])) for first in (0, 3, 6)]
        assert len({tuple(epoch) for epoch in epochs}) == 3 and all(len(set(epoch)) == 22 for epoch in epochs)
    for epoch in range(3):
        parts = [set(chain.from_iterable(rank["workers"]["samples"][3 * epoch : 3 * epoch + 3])) for rank in ranks]
        assert not parts[0] & parts[1] and parts[0] | parts[1] == set(range(44))


def test_batches_of_workers_take_no_more_than_the_free_memory() -> None:  # B9
    """Shared memory is memory: a container may have 32 GB of one and 8 of the other."""
    big = facts(HEAVY, shm_free_bytes=2**34, memory_free_bytes=171 * 2**20)
    assert Workers(enabled=True, count=8).plan(big).wants["loader.prefetch_factor"] == 1
    control = facts(HEAVY, shm_free_bytes=2**34)
    assert Workers(enabled=True, count=8).plan(control).wants["loader.prefetch_factor"] == 2
    with pytest.raises(NotApplicable, match=r"the memory has 16 MiB free: too little for one worker$"):
        Workers(enabled=True).plan(facts(HEAVY, shm_free_bytes=2**34, memory_free_bytes=2**24))

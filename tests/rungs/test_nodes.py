"""The nodes rung: whose loader threads may stand in for, that samples and their order stay, and that threads end."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import BatchSampler, DataLoader, Dataset, SequentialSampler, Subset

from fastloop import FastLoop
from fastloop.errors import ConfigError, NotApplicable
from fastloop.feeds.workers import tried_workers
from fastloop.ladder import Ladder, plan
from fastloop.records.facts import Facts
from fastloop.records.measurement import Measurement
from fastloop.report.run.summary import list_loop_changes
from fastloop.rungs.nodes import GIL, Nodes, Threads
from fastloop.rungs.workers import Workers
from tests.rungs.loaders import ByEpoch, Centers, Data, Nested, Odd, Stream, facts, run_and_draw
from tests.rungs.two_ranks import results
from tests.runs import Counts, Holds, Net, batches, both, distance, feed_on_cpu, numbered, run

pytestmark = pytest.mark.timeout(200)
NODES = {"nodes": {"threads": 2}}
with_and_without_feed = pytest.mark.parametrize("rungs", [NODES, {**NODES, "prefetch": {}}], ids=["alone", "fed"])


def list_threads() -> list[str]:
    """Threads that load, once those that have been told to end had the time."""
    end = time.monotonic() + 50
    while True:
        ours = [each.name for each in threading.enumerate() if "_apply_udf" in each.name or "_queue" in each.name]
        if not ours or time.monotonic() > end:
            return ours
        time.sleep(0.02)


@pytest.fixture(autouse=True)
def no_thread_lives_on() -> Iterator[None]:
    yield
    assert list_threads() == []


@pytest.mark.parametrize(
    ("settings", "given", "threads"),
    [
        ({}, facts({}), 7),
        ({}, facts({}, cpu_count=1), 1),
        ({}, facts({}, cpu_count=64), 16),
        ({}, facts({}, cpu_count=8, local_ranks=4), 1),
        ({"threads": 24}, facts({}), 24),
        ({}, facts({"may_change": ("dataset.x is changed by its scan()",)}), 7),
    ],
)
def test_plan(settings: dict[str, Any], given: Facts, threads: int) -> None:
    change = Nodes(enabled=True, **settings).plan(given)
    assert change.wants == {"loader.engine": Threads(threads=threads)} and change.parity == "exact"
    assert change.notes == (GIL,) and not change.actions
    assert change.facts["loader"].engine == f"a pipeline of {threads} thread{'' if threads == 1 else 's'}"


@pytest.mark.parametrize(
    ("loader", "reason"),
    [
        ({"engine": "DALI"}, "DALI already loads the samples"),
        (
            {"is_dataloader": False, "kind": "list"},
            "list is not a DataLoader: its dataset and sampler are not known",
        ),
        (
            {"map_style": False},
            "threads can only share a dataset with indexed samples, not an iterable one",
        ),
        (
            {"num_workers": 3},
            "the loader already has 3 workers; your setting stands (set num_workers=0 for threads)",
        ),
        ({"stateful": True}, "DataLoader tracks its own position, which threads would not update"),
        ({"own_iterator": True}, "DataLoader creates its own iterators, which threads would bypass"),
        ({"sampler_hazards": ("a is x", "b")}, "threads read ahead of training: a is x; b"),
        (
            {"draws_random": ("RandomCrop", "a"), "shared_draws": ("RandomCrop", "a", "b", "c")},
            "threads would share the random numbers of RandomCrop, a, b; use workers",
        ),
        ({"changes_within": ("a is x", "b")}, "threads would load too early: a is x; b"),
        ({"thread_hazards": ("a is x", "b")}, "threads cannot share the dataset as it is: a is x; b"),
    ],
)
def test_plan_refuses(loader: dict[str, Any], reason: str) -> None:
    with pytest.raises(NotApplicable) as refused:
        Nodes(enabled=True).plan(facts(loader))
    assert str(refused.value) == reason


def test_draws_of_torchs_are_each_batchs_own() -> None:
    change = Nodes(enabled=True).plan(facts({"draws_random": ("RandomCrop", "ColorJitter")}))
    assert change.wants == {"loader.engine": Threads(threads=7, own_draws=True)} and change.parity == "approximate"
    assert change.notes[1].startswith(
        "random augmentations may differ from a run without threads (RandomCrop, ColorJitter)"
    )


def test_a_sampler_that_draws_as_it_goes() -> None:
    change = Nodes(enabled=True).plan(facts({"sampler_draws": ("Bag.__iter__",)}))
    assert change.parity == "approximate" and change.notes[1].startswith("Bag.__iter__ draws random numbers between")


def test_one_of_both_loads() -> None:
    both_on = Ladder(nodes=Nodes(enabled=True), workers=Workers(enabled=True))
    steps = {step.rung: (step.status, step.reason) for step in plan(both_on, facts({})).steps}
    assert steps["nodes"] == ("planned", None)
    assert steps["workers"] == ("skipped", "a pipeline of 7 threads loads the samples, without worker processes")
    steps = {step.rung: step.status for step in plan(both_on, facts({"thread_hazards": ("x",)})).steps}
    assert steps == {"nodes": "skipped", "workers": "planned"}


def test_impossible_settings_are_config_errors() -> None:
    assert Nodes(enabled=True).plan(facts()).waits_for == "the train loader"
    for value in (0, -2, "many"):
        with pytest.raises(ConfigError, match=r"nodes\.threads"):
            FastLoop({"rungs": {"nodes": {"enabled": True, "threads": value}}})


def test_takes() -> None:
    ours = run(NODES, batches(64), max_epochs=2)
    verdict = ours.verdict("nodes")
    assert verdict.took is True and verdict.parity_class == "exact" and ours.seen("nodes")["samples"] == 128
    assert verdict.why in ("2 threads loaded 128 samples", "1 thread loaded 128 samples")
    assert Nodes(enabled=True).verify(Measurement()).took is False
    many = Nodes(enabled=True).verify(Measurement(evidence={"nodes": {"threads": 1, "samples": 4800}}))
    assert many.why == "1 thread loaded 4,800 samples"
    off = run({}, batches(64), max_epochs=1)
    assert off.loop is not None and off.loop.verdicts == () and off.seen("nodes") == {}


@with_and_without_feed
@pytest.mark.parametrize(
    ("train", "module"),
    [
        (partial(batches, shuffle=True), Net),
        (partial(batches, drop_last=True, shuffle=True), Net),
        (lambda: batches(24, shuffle=True, generator=torch.Generator().manual_seed(3)), Net),
        (lambda: DataLoader(numbered(20), batch_sampler=Odd()), Net),
        (lambda: DataLoader(Subset(numbered(20), range(3, 18)), 4, shuffle=True), Net),
        (lambda: CombinedLoader({"a": batches(shuffle=True)}, "max_size"), Nested),
        (Data, Net),
    ],
)
def test_parity(train: Any, module: Any, rungs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exact: the same samples in the same order for three epochs, bit-equal weights, the same RNG stream after."""
    feed_on_cpu(monkeypatch)
    (plain, drawn), (ours, drawn_too) = (run_and_draw(each, train, module) for each in (None, rungs))
    assert ours.verdict("nodes").took and ("prefetch" not in rungs or ours.reason("prefetch") is None)
    assert ours.module.samples == plain.module.samples and len(plain.module.samples) >= 6
    assert distance(plain, ours) == 0 and torch.equal(drawn, drawn_too)
    assert ours.record.hooks == plain.record.hooks


@pytest.mark.parametrize("still", [False, True])
def test_samples_that_torch_rounds_differently_in_threads_are_not_called_exact(
    still: bool, with_threads: Callable[[int], None]
) -> None:
    with_threads(2)
    plain, ours = both(NODES, lambda: DataLoader(Centers(still=still), 8), max_epochs=2)
    assert ours.verdict("nodes").took and (distance(plain, ours) == 0) is still
    assert ours.loop is not None and ours.loop.plan.parity == ("exact" if still else "approximate")
    changes = list_loop_changes(ours.loop.plan, ours.loop.verdicts)
    said = "samples are rounded differently: torch uses 1 thread in the loading threads, but 2 here"
    assert len(changes) == (not still) and all(said in line for line in changes)


def test_samples_are_counted_where_the_sampler_yields_whole_batches() -> None:
    """As in scvi-tools: the dataset gets a list of indices and returns a batch."""
    rows = numbered(64)
    whole = DataLoader(rows, batch_size=None, sampler=BatchSampler(SequentialSampler(rows), 8, drop_last=False))
    assert run(NODES, whole, max_epochs=2).seen("nodes")["samples"] == 128


def test_parity_sees_another_order() -> None:
    """The control."""
    plain, other = run(None, batches(shuffle=True), max_epochs=3), run(NODES, batches(), max_epochs=3)
    assert other.module.samples != plain.module.samples and distance(plain, other) > 0


def test_parity_where_windows_are_merged() -> None:
    rungs = {**NODES, "batch": {"micro_batch": 16}}
    plain, ours = both(rungs, partial(batches, 64, 8, shuffle=True), max_epochs=2, accumulate_grad_batches=2)
    assert ours.verdict("nodes").took and ours.verdict("batch").took
    assert ours.module.samples == plain.module.samples and distance(plain, ours) < 1e-5


def test_undo() -> None:
    """The user's loader is as it was, and a second fit has threads again."""
    loader = batches(20, shuffle=True)
    before = dict(vars(loader))
    ours = run(NODES, loader, max_epochs=2)
    assert dict(vars(loader)) == before and ours.trainer.train_dataloader is loader
    assert type(ours.trainer.strategy).__name__ == "SingleDeviceStrategy" and list_threads() == []
    ours.trainer.fit_loop.max_epochs = 4
    ours.trainer.fit(ours.module, loader)
    assert ours.verdict("nodes").took and ours.trainer.current_epoch == 4 and dict(vars(loader)) == before


class Flips(Dataset):
    """Augmented as torchvision does it."""

    def __init__(self, transform: Any) -> None:
        self.rows, self.transform = numbered(32), transform

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> Any:
        x, y, n = self.rows[index]
        return self.transform(x.reshape(1, 2, 4)).reshape(8), y, n


def test_augmented_runs_repeat_whatever_the_number_of_threads() -> None:
    transforms = pytest.importorskip("torchvision.transforms")
    erase = transforms.Compose([transforms.RandomHorizontalFlip(), transforms.RandomErasing(value="random")])
    ends = []
    for rungs in (None, NODES, {"nodes": {"threads": 3}}, {"nodes": {"threads": 1}}):
        ends.append(run(rungs, DataLoader(Flips(erase), 4, shuffle=True), max_epochs=2))
    plain, *ours = ends
    for each in ours:
        assert each.verdict("nodes").took and each.verdict("nodes").parity_class == "approximate"
        assert each.module.samples[:8] == plain.module.samples[:8], "the sampler draws as before"
        assert distance(ours[0], each) == 0 and distance(plain, each) > 0


@pytest.mark.multirank
def test_two_ranks_keep_their_samples() -> None:
    ranks = results()
    for rank in ranks:
        plain, ours = rank["plain"], rank["nodes"]
        assert ours["took"] == {"nodes": True} and ours["samples"] == plain["samples"]
        assert all(torch.equal(plain["weights"][name], ours["weights"][name]) for name in plain["weights"])
    for epoch in range(3):
        parts = [set(chain.from_iterable(rank["nodes"]["samples"][3 * epoch : 3 * epoch + 3])) for rank in ranks]
        assert not parts[0] & parts[1] and parts[0] | parts[1] == set(range(44))


def test_a_resumed_run_goes_on_with_the_right_epoch(tmp_path: Path) -> None:
    def fit(rungs: Any, epochs: int, ckpt: Any = None, save: bool = False) -> Any:
        callbacks = (ModelCheckpoint(tmp_path, save_last=True),) if save else ()
        loader = DataLoader(numbered(20), batch_size=8, sampler=ByEpoch())
        return run(rungs, loader, max_epochs=epochs, ckpt=ckpt, callbacks=callbacks, enable_checkpointing=save)

    fit(None, 2, save=True)
    ours = fit(NODES, 4, tmp_path / "last.ckpt")
    assert ours.verdict("nodes").took and ours.module.samples == fit(None, 4).module.samples[6:]


# -- bad input ---------------------------------------------------------------------------------------------------------


class Noisy(Holds):
    def __getitem__(self, index: int) -> Any:
        x, y, n = self.rows[index]
        return x + torch.randn(8), y, n


class Touches(Net):
    def on_train_batch_end(self, *_: Any) -> None:
        self.trainer.train_dataloader  # noqa: B018


class TouchesBefore(Net):
    def on_train_epoch_start(self) -> None:
        if self.trainer.train_dataloader is None:
            raise AssertionError


@pytest.mark.parametrize(
    ("train", "module", "reason"),
    [
        (lambda: DataLoader(Stream(), 8), Net, "not an iterable one"),
        (lambda: DataLoader(Counts(count=0), 8), Net, "dataset.count is written while a sample is made"),
        (lambda: DataLoader(Noisy(), 8), Net, "threads would share the random numbers of Noisy.__getitem__"),
        (batches, Touches, "Touches.on_train_batch_end names train_dataloader"),
        (batches, TouchesBefore, None),
    ],
)
def test_who_cannot_have_threads_trains_without(train: Any, module: Any, reason: str | None) -> None:
    plain, ours = both(NODES, train, module)
    assert ours.module.samples == plain.module.samples and distance(plain, ours) == 0
    assert ours.verdict("nodes").took is (reason is None) and (reason or "") in (ours.reason("nodes") or "")


@pytest.mark.parametrize("train", [lambda: batches(0), lambda: batches(4, drop_last=True)])
def test_no_batches_at_all(train: Any) -> None:
    """D16."""
    ours = run(NODES, train(), max_epochs=1)
    assert ours.trainer.global_step == 0 and ours.verdict("nodes").took is False


class Raises(Holds):
    def __getitem__(self, index: int) -> Any:
        if index == 33:
            raise LookupError("planted", "twice")
        return self.rows[index]


@with_and_without_feed
def test_an_exception_comes_from_the_fit_as_it_was(rungs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """D5, and the steps before it are trained."""
    feed_on_cpu(monkeypatch)
    steps: dict[bool, list[Any]] = {}

    class Keeps(Net):
        def on_train_batch_end(self, *_: Any) -> None:
            steps.setdefault(these is None, []).append(self.samples[-1])

    for these in (None, rungs):
        with pytest.raises(LookupError) as raised:
            run(these, DataLoader(Raises(), 8), Keeps)
        assert raised.value.args == ("planted", "twice")
        if these and sys.version_info >= (3, 11):
            assert "sample 33" in raised.value.__notes__[0]
    assert steps[True] == steps[False] and len(steps[True]) == 4


class Fails(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 1:
            raise RuntimeError("planted")
        return super().training_step(batch, batch_idx)


class Watches(L.Callback):
    """How many threads load in the middle of an epoch."""

    def __init__(self) -> None:
        self.most = 0

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        loading = [each for each in threading.enumerate() if "_apply_udf" in each.name]
        self.most = max(self.most, len(loading))


@with_and_without_feed
@pytest.mark.parametrize("end", ["done", "max_steps", "early stop", "exception", "limit_train_batches"])
def test_no_thread_outlives_a_fit(end: str, rungs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    feed_on_cpu(monkeypatch)
    watches = Watches()
    loader = DataLoader(Holds(), 4)
    if end == "exception":
        with pytest.raises(RuntimeError, match="planted"):
            run(rungs, loader, Fails, callbacks=(watches,))
    elif end == "early stop":
        stop = EarlyStopping("val_loss", patience=0, min_delta=1e9)
        ours = run(rungs, loader, val=batches(), callbacks=(watches, stop), max_epochs=9)
        assert ours.trainer.current_epoch < 9
    else:
        settings = {"max_steps": {"max_steps": 3}, "limit_train_batches": {"limit_train_batches": 2}}.get(end, {})
        run(rungs, loader, callbacks=(watches,), max_epochs=2, **settings)
    assert watches.most == 2  # and none after it: `no_thread_lives_on`


class Hangs(Holds):
    released: Any = threading.Event()

    def __getitem__(self, index: int) -> Any:
        if index == 20:
            self.released.wait(30)
        return self.rows[index]


def test_a_thread_that_hangs_ends_the_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("LOOK_S", 0.05), ("SAY_S", 0.2), ("LIMIT_S", 0.5)):
        monkeypatch.setattr(tried_workers, name, seconds)
    with (
        pytest.raises(Exception, match=r"sample 20, is in __getitem__ at .*test_nodes\.py"),
        pytest.warns(match="sample 20"),
    ):
        run(NODES, DataLoader(Hangs(), 8))
    Hangs.released.set()


FEW_FILES = """
    import resource, sys
    import torch
    from torch.utils.data import DataLoader, Dataset

    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    from tests.runs import Net, run
    from tests.rungs.test_nodes import Files

    class Keeps(Net):
        kept = []
        def training_step(self, batch, batch_idx):
            self.kept.append(batch)
            return super().training_step(batch, batch_idx)

    for rungs in ({"nodes": {"threads": 4}}, {"workers": {"count": 2}}):
        try:
            done = run(rungs, DataLoader(Files(), 2), Net if "--plain" in sys.argv else Keeps)
            (name,) = rungs
            print(name, "trained", done.trainer.global_step, done.verdict(name).took, done.verdict(name).why)
        except Exception as error:
            print(*rungs, "raised", type(error).__name__, str(error)[:200])
"""


class Files(Dataset):
    """Opens a file for each sample."""

    def __len__(self) -> int:
        return 600

    def __getitem__(self, index: int) -> Any:
        with open(__file__) as file:
            file.read(1)
        return torch.full((8,), 1.0), torch.full((1,), 1.0), index


@pytest.mark.slow
@pytest.mark.usefixtures("quick_starts")
@pytest.mark.parametrize("kept", [False, True])
def test_256_open_files(kept: bool) -> None:
    """D7: threads need none for their batches; worker processes one for each tensor that somebody keeps, and are given
    up, with that reason, where there are no more."""
    program = [sys.executable, "-c", textwrap.dedent(FEW_FILES), *([] if kept else ["--plain"])]
    done = subprocess.run(program, capture_output=True, text=True, timeout=180, cwd=Path(__file__).parents[2])
    lines = [line for line in done.stdout.splitlines() if line.startswith(("nodes", "workers"))]
    assert lines[0].startswith("nodes trained 300 True"), done.stderr[-2000:]
    assert lines[1].startswith(f"workers trained 300 {not kept}"), done.stderr[-2000:]
    if kept:
        assert "Too many open files" in lines[1] or "received 0 items of ancdata" in lines[1]


FEW_FILES_OF_PICTURES = """
    import resource, sys
    from pathlib import Path
    from torch.utils.data import DataLoader
    from torchvision import datasets, transforms

    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    from tests.pictures import Classifier, draw_folder
    from tests.runs import run

    class Keeps(Classifier):
        kept = []
        def training_step(self, batch, batch_idx):
            self.kept.append(batch)
            return super().training_step(batch, batch_idx)

    steps = transforms.Compose([transforms.Resize((16, 16)), transforms.ToTensor()])
    folder = datasets.ImageFolder(draw_folder(Path(sys.argv[1]), 60), steps)
    for rungs in ({"cache": {"store": "shm"}}, {"dali": {"threads": 2}}):
        done = run(rungs, DataLoader(folder, 2), Keeps, max_epochs=10)
        (name,) = rungs
        print(name, "trained", done.trainer.global_step, done.verdict(name).took, done.verdict(name).why)
"""


@pytest.mark.slow
@pytest.mark.usefixtures("quick_starts")
def test_256_open_files_with_pictures(tmp_path: Path) -> None:
    """D7: neither the cache nor DALI holds a file open for each picture or batch."""
    pytest.importorskip("torchvision")
    pytest.importorskip("nvidia.dali")
    program = [sys.executable, "-c", textwrap.dedent(FEW_FILES_OF_PICTURES), str(tmp_path)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=180, cwd=Path(__file__).parents[2])
    lines = [line for line in done.stdout.splitlines() if line.startswith(("cache", "dali"))]
    assert [line.rpartition(" True")[0] for line in lines] == ["cache trained 300", "dali trained 300"], (
        done.stdout[-2000:] + done.stderr[-2000:]
    )

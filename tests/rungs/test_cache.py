"""The cache rung: what it plans and refuses, that it takes, and that the training stays bit for bit the same."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import lightning as L
import psutil
import pytest
import torch
from torch.utils.data import DataLoader
from torchvision import transforms as T

from fastloop import ladder
from fastloop.bridge.apply import worker_processes
from fastloop.errors import ConfigError, NotApplicable
from fastloop.evidence import machine
from fastloop.feeds.cache import places
from fastloop.feeds.cache.wanted import KeptSamples
from fastloop.feeds.workers.tried_workers import TriedWorkers
from fastloop.ladder import Ladder
from fastloop.records.facts import Facts, LoaderFacts, PrefixFacts
from fastloop.records.images import ImageFacts, RandomCrop, RandomHorizontalFlip, RandomResizedCrop, ToFloat, ToTensor
from fastloop.records.measurement import Measurement
from fastloop.rungs.cache import Cache
from fastloop.rungs.dali import Dali
from tests.commands.command_line import wait_for
from tests.feeds.cache.pictures import Arrays, folder
from tests.feeds.cache.redis_server import Server
from tests.runs import Net, batches, both, distance, run

CACHE: dict[str, Any] = {"cache": {}}
ROOM = {"shm_free_bytes": 10**10, "memory_free_bytes": 10**11, "disk_free_bytes": 10**12, "max_epochs": 3}
PREFIX = PrefixFacts(
    what="decoded images", dataset="ImageFolder of /data", fingerprint="ab", samples=1000, sample_bytes=500_000
)


@pytest.fixture(autouse=True)
def roots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(places, "find_shm_root", lambda: tmp_path / "shm")
    yield tmp_path
    assert not (tmp_path / "shm").exists(), "left in shared memory"


def facts(loader: dict[str, Any] | None = None, prefix: dict[str, Any] | None = None, **settings: Any) -> Facts:
    about = dataclasses.replace(PREFIX, **(prefix or {}))
    known = {"kind": "DataLoader", "batch_size": 10, "batches": 100, "prefix": about, **(loader or {})}
    return Facts(**{**ROOM, **settings}, loader=LoaderFacts(**known))


def plan(given: Facts, **settings: Any) -> tuple[str, int | None, str]:
    """Store, size and note."""
    change = Cache(enabled=True, **settings).plan(given)
    want = change.wants["dataset.cache"]
    assert isinstance(want, KeptSamples) and change.parity == "exact" and list(change.wants) == ["dataset.cache"]
    return want.store, want.budget_bytes, change.notes[0]


def test_plan() -> None:
    store, size, note = plan(facts())
    assert store == "shm" and 500_000_000 < size < 550_000_000  # type: ignore[operator]
    assert note == "keeps decoded images in shm: 1,000 samples of 500 kB, 525 MB"
    left = Cache(enabled=True).plan(facts()).facts["shm_free_bytes"]
    assert left == 10**10 - size, "workers see what is left"  # type: ignore[operator]
    assert Cache(enabled=True).plan(Facts()).waits_for == "the train loader"
    # what was written stands
    assert plan(facts(), size_gb=0.01)[1] == 10**7
    assert plan(facts(max_epochs=1), store="disk")[:2] == ("disk", size)
    assert plan(facts(disk_free_bytes=0), store="disk", path="/elsewhere")[1] == size
    assert plan(facts(), store="redis", url="redis://host:6379/0")[:2] == ("redis", None)
    # shared memory too small: the disk, if somebody says where on it; else a share
    assert plan(facts(shm_free_bytes=10**8), path="/elsewhere")[0] == "disk"
    assert plan(facts(shm_free_bytes=4 * 10**8))[0] == "shm", "nobody's disk is filled unasked"
    store, size, note = plan(facts(shm_free_bytes=4 * 10**8, disk_free_bytes=10**8))
    assert (store, size) == ("shm", 320_000_000)
    assert note.endswith("; shm holds 62% of them, the others are loaded each time")
    assert plan(facts(memory_free_bytes=8 * 10**8, disk_free_bytes=0))[1] == 4 * 10**8, "shared memory is memory"
    store, size, note = plan(facts(prefix={"sample_bytes": None, "what": "what Mine.load returns"}))
    assert (store, size) == ("shm", 8 * 10**9)
    assert "up to 8 GB: the sample size is known once one has been loaded" in note
    # worker processes of the user's: their batches were there first
    assert plan(facts({"num_workers": 2}))[:2] == plan(facts())[:2], "there is room for both"
    assert plan(facts({"num_workers": 2}, shm_free_bytes=2**30 + 3 * 10**8))[1] == 3 * 10**8
    assert plan(facts({"num_workers": 2}, shm_free_bytes=10**9), size_gb=0.3)[1] == 3 * 10**8, "what was written stands"
    assert plan(facts({"num_workers": 2}, shm_free_bytes=10**9), path="/elsewhere")[0] == "disk"
    assert plan(facts(validation_workers=2, shm_free_bytes=10**9), path="/elsewhere")[0] == "disk"
    # a run that repeats its samples within an epoch
    assert plan(facts(max_epochs=None, max_steps=101))[0] == "shm"


LITTLE = ImageFacts(
    steps=(RandomCrop(size=(32, 32), padding=(4, 4, 4, 4)), RandomHorizontalFlip(), ToTensor(), ToFloat()), count=1000
)
RESIZED = ImageFacts(steps=(RandomResizedCrop(size=(32, 32)), ToTensor(), ToFloat()), count=1000)


@pytest.mark.parametrize(
    ("loader", "prefix", "settings", "where", "on_device"),
    [
        ({}, {}, {}, {}, True),
        ({}, {}, {}, {"device": "cpu"}, False),
        ({}, {}, {"store": "shm"}, {}, False),
        ({}, {}, {"size_gb": 1.0}, {}, False),
        ({}, {}, {"path": "/elsewhere"}, {}, False),
        ({}, {"sample_bytes": 500_000}, {}, {}, False),
        ({}, {}, {}, {"strict": True}, False),
        ({}, {"sample_bytes": None}, {}, {}, False),
        ({"images": RESIZED}, {}, {}, {}, False),
        ({"images": "no images"}, {}, {}, {}, False),
        ({"num_workers": 4, "draws_random": ("RandomCrop",)}, {}, {}, {}, False),
        ({"num_workers": 4}, {}, {}, {}, True),
        ({"custom_collate": True}, {}, {}, {}, False),
    ],
)
def test_auto_keeps_little_pictures_on_a_gpu(
    loader: dict[str, Any], prefix: dict[str, Any], settings: dict[str, Any], where: dict[str, Any], on_device: bool
) -> None:
    given = facts({"images": LITTLE, **loader}, {"sample_bytes": 3_000, **prefix}, **{"device": "cuda", **where})
    change = Cache(enabled=True, **settings).plan(given)
    assert list(change.wants) == (["loader.engine"] if on_device else ["dataset.cache"]) and change.parity == "exact"


@pytest.mark.parametrize(
    ("loader", "prefix", "first"),
    [({}, {}, True), ({"images": RESIZED}, {}, False), ({}, {"sample_bytes": 500_000}, False)],
    ids=["little", "to resize", "large"],
)
def test_few_small_pictures_go_to_the_device_before_dali_gets_them(
    loader: dict[str, Any], prefix: dict[str, Any], first: bool
) -> None:
    """Seen: with DALI installed, CIFAR-10 trained at 12,600 images/s, and waited for DALI for 6 of 10 ms a step."""
    given = facts({"images": LITTLE, "batches": 250, **loader}, {"sample_bytes": 3_000, **prefix}, device="cuda")
    both = dataclasses.replace(Ladder(), dali=Dali(enabled=True), cache=Cache(enabled=True))
    steps = ladder.plan(both, dataclasses.replace(given, has_dali=True, cpu_count=16)).steps
    assert [step.rung for step in steps] == ["dali", "cache"]
    assert [step.status for step in steps] == (["skipped", "planned"] if first else ["planned", "skipped"])
    reason = "an image store already loads the samples" if first else "DALI reads and decodes the files itself"
    assert reason in [step.reason for step in steps]


@pytest.mark.parametrize(
    ("given", "settings", "reason"),
    [
        (
            facts(),
            {"store": "device"},
            "images cannot be kept on the device: the dataset was not inspected",
        ),
        (facts({"is_dataloader": False, "kind": "Own"}), {}, "Own is not a DataLoader: its samples are unknown"),
        (facts({"map_style": False}), {}, "samples of an iterable dataset have no index"),
        (facts({"engine": "DALI"}), {}, "DALI reads and decodes the files itself"),
        (facts({"prefix": "it is odd"}), {}, "it is odd"),
        (
            facts(max_epochs=1),
            {},
            "the run draws 1,000 samples from 1,000: too few repeats to pay off; write cache.store: disk",
        ),
        (facts(max_steps=100), {}, "the run draws 1,000 samples from 1,000: too few repeats to pay off"),
        (facts(limit_train_batches=0.2), {}, "the run draws 600 samples from 1,000: too few repeats to pay off"),
        (facts(shm_free_bytes=10**7, disk_free_bytes=0), {}, "1,000 samples need 525 MB, and shm only has room for"),
        (facts(shm_free_bytes=0, disk_free_bytes=0), {}, "there is no room in shared memory; give"),
        (
            facts({"num_workers": 2}, shm_free_bytes=10**9),
            {},
            "there is no room in shared memory beside the batches of your workers",
        ),
        (
            facts(prefix={"names_files": False, "what": "what Mine.load returns"}),
            {"store": "disk"},
            "it is unknown which files Mine.load returns reads, so samples kept in disk would go stale",
        ),
    ],
)
def test_plan_refuses(given: Facts, settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(NotApplicable) as refused:
        Cache(enabled=True, **settings).plan(given)
    assert str(refused.value).startswith(reason)


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"size_gb": 0}, "cache.size_gb"),
        ({"size_gb": -0.5}, "cache.size_gb"),
        ({"store": "redis"}, "cache.store"),
        ({"store": "redis", "url": "redis://:secret@host/0"}, "cache.url"),
    ],
)
def test_wrong_settings(settings: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Cache(**settings)
    assert caught.value.key == key and "secret" not in str(caught.value)


class Pictures(Net):
    """Regression on pictures, which notes what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 8 * 8, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        pictures, labels = batch
        self._since_step += [round(float(each.sum()), 4) for each in pictures]
        return torch.nn.functional.mse_loss(self.net(pictures)[:, 0], labels.float())


AUGMENT = T.Compose([T.Resize(16), T.RandomResizedCrop(8), T.RandomHorizontalFlip(), T.ToTensor()])


def loader(root: Path, **settings: Any) -> DataLoader[Any]:
    return DataLoader(folder(root, 12, AUGMENT, "jpg"), 4, shuffle=True, **settings)


@pytest.mark.parametrize("rungs", [CACHE, {"cache": {"store": "disk"}}, {"cache": {}, "workers": {"count": 2}}])
def test_takes(rungs: Any, tmp_path: Path) -> None:
    for again in range(2):
        ours = run(rungs, loader(tmp_path / "pictures"), Pictures, max_epochs=3)
        found, verdict = ours.seen("cache"), ours.verdict("cache")
        warm = again and rungs["cache"].get("store") == "disk"
        assert (found["hits"], found["misses"]) == ((36, 0) if warm else (24, 12)), "of both runs"
        assert found["kept_samples"] == 12 and found["kept_bytes"] > 12 * 16 * 21 * 3
        assert verdict.took is True and verdict.why.startswith(f"hit rate {'100' if warm else '67'}%: ")
        assert ours.loop is not None and ours.loop.measurement is not None
        filled_s = ours.loop.measurement.one_time_s["cache_fill"]
        assert filled_s is not None and (filled_s == 0) is bool(warm) and filled_s <= found["fill_s"] + 1e-3


def test_takes_in_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("redis", reason='the redis package is not installed: pip install "lightning-fastloop[redis]"')
    if shutil.which("redis-server") is None:
        pytest.skip("there is no redis-server: apt-get install redis-server")
    running = Server(tmp_path)
    try:
        rungs = {"cache": {"store": "redis", "url": running.url}}
        plain = run(None, loader(tmp_path / "pictures"), Pictures, max_epochs=2)
        for hits in (12, 24):  # the second run finds what the first one left
            ours = run(rungs, loader(tmp_path / "pictures"), Pictures, max_epochs=2)
            assert ours.seen("cache")["hits"] == hits and ours.verdict("cache").took is True
            assert ours.module.samples == plain.module.samples and distance(plain, ours) == 0
    finally:
        running.stop()


def test_says_why_not() -> None:
    verify = Cache(enabled=True).verify
    assert verify(Measurement()).why == "no sample was requested"
    found = {"hits": 0, "misses": 5, "store": "shm", "kept_bytes": 2 * 10**9}
    verdict = verify(Measurement(evidence={"cache": found}))
    assert verdict.took is False and verdict.why == "none of 5 samples was in the store yet; 2 GB kept in shm"
    assert verify(Measurement(evidence={"cache": {**found, "not_kept": 4}})).why == verdict.why
    unfit = verify(Measurement(evidence={"cache": {**found, "not_kept": 5, "kept_bytes": 0}})).why
    assert unfit == "none of 5 samples could be stored, a warning says why; 0 bytes kept in shm"
    changed = verify(Measurement(evidence={"cache": {**found, "changed": 10}})).why
    assert "; your dataset changed in training, so 10 samples bypassed the store; 2 GB kept in shm" in changed


def test_off_is_nothing(tmp_path: Path) -> None:
    plain, ours = both({"workers": {"count": 1}}, lambda: batches(12, 4), max_epochs=2)
    assert plain.module.samples == ours.module.samples and not (tmp_path / "home").exists()
    assert ours.loop is not None and ours.loop.plan.step("cache") is None
    skipped = run(CACHE, DataLoader(list(batches(12, 4).dataset), 4), max_epochs=2)
    assert skipped.reason("cache") is not None and "marked by fastloop.cached_prefix" in skipped.reason("cache")


def test_parity(tmp_path: Path) -> None:
    """Augmentation is fresh in every epoch, and bit for bit that of a run without the rung."""
    plain, ours = both(CACHE, lambda: loader(tmp_path / "pictures"), Pictures, max_epochs=3)
    assert ours.verdict("cache").took is True and ours.verdict("cache").parity_class == "exact"
    assert ours.module.samples == plain.module.samples and distance(plain, ours) == 0
    epochs = [sorted(chain(*ours.module.samples[start : start + 3])) for start in (0, 3, 6)]
    assert epochs[0] != epochs[1] != epochs[2], "drawn anew"
    control = run(CACHE, DataLoader(folder(tmp_path / "pictures", 12, AUGMENT, "jpg"), 4), Pictures, max_epochs=3)
    assert distance(plain, control) > 0  # another order


class Numbers(Net):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(5, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, number = batch
        self._since_step += number.tolist()
        return torch.nn.functional.mse_loss(self.net(x.float())[:, 0], number.float())


def test_parity_of_a_marked_method(tmp_path: Path) -> None:
    made: list[Arrays] = []

    def arrays() -> Any:
        made.append(Arrays(tmp_path / "arrays"))
        return DataLoader(made[-1], 2, shuffle=True)

    plain, ours = both(CACHE, arrays, Numbers, max_epochs=3)
    assert ours.verdict("cache").took is True and ours.seen("cache")["hits"] == 12
    assert ours.module.samples == plain.module.samples and distance(plain, ours) == 0
    assert "load" not in vars(made[-1])


def test_a_store_that_cannot_be_had_takes_no_other_rung_with_it(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open" / "samples").mkdir()
    (tmp_path / "open" / "samples").chmod(0o777)
    rungs = {"cache": {"store": "disk", "path": str(tmp_path / "open")}, "workers": {"count": 1}}
    plain = run(None, loader(tmp_path / "pictures"), Pictures, max_epochs=2)
    ours = run(rungs, loader(tmp_path / "pictures"), Pictures, max_epochs=2)
    assert "others may write to" in str(ours.reason("cache")) and ours.verdict("workers").took is True
    assert len(plain.module.samples) == len(ours.module.samples)
    with pytest.raises(ConfigError, match="others may write to"):
        run(rungs, loader(tmp_path / "pictures"), Pictures, max_epochs=2, strict=True)


@pytest.mark.parametrize("fails", [False, True])
def test_undo(fails: bool, tmp_path: Path) -> None:
    class Raises(Pictures):
        def on_train_epoch_end(self) -> None:
            raise RuntimeError("planted")

    given = loader(tmp_path / "pictures")
    dataset, before = given.dataset, dict(vars(given.dataset))
    if fails:
        with pytest.raises(RuntimeError, match="planted"):
            run(CACHE, given, Raises, max_epochs=2)
    else:
        ours = run(CACHE, given, Pictures, max_epochs=2)
        assert ours.trainer.train_dataloader is given
        ours.trainer.fit_loop.max_epochs = 3
        ours.trainer.fit(ours.module, given)
    assert given.dataset is dataset and vars(dataset) == before
    assert not (tmp_path / "shm").exists()


CRASH = """
    import sys, time
    from pathlib import Path
    from torch.utils.data._utils import worker
    from fastloop.feeds.cache import places
    from tests.rungs.test_cache import CACHE, Pictures, loader
    from tests.runs import run
    class Stops(Pictures):
        def on_train_epoch_end(self):
            print("epoch", flush=True)
            time.sleep(1000)
    if __name__ == "__main__":
        worker.MP_STATUS_CHECK_INTERVAL = 0.2  # how often workers look for their parent
        root = Path(sys.argv[1])
        places.find_shm_root = lambda: root / "shm"
        store = {"store": sys.argv[2]}
        run({"cache": store, "workers": {"count": 2}}, loader(root / "pictures"), Stops, max_epochs=2)
"""


def is_over(process: psutil.Process) -> bool:
    """Whether it holds no files any more; its command line is gone before they are."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() == psutil.STATUS_ZOMBIE and process.num_threads() < 2  # other threads hold them, too
    return True


@pytest.mark.slow
@pytest.mark.usefixtures("quick_starts")
@pytest.mark.parametrize("store", ["shm", "disk"])
def test_a_killed_run_leaves_what_the_next_can_use_or_sweep(store: str, tmp_path: Path) -> None:
    """K7, and nothing left in shared memory once another run has started."""
    command = [sys.executable, "-c", textwrap.dedent(CRASH), str(tmp_path), store]
    killed = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": os.getcwd()})
    assert killed.stdout is not None and "epoch\n" in iter(killed.stdout.readline, "")
    assert (tmp_path / "shm").exists() == (store == "shm"), "the fault fired"
    workers = psutil.Process(killed.pid).children(recursive=True)
    assert len(workers) >= 2
    killed.send_signal(signal.SIGKILL)
    killed.wait(100)
    wait_for(lambda: all(map(is_over, workers)))
    ours = run({"cache": {"store": store}}, loader(tmp_path / "pictures"), Pictures, max_epochs=2)
    assert ours.seen("cache")["misses"] == (12 if store == "shm" else 0)
    killed.stdout.close()


TWO_RANKS = """
import json, os, signal, sys
from pathlib import Path
from fastloop.feeds.cache import places
from tests.rungs.test_cache import Pictures, loader
from tests.runs import run

class Dies(Pictures):
    def on_train_batch_end(self, *_):
        if "dies" in sys.argv and self.global_rank == 1:
            print("killed", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    root = Path(sys.argv[1])
    places.find_shm_root = lambda: root / "shm"
    two = {"strategy": "ddp", "devices": 2, "max_epochs": 3}
    done = run({"cache": {"store": sys.argv[2]}}, loader(root / "pictures"), Dies, **two)
    line = "cache " + json.dumps(dict(done.seen("cache")), default=str) + "\\n"
    print(line, end="", flush=True)  # in one piece: the other rank prints, too
"""


def is_in_session(process: psutil.Process, number: int) -> bool:
    with contextlib.suppress(OSError):
        return os.getsid(process.pid) == number and not is_over(process)
    return False


@pytest.mark.slow
@pytest.mark.multirank
@pytest.mark.usefixtures("quick_starts")
@pytest.mark.parametrize("store", ["shm", "disk"])
def test_one_of_two_ranks_that_fill_a_store_is_killed(store: str, tmp_path: Path) -> None:
    """K6: the training ends, and the next one reads no half of an entry."""
    program = tmp_path / "train.py"
    program.write_text(TWO_RANKS)
    loader(tmp_path / "pictures")

    def fit(*more: str) -> tuple[int, str, str]:
        """Exit code and both streams, once all that was started is gone."""
        command = [sys.executable, str(program), str(tmp_path), store, *more]
        env = os.environ | {"XDG_CACHE_HOME": str(tmp_path / "home"), "PYTHONPATH": os.getcwd()}
        pipe = subprocess.PIPE
        with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=env, start_new_session=True) as begun:
            out, err = begun.communicate(timeout=200)
        wait_for(lambda: not any(is_in_session(each, begun.pid) for each in psutil.process_iter()))
        return begun.returncode, out, err[-2000:]

    code, out, err = fit("dies")
    assert code != 0 and "killed" in out, err
    code, out, err = fit()
    assert code == 0, err
    lines = [line for line in out.splitlines() if line.startswith("cache ")]
    assert lines, out
    found = json.loads(lines[0][6:])
    assert found["hits"] + found["misses"] == 18, "what one rank draws"
    assert found["damaged"] == 0 and found["hits"] >= 12 and found["kept_samples"] in (6, 12), found


def test_no_store_is_kept_by_an_epoch_that_ends_early(tmp_path: Path) -> None:
    class Ends(L.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            trainer.should_stop = True

    ours = run(CACHE, loader(tmp_path / "pictures"), Pictures, max_epochs=2, callbacks=(Ends(),))
    assert ours.seen("cache")["misses"] == 4 and ours.verdict("cache").took is False


def test_workers_have_the_room_that_the_store_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rooms = list[int | None]()

    class Noted(TriedWorkers):
        def __init__(self, *, room_bytes: int | None, **how: Any) -> None:
            rooms.append(room_bytes)
            super().__init__(room_bytes=room_bytes, **how)

    monkeypatch.setattr(worker_processes, "TriedWorkers", Noted)
    monkeypatch.setattr(machine, "read_shm_free_bytes", lambda: 10**8)
    train = loader(tmp_path / "pictures")
    ours = run({"cache": {"store": "shm"}, "workers": {"count": 1}}, train, Pictures, max_epochs=2)
    assert ours.loop is not None
    want = ours.loop.plan.wants["dataset.cache"]
    run({"workers": {"count": 1}}, train, Pictures, max_epochs=2)
    assert want.budget_bytes > 0 and rooms == [10**8 - want.budget_bytes, 10**8]


@pytest.mark.parametrize("workers", [0, 1])
def test_workers_of_validation_have_their_room(workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Validates(Pictures):
        def val_dataloader(self) -> Any:
            return loader(tmp_path / "pictures", num_workers=workers)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            pass

    monkeypatch.setattr(machine, "read_shm_free_bytes", lambda: 10**8)
    ours = run(CACHE, loader(tmp_path / "pictures"), Validates, max_epochs=2, num_sanity_val_steps=1)
    refused = "there is no room in shared memory beside the batches of your workers; give the container --shm-size"
    assert (ours.reason("cache") or "").startswith(refused) if workers else ours.reason("cache") is None


@pytest.mark.parametrize("rungs", [CACHE, {"workers": {"count": 1}}])
def test_what_a_killed_run_left_is_in_nobodys_way(rungs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would stay where the plan sees no room because of it; samples in use, the control, do."""

    def leave() -> places.StorePlace:
        return places.enter(tmp_path / "shm", "left", lambda draft: (draft / "samples.bin").write_bytes(b"x"))

    left = tmp_path / "shm" / "left"
    monkeypatch.setattr(machine, "read_shm_free_bytes", lambda: 0 if left.exists() else 10**8)
    used = leave()
    kept = run(rungs, loader(tmp_path / "pictures"), Pictures, max_epochs=2)
    assert left.exists() and kept.reason(next(iter(rungs))) is not None
    used.leave(remove=False)
    found = run(rungs, loader(tmp_path / "pictures"), Pictures, max_epochs=2)
    assert not left.exists() and found.verdict(next(iter(rungs))).took is True
    with contextlib.suppress(FileNotFoundError):
        left.parent.rmdir()

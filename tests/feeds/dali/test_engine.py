"""Batches by DALI hold the samples that the loader's own sampler asks for: each once, in order, whatever happens."""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

pytest.importorskip("nvidia.dali", reason="DALI is not installed")
pytest.importorskip("torchvision")
from torch.utils.data import ConcatDataset, DataLoader, Subset
from torchvision import transforms as T

from fastloop.errors import FastLoopError, NotApplicable
from fastloop.feeds.batch_tree import BatchWindow
from fastloop.feeds.dali import decoder_choice, graph
from fastloop.feeds.dali import engine as engines
from fastloop.feeds.dali.engine import DaliLoader
from fastloop.feeds.dali.graph import DaliResources
from fastloop.feeds.images.reading import read_source
from fastloop.feeds.lazy_loader import StandInDataset, clone
from fastloop.feeds.window_batches import WindowDataset, WindowSampler, collate_window
from fastloop.feeds.workers import tried_workers
from tests.bridge.launch import python
from tests.feeds.dali.folders import Numbered, damage, make_folder, read_folder

MACHINE = DaliResources(threads=2)
OFF = "rungs.makes_pictures.enabled: false"
STILL = [T.Resize((16, 16)), T.ToTensor()]
"""Nothing random: both makers come to the same pictures."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("pictures"))


def make(loader: Any, **settings: Any) -> DaliLoader:
    size = getattr(loader.batch_sampler, "batch_size", None) or 4
    steps = read_source(getattr(loader.dataset, "inner", loader.dataset)).facts.steps
    return DaliLoader(loader, steps, MACHINE, batch_size=size, turn_off=OFF, **settings)


def count_threads() -> int:
    gc.collect()
    return psutil.Process().num_threads()


def labels_of(batches: Any) -> list[list[int]]:
    return [labels.tolist() for _, labels in batches]


@pytest.mark.parametrize("settings", [{"shuffle": True}, {"shuffle": True, "drop_last": True}, {}, {"batch_size": 50}])
def test_three_epochs_have_the_batches_of_the_loader(folder: Path, settings: dict[str, Any]) -> None:
    """L1, L2. Workers draw augmentation elsewhere, as DALI does, so that shuffles come from the same numbers."""
    loader = DataLoader(Numbered(read_folder(folder)), **{"batch_size": 6, **settings})
    ours, orders = make(loader), []
    for epoch in range(3):
        torch.manual_seed(epoch)
        expected = list(loader.batch_sampler)
        torch.manual_seed(epoch)
        batches = list(ours.load(seed=epoch))
        assert labels_of(batches) == expected and len(batches) == len(loader)
        assert [list(pictures.shape) for pictures, _ in batches] == [[len(each), 3, 32, 32] for each in expected]
        orders.append(list(chain.from_iterable(expected)))
    assert ours.images == sum(map(len, orders)) and ours.plain_batches == 0


@pytest.mark.parametrize("kind", ["subset", "concat", "method"])
def test_pictures_and_labels_belong_together(folder: Path, kind: str) -> None:
    whole = read_folder(folder, *STILL)
    dataset = {
        "subset": Subset(whole, [7, 3, 3, 19, 0]),
        "concat": ConcatDataset([Subset(whole, [4, 5]), whole]),
        "method": Numbered(whole),
    }[kind]
    loader = DataLoader(dataset, batch_size=4)
    batches = list(zip(make(loader).load(0), loader, strict=True))
    for ours, plain in batches:
        assert type(ours) is type(plain) is list
        assert torch.equal(ours[1], plain[1]) and ours[1].dtype == plain[1].dtype == torch.int64
        assert ours[0].dtype == plain[0].dtype and ours[0].stride() == plain[0].stride()
        assert 255 * (ours[0] - plain[0]).abs().mean() < 0.5
    other = 255 * (batches[0][0][0] - batches[0][1][0].flip(0)).abs().mean()
    assert other > 5, "the control: pictures in another order are far apart"


def test_bytes_stay_bytes(folder: Path) -> None:
    loader = DataLoader(read_folder(folder, T.Resize((16, 16)), T.PILToTensor()), batch_size=4)
    ours, plain = next(make(loader).load(0)), next(iter(loader))
    assert ours[0].dtype == plain[0].dtype == torch.uint8 and ours[0].stride() == plain[0].stride()
    assert (ours[0].float() - plain[0].float()).abs().mean() < 0.5


def test_each_epoch_asks_the_sampler_that_the_loader_has_then(folder: Path) -> None:
    """Whoever notes or keeps an order puts a stand-in there, after the engine was made."""
    loader = clone(DataLoader(Numbered(read_folder(folder, *STILL)), batch_size=5), {})
    ours = make(loader)
    assert labels_of(ours.load(0))[0] == [0, 1, 2, 3, 4]
    loader.__dict__["batch_sampler"] = [[3, 1], [4]]
    assert labels_of(ours.load(0)) == [[3, 1], [4]]


def test_stand_ins_for_the_dataset_are_looked_through(folder: Path) -> None:
    """What another rung puts before the files' reading has no say where DALI reads them."""

    class Wrapped(StandInDataset):
        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def __getitem__(self, index: Any) -> Any:
            raise AssertionError

    dataset = Numbered(read_folder(folder, *STILL))
    loader = clone(DataLoader(dataset, batch_size=5), {"dataset": Wrapped(dataset)})
    ours = DaliLoader(loader, read_source(dataset).facts.steps, MACHINE, batch_size=5, turn_off=OFF)
    assert labels_of(ours.load(0)) == [list(range(at, at + 5)) for at in (0, 5, 10, 15)]


def test_an_epoch_that_is_left_early_takes_nothing_along(folder: Path) -> None:
    loader = DataLoader(Numbered(read_folder(folder, *STILL)), batch_size=2)
    ours = make(loader)
    threads = count_threads()
    for taken in (0, 1, 3, 9, 10):
        epoch = ours.load(0)
        assert labels_of(islice(epoch, taken)) == [[2 * at, 2 * at + 1] for at in range(taken)]
        del epoch
        assert labels_of(ours.load(0)) == [[2 * at, 2 * at + 1] for at in range(10)]
    ours.close()
    assert count_threads() <= threads


def test_a_second_epoch_while_the_first_still_stands(folder: Path) -> None:
    """As a validation in mid-epoch, or Lightning's look at an iterable, might leave it."""
    ours = make(DataLoader(Numbered(read_folder(folder, *STILL)), batch_size=5))
    first = ours.load(0)
    next(first)
    first.close()
    assert labels_of(ours.load(0)) == [list(range(at, at + 5)) for at in (0, 5, 10, 15)]


@pytest.mark.parametrize("keeps", [True, False])
def test_threads_end(folder: Path, keeps: bool) -> None:
    before = count_threads()
    ours = make(DataLoader(read_folder(folder), batch_size=6), keeps=keeps)
    list(ours.load(0))
    assert (count_threads() > before) is keeps
    ours.close()
    assert count_threads() <= before


def test_seeds(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loader's seed decides; epochs and ranks differ."""
    loader = DataLoader(read_folder(folder), batch_size=20)

    def draw(seed: int, epochs: int = 1, rank: int = 0) -> list[torch.Tensor]:
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: bool(rank))
        monkeypatch.setattr(torch.distributed, "get_rank", lambda: rank)
        ours = make(loader)
        return [next(iter(ours.load(seed)))[0] for _ in range(epochs)]

    first, second = draw(2**62 + 1, epochs=2)
    assert torch.equal(first, draw(2**62 + 1)[0])
    for other in (second, *draw(7), *draw(2**62 + 1, rank=1)):
        assert not torch.equal(first, other)


# -- windows, orders ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("concatenates", [True, False])
def test_accumulation_windows(folder: Path, concatenates: bool) -> None:
    loader = DataLoader(Numbered(read_folder(folder, *STILL)), batch_size=3)
    data = WindowDataset(loader.dataset, loader.collate_fn, concatenates=concatenates)
    sampler = WindowSampler(loader.batch_sampler, 3)
    merged = clone(loader, {"batch_sampler": sampler, "dataset": data, "collate_fn": collate_window})
    ours, plain = list(make(merged).load(0)), list(merged)
    assert len(ours) == len(plain) == 3
    for mine, theirs in zip(ours, plain, strict=True):
        assert type(mine) is type(theirs)
        if isinstance(theirs, BatchWindow):
            assert labels_of(mine) == labels_of(theirs)
            assert [pictures.shape for pictures, _ in mine] == [pictures.shape for pictures, _ in theirs]
        else:
            assert torch.equal(mine[1], theirs[1]) and mine[0].shape == theirs[0].shape
    assert type(ours[0]) is (list if concatenates else BatchWindow)


def test_pictures_come_in_the_order_that_is_wanted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU DALI makes them channels-last; here it is told to, and asked twice."""
    monkeypatch.setattr(DaliResources, "layout", "HWC")
    loader = DataLoader(read_folder(folder, *STILL), batch_size=4)
    ours, plain = make(loader), next(iter(loader))[0]
    epoch = ours.load(0)
    contiguous = next(epoch)[0]
    ours.wants_channels_last = lambda: True
    last = next(epoch)[0]
    assert contiguous.is_contiguous() and contiguous.stride() == plain.stride()
    assert last.is_contiguous(memory_format=torch.channels_last) and last.shape == plain.shape
    assert 255 * (contiguous - plain).abs().mean() < 0.5


# -- what goes wrong ---------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:fastloop:UserWarning", "ignore:Palette images")
@pytest.mark.parametrize("how", ["CMYK", "L", "RGBA", "LA", "P", "1", "PNG", "WEBP", "BMP", "GIF", "turned"])
def test_unusual_files_become_what_the_loader_makes_of_them(tmp_path: Path, how: str) -> None:
    """D17. Whatever the suffix says; what DALI cannot read is made by the dataset itself."""
    make_folder(tmp_path, 12)
    loader = DataLoader(read_folder(tmp_path, *STILL), batch_size=4)
    damage(tmp_path / "class2" / "006.jpg", how)
    ours = make(loader)
    for mine, plain in zip(ours.load(0), loader, strict=True):
        assert torch.equal(mine[1], plain[1]) and 255 * (mine[0] - plain[0]).abs().mean() < 0.5
    assert ours.plain_batches == (how == "GIF") and ours.images == 12 - 4 * (how == "GIF")


@pytest.mark.parametrize("how", ["zero bytes", "truncated", "text", "gone"])
def test_damaged_files_end_the_training_with_their_names(tmp_path: Path, how: str) -> None:
    """D17. After the batches before them, and with the error of the plain loader behind ours."""
    make_folder(tmp_path, 12)
    loader = DataLoader(Numbered(read_folder(tmp_path, *STILL)), batch_size=2)
    bad = loader.dataset.inner.samples[7][0]
    damage(Path(bad), how)
    with pytest.raises(Exception) as plain:
        list(loader)
    ours, seen = make(loader), []
    with pytest.raises(FastLoopError) as error:
        for batch in ours.load(0):
            seen.append(batch[1].tolist())
    assert seen == [[0, 1], [2, 3], [4, 5]]
    assert f"got {bad}, sample 7, which cannot be read: {type(plain.value).__name__}" in str(error.value)
    assert type(error.value.__cause__) is type(plain.value) and str(error.value.__cause__) == str(plain.value)


def test_what_dali_cannot_read_is_said_once_and_by_name(tmp_path: Path) -> None:
    make_folder(tmp_path, 12)
    for number in (2, 9):
        damage(tmp_path / f"class{number % 4}" / f"{number:03d}.jpg", "GIF")
        (tmp_path / f"class{number % 4}" / f"{number:03d}.jpg").rename(
            tmp_path / f"class{number % 4}" / f"{number}.gif"
        )
    from torchvision.datasets import ImageFolder

    dataset = ImageFolder(str(tmp_path), T.Compose(STILL), is_valid_file=lambda path: True)
    ours = make(DataLoader(dataset, batch_size=3))
    with pytest.warns(UserWarning, match=r"DALI could not read a batch, which was loaded without it") as said:
        labels = list(chain.from_iterable(labels_of(ours.load(0))))
    assert labels == dataset.targets and len(said) == 1 and ".gif: RuntimeError: " in str(said[0].message)
    seen = ours.evidence()
    assert seen["plain_batches"] == 2 and seen["images"] == 6 and ".gif" in str(seen["why_plain"])


@pytest.mark.filterwarnings("ignore:fastloop:UserWarning")
def test_dali_is_left_alone_where_it_fails_time_and_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loader = DataLoader(Numbered(read_folder(folder, *STILL)), batch_size=2)
    ours, starts = make(loader), []
    right = engines.make_pipeline

    def fail(*given: Any, **settings: Any) -> Any:
        starts.append(1)
        if len(starts) > 1:
            raise RuntimeError("planted")
        return right(*given, **settings)

    monkeypatch.setattr(engines, "make_pipeline", fail)
    epoch = ours.load(0)
    got = labels_of(islice(epoch, 2))
    ours._broken = RuntimeError("planted, in mid-epoch")
    got += labels_of(epoch)
    assert got == [[2 * at, 2 * at + 1] for at in range(10)]
    assert ours.plain_batches == 8 and len(starts) == engines.MOST_FAILURES


def test_a_crop_larger_than_its_picture(folder: Path) -> None:
    """torchvision refuses it, and so do we, with the file's name."""
    loader = DataLoader(
        read_folder(folder, T.Resize((16, 16)), T.RandomCrop(20, padding=1), T.ToTensor()), batch_size=2
    )
    with pytest.raises(FastLoopError, match=r"\.jpg, sample 0, which cannot be read: ValueError: Required crop size"):
        next(make(loader).load(0))


@pytest.fixture
def hanging(tmp_path: Path) -> Iterator[Path]:
    """A folder with one file whose opening does not return, as on a drive that does not answer."""
    make_folder(tmp_path, classes=1)
    stuck = tmp_path / "class0" / "009.jpg"
    stuck.unlink()
    os.mkfifo(stuck)
    yield tmp_path
    with contextlib.suppress(OSError):  # nobody waits for it
        os.close(os.open(stuck, os.O_WRONLY | os.O_NONBLOCK))


def shorten_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("LOOK_S", 0.05), ("SAY_S", 0.3), ("LIMIT_S", 1.0)):
        monkeypatch.setattr(tried_workers, name, seconds)


def test_a_file_that_never_opens_ends_the_epoch_with_its_batch(hanging: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shorten_limits(monkeypatch)
    batches = make(DataLoader(read_folder(hanging), batch_size=4)).load(0)
    assert [len(next(batches)[1]) for _ in range(2)] == [4, 4]
    with pytest.raises(FastLoopError) as error, pytest.warns(match=r"fastloop: no batch for 0 s: .*/008\.jpg"):
        next(batches)
    assert "no batch for 1 s: DALI is making the batch of " in error.value.got and "/010.jpg …" in error.value.got
    assert "waits at most" in error.value.why and error.value.do.endswith(f"write {OFF}")
    assert list(batches) == []


def test_an_epoch_that_is_left_before_such_a_file_ends_in_time(hanging: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shorten_limits(monkeypatch)
    ours = make(DataLoader(Subset(read_folder(hanging), [*range(12), *range(8)]), batch_size=4))
    with pytest.warns(match="no batch for"):
        assert [len(labels) for _, labels in islice(ours.load(0), 2)] == [4, 4]
        gc.collect()
    assert not ours.plain_batches


HANGING = """
import sys
from torch.utils.data import DataLoader
from fastloop.errors import FastLoopError
from fastloop.feeds.workers import tried_workers
from tests.feeds.dali.folders import read_folder
from tests.feeds.dali.test_engine import make
tried_workers.LOOK_S, tried_workers.LIMIT_S = 0.05, 1.0
try:
    list(make(DataLoader(read_folder(sys.argv[1]), batch_size=4)).load(0))
except FastLoopError as error:
    print(error)
"""


def test_the_process_ends_although_the_file_is_never_opened(hanging: Path, tmp_path: Path) -> None:
    said = python("-c", HANGING, hanging, cwd=tmp_path, limit_s=60)
    assert "no batch for 1 s" in said


def test_a_slow_batch_is_no_hang(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only waiting for DALI counts, not the training between two batches."""
    shorten_limits(monkeypatch)
    ours = make(DataLoader(read_folder(folder), batch_size=10))
    for _ in ours.load(0):
        time.sleep(1.5)
    assert ours.images == 20


# -- another decoder ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", [None, "its pixels differ", "something else", "it does not start"])
def test_another_decoder_makes_the_same_batches(
    folder: Path, monkeypatch: pytest.MonkeyPatch, fault: str | None
) -> None:
    """Changed in the middle of an epoch, while DALI makes batches ahead; back where the other does not work."""
    for name, value in {"SETTLING": 1, "BLOCK": 1, "BLOCKS": 2, "WAITS": -1.0, "FASTER": 1e9}.items():
        monkeypatch.setattr(decoder_choice, name, value)
    made: list[str] = []

    def make_pipeline(steps: Any, machine: DaliResources, **how: Any) -> Any:
        made.append(machine.decode)
        if machine.decode == "another" and fault == "it does not start":
            raise RuntimeError(fault)
        return graph.make_pipeline(steps, replace(machine, decode="cpu"), **how)

    def check_pixels(*_: Any) -> None:
        if fault == "its pixels differ":
            raise NotApplicable(fault)
        if fault == "something else":
            raise RuntimeError(fault)

    monkeypatch.setattr(engines, "make_pipeline", make_pipeline)
    monkeypatch.setattr(engines, "check_pixels", check_pixels)
    loader = DataLoader(Numbered(read_folder(folder, *STILL)), batch_size=4, shuffle=True)
    ours = make(loader, other=replace(MACHINE, decode="another"), tries_other=True)
    for epoch in range(2):
        torch.manual_seed(epoch)
        expected = list(loader)
        torch.manual_seed(epoch)
        torch.empty((), dtype=torch.int64).random_()  # a loader draws a seed for workers first
        batches = list(ours.load(seed=epoch))
        assert labels_of(batches) == labels_of(expected)
        for (pictures, _), (images, _) in zip(batches, expected, strict=True):
            assert (pictures - images).abs().max() < 0.02
    seen = ours.evidence()
    assert seen["decode"] == ("another" if fault is None else "cpu")
    starts = {None: ["cpu", "another"], "it does not start": ["cpu", "another", "cpu"]}
    assert made == starts.get(fault, ["cpu"])
    assert ("decodes" if fault is None else fault) in seen["decode_why"]
    assert ours.plain_batches == (fault == "it does not start")
    if fault is not None:
        return
    for failures, decoder in ((1, "another"), (2, "cpu")):  # one unreadable file changes nothing any more
        ours._distrust_decoder("a file that nobody can read", failures)
        assert ours.evidence()["decode"] == decoder


@pytest.mark.parametrize(
    ("fault", "used"),
    [
        ("nothing", ["mixed"]),
        ("no room", ["cpu"]),
        ("it does not start", ["mixed", "mixed", "cpu"]),
        ("it does not start, and the CPU's pixels differ", ["mixed", "mixed", "mixed"]),
    ],
)
def test_where_the_gpus_decoder_does_not_work_the_cpu_decodes(
    folder: Path, monkeypatch: pytest.MonkeyPatch, fault: str, used: list[str]
) -> None:
    """Chosen before the training, which is too short to try another one."""
    made: list[str] = []

    def make_pipeline(steps: Any, machine: DaliResources, **how: Any) -> Any:
        made.append(machine.decode)
        if machine.decode == "mixed" and "does not start" in fault:
            raise RuntimeError(fault)
        return graph.make_pipeline(steps, replace(machine, decode="cpu"), **how)

    def check(*_: Any, **__: Any) -> None:
        raise NotApplicable(fault)

    monkeypatch.setattr(engines, "make_pipeline", make_pipeline)
    monkeypatch.setattr(engines, "check_room", check if fault == "no room" else lambda *_, **__: None)
    if "differ" in fault:
        monkeypatch.setattr(engines, "check_pixels", check)
    loader = DataLoader(Numbered(read_folder(folder, *STILL)), batch_size=4)
    ours = DaliLoader(
        loader,
        read_source(loader.dataset).facts.steps,
        replace(MACHINE, decode="mixed"),
        batch_size=4,
        turn_off=OFF,
        other=MACHINE,
    )
    assert labels_of(ours.load(seed=0)) == labels_of(loader)
    seen = ours.evidence()
    assert made == used and seen["decode"] == used[-1]
    error = "RuntimeError: " if "start" in fault else ""
    assert seen["decode_why"] == (f"the GPU does not decode: {error}{fault}" if used[-1] == "cpu" else None)
    assert ours.plain_batches == {"nothing": 0, "no room": 0, "it does not start": 2}.get(fault, 5)
    ours.close()

"""Batches made on the device are those of the plain loader without workers, and so are the random numbers used."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Subset

from fastloop.errors import NotApplicable
from fastloop.feeds.device_store import engine as engine_file
from fastloop.feeds.device_store import pictures as pictures_file
from fastloop.feeds.device_store.engine import DeviceEngine, make_engine
from tests.pictures import MEAN, STD, draw_bad_folder, draw_folder

pytest.importorskip("torchvision")
from torchvision import datasets
from torchvision.transforms import transforms as v1
from torchvision.transforms import v2

CPU = torch.device("cpu")
V1_FLOATS = [v1.ToTensor(), v1.Normalize(MEAN, STD)]
V2_FLOATS = [v2.ToDtype(torch.float32, scale=True), v2.Normalize(list(MEAN), list(STD))]


def make(loader: Any, **settings: Any) -> DeviceEngine:
    return make_engine(loader, CPU, **{"most_bytes": 2**30, "workers": 0, **settings})


def follow(batches: Any) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Images, labels, and where the generator stands after each batch."""
    return [(*batch, torch.get_rng_state()) for batch in batches]


def expect_same(loader: Any, engine: DeviceEngine, epochs: int = 2) -> None:
    torch.manual_seed(3)
    plain = [each for _ in range(epochs) for each in follow(loader)]
    torch.manual_seed(3)
    ours = []
    for _ in range(epochs):
        seed = int(torch.empty((), dtype=torch.int64).random_())  # as LazyLoader draws it
        ours += follow(engine.load(seed))
    assert len(ours) == len(plain) == len(loader) * epochs
    for one, other in zip(plain, ours, strict=True):
        assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(one, other, strict=True))
    assert engine.evidence()["device_batches"] == len(ours)


TRANSFORMS: dict[str, Callable[[], Any]] = {
    "cifar10": lambda: v1.Compose([v1.RandomCrop(32, padding=4), v1.RandomHorizontalFlip(), *V1_FLOATS]),
    "v2": lambda: v2.Compose([v2.RandomHorizontalFlip(0.3), v2.RandomCrop(20), v2.ToImage(), *V2_FLOATS]),
    "v2 on tensors": lambda: v2.Compose(
        [v2.ToImage(), v2.Resize((30, 31)), v2.RandomCrop(28, padding=(1, 2)), v2.RandomHorizontalFlip(), *V2_FLOATS]
    ),
    "v2 on bytes": lambda: v2.Compose(
        [v2.ToImage(), v2.ToDtype(torch.uint8, scale=True), v2.RandomCrop(28), v2.RandomHorizontalFlip(), *V2_FLOATS]
    ),
    "v2 with sides": lambda: v2.Compose([v2.RandomCrop(30, padding=(1, 2, 3, 4), fill=7), v2.ToImage(), *V2_FLOATS]),
    "resized": lambda: v1.Compose([v1.RandomResizedCrop(24), v1.RandomHorizontalFlip(), *V1_FLOATS]),
    "resized v2": lambda: v2.Compose(
        [v2.Resize(50), v2.RandomResizedCrop((20, 26), scale=(0.2, 0.9)), v2.RandomHorizontalFlip(), v2.ToImage()]
        + V2_FLOATS
    ),
    "resized once": lambda: v1.Compose([v1.Resize(33), v1.CenterCrop(31), v1.RandomHorizontalFlip(), v1.ToTensor()]),
    "nothing random": lambda: v1.Compose([v1.Resize((20, 24)), *V1_FLOATS]),
    "filled": lambda: v1.Compose([v1.RandomCrop(40, padding=(3, 8), fill=9), v1.ToTensor()]),
}


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures are cut as on CUDA, by one kernel."""

    def fill(*args: Any, **how: Any) -> pictures_file.Pictures:
        pictures = pictures_file.fill(*args, **how)
        pictures.fused = True
        return pictures

    monkeypatch.setattr(engine_file, "fill", fill)


@pytest.mark.usefixtures("kernels_in_use")
@pytest.mark.parametrize("by", ["torch", "kernel"])
@pytest.mark.parametrize("name", list(TRANSFORMS))
def test_the_same_batches(tmp_path: Path, name: str, by: str, request: pytest.FixtureRequest) -> None:
    """Pictures are of several sizes; the last batch of an epoch is short."""
    if by == "kernel":
        request.getfixturevalue("fused")
    dataset = datasets.ImageFolder(
        draw_folder(tmp_path, 7), TRANSFORMS[name](), target_transform=lambda label: label * 0.5
    )
    loader = DataLoader(dataset, batch_size=5, shuffle=True)
    engine = make(loader)
    assert engine.pictures.fused == (by == "kernel")
    expect_same(loader, engine)


def test_another_crop_shows(tmp_path: Path) -> None:
    """The control."""
    loader = DataLoader(datasets.ImageFolder(draw_folder(tmp_path), TRANSFORMS["cifar10"]()), batch_size=5)
    engine = make(loader)
    engine.pictures.pixels[:] = engine.pictures.pixels.roll(1)
    with pytest.raises(AssertionError):
        expect_same(loader, engine)


def test_where_kernels_do_not_run(tmp_path: Path) -> None:
    """Triton raises on the CPU as it does without a compiler: late."""
    loader = DataLoader(datasets.ImageFolder(draw_folder(tmp_path), TRANSFORMS["resized"]()), batch_size=5)
    with pytest.raises(NotApplicable, match=r"only be resized there by Triton: .* do not run \(.*a C compiler"):
        make(loader)


@pytest.mark.usefixtures("kernels_in_use", "fused")
@pytest.mark.parametrize("name", ["cifar10", "resized"])
def test_in_the_memory_format_that_the_model_wants(tmp_path: Path, name: str) -> None:
    loader = DataLoader(datasets.ImageFolder(draw_folder(tmp_path, 7), TRANSFORMS[name]()), batch_size=5)
    engine = make(loader)
    engine.wants_channels_last = lambda: True
    assert next(engine.load(0))[0].is_contiguous(memory_format=torch.channels_last)
    engine.batches = 0
    expect_same(loader, engine)


@pytest.mark.usefixtures("fused")
def test_pictures_are_cut_without_kernels_too(tmp_path: Path) -> None:
    said: list[str] = []
    loader = DataLoader(datasets.ImageFolder(draw_folder(tmp_path), TRANSFORMS["cifar10"]()), batch_size=5)
    engine = make(loader, say=said.append)
    assert not engine.pictures.fused and "do not run" in said[0] and "torch's own operations crop the images" in said[0]
    expect_same(loader, engine)


def test_repeated_samples_are_kept_once(tmp_path: Path) -> None:
    whole = datasets.ImageFolder(draw_folder(tmp_path), TRANSFORMS["cifar10"]())
    dataset = ConcatDataset([Subset(whole, [4, 2, 4, -1]), whole])
    loader = DataLoader(dataset, batch_size=4, sampler=[0, 3, -1, 15, 2, 2, 7])
    engine = make(loader)
    expect_same(loader, engine)
    sizes = {width * height for width, height in ((40 + 3 * number, 36 + 5 * (number % 4)) for number in range(12))}
    assert engine.evidence()["pictures"] == 12 and engine.evidence()["kept_bytes"] == 3 * sum(sizes)


def test_processes_decode_and_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures_file, "FEW", 4)
    monkeypatch.setattr(pictures_file, "QUIET_S", 0.0)
    monkeypatch.setattr(pictures_file, "CHUNK_BYTES", 10_000)
    loader = DataLoader(datasets.ImageFolder(draw_folder(tmp_path, 40), TRANSFORMS["cifar10"]()), batch_size=8)
    said: list[str] = []
    torch.manual_seed(1)
    before = torch.get_rng_state()
    engine = make(loader, workers=2, say=said.append)
    assert torch.equal(before, torch.get_rng_state()), "filling uses up no random number of the training's"
    assert len(said) == 2 and said[0] == "decoding 40 images once, to keep them on the device"
    assert said[1].startswith("40 images (516 kB ") and "of at most 1.07 GB) are on the device" in said[1]
    expect_same(loader, engine)


@pytest.mark.parametrize(
    ("transform", "settings", "why"),
    [
        ("cifar10", {"most_bytes": 20_000}, "12 images take about .* kB, but may take at most 20 kB of the"),
        ("too large a crop", {}, "images are smaller than the crop of 60 x 60"),
        ("no size", {}, "differ in size, and no crop"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path: Path, transform: str, settings: dict[str, Any], why: str) -> None:
    made = {
        "too large a crop": [v1.RandomCrop(60), *V1_FLOATS],
        "no size": [v1.RandomHorizontalFlip(), *V1_FLOATS],
    }.get(transform)
    chosen = TRANSFORMS["cifar10"]() if made is None else v1.Compose(made)
    with pytest.raises(NotApplicable, match=why):
        make(DataLoader(datasets.ImageFolder(draw_folder(tmp_path), chosen), batch_size=5), **settings)


class Odd(datasets.ImageFolder):
    """Says where its samples come from, and does more to them than it says."""

    more: Callable[[torch.Tensor], torch.Tensor] = staticmethod(lambda image: image)

    def image_path_and_label(self, index: int) -> tuple[str, int]:
        return self.samples[index]

    def __getitem__(self, index: int) -> Any:
        image, label = super().__getitem__(index)
        return self.more(image) if image.is_floating_point() else image, label


def draw_one_more(image: torch.Tensor) -> torch.Tensor:
    torch.rand(1)
    return image


def test_a_dataset_that_does_more_is_found_out(tmp_path: Path) -> None:
    transform = v1.Compose([v1.CenterCrop(20), v1.ToTensor()])
    for more, why in (
        (lambda image: image, None),
        (lambda image: image * 2, "differs from the dataset's"),
        (draw_one_more, "uses different random numbers"),
    ):
        dataset = Odd(draw_folder(tmp_path), transform)
        dataset.more = more  # type: ignore[method-assign]
        loader = DataLoader(dataset, batch_size=5)
        torch.manual_seed(2)
        before = torch.get_rng_state()
        if why is None:
            expect_same(loader, make(loader))
        else:
            with pytest.raises(NotApplicable, match=why):
                make(loader)
            assert torch.equal(before, torch.get_rng_state())


class KeepsItsOwn(Odd):
    """Applies a transform, but not the one that it shows."""

    keeps: Callable[[Any], Any]

    def __getitem__(self, index: int) -> Any:
        torch.rand(1)
        path, label = self.samples[index]
        return self.keeps(self.loader(path)), label


@pytest.mark.parametrize(("keeps", "got"), [(v1.ToTensor(), "torch.float32"), (lambda picture: picture, "Image")])
def test_a_dataset_that_ignores_another_transform(tmp_path: Path, keeps: Any, got: str) -> None:
    dataset = KeepsItsOwn(draw_folder(tmp_path), v1.ToTensor())
    dataset.keeps = keeps
    torch.manual_seed(2)
    before = torch.get_rng_state()
    with pytest.raises(NotApplicable, match=f"does not apply its `transform`: with one .* it gave {got}"):
        make(DataLoader(dataset, batch_size=5))
    assert torch.equal(before, torch.get_rng_state())


def test_labels_that_are_no_tensor_are_refused(tmp_path: Path) -> None:
    dataset = datasets.ImageFolder(draw_folder(tmp_path), TRANSFORMS["cifar10"](), target_transform=str)
    with pytest.raises(NotApplicable, match="labels that collate to a list"):
        make(DataLoader(dataset, batch_size=5))


@pytest.mark.parametrize(("bad", "raises"), [("CMYK", False), ("16 bit", False), ("truncated", True), ("empty", True)])
def test_odd_and_broken_pictures_are_as_with_the_plain_loader(tmp_path: Path, bad: str, raises: bool) -> None:
    """D17: the same batches, or the plain loader's error while the store is filled."""
    loader = DataLoader(draw_bad_folder(tmp_path, bad), 2)
    if not raises:
        expect_same(loader, make(loader))
        return
    with pytest.raises(Exception, match=r"truncated|cannot identify") as plain:
        list(loader)
    with pytest.raises(type(plain.value)) as ours:
        make(loader)
    assert str(ours.value).split("0x")[0] == str(plain.value).split("0x")[0]

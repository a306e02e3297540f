"""Pictures on a real device: floats of bytes, and batches out of a store there, have the bits of the CPU's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from fastloop.feeds.device_store.engine import make_engine
from fastloop.feeds.images.byte_batches import AsBytes
from tests.feeds.device_store.test_engine import TRANSFORMS
from tests.feeds.device_store.test_kernels import look_up, resize
from tests.feeds.device_store.test_wanted import ON_DEVICE
from tests.pictures import Classifier, draw_folder
from tests.runs import run

pytest.importorskip("torchvision")
from torchvision import datasets
from torchvision.transforms import transforms as v1

pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"), pytest.mark.timeout(150)]


@pytest.mark.parametrize("name", list(TRANSFORMS))
def test_a_store_makes_the_plain_loaders_batches(tmp_path: Path, name: str) -> None:
    loader = DataLoader(datasets.ImageFolder(draw_folder(tmp_path, 40), TRANSFORMS[name]()), batch_size=9, shuffle=True)
    engine = make_engine(loader, torch.device("cuda"), most_bytes=2**30, workers=0)
    torch.manual_seed(4)
    plain = list(loader)
    after = torch.get_rng_state()
    torch.manual_seed(4)
    ours = list(engine.load(int(torch.empty((), dtype=torch.int64).random_())))
    assert torch.equal(after, torch.get_rng_state()) and len(plain) == len(ours) == 5
    for (images, labels), (x, y) in zip(ours, plain, strict=True):
        assert images.is_cuda and labels.is_cuda
        assert torch.equal(images.cpu(), x) and torch.equal(labels.cpu(), y)


@pytest.mark.parametrize("size", [(224, 224), (1, 300), (97, 31)])
def test_kernels_make_the_bits_of_pillow(size: tuple[int, int]) -> None:
    """Pictures of noise, as large as photographs and as small as a pixel; whole, and parts of them."""
    kernels = pytest.importorskip("fastloop.feeds.device_store.kernels")
    generator = np.random.default_rng(0)
    shapes = np.concatenate([generator.integers(1, 600, (60, 2)), [[1, 1], [1, 700], [2000, 3], [375, 500]]])
    pixels = torch.from_numpy(generator.integers(0, 256, int(3 * shapes.prod(1).sum()), dtype=np.uint8))
    starts = np.cumsum([0, *3 * shapes.prod(1)])[:-1]
    sides = generator.integers(1, shapes + 1)
    sides[-4:] = shapes[-4:]
    told = (starts, *shapes.T, np.concatenate([generator.integers(0, shapes - sides + 1), sides], axis=1))
    mirrored = generator.random(len(shapes)) < 0.5
    table = torch.randn(3, 256)
    pictures = [
        pixels[start : start + 3 * height * width].view(3, height, width).numpy()
        for start, (height, width) in zip(starts, shapes, strict=True)
    ]
    images = (resize(*each, size) for each in zip(pictures, told[-1], mirrored, strict=True))
    expected = [look_up(table, image) for image in images]
    ours = kernels.resize_parts(pixels.cuda(), *told, mirrored, size, table.cuda()).cpu()
    assert [n for n, (a, b) in enumerate(zip(expected, ours, strict=True)) if not torch.equal(a, b)] == []


@pytest.mark.parametrize("name", ["cifar10", "resized"])
def test_batches_are_made_without_waiting_for_the_device(tmp_path: Path, name: str) -> None:
    loader = DataLoader(datasets.ImageFolder(draw_folder(tmp_path, 40), TRANSFORMS[name]()), batch_size=8)
    engine = make_engine(loader, torch.device("cuda"), most_bytes=2**30, workers=0)
    list(engine.load(0))
    torch.cuda.set_sync_debug_mode("error")
    try:
        assert len(list(engine.load(0))) == 5
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", ["cifar10", "v2"])
def test_floats_of_bytes_are_the_cpus(tmp_path: Path, name: str) -> None:
    own = datasets.ImageFolder(draw_folder(tmp_path), TRANSFORMS[name]())
    ours = (want := AsBytes()).wrap(own)
    for plain, fast in zip(load(own), load(ours), strict=True):
        images, labels = want.finish(type(fast)(*(each.cuda() for each in fast)))
        assert torch.equal(images.cpu(), plain[0]) and torch.equal(labels.cpu(), plain[1])


def load(dataset: Any) -> list[Any]:
    torch.manual_seed(5)
    return list(DataLoader(dataset, batch_size=5, shuffle=True))


@pytest.mark.parametrize("rungs", [{"prefetch": {}, "pin": {}, "workers": {"count": 2}}, ON_DEVICE], ids=str)
def test_both_take(tmp_path: Path, rungs: dict[str, Any]) -> None:
    transform = v1.Compose([v1.RandomCrop(20, padding=4), v1.RandomHorizontalFlip(), v1.ToTensor()])
    folder = datasets.ImageFolder(draw_folder(tmp_path, 40), transform)
    ours = run(rungs, DataLoader(folder, batch_size=4, shuffle=True), Classifier, max_epochs=2, accelerator="gpu")
    for rung in {"prefetch", "cache"} & set(rungs):
        assert ours.verdict(rung).took, ours.verdict(rung).why
    if "prefetch" in rungs:
        seen = ours.seen("prefetch")
        assert seen["byte_batches"] == 20 and seen["copied_bytes"] / seen["batches"] < 4 * 3 * 20 * 20 + 200

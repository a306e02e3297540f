"""What DALI draws has the distribution of what torchvision draws. Seeds are fixed, so nothing here is chance."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

pytest.importorskip("nvidia.dali", reason="DALI is not installed")
pytest.importorskip("torchvision")
from PIL import Image
from torchvision import transforms

from fastloop.feeds.dali.graph import DaliResources, encode, find_scale, list_pins, make_pipeline, name_pin
from fastloop.records.images import (
    ColorJitter,
    Normalize,
    RandomCrop,
    RandomHorizontalFlip,
    RandomResizedCrop,
    Resize,
    ToFloat,
    ToTensor,
)

DRAWS = 600
WIDE, HIGH = 240, 160


@pytest.fixture(scope="module")
def ramp(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A picture that tells where each pixel comes from: red is its column, green its row."""
    rows, columns = np.mgrid[0:HIGH, 0:WIDE]
    path = tmp_path_factory.mktemp("ramp") / "ramp.png"
    Image.fromarray(np.stack([columns, rows, 0 * rows], axis=2).astype(np.uint8)).save(path)
    return str(path)


def make(path: str, *steps: Any, seed: int = 1, count: int = DRAWS, host_share: float | None = None) -> np.ndarray:
    """`count` pictures of one file, [N, 3, H, W]."""
    machine = DaliResources(threads=2, ahead=1, host_share=host_share)
    pipeline = make_pipeline([*steps, ToTensor()], machine, batch_size=count, seed=seed)
    pipeline.feed_input("paths", [encode(path)] * count)
    pipeline.schedule_run()
    return np.array(pipeline.outputs()[0].as_tensor()).astype(float)


def read_crops(pictures: np.ndarray) -> dict[str, np.ndarray]:
    """Which part of the ramp each picture is: columns and rows grow by the crop's size over the picture's."""
    side = pictures.shape[-1]
    columns, rows = pictures[:, 0].mean(axis=1), pictures[:, 1].mean(axis=2)
    cut = slice(2, side - 2)  # the outermost pixels have no neighbours to be interpolated with
    width = np.polyfit(np.arange(side)[cut], columns.T[cut], 1)[0] * side
    height = np.polyfit(np.arange(side)[cut], rows.T[cut], 1)[0] * side
    return {
        "area": width * height / (WIDE * HIGH),
        "ratio": np.log(width / height),
        "left": np.rint(columns.mean(axis=1) - (width - 1) / 2),
        "top": np.rint(rows.mean(axis=1) - (height - 1) / 2),
    }


def draw_crops(scale: Any, ratio: Any) -> dict[str, np.ndarray]:
    torch.manual_seed(0)
    image = torch.empty((3, HIGH, WIDE), device="meta")
    drawn = [transforms.RandomResizedCrop.get_params(image, scale, ratio) for _ in range(DRAWS)]
    top, left, height, width = np.array(drawn).T
    return {"area": width * height / (WIDE * HIGH), "ratio": np.log(width / height), "left": left, "top": top}


@pytest.mark.parametrize(("first", "host_share"), [(True, None), (True, 0.5), (False, None)])
@pytest.mark.parametrize(("scale", "ratio"), [((0.08, 1.0), (3 / 4, 4 / 3)), ((0.3, 0.6), (0.9, 2.0))])
def test_crops(ramp: str, scale: Any, ratio: Any, first: bool, host_share: float | None) -> None:
    """Cut out while decoding, by one decoder or two, or of a decoded picture."""
    before = [] if first else [Resize(size=(HIGH, WIDE))]
    step = RandomResizedCrop(size=(32, 32), scale=scale, ratio=ratio)
    ours, theirs = read_crops(make(ramp, *before, step, host_share=host_share)), draw_crops(list(scale), list(ratio))
    for name in theirs:
        assert stats.ks_2samp(ours[name], theirs[name]).pvalue > 0.01, name


@pytest.mark.parametrize(
    ("decode", "threads", "share", "count"),
    [("mixed", 7, None, 0), ("mixed", 8, None, 128), ("cpu", 16, None, 0), ("mixed", 8, 0.25, 64)],
)
def test_pictures_that_the_threads_decode_beside_the_gpu(
    decode: str, threads: int, share: float | None, count: int
) -> None:
    assert DaliResources(threads=threads, decode=decode, host_share=share).count_on_host(256) == count


@pytest.mark.parametrize("pinned", [False, True])
def test_pictures_of_two_decoders_keep_their_places(tmp_path: Path, pinned: bool) -> None:
    """So do the crops that are given to each."""
    paths = [str(tmp_path / f"{level}.png") for level in range(0, 240, 20)]
    for level, path in zip(range(0, 240, 20), paths, strict=True):
        Image.new("RGB", (40, 40), (level, 0, 0)).save(path)
    machine = DaliResources(threads=2, ahead=1, host_share=0.25)
    steps = [RandomResizedCrop(size=(8, 8)), ToTensor()]
    pipeline = make_pipeline(steps, machine, batch_size=len(paths), seed=0, pinned=pinned)
    pipeline.feed_input("paths", [encode(path) for path in paths])
    for place, what in list_pins(steps) if pinned else ():
        pipeline.feed_input(name_pin(place, what), [np.array([8, 8], np.int32)] * len(paths))
    pipeline.schedule_run()
    pictures = np.array(pipeline.outputs()[0].as_tensor())
    assert pictures[:, 0, 4, 4].tolist() == list(range(0, 240, 20))


def test_that_test_sees_other_crops(ramp: str) -> None:
    """The control: a little less small, a little more upright."""
    theirs = draw_crops([0.08, 1.0], [3 / 4, 4 / 3])
    small = read_crops(make(ramp, RandomResizedCrop(size=(32, 32), scale=(0.16, 1.0))))
    upright = read_crops(make(ramp, RandomResizedCrop(size=(32, 32), ratio=(0.7, 1.2))))
    assert stats.ks_2samp(small["area"], theirs["area"]).pvalue < 1e-4
    assert stats.ks_2samp(upright["ratio"], theirs["ratio"]).pvalue < 1e-4


@pytest.mark.parametrize("probability", [0.0, 0.2, 0.5, 1.0])
@pytest.mark.parametrize("last", [True, False])
def test_flips(ramp: str, probability: float, last: bool) -> None:
    """Done by themselves, or with the last operator."""
    steps = [RandomHorizontalFlip(p=probability), Resize(size=(8, 8))]
    pictures = make(ramp, *(reversed(steps) if last else steps))
    flipped = int((pictures[:, 0, 4, 0] > pictures[:, 0, 4, -1]).sum())
    if probability in (0, 1):
        assert flipped == probability * DRAWS
    else:
        assert stats.binomtest(flipped, DRAWS, probability).pvalue > 0.01


def test_random_crops_begin_anywhere_and_equally_often(ramp: str) -> None:
    pictures = make(ramp, Resize(size=(6, 6)), RandomCrop(size=(6, 6), padding=(1, 2, 1, 0), fill=7))
    padded_left, padded_top = (pictures[:, 2, 3, 0] == 7), (pictures[:, 2, 0, 3] == 7).astype(int)
    padded_top += pictures[:, 2, 1, 3] == 7
    padded_right = pictures[:, 2, 3, -1] == 7
    places = padded_left * 2 + padded_right  # 2: at the very left, 1: at the very right, 0: between
    counts = [int(((places == place) & (padded_top == top)).sum()) for place in (0, 1, 2) for top in (0, 1, 2)]
    assert sum(counts) == DRAWS and stats.chisquare(counts).pvalue > 0.01


def test_color_factors_are_drawn_from_their_ranges(tmp_path: Path) -> None:
    path = tmp_path / "gray.png"
    Image.new("RGB", (4, 4), (100, 100, 100)).save(path)
    pictures = make(str(path), Resize(size=(4, 4)), ColorJitter(brightness=(0.5, 1.5)))
    assert stats.kstest(pictures[:, 0, 0, 0], "uniform", args=(50, 100)).pvalue > 0.01


def test_the_seed_decides(ramp: str) -> None:
    steps = [RandomResizedCrop(size=(8, 8)), RandomHorizontalFlip()]
    first, again, other = (make(ramp, *steps, seed=seed, count=8) for seed in (5, 5, 6))
    assert (first == again).all() and (first != other).any(axis=(1, 2, 3)).all()
    assert len(np.unique(first, axis=0)) == 8, "every picture of a batch has its own"


def test_scale() -> None:
    steps = (ToTensor(), ToFloat(), Normalize(mean=(0.5, 0.4, 0.3), std=(0.2,)))
    assert np.allclose(find_scale(steps), [[127.5, 102.0, 76.5], [51.0] * 3])
    assert np.allclose(find_scale((*steps, Normalize(mean=(1.0,), std=(2.0,)))), [[178.5, 153.0, 127.5], [102.0] * 3])
    assert find_scale((ToTensor(),)) == ((0.0,) * 3, (1.0,) * 3)


def test_pins_are_those_of_what_is_drawn() -> None:
    steps = [RandomResizedCrop(size=(8, 8)), Resize(size=9), ColorJitter(contrast=(0.5, 1.5)), RandomHorizontalFlip()]
    assert list_pins(steps) == [(0, "start"), (0, "shape"), (1, "contrast"), (2, "flip")]

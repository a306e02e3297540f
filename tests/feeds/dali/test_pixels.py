"""DALI's pictures are torchvision's: same crops, same flips, pixel by pixel, and what is not is refused."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("nvidia.dali", reason="DALI is not installed")
pytest.importorskip("torchvision")
from PIL import Image
from torch.utils.data import DataLoader
from torchvision import transforms as T
from torchvision.transforms import v2

from fastloop.errors import NotApplicable
from fastloop.feeds.dali import pixels
from fastloop.feeds.dali.graph import DaliResources
from fastloop.feeds.dali.pixels import check_pixels, compare, try_pixels
from fastloop.feeds.images.reading import read_source
from fastloop.records.images import Normalize, RandomHorizontalFlip
from tests.feeds.dali.folders import MEAN, STD, Numbered, damage, make_folder, make_picture, read_folder
from tests.pictures import Named

MACHINE = DaliResources(threads=2)
FLOAT = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True)]
KINDS = T.InterpolationMode
CHAINS: dict[str, list[Any]] = {
    "the usual": [],
    "v2": [v2.RandomResizedCrop(32), v2.RandomHorizontalFlip(), *FLOAT, v2.Normalize(MEAN, STD)],
    "tensors first": [v2.ToImage(), v2.RandomResizedCrop(32), v2.ToDtype(torch.float32, scale=True)],
    "bytes first": [v2.ToImage(), v2.ToDtype(torch.uint8, scale=True), v2.RandomResizedCrop(32), FLOAT[1]],
    "bytes": [v2.RandomResizedCrop(32), v2.RandomHorizontalFlip(), v2.PILToTensor()],
    "evaluation": [T.Resize(40), T.CenterCrop(33), T.ToTensor(), T.Normalize(MEAN, STD)],
    "larger than the picture": [T.Resize(31), T.CenterCrop(200), T.ToTensor()],
    "height and width": [T.Resize((40, 30)), T.ToTensor()],
    "padded crop": [T.Resize((40, 40)), T.RandomCrop(32, padding=4), T.RandomHorizontalFlip(), T.ToTensor()],
    "padded unevenly": [v2.Resize((30, 30)), v2.RandomCrop(32, padding=(1, 2, 3, 4), fill=99), *FLOAT],
    "crop, normalize, flip": [T.RandomResizedCrop(32), T.ToTensor(), T.Normalize(MEAN, STD), T.RandomHorizontalFlip()],
    "flip first": [T.RandomHorizontalFlip(), T.RandomResizedCrop(32), T.ToTensor()],
    "crop later": [T.Resize(50), T.RandomResizedCrop(32), T.ToTensor()],
    "one mean": [T.RandomResizedCrop(32), T.ToTensor(), T.Normalize([0.5], [0.25])],
    "normalized twice": [T.RandomResizedCrop(32), T.ToTensor(), T.Normalize(MEAN, STD), T.Normalize(STD, MEAN)],
    "bicubic": [T.RandomResizedCrop(32, interpolation=KINDS.BICUBIC), T.ToTensor()],
    "lanczos": [T.Resize((32, 32), interpolation=KINDS.LANCZOS), T.ToTensor()],
    "nearest": [T.RandomResizedCrop(32, interpolation=KINDS.NEAREST), T.ToTensor()],
    "brightness": [T.RandomResizedCrop(32), T.ColorJitter(brightness=0.4), T.ToTensor()],
    "colors": [T.RandomResizedCrop(32), T.ColorJitter(0.4, 0.4, 0.4), T.RandomHorizontalFlip(), T.ToTensor()],
    "hue": [T.Resize((60, 60)), T.ColorJitter(hue=0.5), T.ToTensor()],
    "all colors": [T.RandomResizedCrop(32), T.ColorJitter(0.4, 0.4, 0.4, 0.1), T.ToTensor()],
    "hue of tensors": [v2.ToImage(), v2.Resize((60, 60)), v2.ColorJitter(hue=0.3), FLOAT[1]],
    "colors, v2": [v2.RandomResizedCrop(32), v2.ColorJitter(0.4, 0.4, 0.4), *FLOAT],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("pictures"))


def check(dataset: Any, change: Any = lambda steps: steps) -> Any:
    source = read_source(dataset)
    assert source.unknown is None
    return check_pixels(dataset, source, change(source.facts.steps), MACHINE)


@pytest.mark.parametrize("chain", CHAINS)
def test_chains_of_transforms(folder: Path, chain: str) -> None:
    """A third of a level on average, which is rounding; a crop that is one pixel off makes several levels."""
    found = check(read_folder(folder, *CHAINS[chain]))
    assert found.samples == 10 and found.find_fault(1.0) is None
    if chain != "hue of tensors":  # DALI turns hues as PIL does, in bytes, and torchvision's tensors in floats
        assert found.mean < 0.35
        assert all(abs(bias) < 0.2 for bias in found.bias) and all(abs(gain - 1) < 0.005 for gain in found.gain)


def test_real_photographs(shared_data: Path, tmp_path: Path) -> None:
    import tarfile

    with tarfile.open(shared_data / "imagenet-sample.tar") as tar:
        tar.extractall(tmp_path, filter="data")
    found = check(read_folder(next(tmp_path.iterdir())))
    assert found.samples == 16 and found.mean < 0.25 and all(abs(bias) < 0.05 for bias in found.bias)


def plant(old: type, **settings: Any) -> Any:
    """A reading of the transforms in which one step is another."""
    return lambda steps: tuple(
        dataclasses.replace(step, **settings) if isinstance(step, old) else step for step in steps
    )


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (plant(Normalize, mean=tuple(reversed(MEAN))), r"red is off by [+-][\d.]+ levels"),
        (plant(Normalize, mean=(0.5, 0.456, 0.406)), r"red is off by [+-]3\.\d levels"),
        (plant(Normalize, std=(0.229, 0.224, 0.235)), r"% of its contrast"),
        (lambda steps: steps[:-1], "levels"),
        (lambda steps: (steps[0], *steps[2:]), "[a-z]+ is off|values deviate"),  # no flip
        (plant(RandomHorizontalFlip, p=0.0), "[a-z]+ is off|values deviate"),
    ],
)
def test_planted_wrongs_are_refused(folder: Path, change: Any, reason: str) -> None:
    with pytest.raises(NotApplicable, match=reason) as refused:
        check(read_folder(folder), change)
    assert "DALI's images differ from those of the transforms: " in str(refused.value)


def test_planted_order_of_colors_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fastloop.feeds.dali import pixels

    right = pixels.run_pinned
    check(read_folder(folder))
    monkeypatch.setattr(pixels, "run_pinned", lambda *given: right(*given).flip(1))
    with pytest.raises(NotApplicable, match=r"red is off by -\d\d\.\d levels"):
        check(read_folder(folder))


def test_no_antialiasing_is_refused(shared_data: Path, tmp_path: Path) -> None:
    """What the records of the steps do not say, the pixels do."""
    make_folder(tmp_path / "large")
    for path in (tmp_path / "large").rglob("*.jpg"):
        noise = np.random.default_rng(0).integers(0, 256, (400, 400, 3))
        Image.fromarray(noise.astype(np.uint8)).save(path)
    rough = read_folder(tmp_path / "large", v2.ToImage(), v2.Resize((32, 32), antialias=False), FLOAT[1])
    with pytest.raises(NotApplicable, match=r"is off by|values deviate"):
        check(rough)


def test_a_dataset_that_does_more_than_its_transform_says(folder: Path) -> None:
    class Brighter(Named):
        def __getitem__(self, index: int) -> Any:
            image, label = self.inner[index]
            return image + 0.1, label

    with pytest.raises(NotApplicable, match=r"is off by -5\.\d levels"):
        check(Brighter(read_folder(folder)))


def test_a_dataset_whose_labels_are_others_than_it_says(folder: Path) -> None:
    class Relabeled(Numbered):
        labels = staticmethod(lambda index: (index,))

        def __getitem__(self, index: int) -> Any:
            return self.inner[index][0], *self.labels(index)

    dataset = Relabeled(read_folder(folder))
    assert check(dataset).samples > 0
    for labels in (lambda index: (19 - index,), lambda index: (index, index), lambda index: (float(index),)):
        dataset.labels = labels
        with pytest.raises(NotApplicable, match="Relabeled's __getitem__ returns a different label for sample 0"):
            check(dataset)


def test_random_generators_are_left_as_they_were(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA's are never set, since nothing restores them: dropout would go on from seed 0."""
    seeded: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    torch.manual_seed(7)
    assert seeded == [7], "the control"
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    check(read_folder(folder, *CHAINS["colors"]))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (np.random.get_state()[1].tolist(), random.getstate()) == before[1:]
    assert seeded == [7]


def test_files_that_nobody_reads_are_passed_over(folder: Path, tmp_path: Path) -> None:
    make_folder(tmp_path)
    (tmp_path / "class0" / "000.jpg").write_bytes(b"")
    assert check(read_folder(tmp_path)).samples == 9
    for path in tmp_path.rglob("*.jpg"):
        path.write_bytes(b"")
    with pytest.raises(NotApplicable, match="none of the samples that were tried can be read"):
        check(read_folder(tmp_path))


def test_files_of_16_bits_are_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The dataset makes their batches; not looking, the control, they would keep DALI from the others."""
    make_folder(tmp_path)
    paths = sorted(tmp_path.rglob("*.jpg"))
    damage(paths[4].rename(paths[4].with_suffix(".png")), "16 bit")
    assert check(read_folder(tmp_path)).samples == 9
    with monkeypatch.context() as control, pytest.raises(NotApplicable, match="of its contrast"):
        control.setattr(pixels, "_MAY_BE_DEEP", ())
        check(read_folder(tmp_path))
    for path in tmp_path.rglob("*.jpg"):
        damage(path.rename(path.with_suffix(".png")), "16 bit")
    with pytest.raises(NotApplicable, match="none of the samples that were tried is an image of 8 bits"):
        check(read_folder(tmp_path))


def test_a_file_that_only_dali_cannot_read_is_a_reason(tmp_path: Path) -> None:
    make_folder(tmp_path, 4)
    make_picture(1).save(tmp_path / "class0" / "000.jpg", format="GIF")
    with pytest.raises(NotApplicable, match="DALI cannot read all of"):
        check(read_folder(tmp_path))


def test_shapes_and_flat_pictures() -> None:
    flat = torch.full((2, 3, 4, 4), 100.0)
    assert compare(flat, flat).find_fault(1.0) is None
    assert compare(flat, flat + 3).find_fault(1.0) == "red is off by +3.0 levels and +0.0 % of its contrast"
    with pytest.raises(NotApplicable, match=r"have the shape \[2, 3, 4, 4\], but the samples \[2, 3, 5, 5\]"):
        compare(torch.zeros(2, 3, 5, 5), flat)


def test_a_dali_that_does_not_start_is_a_reason(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Missing libraries of another CUDA show when it is imported, or when a pipeline is made."""
    loader = DataLoader(read_folder(folder), batch_size=2)
    steps = read_source(loader.dataset).facts.steps
    assert try_pixels(loader, steps, MACHINE).samples == 10

    def fail(*_: Any, **__: Any) -> Any:
        raise OSError("libcudart.so.12: cannot open shared object file")

    monkeypatch.setattr(pixels, "make_pipeline", fail)
    with pytest.raises(NotApplicable, match=r"DALI does not start here \(OSError: libcudart.so.12: cannot") as refused:
        try_pixels(loader, steps, MACHINE)
    assert 'pip install "lightning-fastloop[dali-cuda1' in str(refused.value)

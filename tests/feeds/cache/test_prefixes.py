"""What is said of a dataset before anything of it is kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import ConcatDataset, IterableDataset, Subset
from torchvision import transforms as T

from fastloop.feeds.cache.prefixes import read_prefix
from fastloop.records.facts import PrefixFacts
from tests.feeds.cache.pictures import Arrays, Unnamed, folder, read_array
from tests.runs import numbered


def read(dataset: Any) -> PrefixFacts:
    found = read_prefix(dataset)
    assert isinstance(found, PrefixFacts), found
    return found


@pytest.mark.parametrize(
    ("steps", "size", "what"),
    [
        ([], 40 * 30 * 3, "decoded images"),
        ([T.RandomCrop(8), T.Resize(9)], 40 * 30 * 3, "decoded images"),
        ([T.Resize(15)], 20 * 15 * 3, "decoded images after Resize"),
        ([T.Resize((10, 12)), T.CenterCrop(6), T.ToTensor()], 6 * 6 * 3, "decoded images after Resize, CenterCrop"),
    ],
)
def test_image_folders(steps: Any, size: int, what: str, tmp_path: Path) -> None:
    plain = folder(tmp_path, transform=T.Compose(steps))
    found = read(plain)
    assert (found.what, found.sample_bytes, found.samples) == (what, size, 6)
    assert found.names_files and found.dataset == f"ImageFolder of {tmp_path}"
    assert read(Subset(plain, [1, 1, 2, 3, 4, 5, 0, 0])).samples == 6, "each once, however often it is asked for"
    assert read(Subset(plain, [1, 2])).samples == 2
    assert read(ConcatDataset([plain, plain])).samples == 6


def test_fingerprints_are_of_the_prefix_alone(tmp_path: Path) -> None:
    def of(*steps: Any) -> str:
        return read(folder(tmp_path, transform=T.Compose(steps))).fingerprint

    assert of(T.RandomCrop(3), T.ToTensor()) == of(T.RandomResizedCrop(3), T.ToTensor())
    assert len({of(T.ToTensor()), of(T.Resize(3), T.ToTensor()), of(T.Resize(4), T.ToTensor())}) == 3
    assert of(T.Resize(3), T.RandomRotation(3)) != of(T.Resize(3), T.ToTensor()), "the first keeps what a file says"


def test_broken_files_are_passed_over(tmp_path: Path) -> None:
    plain = folder(tmp_path)
    Path(plain.samples[0][0]).write_bytes(b"no picture")
    assert read(plain).sample_bytes == 3600
    for path, _ in plain.samples:
        Path(path).unlink()
    assert read(plain).sample_bytes is None


def test_marked_methods(tmp_path: Path) -> None:
    read_array.__dict__.pop("times", None)
    found = read(Arrays(tmp_path))
    assert (found.what, found.sample_bytes, found.samples) == ("what Arrays.load returns", None, 6)
    assert found.names_files and not read(Unnamed(tmp_path)).names_files
    assert "times" not in vars(read_array), "no sample is taken"


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([1])


class Breaks(Arrays):
    def __len__(self) -> int:
        raise RuntimeError("not yet")


def test_what_cannot_be_kept_is_named(tmp_path: Path) -> None:
    said = read_prefix(numbered())
    assert said == (
        "TensorDataset is not an ImageFolder and has no image_path_and_label(index), and none of its methods is marked"
        " by fastloop.cached_prefix"
    )
    assert "has no samples that can be indexed" in str(read_prefix(Stream()))
    data = Arrays(tmp_path)
    data.scale = lambda: data  # type: ignore[assignment]
    assert "cannot be fingerprinted" in str(read_prefix(data))
    assert read_prefix(Breaks(tmp_path)) == "Breaks could not be inspected: RuntimeError: not yet"

"""What the cache saves two CPU cores: images/s of a loader with two workers, decoding and from kept samples.

    python -m benchmarks.cached_samples [--data FILE.tar] [--seconds 4] [--rounds 5] [--workers 2]

crop     RandomResizedCrop(224), as in the recipe: decoded pictures are kept, and every crop of them is resized anew
resized  Resize(256) and RandomCrop(224): pictures are kept that are resized already

Loaders take turns in each round; their first epoch, which fills the cache, is not timed. `bytes` leaves normalizing to
the device, which has no part in this. `sample_ms` is the time for one sample in this process, without a loader.
"""

from __future__ import annotations

import argparse
import itertools
import tarfile
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import ConcatDataset, DataLoader
from torchvision import datasets, transforms

from benchmarks.cases import Case, find_data, make_parser, run_cases
from fastloop.feeds.cache.prefixes import read_prefix
from fastloop.feeds.cache.wanted import KeptSamples
from fastloop.feeds.images.byte_batches import AsBytes

CROPS = {
    "crop": [transforms.RandomResizedCrop(224)],
    "resized": [transforms.Resize(256), transforms.RandomCrop(224)],
}
REST = [transforms.RandomHorizontalFlip(), transforms.ToTensor(), transforms.Normalize((0.485,) * 3, (0.229,) * 3)]
BATCH = 32


def wrap(folder: Path, crop: str, how: str) -> Any:
    """The pictures of a folder: `decoded`, or `kept`, and as `bytes` or not."""
    dataset: Any = datasets.ImageFolder(str(folder), transforms.Compose([*CROPS[crop], *REST]))
    if "kept" in how:
        prefix = read_prefix(dataset)
        assert not isinstance(prefix, str), prefix
        dataset = KeptSamples(store="shm", budget_bytes=None, prefix=prefix).wrap(dataset)
    return AsBytes().wrap(dataset) if "bytes" in how else dataset


def measure(dataset: Any, options: argparse.Namespace, _left_s: float) -> dict[str, Any]:
    for number in range(len(dataset)):  # fills the cache, and the page cache
        dataset[number]
    began = time.perf_counter()
    for number in range(len(dataset)):
        dataset[number]
    sample_ms = 1e3 * (time.perf_counter() - began) / len(dataset)
    endless: ConcatDataset[Any] = ConcatDataset([dataset] * 1000)
    batches = iter(DataLoader(endless, BATCH, shuffle=True, num_workers=options.workers))
    for _ in itertools.islice(batches, 4 * options.workers):
        pass
    began, images = time.perf_counter(), 0
    while time.perf_counter() - began < options.seconds:
        next(batches)
        images += BATCH
    return {"images_per_s": images / (time.perf_counter() - began), "images": images, "sample_ms": sample_ms}


def main() -> None:
    parser = make_parser(__doc__, rounds=5)
    parser.add_argument("--data", help="a tar of photographs in a folder for each class; default: shared/data")
    parser.add_argument("--seconds", type=float, default=4, help="of each loader in each round")
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(1)  # as in workers
    data = options.data or find_data("imagenet-sample.tar", "default")
    if data is None:
        parser.error("there are no photographs: give --data")
    with tempfile.TemporaryDirectory() as place:
        with tarfile.open(data) as tar:
            tar.extractall(place, filter="data")
        folder = next(Path(place).iterdir())
        cases = [
            Case(f"{crop}, {how}", partial(measure, wrap(folder, crop, how), options))
            for crop in CROPS
            for how in ("decoded", "kept", "decoded bytes", "kept bytes")
        ]
        run_cases("cached_samples", cases, options, rate="images_per_s", workers=options.workers)


if __name__ == "__main__":
    main()

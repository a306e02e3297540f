"""Decoded pictures of whatever sizes in one buffer on the device, and batches cut out of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, default_collate

from fastloop.errors import NotApplicable
from fastloop.feeds.device_store.draws import Numbers, Placement
from fastloop.feeds.images.reading import ImageSource

CHUNK_BYTES = 64 * 2**20
"""Moved to the device at once."""
LOOKED_AT = 64
"""Pictures after which the size of all is told."""
FEW = 512
"""Pictures that are not worth starting processes for."""
QUIET_S = 2.0
"""A filling that takes longer is talked about."""


class Pictures:
    """Pictures, bytes [3, height, width] one after the other, and the label of each sample.

    Args:
        pixels: uint8 [all], on the device.
        sizes: height and width of each picture, int64 [pictures, 2].
        slots: the picture of each sample, int64 [samples].
        labels: of each sample, [samples, ...], on the device.
    """

    def __init__(self, pixels: torch.Tensor, sizes: Numbers, slots: Numbers, labels: torch.Tensor) -> None:
        self.pixels, self.sizes, self.slots, self.labels = pixels, sizes, slots, labels
        self.starts = np.concatenate([[0], np.cumsum(3 * sizes[:, 0] * sizes[:, 1])[:-1]])
        self._grids: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}

    def cut(
        self, samples: Numbers, placed: Placement, size: tuple[int, int], fill: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Bytes [B, 3, *size] of these samples [B], `fill` outside of the pictures; and their labels."""
        slots = self.slots[samples]
        heights, widths = self.sizes[slots].T
        columns = (samples, self.starts[slots], heights, widths, placed.top, placed.left, placed.step)
        told = torch.from_numpy(np.stack(columns)).to(self.pixels.device)
        samples_there, starts, height, width, top, left, step = told.view(7, -1, 1, 1, 1)
        channels, rows, places = self._make_grid(size)
        row, column = rows + top, places * step + left
        index = (starts + (channels * height + row) * width) + column  # in this order only the last sum is large
        if placed.is_inside(heights, widths, size):
            found = self.pixels[index]
        else:
            inside = (row >= 0) & (row < height) & (column >= 0) & (column < width)
            found = torch.where(inside, self.pixels[torch.where(inside, index, 0)], fill)
        return found, self.labels[samples_there.view(-1)]

    def _make_grid(self, size: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if size not in self._grids:
            device, (height, width) = self.pixels.device, size
            self._grids[size] = (
                torch.arange(3, device=device).view(1, 3, 1, 1),
                torch.arange(height, device=device).view(1, 1, height, 1),
                torch.arange(width, device=device).view(1, 1, 1, width),
            )
        return self._grids[size]


def fill(
    dataset: Any,
    source: ImageSource,
    device: torch.device,
    *,
    most_bytes: int,
    workers: int,
    say: Callable[[str], None],
) -> Pictures:
    """Decode every picture once, on the CPU as the user's dataset does it, and keep it on the device.

    Args:
        dataset: hands out ``(uint8 [3, height, width], label)``.
        source: names the picture of each sample.
        workers: processes that decode; 0: this one does.

    Raises:
        NotApplicable: the pictures take more than `most_bytes`, or samples are none that can be kept.
    """
    began = time.monotonic()
    first: dict[str, int] = {}
    """The first sample of each picture."""
    slots, labels = np.empty(source.count, dtype=np.int64), []
    for sample in range(source.count):
        path, label = source.locate(sample)
        labels.append(label)
        first.setdefault(path, sample)
        slots[sample] = first[path]
    order = np.fromiter(first.values(), dtype=np.int64)
    slots = np.searchsorted(order, slots)  # samples were numbered in their order
    collated = default_collate(labels)
    if not isinstance(collated, torch.Tensor):
        raise NotApplicable(f"labels that collate to a {type(collated).__name__} cannot be kept on the device")
    chunks, sizes, kept_bytes, waiting = [], [], 0, []
    spoke = False
    for number, picture in enumerate(_decode(dataset, order, workers if len(order) > FEW else 0), start=1):
        if picture.dim() != 3 or picture.shape[0] != 3:
            raise NotApplicable(f"a picture of shape {list(picture.shape)}, not [3, height, width]")
        sizes.append(picture.shape[1:])
        waiting.append(picture.reshape(-1))
        kept_bytes += picture.numel()
        expected = kept_bytes * len(order) // number if number >= LOOKED_AT else kept_bytes
        if max(expected, kept_bytes) > most_bytes:
            raise NotApplicable(
                f"{len(order):,} pictures take about {expected / 1e9:.2g} GB, and {most_bytes / 1e9:.2g} GB of"
                " the device's memory may be used"
            )
        if sum(map(len, waiting)) >= CHUNK_BYTES or number == len(order):
            chunks.append(torch.cat(waiting).to(device))
            waiting = []
        if not spoke and time.monotonic() - began > QUIET_S:
            spoke = True
            say(f"decoding {len(order):,} pictures once, to keep them on the device")
    table = np.array(sizes, dtype=np.int64).reshape(-1, 2)
    return Pictures(torch.cat(chunks), table, slots, collated.to(device))


def _decode(dataset: Any, order: Numbers, workers: int) -> Iterator[torch.Tensor]:
    """Pictures of samples, in this order. No random number of the training's is used up."""
    loader = DataLoader(
        dataset,
        batch_size=None if not workers else 16,
        sampler=[int(sample) for sample in order],
        num_workers=workers,
        collate_fn=_list_pictures,
        generator=torch.Generator(),
    )
    for pictures in loader:
        yield from pictures


def _list_pictures(samples: Any) -> list[torch.Tensor]:
    return [picture for picture, _ in (samples if isinstance(samples, list) else [samples])]

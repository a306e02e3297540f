"""Decoded pictures of any sizes in one buffer on the device, and batches cut from it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, default_collate

from fastloop.errors import NotApplicable, name_kind
from fastloop.feeds.device_store.draws import Numbers, Placement, send
from fastloop.feeds.images.byte_batches import ToFloats
from fastloop.feeds.images.reading import ImageSource
from fastloop.records.facts import format_bytes

CHUNK_BYTES = 64 * 2**20
"""Size of one copy to the device."""
LOOKED_AT = 64
"""Pictures after which the total size is estimated."""
TOGETHER = 16
"""Pictures that a process decodes and sends at a time."""
FEW = 512
"""Up to this many pictures, worker processes are not worth starting."""
QUIET_S = 2.0
"""If filling takes longer, the user gets a line about it."""


class Pictures:
    """Pictures, stored consecutively as bytes [3, height, width], and the label of each sample.

    Args:
        pixels: uint8 [all], on the device.
        sizes: height and width of each picture, int64 [pictures, 2].
        slots: index of each sample's picture, int64 [samples].
        labels: of each sample, [samples, ...], on the device.
    """

    def __init__(self, pixels: torch.Tensor, sizes: Numbers, slots: Numbers, labels: torch.Tensor) -> None:
        self.pixels, self.sizes, self.slots, self.labels = pixels, sizes, slots, labels
        self.starts = np.concatenate([[0], np.cumsum(3 * sizes[:, 0] * sizes[:, 1])[:-1]])
        self.fused = pixels.is_cuda
        """Whether pictures are cut by one Triton kernel, instead of a dozen of torch's operations."""
        self._grids: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}

    def find_labels(self, samples: Numbers) -> torch.Tensor:
        """Return the labels [B, ...] of these samples [B]."""
        return self.labels[send(samples, self.labels.device)]

    def resize(
        self,
        samples: Numbers,
        parts: Numbers,
        mirrored: Numbers,
        size: tuple[int, int],
        to_floats: ToFloats,
        memory_format: torch.memory_format,
    ) -> torch.Tensor:
        """Return floats [B, 3, *size]: these parts [B, 4] of samples [B], resized, then mirrored if set.

        Raises:
            ImportError: Triton is not installed.
        """
        from fastloop.feeds.device_store import kernels

        slots = self.slots[samples]
        stored = (self.pixels, self.starts[slots], self.sizes[slots, 0], self.sizes[slots, 1], parts)
        return kernels.resize_parts(*stored, mirrored, size, to_floats.find_table(self.pixels.device), memory_format)

    def cut(
        self,
        samples: Numbers,
        placed: Placement,
        size: tuple[int, int],
        fill: int,
        to_floats: ToFloats,
        memory_format: torch.memory_format,
    ) -> torch.Tensor:
        """Return floats [B, 3, *size] of these samples [B]; outside the pictures, of the byte `fill`.

        Raises:
            ImportError: Triton is not installed, and `fused` is set.
        """
        slots = self.slots[samples]
        heights, widths = self.sizes[slots].T
        columns = (self.starts[slots], heights, widths, placed.top, placed.left, placed.step)
        fields = send(np.stack(columns, axis=1), self.pixels.device)
        if self.fused:
            from fastloop.feeds.device_store import kernels

            table = to_floats.find_table(self.pixels.device)
            return kernels.cut_parts(self.pixels, fields, size, fill, table, memory_format)
        starts, height, width, top, left, step = fields.T.reshape(6, -1, 1, 1, 1)
        channels, rows, places = self._make_grid(size)
        row, column = rows + top, places * step + left
        index = (starts + (channels * height + row) * width) + column  # in this order only the last sum is large
        if placed.is_inside(heights, widths, size):
            return to_floats(self.pixels[index])
        inside = (row >= 0) & (row < height) & (column >= 0) & (column < width)
        return to_floats(torch.where(inside, self.pixels[torch.where(inside, index, 0)], fill))

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
    """Decode every picture once, on the CPU with the user's dataset, and store it on the device.

    Args:
        dataset: returns ``(uint8 [3, height, width], label)``.
        source: names the file of each sample's picture.
        workers: processes that decode; 0 to decode in this process.

    Raises:
        NotApplicable: the pictures take more than `most_bytes`, or samples of this kind cannot be stored.
    """
    order, slots, labels = _list_samples(source)
    first = dataset[int(order[0])][0]
    if getattr(first, "dtype", None) is not torch.uint8:
        got = getattr(first, "dtype", type(first).__name__)
        raise NotApplicable(f"the dataset does not apply its `transform`: with one that returns bytes, it gave {got}")
    chunks, shapes, kept_bytes, moved_bytes, waiting = [], [], 0, 0, []
    began, spoke = time.monotonic(), False
    for pixels, more in _decode(dataset, order, workers if len(order) > FEW else 0):
        waiting.append(pixels)
        shapes += more
        kept_bytes += len(pixels)
        expected = kept_bytes * len(order) // len(shapes) if len(shapes) >= LOOKED_AT else kept_bytes
        if expected > most_bytes:
            raise NotApplicable(
                f"{len(order):,} images take about {format_bytes(expected)}, but may take at most"
                f" {format_bytes(most_bytes)} of the device's memory"
            )
        if kept_bytes - moved_bytes >= CHUNK_BYTES or len(shapes) == len(order):
            chunks.append(torch.cat(waiting).to(device))
            waiting, moved_bytes = [], kept_bytes
        if not spoke and time.monotonic() - began > QUIET_S:
            spoke = True
            say(f"decoding {len(order):,} images once, to keep them on the device")
    if odd := next((shape for shape in shapes if len(shape) != 3 or shape[0] != 3), None):
        raise NotApplicable(f"an image of shape {list(odd)}, not [3, height, width]")
    return Pictures(torch.cat(chunks), np.array(shapes, dtype=np.int64)[:, 1:], slots, labels.to(device))


def _list_samples(source: ImageSource) -> tuple[Numbers, Numbers, torch.Tensor]:
    """Return one sample per picture, in storage order; the index of each sample's picture; the labels."""
    first: dict[str, int] = {}
    firsts, labels = np.empty(source.count, dtype=np.int64), []
    for sample in range(source.count):
        path, label = source.locate(sample)
        labels.append(label)
        firsts[sample] = first.setdefault(path, sample)
    collated = default_collate(labels)
    if not isinstance(collated, torch.Tensor):
        raise NotApplicable(f"labels that collate to {name_kind(collated)} cannot be kept on the device")
    order = np.fromiter(first.values(), dtype=np.int64)  # ascending
    return order, np.searchsorted(order, firsts), collated


def _decode(dataset: Any, order: Numbers, workers: int) -> Iterator[tuple[torch.Tensor, list[tuple[int, ...]]]]:
    """Yield the samples' pictures in this order, a few at a time. Does not touch the training's random generators."""
    yield from DataLoader(
        dataset,
        batch_size=TOGETHER,
        sampler=[int(sample) for sample in order],
        num_workers=workers,
        collate_fn=_join_pictures,
        generator=torch.Generator(),
    )


def _join_pictures(samples: list[Any]) -> tuple[torch.Tensor, list[tuple[int, ...]]]:
    """Join pictures into one tensor, since each tensor sent between processes costs a file descriptor; also return
    their shapes."""
    pictures = [picture for picture, _ in samples]
    return torch.cat([picture.reshape(-1) for picture in pictures]), [tuple(picture.shape) for picture in pictures]

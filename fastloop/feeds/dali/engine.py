"""Loads the batches of an image loader with DALI: the indices are the loader's own, only the pictures are made here."""

from __future__ import annotations

import importlib
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import default_collate

from fastloop.errors import FastLoopError, NotApplicable, let_through
from fastloop.feeds.batch_tree import Window
from fastloop.feeds.dali.graph import Machine, encode, make_pipeline
from fastloop.feeds.dali.pixels import Deviation, check_pixels, shorten
from fastloop.feeds.images.reading import read_source
from fastloop.feeds.window_batches import WindowDataset
from fastloop.records.images import ImageStep

MOST_FAILURES = 3
"""Batches in a row that DALI may fail on before it is left alone."""
_MAY_BE_DEEP = (".png", ".tif", ".tiff", ".pgm")
"""Files that may hold 16 bits of gray: PIL cuts them off at 255, DALI scales them."""
_READS = (".jpg", ".jpeg", ".png", ".ppm", ".pgm", ".pbm", ".bmp", ".tif", ".tiff", ".webp", ".jp2")


class _Asked(NamedTuple):
    """A batch that was asked for."""

    indices: Sequence[Any]
    paths: tuple[str, ...]
    labels: Any
    """As the loader collates them, on the device."""
    deep: str | None
    """Of the files, one with more than 8 bits."""


def try_pixels(loader: Any, steps: Sequence[ImageStep], machine: Machine) -> Deviation:
    """Compare DALI's pictures with the dataset's own samples.

    Raises:
        NotApplicable: they differ, or DALI cannot be started here.
    """
    try:
        importlib.import_module("nvidia.dali.fn")
        make_pipeline(steps, machine, batch_size=1, seed=0)
    except Exception as error:
        let_through(error)
        raise NotApplicable(f"DALI does not start here ({describe(error)}); {name_cure()}") from error
    return check_pixels(loader.dataset, read_source(loader.dataset), steps, machine)


def name_cure() -> str:
    """How to get the DALI that goes with this torch."""
    cuda = (torch.version.cuda or "13").split(".")[0]
    return f'pip install "lightning-fastloop[dali-cuda{cuda}]"'


def describe(error: Exception) -> str:
    return f"{type(error).__name__}: {shorten(error)}"


class DaliLoader:
    """Makes the batches that a loader's batch sampler asks for, with DALI.

    It keeps nothing between epochs but its threads: each epoch asks the batch sampler anew, in the caller's thread, in
    order and once; labels never leave Python. A batch that DALI cannot make is made as the loader makes it.

    Args:
        loader: a DataLoader over image files, or over accumulation windows of them.
        batch_size: the most samples that the user's batch sampler puts into a batch.
        keeps: DALI's threads stay between epochs.
    """

    def __init__(
        self,
        loader: Any,
        steps: Sequence[ImageStep],
        machine: Machine,
        *,
        batch_size: int,
        keeps: bool = True,
    ) -> None:
        self._loader, self._steps, self._machine, self._keeps = loader, steps, machine, keeps
        self.ahead = machine.ahead
        """Batches that can lie ready."""
        self._dataset, self._parts, self._batch_size = loader.dataset, False, batch_size
        while type(self._dataset).__module__.startswith("fastloop.feeds."):  # ours stand in for the user's
            if type(self._dataset) is WindowDataset:
                self._parts, self._batch_size = not self._dataset.concatenates, batch_size * loader.batch_sampler.window
            self._dataset = self._dataset.inner
        self._source = read_source(self._dataset)
        self._device = torch.device("cpu") if machine.device_id is None else torch.device("cuda", machine.device_id)
        self._depths = bytearray(self._source.count)
        """By sample: 0 not looked at, 1 bytes, 2 more than that."""
        self._pipeline: Any = None
        self._indices: Iterator[Any] = iter(())
        self._ready: deque[_Asked] = deque()
        """Batches that DALI is about to get."""
        self._under_way: deque[_Asked] = deque()
        """Batches that DALI is making, in their order."""
        self._again: deque[_Asked] = deque()
        """Batches that it was making when it failed on another."""
        self._broken: Exception | None = None
        self._failed: Exception | None = None
        """What the user's sampler or labels raised; the batches before it are used first."""
        self._starts = 0
        self.wants_channels_last: Callable[[], bool] = lambda: False
        """Whether the model takes its pictures in channels-last order now."""
        self.images = self.plain_batches = 0
        self._why_plain: str | None = None

    def evidence(self) -> Mapping[str, Any]:
        """What was loaded so far, and by whom."""
        return {
            "images": self.images,
            "plain_batches": self.plain_batches,
            "why_plain": self._why_plain,
            "decode": self._machine.decode,
            "threads": self._machine.threads,
        }

    def close(self) -> None:
        """End DALI's threads."""
        self._pipeline = None

    # -- an epoch -------------------------------------------------------------------------------------------------

    def load(self, seed: int) -> Iterator[Any]:
        """One epoch's batches, as the loader would collate them: pictures [N, 3, H, W] and labels [N].

        Args:
            seed: for the random steps, where DALI is started in this epoch.
        Raises:
            FastLoopError: a file cannot be read, with its name.
        """
        self._indices, self._failed, failures = iter(self._loader.batch_sampler), None, 0
        try:
            while failures < MOST_FAILURES:
                pictures, why = self._take(seed)
                if why is not None:
                    failures += 1
                    asked = self._give_up_batch()
                elif pictures is None:
                    break
                else:
                    failures, asked = 0, self._under_way.popleft()
                    if asked.deep is not None:
                        yield self._make_plainly(asked, f"{asked.deep} has more than 8 bits of gray")
                        continue
                    self.images += len(asked.paths)
                    yield self._hand_out(pictures, asked)
                    continue
                if asked is not None:
                    yield self._make_plainly(asked, why)
            while (asked := self._ask()) is not None:  # only where DALI failed time and again
                yield self._make_plainly(asked, f"{MOST_FAILURES} batches in a row")
            if self._failed is not None:
                raise self._failed
        finally:
            self._settle()

    def _take(self, seed: int) -> tuple[torch.Tensor | None, str | None]:
        """The pictures of the batch that is due, None where there is none; and why DALI could not make them."""
        try:
            if self._broken is not None:
                raise self._broken
            if self._pipeline is None:
                self._pipeline = self._start(seed)
            if not self._under_way:
                self._schedule(self._machine.ahead)
            if self._pipeline.empty():
                return None, None
            stream = {} if self._device.type == "cpu" else {"cuda_stream": torch.cuda.current_stream(self._device)}
            (found,) = self._pipeline.outputs(**stream)
            pictures = torch.utils.dlpack.from_dlpack(found.as_tensor())
        except Exception as error:
            let_through(error)
            return None, describe(error)
        try:
            self._schedule(1)
        except Exception as error:  # about a batch that is still to come
            let_through(error)
            self._broken = error
        return pictures, None

    def _schedule(self, batches: int) -> None:
        """Let DALI make the next batches. They are asked for here: what the user's code raises goes by DALI."""
        while len(self._ready) < batches and (asked := self._ask()) is not None:
            self._ready.append(asked)
        self._pipeline.schedule_run()  # the first of an epoch takes as many as are made ahead

    def _start(self, seed: int) -> Any:
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        mixed = np.random.SeedSequence([seed % 2**63, rank, self._starts]).generate_state(1)[0]
        self._starts += 1
        return make_pipeline(
            self._steps, self._machine, batch_size=self._batch_size, seed=int(mixed) >> 1, source=self._feed
        )

    def _feed(self) -> list[Any]:
        """DALI asks for the paths of the next batch."""
        if not self._ready:
            raise StopIteration
        asked = self._ready.popleft()
        self._under_way.append(asked)
        return [encode(path) for path in asked.paths]

    def _ask(self) -> _Asked | None:
        """The next batch that the sampler draws; None at the end, or where the user's code raised."""
        if self._again:
            return self._again.popleft()
        if self._failed is not None:
            return None
        try:
            indices = next(self._indices)
            located = [self._source.locate(index) for index in indices]
            labels = default_collate([label for _, label in located])
        except StopIteration:
            return None
        except Exception as error:
            let_through(error)
            self._failed = error
            return None
        if isinstance(labels, torch.Tensor):
            labels = labels.to(self._device, non_blocking=True)
        paths = tuple(path for path, _ in located)
        deep = next((path for index, path in zip(indices, paths, strict=True) if self._is_deep(int(index), path)), None)
        return _Asked(indices, paths, labels, deep)

    def _is_deep(self, index: int, path: str) -> bool:
        """Whether PIL reads more than 8 bits of gray; looked up once a file."""
        if not path.lower().endswith(_MAY_BE_DEEP):
            return False
        if not self._depths[index]:
            from PIL import Image

            try:
                with Image.open(path) as picture:
                    self._depths[index] = 1 + picture.mode.startswith(("I", "F"))
            except (OSError, ValueError):  # for DALI, or the dataset, to say
                self._depths[index] = 1
        return self._depths[index] == 2

    def _settle(self) -> None:
        """An epoch is over, or was left early: let DALI finish what it was asked for, and forget it."""
        pipeline, self._pipeline, self._broken = self._pipeline, None, None
        for queue in (self._ready, self._again):
            queue.clear()
        if pipeline is not None and self._keeps:
            try:
                while not pipeline.empty():
                    pipeline.outputs()
                pipeline.schedule_run()  # sees that there is no more
                pipeline.reset()
                self._pipeline = pipeline
            except Exception as error:  # it is started anew
                let_through(error)
        self._under_way.clear()

    # -- a batch --------------------------------------------------------------------------------------------------

    def _hand_out(self, pictures: torch.Tensor, asked: _Asked) -> Any:
        if self._machine.layout == "HWC":
            pictures = pictures.permute(0, 3, 1, 2)
            if not self.wants_channels_last():
                pictures = pictures.contiguous()
        sizes = list(getattr(asked.indices, "sizes", ()))
        if self._parts and len(sizes) > 1:
            parts = zip(torch.split(pictures, sizes), torch.split(asked.labels, sizes), strict=True)
            return Window([image, label] for image, label in parts)
        return [pictures, asked.labels]

    def _give_up_batch(self) -> _Asked | None:
        """The batch that DALI failed on; those behind it are asked for again, of another pipeline."""
        self._pipeline = self._broken = None
        self._again = deque([*self._under_way, *self._ready, *self._again])
        self._under_way.clear()
        self._ready.clear()
        return self._ask()

    def _make_plainly(self, asked: _Asked, why: str) -> Any:
        """A batch from the dataset itself, as without DALI.

        Raises:
            FastLoopError: that cannot read a file either.
        """
        samples = []
        for index, path in zip(asked.indices, asked.paths, strict=True):
            try:
                samples.append(self._dataset[index][0])
            except Exception as error:
                let_through(error)
                raise FastLoopError(
                    got=f"{path}, sample {index}, which cannot be read: {type(error).__name__}: {error}",
                    why="without DALI it could not be read either",
                    do="repair the file, or take it out of the dataset",
                ) from error
        if self._why_plain is None:
            strangers = [path for path in asked.paths if Path(path).suffix.lower() not in _READS]
            self._why_plain = f"{', '.join(strangers[:2] or asked.paths[:1])}{' …' if not strangers else ''}: {why}"
            line = f"fastloop: DALI could not read a batch, which was loaded without it: {self._why_plain}"
            warnings.warn(line, stacklevel=2)
        self.plain_batches += 1
        pictures = default_collate(samples).to(self._device)
        if self._machine.layout == "HWC":
            pictures = pictures.permute(0, 2, 3, 1).contiguous()
        return self._hand_out(pictures, asked)

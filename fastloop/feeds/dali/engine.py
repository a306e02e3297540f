"""Loads an image loader's batches with DALI: the loader's sampler gives the indices, DALI only makes the pictures."""

from __future__ import annotations

import importlib
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

from fastloop.errors import FastLoopError, NotApplicable, describe, let_through
from fastloop.feeds.batch_tree import BatchWindow
from fastloop.feeds.dali.batch_queue import BatchQueue, BatchRequest
from fastloop.feeds.dali.changed_steps import StepsWatch
from fastloop.feeds.dali.decoder_choice import DecoderChoice, check_room
from fastloop.feeds.dali.graph import DaliResources, make_pipeline
from fastloop.feeds.dali.hang_watch import HangWatch
from fastloop.feeds.dali.pictures import QUEUES
from fastloop.feeds.dali.pixels import check_pixels, describe_error
from fastloop.feeds.images.reading import read_source
from fastloop.feeds.lazy_loader import StandInDataset
from fastloop.feeds.window_batches import WindowDataset
from fastloop.feeds.workers import tried_workers
from fastloop.records.images import ImageStep

MOST_FAILURES = 3
"""Consecutive batches on which DALI may fail before it is turned off."""
_READS = (".jpg", ".jpeg", ".png", ".ppm", ".pgm", ".pbm", ".bmp", ".tif", ".tiff", ".webp", ".jp2")


class DaliLoader:
    """Makes the batches of a loader's batch sampler with DALI.

    Keeps only its threads between epochs: each epoch iterates the batch sampler once, in order, in the caller's thread.
    Labels never leave Python. A batch that DALI cannot make comes from the dataset. If the transforms are changed to
    ones that DALI does not have, all later batches do.

    Args:
        loader: a DataLoader over image files, or over accumulation windows of them.
        batch_size: most samples in a batch of the user's batch sampler.
        keeps: whether DALI's threads stay alive between epochs.
        turn_off: the configuration key that turns DALI off, as the user writes it.
        other: resources for the other decoder, which this loader changes to if the first one does not work.
        tries_other: whether it also tries that one if the training waits for pictures.
    """

    def __init__(
        self,
        loader: Any,
        steps: Sequence[ImageStep],
        machine: DaliResources,
        *,
        batch_size: int,
        turn_off: str,
        keeps: bool = True,
        other: DaliResources | None = None,
        tries_other: bool = False,
    ) -> None:
        self._loader, self._machine, self._keeps = loader, machine, keeps
        self._machines = {each.decode: each for each in (machine, other) if each is not None}
        self._turn_off = turn_off
        self.ahead = machine.ahead
        """Most batches that can be ready in advance."""
        self._dataset, self._batch_size = loader.dataset, batch_size
        self._keeps_apart = False
        """Whether the batches of an accumulation window stay separate."""
        while isinstance(self._dataset, StandInDataset):
            if type(self._dataset) is WindowDataset:
                self._keeps_apart = not self._dataset.concatenates
                self._batch_size = batch_size * loader.batch_sampler.window
            self._dataset = self._dataset.inner
        self._changes = StepsWatch(loader, self._dataset, read_source(self._dataset), steps)
        self._device = torch.device("cpu") if machine.device_id is None else torch.device("cuda", machine.device_id)
        self._choice: DecoderChoice | None = None
        if other is not None:
            self._choice = DecoderChoice(machine.decode, other.decode, self._synchronize, is_over=not tries_other)
        self._queue = BatchQueue(self._changes, self._device)
        self._pipeline: Any = None
        self._watch: HangWatch
        """Watches the waits of the current epoch."""
        self._broken: Exception | None = None
        self._starts = 0
        self.wants_channels_last: Callable[[], bool] = lambda: False
        """Whether the model currently takes pictures in channels-last order."""
        self.images = self.plain_batches = 0
        self._why_plain: str | None = None

    def evidence(self) -> Mapping[str, Any]:
        """Return what was loaded so far, with DALI and without."""
        return {
            "images": self.images,
            "plain_batches": self.plain_batches,
            "why_plain": self._why_plain,
            "decode": self._machine.decode,
            "threads": self._machine.threads,
            "queues": os.environ.get(QUEUES),
            **({} if self._choice is None else self._choice.evidence()),
        }

    def close(self) -> None:
        """End DALI's threads."""
        self._pipeline = None

    # -- an epoch -------------------------------------------------------------------------------------------------

    def load(self, seed: int) -> Iterator[Any]:
        """Yield one epoch's batches, collated as in the loader: pictures [N, 3, H, W] and labels [N].

        Args:
            seed: for the random steps; only used if DALI is started in this epoch.

        Raises:
            FastLoopError: a file cannot be read, or DALI makes no batch for LIMIT_S; the error names the files.
        """
        self._follow_changes(begins=True)
        self._queue.begin(self._loader.batch_sampler)
        self._watch = HangWatch(
            lambda waited_s: warnings.warn(f"fastloop: {self._describe_wait(waited_s)}", stacklevel=2)
        )
        failures = 0
        try:
            while failures < MOST_FAILURES:
                self._follow_changes()
                if self._changes.obstacle is not None:
                    if (request := self._queue.draw()) is None:
                        break
                    yield self._make_plainly(request, self._changes.obstacle)
                    continue
                began = time.perf_counter()
                pictures, why = self._take(seed)
                waited_s = time.perf_counter() - began
                if why is not None:
                    failures += 1
                    self._distrust_decoder(why, failures)
                    self._begin_again()
                    if (request := self._queue.draw()) is not None:
                        yield self._make_plainly(request, why)
                    continue
                if pictures is None:
                    break
                failures, request = 0, self._queue.under_way.popleft()
                if request.deep is not None:
                    yield self._make_plainly(request, f"{request.deep} has more than 8 bits of gray")
                    continue
                self.images += len(request.paths)
                yield self._hand_out(pictures, request)
                self._choose_decoder(waited_s)
            while (request := self._queue.draw()) is not None:  # only after DALI failed MOST_FAILURES times in a row
                yield self._make_plainly(request, f"DALI failed on {MOST_FAILURES} batches in a row")
            if self._queue.failed is not None:
                raise self._queue.failed
        finally:
            self._settle()
            self._watch.close()

    def _take(self, seed: int) -> tuple[torch.Tensor | None, str | None]:
        """Return the next batch's pictures, None at the end; and why DALI could not make them, None if it could."""
        try:
            if self._broken is not None:
                raise self._broken
            if self._pipeline is None:
                self._pipeline = self._start(seed)
            if not self._queue.under_way:
                self._schedule(self._machine.ahead)
            if self._pipeline.empty():
                return None, None
            stream = {} if self._device.type == "cpu" else {"cuda_stream": torch.cuda.current_stream(self._device)}
            with self._watch.limited(self._pipeline):
                (found,) = self._pipeline.outputs(**stream)
            pictures = torch.utils.dlpack.from_dlpack(found.as_tensor())
        except Exception as error:
            let_through(error)
            if self._watch.hung_s is not None:
                raise self._explain_hang(self._watch.hung_s) from None
            return None, describe_error(error)
        try:
            self._schedule(1)
        except Exception as error:  # concerns a later batch
            let_through(error)
            self._broken = error
        return pictures, None

    def _describe_wait(self, waited_s: float) -> str:
        paths = self._queue.under_way[0].paths if self._queue.under_way else ()
        return (
            f"no batch for {waited_s:.0f} s: DALI is making the batch of {', '.join(paths[:3])}"
            f"{' …' * (len(paths) > 3)}"
        )

    def _explain_hang(self, waited_s: float) -> FastLoopError:
        self._pipeline = None
        return FastLoopError(
            got=self._describe_wait(waited_s),
            why=f"training waits at most {tried_workers.LIMIT_S:.0f} s for a batch",
            do="see whether these files can be read (a pipe, a drive that does not answer); if they can, write"
            f" {self._turn_off}",
        )

    def _schedule(self, batches: int) -> None:
        """Let DALI make the next batches. They are drawn here, so that errors in user code do not pass through DALI."""
        self._queue.fill(batches)
        self._pipeline.schedule_run()  # an epoch's first call takes all batches to be made ahead

    def _start(self, seed: int) -> Any:
        if self._choice is not None and not self._starts and self._machine.decode == "mixed":
            try:
                self._check_room(in_training=False)
            except NotApplicable as why:
                self._give_up_decoder(str(why))
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        mixed = np.random.SeedSequence([seed % 2**63, rank, self._starts]).generate_state(1)[0]
        self._starts += 1
        return make_pipeline(
            self._changes.steps,
            self._machine,
            batch_size=self._batch_size,
            seed=int(mixed) >> 1,
            source=self._queue.feed,
        )

    def _settle(self) -> None:
        """Clean up after an epoch that ended or was left early: let DALI finish what is scheduled, and drop it."""
        pipeline, self._pipeline, self._broken = self._pipeline, None, None
        self._queue.drop_waiting()
        if pipeline is not None and self._keeps:
            try:
                while not pipeline.empty():
                    with self._watch.limited(pipeline):
                        pipeline.outputs()
                pipeline.schedule_run()  # lets it see the end of the data
                pipeline.reset()
                self._pipeline = pipeline
            except Exception as error:  # the next epoch starts a new pipeline
                let_through(error)
        self._queue.under_way.clear()

    def _follow_changes(self, *, begins: bool = False) -> None:
        """If the dataset's transforms were changed, make the next batches with the new ones."""
        if not self._changes.look(self._machine, begins=begins):
            return
        self._begin_again()
        if (why := self._changes.obstacle) is not None:
            self._why_plain = why if self._why_plain is None else f"{self._why_plain}; {why}"
            warnings.warn(f"fastloop: batches are loaded without DALI from now on: {why}", stacklevel=2)

    # -- the decoder ----------------------------------------------------------------------------------------------

    def _choose_decoder(self, waited_s: float) -> None:
        """Note a batch that was trained on. Change the decoder to try the other one, or back if that was not faster."""
        if self._choice is None or (decoder := self._choice.note(waited_s)) is None:
            return
        machine = self._machines[decoder]
        if decoder == self._choice.other:
            try:
                if decoder == "mixed":
                    self._check_room(in_training=True)
                check_pixels(self._dataset, self._changes.source, self._changes.steps, machine)
            except Exception as error:
                let_through(error)
                self._choice.refuse(decoder, str(error) if isinstance(error, NotApplicable) else describe_error(error))
                return
        self._machine = machine
        self._begin_again()
        if decoder == self._choice.first:
            importlib.import_module("nvidia.dali.backend").ReleaseUnusedMemory()

    def _distrust_decoder(self, why: str, failures: int) -> None:
        """Change the decoder if DALI fails with the one that was tried, or with the GPU's: at once in a trial, later
        twice in a row, since a single file may be to blame."""
        if self._choice is None:
            return
        is_other = self._machine.decode == self._choice.other
        in_trial = is_other and not self._choice.is_over
        if in_trial or (failures > 1 and (is_other or self._machine.decode == "mixed")):
            self._give_up_decoder(why)

    def _give_up_decoder(self, why: str) -> None:
        """Use the other decoder from now on, if its pictures are right."""
        assert self._choice is not None
        refused = self._machine.decode
        machine = next((each for name, each in self._machines.items() if name != refused), None)
        if machine is None:
            return
        try:
            check_pixels(self._dataset, self._changes.source, self._changes.steps, machine)
        except Exception as error:
            let_through(error)
            return
        self._choice.refuse(refused, why)
        self._machine = machine
        del self._machines[refused]

    def _check_room(self, *, in_training: bool) -> None:
        pictures = self._batch_size * (self.ahead + 1)
        check_room(self._device, self._changes.source, pictures, in_training=in_training)

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    # -- a batch --------------------------------------------------------------------------------------------------

    def _hand_out(self, pictures: torch.Tensor, request: BatchRequest) -> Any:
        if self._machine.layout == "HWC":
            pictures = pictures.permute(0, 3, 1, 2)
            if not self.wants_channels_last():
                pictures = pictures.contiguous()
        sizes = list(getattr(request.indices, "sizes", ()))
        if self._keeps_apart and len(sizes) > 1:
            parts = zip(torch.split(pictures, sizes), torch.split(request.labels, sizes), strict=True)
            return BatchWindow([image, label] for image, label in parts)
        return [pictures, request.labels]

    def _begin_again(self) -> None:
        """Drop the pipeline. Its unfinished batches go to the next one."""
        self._pipeline = self._broken = None
        self._queue.put_back()

    def _make_plainly(self, request: BatchRequest, why: str) -> Any:
        """Make a batch with the dataset itself, as without DALI.

        Raises:
            FastLoopError: the dataset cannot read a file either.
        """
        samples = []
        for index, path in zip(request.indices, request.paths, strict=True):
            try:
                samples.append(self._dataset[index][0])
            except Exception as error:
                raise FastLoopError(
                    got=f"{path}, sample {index}, which cannot be read: {describe(error)}",
                    why="it could not be read without DALI either",
                    do="repair the file, or take it out of the dataset",
                ) from error
        if self._why_plain is None:
            strangers = [path for path in request.paths if Path(path).suffix.lower() not in _READS]
            self._why_plain = f"{', '.join(strangers[:2] or request.paths[:1])}{' …' if not strangers else ''}: {why}"
            line = f"fastloop: DALI could not read a batch, which was loaded without it: {self._why_plain}"
            warnings.warn(line, stacklevel=2)
        self.plain_batches += 1
        pictures = default_collate(samples)
        if not isinstance(pictures, torch.Tensor) or pictures.ndim != 4:  # of a transform that was changed since
            return [pictures, request.labels]
        pictures = pictures.to(self._device)
        if self._machine.layout == "HWC":
            pictures = pictures.permute(0, 2, 3, 1).contiguous()
        return self._hand_out(pictures, request)

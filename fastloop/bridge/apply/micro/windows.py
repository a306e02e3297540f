"""Tracks which of the user's batches the current batch contains, if the loader merges accumulation windows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from fastloop.feeds.batch_tree import BatchWindow, CannotRegroup, count_rows
from fastloop.feeds.concatenation import concatenate
from fastloop.feeds.window_batches import WindowSampler


class Merged(NamedTuple):
    """The user's batches from which one batch was merged."""

    sizes: tuple[int, ...]
    """Samples of each of the user's batches."""
    full: int
    """Batches of a full window; an epoch's last one may be shorter."""


class StepCall(NamedTuple):
    """One call of training_step."""

    batch: Any
    rest: Sequence[Any]
    """The arguments after the batch."""
    window: Merged | None
    """What the batch was merged from; None if it was not."""

    @property
    def own_samples(self) -> int:
        """Samples in one of the user's own batches."""
        return (count_rows(self.batch) if self.window is None else self.window.sizes[0]) or 1


class MergedWindows:
    """Keeps the data that belongs to a merged batch on its way from the loader to training_step.

    A window whose batches the loader could not concatenate arrives as a `BatchWindow`. Lightning must get one batch:
    the concatenation made on the device, or else the window's last batch, while the others wait here.
    """

    def __init__(self) -> None:
        self.sampler: WindowSampler | None = None
        """The sampler of a merging loader; None if the loader yields the user's own batches."""
        self._apart: tuple[BatchWindow, str] | None = None
        """The last window that could not be concatenated, and why."""
        self._joined: tuple[Any, tuple[int, ...]] | None = None
        """The last window concatenated here, and the sizes of its batches."""
        self._read: tuple[int, Merged] | None = None
        """The number of the last batch given to `read`, and the result."""

    def show(self, batches: BatchWindow, refused: str | None) -> Any:
        """The batch that Lightning gets for a window of separate batches, which are on the device.

        Args:
            refused: why no window is merged in this run; None if they are.
        """
        reason = refused
        if reason is None:
            try:
                whole = concatenate(batches)
            except CannotRegroup as error:
                reason = str(error)
            else:
                self._joined = whole, tuple(count_rows(batch) or 0 for batch in batches)
                return whole
        self._apart = batches, reason
        return batches[-1]

    def find_whole(self, batch: Any) -> tuple[Any, float]:
        """The batch, or the whole window if Lightning sees only one batch of it; and its share of a full window, since
        an epoch's last one may be shorter."""
        found = self.find_apart(batch)
        share = 1.0 if self._read is None else len(self._read[1].sizes) / self._read[1].full
        return batch if found is None else found[0], share

    def find_apart(self, batch: Any) -> tuple[BatchWindow, str] | None:
        """The window that this batch stands for, and why it is not concatenated; None if it stands for itself."""
        return self._apart if self._apart is not None and self._apart[0][-1] is batch else None

    def convert(self, batch: Any, convert: Callable[[Any], Any]) -> Any:
        """Convert the batch that Lightning sees, and the other batches of its window."""
        if (apart := self.find_apart(batch)) is not None:
            self._apart = BatchWindow(map(convert, apart[0])), apart[1]
            return self._apart[0][-1]
        converted = convert(batch)
        if self._joined is not None and self._joined[0] is batch:
            self._joined = converted, self._joined[1]
        return converted

    def read(self, number: int, batch: Any) -> Merged | None:
        """Return what the batch was merged from, None if it was not; the same again if a closure repeats its batch.

        Args:
            number: the batch's number in the run.
        """
        if self.sampler is None:
            return None
        if self._read is None or self._read[0] != number:
            sizes = self.sampler.sizes.popleft()
            self._apart = self.find_apart(batch)
            if self._joined is not None and self._joined[0] is not batch:
                self._joined = None
            if self._joined is not None:
                sizes = self._joined[1]
            elif len(sizes) == 1:  # a collate function may have dropped samples
                sizes = (count_rows(batch) or sizes[0],)
            self._read = number, Merged(sizes, self.sampler.window)
        return self._read[1]

    def renumber(self, rest: Sequence[Any], place: int) -> Sequence[Any]:
        """The arguments after the batch, with the batch_idx that a batch of this window would have without us.

        Args:
            place: that batch's position in its window.
        """
        if self.sampler is None or not rest or not isinstance(rest[0], int):
            return rest
        return (rest[0] * self.sampler.window + place, *rest[1:])

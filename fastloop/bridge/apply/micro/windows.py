"""Which of the user's batches are in the batch at hand, where the loader merges accumulation windows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from fastloop.feeds.batch_tree import Window, samples
from fastloop.feeds.concatenation import CannotConcatenate, concatenate
from fastloop.feeds.window_batches import WindowSampler


class Merged(NamedTuple):
    """What one batch was merged from."""

    sizes: tuple[int, ...]
    """Samples of each of the user's batches."""
    full: int
    """Batches of a full window; an epoch's last one may be shorter."""


class MergedWindows:
    """Keeps what goes with a merged batch on its way from the loader to training_step.

    A window whose batches the loader could not concatenate comes as a `Window`. Lightning is to see one batch: their
    concatenation once they are on the device, or the last of them, while the others wait here.
    """

    def __init__(self) -> None:
        self.sampler: WindowSampler | None = None
        """Of the loader that merges; None: it hands out the user's own batches."""
        self._apart: tuple[Window, str] | None = None
        """The last window whose batches are not one batch, and why."""
        self._joined: tuple[Any, tuple[int, ...]] | None = None
        """The last one that was concatenated here, and the sizes of its batches."""
        self._read: tuple[int, Merged] | None = None
        """What `read` said last, and of which batch of the run."""

    def show(self, batches: Window, refused: str | None) -> Any:
        """What Lightning is to see of a window whose batches came apart, on the device.

        Args:
            refused: why no window is merged in this run, if so.
        """
        reason = refused
        if reason is None:
            try:
                whole = concatenate(batches)
            except CannotConcatenate as error:
                reason = str(error)
            else:
                self._joined = whole, tuple(samples(batch) or 0 for batch in batches)
                return whole
        self._apart = batches, reason
        return batches[-1]

    def find_whole(self, batch: Any) -> Any:
        """All batches of the window, where Lightning sees only one of them."""
        found = self.find_apart(batch)
        return batch if found is None else found[0]

    def find_apart(self, batch: Any) -> tuple[Window, str] | None:
        """That window, and why it is none to concatenate."""
        return self._apart if self._apart is not None and self._apart[0][-1] is batch else None

    def convert(self, batch: Any, convert: Callable[[Any], Any]) -> Any:
        """`convert` the batch that Lightning sees, and with it all that goes with it."""
        if (apart := self.find_apart(batch)) is not None:
            self._apart = Window(map(convert, apart[0])), apart[1]
            return self._apart[0][-1]
        converted = convert(batch)
        if self._joined is not None and self._joined[0] is batch:
            self._joined = converted, self._joined[1]
        return converted

    def read(self, number: int, batch: Any) -> Merged | None:
        """What the batch was merged from; the same again where a closure runs its batch again. None: it was not.

        Args:
            number: of the batch, counted over the run.
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
                sizes = (samples(batch) or sizes[0],)
            self._read = number, Merged(sizes, self.sampler.window)
        return self._read[1]

    def renumber(self, rest: Sequence[Any], place: int) -> Sequence[Any]:
        """The arguments after the batch, with the batch_idx that a batch of this window has without us.

        Args:
            place: of that batch in its window.
        """
        if self.sampler is None or not rest or not isinstance(rest[0], int):
            return rest
        return (rest[0] * self.sampler.window + place, *rest[1:])

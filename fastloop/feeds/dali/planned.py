"""The part of a plan that makes DALI load in place of a loader. Imports torch only when used."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from fastloop.feeds.dali.pictures import Where
from fastloop.records.images import ImageStep


@dataclass(frozen=True, kw_only=True)
class DaliEngine:
    """Lets DALI load in place of a loader."""

    steps: tuple[ImageStep, ...]
    decode: Where
    threads: int
    resize: Literal["cpu", "device"]
    batch_size: int
    """Most samples in a batch."""
    on_gpu: bool
    """Whether the batches end up on this rank's GPU."""
    keeps: bool
    """Whether DALI's threads stay alive between epochs."""
    turn_off: str
    """The configuration key that turns DALI off."""
    other: tuple[Where, int] | None = None
    """The decoder that may be tried in training, and its threads."""

    def _describe_machine(self, decode: Where, threads: int) -> Any:
        import torch

        from fastloop.feeds.dali.graph import DaliResources

        device_id = torch.cuda.current_device() if self.on_gpu else None
        return DaliResources(threads=threads, device_id=device_id, decode=decode, resize=self.resize)

    def check(self, loader: Any, say: Callable[[str], None]) -> Mapping[str, Any]:
        """Compare DALI's pictures with the dataset's own samples; return the evidence.

        Args:
            say: receives one line about the result.
        Raises:
            NotApplicable: they differ by more than rounding, or DALI cannot be started.
        """
        from fastloop.feeds.dali.pixels import try_pixels

        found = try_pixels(loader, self.steps, self._describe_machine(self.decode, self.threads))
        say(
            f"DALI compared with the dataset on {found.samples} samples, same crops and flips: pixel values differ by"
            f" {found.mean:.2f} of 255 levels on average, {found.largest:.0f} at most"
        )
        return {"checked_samples": found.samples, "mean_levels": found.mean, "largest_levels": found.largest}

    def make(self, loader: Any) -> Any:
        """Return the engine that makes the loader's batches."""
        from fastloop.feeds.dali.engine import DaliLoader

        return DaliLoader(
            loader,
            self.steps,
            self._describe_machine(self.decode, self.threads),
            batch_size=self.batch_size,
            turn_off=self.turn_off,
            keeps=self.keeps,
            other=None if self.other is None else self._describe_machine(*self.other),
        )

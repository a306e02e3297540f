"""The part of a plan that makes DALI load in place of a loader. Imports torch only when used."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from fastloop.errors import NotApplicable
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
    """The decoder to use if the first one does not work here, and its threads."""
    tries_other: bool = False
    """Whether the other is also tried in training, if that waits for pictures."""
    refused: list[Where] = field(default_factory=list, compare=False, repr=False, metadata={"json": None})
    """The decoder that `check` found not to work here."""

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

        self.refused.clear()
        chosen: dict[str, str] = {}
        try:
            found = try_pixels(loader, self.steps, self._describe_machine(self.decode, self.threads))
        except NotApplicable as why:
            if self.other is None or self.decode != "mixed":
                raise
            found = try_pixels(loader, self.steps, self._describe_machine(*self.other))
            say(f"DALI decodes on the CPU, because on the GPU {why}")
            self.refused.append(self.decode)
            chosen["decode_why"] = f"the GPU does not decode: {why}"
        say(
            f"DALI compared with the dataset on {found.samples} samples, same crops and flips: pixel values differ by"
            f" {found.mean:.2f} of 255 levels on average, {found.largest:.0f} at most"
        )
        levels = {"mean_levels": found.mean, "largest_levels": found.largest}
        return {"checked_samples": found.samples, **levels, **chosen}

    def make(self, loader: Any) -> Any:
        """Return the engine that makes the loader's batches."""
        from fastloop.feeds.dali.engine import DaliLoader

        decoders = [(self.decode, self.threads), *(() if self.other is None else (self.other,))]
        machines = [self._describe_machine(*each) for each in decoders if each[0] not in self.refused]
        return DaliLoader(
            loader,
            self.steps,
            machines[0],
            batch_size=self.batch_size,
            turn_off=self.turn_off,
            keeps=self.keeps,
            other=machines[1] if len(machines) > 1 else None,
            tries_other=self.tries_other,
        )

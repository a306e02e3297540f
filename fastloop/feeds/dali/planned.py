"""What a plan holds of DALI: by this it loads in a loader's place. Torch is imported once that is done."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from fastloop.feeds.dali.pictures import Where
from fastloop.records.images import ImageStep


@dataclass(frozen=True, kw_only=True)
class DaliEngine:
    """Lets DALI load in a loader's place."""

    steps: tuple[ImageStep, ...]
    decode: Where
    threads: int
    resize: Literal["cpu", "device"]
    batch_size: int
    """The most samples of a batch."""
    on_gpu: bool
    """The batches end on this rank's GPU."""
    keeps: bool
    """Its threads stay between epochs."""

    def _machine(self) -> Any:
        import torch

        from fastloop.feeds.dali.graph import Machine

        device_id = torch.cuda.current_device() if self.on_gpu else None
        return Machine(threads=self.threads, device_id=device_id, decode=self.decode, resize=self.resize)

    def check(self, loader: Any, say: Callable[[str], None]) -> Mapping[str, Any]:
        """Compare DALI's pictures with the dataset's own samples; gives evidence.

        Args:
            say: takes one line on what came of it.
        Raises:
            NotApplicable: they differ by more than rounding, or DALI cannot be started.
        """
        from fastloop.feeds.dali.engine import try_pixels

        found = try_pixels(loader, self.steps, self._machine())
        say(
            f"DALI's pictures beside the dataset's own, {found.samples} samples with the same crops and flips: values"
            f" deviate by {found.mean:.2f} of 255 levels on average, {found.largest:.0f} at most"
        )
        return {"checked_samples": found.samples, "mean_levels": found.mean, "largest_levels": found.largest}

    def make(self, loader: Any) -> Any:
        """What makes the loader's batches."""
        from fastloop.feeds.dali.engine import DaliLoader

        return DaliLoader(loader, self.steps, self._machine(), batch_size=self.batch_size, keeps=self.keeps)

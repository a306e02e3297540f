"""The loss of every optimizer step, kept without synchronization and in bounded memory."""

from __future__ import annotations

import torch

MOST_POINTS = 10_000
_CHUNK = 64


class LossLog:
    """Collects 0-d loss tensors on their device, 64 at a time, and copies them to the host once, at the end."""

    def __init__(self) -> None:
        self.every = 1
        """Optimizer steps between two kept points; doubles each time there are more than 10,000 points."""
        self._loose: list[torch.Tensor] = []
        self._chunks: list[torch.Tensor] = []
        self._step: list[torch.Tensor] = []
        self._steps = 0

    def add(self, loss: torch.Tensor | None, step_ends: bool, batches_per_step: float) -> None:
        """Add the loss of one batch, already divided by batches_per_step as Lightning does."""
        if loss is not None:
            self._step.append(loss)
        if not step_ends:
            return
        if self._step and self._steps % self.every == 0:
            # One batch is the common case and must cost nothing; a short last accumulation window is scaled to its own
            # mean.
            if len(self._step) == 1 == batches_per_step:
                self._loose.append(self._step[0])
            else:
                self._loose.append(torch.stack(self._step).float().mean() * batches_per_step)
            if len(self._loose) == _CHUNK:
                self._flush()
        self._step.clear()
        self._steps += 1

    def _flush(self) -> None:
        if self._loose:
            self._chunks.append(torch.stack(self._loose).float().flatten())  # a loss may have the shape [1]
            self._loose.clear()
        if sum(len(chunk) for chunk in self._chunks) > MOST_POINTS:
            self._chunks = [torch.cat(self._chunks)[::2].clone()]
            self.every *= 2

    def values(self) -> tuple[float, ...]:
        """All kept points, on the host (one synchronization)."""
        self._flush()
        return tuple(torch.cat(self._chunks).tolist()) if self._chunks else ()

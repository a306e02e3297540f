"""Watch a fit through the Trainer's profiler calls and one hook, and turn the marks into a Measurement."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from fastloop.config import WatchSettings
from fastloop.evidence.clock import Clock, Window
from fastloop.evidence.losses import LossLog
from fastloop.feeds.tree import samples
from fastloop.measurement import PARTS, Measurement

_NEXT = "[_TrainingEpochLoop].train_dataloader_next"


class _Nothing:
    """A context that does nothing, made once: the Trainer opens some twenty profiler contexts a step."""

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


_NOTHING = _Nothing()


class WatchingProfiler:
    """Stands before the Trainer's own profiler, notes the loader calls and hands everything on.

    Args:
        profiler: the Trainer's profiler; Lightning's pass-through one is not called, which saves its cost.
        asks: called when the loop asks for a batch; must not raise.
        gets: called when the loop has its batch; must not raise.
    """

    def __init__(self, profiler: Any, asks: Callable[[], None], gets: Callable[[], None]) -> None:
        passes = type(profiler).__name__ == "PassThroughProfiler"
        self.__dict__.update(profiler=profiler, _asks=asks, _gets=gets, _passes=passes)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["profiler"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.__dict__["profiler"], name, value)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # isinstance shall see the user's profiler
        return type(self.__dict__["profiler"])

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Nobody watches a copy of the Trainer: copies and pickles hold the user's profiler.
        return (_itself, (self.__dict__["profiler"],))

    def start(self, action_name: str) -> None:
        if action_name == _NEXT:
            self._asks()
        if not self._passes:
            self.profiler.start(action_name)

    def stop(self, action_name: str) -> None:
        if not self._passes:
            self.profiler.stop(action_name)
        if action_name == _NEXT:
            self._gets()

    def profile(self, action_name: str) -> Any:
        return _NOTHING if self._passes else self.profiler.profile(action_name)


def _itself(profiler: Any) -> Any:
    return profiler


class Watch:
    """Collects the marks of one fit on one rank. Issues no collective.

    Args:
        owed: batches asked of the loader's workers and not finished, or None where that cannot be read.
    """

    def __init__(self, device: torch.device, settings: WatchSettings, *, world_size: int = 1,
                 owed: Callable[[], int | None] = lambda: None) -> None:  # fmt: skip
        self.device, self.settings, self.world_size, self._owed = device, settings, world_size, owed
        self.clock = Clock(device, settings.warmup_steps)
        self.losses = LossLog()
        self._owed_at_start: int | None = None
        self._was_open = False

    def ask(self) -> None:
        """The loop asks for a batch."""
        self.clock.ask()
        if self.clock.open and not self._was_open:
            self._was_open = True
            self._owed_at_start = self._owed()

    def got(self) -> None:
        """The loop has its batch."""
        self.clock.got()

    def batch_end(self, loss: torch.Tensor | None, batch: Any, step_ends: bool, batches_per_step: int) -> None:
        """A batch is done; `loss` as Lightning divides it by the batches of a step."""
        self.losses.add(loss, step_ends, batches_per_step)
        self.clock.batch_done(samples(batch), step_ends)

    def finish(self, evidence: Mapping[str, Mapping[str, Any]]) -> Measurement:
        """Close the window and say what was seen; every number that could not be measured is None."""
        owed_at_end = self._owed() if self._was_open else None
        window = self.clock.close()
        common: dict[str, Any] = {
            "loss": self.losses.values(), "loss_every": self.losses.every, "peak_gib": self._peak_gib(),
            "world_size": self.world_size, "total_steps": self.clock.total_steps, "evidence": evidence,
            "warmup_steps": self.settings.warmup_steps, "device": self.device.type,
            "watch_us_per_step": cost_us(self.device) if self.clock.total_steps else None,
        }  # fmt: skip
        if window is None or window.steps == 0:
            return Measurement(**common)
        return Measurement(**common, **self._rates(window, owed_at_end))

    def _rates(self, window: Window, owed_at_end: int | None) -> dict[str, Any]:
        rate, drained = window.samples / window.wall_s, False
        if self._owed_at_start is not None and owed_at_end is not None and window.batches:
            # Batches that were made before the window and used in it are not the pipeline's work. The other way round,
            # a queue that filled up, the loader outran the training, whose rate is what it used.
            rate *= 1 - max(0, owed_at_end - self._owed_at_start) / window.batches
            drained = True
        step_ms = 1e3 * window.wall_s / window.steps
        deciles = _deciles(window.step_s)
        enough = window.batches >= 10 * self.clock.queued_batches or (drained and not self.clock.queued_batches)
        parts = {**dict.fromkeys(PARTS), "data_wait": 1e3 * window.data_wait_s / window.steps}
        return {
            "steps": window.steps, "wall_ms": 1e3 * window.wall_s, "parts_ms": parts,
            "samples_per_s": rate * self.world_size if window.samples else None,
            "step_ms": {"mean": step_ms, "median": 1e3 * statistics.median(window.step_s),
                        "p10": 1e3 * deciles[0], "p90": 1e3 * deciles[-1]},
            "lead_ms": None if window.lead_s is None else 1e3 * window.lead_s,
            "window_too_short": window.steps < 10 or not enough,
            "usd_per_million_samples": self._usd_per_million(rate),
            "global_batch": int(statistics.median(window.step_samples)) * self.world_size or None,
        }  # fmt: skip

    def _usd_per_million(self, samples_per_s_and_rank: float) -> float | None:
        price = self.settings.usd_per_gpu_hour
        if price is None or self.device.type != "cuda" or not samples_per_s_and_rank:
            return None
        return price * 1e6 / (3600 * samples_per_s_and_rank)  # ranks cancel: each has one GPU and its share of samples

    def _peak_gib(self) -> float | None:
        return torch.cuda.max_memory_allocated(self.device) / 2**30 if self.device.type == "cuda" else None


def _deciles(values: tuple[float, ...]) -> list[float]:
    return statistics.quantiles(values, n=10, method="inclusive") if len(values) > 1 else [values[0]] * 9


def cost_us(device: torch.device, steps: int = 300) -> float:
    """Microseconds of our own code per step, measured by making one step's marks on a watch of its own."""
    watch = Watch(device, WatchSettings(warmup_steps=0))
    loss, batch = torch.zeros((), device=device), [torch.zeros(1), torch.zeros(1)]
    begun = time.perf_counter()
    for _ in range(steps):
        watch.ask()
        watch.got()
        watch.batch_end(loss, batch, step_ends=True, batches_per_step=1)
    spent = time.perf_counter() - begun
    watch.clock.close()
    return spent / steps * 1e6

"""A run's position in its data: written into each checkpoint, and restored by the run that resumes it.

Nothing here waits for another rank: Lightning's own counters give the progress; the sampler's attributes and generators
give the order. Batches that workers and feeds have fetched ahead do not count.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastloop.feeds.lazy_loader import Bounded, clone, name_sampler
from fastloop.feeds.place.draws import Draws
from fastloop.feeds.place.kept_order import EpochPlace, KeptOrder
from fastloop.records.plan import say_count


class PlaceKeeper:
    """Keeps the position of one run in its data.

    Args:
        warn: receives a line that the user must not miss.
        say: receives a line about progress.
    """

    def __init__(self, *, warn: Callable[[str], None], say: Callable[[str], None]) -> None:
        self.warn, self.say = warn, say
        self.saved: EpochPlace | None = None
        """The position in the checkpoint that the run resumes."""
        self.resumed: dict[str, int] = {}
        """The epoch that the run continues, and the batches of it that were done; empty if it begins one."""
        self._is_taken = False
        self._trainer: Any = None
        self._kept: KeptOrder | None = None
        self._several = False

    def keep(self, trainer: Any, loader: Any, bounded: Bounded | None) -> Any:
        """Return a copy of a train loader that records its order; or the loader itself if it saves its own state, or if
        Lightning counts several loaders as one.

        Args:
            bounded: stands in for the loader's sampler, if it needs one.
        """
        if self._several or hasattr(loader, "state_dict"):
            return loader
        name = name_sampler(loader)
        inner = getattr(loader, name) if bounded is None else bounded
        draws = Draws(loader, trainer.world_size)
        self._trainer, self._kept = trainer, KeptOrder(inner, draws, take=self._take, warn=self.warn)
        return clone(loader, {name: self._kept})

    def give_up(self) -> None:
        """Give up because there are several train loaders, whose batches Lightning counts as one."""
        self._several = True
        if self._kept is not None:
            self._kept = self.saved = None
            self.warn("with several train loaders, a run resumed mid-epoch starts that epoch over")

    def let_go(self) -> None:
        """Drop all references to the finished fit: persistent workers hold the sampler, and the sampler holds us."""
        self._trainer = self._kept = None

    def _take(self) -> EpochPlace | None:
        """Return the saved position for the first epoch that is drawn, else None. Called before `train_start` if
        Lightning prefetches."""
        saved = None if self._is_taken else self.saved
        self._is_taken = True
        return saved

    # -- into a checkpoint --------------------------------------------------------------------------------------------

    def read(self, count_batches: Callable[[int], int]) -> EpochPlace | None:
        """Return the training's position; None if nothing was drawn yet, or the position cannot be kept.

        Args:
            count_batches: converts Lightning's count to batches of the user's loader.
        """
        if self._kept is None or self._kept.order is None:
            return None
        progress = self._trainer.fit_loop.epoch_loop.batch_progress
        # A batch counts once it is processed; ready and started already count it while it runs.
        done = progress.current.processed
        if _is_over(progress):
            return {"over": True, "batches": 0, "digest": 0, "order": self._kept.draws.read(between_epochs=True)}
        # A checkpoint does not contain the gradients of an unfinished accumulation window.
        batches = count_batches(done - done % self._trainer.accumulate_grad_batches)
        if (digest := self._kept.digest(batches)) is None:
            return None
        return {"over": False, "batches": batches, "digest": digest, "order": self._kept.order}

    # -- out of a checkpoint ------------------------------------------------------------------------------------------

    def train_start(self, window: int) -> int | None:
        """Align Lightning's restored counters with the saved position. They count batches of the user's loader.

        Returns how many of these batches the epoch has already done; None if the run begins an epoch, or if that is
        unknown.

        Args:
            window: how many of the user's batches Lightning will see as one.
        """
        if self._kept is None:
            return None
        loop = self._trainer.fit_loop
        progress = loop.epoch_loop.batch_progress
        if not loop.restarting:
            if self.saved is not None and not self.saved["over"]:  # stopped early: Lightning considers that epoch done
                self.saved = None
            return None
        if self.saved is None:
            if progress.current.processed and not _is_over(progress):
                done = say_count(progress.current.processed, "training batch")
                self.warn(
                    f"the checkpoint was written after {done} of its epoch, but does not record where its sampler was:"
                    " the sampler starts over, as without fastloop"
                )
            return None
        over, batches = self.saved["over"], self.saved["batches"]
        if over:
            batches = progress.current.processed
        if _find_resumed_at(loop.epoch_loop) != batches or (batches % window and not over):
            back = progress.current.processed - batches
            for part in (progress.total, progress.current):
                part.ready = part.started = part.processed = part.completed = part.processed - back
            if hasattr(loop.epoch_loop, "update_restart_stage"):
                loop.epoch_loop.update_restart_stage()
        if over:
            if _leave_epoch(loop):
                self.say("begins the next epoch; Lightning alone would run the end of the finished one once more")
            return None
        self.resumed = {"epoch": self._trainer.current_epoch, "batches": batches}
        self.say(
            f"continues after batch {batches} of epoch {self._trainer.current_epoch}, in the same order (ignore"
            " Lightning's warning that the dataloader is not resumable)"
        )
        return batches


def _is_over(progress: Any) -> bool:
    """Whether all batches of the epoch are done."""
    return bool(progress.is_last_batch) and progress.current.processed == progress.current.ready


def _find_resumed_at(loop: Any) -> int:
    """Return how many batches Lightning will consider done after it has processed its restored counters."""
    return int(loop.batch_progress.current.completed) + getattr(loop, "restarted_on_train_batch_end", False)


def _leave_epoch(loop: Any) -> bool:
    """Make a resumed run begin the next epoch if it would not do so by itself; returns whether that was needed. With
    ``max_steps``, Lightning otherwise continues in the finished epoch, trains one batch of a new iterator, and skips
    the rest (observed with 2.6.6)."""
    current = loop.epoch_progress.current
    if current.processed < current.ready or getattr(loop.epoch_loop, "restarted_on_train_batch_end", False):
        return False
    if current.completed < current.processed:
        loop.epoch_progress.increment_completed()
    loop.epoch_loop.batch_progress.reset_on_run()
    if hasattr(loop, "reset_restart_stage"):
        loop.reset_restart_stage()
    return True

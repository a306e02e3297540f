"""The place of a run in its data: written into each checkpoint, and taken up again by the run that resumes it.

Nothing here waits for another rank: Lightning's own counters say how far the training is, and the sampler's attributes
and generators which order it goes through. What workers and feeds have fetched ahead does not count.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastloop.feeds.lazy_loader import Bounded, clone, name_sampler
from fastloop.feeds.place.draws import Draws
from fastloop.feeds.place.kept_order import KeptOrder, Place


class PlaceKeeper:
    """Keeps the place of one run.

    Args:
        warn: takes one line for the user that must not be missed.
        say: takes one line on what is going on.
    """

    def __init__(self, *, warn: Callable[[str], None], say: Callable[[str], None]) -> None:
        self.warn, self.say = warn, say
        self.saved: Place | None = None
        """Of the checkpoint that is resumed."""
        self._is_taken = False
        self._trainer: Any = None
        self._kept: KeptOrder | None = None
        self._several = False

    def keep(self, trainer: Any, loader: Any, bounded: Bounded | None) -> Any:
        """A copy of a train loader whose order is kept; the loader itself where it keeps its own place, or several
        count as one.

        Args:
            bounded: stands in for its sampler, where one is needed.
        """
        if self._several or hasattr(loader, "state_dict"):
            return loader
        name = name_sampler(loader)
        inner = getattr(loader, name) if bounded is None else bounded
        draws = Draws(loader, trainer.world_size)
        self._trainer, self._kept = trainer, KeptOrder(inner, draws, take=self._take, warn=self.warn)
        return clone(loader, {name: self._kept})

    def give_up(self) -> None:
        """There are several train loaders, and Lightning counts the batches of all as one."""
        self._several = True
        if self._kept is not None:
            self._kept = self.saved = None
            self.warn("with several train loaders, a run resumed in mid-epoch starts that epoch over")

    def let_go(self) -> None:
        """The fit is over: hold nothing of it, for workers that are kept hold the sampler, and it us."""
        self._trainer = self._kept = None

    def _take(self) -> Place | None:
        """For the first epoch that is drawn: before `train_start` where Lightning looks ahead itself."""
        saved = None if self._is_taken else self.saved
        self._is_taken = True
        return saved

    # -- into a checkpoint --------------------------------------------------------------------------------------------

    def read(self, count_batches: Callable[[int], int]) -> Place | None:
        """Where the training stands; None where nothing was drawn yet, or the place cannot be kept.

        Args:
            count_batches: what Lightning counted, in batches of the user's loader.
        """
        if self._kept is None or self._kept.order is None:
            return None
        progress = self._trainer.fit_loop.epoch_loop.batch_progress
        # A batch counts once it is processed: ready and started do so while it is on its way.
        done = progress.current.processed
        if _is_over(progress):
            return {"over": True, "batches": 0, "digest": 0, "order": self._kept.draws.read(between_epochs=True)}
        # The gradients of an accumulation window that is not stepped yet are in no checkpoint.
        batches = count_batches(done - done % self._trainer.accumulate_grad_batches)
        if (digest := self._kept.digest(batches)) is None:
            return None
        return {"over": False, "batches": batches, "digest": digest, "order": self._kept.order}

    # -- out of a checkpoint ------------------------------------------------------------------------------------------

    def train_start(self, window: int) -> int | None:
        """Lightning's counters are restored, and count batches of the user's loader. Returns how many of them the run
        goes on behind; None where it begins an epoch, or does not know.

        Args:
            window: batches that are going to be one of Lightning's.
        """
        if self._kept is None:
            return None
        loop = self._trainer.fit_loop
        progress = loop.epoch_loop.batch_progress
        if not loop.restarting:
            if self.saved is not None and not self.saved["over"]:  # stopped early: Lightning takes that epoch for done
                self.saved = None
            return None
        if self.saved is None:
            if progress.current.processed and not _is_over(progress):
                self.warn(
                    "the checkpoint does not say where it stands in its epoch: the sampler starts anew, as without"
                    f" fastloop, behind {progress.current.processed} batches"
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
            _leave_epoch(loop)
            return None
        self.say(
            f"goes on behind batch {batches} of epoch {self._trainer.current_epoch}, in the order it had (Lightning's"
            " warning that the dataloader is not resumable does not hold)"
        )
        return batches


def _is_over(progress: Any) -> bool:
    """All batches of the epoch are done."""
    return bool(progress.is_last_batch) and progress.current.processed == progress.current.ready


def _find_resumed_at(loop: Any) -> int:
    """Batches that Lightning will take for done once it has looked at what it restored."""
    return int(loop.batch_progress.current.completed) + getattr(loop, "restarted_on_train_batch_end", False)


def _leave_epoch(loop: Any) -> None:
    """Let Lightning begin the next epoch, where it does not by itself. Under ``max_steps`` it goes on in the one that
    is over, trains one batch of a new iterator, and leaves the rest of it out (seen with 2.6.6)."""
    current = loop.epoch_progress.current
    if current.processed < current.ready or getattr(loop.epoch_loop, "restarted_on_train_batch_end", False):
        return
    if current.completed < current.processed:
        loop.epoch_progress.increment_completed()
    loop.epoch_loop.batch_progress.reset_on_run()
    if hasattr(loop, "reset_restart_stage"):
        loop.reset_restart_stage()

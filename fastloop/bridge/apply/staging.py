"""Prepares batches for training_step: the precision's input type, the user's hooks, the transfer, rungs' conversions.

Lightning does all of this when the batch is due. With a device feed, everything up to and including the transfer
happens ahead of time, and only the rest when the batch is due.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from fastloop.bridge.apply import read_facts
from fastloop.bridge.attributes import set_attribute
from fastloop.feeds.batch_tree import BatchWindow, InputsChannelsLast, StagedWindow, walk_storage
from fastloop.feeds.device_prefetcher import DeviceFeed, StatefulDeviceFeed
from fastloop.records.plan import Undo


class Staging:
    """Moves the batches of one run to the device, ahead of time if a feed requests it."""

    def __init__(self, trainer: Any, strategy: Any) -> None:
        self.trainer, self.strategy = trainer, strategy
        self.feeds: list[DeviceFeed] = []
        """The feeds in use now."""
        self.conversions: list[Callable[[Any], Any]] = []
        """Applied to each batch on the device, in training and evaluation."""
        self.to_floats: Callable[[Any], Any] | None = None
        """Converts to floats the train batches that reach the device as bytes."""
        self._pinned: Mapping[str, Any] | None = None
        """Pinned-tensor counts of the first train batch sent to the device; None before it."""
        self._seen: Counter[str] = Counter()
        self._before_transfer: Callable[..., Any] | None = None

    def feed(self, loader: Any, depth: int, **start: Any) -> DeviceFeed:
        """Wrap a train loader in a feed that stages its batches `depth` ahead."""
        kind: type[DeviceFeed] = DeviceFeed
        more: dict[str, Any] = {}
        if hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict"):
            kind, more = StatefulDeviceFeed, {"consumed": self._count_consumed}
        device = self.strategy.root_device
        feed = kind(loader, depth=depth, device=device, stage=self.stage, **start, **more)
        self.feeds.append(feed)
        return feed

    def retire_feeds(self) -> None:
        """From their next start on, make the feeds only pass batches through."""
        for feed in self.feeds:
            feed.retired = True
            self._seen.update(feed.seen)
        self.feeds.clear()

    def _count_consumed(self) -> int:
        return int(self.trainer.fit_loop.epoch_loop.batch_progress.current.ready)

    @property
    def is_ahead(self) -> bool:
        """Whether the batch Lightning is about to move came from a feed and is on the device already."""
        return bool(self.feeds) and self.trainer.state.stage == "train"

    def take_over_first_hook(self, is_ahead: Callable[[], bool]) -> Undo:
        """Make Lightning's call of on_before_batch_transfer skip batches on which `stage` has already run the hook, and
        windows, because the hook runs on each of their batches."""
        name = "on_before_batch_transfer"
        owner = read_facts.find_hook_owner(self.trainer, name)
        if self._before_transfer is not None or owner is None:
            return lambda: None
        self._before_transfer = original = getattr(owner, name)

        def pass_through(batch: Any, dataloader_idx: int) -> Any:
            return batch if isinstance(batch, BatchWindow) or is_ahead() else original(batch, dataloader_idx)

        put_back = set_attribute(owner, name, pass_through)

        def undo() -> None:
            put_back()
            self._before_transfer = None

        return undo

    def stage(self, batch: Any) -> Any:
        """Do ahead of time what Lightning does with a batch, up to and including the transfer."""
        if isinstance(batch, BatchWindow):
            return StagedWindow(self.stage(each) for each in batch)
        batch = self.strategy.precision_plugin.convert_input(batch)
        if self._before_transfer is not None:
            batch = self._before_transfer(batch, 0)
        owner = read_facts.find_hook_owner(self.trainer, "transfer_batch_to_device") or self.strategy.lightning_module
        return self._make_floats(owner.transfer_batch_to_device(batch, self.strategy.root_device, 0))

    def _make_floats(self, moved: Any) -> Any:
        if self.to_floats is None:
            return moved
        return self.strategy.precision_plugin.convert_input(self.to_floats(moved))

    def finish_window(self, batches: BatchWindow, move: Callable[[Any], Any], dataloader_idx: int) -> BatchWindow:
        """For each batch of a window, run the hook that Lightning would have run on it, then `finish`."""
        done = BatchWindow()
        for batch in batches:
            if self._before_transfer is not None and not isinstance(batches, StagedWindow):
                batch = self._before_transfer(batch, dataloader_idx)
            done.append(self.finish(batch, partial(move, batch), dataloader_idx))
        return done

    def finish(self, batch: Any, move: Callable[[], Any], dataloader_idx: int) -> Any:
        """Prepare a batch that is due: `move` it as Lightning does (if staged, only do the rest), then convert it."""
        if self.is_ahead:
            owner = read_facts.find_hook_owner(self.trainer, "on_after_batch_transfer")
            moved = batch if owner is None else owner.on_after_batch_transfer(batch, dataloader_idx)
        else:
            self.look_for_pinned(batch)
            moved = move()
            if self.trainer.state.stage == "train":
                moved = self._make_floats(moved)
        return self.convert(moved)

    def convert(self, batch: Any) -> Any:
        """Apply the current conversions to a batch on the device."""
        for convert in self.conversions:
            batch = convert(batch)
        return batch

    def wants_channels_last(self) -> bool:
        """Whether image batches are converted to channels-last, so that a loader may deliver them in that order."""
        return any(isinstance(convert, InputsChannelsLast) for convert in self.conversions)

    # -- evidence -------------------------------------------------------------------------------------------------

    def look_for_pinned(self, batch: Any) -> None:
        """Count the pinned tensors of the first train batch."""
        if self._pinned is None and self.trainer.state.stage == "train":
            self._pinned = {}
            if torch.cuda.is_available():
                found = [tensor.is_pinned() for tensor in walk_storage(batch) if tensor.device.type == "cpu"]
                self._pinned = {"tensors": len(found), "pinned_tensors": sum(found), "batch_type": type(batch).__name__}

    def count_pinned(self) -> Mapping[str, Any]:
        """Tensors per batch and how many were pinned: the average over a feed's batches, else the first batch."""
        seen = self._count_fed()
        if not seen["batches"]:
            return self._pinned or {}
        return {
            "tensors": math.ceil(seen["tensors"] / seen["batches"]),
            "batch_type": "loader batch",
            "pinned_tensors": math.ceil(seen["pinned_tensors"] / seen["batches"]),
        }

    def count_ahead(self) -> Mapping[str, Any]:
        """Count the batches from feeds, those that were ready before they were requested, and the bytes."""
        seen = self._count_fed()
        return {key: seen[key] for key in ("batches", "ahead_batches", "copied_bytes")}

    def _count_fed(self) -> Counter[str]:
        return sum((Counter(feed.seen) for feed in self.feeds), start=Counter(self._seen))

"""The train loaders of a run: changed copies for the Trainer, and what counts batches kept right."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader

from fastloop.bridge import live, survey
from fastloop.bridge.merge import Merge
from fastloop.errors import NotApplicable
from fastloop.evidence import queue
from fastloop.feeds.device import DeviceFeed, StatefulDeviceFeed
from fastloop.feeds.loader import LazyLoader, clone
from fastloop.feeds.tree import tensors
from fastloop.feeds.windows import WindowSampler
from fastloop.records import Facts, Plan

Undo = Callable[[str, Callable[[], None]], None]


class TrainLoaders:
    """Changes train loaders as they come (several, and again on reload) and remembers what the user gave.

    Args:
        undo: takes a rung's name and what puts its change back.
    """

    def __init__(self, trainer: Any, strategy: Any, *, undo: Undo) -> None:
        self.trainer, self.strategy, self._undo = trainer, strategy, undo
        self.feeds: list[DeviceFeed] = []
        self._merge: Merge | None = None
        self._originals: dict[int, tuple[Any, Any]] = {}
        self._pinned: dict[str, Any] = {}
        self._started = False
        self._leaves = 0
        undo("loaders", self._give_back)

    @property
    def windows(self) -> WindowSampler | None:
        return self._merge.windows if self._merge else None

    @property
    def staged(self) -> bool:
        """Whether the batch Lightning is about to move came from a feed, on the device already."""
        return bool(self.feeds) and self.trainer.state.stage == "train"

    def original(self, loader: Any) -> Any:
        """The loader as it was before we changed it, if it is one of ours (a CombinedLoader keeps what we put in)."""
        return self._originals.get(id(loader), (None, loader))[1]

    def change(self, loader: Any, plan: Plan, facts: Facts) -> Any:
        """The loader with the planned changes; the user's object stays as it is."""
        loader = self.original(loader)
        self._leaves += 1
        if self._leaves > 1 and not self._started and self._merge is not None:
            self._merge.give_up()
            self._merge = None
            raise NotApplicable("several train loaders cannot be merged into one window")
        settings = {key.removeprefix("loader."): value for key, value in plan.wants.items()
                    if key.startswith("loader.") and key != "loader.window"}  # fmt: skip
        if (window := plan.wants.get("loader.window")) is not None:
            settings["batch_sampler"] = self._window(loader, window)
        changed = clone(loader, settings) if settings else loader
        if (depth := plan.wants.get("feed.depth")) is not None:
            changed = self._feed(changed, depth, facts)
        elif facts.resuming and settings.get("num_workers"):
            changed = LazyLoader(changed)
        if changed is not loader:
            self._originals[id(changed)] = (changed, loader)
        return changed

    def _window(self, loader: DataLoader[Any], window: int) -> WindowSampler:
        if self._merge is None:
            self._merge = Merge(self.trainer, window, undo=self._undo)
        return self._merge.sampler(loader)

    def train_start(self) -> None:
        """Optimizers, schedulers and restored counters are there."""
        self._started = True
        if self._merge is not None:
            self._merge.train_start()

    def clean_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Write counters of batches as a run without us would."""
        if self._merge is not None:
            self._merge.to_batches(checkpoint)

    # -- the feed -------------------------------------------------------------------------------------------------

    def _feed(self, loader: Any, depth: int, facts: Facts) -> Any:
        if facts.transfer_hooks and self._leaves > 1:
            raise NotApplicable("several train loaders with transfer hooks of your own: the hooks expect one batch")
        device = self.strategy.root_device
        feed: DeviceFeed
        if hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict"):
            feed = StatefulDeviceFeed(loader, depth=depth, device=device, stage=self._stage, consumed=self._consumed)
        else:
            feed = DeviceFeed(loader, depth=depth, device=device, stage=self._stage)
        if (owner := survey.hook_owner(self.trainer, "on_before_batch_transfer")) is not None:
            self._skip_hook_for_staged(owner)
        self.feeds.append(feed)
        return feed

    def _consumed(self) -> int:
        return int(self.trainer.fit_loop.epoch_loop.batch_progress.current.ready)

    def _stage(self, batch: Any) -> Any:
        """What Lightning does with a batch up to and with the transfer, ahead of time: each user hook once, in order."""
        batch = self.strategy.precision_plugin.convert_input(batch)
        before = survey.hook_owner(self.trainer, "on_before_batch_transfer")
        if before is not None:
            batch = type(before).on_before_batch_transfer(before, batch, 0)
        owner = survey.hook_owner(self.trainer, "transfer_batch_to_device") or self.strategy.lightning_module
        return owner.transfer_batch_to_device(batch, self.strategy.root_device, 0)

    def after_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """The user's on_after_batch_transfer, at its usual moment."""
        owner = survey.hook_owner(self.trainer, "on_after_batch_transfer")
        return batch if owner is None else owner.on_after_batch_transfer(batch, dataloader_idx)

    def _skip_hook_for_staged(self, owner: Any) -> None:
        """Lightning calls on_before_batch_transfer itself; for batches that had it, hand them through."""
        if "on_before_batch_transfer" in vars(owner):
            return
        original = owner.on_before_batch_transfer

        def on_before_batch_transfer(batch: Any, dataloader_idx: int) -> Any:
            return batch if self.staged else original(batch, dataloader_idx)

        owner.on_before_batch_transfer = on_before_batch_transfer
        self._undo("prefetch", lambda: vars(owner).pop("on_before_batch_transfer", None) and None)

    # -- evidence -------------------------------------------------------------------------------------------------

    def look_at(self, batch: Any) -> None:
        """Count the pinned tensors of the first batch that leaves for the device."""
        if not self._pinned and self.trainer.state.stage == "train":
            found = [tensor.is_pinned() for tensor in tensors(batch) if tensor.device.type == "cpu"]
            if torch.cuda.is_available():
                self._pinned = {"tensors": len(found), "pinned_tensors": sum(found), "batch_type": type(batch).__name__}

    def probes(self) -> list[tuple[str, Callable[[], Mapping[str, Any]]]]:
        """What the loaders can show: living workers, pinned tensors, batches copied ahead."""
        return [("workers", self._workers), ("pin", self._pin), ("prefetch", self._ahead)]

    def _workers(self) -> Mapping[str, Any]:
        counts = [queue.live_workers(iterator) for iterator in live.iterators(self.trainer)]
        known = [count for count in counts if count is not None]
        return {"live_workers": max(known) if known else None}

    def _pin(self) -> Mapping[str, Any]:
        if not self.feeds:
            return self._pinned
        seen, batches = self.feeds[0].seen, max(1, self.feeds[0].seen["batches"])
        return {"tensors": math.ceil(seen["tensors"] / batches), "batch_type": "batch",
                "pinned_tensors": math.ceil(seen["pinned_tensors"] / batches)}  # fmt: skip

    def _ahead(self) -> Mapping[str, Any]:
        return {key: sum(feed.seen[key] for feed in self.feeds) for key in ("batches", "ahead_batches", "copied_bytes")}

    def _give_back(self) -> None:
        """Put the user's loaders back into a CombinedLoader of theirs, which Lightning filled with ours."""
        combined = getattr(self.trainer.fit_loop, "_combined_loader", None)
        if combined is not None and any(id(loader) in self._originals for loader in combined.flattened):
            combined.flattened = [self.original(loader) for loader in combined.flattened]

"""The train loaders of a run: changed copies for the Trainer, and what counts batches kept right."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sized
from typing import Any

import torch
from torch.utils.data import DataLoader
from torch.utils.data.sampler import BatchSampler

from fastloop.bridge import live, survey
from fastloop.bridge.merge import Merge
from fastloop.evidence import queue
from fastloop.feeds.bounded import bounded
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
        give_up: takes the name of a planned rung that turns out not to apply, and the reason.
    """

    def __init__(self, trainer: Any, strategy: Any, *, undo: Undo, give_up: Callable[[str, str], None]) -> None:
        self.trainer, self.strategy, self._undo, self._give_up = trainer, strategy, undo, give_up
        self.feeds: list[DeviceFeed] = []
        """The feeds in use now."""
        self._merge: Merge | None = None
        self._originals: dict[int, tuple[Any, Any]] = {}
        self._before_reload: dict[int, tuple[Any, Any]] = {}
        self._before_transfer: Callable[..., Any] | None = None
        self._seen: Counter[str] = Counter()
        self._pinned: dict[str, Any] | None = None
        self._most_workers: int | None = None
        self._leaves, self._epoch = 0, -1
        self._plain_sizes: tuple[int, int] | None = None
        undo("loaders", self._give_back)

    @property
    def windows(self) -> WindowSampler | None:
        return self._merge.windows if self._merge else None

    @property
    def batch_sizes(self) -> tuple[int, int] | None:
        """Samples of every batch but an epoch's last one, and of a short last one; None where that is not known."""
        return self._plain_sizes if self._leaves == 1 and self._merge is None else None

    @property
    def staged(self) -> bool:
        """Whether the batch Lightning is about to move came from a feed, on the device already."""
        return bool(self.feeds) and self.trainer.state.stage == "train"

    def original(self, loader: Any) -> Any:
        """The loader as it was before we changed it, if it is one of ours (a CombinedLoader keeps what we put in)."""
        known = self._originals.get(id(loader)) or self._before_reload.get(id(loader))
        return loader if known is None else known[1]

    def change(self, loader: Any, plan: Plan, facts: Facts) -> Any:
        """The loader with the planned changes; the user's object stays as it is."""
        self._count_leaf()
        if isinstance(loader, LazyLoader) and self.original(loader) is not loader:
            loader.take_back()
        loader = self.original(loader)
        self._plain_sizes = _plain_sizes(getattr(loader, "batch_sampler", None))
        if self._leaves > 1:
            self._keep_apart(facts)
        settings = {key.removeprefix("loader."): value for key, value in plan.wants.items()
                    if key.startswith("loader.") and key != "loader.window"}  # fmt: skip
        if (window := plan.wants.get("loader.window")) is not None and self._leaves == 1:
            settings["batch_sampler"] = self._window(loader, window)
        elif (settings.get("num_workers") or "feed.depth" in plan.wants) and \
                (stand_in := bounded(loader)) is not None:  # fmt: skip
            settings["batch_sampler"] = stand_in
        changed = clone(loader, settings) if settings else loader
        keeps_iterator = bool(getattr(loader, "persistent_workers", False))
        if (depth := plan.wants.get("feed.depth")) is not None and not (self._leaves > 1 and facts.transfer_hooks):
            changed = self._feed(changed, depth, keeps_iterator)
        elif settings.get("num_workers"):
            changed = LazyLoader(changed, keeps_iterator=keeps_iterator)
        if changed is not loader:
            self._originals[id(changed)] = (changed, loader)
        return changed

    def _count_leaf(self) -> None:
        """Lightning asks loader by loader, and for all of them again when an epoch reloads them."""
        if self.trainer.current_epoch != self._epoch:
            self._epoch, self._leaves = self.trainer.current_epoch, 0
            self._before_reload, self._originals = self._originals, {}
            self._retire_feeds()
        self._leaves += 1

    def _keep_apart(self, facts: Facts) -> None:
        """Give up what takes one loader only, now that there is another."""
        if self._merge is not None:
            self._merge.give_up()
            self._merge = None
            self._give_up("batch", "several train loaders cannot be merged into one window")
        if self.feeds and facts.transfer_hooks:
            self._retire_feeds()
            self._give_up("prefetch", "several train loaders with transfer hooks of your own: the hooks expect the"
                                      " batches of all loaders at once")  # fmt: skip

    def _window(self, loader: DataLoader[Any], window: int) -> WindowSampler:
        if self._merge is None:
            self._merge = Merge(self.trainer, window, undo=self._undo)
        return self._merge.sampler(loader)

    def train_start(self) -> None:
        """Optimizers, schedulers and restored counters are there."""
        if self._merge is not None:
            self._merge.train_start()

    def clean_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Write counters of batches as a run without us would."""
        if self._merge is not None:
            self._merge.to_batches(checkpoint)

    # -- the feed -------------------------------------------------------------------------------------------------

    def _feed(self, loader: Any, depth: int, keeps_iterator: bool) -> Any:
        settings: dict[str, Any] = {"depth": depth, "device": self.strategy.root_device, "stage": self._stage,
                                    "keeps_iterator": keeps_iterator}  # fmt: skip
        if hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict"):
            feed: DeviceFeed = StatefulDeviceFeed(loader, consumed=self._consumed, **settings)
        else:
            feed = DeviceFeed(loader, **settings)
        if (owner := survey.hook_owner(self.trainer, "on_before_batch_transfer")) is not None:
            self._skip_hook_for_staged(owner)
        self.feeds.append(feed)
        return feed

    def _retire_feeds(self) -> None:
        for feed in self.feeds:
            feed.retired = True
            self._seen.update(feed.seen)
        self.feeds.clear()

    def _consumed(self) -> int:
        return int(self.trainer.fit_loop.epoch_loop.batch_progress.current.ready)

    def _stage(self, batch: Any) -> Any:
        """What Lightning does with a batch up to and with the transfer, but ahead of time."""
        batch = self.strategy.precision_plugin.convert_input(batch)
        if self._before_transfer is not None:
            batch = self._before_transfer(batch, 0)
        owner = survey.hook_owner(self.trainer, "transfer_batch_to_device") or self.strategy.lightning_module
        return owner.transfer_batch_to_device(batch, self.strategy.root_device, 0)

    def after_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """The user's on_after_batch_transfer, at its usual moment."""
        owner = survey.hook_owner(self.trainer, "on_after_batch_transfer")
        return batch if owner is None else owner.on_after_batch_transfer(batch, dataloader_idx)

    def _skip_hook_for_staged(self, owner: Any) -> None:
        """Lightning calls on_before_batch_transfer itself; for batches that had it, hand them through."""
        if self._before_transfer is not None:
            return
        name = "on_before_batch_transfer"
        own = vars(owner).get(name)
        self._before_transfer = original = getattr(owner, name)

        def on_before_batch_transfer(batch: Any, dataloader_idx: int) -> Any:
            return batch if self.staged else original(batch, dataloader_idx)

        def undo() -> None:
            if own is not None:
                setattr(owner, name, own)
            else:
                vars(owner).pop(name, None)

        setattr(owner, name, on_before_batch_transfer)
        self._undo("prefetch", undo)

    # -- evidence -------------------------------------------------------------------------------------------------

    def look_at(self, batch: Any) -> None:
        """Count the pinned tensors of the first batch that leaves for the device."""
        if self._pinned is None and self.trainer.state.stage == "train":
            self._pinned = {}
            if torch.cuda.is_available():
                found = [tensor.is_pinned() for tensor in tensors(batch) if tensor.device.type == "cpu"]
                self._pinned = {"tensors": len(found), "pinned_tensors": sum(found), "batch_type": type(batch).__name__}

    def probes(self) -> list[tuple[str, Callable[[], Mapping[str, Any]]]]:
        """What the loaders can show: living workers, pinned tensors, batches copied ahead."""
        return [("workers", self._workers), ("pin", self._pin), ("prefetch", self._ahead)]

    def _workers(self) -> Mapping[str, Any]:
        """The most workers seen alive: they end with an epoch's last batch, which a feed fetches early."""
        counts = [self._most_workers, *(queue.live_workers(iterator) for iterator in live.iterators(self.trainer))]
        self._most_workers = max((count for count in counts if count is not None), default=None)
        return {"live_workers": self._most_workers}

    def _fed(self) -> Counter[str]:
        return sum((Counter(feed.seen) for feed in self.feeds), start=Counter(self._seen))

    def _pin(self) -> Mapping[str, Any]:
        seen = self._fed()
        if not seen["batches"]:
            return self._pinned or {}
        return {"tensors": math.ceil(seen["tensors"] / seen["batches"]), "batch_type": "batch",
                "pinned_tensors": math.ceil(seen["pinned_tensors"] / seen["batches"])}  # fmt: skip

    def _ahead(self) -> Mapping[str, Any]:
        seen = self._fed()
        return {key: seen[key] for key in ("batches", "ahead_batches", "copied_bytes")}

    def _give_back(self) -> None:
        """Put the user's loaders back into a CombinedLoader of theirs, which Lightning filled with ours."""
        combined = getattr(self.trainer.fit_loop, "_combined_loader", None)
        if combined is not None and any(id(loader) in self._originals for loader in combined.flattened):
            combined.flattened = [self.original(loader) for loader in combined.flattened]


def _plain_sizes(sampler: Any) -> tuple[int, int] | None:
    """Sizes of the full and of the short last batch, where torch's own batch sampler makes them."""
    if type(sampler) is not BatchSampler or not isinstance(sampler.sampler, Sized):
        return None
    short = 0 if sampler.drop_last else len(sampler.sampler) % sampler.batch_size
    return sampler.batch_size, short or sampler.batch_size

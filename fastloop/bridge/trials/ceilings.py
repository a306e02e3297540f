"""Trainings with one cost removed, to see how fast the rest is. For disposable processes only: nothing is undone.

``replayed``     repeats a few batches from host memory that were loaded before the first step
``resident``     the same on the device: no loader and no copy
``no_exchange``  as ``replayed``, without the gradient exchange. Compare it with ``replayed``: compared with the plain
                 run it would also save the wait for ranks whose data comes later

Loops, rungs, batch sizes and steps are those of the configuration; the trained model is worthless. Batches come from
the loader as the rungs changed it, so they are pinned, merged and prefetched as in the real training.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback

from fastloop.bridge.apply import read_facts
from fastloop.bridge.apply.loaders import TrainLoaders
from fastloop.bridge.apply.staging import Staging
from fastloop.bridge.fit import training
from fastloop.bridge.fit.callback import FastLoop
from fastloop.bridge.trials.heartbeat import drop_other_hooks
from fastloop.bridge.trials.no_checkpoints import prepare_trial
from fastloop.bridge.trials.sample_ledger import Ledger
from fastloop.config.loading import Config
from fastloop.errors import FastLoopError
from fastloop.evidence import loader_queue, machine
from fastloop.feeds.batch_tree import count_samples, map_tensors, walk_storage
from fastloop.feeds.device_prefetcher import DeviceFeed
from fastloop.feeds.lazy_loader import LazyLoader, StandIn

FEWEST, MOST = 2, 8
"""Batches to replay. A single one would stay in the processor's caches."""
LOAD_S = 20.0
"""After this time, loading stops as soon as there are `FEWEST` batches."""
MEMORY_SHARE = 1 / 32
"""Share of the host's memory that these batches may take, over all ranks of a machine."""


def train(
    config: Config,
    out: Path,
    variation: str,
    *,
    beat: Path | None = None,
    hunt_syncs: bool = False,
    ledger: bool = False,
    further_steps: int = 0,
    unsaved: Path | None = None,
) -> FastLoop:
    """Run one training as configured, or with one cost removed. Checkpoint files outside of `out` are left alone.

    Args:
        variation: the cost to remove, or ``as_it_is``.
        beat: the file that gets the step, see `heartbeat.py`.
        ledger: record which samples each optimizer step used, see `sample_ledger.py`.
        further_steps: steps beyond the configured number; the files still contain the original configuration.
        unsaved: a file created as a sign that checkpoint files were left alone, see `no_checkpoints.py`.

    Raises:
        FastLoopError: as in `training.train`, and if this training has no such cost or it cannot be removed.
    """

    def prepare(trainer: Any, loop: FastLoop) -> None:
        # The warning is about the trial's own files, which are in the directory before the logger writes there.
        warnings.filterwarnings("ignore", message=".*Experiment logs directory")
        loop.hunt_syncs, loop.in_trial = hunt_syncs, True
        trainer.fit_loop.epoch_loop.max_steps += further_steps
        prepare_trial(trainer, beat, inside=out, marker=unsaved)
        remove_cost(trainer, variation)
        if ledger:
            Ledger.into(trainer, out)

    return training.train(config, out, prepare=prepare)


def remove_cost(trainer: Any, variation: str) -> None:
    """Remove the cost of this ceiling from a Trainer's next fit; ``as_it_is`` changes nothing."""
    if variation in ("replayed", "resident", "no_exchange"):
        replay(trainer, on_device=variation == "resident")
    if variation == "no_exchange":
        trainer.callbacks.append(NoExchange())


def replay(
    trainer: Any,
    *,
    on_device: bool = False,
    change: Callable[[list[Any]], list[Any]] | None = None,
    count: Callable[[], int] | None = None,
) -> None:
    """Let a Trainer's next fit train on replayed batches.

    Args:
        change: changes the batches before they are replayed.
        count: returns their number, called when the loader exists; None: a few, as memory and time allow.
    """
    trainer.strategy.process_dataloader = _Substitution(trainer, on_device, change, count)


class Replay(StandIn):
    """Replaces a loader: yields as many batches per epoch, but always the same few.

    Args:
        inner: the loader that the batches came from; it provides all other attributes.
        given: the loader that the Trainer was given, for a reload.
        begin: called at the start of each epoch.
        each: called with a batch's number before it is yielded.
    """

    num_workers = 0
    prefetch_factor = None

    def __init__(
        self,
        inner: Any,
        batches: list[Any],
        *,
        given: Any,
        begin: Callable[[], None] = lambda: None,
        each: Callable[[int], Any] = bool,
    ) -> None:
        self.inner, self.batches, self.given, self._begin, self._each = inner, batches, given, begin, each

    def __iter__(self) -> Iterator[Any]:
        self._begin()
        length = loader_queue.count_batches(self.inner)
        for number in itertools.count() if length is None else range(length):
            self._each(number % len(self.batches))
            yield _copy_containers(self.batches[number % len(self.batches)])


class NoExchange(Callback):
    """Makes DDP never synchronize, as with ``no_sync()`` for every backward. Buffers are then not broadcast either.

    Source: torch/nn/parallel/distributed.py, ``require_backward_grad_sync``.
    """

    def __init__(self) -> None:
        drop_other_hooks(self)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        model = trainer.strategy.model
        if trainer.world_size < 2 or not isinstance(model, torch.nn.parallel.DistributedDataParallel):
            raise FastLoopError(
                got=f"{trainer.world_size} ranks of {type(trainer.strategy).__name__}",
                why="there is no DDP exchange to leave out",
                do="measure this ceiling with DDP and two or more devices",
            )
        model.require_backward_grad_sync = False


@dataclasses.dataclass
class _Substitution:
    """Replaces the strategy's ``process_dataloader``. For the fields see `replay`."""

    trainer: Any
    on_device: bool
    change: Callable[[list[Any]], list[Any]] | None
    count: Callable[[], int] | None

    def __post_init__(self) -> None:
        self._kept: dict[int, tuple[list[Any], list[Any]]] = {}
        """Batches and windows by the loader's number, so that a reload loads nothing again."""
        self._epoch, self._leaf = -1, -1
        self._staging = Staging(self.trainer, self.trainer.strategy)

    def __call__(self, dataloader: Any) -> Any:
        strategy = self.trainer.strategy
        given = dataloader.given if isinstance(dataloader, Replay) else dataloader
        # Look up the class now: FastLoop gives the strategy another one in its setup.
        loader = type(strategy).process_dataloader(strategy, given)
        if self.trainer.state.stage != "train":
            return loader
        if self.trainer.current_epoch != self._epoch:
            self._epoch, self._leaf = self.trainer.current_epoch, -1
        self._leaf += 1
        return self._substitute(loader, given)

    def _substitute(self, loader: Any, given: Any) -> Any:
        feed = loader if isinstance(loader, DeviceFeed) else None
        source = loader
        if isinstance(loader, LazyLoader) and (loader.engine is None or self.count is not None):
            source = loader.inner  # a comparison wants the user's own samples, a ceiling what an engine delivers
        strategy = self.trainer.strategy
        changed: TrainLoaders | None = getattr(getattr(strategy, "fastloop", None), "loaders", None)
        sampler = None if changed is None else changed.windows  # of merged accumulation windows, if there are any
        if self._leaf not in self._kept:
            if self.count is None:
                batches = _load(source, self._limit_kept)
            else:
                batches = _take_first(source, self.count())
                if changed is not None:  # arms differ in what they leave to the device; each step must get the same
                    batches = [_finish(changed, batch) for batch in batches]
            sizes = list(sampler.sizes)[: len(batches)] if sampler is not None else []
            if self.change is not None:
                batches = self.change(batches)
            if self.on_device:
                batches = [self._stage(batch, feed) for batch in batches[:FEWEST]]
                if strategy.root_device.type == "cuda":
                    torch.cuda.synchronize(strategy.root_device)
            self._kept[self._leaf] = batches, sizes
        batches, sizes = self._kept[self._leaf]
        if not batches:
            return loader  # the training will report it
        hooks: dict[str, Any] = {}
        if sampler is not None:  # micro-batches need the sizes from which each merged batch was made
            hooks = {"begin": sampler.sizes.clear, "each": lambda number: sampler.sizes.append(sizes[number])}
        stands_in = Replay(source, batches, given=given, **hooks)
        if feed is None or self.on_device:
            return stands_in
        feed.inner = stands_in
        return feed

    def _limit_kept(self, batch: Any) -> int:
        """Return how many batches of this size may be kept."""
        room = (machine.read_memory_bytes() or 2**32) * MEMORY_SHARE / max(1, self.trainer.num_devices)
        size = sum(tensor.nbytes for tensor in walk_storage(batch))
        return max(FEWEST, min(MOST, int(room // max(1, size))))

    # -- on the device --------------------------------------------------------------------------------------------

    def _stage(self, batch: Any, feed: DeviceFeed | None) -> Any:
        """Transfer a batch to the device. The user's hook after the transfer still runs at every step."""
        trainer = self.trainer
        if feed is not None:
            return feed.stage(batch)
        hooks = ("on_before_batch_transfer", "transfer_batch_to_device")
        if self._leaf > 0 and any(read_facts.find_hook_owner(trainer, hook) is not None for hook in hooks):
            raise FastLoopError(
                got="several train loaders with transfer hooks",
                do="see the ceiling `replayed`",
                why="the hooks expect the batches of all loaders at once",
            )
        self._staging.take_over_first_hook(lambda: trainer.state.stage == "train")
        return self._staging.stage(batch)


def _finish(changed: TrainLoaders, batch: Any) -> Any:
    """Convert a batch's pictures to floats, as the user's own loader does, if a rung leaves that to the device."""
    return batch if changed.staging.to_floats is None else changed.staging.to_floats(batch)


def _load(source: Any, most: Callable[[Any], int]) -> list[Any]:
    """Load the first few batches of a loader, without an epoch's short last one, and end its workers."""
    iterator, until, kept = iter(source), time.monotonic() + LOAD_S, list[Any]()
    for batch in iterator:
        kept.append(batch)
        if len(kept) >= FEWEST and (len(kept) >= most(kept[0]) or time.monotonic() > until):
            ended = loader_queue.count_batches(source) == len(kept)
            break
    else:
        ended = True
    if ended and len(kept) > 1 and (count_samples(kept[-1]) or 0) < (count_samples(kept[0]) or 0):
        kept.pop()
    _end_workers(source, iterator)
    return kept


def _take_first(source: Any, count: int) -> list[Any]:
    """Load the first `count` batches of a loader, or the whole epoch if it has fewer, and end its workers."""
    iterator = iter(source)
    kept = list(itertools.islice(iterator, count))
    _end_workers(source, iterator)
    return kept


def _end_workers(source: Any, iterator: Any) -> None:
    if hasattr(iterator, "_shutdown_workers"):
        iterator._shutdown_workers()
    if hasattr(iterator, "close"):
        iterator.close()
    if hasattr(source, "_iterator"):
        source._iterator = None


def _copy_containers(batch: Any) -> Any:
    """Put the same tensors into new containers: a step may take members out of the batch it gets."""
    try:
        return map_tensors(batch, lambda tensor: tensor)
    except Exception:  # a container that cannot be rebuilt from its members is returned as it is
        return batch

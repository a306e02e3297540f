"""Records the samples of each optimizer step, its number of backwards and its learning rates.

For trial processes: its changes are not undone. It draws no random numbers, changes no order and costs every arm the
same few microseconds per batch. It writes ``ledger.json`` (``ledger-1.json`` and so on for the other
ranks) when the training ends::

    schema, rank
    ids        sampler: the ids that the loader's sampler drew; content: fingerprints of the batches; null: unknown
    why        the reason, if they are unknown
    steps      one [hash of the samples in order, samples, backwards done, [learning rates]] per optimizer step, at most
               10,000. The hash does not depend on how samples are cut into batches
    planned    backwards that each of these steps should have, according to the planned micro-batches
    epochs     one [optimizer step at its end, samples, complete, digest of its samples independent of order, samples
               already drawn before in it] per epoch, at most 10,000; complete: all batches of the loaders were used
    dataset    number of samples in the dataset
    own_order  true: the sample order is independent of other random draws than the sampler's own
    optimizer_steps
    partial    true: an exception of the class `ended_by` ended this rank's fit
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback

from fastloop.bridge.apply.micro.batches import MicroBatches
from fastloop.bridge.trials.drawn_samples import Batch, Drawn, join_epochs, listen
from fastloop.bridge.trials.heartbeat import drop_other_hooks
from fastloop.feeds.batch_tree import CannotRegroup, count_rows, count_samples
from fastloop.feeds.splitting import cut
from fastloop.records import store

MOST_STEPS = 10_000


class Ledger(Callback):
    """Records the samples, backwards and learning rates of each optimizer step."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.why: str | None = None
        self._drawn: list[Drawn] = []
        self._listed_epoch, self._step = -1, 0
        self._backwards: Backwards | None = None
        self._begin(0)
        drop_other_hooks(self, "on_before_optimizer_step", "on_train_batch_end")

    @classmethod
    def into(cls, trainer: Any, out: Path) -> Ledger:
        """Make a Trainer's next fit write a ledger to this directory. Call before it, or in a callback's ``setup``."""
        ledger = cls(out)
        trainer.callbacks.append(ledger)
        before = vars(trainer.strategy).get("process_dataloader")
        trainer.strategy.process_dataloader = _Listening(trainer, ledger, before)
        return ledger

    def listen(self, trainer: Any, loader: Any, given: Any) -> Any:
        """Record a train loader before its use. Lightning passes each loader here, and passes all again on a reload."""
        if trainer.current_epoch != self._listed_epoch:
            self._listed_epoch, self._drawn = trainer.current_epoch, []
        try:
            loader, drawn = listen(loader, given)
        except Exception as error:
            self.why = f"{type(error).__name__}: {error}"
            return loader
        self._drawn.append(drawn)
        return loader

    # -- Lightning's hooks ----------------------------------------------------------------------------------------

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Forget an earlier fit, and delete its ledgers from the directory."""
        if stage != "fit":
            return
        self.why, self._drawn, self._listed_epoch = None, [], -1
        if trainer.is_global_zero:
            for path in self.out.glob("ledger*.json"):
                path.unlink(missing_ok=True)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        # Not earlier: rung `batch` refuses a model with such hooks, and has made its plan by now.
        self._begin(trainer.global_step)
        for drawn in self._drawn:
            drawn.epoch()  # drops ids of an earlier fit
        self._backwards = Backwards(pl_module)
        if "dataloader_iter" in inspect.signature(pl_module.training_step).parameters:
            self.why = "training_step fetches its own batches"

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        # By optimizer, because one that evaluates its closure several times calls this several times.
        self._rates[id(optimizer)] = [group["lr"] for group in optimizer.param_groups]

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        try:
            self._note_batch(trainer, batch)
            if (step := trainer.global_step) != self._step:
                self._step = step
                self._close()
        except Exception as error:  # a ledger must not end a training
            self.why = f"{type(error).__name__}: {error}"
            drop_other_hooks(self)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self._end_epoch()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._write(trainer)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        if trainer.state.fn == "fit":  # a test after the fit may miss a checkpoint, because trials write none
            self._write(trainer, type(exception).__name__)

    # -- inside ---------------------------------------------------------------------------------------------------

    def _begin(self, step: int) -> None:
        self._step = step
        self._steps: list[list[Any]] = []
        self._planned: list[int | None] = []
        self._epochs: list[list[Any]] = []
        self._count = 0
        self._rates: dict[int, list[Any]] = {}
        self._uncut = 0
        self._in_epoch: int | None = 0
        self._begin_step()

    def _begin_step(self) -> None:
        self._rates.clear()
        self._streams: dict[tuple[int, int], list[bytes]] = {}
        self._samples: int | None = 0
        self._plan = 0

    def _note_batch(self, trainer: Any, batch: Any) -> None:
        """Record one batch of the Trainer, to which every loader contributed."""
        first = None
        for number, drawn in enumerate(self._drawn):
            if (part := drawn.take()) is not None:
                first = first or part
                for stream, content in enumerate(part.streams):
                    self._streams.setdefault((number, stream), []).append(content)
        if first is None and self.why is None:
            self.why = "the training used more batches than the loader yielded"
        rows = first.samples if first is not None and first.samples is not None else count_samples(batch)
        self._samples = None if self._samples is None or rows is None else self._samples + rows
        self._in_epoch = None if self._in_epoch is None or rows is None else self._in_epoch + rows
        self._plan += self._plan_pieces(trainer.strategy, first, batch)

    def _plan_pieces(self, strategy: Any, part: Batch | None, batch: Any) -> int:
        """Return the number of backwards planned for this batch."""
        micro: MicroBatches | None = getattr(getattr(strategy, "fastloop", None), "micro", None)
        if micro is None or (rows := count_rows(batch)) is None:
            return 1
        choice = micro.choice
        if choice.uncut != self._uncut:
            self._uncut = choice.uncut
            return 1
        if micro.apart and part is not None and part.window is not None:
            return len(part.window)
        full = micro.windows.sampler.window if micro.windows.sampler is not None else 1
        return _count_pieces(rows, choice.micro, part.window if part is not None else None, full)

    def _close(self) -> None:
        """Record the optimizer step that is done."""
        self._count += 1
        if self._count <= MOST_STEPS:
            rates = [_keep_rate(rate) for group in self._rates.values() for rate in group]
            done = self._backwards.take() if self._backwards is not None else None
            self._steps.append([self._hash() if self._streams else None, self._samples, done, rates])
            self._planned.append(self._plan)
        self._begin_step()

    def _hash(self) -> str:
        """Hash the samples of this step, by loader and tensor."""
        found = [hashlib.blake2b(b"".join(parts), digest_size=8) for _, parts in sorted(self._streams.items())]
        if len(found) > 1:
            found = [hashlib.blake2b(b"".join(each.digest() for each in found), digest_size=8)]
        return found[0].hexdigest()

    def _end_epoch(self) -> None:
        try:
            if len(self._epochs) < MOST_STEPS:
                epoch = join_epochs([drawn.epoch() for drawn in self._drawn])
                self._epochs.append([self._count, self._in_epoch, *epoch])
            self._in_epoch = 0
        except Exception as error:  # a ledger must not end a training
            self.why = f"{type(error).__name__}: {error}"

    def _write(self, trainer: Any, ended_by: str | None = None) -> None:
        try:
            seen = self._backwards is not None and self._backwards.seen
            if self._backwards is not None:
                self._backwards.remove()
            if self._in_epoch != 0:
                self._end_epoch()
            name = "ledger.json" if trainer.global_rank == 0 else f"ledger-{trainer.global_rank}.json"
            content = {
                "schema": store.SCHEMA,
                "rank": trainer.global_rank,
                **self._summarize_knowledge(seen),
                "planned": self._planned,
                "epochs": self._epochs,
                "optimizer_steps": self._count,
                "partial": ended_by is not None,
                "ended_by": ended_by,
            }
            store.write(self.out, {name: json.dumps(content, allow_nan=False) + "\n"})
        except Exception as error:  # such as a full disk; the training itself is over
            self.why = f"{type(error).__name__}: {error}"

    def _summarize_knowledge(self, seen: bool) -> dict[str, Any]:
        """Return the part of the ledger about samples and steps; unknown values are None."""
        whys = [self.why, *(drawn.why for drawn in self._drawn), None if self._drawn else "no loader was seen"]
        why = next((each for each in whys if each is not None), None)
        sources = {drawn.source for drawn in self._drawn}
        ids = None if why is not None else "content" if "content" in sources else "sampler"
        rows = [
            [each if ids else None, count, done if seen else None, [_to_number(rate) for rate in rates]]
            for each, count, done, rates in self._steps
        ]
        orders = [drawn.own_order for drawn in self._drawn]
        return {
            "ids": ids,
            "why": why,
            "steps": rows,
            "dataset": self._drawn[0].dataset if len(self._drawn) == 1 else None,
            "own_order": None if None in orders or not orders else all(orders),
        }


class _Listening:
    """Replaces the strategy's ``process_dataloader``: does the same, and lets the ledger record train loaders."""

    def __init__(self, trainer: Any, ledger: Ledger, before: Callable[[Any], Any] | None) -> None:
        self.trainer, self.ledger, self.before = trainer, ledger, before

    def __call__(self, given: Any) -> Any:
        strategy = self.trainer.strategy
        # Look up the class now: FastLoop gives the strategy another one in its setup.
        ask = self.before or functools.partial(type(strategy).process_dataloader, strategy)
        loader = ask(given)
        return self.ledger.listen(self.trainer, loader, given) if self.trainer.state.stage == "train" else loader


@functools.lru_cache(maxsize=256)
def _count_pieces(rows: int, micro: int, window: tuple[int, ...] | None, full: int) -> int:
    """Return the number of pieces into which a batch of `rows` samples is cut."""
    try:
        return len(cut(torch.empty(rows), micro, None if window is None else (window, full)))
    except CannotRegroup:
        return 1


def _keep_rate(rate: Any) -> Any:
    """Copy the current learning rate without waiting for the device it may be on."""
    return rate.detach().clone() if isinstance(rate, torch.Tensor) else rate


def _to_number(rate: Any) -> float | None:
    number = float(rate)
    return number if abs(number) < float("inf") else None


# -- backwards --------------------------------------------------------------------------------------------------------

_SPREAD = 64
"""Parameters whose gradients are counted in the first step."""


class Backwards:
    """Counts the backwards that reached the parameters, not those that were requested.

    The first step watches many parameters, because some may be frozen or unused; later steps watch only a few of those
    with the most gradients.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        parameters = [each for each in module.parameters() if each.requires_grad and each.is_leaf]
        spread = parameters[:: -(-len(parameters) // _SPREAD) or 1]
        watched: dict[int, Any] = {id(each): each for each in [*spread, *parameters[-1:]]}
        self._hooks = {key: each.register_post_accumulate_grad_hook(self._add) for key, each in watched.items()}
        self._counts: Counter[int] = Counter()
        self.seen = False
        """Whether any backward was counted: none is if the strategy keeps gradients outside the parameters."""

    def take(self) -> int:
        """Return the number of backwards since the last call."""
        count = max(self._counts.values(), default=0)
        if count and not self.seen:
            most = [key for key in self._hooks if self._counts[key] == count]
            kept = {most[0], most[len(most) // 2], most[-1]}
            for key in self._hooks.keys() - kept:
                self._hooks.pop(key).remove()
            self.seen = True
        self._counts.clear()
        return count

    def remove(self) -> None:
        """Remove the hooks from the parameters."""
        for hook in self._hooks.values():
            hook.remove()

    def _add(self, parameter: torch.Tensor) -> None:
        self._counts[id(parameter)] += 1

"""One rank's search for the fastest micro-batch, on the samples of the first step, before they are trained on.

Each size runs training_step and its gradient, and leaves no trace: first as the first step will run, which shows the
memory it takes; then timed, with the rungs switched on that wait for the rehearsal and cost nothing to switch, and with
BatchNorm as cheap as in a model that will be compiled. A size is chosen only if it ran in the search with room left for
the optimizer's state.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from fastloop.bridge.apply.micro.gradient_check import TakeLoss, quiet
from fastloop.bridge.apply.micro.room import GIB, Room
from fastloop.bridge.apply.rehearse.played import raise_if_device_lost, synchronize
from fastloop.bridge.apply.rehearse.ranks import refuse_exchange
from fastloop.bridge.apply.rehearse.remembered import KeptSize, Remembered
from fastloop.bridge.apply.rehearse.time_limit import (
    TimeLimit,
    announced,
    explain,
    find_limit,
    leaves_on_sigterm,
    limited,
)
from fastloop.bridge.apply.state.checkpoints import end_checkpoints
from fastloop.bridge.apply.state.untouched import preserve_parameters, preserve_state
from fastloop.errors import NotApplicable, describe, is_out_of_memory, let_through
from fastloop.feeds.batch_norm.groups import BatchGroups
from fastloop.feeds.batch_tree import iterate_tensors, map_tensors
from fastloop.feeds.call_shapes import Resized
from fastloop.feeds.splitting import Piece
from fastloop.judge import micro_batch as judge
from fastloop.judge.micro_batch import FoundSize

LIMIT_S = 60.0
"""Time limit of a search; the choice is then made among the sizes timed so far."""
PLAYS, ENOUGH_MS = 4, 400.0
"""Each size is timed this many times, or for this long. The shortest time counts."""
BY_MEMORY = "by memory"
"""How the limit on the sizes begins if it is memory."""
FEWER = 2
"""Number of sizes below the user's own that are tried if that one fits."""
Quick = Callable[[], AbstractContextManager[Callable[[Any], Any]]]
"""A context in which rungs are on; yields a function that converts a batch for them."""


@dataclass(frozen=True)
class SizeTrial:
    """The samples of one step, on which sizes are tried.

    Args:
        own: number of samples in the user's batch.
        take: returns a piece with a given number of samples.
        take_loss: training_step's loss for a piece.
        groups: receives the number of user batches in each piece; None if no rung needs it.
    """

    own: int
    take: Callable[[int], Piece]
    take_loss: TakeLoss
    groups: BatchGroups | None


@dataclass(kw_only=True)
class SearchRules:
    """How to search."""

    target: float
    """The share of the device's memory that may be used."""
    whole: bool = False
    """Try no size below the user's batch, because it would change BatchNorm's statistics."""
    quick: Quick = lambda: nullcontext(lambda batch: batch)
    waiting: Sequence[str] = ()
    """The names of those rungs if sizes that only fit with them are tried, too; else empty."""
    runs_graphs: bool = False
    """Run compiled modules and captured graphs as the next step will, and not eagerly."""
    key: object = None
    """What else the answer depends on, for the notes of earlier runs."""
    skip: str | None = None
    """Why not to search."""
    say: Callable[[str], None] = lambda _line: None
    warn: Callable[[str], None] = lambda _line: None
    compiles: str | None = None
    """The rung that compiles the model after its rehearsal, if BatchNorm then takes all groups at once."""


class SearchRun:
    """One search on one rank. No collectives."""

    def __init__(self, rules: SearchRules, strategy: Any, sizes: Sequence[int], trial: SizeTrial) -> None:
        self.given, self.strategy, self.module = rules, strategy, strategy.lightning_module
        self.own, self.take, self.trial = trial.own, trial.take, trial
        self.sizes = [size for size in sizes if size >= self.own or not rules.whole]
        self.device = strategy.root_device
        self.parameters = [each for each in self.module.parameters() if each.requires_grad]
        self.peaks: dict[int, int] = {}
        self.rates: dict[int, float] = {}
        """Samples per second by size; if the model will be compiled, with BatchNorm as cheap as it will be then."""
        self.uncompiled: dict[int, float] = {}
        """The same with BatchNorm as it is now."""
        self.ran: list[int] = []
        self.limit = "by the samples of your optimizer step, not by memory"
        self.room = Room(self.module, strategy, rules.target)
        self.memory = Remembered([self.module], self.device)

    @functools.cached_property
    def key(self) -> str:
        """The key under which an earlier run's answer is valid. Raises as `take` does if there is nothing to try."""
        shapes = [(tuple(each.shape), str(each.dtype)) for each in iterate_tensors(self.take(self.own).batch)]
        return repr((self.given.key, self.given.target, self.sizes, shapes))

    def search(self) -> FoundSize:
        """Run and time the sizes, and choose."""
        if self.given.skip is not None:
            return FoundSize(size=self.own, why=self.given.skip)
        problem: str | None = None
        later: int | None = None
        words = {"cause": "the search for a micro-batch", "do": "write a number for batch.micro_batch"}
        try:
            with (
                announced("trying micro-batches on the first step", self.given.say),
                limited(LIMIT_S, **words),
                leaves_on_sigterm(self.module.trainer),
                self.room.ballast(),
            ):
                with preserve_parameters(self.module.parameters()):
                    known = self._run_known()
                    if known is None:
                        self._run_each()
                if known is not None:
                    why = "it was the fastest in an earlier run on this machine, and works in this one"
                    return FoundSize(size=known.size, why=why, uncompiled=known.uncompiled, later=known.later)
                later = self._time_each()
        except Exception as error:
            if find_limit(error) is not None:  # which a compile may have wrapped in its own error
                self.limit = f"by the search's time limit of {LIMIT_S:.0f} s"
            else:
                let_through(error)
                raise_if_device_lost(self.device, error)
            # Not the error itself: its frames hold the tensors of the trial that it ended.
            problem = None if is_out_of_memory(error) else explain(error)
        finally:
            self.room.give_back()
        if not self.rates:
            return self._explain_nothing(problem)
        chosen, uncompiled = (judge.choose_size(rates, self.own) for rates in (self.rates, self.uncompiled))
        timed = ", ".join(f"{size}: {rate:,.0f}" for size, rate in sorted(self.rates.items()))
        why = f"samples/s by size {timed}; the sizes are limited {self.limit}"
        if later is not None:
            why += f"; {later} only fits with {' and '.join(self.given.waiting)}"
        other = uncompiled if uncompiled != chosen else None
        room_bytes = self.room.bytes if self.limit.startswith(BY_MEMORY) else None
        return FoundSize(
            size=chosen, rates=dict(self.rates), why=why, uncompiled=other, later=later, room_bytes=room_bytes
        )

    def find_fitting(self) -> int | None:
        """The largest size that runs; None if none does, and then the step's own error shows why."""
        try:
            with self.room.ballast():
                for size in reversed(self.sizes):
                    self.play_plain([size])
                    if size in self.ran:
                        return size
        except Exception as error:
            let_through(error)
            raise_if_device_lost(self.device, error)
        finally:
            self.room.give_back()
        return None

    def _explain_nothing(self, problem: str | None) -> FoundSize:
        if problem is not None:
            why = f"nothing could be tried: {problem}"
        else:
            least = min(self.sizes)
            fits = f"not even {least} samples fit" if least > 1 else "one sample does not fit"
            why = f"{fits} in memory next to the optimizer's state"
        self.given.warn(f"keeping your micro-batch size of {self.own}: {why}")
        return FoundSize(size=self.own, why=why)

    # -- which sizes run --------------------------------------------------------------------------------------------

    def _run_known(self) -> KeptSize | None:
        """The size that an earlier run found, if it also runs in this one: another process may hold memory now."""
        known = self.memory.find_size(self.key)
        if known is None or known.size not in self.sizes:
            return None
        self.play_plain([known.size])
        return known if known.size in self.ran else None

    def _run_each(self) -> None:
        """Run the user's size and larger ones until one does not fit; also smaller ones, a few if the user's fits."""
        below = [size for size in self.sizes if size < self.own]
        if self.room.bytes is not None and below:  # two small ones predict the memory of larger ones beforehand
            self.play_plain(sorted({below[len(below) // 2], below[-1]}))
        self.play_plain([size for size in self.sizes if size >= self.own])
        fits = self.own in self.ran
        for size in below[::-1][: FEWER if fits else None]:
            if size not in self.ran:
                self.play_plain([size])
            if not fits and size in self.ran:
                break

    def play_plain(self, sizes: Sequence[int]) -> None:
        """Run sizes as the first step will, until one does not fit; records the results in `ran` and `peaks`."""
        with quiet(self.strategy), preserve_state(self.module), contextlib.ExitStack() as after:
            if self.given.runs_graphs:
                after.enter_context(torch.compiler.set_stance("default"))
            after.callback(self.room.reset_peak)  # memory that only trials took is not a peak of the training
            for size in sizes:
                predicted = judge.predict_bytes(self.peaks, size)
                if self.room.bytes is not None and predicted is not None and predicted > self.room.bytes:
                    self._limit_by_memory(f"{size} would take about {predicted / GIB:.1f}")
                    return
                retries = self.room.reset_peak()
                try:
                    # Ranks run different numbers of trials, so none may wait for another.
                    with refuse_exchange(self.module.trainer):
                        self._play(self.take(size))
                except TimeLimit:
                    raise
                except Exception as error:
                    if size == self.own and not is_out_of_memory(error):
                        raise
                    self._note_failure(size, error)
                    return
                if (no_room := self._explain_no_room(size, retries)) is not None:
                    self._limit_by_memory(no_room)
                    return
                self.ran.append(size)

    def _explain_no_room(self, size: int, retries: int) -> str | None:
        """Why there is too little room for a size that has just run, after this count of retries; None if there is."""
        if self.room.bytes is None:
            return None
        peak, again = torch.cuda.max_memory_reserved(self.device), self.room.count_retries() - retries
        self.peaks[size] = peak
        if peak <= self.room.bytes and not again:
            return None
        said = f"{size} takes {peak / GIB:.1f}"
        return f"{said} ({again} allocations had to be retried)" if again else said

    def _limit_by_memory(self, said: str) -> None:
        self.limit = f"{BY_MEMORY}: {said} of {self.room.describe()}"

    def _note_failure(self, size: int, error: Exception) -> None:
        let_through(error)
        end_checkpoints(error)
        raise_if_device_lost(self.device, error)
        if is_out_of_memory(error):
            self.limit = f"{BY_MEMORY}: there was not enough for {size}"
        else:
            self.limit = f"by an error: {size} ended in {describe(error)}"
        error.__traceback__ = None  # its frames hold the tensors that did not fit
        self.room.give_back()

    # -- how fast they are ------------------------------------------------------------------------------------------

    def _time_each(self) -> int | None:
        """Time the sizes that ran, with the rungs on that cost nothing to switch. Returns a larger and faster size that
        only these rungs make fit; None if there is none."""
        with quiet(self.strategy), self.given.quick() as convert:
            for size in sorted(self.ran, key=lambda each: (each < self.own, abs(each - self.own))):
                if size > self.own and judge.are_last_two_slower(list(self.rates.values())):
                    continue
                if (timed := self._time(size, convert)) is not None:
                    self.rates[size], self.uncompiled[size] = timed
            is_limited = self.rates and self.given.waiting and self.limit.startswith(BY_MEMORY)
            if is_limited and judge.choose_size(self.rates, self.own) == max(self.ran):
                return self._find_later(convert)
        return None

    def _find_later(self, convert: Callable[[Any], Any]) -> int | None:
        """Time the largest size that ran and larger ones, with the graphs of the rungs; returns the best if larger."""
        limit, rates = self.limit, dict[int, float]()
        with torch.compiler.set_stance("default"):
            for size in self.sizes:
                if size >= max(self.ran):
                    Resized.count += 1
                    retries = self.room.reset_peak()
                    timed = self._time(size, convert)
                    if timed is None or self._explain_no_room(size, retries) is not None:
                        break
                    rates[size] = timed[0]
        self.limit = limit
        best = judge.choose_size(rates, self.own) if rates else 0
        return best if best > max(self.ran) else None

    def _time(self, size: int, convert: Callable[[Any], Any]) -> tuple[float, float] | None:
        """Samples per second of one size, as a model that will be compiled runs BatchNorm and as it does now; None if
        it does not run."""
        try:
            with preserve_state(self.module):
                piece = self.take(size)
                piece = piece._replace(batch=convert(piece.batch))
                self._play(piece)
                uncompiled = rate = 1e3 * size / self._read_ms(piece)
                if self.given.compiles is not None and piece.groups > 1:
                    # Compiled code takes all groups at once, at the price of torch's own BatchNorm.
                    rate = 1e3 * size / self._read_ms(piece._replace(groups=1))
                return rate, uncompiled
        except TimeLimit:
            raise
        except Exception as error:
            self._note_failure(size, error)
            return None

    def _read_ms(self, piece: Piece) -> float:
        times: list[float] = []
        while len(times) < PLAYS and sum(times) < ENOUGH_MS:
            times.append(self._play(piece))
        return min(times)

    def _play(self, piece: Piece) -> float:
        """Run forward and backward of one piece; returns milliseconds."""
        batch = map_tensors(piece.batch, torch.clone)  # a step may write into it
        synchronize(self.device)
        began = time.perf_counter()
        with (
            nullcontext() if self.trial.groups is None else self.trial.groups.of(piece.groups),
            self.strategy.precision_plugin.train_step_context(),
        ):
            loss = self.trial.take_loss(batch, 0)
            if loss is None:
                raise NotApplicable("training_step returned no loss")
            torch.autograd.grad(loss, self.parameters, allow_unused=True)
        synchronize(self.device)
        return 1e3 * (time.perf_counter() - began)

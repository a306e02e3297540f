"""Collects every rank's figures on rank 0, through the process group's store instead of a collective.

A collective at the end of a fit hangs all ranks if one is dead or stuck. Here each rank leaves a record in the store
without waiting; only rank 0 waits for the others' records, and gives up after a time limit.
"""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch.distributed

from fastloop.bridge.watch.measurement import GARBAGE
from fastloop.records.measurement import Measurement
from fastloop.records.store import dump

LIMIT_S = 20.0
"""Time that rank 0 waits for the others after a fit."""
PARTIAL_LIMIT_S = 3.0
"""The same after an exception or an interrupt, when some ranks may never answer."""
_PAUSE_S = 0.05
_OF_RANK = (
    "step_ms",
    "parts_ms",
    "host_ms",
    "blocked_ms",
    "samples_per_s",
    "lead_ms",
    "gpu",
    "steps",
    "partial",
    "died_of",
)
"""What a rank sends of its measurement."""
_LOST_OTHERS = re.compile(r"gloo|nccl|pair closure|Connection (closed|reset) by peer", re.IGNORECASE)
"""What errors say that end a rank's fit because another rank is gone or stuck."""


class Ranks:
    """The exchange of one fit, to be created on every rank when the fit begins.

    Each rank numbers its fits in the store itself, so a record that was too late for one fit is not read in the next,
    and a new process group starts afresh.
    """

    def __init__(self, trainer: Any) -> None:
        self.rank, self.world_size = int(trainer.global_rank), int(trainer.world_size)
        self.missing: tuple[int, ...] = ()
        """Ranks that sent no record in time; known on rank 0 only."""
        self.why: str | None = None
        """Why records are missing, if known."""
        self._store: Any = None
        self._gathered: tuple[Mapping[str, Any], ...] | None = None
        if self.world_size > 1:
            try:
                store, distributed = find_default_store(), cast("Any", torch.distributed)
                fit = store.add(f"fastloop/fits/{self.rank}", 1)
                self._store = distributed.PrefixStore(f"fastloop/fit/{fit}", store)
            except Exception as error:  # a different torch, or a strategy without a torch process group
                self.why = f"ranks cannot be compared: {type(error).__name__}: {error}"

    def gather(self, record: Mapping[str, Any], limit_s: float = LIMIT_S) -> tuple[Mapping[str, Any], ...]:
        """Send this rank's measurements, and on rank 0 collect those of the others.

        Args:
            record: plain values; ``rank`` and ``host`` are added.
            limit_s: the longest time that rank 0 waits. No other rank waits at all.

        Returns:
            The records that arrived, rank 0's first. Empty on every other rank, in a world of one, and without a store.
            Later calls return the same.
        """
        if self._gathered is None:
            self._gathered = self._exchange({"rank": self.rank, "host": socket.gethostname(), **record}, limit_s)
        return self._gathered

    def _exchange(self, own: Mapping[str, Any], limit_s: float) -> tuple[Mapping[str, Any], ...]:
        if self._store is None:
            return ()
        if self.rank == 0:
            return self._collect(own, limit_s)
        try:
            self._store.set(str(self.rank), dump(own))
        except Exception as error:  # rank 0 and its store are gone, so no process can read it
            self.why = f"the record of rank {self.rank} could not be sent: {type(error).__name__}: {error}"
        return ()

    def _collect(self, own: Mapping[str, Any], limit_s: float) -> tuple[Mapping[str, Any], ...]:
        found, end = {0: json.loads(dump(own))}, time.monotonic() + limit_s
        waiting = list(range(1, self.world_size))
        try:
            while waiting:
                # `wait` would hold the store's lock, which other threads of torch need.
                for rank in [rank for rank in waiting if self._store.check([str(rank)])]:
                    waiting.remove(rank)
                    found.update(self._take(rank))
                left_s = end - time.monotonic()
                if not waiting or left_s <= 0:
                    break
                time.sleep(min(_PAUSE_S, left_s))
        except Exception as error:  # the store's server has died, perhaps with the launcher
            self.why = f"the ranks' store failed: {type(error).__name__}: {error}"
        self.missing = tuple(rank for rank in range(self.world_size) if rank not in found)
        if self.missing and self.why is None:
            self.why = f"nothing arrived within {limit_s:g} s from rank {', '.join(map(str, self.missing))}"
        return tuple(found[rank] for rank in sorted(found))

    def _take(self, rank: int) -> dict[int, Mapping[str, Any]]:
        record = self._store.get(str(rank))
        self._store.delete_key(str(rank))
        try:
            return {rank: dict(json.loads(record))}
        except ValueError:
            self.why = f"the record of rank {rank} cannot be read"
            return {}


def name_cause(own: str | None, ranks: Sequence[Mapping[str, Any]]) -> str | None:
    """Return what the fit died of: if rank 0 only lost the others, the first other rank's own error, with its rank.

    Args:
        own: the error that ended rank 0's fit, if any.
        ranks: all ranks' records, with ``died_of``.
    """
    if own is None or not _LOST_OTHERS.search(own):
        return own
    others = (f"rank {each['rank']}: {each['died_of']}" for each in ranks if each.get("died_of"))
    return next((other for other in others if not _LOST_OTHERS.search(other)), own)


def find_default_store() -> Any:
    """Return the store in which the ranks of the default process group found each other.

    Raises:
        RuntimeError: there is no such group.
        AttributeError: this torch lacks the function, which is private.
    """
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        raise RuntimeError("torch.distributed has no process group")
    distributed: Any = torch.distributed.distributed_c10d
    return distributed._get_default_store()


def record_of_rank(seen: Measurement, raised: BaseException | None = None) -> dict[str, Any]:
    """Return what a rank sends to rank 0 of its measurement; ``ended_by`` names the exception that ended its fit."""
    return {
        **{name: getattr(seen, name) for name in _OF_RANK},
        "garbage_ms": (seen.evidence.get(GARBAGE) or {}).get("ms_per_step"),
        "ended_by": None if raised is None else type(raised).__name__,
    }

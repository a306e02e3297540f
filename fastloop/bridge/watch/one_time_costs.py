"""One-time costs of a fit, read from outside: compiles as Dynamo records them, and the start of loader workers."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import psutil

from fastloop.bridge.watch.loader_state import find_workers
from fastloop.evidence.clock import one_time
from fastloop.evidence.clock.one_time import OneTime
from fastloop.evidence.machine import ROOT
from fastloop.evidence.model.dynamo_graphs import list_new, read_records, shorten_reason
from fastloop.records.measurement import AUTOTUNE, COMPILE, ONE_TIME, VALIDATION_COMPILE, WORKERS

MOST_REASONS = 3
MOST_APART_S = 2.0
"""Two readings of a process's age that differ by more are not from the same clock."""
_TUNING = ("compile_time_autotune_time_us", "runtime_triton_autotune_time_us")


class Compilations:
    """Records every compile of this process from now on, ours or the user's, with its time on the clock of the steps.

    Reads the list of Dynamo's records, which keeps only the latest 64, so call `note` often. If no code has imported
    Dynamo, nothing was compiled, and it is not imported here. torch 2.6 to 2.11 record a compile's start and end.

    Args:
        count_steps: returns the number of optimizer steps done.
    """

    def __init__(self, ledger: OneTime, count_steps: Callable[[], int]) -> None:
        self.count, self.reasons = 0, dict[str, None]()
        """Number of graphs compiled, and the reasons for recompiles."""
        self.steps: set[int] = set()
        """Numbers of the optimizer steps with a compile in them or after them, as in validation."""
        self.is_known, self.at_least = True, False
        """Whether this torch records compile times, and whether some records were lost."""
        self._ledger, self._count_steps = ledger, count_steps
        self._latest = (read_records() or [None])[-1]

    def note(self, cause: str) -> None:
        """Record the compiles since the last call under `cause`."""
        records = read_records()
        if not records or records[-1] is self._latest:  # the usual case
            self.is_known = self.is_known and records is not None
            return
        new = list_new(records, self._latest)
        self.at_least = self.at_least or (len(new) == len(records) >= 64)
        self._latest = records[-1]
        for record in new:
            self._add(record, cause)

    def sum_s(self) -> dict[str, float | None]:
        """Return seconds by cause; None if this torch does not record them."""
        found = self._ledger.sum_by_cause()
        return {cause: found.get(cause, 0.0) if self.is_known else None for cause in (COMPILE, VALIDATION_COMPILE)} | {
            AUTOTUNE: found.get(AUTOTUNE, 0.0) if self.is_known and self._records_tuning() else None
        }

    def _add(self, record: Any, cause: str) -> None:
        began_us, ended_us = getattr(record, "start_time_us", None), getattr(record, "end_time_us", None)
        if began_us is None or ended_us is None:
            self.is_known = False
            return
        ended = one_time.now() - (time.time() - ended_us / 1e6)
        tuned_s = sum(getattr(record, field, None) or 0 for field in _TUNING) / 1e6
        if getattr(record, "is_runtime", False):  # not one interval: work of a compiled function in its first run
            graphs_s = (getattr(record, "runtime_cudagraphify_time_us", None) or 0) / 1e6
            self._ledger.add_span(cause, ended - tuned_s - graphs_s, ended)
        else:
            self._ledger.add_span(cause, ended - (ended_us - began_us) / 1e6, ended)
            self.count += getattr(record, "is_forward", True) is not False
        if tuned_s:
            self._ledger.add_span(AUTOTUNE, ended - tuned_s, ended)
        self.steps.add(self._count_steps())
        if (reason := getattr(record, "recompile_reason", None)) and len(self.reasons) < MOST_REASONS:
            self.reasons[shorten_reason(reason)] = None

    def _records_tuning(self) -> bool:
        return self._latest is None or any(hasattr(self._latest, field) for field in _TUNING)


class WorkerStarts:
    """Measures the time from the start of the train loader's workers to the first batch, each time they start."""

    def __init__(self) -> None:
        self.took_s: list[float] = []
        self.is_known = True
        """Whether their start times can be read."""
        self._pids: set[int] = set()

    def note(self, trainer: Any) -> None:
        """Record the start of the workers if they are new. Call when the first batch of an epoch has arrived."""
        workers = find_workers(trainer)
        if workers is None:
            self.is_known = False
            return
        pids = {worker.pid for worker in workers}
        if pids and not pids & self._pids:
            self._pids, ages_s = pids, [_read_age_s(pid) for pid in pids]
            known = [age for age in ages_s if age is not None]
            self.is_known = self.is_known and bool(known)
            self.took_s += [max(known)] if known else []

    @property
    def first_s(self) -> float | None:
        """Seconds that the first start of workers took; 0 without workers, None if unknown."""
        if self.took_s:
            return self.took_s[0]
        return 0.0 if self.is_known else None


def _read_age_s(pid: int) -> float | None:
    """Return the seconds since a process was started; None if it has ended.

    psutil adds the start to a boot time in whole seconds, so it may be up to a second off. It is used only where the
    kernel's ticks are not those of this machine's clock, as in some containers, or cannot be read.
    """
    try:
        rounded_s = time.time() - psutil.Process(pid).create_time()
    except psutil.Error:
        return None
    age_s = _read_age_in_ticks_s(pid)
    if age_s is None or abs(age_s - rounded_s) > MOST_APART_S:
        age_s = rounded_s
    return max(0.0, age_s)


def _read_age_in_ticks_s(pid: int) -> float | None:
    """Return the seconds since a process was started, at most one tick too many; None without Linux's clock and /proc.

    Source: ``proc_pid_stat(5)``, field 22; the name in field 2 may contain spaces and parentheses.
    """
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    try:
        fields = (ROOT / f"proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return None if clock is None else time.clock_gettime(clock) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    except (AttributeError, OSError, ValueError, IndexError):
        return None


def sum_one_time_s(ledger: OneTime, compilations: Compilations, workers: WorkerStarts) -> Mapping[str, float | None]:
    """Return seconds by cause, in the form of ``Measurement.one_time_s``."""
    return {**dict.fromkeys(ONE_TIME, 0.0), **ledger.sum_by_cause(), **compilations.sum_s(), WORKERS: workers.first_s}

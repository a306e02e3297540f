"""Traces a few steps outside the timed ones, with torch.profiler and for Nsight.

``begin -> a few steps to settle -> one step recorded and discarded -> the traced steps -> end``

Preparing a profiler takes long enough for a loader to fill its queues, and starting it drains the device queue: a trace
that began there would show neither the waits nor the lead of an ordinary step.
"""

from __future__ import annotations

import gzip
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from fastloop.evidence.trace import kernel_account, other_profilers
from fastloop.evidence.trace.chrome import RANGE, STEP

NAME = "trace.json.gz"
LEAD_IN = 2
_LEVEL = 5
"""gzip level: 9 takes several times as long for a file that is hardly smaller."""

now = time.perf_counter


class TraceWindow:
    """Records whole steps and summarizes them. Never raises; not thread-safe.

    Make all calls from the training thread, ``begin`` and ``step`` between two steps. ``push`` and ``pop`` may be
    called at any time and do nothing outside a recording.

    Args:
        device: the device that runs the steps.
        directory: for ``trace.json.gz``; None keeps no file.
        steps: optimizer steps to trace.
        taken: why torch.profiler must not be used, if the caller knows a reason (a profiler in the Trainer).
    """

    def __init__(self, device: torch.device, directory: Path | None, steps: int, *, taken: str | None = None) -> None:
        self.device, self.directory, self.steps = device, directory, steps
        self.lead_in = LEAD_IN
        """Steps to skip first; at least enough to use up the batches in the loader and device queues."""
        self.skipped = taken
        """Why there is no trace."""
        self.recording = False
        self.done = False
        """No further steps are recorded."""
        self._cuda = device.type == "cuda"
        self._profiler: Any = None
        self._begun = self._runs = False
        self._passed = 0
        self._open: list[tuple[str, Any]] = []
        self._began_at = self._led_at = self._lead_in_s = self._lasted_s = 0.0

    @property
    def total_steps(self) -> int:
        """Steps from ``begin`` until the recording is complete."""
        return self.lead_in + 1 + self.steps

    def begin(self) -> None:
        """Prepare the profiler. Call between two steps."""
        if self._begun:
            return
        self._begun, self._began_at = True, now()
        self._try(self._prepare)
        self._led_at = now()

    def step(self) -> None:
        """A step has ended."""
        if not self._begun or self.done:
            return
        self._passed += 1
        if self._passed == self.lead_in:
            self._start()
        elif self._passed == self.total_steps:
            self._stop()
        elif self.recording:
            self._try(self._begin_next_step)

    def push(self, name: str) -> None:
        """A phase (``forward``), or a range inside one (``rung/prefetch``), begins."""
        if self.recording:
            self._try(lambda: self._enter(RANGE + name, RANGE + name))

    def pop(self) -> None:
        """The range pushed last ends."""
        if self.recording and len(self._open) > 1:
            self._try(self._leave)

    def end(self) -> dict[str, Any]:
        """Stop if still recording, write the trace and read it.

        Returns:
            The content of ``Measurement.kernels``: the result of ``kernel_account.read``, ``asked_steps`` and
            ``cost_s``; or ``skipped``: why there is no trace.
        """
        if self._begun and not self.done:
            self._stop()
        profiler, self._profiler = self._profiler, None
        whole, since = min(self.steps, self._passed - self.lead_in - 1), now()
        if self.skipped is None and (profiler is None or whole < 1):
            self.skipped = "the training ended before a traced step was complete"
        found: dict[str, Any] = {}
        if self.skipped is None:
            self._try(lambda: found.update(self._read(profiler, whole)))
        if self.skipped is not None:
            return {"skipped": self.skipped}
        traced_s = max(0.0, self._lasted_s - self._passed * self._lead_in_s)
        return {**found, "asked_steps": self.steps, "cost_s": traced_s + now() - since}

    # -- recording ------------------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        self.skipped = self.skipped or other_profilers.find_other_profiler(cuda=self._cuda)
        if self.skipped is not None:
            return
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._cuda else [])]
        profiler = profile(activities=activities, record_shapes=False, with_stack=False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that a later cycle would discard this one's events
            profiler.prepare_trace()
        self._profiler = profiler

    def _start(self) -> None:
        self._lead_in_s = (now() - self._led_at) / self.lead_in
        self.recording = True
        if self._profiler is not None:
            self._try(self._run)
        if self._cuda:
            self._try(lambda: torch.cuda.profiler.start())  # type: ignore[no-untyped-call]
        self._try(lambda: self._enter(RANGE + "step/lead_in", RANGE + "step/lead_in"))

    def _run(self) -> None:
        self._profiler.start_trace()
        self._runs = True

    def _begin_next_step(self) -> None:
        """Go from one step to the next; a range that spans both is split in two."""
        names = [name for name, _ in self._open[1:]]
        self._leave_all()
        number = self._passed - self.lead_in - 1
        self._enter(f"{STEP}{number}", f"{RANGE}step/{number}")
        for name in names:
            self._enter(name, name)

    def _stop(self) -> None:
        started, self.recording, self.done = self.recording, False, True
        self._try(self._leave_all)
        if self._profiler is not None:
            if not self._runs:  # a profiler left prepared makes every later one fail; only running it undoes that
                self._try(self._run)
            self._try(self._profiler.stop_trace)
        if self._cuda and started:
            self._try(lambda: torch.cuda.synchronize(self.device))
            self._try(lambda: torch.cuda.profiler.stop())  # type: ignore[no-untyped-call]
        self._lasted_s = now() - self._began_at

    def _enter(self, name: str, nvtx: str) -> None:
        ours = None
        if self._profiler is not None:
            ours = record_function(name)
            ours.__enter__()  # type: ignore[no-untyped-call]
        self._open.append((name, ours))
        if self._cuda:
            torch.cuda.nvtx.range_push(nvtx)  # type: ignore[no-untyped-call]

    def _leave(self) -> None:
        _, ours = self._open.pop()
        if self._cuda:
            torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]
        if ours is not None:
            ours.__exit__(None, None, None)

    def _leave_all(self) -> None:
        while self._open:
            self._leave()

    def _try(self, act: Callable[[], Any]) -> None:
        """An error in this class ends the trace, never the training."""
        try:
            act()
        except Exception as error:
            if self.skipped is None:
                self.skipped = f"{type(error).__name__}: {error}".replace("\n", " ")

    # -- reading --------------------------------------------------------------------------------------------------

    def _read(self, profiler: Any, steps: int) -> dict[str, Any]:
        if self.directory is not None:
            self.directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".trace-", dir=self.directory) as folder:
            plain, packed = Path(folder) / "trace.json", Path(folder) / NAME
            profiler.export_chrome_trace(str(plain))
            if self.directory is not None:
                with plain.open("rb") as source, gzip.open(packed, "wb", compresslevel=_LEVEL) as target:
                    shutil.copyfileobj(source, target, 1 << 20)
                packed.replace(self.directory / NAME)
            return kernel_account.read(plain, steps)

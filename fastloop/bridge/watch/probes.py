"""Checks of single steps: work and synchronizations during warm-up, the hunt and the trace after the window."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from fastloop.bridge.watch.phases import Marks
from fastloop.evidence.sync.cuda_warnings import SyncMarks
from fastloop.evidence.sync.hunt import LogSites, SyncHunt
from fastloop.evidence.trace.recording import TraceWindow
from fastloop.evidence.work.captured_graphs import count_kept, keep_graphs
from fastloop.evidence.work.compiled_work import CompiledWork, find_compiled
from fastloop.evidence.work.flops import FlopCount, may_count

HUNTED_STEPS = 5
MOST_LEAD_IN = 50


class CountWork:
    """Counts the work of one optimizer step while it runs; if it finds none, that of a later step. If modules or
    functions are compiled, their calls are recorded while the step runs and counted after it.

    Args:
        preserve_state: context that restores a module's state after running it once more; None: modules are not run
            again.
    """

    def __init__(self, preserve_state: Callable[..., contextlib.AbstractContextManager[object]] | None = None) -> None:
        self._preserve_state = preserve_state
        self._compiled: CompiledWork | None = None
        self._keeping = contextlib.ExitStack()
        self.found: Mapping[str, Any] = {"per_sample": None, "why": "the warm-up was too short to count FLOPs"}
        self._module: Any = None
        self._marks: Marks | None = None
        self._count: FlopCount | None = None
        self._samples, self._done = 0, False

    def attach(self, module: torch.nn.Module, marks: Marks) -> Callable[[], None]:
        """Begin to keep the graphs that are captured; returns the undo."""
        self._module, self._marks = module, marks
        self._keeping.enter_context(keep_graphs())
        return self._keeping.close

    def begin(self) -> None:
        """Count in the step that begins, unless the result is already known."""
        if self._marks is None or self._done:
            return
        self._samples = 0
        if (why := may_count(self._module)) is None:
            self._marks.around_work = self._count = FlopCount()
            return
        self.found = {"per_sample": None, "why": why}  # a later step may be one of compiled modules
        if self._preserve_state is not None and (count_kept() or find_compiled(self._module)):
            self._compiled = CompiledWork(self._module, self._preserve_state)
            self._compiled.open()

    def batch(self, samples: int | None) -> None:
        """Add a finished batch of the step."""
        if self._count is not None or self._compiled is not None:
            self._samples += samples or 0

    def end(self) -> None:
        if self._count is not None and self._marks is not None:
            self._marks.around_work = None
            self.found, self._count = self._count.per(self._samples), None
            self._done = self.found["per_sample"] is not None
        if self._compiled is not None:
            work, self._compiled = self._compiled, None
            work.close()
            found, has_modules = work.count(self._samples), bool(find_compiled(self._module))
            if work.was_called or has_modules:
                self.found = found
            self._done = found["per_sample"] is not None or has_modules

    def give_up(self) -> None:
        """Stop without a result."""
        self._count = None
        if self._compiled is not None:
            self._compiled.close()
            self._compiled = None
        if self._marks is not None:
            self._marks.around_work = None


class FindSyncs:
    """Finds the lines of a step that synchronize the device, without their cost: harmless in a user's own run."""

    def __init__(self) -> None:
        self.found: tuple[Mapping[str, Any], ...] = ()
        self._marks: SyncMarks | None = None
        self._open = contextlib.ExitStack()

    def begin(self) -> None:
        self._marks = self._open.enter_context(SyncMarks())

    def end(self) -> None:
        self._open.close()
        if self._marks is not None:
            self.found, self._marks = self._marks.result(steps=1), None

    def give_up(self) -> None:
        """Stop without a result."""
        self._marks = None
        self._open.close()


class HuntSyncs:
    """Finds the lines of a few steps that synchronize the device, with their cost. Slows these steps down."""

    steps = HUNTED_STEPS

    def __init__(self, device: torch.device) -> None:
        self.found: tuple[Mapping[str, Any], ...] = ()
        self.hunted_steps = 0
        """Number of steps that ``found`` covers; 0 if the hunt did not finish."""
        self._device, self._module = device, None
        self._hunt: SyncHunt | None = None
        self._sites: LogSites | None = None
        self._open = contextlib.ExitStack()
        self._done = 0

    def attach(self, module: Any) -> None:
        self._module = module

    def begin(self) -> None:
        if "torch._dynamo" in sys.modules:  # compiled code hides its lines, and a dispatch mode would recompile it
            self._open.enter_context(torch.compiler.set_stance("force_eager"))
        self._sites = self._open.enter_context(LogSites(self._module))
        self._hunt = self._open.enter_context(SyncHunt(self._device))

    def step_ends(self) -> None:
        self._done += 1

    def end(self) -> None:
        if self._hunt is not None and self._sites is not None:
            self._open.close()
            self.found = self._hunt.rows(max(1, self._done), self._sites)
            self._hunt, self.hunted_steps = None, self._done

    def give_up(self) -> None:
        """Stop without a result."""
        self._hunt = None
        self._open.close()


class TraceProbe:
    """Records the kernels of a few steps.

    Args:
        steps: optimizer steps to trace.
        place: returns the run's directory or None; called when the trace begins.
    """

    def __init__(self, trainer: Any, device: torch.device, steps: int, place: Callable[[], Path | None]) -> None:
        self.found: Mapping[str, Any] = {"skipped": "the training ended before the traced steps"}
        name = type(trainer.profiler).__name__
        taken = "the Trainer has a PyTorchProfiler, and only one can run" if name == "PyTorchProfiler" else None
        self._window = TraceWindow(device, None, steps, taken=taken)
        self._place = place
        self._marks: Marks | None = None

    @property
    def steps(self) -> int:
        return self._window.total_steps

    def attach(self, marks: Marks, queued_steps: int) -> None:
        """Skip as many steps before the trace as the loader's queues hold: filling them is not part of a usual step."""
        self._marks = marks
        self._window.lead_in = max(self._window.lead_in, min(queued_steps, MOST_LEAD_IN))

    def begin(self) -> None:
        self._window.directory = self._place()
        self._window.begin()
        if self._marks is not None:
            self._marks.ranges = self._window

    def step_ends(self) -> None:
        self._window.step()

    def end(self) -> None:
        if self._marks is not None:
            self._marks.ranges = None
        self.found = self._window.end()

    def give_up(self) -> None:
        """Stop without a result: no profiler is left running."""
        if self._marks is not None:
            self._marks.ranges = None
        self._window.end()

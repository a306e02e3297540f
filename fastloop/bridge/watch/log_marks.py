"""Marks phases inside other Lightning calls (``self.log`` and ``manual_backward``), and the loggers' call after every
batch."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from fastloop.bridge.attributes import replace_method
from fastloop.bridge.watch.phases import Marks
from fastloop.records.plan import Undo

LOGGERS, SELF_LOG = "loggers", "self.log"
_TURN = "update_train_step_metrics"


class LogMarks:
    """Marks logging as ``callbacks_logging``, and the backward of manual optimization as ``backward``.

    The module's methods are replaced only while a marked ``training_step`` runs, so that no copy or pickle of the
    module ever holds ours; and not at all if the step is compiled, because it would recompile.
    """

    def __init__(self, trainer: Any, module: Any, marks: Marks) -> None:
        self.module, self.marks = module, marks
        self.batch_size: int | None = None
        """The first batch_size that the module passed to ``log`` since this was last reset to None."""
        self._undos: list[Undo] = []
        # Private in Lightning; without it the loggers' time counts as `host_other`.
        connector = getattr(trainer, "_logger_connector", None)
        if callable(turn := getattr(connector, _TURN, None)) and _TURN not in vars(connector):
            self._undos.append(replace_method(connector, _TURN, self._time_call(turn, LOGGERS)))
        if not _is_compiled(module):
            marks.around_forward = self._swap_in
            epoch_loop = getattr(getattr(trainer, "fit_loop", None), "epoch_loop", None)
            results: Any = getattr(epoch_loop, "_results", None)
            if callable(log := getattr(results, "log", None)) and "log" not in vars(results):
                self._undos.append(replace_method(results, "log", self._note_batch_size(log)))

    def undo(self) -> None:
        """Restore everything. Idempotent."""
        for undo in self._undos:
            undo()
        self.marks.around_forward = None

    def _swap_in(self) -> Callable[[], None]:
        """Time calls of the module's ``log``; calling the returned function stops that."""
        undos = [replace_method(self.module, "log", self._time_call(self.module.log, SELF_LOG))]
        if not self.module.automatic_optimization:  # its backward runs inside the forward's action
            timed = self._time_call(self.module.manual_backward, None, "backward")
            undos.append(replace_method(self.module, "manual_backward", timed))

        def back() -> None:
            for undo in undos:
                undo()

        return back

    def _note_batch_size(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a call, so that its ``batch_size`` argument is recorded."""

        def noting(*args: Any, **kwargs: Any) -> Any:
            given = kwargs.get("batch_size")
            if self.batch_size is None and type(given) is int:
                self.batch_size = given
            return call(*args, **kwargs)

        return noting

    def _time_call(
        self, call: Callable[..., Any], name: str | None, phase: str = "callbacks_logging"
    ) -> Callable[..., Any]:
        """Wrap a call, so that it is marked as a phase."""
        marks = self.marks

        def timed(*args: Any, **kwargs: Any) -> Any:
            if not marks.is_marking():
                return call(*args, **kwargs)
            began = time.perf_counter()
            if name is not None and not marks.in_detail():
                try:
                    return call(*args, **kwargs)
                finally:
                    marks.add_hook_time(name, time.perf_counter() - began)
            marks.enter(phase)
            try:
                return call(*args, **kwargs)
            finally:
                marks.leave()
                if name is not None:
                    marks.add_if_in_window(name, time.perf_counter() - began)

        return timed


def _is_compiled(module: Any) -> bool:
    """Whether torch.compile may have traced this module's own methods, whose guards a replaced ``log`` would break."""
    own = vars(module)
    return (
        any(name in own for name in ("training_step", "forward", "_compiled_call_impl", "log"))
        or getattr(module, "_compiler_ctx", None) is not None
        or hasattr(getattr(type(module), "training_step", None), "_torchdynamo_orig_callable")
    )

"""Marks phases inside other Lightning calls (``self.log`` and ``manual_backward``), and the loggers' call after every
batch."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from fastloop.bridge.watch.phases import Marks
from fastloop.evidence.work.compiled_work import return_itself

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
        # Private in Lightning; without it the loggers' time counts as `host_other`.
        self._connector = getattr(trainer, "_logger_connector", None)
        self._marked: Any = None
        if callable(getattr(self._connector, _TURN, None)) and _TURN not in vars(self._connector):
            self._marked = vars(self._connector)[_TURN] = self._time_call(getattr(self._connector, _TURN), LOGGERS)
        self._results: Any = getattr(getattr(getattr(trainer, "fit_loop", None), "epoch_loop", None), "_results", None)
        self._noted: Any = None
        own_log: Any = getattr(self._results, "log", None)
        if not _is_compiled(module):
            marks.around_forward = self._swap_in
            if callable(own_log) and "log" not in vars(self._results):
                self._noted = vars(self._results)["log"] = _Noted(self, own_log)

    def undo(self) -> None:
        """Restore everything. Idempotent."""
        if self._marked is not None and vars(self._connector).get(_TURN) is self._marked:
            del vars(self._connector)[_TURN]
        if self._noted is not None and vars(self._results).get("log") is self._noted:
            del vars(self._results)["log"]
        self.marks.around_forward = None

    def _swap_in(self) -> Callable[[], None]:
        """Time calls of the module's ``log``; calling the returned function stops that."""
        own = vars(self.module)
        ours = {"log": self._time_call(self.module.log, SELF_LOG)}
        if not self.module.automatic_optimization:  # its backward runs inside the forward's action
            ours["manual_backward"] = self._time_call(self.module.manual_backward, None, "backward")
        before = {name: own[name] for name in ours if name in own}
        own.update(ours)

        def back() -> None:
            for name, call in ours.items():
                if own.get(name) is call:
                    del own[name]
                    own.update({name: before[name]} if name in before else {})

        return back

    def _time_call(self, call: Callable[..., Any], name: str | None, phase: str = "callbacks_logging") -> _Timed:
        return _Timed(self.marks, call, name, phase)


class _Noted:
    """A call whose ``batch_size`` argument is recorded. Copies and pickles hold the original call."""

    def __init__(self, notes: LogMarks, call: Callable[..., Any]) -> None:
        self.notes, self.call = notes, call

    def __reduce_ex__(self, protocol: Any) -> Any:
        return (return_itself, (self.call,))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = kwargs.get("batch_size")
        if given is not None and self.notes.batch_size is None and type(given) is int:
            self.notes.batch_size = given
        return self.call(*args, **kwargs)


class _Timed:
    """A call that is marked as a phase. Copies and pickles hold the original call, because copies are not watched."""

    def __init__(self, marks: Marks, call: Callable[..., Any], name: str | None, phase: str) -> None:
        self.marks, self.call, self.name, self.phase = marks, call, name, phase

    def __reduce_ex__(self, protocol: Any) -> Any:
        return (return_itself, (self.call,))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        marks, name = self.marks, self.name
        if not marks.is_marking():
            return self.call(*args, **kwargs)
        began = time.perf_counter()
        if name is not None and not marks.in_detail():
            try:
                return self.call(*args, **kwargs)
            finally:
                marks.add_hook_time(name, time.perf_counter() - began)
        marks.enter(self.phase)
        try:
            return self.call(*args, **kwargs)
        finally:
            marks.leave()
            if name is not None:
                marks.add_if_in_window(name, time.perf_counter() - began)


def _is_compiled(module: Any) -> bool:
    """Whether torch.compile may have traced this module's own methods, whose guards a replaced ``log`` would break."""
    own = vars(module)
    return (
        any(name in own for name in ("training_step", "forward", "_compiled_call_impl", "log"))
        or getattr(module, "_compiler_ctx", None) is not None
        or hasattr(getattr(type(module), "training_step", None), "_torchdynamo_orig_callable")
    )

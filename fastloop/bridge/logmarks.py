"""Phases in a call of Lightning's, ``self.log`` and ``manual_backward``; and the loggers' turn after every batch."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from fastloop.bridge.marks import Marks

LOGGERS, SELF_LOG = "loggers", "self.log"
_TURN = "update_train_step_metrics"


class LogMarks:
    """Marks logging as ``callbacks_logging``, and a manual optimisation's backward as ``backward``.

    The module's methods are replaced only while a marked ``training_step`` runs, so that no copy or pickle of the
    module ever holds ours; and not at all where the step is compiled, which would then be compiled again.
    """

    def __init__(self, trainer: Any, module: Any, marks: Marks) -> None:
        self.module, self.marks = module, marks
        # Private in Lightning, and without it the loggers' turn is `host_other`.
        self._connector = getattr(trainer, "_logger_connector", None)
        self._marked: Any = None
        if callable(getattr(self._connector, _TURN, None)) and _TURN not in vars(self._connector):
            self._marked = vars(self._connector)[_TURN] = self._timed(getattr(self._connector, _TURN), LOGGERS)
        if not _is_compiled(module):
            marks.around_forward = self._swapped

    def undo(self) -> None:
        """Put everything back; harmless when called twice."""
        if self._marked is not None and vars(self._connector).get(_TURN) is self._marked:
            del vars(self._connector)[_TURN]
        self.marks.around_forward = None

    def _swapped(self) -> Callable[[], None]:
        """Let the module's ``log`` be marked until what is returned is called."""
        own = vars(self.module)
        ours = {"log": self._timed(self.module.log, SELF_LOG)}
        if not self.module.automatic_optimization:  # whose backward is part of the forward's action
            ours["manual_backward"] = self._timed(self.module.manual_backward, None, "backward")
        before = {name: own[name] for name in ours if name in own}
        own.update(ours)

        def back() -> None:
            for name, call in ours.items():
                if own.get(name) is call:
                    del own[name]
                    own.update({name: before[name]} if name in before else {})

        return back

    def _timed(self, call: Callable[..., Any], name: str | None, phase: str = "callbacks_logging") -> _Timed:
        return _Timed(self.marks, call, name, phase)


class _Timed:
    """A call that is marked as a phase. Copies and pickles hold the call itself: nobody watches a copy."""

    def __init__(self, marks: Marks, call: Callable[..., Any], name: str | None, phase: str) -> None:
        self.marks, self.call, self.name, self.phase = marks, call, name, phase

    def __reduce_ex__(self, protocol: Any) -> Any:
        return (_itself, (self.call,))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        marks, name = self.marks, self.name
        if not marks.listens():
            return self.call(*args, **kwargs)
        began = time.perf_counter()
        if name is not None and not marks.in_detail():
            try:
                return self.call(*args, **kwargs)
            finally:
                marks.hook_took(name, time.perf_counter() - began)
        marks.enter(self.phase)
        try:
            return self.call(*args, **kwargs)
        finally:
            marks.leave()
            if name is not None:
                marks.lasted(name, time.perf_counter() - began)


def _itself(call: Callable[..., Any]) -> Callable[..., Any]:
    return call


def _is_compiled(module: Any) -> bool:
    """Whether torch.compile may have traced this module's own methods, whose guards a replaced ``log`` would break."""
    own = vars(module)
    return (
        any(name in own for name in ("training_step", "forward", "_compiled_call_impl", "log"))
        or getattr(module, "_compiler_ctx", None) is not None
        or hasattr(getattr(type(module), "training_step", None), "_torchdynamo_orig_callable")
    )

"""Finds hidden synchronizations: every call that makes the host wait for the device, attributed to the user's line.

For a disposable process: every torch function goes through Python here, which costs microseconds. In a user's live run,
`SyncMarks` finds the lines without times. On the CPU nothing waits; lines that would wait on a GPU are still reported.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from fastloop.evidence.sync import table
from fastloop.evidence.sync.call_site import find_logged_name, find_site
from fastloop.evidence.sync.cuda_warnings import SyncWarnings
from fastloop.evidence.sync.tally import Tally

_COPIES = (".cpu()", ".to('cpu')")
_ENGINE_CALLS = ("backward", "grad")
"""These calls are not timed: waits inside them are detected separately."""


class SyncHunt:
    """Counts and, on CUDA, times synchronizations inside ``with``, in this thread and in the backward's.

    Compiled code is opaque: run the steps under ``torch.compiler.set_stance("force_eager")``.

    Args:
        device: the device that runs the steps; None: the CPU. On CUDA only calls that involve a CUDA tensor count.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self.on_cuda = device is not None and device.type == "cuda"
        self.tally = Tally()
        self._open = contextlib.ExitStack()
        self._here = threading.local()
        self._copied: tuple[Any, str] | None = None

    def __enter__(self) -> SyncHunt:
        with contextlib.ExitStack() as opening:
            for owner, name in _list_explicit():
                opening.enter_context(_replaced(owner, name, functools.partial(self._time_call, name)))
            if self.on_cuda:
                opening.enter_context(SyncWarnings(self._note_warning))
            calls = opening.enter_context(_Calls(self))
            # Torch runs ``backward`` without this mode; hooks and custom functions in it need the mode.
            opening.enter_context(_replaced(torch.autograd, "_engine_run_backward", calls.enclose))
            self._open = opening.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def rows(self, steps: int, sites: LogSites) -> tuple[Mapping[str, Any], ...]:
        """The results in the form of ``Measurement.syncs``: most expensive first, one row per line."""
        return self.tally.rows(steps, sites.sites)

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run a torch function, and record it if it made the host wait."""
        name = getattr(function, "__name__", "")
        watched = table.is_known(name)
        if name in _ENGINE_CALLS or not (watched or self.on_cuda):
            return function(*args, **kwargs)
        self._here.inside, self._here.warned = True, False
        began = time.perf_counter()
        try:
            out = function(*args, **kwargs)
        finally:
            took, self._here.inside = time.perf_counter() - began, False
        with contextlib.suppress(Exception):  # hunting must never break the step
            what = table.name_call(function, args, kwargs, out, self.on_cuda) if watched else None
            if what is None and self._here.warned:
                what = f"torch.{name}"
            if what is not None:
                self._note(sys._getframe(2), what, took, args[0] if args else None, out)
        return out

    def _note(self, frame: FrameType | None, what: str, took: float, tensor: Any, out: Any) -> None:
        found = find_site(frame)
        if not self.on_cuda:
            # Step counters of torch's optimizers and a loader's samples are on the host, whatever the model's device.
            if found.of_optimizer or found.of_loading:
                return
            if what in _COPIES:
                self._copied = (weakref.ref(out), found.where)
            elif self._follows_copy(tensor, found.where):
                return
        name = find_logged_name(frame, tensor) if found.cause is not None and found.cause.kind == "logger" else None
        self.tally.add(found, what, took if self.on_cuda else None, name)

    def _follows_copy(self, tensor: Any, where: str) -> bool:
        """`x.cpu().numpy()` waits once, for the copy; on the CPU the tensor itself does not show that."""
        return self._copied is not None and self._copied[0]() is tensor is not None and self._copied[1] == where

    def _note_warning(self, frame: FrameType) -> None:
        """CUDA reports a synchronization: inside a timed call, or in one that torch functions do not show."""
        if getattr(self._here, "inside", False):
            self._here.warned = True
        else:
            found = find_site(frame)
            self.tally.add(found, table.guess(found.text, found.through), None)

    def _time_call(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        """Times a function that synchronizes explicitly."""

        @functools.wraps(original)
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                took = time.perf_counter() - began
                with contextlib.suppress(Exception):
                    found = find_site(sys._getframe(1))
                    self.tally.add(found, f"{name}()", took if self.on_cuda else None)

        return timed


class _Calls(TorchFunctionMode):
    """Passes every torch function of this thread, and of the engine's thread during its backward, to the hunt."""

    def __init__(self, hunt: SyncHunt) -> None:
        super().__init__()
        self._hunt = hunt

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        return self._hunt.call(func, args, kwargs or {})

    def enclose(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """A version of the function that runs inside this mode."""

        def run(*args: Any, **kwargs: Any) -> Any:
            with self:
                return original(*args, **kwargs)

        return run


@contextlib.contextmanager
def _replaced(owner: Any, name: str, replace: Callable[[Any], Any]) -> Iterator[None]:
    """Replaces ``owner.name``, if it exists; restores it afterwards, unless other code has replaced it since."""
    original = getattr(owner, name, None)
    if not callable(original):
        yield
        return
    own, ours = name in vars(owner), replace(original)
    setattr(owner, name, ours)
    try:
        yield
    finally:
        if vars(owner).get(name) is ours:
            setattr(owner, name, original) if own else delattr(owner, name)


def _list_explicit() -> list[tuple[Any, str]]:
    owners = [torch.cuda, torch.cuda.Stream, torch.cuda.Event, torch.accelerator]
    return [(owner, "synchronize") for owner in owners] + [(torch.distributed, "barrier")]


# Which line logs which metric: Lightning synchronizes for it much later, when that line is no longer on the stack.


class LogSites:
    """Records, inside ``with``, the lines that call the ``log`` and ``log_dict`` methods of an object.

    Instance attributes temporarily override the class's methods; they are removed afterwards.
    """

    def __init__(self, module: Any) -> None:
        self.sites: dict[str, str] = {}
        """Lines by metric name."""
        self._module, self._inside = module, False
        self._open = contextlib.ExitStack()

    def __enter__(self) -> LogSites:
        for method in ("log", "log_dict"):
            self._open.enter_context(_replaced(self._module, method, self._note_calls))
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def _note_calls(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def log(*args: Any, **kwargs: Any) -> Any:
            if self._inside:  # a `log_dict` that calls `log`
                return original(*args, **kwargs)
            with contextlib.suppress(Exception):  # noting must never break the step
                self._note(args[0] if args else kwargs.get("name") or kwargs["dictionary"])
            self._inside = True
            try:
                return original(*args, **kwargs)
            finally:
                self._inside = False

        return log

    def _note(self, names: str | Mapping[str, Any]) -> None:
        where = find_site(sys._getframe(2)).where
        self.sites.update({str(name): where for name in ([names] if isinstance(names, str) else names)})

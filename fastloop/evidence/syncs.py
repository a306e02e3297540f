"""The hunt for hidden synchronisations: every call that makes the host wait for the device, by the user's own line.

For a process that may be thrown away: each torch function goes through Python here, which costs microseconds. In a
user's live run `SyncMarks` finds the lines without times. On the CPU nothing waits; the lines that would on a GPU are
named all the same.
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

from fastloop.evidence import synckinds
from fastloop.evidence.callsite import logged_name, site
from fastloop.evidence.logsites import LogSites
from fastloop.evidence.syncmarks import SyncMarks, SyncWarnings
from fastloop.evidence.synctally import Tally

__all__ = ["LogSites", "SyncHunt", "SyncMarks", "blame"]

_COPIES = (".cpu()", ".to('cpu')")
_ENGINE_CALLS = ("backward", "grad")
"""No calls to time: what waits inside them is seen by itself."""


class SyncHunt:
    """Counts and, on CUDA, times what synchronises inside ``with``, in this thread and in the backward's.

    Compiled code is opaque: run the steps under ``torch.compiler.set_stance("force_eager")``.

    Args:
        device: where the steps run. On CUDA only what touches a CUDA tensor counts; None: the CPU.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self.on_cuda = device is not None and device.type == "cuda"
        self.tally = Tally()
        self._open = contextlib.ExitStack()
        self._here = threading.local()
        self._copied: tuple[Any, str] | None = None

    def __enter__(self) -> SyncHunt:
        with contextlib.ExitStack() as opening:
            for owner, name in _explicit():
                opening.enter_context(self._patched(owner, name))
            if self.on_cuda:
                opening.enter_context(SyncWarnings(self._warned))
            calls = opening.enter_context(_Calls(self))
            opening.enter_context(_through_the_engine(calls))
            self._open = opening.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run a torch function, and note it where it made the host wait."""
        name = getattr(function, "__name__", "")
        watched = synckinds.known(name)
        if name in _ENGINE_CALLS or not (watched or self.on_cuda):
            return function(*args, **kwargs)
        self._here.inside, self._here.warned = True, False
        began = time.perf_counter()
        try:
            out = function(*args, **kwargs)
        finally:
            took, self._here.inside = time.perf_counter() - began, False
        with contextlib.suppress(Exception):  # hunting must never break the step
            what = synckinds.named(function, args, kwargs, out, self.on_cuda) if watched else None
            if what is None and self._here.warned:
                what = f"torch.{name}"
            if what is not None:
                self._note(sys._getframe(2), what, took, args[0] if args else None, out)
        return out

    def _note(self, frame: FrameType | None, what: str, took: float, tensor: Any, out: Any) -> None:
        found = site(frame)
        if not self.on_cuda:
            # Counters of torch's optimizers and samples of a loader live on the host wherever the model does.
            if found.of_optimizer or found.of_loading:
                return
            if what in _COPIES:
                self._copied = (weakref.ref(out), found.where)
            elif self._follows_copy(tensor, found.where):
                return
        name = logged_name(frame, tensor) if found.cause is not None and found.cause.kind == "logger" else None
        self.tally.add(found, what, took if self.on_cuda else None, name)

    def _follows_copy(self, tensor: Any, where: str) -> bool:
        """`x.cpu().numpy()` waits once: the tensor is on the host already, though on the CPU every tensor is."""
        return self._copied is not None and self._copied[0]() is tensor is not None and self._copied[1] == where

    def _warned(self, frame: FrameType) -> None:
        """CUDA says that it synchronised: in a call of ours, or in one that torch functions do not tell us of."""
        if getattr(self._here, "inside", False):
            self._here.warned = True
        else:
            found = site(frame)
            self.tally.add(found, synckinds.guessed(found.text, found.through), None)

    @contextlib.contextmanager
    def _patched(self, owner: Any, name: str) -> Iterator[None]:
        """Times calls of `owner.name`, which are synchronisations written out."""
        own, original = name in vars(owner), getattr(owner, name)

        @functools.wraps(original)
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                took = time.perf_counter() - began
                with contextlib.suppress(Exception):
                    found = site(sys._getframe(1))
                    self.tally.add(found, f"{name}()", took if self.on_cuda else None)

        setattr(owner, name, timed)
        try:
            yield
        finally:
            if vars(owner).get(name) is timed:
                setattr(owner, name, original) if own else delattr(owner, name)


class _Calls(TorchFunctionMode):
    """Hands every torch function of this thread, and of the engine's for its backward, to the hunt."""

    def __init__(self, hunt: SyncHunt) -> None:
        super().__init__()
        self._hunt = hunt

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        return self._hunt.call(func, args, kwargs or {})


@contextlib.contextmanager
def _through_the_engine(calls: _Calls) -> Iterator[None]:
    """Torch runs ``backward`` without the mode that saw the call; hooks and custom functions in there want it back."""
    module, name = torch.autograd, "_engine_run_backward"
    original = getattr(module, name, None)
    if original is None:
        yield
        return

    def run(*args: Any, **kwargs: Any) -> Any:
        with calls:
            return original(*args, **kwargs)

    setattr(module, name, run)
    try:
        yield
    finally:
        if getattr(module, name) is run:
            setattr(module, name, original)


def _explicit() -> list[tuple[Any, str]]:
    owners = [(torch.cuda, "synchronize"), (torch.cuda.Stream, "synchronize"), (torch.cuda.Event, "synchronize"),
              (getattr(torch, "accelerator", None), "synchronize")]  # fmt: skip
    if torch.distributed.is_available():
        owners.append((torch.distributed, "barrier"))
    return [(owner, name) for owner, name in owners if hasattr(owner, name)]


def blame(hunt: SyncHunt, sites: LogSites, steps: int) -> tuple[Mapping[str, Any], ...]:
    """What the hunt found in so many steps, as ``Measurement.syncs`` holds it: dearest first, one row per line."""
    return hunt.tally.rows(steps, sites.sites)

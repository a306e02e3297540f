"""Wraps the Trainer's own profiler: marks the actions that are phases of the step, and forwards every call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastloop.bridge.watch.phases import NEXT, NOTHING
from fastloop.evidence.work.compiled_work import return_itself


class WatchingProfiler:
    """Looks like the user's profiler from outside.

    Args:
        profiler: the Trainer's profiler; Lightning's pass-through one is not called, which saves its cost.
        on_request: called when the loop requests a batch; must not raise.
        on_batch: called when the loop has its batch; must not raise.
        profile: returns our context for an action, NOTHING for one that is not a phase; must not raise.
    """

    def __init__(
        self,
        profiler: Any,
        on_request: Callable[[], None],
        on_batch: Callable[[], None],
        profile: Callable[[str], Any],
    ) -> None:
        passes = type(profiler).__name__ == "PassThroughProfiler"
        self.__dict__.update(
            profiler=profiler,
            _on_request=on_request,
            _on_batch=on_batch,
            _phase=profile,
            _passes=passes,
            _begun={},
            profile=profile if passes else self._enter_both,
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["profiler"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.__dict__["profiler"], name, value)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # so that isinstance sees the user's profiler
        return type(self.__dict__["profiler"])

    def __reduce_ex__(self, protocol: Any) -> Any:
        # A copy of the Trainer is not watched, so copies and pickles hold the user's profiler.
        return (return_itself, (self.__dict__["profiler"],))

    def start(self, action_name: str) -> None:
        if action_name.endswith(NEXT):
            self._on_request()
        else:
            self._begun[action_name] = ours = self._phase(action_name)
            ours.__enter__()
        if not self._passes:
            self.profiler.start(action_name)

    def stop(self, action_name: str) -> None:
        if not self._passes:
            self.profiler.stop(action_name)
        if action_name.endswith(NEXT):
            self._on_batch()
        elif (ours := self._begun.pop(action_name, None)) is not None:
            ours.__exit__(None, None, None)

    def _enter_both(self, action_name: str) -> Any:
        theirs, ours = self.profiler.profile(action_name), self._phase(action_name)
        return theirs if ours is NOTHING else _Both(ours, theirs)


class _Both:
    """Our context around the user's own."""

    def __init__(self, ours: Any, theirs: Any) -> None:
        self.ours, self.theirs = ours, theirs

    def __enter__(self) -> Any:
        self.ours.__enter__()
        return self.theirs.__enter__()

    def __exit__(self, *raised: Any) -> Any:
        try:
            return self.theirs.__exit__(*raised)
        finally:
            self.ours.__exit__(*raised)

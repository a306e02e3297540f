"""Replaces attributes of live objects, and puts the originals back."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from fastloop.evidence.work.compiled_work import return_itself
from fastloop.records.plan import Undo


def set_attribute(owner: Any, name: str, value: Any) -> Undo:
    """Set an instance attribute; returns an undo that restores the instance and may be called twice."""
    had, before = name in vars(owner), vars(owner).get(name)
    setattr(owner, name, StandsFor(getattr(owner, name), value) if callable(value) else value)

    def undo() -> None:
        if had:
            setattr(owner, name, before)
        else:
            vars(owner).pop(name, None)

    return undo


@contextlib.contextmanager
def attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set an instance attribute inside ``with``, then restore the instance."""
    undo = set_attribute(owner, name, value)
    try:
        yield
    finally:
        undo()


def replace_method(owner: Any, name: str, ours: Callable[..., Any]) -> Undo:
    """Replace a method of one object. The undo changes nothing if other code has replaced ours since; it may be called
    twice."""
    own = vars(owner)
    before = {name: own[name]} if name in own else {}
    replacement = own[name] = StandsFor(getattr(owner, name), ours)

    def undo() -> None:
        if own.get(name) is replacement:
            del own[name]
            own.update(before)

    return undo


class StandsFor(partial[Any]):
    """Our replacement for a bound method. Copies and pickles of its owner get the original method, because they are not
    part of this run."""

    _method: Any

    def __new__(cls, method: Any, ours: Callable[..., Any]) -> StandsFor:
        self = super().__new__(cls, ours)
        self._method = method
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        return return_itself, (self._method,)

"""What stands in for a loader or a sampler, and passes on whatever it does not do itself."""

from __future__ import annotations

from typing import Any


class PassesOn:
    """What it does not know itself is read from ``inner``."""

    inner: Any

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # not set yet: a copy or an unpickled stand-in
            raise AttributeError(name)
        return getattr(self.inner, name)


class StandIn(PassesOn):
    """The same for what has a length."""

    def __len__(self) -> int:
        return len(self.inner)

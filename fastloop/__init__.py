"""fastloop finds out why a Lightning training loop leaves its GPU idle, applies the fix and proves it.

Importing this package is cheap: torch and Lightning are imported on first access to a name that needs them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastloop.bridge.fit.callback import FastLoop as FastLoop
    from fastloop.errors import ConfigError as ConfigError
    from fastloop.errors import FastLoopError as FastLoopError
    from fastloop.feeds.cache.marking import cached_prefix as cached_prefix
    from fastloop.ladder import Ladder as Ladder
    from fastloop.records.measurement import Measurement as Measurement
    from fastloop.records.plan import Finding as Finding
    from fastloop.records.plan import Plan as Plan
    from fastloop.records.plan import Verdict as Verdict

__version__ = "0.1.0"

_HOMES = {
    "ConfigError": "errors",
    "FastLoop": "bridge.fit.callback",
    "FastLoopError": "errors",
    "Finding": "records.plan",
    "Ladder": "ladder",
    "Measurement": "records.measurement",
    "Plan": "records.plan",
    "Verdict": "records.plan",
    "cached_prefix": "feeds.cache.marking",
}
__all__ = [
    "ConfigError",
    "FastLoop",
    "FastLoopError",
    "Finding",
    "Ladder",
    "Measurement",
    "Plan",
    "Verdict",
    "cached_prefix",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'fastloop' has no attribute {name!r}")
    return getattr(importlib.import_module(f"fastloop.{_HOMES[name]}"), name)

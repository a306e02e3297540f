"""fastloop finds out why a Lightning training loop does not fill its GPU, applies the fix and proves it.

Importing this package costs nothing: torch and Lightning are imported on first access to a name that needs them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastloop.bridge.callback import FastLoop as FastLoop
    from fastloop.errors import ConfigError as ConfigError
    from fastloop.errors import FastLoopError as FastLoopError
    from fastloop.ladder import Ladder as Ladder
    from fastloop.measurement import Measurement as Measurement
    from fastloop.records import Finding as Finding
    from fastloop.records import Plan as Plan
    from fastloop.records import Verdict as Verdict

__version__ = "0.1.0"

_HOMES = {"ConfigError": "errors", "FastLoop": "bridge.callback", "FastLoopError": "errors", "Finding": "records",
          "Ladder": "ladder", "Measurement": "measurement", "Plan": "records", "Verdict": "records"}  # fmt: skip
__all__ = ["ConfigError", "FastLoop", "FastLoopError", "Finding", "Ladder", "Measurement", "Plan", "Verdict"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'fastloop' has no attribute {name!r}")
    return getattr(importlib.import_module(f"fastloop.{_HOMES[name]}"), name)

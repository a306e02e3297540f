"""How fast a train loader is on its own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastloop.config import Config


def measure(config: Config, beat: Path | None) -> Mapping[str, Any]:
    """Being written."""
    raise NotImplementedError

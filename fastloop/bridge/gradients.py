"""The gradient of one optimizer step, compared with another arm's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastloop.config import Config


def measure(config: Config, out: Path, beat: Path | None, reference: Path | None) -> Mapping[str, Any]:
    """Being written."""
    raise NotImplementedError

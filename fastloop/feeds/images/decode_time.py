"""Measures how long one core takes to decode one of a dataset's image files."""

from __future__ import annotations

import statistics
import time
from typing import Any

from fastloop.errors import let_through
from fastloop.feeds.images.reading import NotImages, read_source

FILES = 9
LIMIT_S = 0.3
"""No file is started after this time."""


def measure_decode_ms(dataset: Any) -> float | None:
    """Return the median time to open a file and decode it to RGB, over a few spread across the dataset; None if it has
    no image files.

    The first file does not count, since it includes one-time costs.
    """
    try:
        return _time_files(read_source(dataset).list_paths(FILES))
    except NotImages:
        return None
    except Exception as error:  # a file that is missing or broken: the training has already reported it
        let_through(error)
        return None


def _time_files(paths: list[str]) -> float | None:
    from PIL import Image

    times_ms: list[float] = []
    until = time.perf_counter() + LIMIT_S
    for path in paths:
        began = time.perf_counter()
        if began > until:
            break
        with Image.open(path) as image:
            image.convert("RGB")
        times_ms.append(1e3 * (time.perf_counter() - began))
    return statistics.median(times_ms[1:] or times_ms) if times_ms else None

"""What decoding one of a dataset's image files takes on one core."""

from __future__ import annotations

import statistics
import time
from typing import Any

from fastloop.errors import let_through
from fastloop.feeds.images.reading import Unknown, read_source

FILES = 9
LIMIT_S = 0.3
"""No file is begun after this time."""


def measure_decode_ms(dataset: Any) -> float | None:
    """Median time for opening and decoding a file to RGB, of a few from all over the dataset; None where it has none.

    The first file is not counted: it pays for what is loaded once.
    """
    try:
        source = read_source(dataset)
        indices = range(0, source.count, max(1, source.count // FILES))
        return _time_files([source.locate(index)[0] for index in indices[:FILES]])
    except Unknown:
        return None
    except Exception as error:  # a file that is gone, or is none: the training had its say about that
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

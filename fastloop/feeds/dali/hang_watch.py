"""Ends a wait for DALI's next batch that takes too long, such as for a drive that does not answer."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from fastloop.feeds.workers import tried_workers


class HangWatch:
    """Watches the waits for a pipeline's batches from a thread. Native code cannot be interrupted, not even by Ctrl-C,
    but it raises once the pipeline is shut down.

    Args:
        warn: receives the seconds waited, once a wait takes long.

    Attributes:
        hung_s: length of the wait that was ended; None if none was. The pipeline cannot be used after that.
    """

    def __init__(self, warn: Callable[[float], None]) -> None:
        self._warn = warn
        self._waits_for: tuple[float, Any] | None = None
        """When the current wait began, and its pipeline."""
        self._over = threading.Event()
        self.hung_s: float | None = None
        self._thread = threading.Thread(target=self._look, daemon=True, name="fastloop-dali-watch")
        self._thread.start()

    @contextlib.contextmanager
    def limited(self, pipeline: Any) -> Iterator[None]:
        """Limit the wait inside ``with``."""
        self._waits_for = time.monotonic(), pipeline
        try:
            yield
        finally:
            self._waits_for = None

    def close(self) -> None:
        """End the thread; after a hang, it ends when DALI's threads do."""
        self._over.set()
        if self.hung_s is None:
            self._thread.join()

    def _look(self) -> None:
        said_of = 0.0
        while not self._over.wait(tried_workers.LOOK_S):
            if (waits_for := self._waits_for) is None:
                continue
            begun, pipeline = waits_for
            waited_s = time.monotonic() - begun
            if waited_s >= tried_workers.LIMIT_S:
                self.hung_s = waited_s
                _shut_down(pipeline)
                return
            if waited_s >= tried_workers.SAY_S and said_of != begun:
                said_of = begun
                self._warn(waited_s)


def _shut_down(pipeline: Any) -> None:
    """Shut a pipeline down. This wakes the thread that waits for it, and then waits for DALI's threads, maybe forever.
    The pipeline object loses its native half first. Otherwise its destructor and DALI's exit function would shut it
    down as well, and wait too."""
    native: Any = getattr(pipeline, "_pipe", None)  # private: DALI 2.4 has it
    if hasattr(native, "Shutdown"):
        pipeline._pipe = None
        native.Shutdown()

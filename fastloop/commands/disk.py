"""A disk without room is the machine's doing: it is said as such, wherever a command was when it happened."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from pathlib import Path

from fastloop.errors import FastLoopError

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)


@contextlib.contextmanager
def writing(where: Path) -> Iterator[None]:
    """Writing into a run directory; whatever goes wrong otherwise passes.

    Raises:
        FastLoopError: no room is left, or the disk takes nothing; the run directory holds what was written until then.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        what = f"{error.filename}" if error.filename else f"run directory {where}"
        raise FastLoopError(got=what, why=f"it cannot be written: {error.strerror}",
                            do=f"make room, or write --out with a directory on another disk; {where} is incomplete",
                            ) from error  # fmt: skip

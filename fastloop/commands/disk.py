"""A disk without room is the machine's doing: it is said as such, wherever a command was when it happened."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from pathlib import Path

from fastloop.errors import FastLoopError

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)


@contextlib.contextmanager
def writing(where: Path, begins: str | None = None) -> Iterator[None]:
    """Writing into a run directory; whatever goes wrong otherwise passes.

    Args:
        begins: the file whose being there says that what was begun can go on, by ``--resume``.

    Raises:
        FastLoopError: no room is left, or the disk takes nothing; the run directory holds what was written until then.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        what = f"{error.filename}" if error.filename else f"run directory {where}"
        do = f"make room, or write --out with a directory on another disk; {where} is incomplete"
        if begins is not None and (where / begins).is_file():
            do = f"make room, then go on with --resume {where}"
        raise FastLoopError(got=what, why=f"it cannot be written: {error.strerror}", do=do) from error

"""Directories that hold kept samples: private, shared by all processes of a node, gone with their last user if asked.

Every cache is one directory below a root. Whoever uses it holds a shared lock on the file `alive` in it. The kernel
gives such locks back when their holder dies, in whatever way, so a directory that can be locked alone has no user left:
no process numbers are compared, which differ between containers and are given out again.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastloop.errors import NotApplicable
from fastloop.evidence import machine

INFO, ALIVE, DATA = "info.json", "alive", "samples.bin"
_DRAFT = ".draft-"
_YOUNG_S = 60.0
"""Drafts younger than this are being made: their lock may not be there yet."""


def find_shm_root() -> Path:
    """Where caches in shared memory lie; every user has a directory of his own."""
    return Path(f"/dev/shm/fastloop-cache-{os.geteuid()}")


def find_disk_root(path: str | None = None) -> Path:
    """Where caches on disk lie: in `path`, else in the user's cache directory (XDG_CACHE_HOME)."""
    home = Path(os.path.expanduser(path)) if path else machine.find_cache_home() / "fastloop"  # noqa: PTH111 (cannot fail)
    return home.absolute() / "samples"


def make_private(root: Path) -> None:
    """Make a root, or check that it and what holds it are nobody else's to change.

    Raises:
        NotApplicable: others own it or may write to it, or it cannot be made.
    """
    try:
        root.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            root.mkdir(mode=0o700)
        found = root.lstat()
    except OSError as error:
        raise NotApplicable(f"{root} cannot be made: {error.strerror or error}") from None
    if not stat.S_ISDIR(found.st_mode):
        raise NotApplicable(f"{root} is no directory: whoever made it could read and replace what is kept there")
    if found.st_uid != os.geteuid():
        raise NotApplicable(f"{root} belongs to user {found.st_uid}, who could replace what is kept there")
    if found.st_mode & 0o022:
        raise NotApplicable(f"others may write to {root} and could replace what is kept there; chmod 700 it")


class Place:
    """One cache's directory, held as long as this process uses it."""

    def __init__(self, path: Path, alive: int) -> None:
        self.path, self._alive, self._pid = path, alive, os.getpid()

    def leave(self, *, remove: bool) -> None:
        """Use it no more; the last user removes it where asked. Nothing happens in a forked child."""
        if self._pid != os.getpid() or self._alive < 0:
            return
        alive, self._alive = self._alive, -1
        if remove and _lock_alone(alive):
            _remove(self.path)
            with contextlib.suppress(OSError):  # others are there
                self.path.parent.rmdir()
        os.close(alive)


def enter(root: Path, name: str, fill: Callable[[Path], None]) -> Place:
    """Use the cache `name`; where there is none, `fill` a directory that becomes it, whole or not at all.

    Raises:
        NotApplicable: the root is not private.
        OSError: there is no room for it.
    """
    path = root / name
    for _ in range(100):  # others make and remove it meanwhile
        make_private(root)
        if (place := _join(path)) is not None:
            return place
        draft = root
        try:
            draft = Path(tempfile.mkdtemp(prefix=_DRAFT, dir=root))
            held = os.open(draft / ALIVE, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            fcntl.flock(held, fcntl.LOCK_SH)
            try:
                fill(draft)
                draft.rename(path)
            except BaseException:
                os.close(held)
                raise
            return Place(path, held)
        except OSError as error:
            if draft != root:
                shutil.rmtree(draft, ignore_errors=True)
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
                raise
    raise NotApplicable(f"{path} is made and removed by others all the time")


def _join(path: Path) -> Place | None:
    """The directory as it is; None where there is none, or its last user is removing it."""
    try:
        alive = os.open(path / ALIVE, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        if path.is_dir() and not (path / ALIVE).exists():  # somebody deleted single files
            _remove(path)
        return None
    try:
        fcntl.flock(alive, fcntl.LOCK_SH | fcntl.LOCK_NB)
        if (path / ALIVE).stat().st_ino == os.fstat(alive).st_ino:
            return Place(path, alive)
    except OSError:
        time.sleep(0.01)
    os.close(alive)
    return None


def _lock_alone(alive: int) -> bool:
    try:
        fcntl.flock(alive, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _remove(path: Path) -> None:
    """Out of the way first, so that nobody finds half of it."""
    gone = path.with_name(f"{_DRAFT}gone-{os.getpid()}-{time.monotonic_ns()}")
    with contextlib.suppress(OSError):
        path.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)


# -- looking around and cleaning up -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Found:
    """A cache that is there."""

    path: Path
    kept_bytes: int
    age_s: float
    """Since something was last added."""
    in_use: bool
    info: Mapping[str, Any]
    """What its maker wrote of it; empty where that cannot be read."""


def list_caches(root: Path) -> Iterator[Found]:
    """The caches below a root, drafts of killed processes included."""
    try:
        paths = sorted(each for each in root.iterdir() if each.is_dir() and not each.is_symlink())
    except OSError:
        return
    for path in paths:
        with contextlib.suppress(OSError):
            files = [each.stat() for each in path.iterdir()]
            newest = max((file.st_mtime for file in files), default=path.stat().st_mtime)
            with _hold_alone(path) as alone:
                in_use = alone is False
            yield Found(
                path=path,
                kept_bytes=sum(file.st_blocks * 512 for file in files),
                age_s=max(0.0, time.time() - newest),
                in_use=in_use,
                info=_read_info(path),
            )


@contextlib.contextmanager
def _hold_alone(path: Path) -> Iterator[bool | None]:
    """Keep everybody else out of a cache's directory; False where somebody uses it, None where it is not ours to
    lock."""
    try:
        alive = os.open(path / ALIVE, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        yield True if isinstance(error, FileNotFoundError) else None
        return
    try:
        yield _lock_alone(alive)
    finally:
        os.close(alive)


def _read_info(path: Path) -> Mapping[str, Any]:
    try:
        info = json.loads((path / INFO).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return info if isinstance(info, dict) else {}


def clear(found: Found) -> bool:
    """Remove a cache; False where somebody uses it, or it is not ours to remove."""
    with _hold_alone(found.path) as alone:
        if alone:
            _remove(found.path)
        return bool(alone) and not found.path.exists()


def sweep(root: Path, *, drafts_only: bool = False) -> None:
    """Remove what crashed processes left: caches without a user, or only what was never finished."""
    for found in list_caches(root):
        is_draft = found.path.name.startswith(_DRAFT)
        if not (is_draft and found.age_s < _YOUNG_S) and (is_draft or not drafts_only):
            clear(found)

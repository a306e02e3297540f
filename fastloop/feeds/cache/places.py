"""Directories of sample caches: private, shared by all processes of a node, and removed by the last user if wanted.

Every cache is one directory below a root. Each process that uses it holds a shared lock on the file `alive` in it. The
kernel releases such locks however their holder dies, so a directory that can be locked exclusively has no user left.
Process ids would not work: they differ between containers and are reused.
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
"""Younger drafts may still be under construction, and not locked yet."""


def find_shm_root() -> Path:
    """Return the root of caches in shared memory; each user has a separate one."""
    return Path(f"/dev/shm/fastloop-cache-{os.geteuid()}")


def find_disk_root(path: str | None = None) -> Path:
    """Return the root of caches on disk: in `path`, else in the user's cache directory (XDG_CACHE_HOME)."""
    home = Path(os.path.expanduser(path)) if path else machine.find_cache_home() / "fastloop"  # noqa: PTH111 (cannot fail)
    return home.absolute() / "samples"


def make_private(root: Path) -> None:
    """Create a root, or check that no other user can change it.

    Raises:
        NotApplicable: another user owns it or may write to it, or it cannot be created.
    """
    try:
        root.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            root.mkdir(mode=0o700)
        found = root.lstat()
    except OSError as error:
        raise NotApplicable(f"{root} cannot be created: {error.strerror or error}") from None
    if not stat.S_ISDIR(found.st_mode):
        raise NotApplicable(f"{root} is not a directory: whoever made it could read and replace what is kept there")
    if found.st_uid != os.geteuid():
        raise NotApplicable(f"{root} belongs to user {found.st_uid}, who could replace what is kept there")
    if found.st_mode & 0o022:
        raise NotApplicable(f"others may write to {root} and could replace what is kept there; chmod 700 it")


class StorePlace:
    """One cache's directory, locked as long as this process uses it."""

    def __init__(self, path: Path, alive: int) -> None:
        self.path, self._alive, self._pid = path, alive, os.getpid()

    def leave(self, *, remove: bool) -> None:
        """Stop using the directory; with `remove`, the last user deletes it. Does nothing in a forked child."""
        if self._pid != os.getpid() or self._alive < 0:
            return
        alive, self._alive = self._alive, -1
        if remove and _lock_alone(alive):
            _remove(self.path)
            with contextlib.suppress(OSError):  # other caches are there
                self.path.parent.rmdir()
        os.close(alive)


def enter(root: Path, name: str, fill: Callable[[Path], None]) -> StorePlace:
    """Use the cache `name`; if there is none, let `fill` build it in a draft directory that is renamed when complete.

    Raises:
        NotApplicable: the root is not private.
        OSError: there is no room for it.
    """
    path = root / name
    for _ in range(100):  # other processes may create and remove it meanwhile
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
            return StorePlace(path, held)
        except OSError as error:
            if draft != root:
                shutil.rmtree(draft, ignore_errors=True)
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
                raise
    raise NotApplicable(f"other processes keep creating and removing {path}")


def _join(path: Path) -> StorePlace | None:
    """Join an existing directory; None if there is none, or its last user is removing it."""
    try:
        alive = os.open(path / ALIVE, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        if path.is_dir() and not (path / ALIVE).exists():  # someone deleted individual files
            _remove(path)
        return None
    try:
        fcntl.flock(alive, fcntl.LOCK_SH | fcntl.LOCK_NB)
        if (path / ALIVE).stat().st_ino == os.fstat(alive).st_ino:
            return StorePlace(path, alive)
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
    """Rename the directory before deleting it, so that no process finds half of it."""
    gone = path.with_name(f"{_DRAFT}gone-{os.getpid()}-{time.monotonic_ns()}")
    with contextlib.suppress(OSError):
        path.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)


# -- listing and cleaning up ------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Found:
    """An existing cache."""

    path: Path
    kept_bytes: int
    age_s: float
    """Time since something was last added."""
    in_use: bool
    info: Mapping[str, Any]
    """Description that its creator wrote; empty if it cannot be read."""


def list_caches(root: Path) -> Iterator[Found]:
    """List the caches below a root, including drafts of killed processes."""
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
    """Lock a cache's directory exclusively; yields False if a process uses it, None if we may not lock it."""
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
    """Remove a cache; return False if a process uses it, or if we may not remove it."""
    with _hold_alone(found.path) as alone:
        if alone:
            _remove(found.path)
        return bool(alone) and not found.path.exists()


def sweep(root: Path, *, drafts_only: bool = False) -> None:
    """Remove what crashed processes left behind: caches without a user, or with `drafts_only` only unfinished ones."""
    for found in list_caches(root):
        is_draft = found.path.name.startswith(_DRAFT)
        if not (is_draft and found.age_s < _YOUNG_S) and (is_draft or not drafts_only):
            clear(found)

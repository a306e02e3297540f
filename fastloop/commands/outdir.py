"""The directory a command writes into: made for it, never somebody else's."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from fastloop.commands.readback import read
from fastloop.errors import ConfigError
from fastloop.shipped import safe_name

ROOT = Path("fastloop-runs")
LOCK = ".lock"


@dataclass(frozen=True)
class Place:
    """A directory to write into, and the directories that were made for it, the innermost first."""

    path: Path
    made: tuple[Path, ...] = ()

    def give_back(self) -> None:
        """Take away what was made and is still empty: a run that never began leaves nothing behind."""
        with contextlib.suppress(OSError):  # not empty, and so in use
            for folder in self.made:
                folder.rmdir()


def claim(name: str, out: str | None, *, force: bool = False) -> Place:
    """Make the directory of a run: `out`, else ``fastloop-runs/<name>/<utc>``.

    Raises:
        ConfigError: it is there and not empty (and not `force`), or cannot be written.
    """
    path = unclaimed(name, out)
    try:
        if out is not None and path.is_dir() and any(path.iterdir()) and not force:
            raise ConfigError(got=f"--out {out}", why="it is there already and not empty",
                              do="write another directory, or --force to write into this one")  # fmt: skip
        place = _make(path) if out is not None else _make_fresh(path)
    except OSError as error:
        raise _unwritable(path, error) from None
    try:
        probe = place.path / f".fastloop-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        place.give_back()
        raise _unwritable(path, error) from None
    return place


def claim_or_resume(name: str, out: str | None, *, force: bool, resume: str | None, holds: str) -> Place:
    """The directory of something that can go on in a later call: a new one, or that of an earlier call.

    Args:
        holds: the file that everything of this kind writes first.

    Raises:
        ConfigError: as `claim`; nothing of this kind began in `resume`, or `out` is elsewhere.
    """
    if resume is None:
        return claim(name, out, force=force)
    if out is not None and Path(out) != Path(resume):
        raise ConfigError(got=f"--out {out} with --resume {resume}", why="what is resumed stays where it is",
                          do="leave --out away")  # fmt: skip
    if read(Path(resume) / holds) is None:
        why = f"it holds no {holds} that can be read, so nothing of this kind began there"
        raise ConfigError(got=f"--resume {resume}", why=why,
                          do="write the directory that the earlier call printed, or leave --resume away")  # fmt: skip
    return Place(Path(resume))


def stands(path: Path) -> str:
    """What to say where something that can go on was stopped."""
    return f"fastloop: what there is stands in {path}, flagged as partial; go on with --resume {path}"


def unclaimed(name: str, out: str | None) -> Path:
    """Where a run goes as far as its command line tells: the ranks that write nothing need no more."""
    return Path(out).expanduser() if out is not None else ROOT / safe_name(name) / _utc()


def _make(path: Path) -> Place:
    return Place(path, tuple(_make_each(path)))


def _make_fresh(path: Path) -> Place:
    """The path, or one beside it: two runs may start in the same second."""
    parents = tuple(_make_each(path.parent))
    for count in range(1, 1000):
        fresh = path if count == 1 else path.with_name(f"{path.name}-{count}")
        with contextlib.suppress(FileExistsError):
            fresh.mkdir()
            return Place(fresh, (fresh, *parents))
    raise FileExistsError(17, "a thousand runs started in this second")


def _make_each(path: Path) -> Iterator[Path]:
    """Make a directory and its parents; gives those that were not there, the innermost first."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    yield from missing


def _utc() -> str:
    return datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%SZ")


def _unwritable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(got=f"run directory {path}", why=f"it cannot be written: {error.strerror or error}",
                       do="write --out with a directory of yours that has room")  # fmt: skip


@contextlib.contextmanager
def hold(path: Path) -> Iterator[None]:
    """Keep other commands of this kind out of a directory, for as long as this process lives at most.

    Raises:
        ConfigError: another one is at work there, or it cannot be written.
    """
    lock = path / LOCK
    try:
        file = lock.open("a+")
    except OSError as error:
        raise _unwritable(path, error) from None
    with file:
        if not _locks(file.fileno()):
            raise ConfigError(got=f"run directory {path}", why="another fastloop is at work in it",
                              do="wait for it, or write another --out") from None  # fmt: skip
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)


def _locks(descriptor: int) -> bool:
    """Whether nobody else has the lock; true where there are none, as on some file systems."""
    try:
        import fcntl
    except ImportError:  # Windows
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EACCES, errno.EAGAIN)
    return True

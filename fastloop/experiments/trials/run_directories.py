"""The directory that a command writes into: created for it, never one in use."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
from dataclasses import dataclass, field, replace
from pathlib import Path

from fastloop.errors import ConfigError
from fastloop.records.store import format_utc, is_file, make_safe_name, read

ROOT = Path("fastloop-runs")
RESUMABLE = "write the directory that the earlier call printed, or drop --resume"


@dataclass(frozen=True)
class ClaimedDirectory:
    """A directory to write into, and the directories that were created for it, innermost first.

    As a context manager it yields the path, and at the end unlocks it and deletes what was not used.
    """

    path: Path
    made: tuple[Path, ...] = ()
    lock: int | None = field(default=None, compare=False)
    """The open descriptor that keeps other commands out; None if nothing is locked."""

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self.give_back()

    def give_back(self) -> None:
        """Unlock, and delete the created directories that are still empty: a run that never began leaves nothing."""
        if self.lock is not None:
            _unlock(self.lock)
        with contextlib.suppress(OSError):  # not empty, and so in use
            for folder in self.made:
                folder.rmdir()


def claim(name: str, out: str | None, *, force: bool = False) -> ClaimedDirectory:
    """Create the directory of a run, `out` or by default ``fastloop-runs/<name>/<utc>``, and lock it.

    Raises:
        ConfigError: it is a file, is not empty (without `force`), is in use by another command, or cannot be written.
    """
    path, place = name_unclaimed(name, out), ClaimedDirectory(Path())
    if out is not None and is_file(path):
        raise ConfigError(got=f"--out {out}", why="it is a file, not a directory", do="choose another directory")
    try:
        place = _make(path) if out is not None else _make_fresh(path)
        place = replace(place, lock=_lock(place.path))
        if out is not None and any(path.iterdir()) and not force:
            raise ConfigError(
                got=f"--out {out}",
                why="the directory exists and is not empty",
                do="choose another directory, or add --force to write into this one",
            )
        probe = place.path / f".fastloop-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        place.give_back()
        raise _explain_unwritable(path, error) from None
    except ConfigError:
        place.give_back()
        raise
    return place


def claim_or_resume(name: str, out: str | None, *, force: bool, resume: str | None, holds: str) -> ClaimedDirectory:
    """Return the directory for a resumable command: a new one, or that of an earlier call.

    Args:
        holds: the file that such a command writes first.

    Raises:
        ConfigError: as in `claim`; or `resume` does not contain that file, or `out` is another directory.
    """
    if resume is None:
        return claim(name, out, force=force)
    if out is not None and Path(out) != Path(resume):
        raise ConfigError(
            got=f"--out {out} with --resume {resume}", why="a resumed run keeps its directory", do="drop --out"
        )
    _require_directory(resume)
    if read(Path(resume) / holds) is None:
        raise ConfigError(
            got=f"--resume {resume}",
            why=f"it contains no readable {holds}, so there is nothing to resume",
            do=RESUMABLE,
        )
    return ClaimedDirectory(Path(resume), lock=_lock(Path(resume)))


def refuse_alone(command: str, resume: str) -> None:
    """Raise ConfigError for a ``--resume`` without the rest of the command that began it."""
    _require_directory(resume)
    raise ConfigError(
        got=f"fastloop {command} --resume {resume}",
        why="the directory has its results, not the command that began it",
        do=f"repeat that command, with --resume {resume}",
    )


def _require_directory(resume: str) -> None:
    if not Path(resume).is_dir():
        raise ConfigError(got=f"--resume {resume}", why="there is no such directory", do=RESUMABLE)


def describe_partial(path: Path) -> str:
    """Return the message after a resumable command was stopped."""
    return f"fastloop: partial results are in {path}; to continue, repeat the command with --resume {path}"


def name_unclaimed(name: str, out: str | None) -> Path:
    """Return the run directory from the command line alone; ranks that write nothing need no more."""
    return Path(out).expanduser() if out is not None else ROOT / make_safe_name(name) / format_utc()


def _make(path: Path) -> ClaimedDirectory:
    missing = tuple(folder for folder in (path, *path.parents) if not folder.exists())
    path.mkdir(parents=True, exist_ok=True)
    return ClaimedDirectory(path, missing)


def _make_fresh(path: Path) -> ClaimedDirectory:
    """Create the path, or a numbered one next to it: two runs may start in the same second."""
    parents = _make(path.parent).made
    for count in itertools.count(1):
        fresh = path if count == 1 else path.with_name(f"{path.name}-{count}")
        with contextlib.suppress(FileExistsError):
            fresh.mkdir()
            break
    return ClaimedDirectory(fresh, (fresh, *parents))


def _explain_unwritable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(
        got=f"run directory {path}",
        why=f"it cannot be written: {error.strerror or error}",
        do="choose another --out that is writable and has space",
    )


def _lock(path: Path) -> int | None:
    """Lock a directory against other commands, and return the descriptor that unlocks it when closed, also by the end
    of this process; None on a file system without locks.

    Raises:
        ConfigError: another command is using it.
    """
    try:
        lock = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise _explain_unwritable(path, error) from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        if isinstance(error, (BlockingIOError, PermissionError)):
            raise ConfigError(
                got=f"run directory {path}",
                why="another fastloop is using it",
                do="wait for it, or choose another --out",
            ) from None
        return None
    return lock


def _unlock(lock: int) -> None:
    """Unlock a directory, even if a forked child has inherited the descriptor."""
    with contextlib.suppress(OSError):  # a file system without locks
        fcntl.flock(lock, fcntl.LOCK_UN)
    os.close(lock)

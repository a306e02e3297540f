"""What a command ends with where a training failed, was stopped, or could not be written."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import traceback
from collections.abc import Iterator
from pathlib import Path

from fastloop.config.loading import Config
from fastloop.errors import FastLoopError
from fastloop.records.secrets import make_scrubber
from fastloop.records.trial import Trial


class Failed(Exception):
    """A training that raised or was stopped: what to print to stderr, and the exit code."""

    def __init__(self, text: str, *, exit_code: int = 1) -> None:
        self.exit_code = exit_code
        super().__init__(text)


def failed(trial: Trial, resume: Path | None = None, *, what: str = "the run failed") -> Failed:
    """What to end with where the training as it is did not come to its end.

    Args:
        resume: the directory of a command that can go on from there.
    """
    usage = trial.code == 2
    cause = trial.cause or "it was too short to measure a rate"
    last = f"fastloop: {what}: {cause}{_advise(trial, resume)}"
    own = usage and "fastloop: " in trial.tail  # the child's configuration error, in its own words
    text = trial.tail if own else f"{trial.tail}\n{last}"
    return Failed(text.lstrip("\n"), exit_code=2 if usage else 1)


FREE_MEMORY = "free the device: nvidia-smi lists what holds its memory"
_MEMORY = re.compile(r"out of memory|can't allocate memory|\bMemoryError\b|ALLOC_FAILED", re.IGNORECASE)


def ran_out_of_memory(trial: Trial) -> bool:
    """Whether a training says that no memory was left; one that the kernel killed for it says nothing."""
    return bool(_MEMORY.search(f"{trial.cause}\n{trial.tail}")) and "SIGKILL" not in str(trial.cause)


def _advise(trial: Trial, resume: Path | None = None) -> str:
    """A line that says what to do about a training that failed, where its cause tells or the command can go on."""
    steps = [suggest_next(trial), None if resume is None else f"unchanged, it goes on with --resume {resume}"]
    text = "; ".join(step for step in steps if step)
    return f"\n  do  {text}" if text else ""


def suggest_next(trial: Trial) -> str | None:
    """What to do about a training that failed, where its cause tells."""
    cause = trial.cause or ""
    if ran_out_of_memory(trial):
        return f"train with smaller micro-batches, or {FREE_MEMORY}"
    if "SIGKILL" in cause:
        return "look into dmesg: where the out-of-memory killer did it, use fewer workers or smaller batches"
    if "is stopped from outside" in cause:
        return "find what stopped the process: Ctrl-Z, a debugger, or kill -STOP"
    if cause.startswith("hung"):
        return "see above where its processes stood, and look for what they wait for"
    if cause.startswith("exceeded its time limit"):
        return "give it more time with --limit SECONDS, or fewer steps"
    if "before the window" in cause:
        return "let it train longer, or open the window sooner with watch.warmup_steps=3"
    if "a climb needs" in cause:
        return "let it train longer"
    if "made a Trainer" in cause or "making a Trainer" in cause:
        return "run the command once in a shell, and see that it trains; arguments of a script go into --args"
    return None


_RANKS = ("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "SLURM_PROCID")


def first_rank() -> bool:
    """Whether this process is the one that speaks: the further ranks are started with this very command."""
    return all(os.environ.get(name, "0") in ("0", "") for name in _RANKS)


@contextlib.contextmanager
def explained(config: Config, where: Path) -> Iterator[None]:
    """End a training that raised or was stopped with what happened and where the part before it is; no secret in it."""
    hide = make_scrubber(config.values).text
    report = where / "report.md"
    before = _written(report)

    def partial() -> str:
        new = _written(report) not in (None, before)
        return f"; the earlier steps are in {report}, flagged as partial" if new else ""

    try:
        yield
    except FastLoopError as error:
        raise type(error)(got=hide(error.got), why=hide(error.why), do=hide(error.do), key=error.key) from None
    except KeyboardInterrupt:
        raise Failed(f"fastloop: interrupted{partial()}" if first_rank() else "", exit_code=130) from None
    except SystemExit as error:
        if error.code != 143:  # the user's own
            raise
        raise Failed(f"fastloop: terminated{partial()}" if first_rank() else "", exit_code=143) from None
    except Exception as error:
        told = "".join(traceback.format_exception(error)).rstrip("\n")
        last = f"fastloop: the run failed: {type(error).__name__}: {error}{partial()}"
        raise Failed(hide(f"{told}\n{last}")) from None


def _written(path: Path) -> int | None:
    return path.stat().st_mtime_ns if path.is_file() else None


# -- A disk without room is the machine's doing: it is said as such, wherever a command was when it happened -----------

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
        do = f"free some space, or choose --out on another disk; {where} is incomplete"
        if begins is not None and (where / begins).is_file():
            do = f"free some space, then continue with --resume {where}"
        raise FastLoopError(got=what, why=f"it cannot be written: {error.strerror}", do=do) from error

"""How a command ends if a training failed, was stopped, or could not write its files."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import signal
import traceback
from collections.abc import Iterator
from pathlib import Path

from fastloop.config.loading import DEFAULT, Config
from fastloop.config.schema import find_origin
from fastloop.errors import FastLoopError
from fastloop.records.secrets import make_scrubber
from fastloop.records.trial import Trial


class Failed(Exception):
    """A training raised or was stopped; has the text for stderr and the exit code."""

    def __init__(self, text: str, *, exit_code: int = 1) -> None:
        self.exit_code = exit_code
        super().__init__(text)


def make_failure(trial: Trial, resume: Path | None = None, *, what: str = "the run failed") -> Failed:
    """Return the error that ends a command when the unchanged training did not finish.

    Args:
        resume: the directory from which the command can continue.
    """
    usage = trial.code == 2
    cause = trial.cause or "it was too short to measure a rate"
    steps = [suggest_next(trial), None if resume is None else f"to continue unchanged, use --resume {resume}"]
    advice = "; ".join(filter(None, steps))
    last = f"fastloop: {what}: {cause}" + (f"\n  do  {advice}" if advice else "")
    own = usage and "fastloop: " in trial.tail  # the child's own message about a configuration error
    text = trial.tail if own else f"{trial.tail}\n{last}"
    return Failed(text.lstrip("\n"), exit_code=2 if usage else 1)


FREE_MEMORY = "free the device: nvidia-smi lists what holds its memory"
_MEMORY = re.compile(r"out of memory|can't allocate memory|\bMemoryError\b|ALLOC_FAILED", re.IGNORECASE)


def ran_out_of_memory(trial: Trial) -> bool:
    """Whether a training reports that memory ran out; one that the kernel killed for it reports nothing."""
    return bool(_MEMORY.search(f"{trial.cause}\n{trial.tail}")) and "SIGKILL" not in str(trial.cause)


def suggest_next(trial: Trial) -> str | None:
    """Suggest what to do about a failed training; None if its cause does not show it."""
    cause = trial.cause or ""
    if ran_out_of_memory(trial):
        return f"train with smaller micro-batches, or {FREE_MEMORY}"
    if "SIGKILL" in cause:
        return "check dmesg: if it was the out-of-memory killer, use fewer workers or smaller batches"
    if "is stopped from outside" in cause:
        return "find what stopped the process: Ctrl-Z, a debugger, or kill -STOP"
    if cause.startswith("hung"):
        return "see above where its processes were, and find what they wait for"
    if cause.startswith("exceeded its time limit"):
        return "give it more time with --limit SECONDS, or fewer steps"
    if cause.endswith("EOFError: EOF when reading a line"):
        return "pass what the script asks for as arguments: a trial has no terminal to answer at"
    if re.search(r"arguments are required|Missing (option|argument)", cause):
        return "pass the script's arguments with --args"
    if "before the window" in cause:
        return "train longer, or open the window sooner with watch.warmup_steps=3"
    if "a climb needs" in cause:
        return "train longer"
    if "made a Trainer" in cause or "creating a Trainer" in cause:
        return "run the command once in a shell and check that it trains; pass a script's arguments with --args"
    return None


_RANKS = ("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "SLURM_PROCID")


def is_first_rank() -> bool:
    """Whether this process is rank 0, which prints for all: the other ranks run the same command."""
    return all(os.environ.get(name, "0") in ("0", "") for name in _RANKS)


TERMINATED = (128 + signal.SIGTERM, 128 + signal.SIGHUP)
"""Exit codes after a termination from outside, see `console.handle_signals`."""


@contextlib.contextmanager
def explained(config: Config, where: Path) -> Iterator[None]:
    """Turn an error or stop inside into a message, without secrets, that says where the partial report is."""
    hide = make_scrubber(config.values).text
    report = where / "report.md"
    before = _measure_written(report)

    def partial() -> str:
        new = _measure_written(report) not in (None, before)
        return f"; the earlier steps are in {report}, flagged as partial" if new else ""

    try:
        yield
    except FastLoopError as error:
        got, origin = error.got, find_origin(error.key, config.origins) if error.key else DEFAULT
        place = "" if origin == DEFAULT or str(origin) in got else f" ({origin})"
        raise type(error)(got=hide(got) + place, why=hide(error.why), do=hide(error.do), key=error.key) from None
    except KeyboardInterrupt:
        raise Failed(f"fastloop: interrupted{partial()}" if is_first_rank() else "", exit_code=130) from None
    except SystemExit as error:
        if not isinstance(error.code, int) or error.code not in TERMINATED:
            text = f"fastloop: the run failed: its own code called sys.exit({error.code!r}){partial()}"
            raise Failed(hide(text) if is_first_rank() else "") from None
        raise Failed(f"fastloop: terminated{partial()}" if is_first_rank() else "", exit_code=error.code) from None
    except Exception as error:
        text = "".join(traceback.format_exception(error)).rstrip("\n")
        last = f"fastloop: the run failed: {type(error).__name__}: {error}{partial()}"
        raise Failed(hide(f"{text}\n{last}")) from None


def _measure_written(path: Path) -> int | None:
    return path.stat().st_mtime_ns if path.is_file() else None


# -- A full disk is the machine's fault: the message says so, no matter what the command was doing ---------------------

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)


@contextlib.contextmanager
def writing(where: Path, begins: str | None = None) -> Iterator[None]:
    """Explain disk errors while writing into a run directory; all other errors pass unchanged.

    Args:
        begins: if this file exists, the command can continue with ``--resume``.

    Raises:
        FastLoopError: the disk is full or cannot be written; the run directory holds what was written before.
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
        full = FastLoopError(got=what, why=f"it cannot be written: {error.strerror}", do=do)
        vars(full).update(vars(error))  # the results so far, see `console.attach`
        raise full from error

"""Run one command in its own process and wait for its end, which comes in time whatever the command does.

Slow is not hung: output, a new step in ``beat`` and CPU use of any of its processes are signs of life, and a command
that shows them may run up to its total limit. So does one that spins while it waits, as NCCL and CUDA do (NCCL's own
limit is 10 minutes). Work that others do for it (srun, docker) is not seen. Nothing that it started is left.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from fastloop.experiments.trials import preloaded, reaper
from fastloop.experiments.trials.preloaded import Leash
from fastloop.experiments.trials.stack_traces import ask, split

STDOUT, STDERR, BEAT = "stdout.txt", "stderr.txt", "beat"
LOOK_S = 0.5
"""Between two looks at a command."""
WORK_S, BUSY = 5.0, 0.05
"""Between two looks at the processors, each of which reads the list of all processes; and from which share of one on a
process computes. What idles in the background, such as a watchdog, needs less."""
SAY_S = 5.0
"""Between two lines of progress."""
MOST_OUTPUT = 2**30
"""Bytes. A command that writes more than this is ended before it fills the disk."""
MOST_READ = 2**20
"""Bytes of the end of stderr that are looked at: the stacks of many processes are long."""
TAIL_LINES, BESIDE_STACKS = 12, 4
"""Lines that are kept of it; the second beside the stacks of threads."""
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[^\n\t\x20-\x7e\u00a0-\U0010ffff]")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How long a command may take, in seconds."""

    total_s: float = 3600.0
    silent_s: float = 600.0
    """Without a sign of life: neither output nor another step, nor work of a processor."""
    grace_s: float = 12.0
    """Between SIGTERM and SIGKILL; a training writes its partial report in that time (`bridge/fit/shutdown`: 8 s)."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a command ended."""

    code: int
    """Exit code; the negative number of the signal that ended it."""
    cause: str | None
    """What went wrong, in one line; None where it ended by itself with 0."""
    seconds: float
    last_step: int | None
    """As far as its ``beat`` says."""
    started: str | None = None
    """How it came about: forked, or why it is a new interpreter; None where nothing is forked at this time."""
    tail: str
    """The last lines of its stderr, without control sequences; of stacks that it wrote, the innermost frames."""


def supervise(
    command: Sequence[str],
    folder: Path,
    *,
    limits: Limits | None = None,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    stdin: int = subprocess.DEVNULL,
    stacks: bool = False,
    progress: Callable[[str], None] | None = None,
) -> Ended:
    """Run a command to its end; its output goes to files in `folder`.

    Args:
        stdin: a descriptor it reads from.
        stacks: before it is ended for being silent, it is asked by SIGUSR2 to write where it stands.
        progress: takes a line every few seconds.

    Raises:
        OSError: `folder` cannot be written.
        KeyboardInterrupt, SystemExit: whatever is raised while it waits, once the command and all it started are gone.
    """
    limits = limits or Limits()
    for path in (folder / STDOUT, folder / STDERR, *folder.glob(f"{BEAT}*")):
        path.unlink(missing_ok=True)
    begun = time.monotonic()
    with (folder / STDOUT).open("wb") as out, (folder / STDERR).open("wb") as err:
        forked, how = preloaded.start(
            command,
            cwd=cwd or Path.cwd(),
            environ=os.environ if env is None else env,
            stdin=stdin,
            stdout=out.fileno(),
            stderr=err.fileno(),
        )
        started = forked or reaper.start(command, cwd=cwd, env=env, stdin=stdin, stdout=out, stderr=err)
        with _held(started, limits.grace_s) as (process, hold):
            why = _wait(hold, folder, limits, progress, _Work(process.pid, min(WORK_S, limits.silent_s / 4)))
            ranks = "" if why is None else _describe_ranks(folder)
            if why is not None and stacks:
                ask(process.pid)
                _gone(hold, LOOK_S)
    step, tail = steps_done(folder)[0], last_lines(folder / STDERR)
    return Ended(
        code=process.returncode,
        cause=_cause(process.returncode, why, ranks, step, tail),
        last_step=step,
        started=how,
        tail=tail,
        seconds=time.monotonic() - begun,
    )


Process = subprocess.Popen[bytes] | Leash


@contextlib.contextmanager
def _held(started: tuple[Process, socket.socket], grace_s: float) -> Iterator[tuple[Process, socket.socket]]:
    """Whatever happens inside: afterwards the command has ended, with all it started."""
    process, hold = started
    try:
        try:
            yield started
        finally:
            if not _gone(hold, 0):
                _signal(process, signal.SIGTERM)
                _gone(hold, grace_s)
    finally:  # also where the grace was cut short
        with contextlib.suppress(OSError):
            hold.send(b".")
        _gone(hold, reaper.LIMIT_S + 1)
        _signal(process, signal.SIGKILL)  # the leash is not reaped yet, so the group's number is still its own
        process.wait()
        hold.close()


class _Work:
    """What the processes below one compute, each by itself: the little that many idle ones need adds up."""

    def __init__(self, pid: int, every_s: float) -> None:
        self._pid, self._every_s = pid, every_s
        self._at, self._before = time.monotonic(), dict[psutil.Process, float]()

    def done(self, now: float) -> bool:
        """Whether one of them has computed since the last look, if it is time for one."""
        if now - self._at < self._every_s:
            return False
        spent = self._spent()
        enough = BUSY * (now - self._at)
        busy = any(seconds - self._before.get(each, 0.0) > enough for each, seconds in spent.items())
        self._at, self._before = now, spent
        return busy

    def _spent(self) -> dict[psutil.Process, float]:
        """Seconds of each, with those of its children that have ended."""
        found = {}
        with contextlib.suppress(psutil.Error):
            for each in psutil.Process(self._pid).children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    found[each] = sum(each.cpu_times()[:4])
        return found


def _wait(
    hold: socket.socket, folder: Path, limits: Limits, progress: Callable[[str], None] | None, work: _Work
) -> str | None:
    """Wait for the end; why it is to be ended, None where it has ended by itself."""
    begun = alive = said = time.monotonic()
    before = _signs(folder)
    while not _gone(hold, min(LOOK_S, limits.total_s, limits.silent_s)):
        now, signs = time.monotonic(), _signs(folder)
        if work.done(now) or signs != before:
            before, alive = signs, now
        if now - begun > limits.total_s:
            return f"exceeded its time limit of {limits.total_s:g} s"
        if now - alive > limits.silent_s:
            return f"hung: no step, output or CPU use for {limits.silent_s:g} s"
        if sum(size for _, size in signs) > MOST_OUTPUT:
            return f"wrote more than {MOST_OUTPUT >> 20} MiB of output"
        if progress is not None and now - said > SAY_S:
            said = now
            step, steps = steps_done(folder)
            at = "starting" if step is None else f"step {step}" + (f" of {steps}" if steps else "")
            progress(f"{at}, {now - begun:.0f} s so far")
    return None


def _signs(folder: Path) -> tuple[tuple[int, int], ...]:
    """What changes while a command lives: times and sizes of the files it writes."""
    return tuple(_stamp(folder / name) for name in (STDOUT, STDERR, BEAT))


def _stamp(path: Path) -> tuple[int, int]:
    try:
        seen = path.stat()
    except OSError:
        return 0, 0
    return seen.st_mtime_ns, seen.st_size


def _gone(hold: socket.socket, patience_s: float) -> bool:
    """Whether the leash has ended, or does within this time."""
    return bool(select.select([hold], [], [], patience_s)[0])


def _signal(process: Process, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS refuses once all of the group have ended
        os.killpg(process.pid, number)


def steps_done(folder: Path) -> tuple[int | None, int | None]:
    """Optimizer steps done and to be done, as the command's ``beat`` says; None where it says nothing."""
    step, steps, _ = _read_beat(folder / BEAT)
    return step, steps if steps is not None and steps > 0 else None


def _read_beat(path: Path) -> tuple[int | None, int | None, int | None]:
    """Steps done, steps to be done and process, as one rank says; see `bridge/trials/heartbeat.py`."""
    try:
        step, steps, *process = (int(number) for number in path.read_text().split())
        return step, steps, process[0] if process else None
    except (OSError, ValueError):
        return None, None, None


def _describe_ranks(folder: Path) -> str:
    """Of a command that is still there: which of its ranks is stopped, gone or behind; empty where none is."""
    beats = {int(path.suffix[1:] or 0): _read_beat(path) for path in folder.glob(f"{BEAT}*")}
    furthest = max((step for step, _, _ in beats.values() if step is not None), default=None)
    states = {rank: _describe_process(process) for rank, (_, _, process) in beats.items()}
    told = [
        f"rank {rank}{f' (process {process})' if process else ''} {states[rank] or 'is behind'} at step {step}"
        for rank, (step, _, process) in sorted(beats.items())
        if states[rank] or step != furthest
    ]
    others = f", the others at step {furthest}" if len(beats) > len(told) else ""
    return f"; {', '.join(told)}{others}" if told else ""


def _describe_process(process: int | None) -> str | None:
    """What keeps a process from going on; None where it may."""
    try:
        state = psutil.Process(process).status() if process else None
    except psutil.Error:
        state = psutil.STATUS_DEAD
    if state in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
        return "is stopped from outside"
    return "has ended" if state in (psutil.STATUS_DEAD, psutil.STATUS_ZOMBIE) else None


def last_lines(path: Path) -> str:
    """The end of a text file, without control sequences; empty where there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - MOST_READ))
            text = file.read().decode("utf-8", errors="replace")
    except OSError:
        return ""
    kept = [line for line in _CONTROL.sub("", text.replace("\r", "\n")).splitlines() if line.strip()]
    stacks, rest = split(kept)
    return "\n".join([*stacks, *rest[-(BESIDE_STACKS if stacks else TAIL_LINES) :]])


def _cause(code: int, why: str | None, ranks: str, step: int | None, tail: str) -> str | None:
    at = "" if step is None else f" at step {step}"
    if why is not None:
        return f"{why}{ranks or at}; it was ended"
    if code == 0:
        return None
    if code < 0:
        name = _name(-code)
        guess = ": out of memory, or killed from outside" if name == "SIGKILL" else ""
        return f"killed by {name}{at}{guess}"
    last = tail.splitlines()[-1].strip() if tail else "it printed nothing"
    return f"exit code {code}{at}: {last}"


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"

"""Runs one command in a separate process and waits for its end, which time limits guarantee.

Slow is not hung: output, a new step in ``beat`` and CPU use of any of its processes are signs of life, and a command
that shows them may run up to its total limit. So may one that spins while it waits, as NCCL and CUDA do (NCCL's own
limit is 10 minutes). Work that other processes do for it (srun, docker) does not count. No process that it started is
left behind.
"""

from __future__ import annotations

import contextlib
import math
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
from fastloop.numbers import format_short

STDOUT, STDERR, BEAT = "stdout.txt", "stderr.txt", "beat"
LOOK_S = 0.5
"""Interval between two checks of a command."""
WORK_S, BUSY = 5.0, 0.05
"""Interval between two checks of CPU use, each of which lists all processes; and the share of one CPU above which a
process counts as computing. An idle background process, such as a watchdog, stays below it."""
SAY_S = 5.0
"""Interval between two progress lines."""
FIRST_STEPS = 1
"""Until this many steps are done, a command may be compiling."""
TOO_SLOW = "its steps take"
"""Begins the cause of a command that was ended because of its slow steps."""
PACE_STEPS, PACE_TIMES = 3, 3
"""How many steps are timed together, and how many times before they count as too slow. The first steps never count."""
MOST_OUTPUT = 2**30
"""Bytes. A command that writes more than this is ended before it fills the disk."""
MOST_READ = 2**20
"""How many of the last bytes of stderr are read: the stacks of many processes are long."""
TAIL_LINES, BESIDE_STACKS = 12, 4
"""How many of the last lines of stderr are kept; the second number applies when there are thread stacks too."""
_ERROR, _WARNING = (
    re.compile(words, re.IGNORECASE)
    for words in ("error|exception|fail|fatal|abort|cannot|denied|no such|not found|invalid|out of memory", "warn")
)
_RAISED = re.compile(r"[A-Za-z_][\w.]*(Error|Exception): ")
LONGEST, CUT = 300, "[…]"
"""Characters that are kept of the first line of a long message, and the line that stands for the omitted ones."""
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[^\n\t\x20-\x7e\u00a0-\U0010ffff]")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How long a command may take, in seconds."""

    total_s: float = 3600.0
    silent_s: float = 600.0
    """Longest time without a sign of life: no output, no new step, no CPU use."""
    slowest_step_s: float = math.inf
    """A command whose steps all take longer than this is ended after a few of them."""
    grace_s: float = 12.0
    """Between SIGTERM and SIGKILL; a training writes its partial report in that time (`bridge/fit/shutdown`: 8 s)."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a command ended."""

    code: int
    """Exit code; the negative number of the signal that ended it."""
    cause: str | None
    """What went wrong, in one line; None if it ended by itself with exit code 0."""
    seconds: float
    """From its start on; a wait for the imports that all trials share is not part of it."""
    last_step: int | None
    """The last step in its ``beat``; None if there is none."""
    started: str | None = None
    """How it started: forked, or why it is a new interpreter; None if trials are not being forked."""
    tail: str
    """The last lines of its stderr, without control sequences, and the innermost frames of any stacks."""


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
        stacks: before ending it early, send it SIGUSR2 so that it writes its stacks.
        progress: receives a line every few seconds.

    Raises:
        OSError: `folder` cannot be written.
        KeyboardInterrupt, SystemExit: whatever is raised while it waits, once the command and all it started are gone.
    """
    limits = limits or Limits()
    for path in (folder / STDOUT, folder / STDERR, *folder.glob(f"{BEAT}*")):
        path.unlink(missing_ok=True)
    with (folder / STDOUT).open("wb") as out, (folder / STDERR).open("wb") as err:
        forked, how = preloaded.start(
            command,
            cwd=cwd or Path.cwd(),
            environ=os.environ if env is None else env,
            stdin=stdin,
            stdout=out.fileno(),
            stderr=err.fileno(),
            say=progress or (lambda _: None),
        )
        begun = time.monotonic()
        started = forked or reaper.start(command, cwd=cwd, env=env, stdin=stdin, stdout=out, stderr=err)
        with _held(started, limits.grace_s) as (process, hold):
            why = _wait(hold, folder, limits, progress, _Work(process.pid, min(WORK_S, limits.silent_s / 4)))
            ranks = "" if why is None else _describe_ranks(folder)
            if why is not None and stacks:
                ask(process.pid)
                _has_ended(hold, LOOK_S)
    step, tail = read_steps_done(folder)[0], read_last_lines(folder / STDERR)
    return Ended(
        code=process.returncode,
        cause=_find_cause(process.returncode, why, ranks, step, tail),
        last_step=step,
        started=how,
        tail=tail,
        seconds=time.monotonic() - begun,
    )


Process = subprocess.Popen[bytes] | Leash


@contextlib.contextmanager
def _held(started: tuple[Process, socket.socket], grace_s: float) -> Iterator[tuple[Process, socket.socket]]:
    """Guarantee that the command and everything it started have ended when the context ends."""
    process, hold = started
    try:
        try:
            yield started
        finally:
            if not _has_ended(hold, 0):
                _send_signal(process, signal.SIGTERM)
                _has_ended(hold, grace_s)
    finally:  # also if the grace period was interrupted
        with contextlib.suppress(OSError):
            hold.send(b".")
        _has_ended(hold, reaper.LIMIT_S + 1)
        _send_signal(process, signal.SIGKILL)  # the leash is not reaped yet, so the group id is still valid
        process.wait()
        hold.close()


class _Work:
    """CPU use of each process below a given one, not summed, since many idle processes would add up."""

    def __init__(self, pid: int, every_s: float) -> None:
        self._pid, self._every_s = pid, every_s
        self._at, self._before = time.monotonic(), dict[psutil.Process, float]()

    def done(self, now: float) -> bool:
        """Whether one of them has computed since the last check; False if the next check is not due yet."""
        if now - self._at < self._every_s:
            return False
        spent = self._sum_spent()
        enough = BUSY * (now - self._at)
        busy = any(seconds - self._before.get(each, 0.0) > enough for each, seconds in spent.items())
        self._at, self._before = now, spent
        return busy

    def _sum_spent(self) -> dict[psutil.Process, float]:
        """Return the CPU seconds of each process, including its children that have ended."""
        found = {}
        with contextlib.suppress(psutil.Error):
            for each in psutil.Process(self._pid).children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    found[each] = sum(each.cpu_times()[:4])
        return found


class _Pace:
    """The time of a command's steps, a few at a time: a compile or a validation among them slows only some."""

    def __init__(self, slowest_s: float) -> None:
        self._slowest_s = slowest_s
        self._begun: tuple[int, float] | None = None
        self._times_s: list[float] = []

    def judge(self, step: int | None, now: float) -> str | None:
        """Return why the command is too slow, if it is; must be called often."""
        before, since = self._begun or (0, now)
        if step is None or step < before + PACE_STEPS:
            return None
        if self._begun is not None:
            self._times_s.append((now - since) / (step - before))
        self._begun = step, now
        if len(self._times_s) < PACE_TIMES or min(self._times_s) <= self._slowest_s:
            return None
        fastest, limit = (format_short(each, "s", digits=2) for each in (min(self._times_s), self._slowest_s))
        return f"{TOO_SLOW} {fastest}, more than {limit}"


def _wait(
    hold: socket.socket, folder: Path, limits: Limits, progress: Callable[[str], None] | None, work: _Work
) -> str | None:
    """Wait for the end; returns why the command must be ended, or None if it ended by itself."""
    begun = alive = said = time.monotonic()
    before, pace = _signs(folder), _Pace(limits.slowest_step_s)
    while not _has_ended(hold, min(LOOK_S, limits.total_s, limits.silent_s)):
        now, signs = time.monotonic(), _signs(folder)
        if work.done(now) or signs != before:
            before, alive = signs, now
        if now - begun > limits.total_s:
            return f"exceeded its time limit of {limits.total_s:g} s"
        if now - alive > limits.silent_s:
            return f"hung: no step, output or CPU use for {limits.silent_s:g} s"
        if sum(size for _, size in signs) > MOST_OUTPUT:
            return f"wrote more than {MOST_OUTPUT >> 20} MiB of output"
        step, steps = read_steps_done(folder)
        if (why := pace.judge(step, now)) is not None:
            return why
        if progress is not None and now - said > SAY_S:
            said = now
            at = "starting" if step is None else f"step {step}" + (f" of {steps}" if steps else "")
            at += "" if step is None or step > FIRST_STEPS else " (the first steps may compile)"
            progress(f"{at}, {now - begun:.0f} s so far")
    return None


def _signs(folder: Path) -> tuple[tuple[int, int], ...]:
    """Return the times and sizes of the files that a living command writes."""
    return tuple(_stamp(folder / name) for name in (STDOUT, STDERR, BEAT))


def _stamp(path: Path) -> tuple[int, int]:
    try:
        seen = path.stat()
    except OSError:
        return 0, 0
    return seen.st_mtime_ns, seen.st_size


def _has_ended(hold: socket.socket, patience_s: float) -> bool:
    """Whether the leash has ended or ends within this time."""
    return bool(select.select([hold], [], [], patience_s)[0])


def _send_signal(process: Process, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS refuses once the whole group has ended
        os.killpg(process.pid, number)


def read_steps_done(folder: Path) -> tuple[int | None, int | None]:
    """Return the optimizer steps done and their total, from the command's ``beat``; None if unknown."""
    step, steps, _ = _read_beat(folder / BEAT)
    # With several optimizers a batch may take more steps than were counted in advance.
    return step, steps if steps is not None and steps >= max(1, step or 0) else None


def _read_beat(path: Path) -> tuple[int | None, int | None, int | None]:
    """Return steps done, total steps and process id from one rank's beat; see `bridge/trials/heartbeat.py`."""
    try:
        step, steps, *process = (int(number) for number in path.read_text().split())
        return step, steps, process[0] if process else None
    except (OSError, ValueError):
        return None, None, None


def _describe_ranks(folder: Path) -> str:
    """Describe which ranks of a running command are stopped, gone or behind; empty if none is."""
    beats = {int(path.suffix[1:] or 0): _read_beat(path) for path in folder.glob(f"{BEAT}*")}
    furthest = max((step for step, _, _ in beats.values() if step is not None), default=None)
    states = {rank: _describe_process(process) for rank, (_, _, process) in beats.items()}
    positions = [
        f"rank {rank}{f' (process {process})' if process else ''} {states[rank] or 'is behind'} at step {step}"
        for rank, (step, _, process) in sorted(beats.items())
        if states[rank] or step != furthest
    ]
    others = f", the others at step {furthest}" if len(beats) > len(positions) else ""
    return f"; {', '.join(positions)}{others}" if positions else ""


def _describe_process(process: int | None) -> str | None:
    """Return why a process cannot continue; None if it can."""
    try:
        state = psutil.Process(process).status() if process else None
    except psutil.Error:
        state = psutil.STATUS_DEAD
    if state in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
        return "is stopped from outside"
    return "has ended" if state in (psutil.STATUS_DEAD, psutil.STATUS_ZOMBIE) else None


def read_last_lines(path: Path) -> str:
    """Return the end of a text file, without control sequences; empty if there is no file."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - MOST_READ))
            text = file.read().decode("utf-8", errors="replace")
    except OSError:
        return ""
    kept = [line for line in _CONTROL.sub("", text.replace("\r", "\n")).splitlines() if line.strip()]
    stacks, rest = split(kept)
    count = BESIDE_STACKS if stacks else TAIL_LINES
    frame = max((place for place, line in enumerate(rest) if line.startswith('  File "')), default=len(rest))
    raised = next((place for place in range(frame, len(rest)) if _RAISED.match(rest[place])), len(rest))
    if raised < len(rest) - count:  # some of torch's messages end in a list of fifty kernels
        rest = [rest[raised][:LONGEST], CUT, *rest[2 - count :]]
    return "\n".join([*stacks, *rest[-count:]])


def _find_cause(code: int, why: str | None, ranks: str, step: int | None, tail: str) -> str | None:
    at = "" if step is None else f" at step {step}"
    if why is not None:
        return f"{why}{ranks or at}; it was ended"
    if code == 0:
        return None
    if code < 0:
        name = _name(-code)
        guess = ": out of memory, or killed from outside" if name == "SIGKILL" else ""
        return f"killed by {name}{at}{guess}"
    return f"exit code {code}{at}: {_find_error(code, tail.splitlines()) if tail else 'it printed nothing'}"


def _find_error(code: int, lines: Sequence[str]) -> str:
    """Return the last line if it is an error: a traceback's, one by its words, or the text of ``sys.exit(text)``; of a
    long message its first line."""
    if CUT in lines:
        return lines[lines.index(CUT) - 1]
    last = lines[-1].strip()
    frame = max((place for place, line in enumerate(lines) if line.startswith('  File "')), default=len(lines))
    raised = [line for line in lines[frame:] if not line.startswith(" ")] == [lines[-1]]
    said = (code == 1 or _ERROR.search(last)) and not _WARNING.search(last)
    return last if raised or said else "it gave no error"


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"

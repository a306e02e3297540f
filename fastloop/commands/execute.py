"""fastloop exec: a command of the user's own, with a FastLoop in the first Trainer of it that trains.

It has the streams, the terminal and the process group of this one, and all the time it wants: it is the user's run.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType

import psutil

from fastloop import diagnose
from fastloop.commands.answer import Answer
from fastloop.commands.carry import Event, carried, check, for_callback, happened, name_of, notes, unmeasured
from fastloop.commands.leash import PR_SET_CHILD_SUBREAPER, PR_SET_PDEATHSIG
from fastloop.commands.outdir import Place, claim, unclaimed
from fastloop.commands.readback import findings_from, measurement_from, plan_from, read, verdicts_from
from fastloop.commands.run import first_rank
from fastloop.config import from_callback
from fastloop.errors import ConfigError
from fastloop.report import files, summary

AGAIN_S = {signal.SIGINT: 2.0, signal.SIGTERM: 0.5, signal.SIGHUP: 0.5}
"""A signal may have been sent to the whole process group: the command gets it from us only where it still lives then.
Ctrl-C twice would cut short what the first began, such as a report."""
LEFT_S = 3.0
"""What a command started and left behind gets to end by itself, after a signal or a failure."""


def execute(command: Sequence[str], *, config: str | None = None, out: str | None = None, force: bool = False,
            progress: Callable[[str], None] = lambda _: None) -> Answer:  # fmt: skip
    """Run a command in the foreground, with its streams; the answer is for stderr, its exit code the command's, or
    that of the signal that was to end it.

    Args:
        config: a ladder by name or path; None to watch only.

    Raises:
        ConfigError: nothing was started.
    """
    checked, ignored = from_callback(config)
    if ignored:
        progress(f"fastloop: ignored, the Trainer is the script's: {', '.join(ignored)}")
    check(command)
    name = name_of(command)
    place = claim(name, out, force=force) if first_rank() else Place(unclaimed(name, out))
    try:
        if first_rank():
            files.clear(place.path)
        orders = {"out": str(place.path.absolute()), "config": for_callback(checked), "variation": "as_it_is"}
        with carried(orders, os.environ) as (variables, private):
            code = _run(command, {**os.environ, **variables})
            events = happened(private)
        return _told(name, place.path, code, events)
    finally:
        place.give_back()


# -- the command ------------------------------------------------------------------------------------------------------


def _run(command: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run to the end; the exit code as a shell has it."""
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    before = {each.pid for each in psutil.Process().children(recursive=True)}
    relay = _Relay()

    def ends_with_us() -> None:
        if libc is not None:
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)

    _adopt_orphans(libc, True)
    try:
        with relay.hears():
            # preexec_fn is safe here: there is no other thread, and no torch.
            try:
                process = subprocess.Popen(command, env=environ, preexec_fn=ends_with_us)
            except OSError as error:
                raise ConfigError(got=repr(command[0]), why=f"it cannot be started: {error.strerror or error}",
                                  do="write it as you would in a shell") from None  # fmt: skip
            relay.serve(process)
            code = process.wait()
            if relay.heard or code:
                _sweep(before)
            if relay.heard and code in (0, 1):  # Lightning ends a training that is told to end as if it were done
                code = 128 + relay.heard[0]
    finally:
        _adopt_orphans(libc, False)
    return 128 - code if code < 0 else code


def _adopt_orphans(libc: ctypes.CDLL | None, on: bool) -> None:
    """Ranks that are left behind come to this process, and not to init."""
    if libc is not None:
        libc.prctl(PR_SET_CHILD_SUBREAPER, int(on), 0, 0, 0)


def _sweep(before: set[int]) -> None:
    """Wait a moment for what the command has left behind, then end it."""
    limit = time.monotonic() + LEFT_S
    while True:
        left = [each for each in psutil.Process().children(recursive=True) if each.pid not in before and _lives(each)]
        if not left:
            return
        if time.monotonic() > limit:
            for each in left:
                with contextlib.suppress(psutil.Error):
                    each.kill()
        time.sleep(0.02)


def _lives(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    return False


class _Relay:
    """Signals to this process are for the command. It is in the same process group, so that it keeps the terminal."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.heard: list[int] = []

    @contextlib.contextmanager
    def hears(self) -> Iterator[None]:
        """What is ignored, as after nohup, stays so, for the command too."""
        heeded = [each for each in AGAIN_S if signal.getsignal(each) not in (signal.SIG_IGN, None)]
        before = {each: signal.signal(each, self._hear) for each in heeded}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def serve(self, process: subprocess.Popen[bytes]) -> None:
        """Pass on to this one, also what came before it was there."""
        self.process = process
        for number in self.heard:
            self._pass_on(number)

    def _hear(self, number: int, _frame: FrameType | None) -> None:
        self.heard.append(number)
        first = self.heard.count(number) == 1
        if number == signal.SIGINT and first and _in_foreground():
            return  # the terminal has told the command, which may be about to save its work
        timer = threading.Timer(AGAIN_S[signal.Signals(number)], self._pass_on, (number,))
        timer.daemon = True
        timer.start()

    def _pass_on(self, number: int) -> None:
        if self.process is not None:
            with contextlib.suppress(OSError):
                self.process.send_signal(number)


def _in_foreground() -> bool:
    """Whether a terminal sends Ctrl-C to this process group."""
    try:
        with Path("/dev/tty").open("rb") as terminal:
            return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    except OSError:
        return False


# -- what is said -----------------------------------------------------------------------------------------------------


def _told(name: str, where: Path, code: int, events: Sequence[Event]) -> Answer:
    if not first_rank():
        return Answer(text="", exit_code=code)
    parts = {part: read(where / f"{part}.json") for part in ("plan", "measurement", "verdicts", "findings")}
    measured = parts["measurement"]
    content = {**files.run_json(str(where), **parts), "exit_code": code}
    if measured is None:
        off = os.environ.get("FASTLOOP_DISABLE", "") not in ("", "0")
        why = "FASTLOOP_DISABLE is set" if off else unmeasured(name, events, code)
        return Answer(text=f"fastloop: nothing was measured: {why}", json={**content, "run_dir": None}, exit_code=code)
    seen, plan = measurement_from(measured), plan_from(parts["plan"] or {})
    found, verdicts = findings_from(parts["findings"] or {}), verdicts_from(parts["verdicts"] or {})
    then, later = diagnose.next_steps(found, seen, tuple(step.rung for step in plan.steps))
    lines = summary.lines(seen, plan, verdicts, found, files.report_in(where), name, then, later)
    lines += [f"NOTE     {note}" for note in notes(events)]
    return Answer(text="\n".join(lines), json=content, exit_code=code)

"""fastloop exec: run the user's command with a FastLoop in the first fit that trains, and its rungs in later fits.

The command shares this process's streams, terminal and process group, and has no time limit: it is the user's run.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType

from fastloop.commands.console import Answer
from fastloop.config.loading import load_callback_config
from fastloop.errors import ConfigError
from fastloop.experiments.trials import reaper
from fastloop.experiments.trials.failures import is_first_rank
from fastloop.experiments.trials.run_directories import ClaimedDirectory, claim, name_unclaimed
from fastloop.experiments.trials.script_injection import (
    carried,
    check,
    make_orders,
    name_of,
    read_events,
)
from fastloop.records import store

AGAIN_S = {signal.SIGINT: 2.0, signal.SIGTERM: 0.5, signal.SIGHUP: 0.5}
"""Delay before we pass a signal on, to a command that is still running. The signal may have reached the whole process
group already, and a second Ctrl-C would cut short what the first began, such as a report."""
LEFT_S = 3.0
"""After a signal or a failure, the time for leftover processes of the command to end by themselves."""


def execute(
    command: Sequence[str],
    *,
    config: str | None = None,
    out: str | None = None,
    force: bool = False,
    progress: Callable[[str], None] = lambda _: None,
) -> Answer:
    """Run a command in the foreground, with its streams. The answer is for stderr; its exit code is the command's, or
    that of the signal that was meant to end it.

    Args:
        config: a ladder by name or path; None to watch only.

    Raises:
        ConfigError: nothing was started.
    """
    checked, ignored = load_callback_config(config)
    if ignored:
        progress(f"fastloop: ignored, because the script creates its own Trainer: {', '.join(ignored)}")
    check(command)
    name = name_of(command)
    with claim(name, out, force=force) if is_first_rank() else ClaimedDirectory(name_unclaimed(name, out)) as path:
        if is_first_rank():
            store.clear(path)
        with carried(make_orders(checked, path, name), os.environ) as (variables, private):
            code = _run(command, {**os.environ, **variables})
            events = read_events(private)
        if not is_first_rank():
            return Answer(text="", exit_code=code)
        from fastloop.commands.exec_answer import answer

        return answer(name, path, code, events, command, config)


# -- the command ------------------------------------------------------------------------------------------------------


def _run(command: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run to the end, and return the exit code as a shell would."""
    before, relay = reaper.list_descendants(), _Relay()
    reaper.adopt_orphans(True)
    try:
        with relay.hears():
            # preexec_fn is safe here: there is no other thread, and no torch.
            try:
                process = subprocess.Popen(
                    command, env=environ, preexec_fn=lambda: reaper.die_with_parent(signal.SIGTERM)
                )
            except OSError as error:
                raise ConfigError(
                    got=repr(command[0]),
                    why=f"it cannot be started: {error.strerror or error}",
                    do="write the command as you would in a shell",
                ) from None
            relay.serve(process)
            import fastloop.commands.exec_answer  # noqa: F401  # takes a while, in which the command imports torch

            code = process.wait()
            if relay.heard or code:
                reaper.end_descendants(besides=before, grace_s=LEFT_S)
            if relay.heard and code in (0, 1):  # Lightning ends a stopped training as if it had finished
                code = 128 + relay.heard[0]
    finally:
        reaper.adopt_orphans(False)
    return 128 - code if code < 0 else code


class _Relay:
    """Passes signals on to the command. The command stays in this process group, so that it keeps the terminal."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.heard: list[int] = []

    @contextlib.contextmanager
    def hears(self) -> Iterator[None]:
        """Relay signals inside this context. Signals that are ignored, as after nohup, stay ignored for the command."""
        heeded = [each for each in AGAIN_S if signal.getsignal(each) not in (signal.SIG_IGN, None)]
        before = {each: signal.signal(each, self._hear) for each in heeded}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def serve(self, process: subprocess.Popen[bytes]) -> None:
        """Pass signals on to this process, including those that came before it started."""
        self.process = process
        for number in self.heard:
            self._pass_on(number)

    def _hear(self, number: int, _frame: FrameType | None) -> None:
        self.heard.append(number)
        first = self.heard.count(number) == 1
        if number == signal.SIGINT and first and _is_in_foreground():
            return  # the terminal has signaled the command, which may be saving its work
        timer = threading.Timer(AGAIN_S[signal.Signals(number)], self._pass_on, (number,))
        timer.daemon = True
        timer.start()

    def _pass_on(self, number: int) -> None:
        if self.process is not None:
            with contextlib.suppress(OSError):
                self.process.send_signal(number)


def _is_in_foreground() -> bool:
    """Whether a terminal sends Ctrl-C to this process group."""
    try:
        with Path("/dev/tty").open("rb") as terminal:
            return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    except OSError:
        return False

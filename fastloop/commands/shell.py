"""What a command line needs around its commands: suggestions, signals, files, errors in one voice. Prints nothing."""

from __future__ import annotations

import contextlib
import difflib
import os
import re
import signal
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import click

from fastloop.commands.answer import Failed
from fastloop.commands.disk import NO_ROOM
from fastloop.errors import ConfigError, FastLoopError


class Commands(click.Group):
    """A group that suggests the command a typing error meant."""

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if args and args[0] not in self.commands and not args[0].startswith("-"):
            close = difflib.get_close_matches(args[0], self.commands, n=1)
            do = f"write {close[0]}" if close else "run fastloop --help"
            raise ConfigError(got=f"command {args[0]!r}", why=f"the commands are {', '.join(self.commands)}", do=do)
        return super().resolve_command(ctx, args)


@contextlib.contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Send whatever this process and its children print to stderr.

    Raises:
        ConfigError: stdout is closed.
    """
    if sys.stdout is None:
        raise ConfigError(got="--json -", why="stdout is closed", do="write --json FILE")
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        os.dup2(2, 1)
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


@contextlib.contextmanager
def to_stdout() -> Iterator[None]:
    """Printing an answer. That nobody reads on is no fault.

    Raises:
        FastLoopError: it cannot be written.
    """
    try:
        yield
    except BrokenPipeError:
        pass
    except OSError as error:
        raise FastLoopError(got="stdout", why=f"it cannot be written: {error.strerror or error}",
                            do="write elsewhere; of a run, fastloop report RUN_DIR tells again") from None  # fmt: skip


def check_writable(path: Path) -> None:
    """Find out before a training whether its result can be written after it."""
    there = path.exists()
    write(path, "", mode="a")
    if not there:
        path.unlink()


def write(path: Path, text: str, mode: str = "w") -> None:
    try:
        with path.open(mode, encoding="utf-8", errors="replace") as file:
            file.write(text)
    except OSError as error:
        raise ConfigError(got=f"--json {path}", why=f"it cannot be written: {error.strerror or error}",
                          do="write a file in a directory of yours, or - for stdout") from None  # fmt: skip


def seconds(text: str, option: str) -> float:
    """A time such as ``90s``, ``20m``, ``1h30m`` or ``90`` in seconds; raises ConfigError."""
    one = r"(\d+(?:\.\d+)?)"
    found = re.fullmatch(f"{one}|(?:{one}h)?(?:{one}m)?(?:{one}s)?", text.strip())
    parts = found.groups(default="0") if found else ()
    total = sum(float(part) * unit for part, unit in zip(parts, (1, 3600, 60, 1), strict=False))
    if total <= 0:
        raise ConfigError(got=f"{option} {text}", why="it is no time", do="write 90s, 20m or 1h30m")
    return total


def hear_signals() -> list[int]:
    """Let SIGTERM end the program as Ctrl-C does, and so a terminal that is closed: its directories are given back.
    Gives the signals as they come.

    A training hears SIGTERM in its own way, see ``bridge/ending.py``. What is ignored, as after nohup, stays so.
    """
    heard: list[int] = []

    def stop(number: int, _frame: object) -> NoReturn:
        heard.append(number)
        raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)

    hangs_up = getattr(signal, "SIGHUP", signal.SIGTERM)  # Windows has none
    for number, default in ((signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, signal.SIG_DFL),
                            (hangs_up, signal.SIG_DFL)):  # fmt: skip
        if signal.getsignal(number) == default:
            signal.signal(number, stop)
    return heard


def last_words(error: BaseException) -> tuple[str, int]:
    """What a program that ends by this says on stderr, and its exit code."""
    if isinstance(error, FastLoopError):
        return f"fastloop: {error}", error.exit_code
    if isinstance(error, Failed):
        return str(error), error.exit_code
    if isinstance(error, click.ClickException):
        return f"fastloop: {usage(error)}", 2
    if isinstance(error, (KeyboardInterrupt, click.Abort)):
        return "fastloop: interrupted", 130
    if isinstance(error, SystemExit):
        code = error.code
        return code if isinstance(code, str) else "", code if isinstance(code, int) else int(code is not None)
    if isinstance(error, OSError) and error.errno in NO_ROOM:
        got = str(error.filename or "what it answers")
        why = f"it cannot be written: {error.strerror}"
        return f"fastloop: {FastLoopError(got=got, why=why, do='make room, or write to another disk')}", 1
    told = "".join(traceback.format_exception(error))
    return f"{told}fastloop: this is a fault of fastloop's: {type(error).__name__}: {error}", 1


def usage(error: click.ClickException) -> ConfigError:
    """Click's complaints in the words of all others."""
    context = getattr(error, "ctx", None)
    command = context.command_path if context else "fastloop"
    why, do = error.format_message(), f"see {command} --help"
    if isinstance(error, click.NoSuchOption):
        name, near = error.option_name, error.possibilities or ()
        why = f"{command} has no option {name}"
        if "." in name:
            do = f"write {name.lstrip('-')}=…, without dashes"
        elif near:
            do = f"write {difflib.get_close_matches(name, near, n=1, cutoff=0.0)[0]}"
    elif isinstance(error, click.MissingParameter) and error.param is not None:
        why = f"{error.param.make_metavar(context) if context else error.param.name} is missing"
    return ConfigError(got=command, why=why, do=do)

"""Plumbing of the command line: answers, suggestions, signals, output files, error messages. Prints nothing."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import click

from fastloop.config.suggestions import find_nearest
from fastloop.errors import ConfigError, FastLoopError
from fastloop.experiments.trials.failures import NO_ROOM, Failed
from fastloop.records import store
from fastloop.records.store import Record

SLOW_S = 2.0
"""A command that is silent for longer says what it does."""
WATCHED = ("watch.enabled=true", "watch.trace_steps=0")
"""Overrides of a training that is compared with others."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Text for people, one object for programs, and the exit code."""

    text: str
    json: Mapping[str, Any] | None = None
    """None if this process prints no answer, as on all ranks but the first."""
    exit_code: int = 0


def answer_without_run(text: str, **content: Any) -> Answer:
    """Make the answer of a command that has no run directory."""
    return Answer(text=text, json={"schema": store.SCHEMA, "run_dir": None, **content})


@dataclass(frozen=True, kw_only=True)
class Request:
    """The options of every command that trains in separate processes."""

    more: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()
    out: str | None = None
    force: bool = False
    limit_s: float = 3600.0
    """The time limit of each training."""


def attach(error: BaseException, record: Record) -> None:
    """Attach the results so far to an exception that ends a command, so that ``--json`` still writes them."""
    vars(error)["fastloop_record"] = record


@contextlib.contextmanager
def attaching(collect: Callable[[], Record], place: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Attach the results so far to an exception that ends this context, and say where the files are.

    Args:
        collect: returns the results so far.
    """
    try:
        yield
    except BaseException as error:
        attach(error, collect())
        if not isinstance(error, FastLoopError) and place.is_dir() and any(place.iterdir()):
            say(f"fastloop: the files so far are in {place}")
        raise


def get_attached(error: BaseException) -> Record | None:
    """Return the record from `attach`, or None."""
    record: Record | None = vars(error).get("fastloop_record")
    return record


class Commands(click.Group):
    """A group that suggests the nearest command for a mistyped one."""

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if args and args[0] not in self.commands and not args[0].startswith("-"):
            near = find_nearest(args[0], self.commands)
            do = f"write {near}" if near else f"run {ctx.command_path} --help"
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
    """Report a failed write to stdout. A closed pipe is not an error: the reader has stopped reading.

    Raises:
        FastLoopError: stdout cannot be written.
    """
    try:
        yield
    except BrokenPipeError:
        pass
    except OSError as error:
        raise FastLoopError(
            got="stdout",
            why=f"it cannot be written: {error.strerror or error}",
            do="redirect stdout elsewhere; fastloop report RUN_DIR shows a run again",
        ) from None


def to_json(content: Record | Mapping[str, Any]) -> dict[str, Any]:
    """Convert an answer to its JSON object; ``run_dir`` is null if that directory was removed again."""
    answer = dict(content) if isinstance(content, Mapping) else store.to_json(content)
    if answer.get("run_dir") is not None and not Path(answer["run_dir"]).is_dir():
        answer["run_dir"] = None
    return answer


def check_writable(path: Path) -> None:
    """Make sure, before training, that the result can be written after it; raises ConfigError."""
    there = path.exists()
    if path.is_fifo():
        return  # opening a named pipe waits for its reader, and closing it ends the reader's input
    write(path, "", mode="a")
    if not there:
        path.unlink()


def write(path: Path, text: str, mode: str = "w") -> None:
    """Write a ``--json`` file; raises ConfigError if that fails."""
    try:
        with path.open(mode, encoding="utf-8", errors="replace") as file:
            file.write(text)
    except OSError as error:
        raise ConfigError(
            got=f"--json {path}",
            why=f"it cannot be written: {error.strerror or error}",
            do="choose a file in a directory you can write to, or - for stdout",
        ) from None


def read_text(path: Path) -> str:
    """Read a file of a run directory; raises ConfigError if that fails."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        why = f"it cannot be read: {error.strerror or error}"
        raise ConfigError(got=str(path), why=why, do="make it readable, or run the training again") from None


def parse_seconds(text: str, option: str) -> float:
    """Convert a duration such as ``90s``, ``20m``, or ``1h30m`` to seconds; raises ConfigError."""
    one = r"(\d+(?:\.\d+)?)"
    found = re.fullmatch(f"(?:{one}h)?(?:{one}m)?(?:{one}s)?", text.strip())
    parts = found.groups(default="0") if found else ()
    total = sum(float(part) * unit for part, unit in zip(parts, (3600, 60, 1), strict=False))
    if total <= 0:
        why = "it is 0" if found and text.strip() else "it is not a number followed by h, m or s"
        why = "it is negative" if text.strip().startswith("-") else why
        raise ConfigError(got=f"{option} {text}", why=why, do="write 90s, 20m or 1h30m")
    return total


@contextlib.contextmanager
def telling_if_slow(line: str, say: Callable[[str], None]) -> Iterator[None]:
    """Say a line if what is inside takes longer than two seconds."""
    timer = threading.Timer(SLOW_S, say, (line,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


def handle_signals() -> list[int]:
    """Make SIGTERM and a closed terminal end the program as Ctrl-C does, so that it cleans up. Returns a list that
    receives each signal's number.

    Training handles SIGTERM itself, see ``bridge/fit/shutdown.py``. An ignored signal, as after nohup, stays ignored.
    """
    received: list[int] = []

    def stop(number: int, _frame: object) -> NoReturn:
        received.append(number)
        raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) in (signal.default_int_handler, signal.SIG_DFL):
            signal.signal(number, stop)
    return received


def describe_exit(error: BaseException) -> tuple[str, int]:
    """Return the text for stderr and the exit code of a program that ends with this error."""
    if isinstance(error, FastLoopError):
        return f"fastloop: {error}", error.exit_code
    if isinstance(error, Failed):
        return str(error), error.exit_code
    if isinstance(error, click.ClickException):
        return f"fastloop: {to_config_error(error)}", 2
    if isinstance(error, (KeyboardInterrupt, click.Abort)):
        return "fastloop: interrupted", 130
    if isinstance(error, SystemExit):
        code = error.code
        return code if isinstance(code, str) else "", code if isinstance(code, int) else int(code is not None)
    if isinstance(error, OSError) and error.errno in NO_ROOM:
        got = str(error.filename or "the output")
        why = f"it cannot be written: {error.strerror}"
        return f"fastloop: {FastLoopError(got=got, why=why, do='free some space, or write to another disk')}", 1
    trace = "".join(traceback.format_exception(error))
    return f"{trace}fastloop: this is a bug in fastloop: {type(error).__name__}: {error}", 1


def _find_command(argv: Sequence[str], option: str) -> str | None:
    """The words after ``fastloop exec``, with the ``--`` that was forgotten before the command; None elsewhere."""
    words = argv[2:] if argv[1:2] == ["exec"] and "--" not in argv else []
    names = [Path(word).name for word in words]
    begins = next((place for place, name in enumerate(names) if re.match(r"python|.+\.(py|sh)$", name)), None)
    if begins is None or option not in (word.partition("=")[0] for word in words[begins:]):
        return None
    return shlex.join([*words[:begins], "--", *words[begins:]])


def _describe_values(kind: click.ParamType[Any]) -> str:
    """Describe the values that an option takes; empty for a type that no option has yet."""
    if isinstance(kind, click.Choice):
        return " or ".join(map(str, kind.choices))
    if isinstance(kind, (click.IntRange, click.FloatRange)):
        return f"{'an integer' if isinstance(kind, click.IntRange) else 'a number'} of {kind.min:g} or more"
    return ""


def to_config_error(error: click.ClickException) -> ConfigError:
    """Convert click's usage error to our own: got, why, do."""
    context = getattr(error, "ctx", None)
    command = context.command_path if context else "fastloop"
    why, do = error.format_message(), f"see {command} --help"
    if isinstance(error, click.NoSuchOption):
        name = error.option_name
        near = find_nearest(name.lstrip("-"), [option.lstrip("-") for option in error.possibilities or ()])
        why = f"{command} has no option {name}"
        if (line := _find_command(sys.argv, name)) is not None:
            why = f"without -- before your command, fastloop reads {name} as its own option"
            do = f"write fastloop exec {line}"
        elif name == "--script":
            do = "write fastloop exec -- python train.py to diagnose a script; only ab and climb take --script"
        elif "." in name:
            do = f"write {name.lstrip('-')}=…, without dashes"
        elif near:
            do = f"write --{near}"
    elif isinstance(error, click.BadOptionUsage):  # comes without the command
        command, do = error.option_name, f"write a value after {error.option_name}, or drop it"
    elif extra := re.fullmatch(r"Got unexpected extra arguments? \((.*)\)", why):
        command, why = f"{command} … {extra[1]}", f"{command} takes no further argument"
    elif isinstance(error, click.MissingParameter) and error.param is not None:
        why = f"{error.param.make_metavar(context) if context else error.param.name} is missing"
    elif isinstance(error, click.BadParameter) and isinstance(error.param, click.Option):
        value, refused, _ = error.message.partition(" is not ")
        wanted = _describe_values(error.param.type)
        if refused and wanted:
            command = " ".join([error.param.opts[-1], value.strip("'")])
            why, do = f"it must be {wanted}", f"write {wanted}"
    return ConfigError(got=command, why=why, do=do)

"""The command line as people use it: in this process, where that is enough, and as a program of its own."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest

from fastloop import cli
from fastloop.bridge.fit.recipe_modules import FOLDER
from tests import preloaded
from tests.bridge.launch import OF_ANOTHER_RUN
from tests.bridge.launch import ROOT as ROOT

Found = TypeVar("Found")
CONTROL = re.compile(r"[^\n\t\x20-\x7e\u00a0-\U0010ffff]")
"""What a log file must not hold: escape sequences, carriage returns, bells."""


@dataclass(frozen=True)
class Said:
    """How a command ended and what it said."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The one object on stdout."""
        return strictly(self.out)


def strictly(text: str) -> Any:
    """JSON as the standard has it: one object, no NaN, no Infinity."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    content = json.loads(text, parse_constant=refuse)
    assert isinstance(content, dict)
    return content


class CommandLine:
    """``fastloop`` in this process, in a folder of its own; what is said is taken at the file descriptors."""

    def __init__(self, folder: Path, capture: pytest.CaptureFixture[str], patch: pytest.MonkeyPatch) -> None:
        self.folder, self._capture, self._patch = folder, capture, patch
        patch.chdir(folder)
        for name in [name for name in os.environ if name.startswith(OF_ANOTHER_RUN) and not name.startswith("PYTEST")]:
            patch.delenv(name)
        patch.setenv("XDG_CACHE_HOME", str(folder.parent / "cache"))
        patch.setenv(FOLDER, "")  # so that what the command sets it to is gone afterwards

    def __call__(self, *arguments: str | Path) -> Said:
        self._patch.setattr(sys, "argv", ["fastloop", *map(str, arguments)])
        self._capture.readouterr()
        code = cli._main()
        sys.stdout.flush()
        out, err = self._capture.readouterr()
        return Said(code, out, err)


@contextlib.contextmanager
def program(
    *arguments: str | Path,
    cwd: Path,
    env: Mapping[str, str] | None = None,
    code: str | None = None,
    executed: bool = False,
) -> Iterator[subprocess.Popen[str]]:
    """``fastloop`` as a process, with its streams in the files ``out`` and ``err`` of `cwd`; gone afterwards.

    Args:
        code: Python to run in place of the program.
        executed: start a new interpreter, as people do, in place of forking one that has imported its libraries.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith(OF_ANOTHER_RUN)}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **(env or {})}
    command = [sys.executable, *(["-c", code] if code is not None else ["-m", "fastloop"]), *map(str, arguments)]
    with (cwd / "out").open("w") as out, (cwd / "err").open("w") as err:
        with contextlib.nullcontext() if executed else preloaded.quick_starts(ranks=True):
            process = subprocess.Popen(
                command,
                cwd=cwd,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                text=True,
                start_new_session=True,
            )
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def run(
    *arguments: str | Path,
    cwd: Path,
    limit_s: float = 120,
    env: Mapping[str, str] | None = None,
    code: str | None = None,
    executed: bool = False,
) -> Said:
    """``fastloop`` as a process, to its end."""
    with program(*arguments, cwd=cwd, env=env, code=code, executed=executed) as process:
        process.wait(limit_s)
    return Said(process.returncode, (cwd / "out").read_text(), (cwd / "err").read_text())


def wait_for(condition: Callable[[], Any], limit_s: float = 100, told: Path | None = None) -> Any:
    """What the condition gives once it is something.

    Args:
        told: where the program writes its stderr, shown when it was in vain.
    """
    end = time.monotonic() + limit_s
    while not (found := condition()):
        assert time.monotonic() < end, f"waited in vain: {told.read_text() if told else ''}"
        time.sleep(0.05)
    return found


def measure_anew(measure: Callable[[], Found], fits: Callable[[Found], bool], tries: int = 3) -> Found:
    """What is measured by the clock of this machine: a second of it in which nothing runs is in one of the tries."""
    for _ in range(tries):
        if fits(found := measure()):
            break
    return found


def refuse_reading(patch: pytest.MonkeyPatch) -> None:
    """Make every file unreadable, as one of another user's is; root may read anything."""

    def refuse(*_: Any, **__: Any) -> str:
        raise PermissionError(errno.EACCES, "Permission denied")

    patch.setattr(Path, "read_text", refuse)


def family(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """A living process and all it started."""
    parent = psutil.Process(process.pid)
    return [parent, *parent.children(recursive=True)]


def alive(processes: list[psutil.Process]) -> list[int]:
    """Those still running; a zombie is none."""
    return [each.pid for each in processes if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]

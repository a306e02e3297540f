"""Around the commands: suggestions, files that cannot be written, signals, and what goes to stderr."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import click
import pytest

from fastloop.commands import shell
from fastloop.errors import ConfigError


@click.group(cls=shell.Commands)
def group() -> None: ...


@group.command()
def train() -> None: ...


@pytest.mark.parametrize(("typed", "do"), [("trian", "write train"), ("zzz", "run fastloop --help")])
def test_a_mistyped_command_gets_a_suggestion(typed: str, do: str) -> None:
    with pytest.raises(ConfigError) as error:
        group.main([typed], standalone_mode=False)
    assert error.value.do == do and "train" in error.value.why


def test_a_file_is_tried_and_not_left_behind(tmp_path: Path) -> None:
    shell.check_writable(tmp_path / "out.json")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "kept").write_text("what was there")
    shell.check_writable(tmp_path / "kept")
    assert (tmp_path / "kept").read_text() == "what was there"
    with pytest.raises(ConfigError) as error:
        shell.check_writable(tmp_path / "no" / "such" / "folder.json")
    assert "folder.json" in error.value.got


def test_what_is_printed_by_anybody_goes_to_stderr(capfd: pytest.CaptureFixture[str]) -> None:
    with shell.stdout_to_stderr():
        os.write(1, b"a library's\n")
        subprocess.run([sys.executable, "-c", "print('a child')"], check=True, timeout=60)
    os.write(1, b"after\n")
    out, err = capfd.readouterr()
    assert out == "after\n" and "a library's" in err and "a child" in err


def test_signals_end_the_program_and_are_remembered() -> None:
    code = (
        "import os, signal\n"
        "from fastloop.commands.shell import hear_signals\n"
        "heard = hear_signals()\n"
        "for number in (signal.SIGINT, signal.SIGTERM):\n"
        "    try:\n"
        "        os.kill(os.getpid(), number); signal.pause()\n"
        "    except (KeyboardInterrupt, SystemExit) as error:\n"
        "        print(type(error).__name__, heard[-1] == number)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines() == ["KeyboardInterrupt True", "SystemExit True"]


def test_an_ignored_signal_stays_ignored() -> None:
    before = signal.getsignal(signal.SIGTERM)
    try:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        interrupt = signal.getsignal(signal.SIGINT)
        shell.hear_signals()
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)
        signal.signal(signal.SIGINT, interrupt)


def test_an_option_that_is_an_override() -> None:
    error = shell.usage(click.NoSuchOption("--rungs.amp.enabled"))
    assert "without dashes" in error.do

"""Around the commands: suggestions, files that cannot be written, signals, and what goes to stderr."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import click
import pytest

from fastloop.commands import console
from fastloop.commands.console import Answer, attach, get_attached
from fastloop.errors import ConfigError
from fastloop.experiments.trials.failures import Failed
from fastloop.records.run_files import VerdictsFile


@click.group(cls=console.Commands)
def group() -> None: ...


@group.command()
def train() -> None: ...


@pytest.mark.parametrize(("typed", "do"), [("trian", "write train"), ("zzz", "run group --help")])
def test_a_mistyped_command_gets_a_suggestion(typed: str, do: str) -> None:
    with pytest.raises(ConfigError) as error:
        group.main([typed], prog_name="group", standalone_mode=False)
    assert error.value.do == do and "train" in error.value.why


def test_a_file_is_tried_and_not_left_behind(tmp_path: Path) -> None:
    console.check_writable(tmp_path / "out.json")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "kept").write_text("what was there")
    console.check_writable(tmp_path / "kept")
    assert (tmp_path / "kept").read_text() == "what was there"
    with pytest.raises(ConfigError) as error:
        console.check_writable(tmp_path / "no" / "such" / "folder.json")
    assert "folder.json" in error.value.got


def test_a_named_pipe_is_not_opened_before_the_answer(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    code = "from pathlib import Path; from fastloop.commands import console; console.check_writable(Path('pipe'))"
    assert subprocess.run([sys.executable, "-c", code], cwd=tmp_path, timeout=60).returncode == 0


def test_a_directory_that_was_given_back_is_not_named(tmp_path: Path) -> None:
    record = {"run_dir": str(tmp_path / "gone"), "plan": None}
    assert console.to_json(record) == {"run_dir": None, "plan": None}
    (tmp_path / "gone").mkdir()
    assert console.to_json(record) == record


def test_results_so_far_are_attached_and_their_place_is_told(tmp_path: Path) -> None:
    told: list[str] = []
    for error in (KeyboardInterrupt(), ConfigError(got="a", why="b", do="c"), Failed("no luck")):
        with pytest.raises(type(error)), console.attaching(VerdictsFile, tmp_path, told.append):
            raise error
        assert get_attached(error) == VerdictsFile()
        (tmp_path / "verdicts.json").touch()
    assert told == [f"fastloop: the files so far are in {tmp_path}"], "not before there are any, nor after our errors"


def test_what_is_printed_by_anybody_goes_to_stderr(capfd: pytest.CaptureFixture[str]) -> None:
    with console.stdout_to_stderr():
        os.write(1, b"a library's\n")
        subprocess.run([sys.executable, "-c", "print('a child')"], check=True, timeout=200)
    os.write(1, b"after\n")
    out, err = capfd.readouterr()
    assert out == "after\n" and "a library's" in err and "a child" in err


def test_signals_end_the_program_and_are_remembered() -> None:
    code = (
        "import os, signal\n"
        "from fastloop.commands.console import handle_signals\n"
        "received = handle_signals()\n"
        "for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):\n"
        "    try:\n"
        "        os.kill(os.getpid(), number); signal.pause()\n"
        "    except (KeyboardInterrupt, SystemExit) as error:\n"
        "        print(type(error).__name__, received[-1] == number)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=True)
    assert done.stdout.splitlines() == ["KeyboardInterrupt True", "SystemExit True", "SystemExit True"]


def test_an_ignored_signal_stays_ignored() -> None:
    before, hang_up = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGHUP)
    try:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        interrupt = signal.getsignal(signal.SIGINT)
        console.handle_signals()
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)
        signal.signal(signal.SIGHUP, hang_up)
        signal.signal(signal.SIGINT, interrupt)


def test_an_option_that_is_an_override() -> None:
    error = console.to_config_error(click.NoSuchOption("--rungs.amp.enabled"))
    assert "without dashes" in error.do


@pytest.mark.parametrize(
    ("text", "expected"),
    [("90s", 90), ("20m", 1200), ("1.5h", 5400), ("9m30s", 570), ("1h30m", 5400), ("1h5s", 3605)],
)
def test_times(text: str, expected: float) -> None:
    assert console.parse_seconds(text, "--budget") == expected


@pytest.mark.parametrize("text", ["", "9", "20 minutes", "m", "1e3", "2h30", "30s9m"])
def test_invalid_durations(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--budget[\s\S]*why it is not a number followed by h, m or s"):
        console.parse_seconds(text, "--budget")


@pytest.mark.parametrize(("text", "why"), [("-5m", "it is negative"), ("-3", "it is negative"), ("0m", "it is 0")])
def test_durations_that_are_no_time(text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=rf"--budget {text}\n  why {why}\n  do  write 90s"):
        console.parse_seconds(text, "--budget")


@pytest.mark.parametrize(
    ("error", "said", "code"),
    [
        (ConfigError(got="x", why="y", do="z"), "fastloop: got x\n  why y\n  do  z", 2),
        (KeyboardInterrupt(), "fastloop: interrupted", 130),
        (SystemExit(143), "", 143),
        (SystemExit("bye"), "bye", 1),
        (SystemExit(), "", 0),
        (click.UsageError("what?"), "fastloop: got fastloop", 2),
        (OSError(28, "No space left on device", "/data/x"), "fastloop: got /data/x\n  why it cannot be written: No", 1),
        (OSError(28, "No space left on device"), "fastloop: got the output", 1),
        (PermissionError(13, "no"), "this is a bug in fastloop: PermissionError", 1),
        (ZeroDivisionError("by zero"), "this is a bug in fastloop: ZeroDivisionError: by zero", 1),
    ],
    ids=str,
)
def test_exits_are_described(error: BaseException, said: str, code: int) -> None:
    text, found = console.describe_exit(error)
    assert found == code and (said in text if said else text == "")


@pytest.mark.parametrize("buffered", ["", "1"], ids=["buffered", "unbuffered"])
@pytest.mark.parametrize("arguments", [["recipes"], ["recipes", "--json", "-"]], ids=["text", "json"])
def test_a_full_disk_is_no_fault_of_ours_and_no_success(arguments: list[str], buffered: str) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "fastloop", *arguments],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            env={**os.environ, "PYTHONUNBUFFERED": buffered},
        )
    assert "fastloop: got stdout\n  why it cannot be written: No space" in done.stderr
    assert "Traceback" not in done.stderr and done.returncode == 1


@pytest.mark.parametrize("broken", [1, 0])
def test_a_stdout_that_takes_nothing_costs_no_json(broken: int, tmp_path: Path) -> None:
    told = tmp_path / "told.json"
    command = [sys.executable, "-m", "fastloop", "recipes", "--json", str(told)]
    with Path(os.devnull).open("r" if broken else "w") as stdout:
        done = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == broken and "Traceback" not in done.stderr and "fault" not in done.stderr
    assert ("fastloop: got stdout\n  why it cannot be written: Bad file" in done.stderr) == bool(broken)
    assert "cifar10" in told.read_text()


@pytest.mark.parametrize("buffered", ["", "1"], ids=["buffered", "unbuffered"])
@pytest.mark.parametrize("arguments", [["recipes"], ["recipes", "--json", "-"]], ids=["text", "json"])
def test_that_nobody_reads_on_is_no_failure(arguments: list[str], buffered: str) -> None:
    reads, writes = os.pipe()
    os.close(reads)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "fastloop", *arguments],
            stdout=writes,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            env={**os.environ, "PYTHONUNBUFFERED": buffered},
        )
    finally:
        os.close(writes)
    assert done.returncode == 0 and "Broken" not in done.stderr and "fault" not in done.stderr


def test_an_object_for_a_closed_stdout_is_refused() -> None:
    asked = [sys.executable, "-m", "fastloop", "recipes", "--json", "-"]
    done = subprocess.run(["sh", "-c", '"$@" >&-', "sh", *asked], stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2 and "fastloop: got --json -\n  why stdout is closed" in done.stderr


def test_an_answer_is_a_record() -> None:
    answer = Answer(text="x")
    assert (answer.json, answer.exit_code) == (None, 0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        answer.text = "y"  # type: ignore[misc]
    with pytest.raises(TypeError, match="positional"):
        Answer("x")  # type: ignore[misc]


@pytest.mark.parametrize("error", [Failed("x"), KeyboardInterrupt(), SystemExit(143)], ids=repr)
def test_whatever_ends_a_command_can_carry_what_there_is(error: BaseException) -> None:
    record = VerdictsFile()
    assert get_attached(error) is None
    attach(error, record)
    assert get_attached(error) is record


def test_an_argument_too_many_is_shown() -> None:
    with pytest.raises(click.UsageError) as caught:
        group.main(["train", "hard"], standalone_mode=False)
    error = console.to_config_error(caught.value)
    assert error.got.endswith("train … hard") and "no further argument" in error.why and "--help" in error.do


def test_what_takes_long_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    said, told = list[str](), threading.Event()
    with console.telling_if_slow("quick", said.append):
        pass
    monkeypatch.setattr(console, "SLOW_S", 0.01)

    def say(line: str) -> None:
        said.append(line)
        told.set()

    with console.telling_if_slow("slow", say):
        assert told.wait(60)
    assert said == ["slow"]

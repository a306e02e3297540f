"""A command of the user's in the foreground: what it gets, how it ends, and what is said of it."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import signal
import subprocess
import sys
import sysconfig
import tempfile
import termios
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from fastloop.commands import execute
from fastloop.errors import ConfigError
from tests.commands.command_line import ROOT, Said, alive, family, program, run, wait_for
from tests.trainings import TRAIN

COUNTS = """
import signal, sys, time
from pathlib import Path
heard = []
signal.signal(signal.SIGINT, lambda number, _: heard.append(number))
signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
Path("up").touch()
end = time.monotonic() + 250
while not heard and time.monotonic() < end:
    time.sleep(0.01)
time.sleep(float(sys.argv[1]))
Path("heard").write_text(repr(list(map(int, heard))))
sys.exit(5)
"""
"""Says which signals came until so many seconds after the first."""


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """Where commands run, with ``tmp``, a directory for temporary files of its own: short, as sockets need it."""
    with tempfile.TemporaryDirectory(prefix="fl-") as short:
        (tmp_path / "tmp").symlink_to(short)
        yield tmp_path


def own(place: Path, **more: str) -> dict[str, str]:
    return {"TMPDIR": str((place / "tmp").resolve()), "PL_GLOBAL_SEED": "4", **more}


def fastloop_exec(place: Path, *arguments: str | Path, **more: Any) -> Said:
    return run("exec", *arguments, cwd=place, env=own(place, **more), limit_s=200)


def run_dir(place: Path) -> Path:
    (found,) = (place / "fastloop-runs" / "train").iterdir()
    return found


def measurement(place: Path) -> dict[str, Any]:
    return dict(json.loads((run_dir(place) / "measurement.json").read_text()))


# -- scripts ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_unmodified_script_is_measured_and_stays_the_same_training(place: Path) -> None:
    """And a second one, started meanwhile by the same Python in the same folder, has nothing of ours in it."""
    installed = set(Path(sysconfig.get_paths()["purelib"]).iterdir())
    command = (sys.executable, TRAIN, "--does", "waits", "--tell", "watched.json")
    with program("exec", "--config", "safe", "--", *command, cwd=place, env=own(place)) as process:
        wait_for((place / "waiting").exists, 100, place / "err")
        assert len(list((place / "tmp").glob("fastloop-exec-*"))) == 1
        (place / "go").touch()
        subprocess.run(
            [sys.executable, TRAIN, "--tell", "plain.json"],
            cwd=place,
            check=True,
            timeout=200,
            capture_output=True,
            env={**os.environ, **own(place), "OMP_NUM_THREADS": "1"},
        )
        assert process.wait(100) == 0
    watched, plain = (json.loads((place / f"{name}.json").read_text()) for name in ("watched", "plain"))
    assert watched["losses"] == plain["losses"] and len(plain["losses"]) == 128
    assert watched["callbacks"] == ["Injected", "FastLoop"] and plain["callbacks"] == []
    assert watched["path"][0] == str(TRAIN.parent), "the script's own folder comes first, as without us"
    assert "PYTHONSAFEPATH" not in watched["environ"]
    assert measurement(place)["total_steps"] == 128 and measurement(place)["samples_per_s"] > 0
    assert (run_dir(place) / "verdicts.json").is_file() and "fastloop" in (place / "err").read_text()
    assert not list((place / "tmp").glob("fastloop-*"))
    assert set(Path(sysconfig.get_paths()["purelib"]).iterdir()) == installed


@pytest.mark.slow
@pytest.mark.multirank
@pytest.mark.parametrize(
    ("launcher", "library"),
    [
        (("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"), "pytorch_lightning"),
        ((), "lightning.pytorch"),
    ],
    ids=["torchrun-pytorch_lightning", "ddp-lightning"],
)
def test_several_ranks(launcher: tuple[str, ...], library: str, place: Path) -> None:
    pytest.importorskip(library)
    said = fastloop_exec(
        place, "--", sys.executable, *launcher, TRAIN, "--devices", "2", "--lightning", library, "--tell", "seen.json"
    )
    assert said.code == 0, said.err
    seen = measurement(place)
    assert (seen["world_size"], seen["total_steps"], len(seen["ranks"])) == (2, 64, 2)
    assert json.loads((place / "seen.json").read_text())["callbacks"] == ["Injected", "FastLoop"]
    assert "REPORT" in said.out + said.err and not list((place / "tmp").glob("fastloop-*"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("does", "code", "line", "steps"),
    [
        ("never", 0, "fastloop: nothing was measured: train.py made a Trainer, but never called fit", None),
        ("twice", 0, "NOTE     fit ran twice; only the first one was measured", 128),
        ("exits", 3, "PARTIAL: the fit did not end normally", 25),
        ("tries_first", 0, "steps 22-128", 128),
        (
            "only_tries",
            0,
            "nothing was measured: every fit of train.py is a fast_dev_run, which only tries the code",
            None,
        ),
    ],
    ids=["never", "twice", "exits", "tries_first", "only_tries"],
)
def test_what_scripts_do_is_named(does: str, code: int, line: str, steps: int | None, place: Path) -> None:
    said = fastloop_exec(place, "--json", "said.json", "--", sys.executable, TRAIN, "--does", does)
    assert said.code == code and line in said.out + said.err
    content = json.loads((place / "said.json").read_text())
    assert (content["schema"], content["exit_code"]) == (1, code)
    if steps is None:
        assert content["run_dir"] is None and content["measurement"] is None
        assert not (place / "fastloop-runs").exists(), "an empty directory is taken away"
    else:
        assert content["measurement"]["total_steps"] == steps and content["run_dir"]


# -- any command ------------------------------------------------------------------------------------------------------


def test_streams_and_exit_code_are_the_commands(place: Path) -> None:
    code = "import sys; print(sys.stdin.read() + ' there'); sys.exit(7)"
    done = subprocess.run(
        [sys.executable, "-m", "fastloop", "exec", "--", sys.executable, "-c", code],
        input="who is",
        cwd=place,
        text=True,
        capture_output=True,
        timeout=200,
        env={**os.environ, "PYTHONPATH": str(ROOT), **own(place)},
    )
    assert done.returncode == 7 and done.stdout.startswith("who is there\n")
    assert "ended with exit code 7 before it made a Trainer" in done.stdout + done.stderr
    killed = fastloop_exec(place, "--", "sh", "-c", "kill -9 $$")
    assert killed.code == 137
    off = fastloop_exec(place, "--", "true", FASTLOOP_DISABLE="1")
    assert off.code == 0 and "nothing was measured: FASTLOOP_DISABLE is set" in off.out + off.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--config", "saef"], "no recipe, ladder, climb or rung has this name"),
        (["--config", "bad.yaml"], "rungs.amp.mode"),
        (["--out", "full"], "the directory exists and is not empty"),
    ],
    ids=["no-such-ladder", "bad-value", "out-in-use"],
)
def test_what_cannot_be_used_is_said_before_anything_starts(arguments: list[str], said: str, place: Path) -> None:
    (place / "bad.yaml").write_text("rungs:\n  amp: {enabled: true, mode: fp12}\n")
    (place / "full").mkdir()
    (place / "full" / "precious").touch()
    done = fastloop_exec(place, *arguments, "--", "touch", "started")
    assert done.code == 2 and said in done.err and not (place / "started").exists()
    assert (place / "full" / "precious").exists() and not (place / "fastloop-runs").exists()


def test_a_command_that_cannot_be_started(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    with pytest.raises(ConfigError, match="there is no such command"):
        execute.execute(["no-such-program"])
    (place / "src").mkdir()
    with pytest.raises(ConfigError, match="it is a directory, not a script"):
        execute.execute(["./src"])
    (place / "broken").write_text("#!/no/such/interpreter\n")
    (place / "broken").chmod(0o755)
    with pytest.raises(ConfigError, match="it cannot be started: No such file"):
        execute.execute(["./broken"])
    assert not (place / "fastloop-runs").exists()


def test_sections_that_a_callback_ignores_are_named(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    (place / "mine.yaml").write_text("run: {max_steps: 5}\nrungs: {amp: {enabled: true}}\n")
    lines: list[str] = []
    answer = execute.execute(["true"], config="mine.yaml", progress=lines.append)
    assert answer.exit_code == 0 and lines == ["fastloop: ignored, because the script creates its own Trainer: run"]


# -- its end ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_ctrl_c_ends_a_training_with_a_partial_report_and_leaves_no_process(place: Path) -> None:
    command = (sys.executable, TRAIN, "--does", "hangs", "--devices", "2")
    with program("exec", "--", *command, cwd=place, env=own(place)) as process:
        wait_for((place / "waiting").exists)
        members = family(process)
        assert len(members) >= 3
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(100) in (1, 130), "as Lightning ends it, or Python"
        assert alive(members) == []
    assert measurement(place)["partial"] is True
    assert "PARTIAL" in (place / "out").read_text() + (place / "err").read_text()
    assert not list((place / "tmp").glob("fastloop-*"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def test_a_signal_for_us_alone_is_passed_on_once(number: int, place: Path) -> None:
    with program("exec", "--", sys.executable, "-c", COUNTS, "1", cwd=place, env=own(place)) as process:
        wait_for((place / "up").exists)
        process.send_signal(number)
        assert process.wait(100) == 5
    assert (place / "heard").read_text() == f"[{int(number)}]"


def test_ctrl_c_of_a_terminal_comes_once(place: Path) -> None:
    ours, theirs = pty.openpty()
    counts = [sys.executable, "-c", COUNTS, "3"]  # what we pass on comes two seconds later
    process = subprocess.Popen(
        [sys.executable, "-m", "fastloop", "exec", "--", *counts],
        cwd=place,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), **own(place)},
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    try:
        wait_for((place / "up").exists)
        os.write(ours, b"\x03")
        assert process.wait(100) == 5
        assert (place / "heard").read_text() == "[2]", "a second one would cut short the saving that the first began"
    finally:
        process.kill()
        process.wait()
        os.close(ours)
        os.close(theirs)


def test_when_we_are_killed_the_command_is_told_to_end(place: Path) -> None:
    with program("exec", "--", sys.executable, "-c", COUNTS, "0.5", cwd=place, env=own(place)) as process:
        wait_for((place / "up").exists)
        members = family(process)
        process.kill()
        wait_for((place / "heard").exists)
        wait_for(lambda: not alive(members))
    assert (place / "heard").read_text() == "[15]"


@pytest.mark.parametrize(("code", "left"), [(3, False), (0, True)], ids=["failed", "ended-well"])
def test_what_a_failed_command_leaves_behind_is_ended(code: int, left: bool, place: Path) -> None:
    """A rank that waits for a dead one, say. What a command starts on purpose and ends well with lives on."""
    script = f"setsid sleep 250 & echo $! > pid; exit {code}"
    hurried = "from fastloop import cli\nfrom fastloop.commands import execute\nexecute.LEFT_S = 0.2\ncli.main()"
    said = run("exec", "--", "sh", "-c", script, cwd=place, env=own(place), code=hurried)
    assert said.code == code, said.err
    pid = int((place / "pid").read_text())
    try:
        assert (psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE) is left
    finally:
        if psutil.pid_exists(pid):
            os.kill(pid, signal.SIGKILL)

"""A program that is forked is what it were if it were executed, and what cannot be is executed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests import preloaded
from tests.commands.command_line import ROOT, wait_for

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere all is executed")
SEES = """
import json, os, signal, sys
print(json.dumps({
    "argv": sys.argv, "name": __name__, "path": sys.path[0], "cwd": os.getcwd(), "mine": os.environ.get("MINE"),
    "pid": os.getpid(), "parent": os.getppid(), "own_session": os.getsid(0) == os.getpid(), "group": os.getpgrp(),
    "tests": sorted(each for each in sys.modules if each.startswith(("tests", "fastloop"))),
    "torch": "torch" in sys.modules, "threads": len(os.listdir("/proc/self/task")), "in": sys.stdin.read(),
    "open": sorted(map(int, os.listdir("/proc/self/fd")))[:-1],
    "handler": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
}))
"""


@pytest.fixture(autouse=True)
def forks(quick_starts: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def sees(*command: str | Path, **settings: Any) -> dict[str, Any]:
    done = subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True, check=True, **settings)
    return dict(json.loads(done.stdout))


@pytest.fixture
def script(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "a").mkdir()
    path = tmp_path / "a" / "sees.py"
    path.write_text(SEES)
    return path


def test_it_is_the_program_that_was_asked_for(script: Path, tmp_path: Path) -> None:
    seen = sees(script, "1", "two words", cwd=tmp_path, env={**os.environ, "MINE": "é"}, input="in")
    assert seen.pop("pid") > 0 and seen == {
        "argv": [str(script), "1", "two words"],
        "name": "__main__",
        "path": str(script.parent),
        "cwd": str(tmp_path),
        "parent": os.getpid(),
        "own_session": False,
        "group": os.getpgrp(),
        "torch": True,
        "tests": [],
        "mine": "é",
        "threads": 1,
        "open": [0, 1, 2, 3],
        "handler": True,
        "in": "in",
    }
    told = subprocess.run(
        [sys.executable, "-m", "sees", "x"], cwd=script.parent, capture_output=True, text=True, input=""
    )
    seen = json.loads(told.stdout)
    assert (seen["argv"], seen["path"], seen["torch"]) == ([str(script), "x"], str(script.parent), True)
    seen = sees("-c", SEES, "x", start_new_session=True, input="")
    assert (seen["argv"], seen["path"], seen["own_session"], seen["torch"]) == (["-c", "x"], "", True, True)


@pytest.mark.parametrize(
    ("code", "exit_code", "out", "err"),
    [
        ("print('x'); raise SystemExit(3)", 3, "x\n", ""),
        ("raise SystemExit('gave up')", 1, "", "gave up\n"),
        (
            "raise ValueError('no')",
            1,
            "",
            'Traceback (most recent call last):\n  File "<string>", line 1, in <module>\nValueError: no\n',
        ),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -9, "", ""),
        ("import os; os._exit(7)", 7, "", ""),
        ("import atexit; atexit.register(print, 'last'); print('first')", 0, "first\nlast\n", ""),
        (
            "import threading, time; threading.Thread(target=lambda: (time.sleep(.2), print('late'))).start()",
            0,
            "late\n",
            "",
        ),
    ],
)
def test_it_ends_as_an_interpreter_ends(code: str, exit_code: int, out: str, err: str) -> None:
    for executed in (False, True):
        start = preloaded._execute if executed else preloaded._start
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(subprocess.Popen, "_execute_child", start)
            done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert (done.returncode, done.stdout, done.stderr) == (exit_code, out, err), (
            "as executed" if executed else "forked"
        )


def test_env_before_it_is_no_other_program(script: Path) -> None:
    command = ["env", "-u", "OLD", "MINE=1", sys.executable, script]
    done = subprocess.run(command, env={**os.environ, "OLD": "1"}, capture_output=True, text=True, input="")
    seen = json.loads(done.stdout)
    assert (seen["mine"], seen["torch"], seen["argv"]) == ("1", True, [str(script)])


def test_signals_reach_it_and_its_end_is_waited_for() -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; print(1, flush=True); time.sleep(60)"], stdout=-1)
    assert process.stdout is not None and process.stdout.readline() == b"1\n" and process.poll() is None
    process.send_signal(signal.SIGINT)
    assert process.wait(100) == -signal.SIGINT
    process.stdout.close()


def test_draws_of_two_programs_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)  # which any `seed_everything` of this process leaves behind
    draws = "import random, numpy; print(random.random(), numpy.random.rand())"
    said = [subprocess.check_output([sys.executable, "-c", draws]).split() for _ in range(2)]
    assert len({*said[0], *said[1]}) == 4


@pytest.mark.parametrize("why", ["variable", "option", "shadowed", "off"])
def test_what_a_fork_cannot_give_is_executed(why: str, script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options: list[str] = []
    if why == "variable":
        monkeypatch.setenv("PYTHONHASHSEED", "1")
    elif why == "option":
        options = ["-O"]
    elif why == "shadowed":
        (script.parent / "omegaconf.py").touch()
    else:
        monkeypatch.setattr(subprocess.Popen, "_execute_child", preloaded._execute)
    seen = sees(*options, script, input="")
    assert not seen["torch"] and seen["parent"] == os.getpid()


def test_it_forks_what_it_starts_itself(script: Path) -> None:
    starts = "import subprocess, sys; {0}sys.exit(subprocess.call([sys.executable, {1!r}, 'inner']))"
    seen = sees("-c", starts.format("", str(script)), input="")
    assert seen["torch"] and seen["parent"] != os.getpid() and seen["argv"][1:] == ["inner"]
    used = "import threading, torch; torch.ones(3); threading.Thread(target=sys.stdin.read).start(); "
    assert sees("-c", starts.format(used, str(script)), input="")["torch"], "by a server of its own"


def test_the_server_ends_with_the_process_that_started_it() -> None:
    code = (
        "import subprocess, sys, time\nfrom tests import preloaded\n"
        "with preloaded.quick_starts():\n    subprocess.run([sys.executable, '-c', ''])\n"
        "print(preloaded.server_pid(), flush=True)\ntime.sleep(60)"
    )
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess.Popen, "_execute_child", preloaded._execute)
        process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=environ)
    assert process.stdout is not None
    server = psutil.Process(int(process.stdout.readline()))
    process.kill()
    process.wait()
    process.stdout.close()
    wait_for(lambda: not server.is_running() or server.status() == psutil.STATUS_ZOMBIE)


def test_where_the_server_must_not_fork_a_program_is_executed(monkeypatch: pytest.MonkeyPatch) -> None:
    command = [sys.executable, "-c", "import sys; print('torch' in sys.modules)"]
    with preloaded.quick_starts():
        forked = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
        monkeypatch.setattr(preloaded.Server, "fork", lambda *_: None)
        executed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    assert (forked, executed) == ("True\n", "False\n")

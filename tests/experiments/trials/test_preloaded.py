"""A trial that is forked sees what it would see if it were executed; what a fork cannot give is executed."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from fastloop.experiments.trials import preloaded
from fastloop.experiments.trials import supervise as seam
from fastloop.experiments.trials.fork_server import Greeting, send
from fastloop.experiments.trials.supervise import Ended, Limits, read_last_lines, supervise
from fastloop.experiments.trials.trial import make_environment
from tests.commands.command_line import ROOT, wait_for

pytestmark = [pytest.mark.skipif(sys.platform != "linux", reason="elsewhere all is executed"), pytest.mark.timeout(250)]
SEES = """
import os
def annotated(x: int) -> None: ...
threads = len(os.listdir("/proc/self/task"))
import gc, json, signal, sys, multiprocessing
print(json.dumps({
    "argv": sys.argv, "orig_argv": sys.orig_argv, "name": __name__, "file": __file__, "path": sys.path,
    "spec": repr(__spec__), "loader": type(__loader__).__name__, "globals": sorted(globals()),
    "annotations": repr(annotated.__annotations__),
    "flags": str(sys.flags), "cwd": os.getcwd(), "in": sys.stdin.read(), "hash": hash("a str"), "threads": threads,
    "ours": sorted(each for each in sys.modules if each.partition(".")[0] == "fastloop"),
    "environ": {k: v for k, v in os.environ.items() if not k.endswith(("NVML_BASED_CUDA_CHECK", "INDUCTOR_CACHE_DIR"))},
    "leads": os.getsid(0) == os.getppid() == os.getpgrp(), "open": len(os.listdir("/proc/self/fd")),
    "signals": {s: str(signal.getsignal(s)) for s in range(1, 20)},
    "blocked": sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, []))), "umask": os.umask(0o22),
    "frozen": gc.get_freeze_count(), "streams": [sys.stdout.encoding, sys.stderr.line_buffering, sys.stdout.isatty()],
}))
import torch
print(torch.get_num_threads(), torch.cuda._is_in_bad_fork(), file=sys.stderr)
"""


@pytest.fixture(scope="module")
def server() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONHASHSEED", "7")
        for number in range(4):  # more than a message of a socket holds
            patch.setenv(f"LARGE_{number}", "é" * 60_000)
        with preloaded.quick_starts(make_environment(os.environ), scripts=True):
            assert preloaded._server is not None and preloaded._server.greet().why is None
            yield


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: None) -> Path:
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    (tmp_path / "a").mkdir()
    path = tmp_path / "a" / "sees.py"
    path.write_text(SEES)
    return path


@pytest.fixture
def try_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[tuple[Ended, str, str]]]:
    """Gives how a command ends and what it says, forked and executed."""

    def run(*command: str, **settings: Any) -> list[tuple[Ended, str, str]]:
        found = []
        for forks in (True, False):
            with pytest.MonkeyPatch.context() as patch:
                if "stdin" in settings:
                    os.lseek(settings["stdin"], 0, os.SEEK_SET)
                if not forks:
                    patch.setattr(preloaded, "_server", None)
                ended = supervise(command, tmp_path, env=make_environment(os.environ), **settings)
            assert (ended.started == "forked") is forks, ended.started
            found.append((ended, (tmp_path / "stdout.txt").read_text(), read_last_lines(tmp_path / "stderr.txt")))
        return found

    return run


def test_a_script_sees_the_same_either_way(
    script: Path, tmp_path: Path, try_both: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    extra = tmp_path / "more"
    extra.mkdir()
    monkeypatch.chdir(tmp_path)
    command = ["env", "-u", "PYTHONSAFEPATH", f"PYTHONPATH={extra}{os.pathsep}{ROOT}", "MINE=é", sys.executable]
    (tmp_path / "orders").write_text("orders")
    both = []
    with (tmp_path / "orders").open() as orders:
        for ended, out, err in try_both(*command, "a/sees.py", "1", "two words", stdin=orders.fileno()):
            assert ended.code == 0, err
            both.append((json.loads(out), err))
    differs = {key: (both[0][0][key], both[1][0][key]) for key in both[0][0] if both[0][0][key] != both[1][0][key]}
    assert differs == {} and both[0][1] == both[1][1]
    seen = both[0][0]
    assert seen["argv"] == ["a/sees.py", "1", "two words"] and seen["in"] == "orders" and seen["leads"] is True
    assert seen["path"][:2] == [str(script.parent), str(extra)] and seen["environ"]["MINE"] == "é"
    assert seen["threads"] == 1 and seen["ours"] == [] and both[0][1].endswith("False")


@pytest.mark.parametrize(
    ("code", "end"),
    [
        ("import sys; print('x'); sys.exit(3)", 3),
        ("raise ValueError('no')", 1),
        ("import sys; sys.exit('gave up')", 1),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -9),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -15),
        ("import threading, time; threading.Thread(target=lambda: (time.sleep(.1), print('late'))).start()", 0),
    ],
)
def test_it_ends_the_same_either_way(code: str, end: int, script: Path, try_both: Any) -> None:
    script.write_text(code)
    (forked, *said), (executed, *other) = try_both(sys.executable, str(script))
    assert forked.code == executed.code == end and said == other and forked.cause == executed.cause


def test_its_limits_hold_and_nothing_of_it_is_left(
    script: Path, try_both: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script.write_text(
        "import subprocess, sys, time\nchild = subprocess.Popen(['sleep', '60'], start_new_session=True)\n"
        "print(child.pid, flush=True)\ntime.sleep(60)\n"
    )
    wait, said = seam._wait, tmp_path / "stdout.txt"
    monkeypatch.setattr(seam, "_wait", lambda *given: wait_for(lambda: said.stat().st_size) and wait(*given))
    for ended, out, _ in try_both(sys.executable, str(script), limits=Limits(total_s=0.7, grace_s=0.2)):
        assert ended.cause is not None and "exceeded its time limit of 0.7 s" in ended.cause and ended.seconds < 50
        assert not _lives(int(out))


@pytest.mark.parametrize(
    "why",
    ["OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "option", "torch.py", "names", "imports", "module", "folder", "python"],
)
def test_what_a_fork_cannot_give_is_executed(why: str, script: Path, tmp_path: Path) -> None:
    command = [sys.executable, str(script)]
    script.write_text("")
    if why in ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"):
        command = ["env", f"{why}=3", *command]
    elif why == "option":
        command.insert(1, "-O")
    elif why == "torch.py":
        command = ["env", "-u", "PYTHONSAFEPATH", *command]
        script.with_name("torch.py").write_text("raise SystemExit(0)")
    elif why == "names":
        script.write_text("import os\nos.environ['OMP_NUM_THREADS'] = '3'\nwhy = 'OMP_NUM_THREADS'\n")
    elif why in ("imports", "module"):
        early = script.parent / "early"
        early.mkdir()
        (early / "__init__.py").write_text("from . import threads\n")
        (early / "threads.py").write_text("import os\nos.environ['OMP_NUM_THREADS'] = '3'\n")
        (early / "__main__.py").touch()
        script.write_text("from early import threads")
        if why == "module":
            command = ["env", "-u", "PYTHONSAFEPATH", f"PYTHONPATH={script.parent}", sys.executable, "-m", "early"]
        else:
            command = ["env", "-u", "PYTHONSAFEPATH", *command]
    elif why == "folder":  # a package without an __init__.py, as many scripts have them
        script.with_name("early").mkdir()
        script.with_name("early").joinpath("threads.py").write_text("import os\nos.environ['OMP_NUM_THREADS'] = '3'\n")
        script.write_text("from early import threads")
        command = ["env", "-u", "PYTHONSAFEPATH", *command]
    else:
        command[0] = "/bin/true"
    ended = supervise(command, tmp_path, env=make_environment(os.environ))
    assert ended.code == 0 and ended.started is not None and ended.started.startswith("a new interpreter: ")
    in_the_script = why in ("names", "imports", "module", "folder")
    assert {"option": "options", "python": "not the Python"}.get(why, "OMP" if in_the_script else why) in ended.started


def test_it_starts_where_it_is_told_to(script: Path, tmp_path: Path, try_both: Any) -> None:
    script.write_text("import os, sys; print(os.getcwd(), sys.argv[0], __file__)")
    for ended, out, _ in try_both(sys.executable, "sees.py", cwd=script.parent):
        assert ended.code == 0 and out.split() == [str(script.parent), "sees.py", str(script)]


def test_draws_of_two_trials_differ(script: Path, tmp_path: Path) -> None:
    script.write_text("import random, numpy, torch\nprint(random.random(), numpy.random.rand(), float(torch.rand(1)))")
    drawn: set[str] = set()
    for _ in range(2):
        assert supervise([sys.executable, str(script)], tmp_path, env=make_environment(os.environ)).started == "forked"
        drawn |= {*(tmp_path / "stdout.txt").read_text().split()}
    assert len(drawn) == 6


def test_a_script_that_seeds_nothing_begins_with_the_seed_of_its_run(script: Path, tmp_path: Path) -> None:
    script.write_text("import random, numpy, torch\nprint(random.random(), numpy.random.rand(), torch.rand(1).item())")
    said = []
    for seed in ("3", "3", "4"):
        place = tmp_path / str(len(said))
        place.mkdir()
        supervise([sys.executable, str(script)], place, env={**make_environment(os.environ), "PL_GLOBAL_SEED": seed})
        said.append((place / "stdout.txt").read_text())
    assert said[0] == said[1] and not set(said[1].split()) & set(said[2].split())


@pytest.mark.parametrize("in_memory", [True, False])
def test_an_environment_may_be_larger_than_a_message_of_a_socket(
    in_memory: bool, script: Path, monkeypatch: pytest.MonkeyPatch, try_both: Any
) -> None:
    """The `server`'s own, which it told when it greeted, and that of a trial; Python may lack files in memory."""
    if not in_memory:
        monkeypatch.delattr(os, "memfd_create")
    script.write_text("import os\nprint(sum(len(v) for k, v in os.environ.items() if k.startswith('LARGE_')))\n")
    forked, executed = try_both(sys.executable, str(script))
    assert forked[1] == executed[1] == "240000\n"


def test_what_a_library_sets_in_this_process_meanwhile_is_no_reason_to_execute(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Like scikit-learn's. Given to a trial by the user, it is one, see above."""
    monkeypatch.setenv("KMP_DUPLICATE_LIB_OK", "True")
    script.write_text("import os\nprint([value for name, value in os.environ.items() if name.endswith('LIB_OK')])\n")
    for command, started in ([], "forked"), (["env", "KMP_DUPLICATE_LIB_OK=1"], "a new interpreter: KMP_"):
        ended = supervise([*command, sys.executable, str(script)], tmp_path, env=make_environment(os.environ))
        assert ended.code == 0 and (ended.started or "").startswith(started)
        assert (tmp_path / "stdout.txt").read_text() == ("['1']\n" if command else "[]\n")


@pytest.mark.parametrize(
    ("does", "is_ahead"),
    [
        ("import numpy, scipy.linalg, os\nassert len(os.listdir('/proc/self/task')) > 1 or os.cpu_count() == 1", True),
        ("import threading, time\nthreading.Thread(target=time.sleep, args=[60], daemon=True).start()", False),
    ],
    ids=["starts thread pools that end for a fork", "starts a thread"],
)
def test_a_scripts_first_imports_are_made_ahead_if_they_can_be_forked(
    does: str, is_ahead: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stand-in for a package counts its imports."""
    package, count, script = tmp_path / "installed" / "einops.py", tmp_path / "count.txt", tmp_path / "train.py"
    package.parent.mkdir()
    package.write_text(f"open({str(count)!r}, 'a').write('.')\nmade = 1\n{does}\n")
    script.write_text("from einops import made\nimport sys\nprint(made, 'einops' in sys.modules)\n")
    monkeypatch.setattr(preloaded, "_server", None)
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    environ = {
        **make_environment(os.environ),
        "PYTHONPATH": os.pathsep.join([str(package.parent), *sys.path]),
        **{f"{of}_NUM_THREADS": "2" for of in ("OMP", "OPENBLAS")},
    }
    with preloaded.quick_starts(environ, scripts=True, script=script):
        for _ in range(2):
            ended = supervise([sys.executable, str(script)], tmp_path, env=environ)
            assert (ended.code, ended.started) == (0, "forked")
            assert (tmp_path / "stdout.txt").read_text() == "1 True\n"
    assert len(count.read_text()) == (1 if is_ahead else 3)


def test_imports_that_take_long_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preloaded, "SLOW_S", 0.01)
    waiting, (ours, theirs) = object.__new__(preloaded.Server), socket.socketpair(type=socket.SOCK_SEQPACKET)
    waiting._socket, waiting._greeting, said = ours, None, list[str]()

    def answer(line: str) -> None:
        said.append(line)
        send(theirs, Greeting())

    with ours, theirs:
        assert waiting.greet(answer).why is None and waiting.greet(answer).why is None
    assert said == ["starting: importing torch and Lightning first"]


def test_a_server_that_is_gone_leaves_trials_as_they_were(script: Path, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preloaded, "_server", None)
        with preloaded.quick_starts(make_environment(os.environ), scripts=True):
            assert preloaded._server is not None and preloaded._server.greet().why is None
            script.write_text("")
            os.kill(preloaded._server.pid, signal.SIGKILL)
            ended = supervise([sys.executable, str(script)], tmp_path, env=make_environment(os.environ))
    assert ended.code == 0 and ended.started == "a new interpreter: the fork server has exited"


def test_the_server_and_its_trial_end_with_their_owner(tmp_path: Path) -> None:
    """Killed, the owner can tell nobody anything."""
    sleeps = tmp_path / "sleeps.py"
    sleeps.write_text("import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(60)\n")
    owner = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import os, sys\nfrom pathlib import Path\n"
            "from fastloop.experiments.trials import preloaded\n"
            "from fastloop.experiments.trials.supervise import supervise\n"
            "from fastloop.experiments.trials.trial import make_environment\n"
            "with preloaded.quick_starts(make_environment(os.environ), scripts=True):\n"
            "    print(preloaded._server.pid, flush=True)\n"
            f"    supervise([sys.executable, {str(sleeps)!r}], Path({str(tmp_path)!r}),"
            " env=make_environment(os.environ))\n",
        ],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert owner.stdout is not None
    server = int(owner.stdout.readline())
    out = tmp_path / "stdout.txt"
    wait_for(lambda: out.is_file() and out.read_text().strip() != "", 60)
    trial = int(out.read_text())
    assert psutil.Process(trial).ppid() != server and psutil.pid_exists(server)
    owner.kill()
    owner.wait()
    owner.stdout.close()
    wait_for(lambda: not _lives(server) and not _lives(trial), 60)


def _lives(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False

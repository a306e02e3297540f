"""Python programs that start at once: forked from a process that has imported torch and Lightning already.

Inside `quick_starts` a ``subprocess.Popen`` of this Python is forked by a server instead of executed. What is forked
is a child of whoever called Popen, with the arguments, directory, variables, descriptors, session and group that were
asked for; it imports fastloop and all of the test's own code anew, and ends as an interpreter ends. A program so
started, while it has neither threads nor a library of its own, forks the Python programs that it starts itself.
What a fork cannot give (options of the interpreter, variables that libraries read as they are loaded, a file that
shadows what is loaded already) is executed as ever, and on other systems than Linux all of it is.

The server ends with the process that started it, killed or not. It has one thread and has computed nothing, which is
what makes forking it safe, and it says so before each fork.
Source: prctl(2), PR_SET_CHILD_SUBREAPER: a grandchild whose parent has ended becomes a child of the nearest subreaper.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import importlib.util
import inspect
import json
import logging
import multiprocessing.util
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

_BECOME = Path(__file__).parents[1] / "fastloop/experiments/trials/become.py"
_spec = importlib.util.spec_from_file_location("_become", _BECOME)  # without fastloop, which programs import anew
assert _spec is not None and _spec.loader is not None
become = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(become)
MOST_BYTES = 2**22
"""Of one message between a process and the server."""
PRELOADED = (
    "torch",
    "lightning.pytorch",
    "pytorch_lightning",
    "torchvision",
    "omegaconf",
    "psutil",
    "msgspec",
    "jinja2",
    "click",
)
"""Imported by the server where they are installed; with what they import, nearly all of the seconds of a start."""
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER, PR_GET_CHILD_SUBREAPER = 1, 36, 37
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
"""Of the server and so of all it forks: other programs are executed."""
_execute = subprocess.Popen._execute_child  # type: ignore[attr-defined]
_spawn = multiprocessing.util.spawnv_passfds  # type: ignore[attr-defined]
_lock = threading.RLock()


class _Pristine:
    """What a server, or a program that was forked by one, knows of itself; None in every other process."""

    modules: frozenset[str] | None = None
    path: tuple[str, ...] = ()
    environ: Mapping[str, str] = {}
    set_by_imports: Mapping[str, str] = {}
    roots: dict[str, str] = {}
    finalizers: frozenset[Any] = frozenset()


class _Process:
    """A child that was forked, with what of Popen a server needs."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def poll(self) -> int | None:
        with contextlib.suppress(ChildProcessError):
            return None if os.waitpid(self.pid, os.WNOHANG) == (0, 0) else 0
        return 0


class Server:
    """A process that forks programs, and the socket it hears requests on."""

    def __init__(
        self, process: Any, connection: socket.socket, environ: Mapping[str, str], roots: Mapping[str, str]
    ) -> None:
        self._process, self._socket, self.pid = process, connection, process.pid
        self.environ, self.roots = environ, roots

    @classmethod
    def started(cls) -> Server:
        """A new one, which imports all it is to import."""
        ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        environ = {**os.environ, **ONE_THREAD}
        for name in [name for name in environ if name.startswith("PYTEST_")]:
            del environ[name]
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-u", __file__, str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                env=environ,
                pass_fds=(theirs.fileno(),),
                preexec_fn=lambda: os.setpgid(0, 0),
            )
        greeting = json.loads(ours.recv(MOST_BYTES))
        return cls(process, ours, greeting["environ"], greeting["roots"])

    @classmethod
    def forked(cls) -> Server:
        """A copy of this process, which must have done nothing yet."""
        ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        parent = os.getpid()
        if not (pid := os.fork()):
            try:
                ours.close()
                _end_with(parent)
                os.setpgid(0, 0)
                nothing = os.open(os.devnull, os.O_RDWR)
                kept = theirs.detach()
                become.take_descriptors([nothing, nothing, nothing, kept], [0, 1, 2, kept])
                _serve(socket.socket(fileno=kept))
            finally:
                os._exit(0)
        theirs.close()
        return cls(_Process(pid), ours, _Pristine.environ, _Pristine.roots)

    def fork(self, request: Mapping[str, Any], descriptors: Sequence[int]) -> int | None:
        """The process number of a new child of this process; None where the server must not fork (it has threads)."""
        libc, before = ctypes.CDLL(None, use_errno=True), ctypes.c_int()
        libc.prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
        libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        try:
            socket.send_fds(self._socket, [json.dumps(request).encode()], descriptors)
            answer = json.loads(self._socket.recv(MOST_BYTES))
        finally:
            libc.prctl(PR_SET_CHILD_SUBREAPER, before.value, 0, 0, 0)
        return int(answer["pid"]) if "pid" in answer else None


_server: Server | None = None
_owner = 0
_ranks = False


def server() -> Server | None:
    """That of this process: of a test's, started when it is first needed; of a program's, as it was asked for."""
    global _server, _owner
    lives = _server is not None and _owner == os.getpid() and _server._process.poll() is None
    if not lives:
        _server = None
        if _Pristine.modules is None:
            _server, _owner = Server.started(), os.getpid()
    return _server


def server_pid() -> int | None:
    """The server's process number, where this process has one."""
    return _server.pid if _server is not None and _owner == os.getpid() else None


@contextlib.contextmanager
def quick_starts(*, ranks: bool = False) -> Iterator[None]:
    """Inside, Python programs that this process starts are forked, where they can be.

    Args:
        ranks: what the programs start in their turn, though they have imported and computed by then, is forked too, by
            a server that each of them gets: one more child of theirs.
    """
    global _ranks
    before, patched = _ranks, getattr(subprocess.Popen._execute_child, "forks", False)  # type: ignore[attr-defined]
    if sys.platform != "linux" or (patched and ranks == before):
        yield
        return
    _ranks = ranks
    if not patched:
        _patch()
    try:
        yield
    finally:
        _ranks = before
        if not patched:
            subprocess.Popen._execute_child = _execute  # type: ignore[attr-defined]
            multiprocessing.util.spawnv_passfds = _spawn  # type: ignore[attr-defined]


def _patch() -> None:
    subprocess.Popen._execute_child = _start  # type: ignore[attr-defined]
    multiprocessing.util.spawnv_passfds = _start_spawned  # type: ignore[attr-defined]


@functools.wraps(_execute)
def _start(self: subprocess.Popen[Any], *arguments: Any, **named: Any) -> None:
    given = _without_env(inspect.signature(_execute).bind(self, *arguments, **named).arguments)
    if not _is_plain(given):
        return _execute(self, *arguments, **named)
    passed = sorted(map(int, given["pass_fds"]))
    pairs = ((given["p2cread"], 0), (given["c2pwrite"], 1), (given["errwrite"], 2))
    command = [os.fspath(each) for each in given["args"]]
    unbuffered = command[1] == "-u" and len(command) > 2
    pid = _fork(
        command[:1] + command[1 + unbuffered :],
        [own if each == -1 else each for each, own in pairs] + passed,
        numbers=[0, 1, 2, *passed],
        cwd=given["cwd"],
        environ=given["env"],
        session=given["start_new_session"],
        group=given.get("process_group"),
        before=given["preexec_fn"],
        unbuffered=unbuffered,
    )
    if pid is None:
        return _execute(self, *arguments, **named)
    self.pid, self._child_created = pid, True  # type: ignore[attr-defined]
    pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
    self._close_pipe_fds(*(given[name] for name in pipes))  # type: ignore[attr-defined]
    return None


_start.forks = True  # type: ignore[attr-defined]


def _start_spawned(path: Any, arguments: Sequence[Any], passed: Sequence[int]) -> int:
    """In the place of multiprocessing's, for its spawned processes, and not for its trackers and servers."""
    command, passed = [os.fsdecode(each) for each in arguments if each != "-B"], sorted(map(int, passed))
    pid = None
    if os.fsdecode(path) == sys.executable and "spawn_main(" in " ".join(command):
        pid = _fork([sys.executable, *command[1:]], [0, 1, 2, *passed], numbers=[0, 1, 2, *passed])
    return _spawn(path, arguments, passed) if pid is None else pid


def _fork(
    command: list[str],
    descriptors: list[int],
    *,
    numbers: list[int],
    cwd: Any = None,
    environ: Any = None,
    session: bool = False,
    group: int | None = None,
    before: Callable[[], object] | None = None,
    unbuffered: bool = False,
) -> int | None:
    """The process number of a forked child of this process; None where the command must be executed."""
    place = os.path.abspath(os.fsdecode(cwd or os.getcwd()))
    given = os.environ if environ is None else environ
    variables = {os.fsdecode(name): os.fsdecode(value) for name, value in given.items()}
    here = _Pristine.modules is not None and _is_pristine()
    if (before is not None and not here) or (first := _first_folder(command, Path(place))) is None:
        return None
    source = _Pristine if here else server()
    if source is None or not _loaded_alike(variables, source.environ):
        return None
    if not _found_alike(variables, source.environ, first, source.roots):
        return None
    request = {
        "command": command,
        "cwd": place,
        "environ": variables,
        "numbers": numbers,
        "session": bool(session),
        "group": os.getpgrp() if group in (None, -1) else group,
        "server": _ranks,
        "unbuffered": unbuffered or bool(variables.get("PYTHONUNBUFFERED")),
    }
    if here:
        return _fork_here(request, descriptors, before)
    with _lock:
        return source.fork(request, descriptors)  # type: ignore[union-attr]


# -- what can be forked -----------------------------------------------------------------------------------------------


def _without_env(given: Mapping[str, Any]) -> dict[str, Any]:
    """What is asked of Popen, with the changes that a leading ``env`` makes to the variables done."""
    arguments = given["args"]
    if isinstance(arguments, (str, bytes, os.PathLike)) or os.fspath(next(iter(arguments), "")) != "env":
        return dict(given)
    rest = [os.fsdecode(each) for each in arguments][1:]
    environ = dict(os.environ if given["env"] is None else given["env"])
    while rest and (rest[0] == "-u" or "=" in rest[0]):
        name, _, value = rest.pop(0).partition("=")
        if name == "-u":
            environ.pop(rest.pop(0), None)
        else:
            environ[name] = value
    return {**given, "args": rest, "env": environ}


def _is_plain(given: Mapping[str, Any]) -> bool:
    """Whether nothing is asked of Popen that only an execution gives."""
    if isinstance(given["args"], (str, bytes, os.PathLike)) or given["shell"] or not given["close_fds"]:
        return False
    if given["executable"] or any(given[name] is not None for name in ("gid", "gids", "uid")) or given["umask"] >= 0:
        return False
    return len(given["args"]) > 1 and os.fspath(next(iter(given["args"]))) == sys.executable


def _first_folder(command: Sequence[str], cwd: Path) -> Path | None:
    """The folder that Python puts first on its path; None for what cannot be forked."""
    if not cwd.is_dir():
        return None
    if command[1].startswith("-"):
        return cwd if command[1] in ("-c", "-m") and len(command) > 2 else None
    script = cwd / command[1]
    return script.resolve().parent if script.suffix == ".py" and script.is_file() else None


def _loaded_alike(environ: Mapping[str, str], before: Mapping[str, str]) -> bool:
    """Whether what is read while Python and libraries are loaded is the same in both."""
    names = filter(become.is_read_when_loaded, {*environ, *before})
    return all(environ.get(name) == before.get(name) for name in names)


def _found_alike(environ: Mapping[str, str], before: Mapping[str, str], first: Path, roots: Mapping[str, str]) -> bool:
    """Whether what is loaded already would be found in the same places."""
    theirs, ours = (_folders(each.get("PYTHONPATH")) for each in (environ, before))
    if any(Path(root).is_relative_to(gone) for gone in ours - theirs for root in roots.values()):
        return False
    for folder in {*theirs, *([] if environ.get("PYTHONSAFEPATH") else [str(first)])} - ours:
        with contextlib.suppress(OSError):
            names = {name.split(".")[0] for name in os.listdir(folder)}
            if any(name in roots and not Path(roots[name]).is_relative_to(folder) for name in names):
                return False
    return True


def _folders(path: str | None) -> set[str]:
    return {os.path.abspath(each) for each in (path or "").split(os.pathsep) if each}


def _is_pristine() -> bool:
    """Whether this forked program has one thread, and has imported no more than the standard library and commands."""
    assert _Pristine.modules is not None
    ours = ("fastloop", "__main__", "__mp_main__", "sitecustomize")
    for name in list(sys.modules):
        top = name.partition(".")[0]
        if name in _Pristine.modules or top in sys.stdlib_module_names:
            continue
        if top not in ours or (name.startswith("fastloop.bridge.") and name != "fastloop.bridge.fail_open"):
            return False
    return _threads() == 1


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))


# -- forking ----------------------------------------------------------------------------------------------------------


def _fork_here(request: Mapping[str, Any], descriptors: Sequence[int], before: Callable[[], object] | None) -> int:
    """Fork this very process, which has nothing in it that the child must not have."""
    if child := os.fork():
        return child
    try:
        if before is not None:
            before()
        _forget_the_parent()
        _become(request, descriptors)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(70)


def _forget_the_parent() -> None:
    """What a program has registered is its own to do."""
    gc.freeze()
    for each in set(weakref.finalize._registry) - _Pristine.finalizers:  # type: ignore[attr-defined]
        del weakref.finalize._registry[each]  # type: ignore[attr-defined]
    atexit._clear()
    atexit.register(logging.shutdown)
    if weakref.finalize._registered_with_atexit:  # type: ignore[attr-defined]
        atexit.register(weakref.finalize._exitfunc)  # type: ignore[attr-defined]
    multiprocessing.util._finalizer_registry.clear()  # type: ignore[attr-defined]
    atexit.register(multiprocessing.util._exit_function)  # type: ignore[attr-defined]
    gc.callbacks.clear()
    for name in set(sys.modules) - (_Pristine.modules or frozenset()):
        if name.partition(".")[0] not in sys.stdlib_module_names:
            del sys.modules[name]


def _become(request: Mapping[str, Any], descriptors: Sequence[int]) -> NoReturn:
    """Be the program that was asked for, to its end."""
    if request["session"]:
        os.setsid()
    elif request["group"] != os.getpgrp():
        os.setpgid(0, request["group"])
    command = request["command"]
    become.become(
        [command[0], *(["-u"] if request["unbuffered"] else []), *command[1:]],
        descriptors=descriptors,
        numbers=request["numbers"],
        cwd=request["cwd"],
        environ=_Pristine.set_by_imports | request["environ"],
        path=_Pristine.path,
        before=lambda: _with_server(request["server"]),
        after=_stop_server,
    )


def _with_server(wanted: bool) -> None:
    """Have a server of one's own, or none."""
    global _server, _owner, _ranks
    _server, _ranks = None, wanted
    if wanted:
        _server, _owner = Server.forked(), os.getpid()


def _stop_server() -> None:
    """End the server of a program before the program, so that nothing is there a moment longer."""
    if (pid := server_pid()) is not None:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


# -- the server -------------------------------------------------------------------------------------------------------


def _greet(connection: socket.socket) -> None:
    """Say what is loaded, and from where."""
    before, now = _Pristine.environ, dict(os.environ)
    _Pristine.set_by_imports = {name: now[name] for name in now if now[name] != before.get(name)}
    for name in {name.partition(".")[0] for name in sys.modules} - set(sys.stdlib_module_names):
        if file := getattr(sys.modules.get(name), "__file__", None):
            _Pristine.roots[name] = file
    _Pristine.modules = frozenset(sys.modules)
    _Pristine.finalizers = frozenset(weakref.finalize._registry)  # type: ignore[attr-defined]
    connection.send(json.dumps({"environ": before, "roots": _Pristine.roots}).encode())


def _serve(connection: socket.socket) -> None:
    """Fork until whoever asks has gone."""
    while True:
        message, descriptors, _, _ = socket.recv_fds(connection, MOST_BYTES, 64)
        if not message:
            return
        if _threads() != 1:
            connection.send(json.dumps({"why": f"the server has {_threads()} threads"}).encode())
        else:
            answer = {"pid": _fork_twice(connection, json.loads(message), descriptors)}
            connection.send(json.dumps(answer).encode())
        for each in descriptors:
            os.close(each)


def _fork_twice(connection: socket.socket, request: Mapping[str, Any], descriptors: Sequence[int]) -> int:
    """The process number of a grandchild, whose parent has ended."""
    told, tells = os.pipe()
    between = os.fork()
    if not between:
        try:
            between = os.getpid()
            if child := os.fork():
                os.write(tells, str(child).encode())
                os._exit(0)
            connection.detach()
            while os.getppid() == between:
                time.sleep(0.0005)
            _patch()
            _become(request, descriptors)
        finally:
            os._exit(70)
    os.close(tells)
    os.waitpid(between, 0)
    pid = int(os.read(told, 32))
    os.close(told)
    return pid


def _end_with(parent: int) -> None:
    """Have the kernel kill this process with that which started it."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it was gone before we asked
        os._exit(0)


def main() -> None:
    """Import, then fork what the process that started this one asks for."""
    _end_with(int(sys.argv[2]))
    own = {os.path.dirname(os.path.abspath(__file__)), *_folders(os.environ.get("PYTHONPATH"))}
    found, sys.path[:] = list(sys.path), sys.path[1:]
    _Pristine.path, _Pristine.environ = tuple(each for each in found if each not in own), dict(os.environ)
    for name in PRELOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    connection = socket.socket(fileno=int(sys.argv[1]))
    _greet(connection)
    gc.collect()
    gc.freeze()
    _serve(connection)


if __name__ == "__main__":
    main()

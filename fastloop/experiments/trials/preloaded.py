"""Trials that start at once: forked from a process that has imported torch and Lightning and done nothing else.

Inside `quick_starts` there is such a process, the server. A trial that it forks runs under a leash (`reaper.py`), and
sees what a fresh interpreter would see (`become.py`). Forking is safe because the server has one thread, which it
checks before each fork, no CUDA context, and has computed nothing. If a fork cannot provide what a trial needs, a new
interpreter starts, and the trial's record says why: interpreter options, variables that libraries read as they load, a
file beside the script that shadows a loaded module. Ranks that a trial starts are new interpreters too. The server ends
with the process that started it, even if that is killed.
"""

from __future__ import annotations

import ast
import contextlib
import gc
import importlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

from fastloop.experiments.trials import become, reaper

PRELOADED = ("torch", "lightning.pytorch", "pytorch_lightning")
"""Imported if installed; with their imports, they take nearly all of the start-up time."""
OURS = ("fastloop.bridge.fit.dry_run", "fastloop.bridge.trials.ceilings", "fastloop.bridge.trials.gradient_probe")
"""Also imported for trials of configurations, whose program is ours."""
PATIENCE_S = 120.0
THREADS_END_S = 1.0
"""Time limit for the server's imports."""
FORKED = "forked"
MOST_DESCRIPTORS = 8
"""Largest number of descriptors in one message between this process and the server."""


@dataclass(frozen=True, kw_only=True)
class Greeting:
    """What a server reports once its imports are done."""

    environ: Mapping[str, str] = field(default_factory=dict)
    """Its environment variables."""
    roots: Mapping[str, str | None] = field(default_factory=dict)
    """The file of each imported package."""
    path: tuple[str, ...] = ()
    """The module search path after PYTHONPATH."""
    why: str | None = None
    """Why it cannot fork; None if it can."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """A request to the server: fork a command, or report how the process `wait` ended."""

    command: tuple[str, ...] = ()
    cwd: str = ""
    environ: Mapping[str, str] = field(default_factory=dict)
    wait: int | None = None


@dataclass(frozen=True, kw_only=True)
class Reply:
    """The forked process's id, or why there is none; or how a process ended."""

    pid: int | None = None
    code: int | None = None
    why: str = "the process that forks is gone"


class Leash:
    """The process that holds a forked trial, with the part of Popen's interface that its supervisor needs."""

    def __init__(self, pid: int, server: Server) -> None:
        self.pid, self.returncode, self._server = pid, 0, server

    def wait(self) -> int:
        """Wait for the trial's end, and return its exit code or the negative number of a signal."""
        code = self._server.ask(Request(wait=self.pid)).code
        self.returncode = -signal.SIGKILL if code is None else code
        return self.returncode


class Server:
    """A process that forks trials, and the socket on which it receives requests.

    Args:
        modules: modules to import in addition to torch and Lightning.
    """

    def __init__(self, environ: Mapping[str, str], modules: Sequence[str] = ()) -> None:
        self._socket, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        self._socket.settimeout(PATIENCE_S)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno()), str(os.getpid()), *modules],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=environ,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        self._greeting: Greeting | None = None

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, request: Request, descriptors: Sequence[int] = ()) -> Reply:
        """Send a request and return the reply."""
        with contextlib.suppress(OSError):
            _send(self._socket, vars(request), descriptors)
            return Reply(**_receive(self._socket)[0])
        return Reply()

    def greet(self) -> Greeting:
        """Wait for the server's greeting and return it."""
        if self._greeting is None:
            self._greeting = Greeting(why="nothing could be imported ahead of it")
            with contextlib.suppress(OSError):
                if said := _receive(self._socket)[0]:
                    self._greeting = Greeting(**said)
        return self._greeting

    def stop(self) -> None:
        """End it."""
        self._socket.close()
        self._process.kill()
        self._process.wait()


def _send(connection: socket.socket, message: Mapping[str, Any], descriptors: Sequence[int] = ()) -> None:
    """Send a message in an unnamed file: a socket message holds about 200 kB, and the variables alone may need more."""
    memory = getattr(os, "memfd_create", None)  # some builds of Python lack it
    with tempfile.TemporaryFile() if memory is None else os.fdopen(memory("fastloop"), "w+b") as file:
        file.write(json.dumps(message).encode())
        file.seek(0)
        socket.send_fds(connection, [b"."], [file.fileno(), *descriptors])


def _receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Receive the next message and its descriptors; an empty message if the other process is gone."""
    said, descriptors, _, _ = socket.recv_fds(connection, 1, MOST_DESCRIPTORS)
    if not said:
        return {}, []
    with os.fdopen(descriptors[0], "rb") as file:
        return dict(json.load(file)), descriptors[1:]


_server: Server | None = None


@contextlib.contextmanager
def quick_starts(environ: Mapping[str, str], *, scripts: bool) -> Iterator[None]:
    """Inside this context, the trials of this process are forked if possible.

    Args:
        environ: the trials' environment variables.
        scripts: the trials are the user's scripts, which must not find fastloop already imported.
    """
    global _server
    if sys.platform != "linux" or _server is not None:
        yield
        return
    # A script's folder comes first on its path, and `sys.flags` shows whether it does.
    shown = {name: value for name, value in environ.items() if not scripts or name != "PYTHONSAFEPATH"}
    _server = Server(shown, () if scripts else OURS)
    try:
        yield
    finally:
        _server.stop()
        _server = None


def start(
    command: Sequence[str], *, cwd: Path, environ: Mapping[str, str], stdin: int, stdout: int, stderr: int
) -> tuple[tuple[Leash, socket.socket] | None, str | None]:
    """Fork a trial; returns what `reaper.start` returns, and how it started. If it cannot be forked, returns None and
    the reason; None and None if there is no server."""
    if _server is None:
        return None, None
    command, variables = _apply_env(command, environ)
    if (why := find_obstacle(command, cwd, variables, _server.greet())) is not None:
        return None, f"a new interpreter: {why}"
    ours, theirs = socket.socketpair()
    null = os.open(os.devnull, os.O_RDONLY)
    with theirs:
        request = Request(command=tuple(command), cwd=str(cwd.absolute()), environ=variables)
        streams = [null if stdin == subprocess.DEVNULL else stdin, stdout, stderr]
        answer = _server.ask(request, [theirs.fileno(), *streams])
    os.close(null)
    if answer.pid is None:
        ours.close()
        return None, f"a new interpreter: {answer.why}"
    return (Leash(answer.pid, _server), ours), FORKED


# -- what can be forked -----------------------------------------------------------------------------------------------


def _apply_env(command: Sequence[str], environ: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """Return a command without its leading ``env``, and the variables with the changes that this makes."""
    variables, rest = dict(environ), list(command)
    if rest[0] != "env":
        return rest, variables
    del rest[0]
    while rest[0] == "-u" or "=" in rest[0]:
        name, _, value = rest.pop(0).partition("=")
        if name == "-u":
            variables.pop(rest.pop(0), None)
        else:
            variables[name] = value
    return rest, variables


def find_obstacle(command: Sequence[str], cwd: Path, variables: Mapping[str, str], greeting: Greeting) -> str | None:
    """Return why this command needs a new interpreter; None if it can be forked."""
    if greeting.why is not None:
        return greeting.why
    if shutil.which(command[0]) != sys.executable:
        return f"{command[0]} is not the Python that fastloop runs on"
    named = command[2:] if command[1:2] == ["-u"] else command[1:]
    script = cwd / named[0] if named and named[0].endswith(".py") else None
    if script is None and (named[:1] != ["-m"] or not named[1:]):
        return "Python options, or no script"
    before = greeting.environ
    for name in sorted({*variables, *before}):
        if become.is_read_when_loaded(name) and variables.get(name) != before.get(name):
            return f"{name} differs, which Python or a library reads at startup"
    folders = _list_folders(variables.get("PYTHONPATH")) - _list_folders(before.get("PYTHONPATH"))
    if not variables.get("PYTHONSAFEPATH"):
        folders.add(str(cwd if script is None else script.resolve().parent))
    gone = _list_folders(before.get("PYTHONPATH")) - _list_folders(variables.get("PYTHONPATH")) - {*greeting.path}
    for name, root in greeting.roots.items():
        if root is not None and any(Path(root).is_relative_to(each) for each in gone):
            return f"{name} is already imported from a folder that is not on its PYTHONPATH"
    if (shadow := _find_shadow(folders, greeting.roots)) is not None:
        return f"{shadow} shadows a module that is already imported"
    known = {*greeting.roots, "fastloop"}
    own = [cwd if script is None else script.resolve().parent]
    for folder in map(Path, (*_list_folders(variables.get("PYTHONPATH")), *greeting.path)):
        if not any(folder.is_relative_to(each) for each in (sys.prefix, sys.base_prefix)):
            own.append(folder)
    return _find_early_variable(_list_modules(own, named[1], known) if script is None else {script}, own, known)


def _list_folders(path: str | None) -> set[str]:
    return {str(Path(each).absolute()) for each in (path or "").split(os.pathsep) if each}


def _find_shadow(folders: set[str], roots: Mapping[str, str | None]) -> str | None:
    """Return a file that would be imported instead of an already loaded module, or None."""
    for folder in folders:
        with contextlib.suppress(OSError):
            for entry in sorted(Path(folder).iterdir()):
                name = entry.name.partition(".")[0]
                is_module = entry.suffix in (".py", ".so") or Path(entry, "__init__.py").is_file()
                if is_module and name in roots and not Path(roots[name] or os.devnull).is_relative_to(folder):
                    return str(entry)
    return None


def _find_early_variable(files: set[Path], folders: Sequence[Path], known: Collection[str]) -> str | None:
    """Return a reason not to fork if a program names a variable that it may set before the import that reads it.

    Args:
        files: its first files; their imports are followed.
        folders: the folders of its modules.
        known: packages that are not part of it.
    """
    waiting = list(files)
    while waiting:
        file = waiting.pop()
        try:
            nodes = list(ast.walk(ast.parse(file.read_bytes())))
        except (OSError, SyntaxError, ValueError):
            return f"{file.name} cannot be read"
        for node in nodes:
            text = node.value if isinstance(node, ast.Constant) else None
            if isinstance(text, str) and text.isidentifier() and text.isupper() and become.is_read_when_loaded(text):
                return f"{file.name} names {text}, which is read as a library is loaded"
            found = set[Path]()
            if isinstance(node, ast.Import):
                found = {path for each in node.names for path in _list_modules(folders, each.name, known)}
            elif isinstance(node, ast.ImportFrom):
                names = (f"{node.module or ''}.{each.name}".strip(".") for each in node.names)
                where = ([file.parents[node.level - 1]], ()) if node.level else (folders, known)
                found = {path for name in names for path in _list_modules(where[0], name, where[1])}
            waiting += found - files
            files = files | found
    return None


def _list_modules(folders: Sequence[Path], name: str, known: Collection[str]) -> set[Path]:
    """List the files of a module and of its parent packages that are in these folders."""
    parts = name.split(".")
    if parts[0] in known:
        return set()
    stems = [folder.joinpath(*parts[: count + 1]) for folder in folders for count in range(len(parts))]
    ends = (".py", "/__init__.py", "/__main__.py")
    return {path for stem in stems for end in ends if (path := Path(f"{stem}{end}")).is_file()}


# -- the server -------------------------------------------------------------------------------------------------------


def main() -> None:
    """Import the modules, then fork what the parent process requests."""
    reaper.die_with_parent(signal.SIGKILL)
    if os.getppid() != int(sys.argv[2]):  # it ended before the call above
        return
    connection, environ = socket.socket(fileno=int(sys.argv[1])), dict(os.environ)
    if not getattr(sys.flags, "safe_path", False):
        del sys.path[0]  # the working directory, which is not a script's folder
    bare = {**environ, "PYTHONSAFEPATH": "1", "PYTHONPATH": ""}  # ours contains the command's whole sys.path
    said = subprocess.check_output([sys.executable, "-c", "import json, sys; print(json.dumps(sys.path))"], env=bare)
    path: list[str] = json.loads(said)
    for name in (*PRELOADED, *sys.argv[3:]):
        try:
            importlib.import_module(name)
        except ImportError:
            continue
        except BaseException as error:
            _send(connection, {"why": f"{name} could not be imported: {error}"})
            return
    added = {name: value for name, value in os.environ.items() if environ.get(name) != value}
    tops = {name.partition(".")[0] for name in sys.modules} - {"fastloop", "__main__", "__mp_main__"}
    roots = {name: getattr(sys.modules.get(name), "__file__", None) for name in tops}
    if not (child := os.fork()):
        os._exit(0)
    os.waitpid(child, 0)  # OpenBLAS ends its thread pools before a fork, and restarts them at the next computation
    gc.collect()
    gc.freeze()
    _send(connection, {"environ": environ, "roots": roots, "path": path})
    _serve(connection, path, added, keeps_ours=len(sys.argv) > 3)


def _serve(connection: socket.socket, path: Sequence[str], added: Mapping[str, str], *, keeps_ours: bool) -> None:
    """Fork processes and report how they ended, until the requesting process is gone."""
    while True:
        message, descriptors = _receive(connection)
        if not message:
            return
        request = Request(**message)
        if request.wait is not None:
            answer = Reply(code=os.waitstatus_to_exitcode(os.waitpid(request.wait, 0)[1]))
        elif (threads := _count_threads()) != 1:
            answer = Reply(why=f"the process that forks has {threads} threads")
        else:
            pid = os.fork()
            if not pid:
                connection.close()
                _lead(replace(request, environ={**added, **request.environ}), descriptors, path, keeps_ours)
            answer = Reply(pid=pid)
        for each in descriptors:
            os.close(each)
        _send(connection, vars(answer))


def _count_threads() -> int:
    """Count this process's threads, once those that are ending have ended: a pool that stops needs a moment."""
    end_s = time.monotonic() + THREADS_END_S
    while (count := len([*Path("/proc/self/task").iterdir()])) > 1 and time.monotonic() < end_s:
        time.sleep(0.01)
    return count


def _lead(request: Request, descriptors: Sequence[int], path: Sequence[str], keeps_ours: bool) -> NoReturn:
    """Become the leash of a trial, like ``python -m fastloop.experiments.trials.reaper``, but with a fork."""
    try:
        held, *streams = descriptors
        os.setsid()
        reaper.ignore_signals()
        reaper.adopt_orphans(True)
        leash = os.getpid()
        child = os.fork()
        if not child:
            reaper.die_with_parent(signal.SIGKILL)
            if os.getppid() != leash:
                os._exit(0)
            if not keeps_ours:
                for name in [each for each in sys.modules if each.partition(".")[0] == "fastloop"]:
                    del sys.modules[name]
            become.become(
                request.command,
                descriptors=streams,
                numbers=(0, 1, 2),
                cwd=request.cwd,
                environ=request.environ,
                path=path,
                before=gc.unfreeze,  # collections then visit imported objects, as in a normal program
            )
        for each in streams:
            os.close(each)
        os._exit(reaper.keep(held, lambda: os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])) & 0xFF)
    finally:
        os._exit(70)


if __name__ == "__main__":
    main()

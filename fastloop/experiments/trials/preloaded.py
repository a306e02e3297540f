"""Trials that start at once: forked from a process that has imported torch and Lightning and done nothing else.

Inside `quick_starts` there is such a process, the server. A trial that it forks runs under a leash (`reaper.py`), and
sees what a fresh interpreter would see (`become.py`). Forking is safe because the server has one thread, which it
checks before each fork, no CUDA context, and has computed nothing. If a fork cannot provide what a trial needs, a new
interpreter starts, and the trial's record says why: interpreter options, variables that libraries read as they load, a
file next to the script that shadows a loaded module. Ranks that a trial starts are also new interpreters. The server
ends with the process that started it, even if that is killed.
"""

from __future__ import annotations

import ast
import contextlib
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path

from fastloop.experiments.trials import become, fork_server
from fastloop.experiments.trials.first_imports import READ_BY_THEM, list_first_imports
from fastloop.experiments.trials.fork_server import ForkRequest, Greeting, Reply, receive, send

OURS = tuple(f"import fastloop.bridge.{name}" for name in ("fit.dry_run", "trials.ceilings", "trials.gradient_probe"))
"""Further imports for trials of configurations, which run fastloop's own program."""
PATIENCE_S = 120.0
"""Time limit for the server's imports."""
SLOW_S = 2.0
"""If the imports take longer than this, a progress line says so."""
FORKED = "forked"


class Leash:
    """The process that holds a forked trial, with the part of Popen's interface that its supervisor needs."""

    def __init__(self, pid: int, server: Server) -> None:
        self.pid, self.returncode, self._server = pid, 0, server

    def wait(self) -> int:
        """Wait for the trial's end, and return its exit code or the negative number of a signal."""
        code = self._server.ask(ForkRequest(wait=self.pid)).code
        self.returncode = -signal.SIGKILL if code is None else code
        return self.returncode


class Server:
    """A process that forks trials, and the socket on which it receives requests.

    Args:
        imports: statements to run after the imports of torch and Lightning.
    """

    def __init__(self, environ: Mapping[str, str], imports: Sequence[str] = ()) -> None:
        self._socket, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        self._socket.settimeout(PATIENCE_S)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", fork_server.__name__, str(theirs.fileno()), str(os.getpid()), *imports],
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

    def ask(self, request: ForkRequest, descriptors: Sequence[int] = ()) -> Reply:
        """Send a request and return the reply."""
        with contextlib.suppress(OSError):
            send(self._socket, request, descriptors)
            return receive(self._socket, Reply)[0] or Reply()
        return Reply()

    def greet(self, say: Callable[[str], None] = lambda _: None) -> Greeting:
        """Wait for the server's greeting and return it; `say` receives a line if that takes long."""
        if self._greeting is None:
            if not select.select([self._socket], [], [], SLOW_S)[0]:
                say("starting: importing torch and Lightning first")
            self._greeting = Greeting(why="the fork server did not start")
            with contextlib.suppress(OSError):
                self._greeting = receive(self._socket, Greeting)[0] or self._greeting
        return self._greeting

    def stop(self) -> None:
        """End it."""
        self._socket.close()
        self._process.kill()
        self._process.wait()


_server: Server | None = None


@contextlib.contextmanager
def quick_starts(environ: Mapping[str, str], *, scripts: bool, script: Path | None = None) -> Iterator[None]:
    """Inside this context, the trials of this process are forked if possible.

    Args:
        environ: the trials' environment variables.
        scripts: the trials are the user's scripts, which must not find fastloop already imported.
        script: the script that all of them run; its first imports are made ahead.
    """
    global _server
    if sys.platform != "linux" or _server is not None:
        yield
        return
    # A script's folder comes first on its path, and `sys.flags` shows whether it does.
    shown = {name: value for name, value in environ.items() if not scripts or name != "PYTHONSAFEPATH"}
    _server = Server(shown, OURS if not scripts else [] if script is None else list_first_imports(script))
    try:
        yield
    finally:
        _server.stop()
        _server = None


def start(
    command: Sequence[str],
    *,
    cwd: Path,
    environ: Mapping[str, str],
    stdin: int,
    stdout: int,
    stderr: int,
    say: Callable[[str], None] = lambda _: None,
) -> tuple[tuple[Leash, socket.socket] | None, str | None]:
    """Fork a trial; returns what `reaper.start` returns, and how it started. If it cannot be forked, returns None and
    the reason; None and None if there is no server. `say` receives a line if it has to wait long."""
    if _server is None:
        return None, None
    command, variables = _apply_env(command, _drop_variables_set_since(environ, _server.greet(say).environ))
    if (why := find_obstacle(command, cwd, variables, _server.greet(say))) is not None:
        return None, f"a new interpreter: {why}"
    ours, theirs = socket.socketpair()
    null = os.open(os.devnull, os.O_RDONLY)
    with theirs:
        request = ForkRequest(command=tuple(command), cwd=str(cwd.absolute()), environ=variables)
        streams = [null if stdin == subprocess.DEVNULL else stdin, stdout, stderr]
        answer = _server.ask(request, [theirs.fileno(), *streams])
    os.close(null)
    if answer.pid is None:
        ours.close()
        return None, f"a new interpreter: {answer.why}"
    return (Leash(answer.pid, _server), ours), FORKED


def _drop_variables_set_since(environ: Mapping[str, str], before: Mapping[str, str]) -> dict[str, str]:
    """Leave out the variables that libraries read as they load and that one of them has set in this process since the
    server began, like scikit-learn's KMP_DUPLICATE_LIB_OK: the trial's own imports set them."""
    return {
        name: value
        for name, value in environ.items()
        if name in before or not _is_read_early(name) or os.environ.get(name) != value
    }


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
        if _is_read_early(name) and variables.get(name) != before.get(name):
            return f"{name} differs, which Python or a library reads at startup"
    ours, theirs = _list_folders(before.get("PYTHONPATH")), _list_folders(variables.get("PYTHONPATH"))
    own = [cwd if script is None else script.resolve().parent]
    for name, root in greeting.roots.items():
        if root is not None and any(Path(root).is_relative_to(each) for each in ours - theirs - {*greeting.path}):
            return f"{name} is already imported from a folder that is not on its PYTHONPATH"
    first = set() if variables.get("PYTHONSAFEPATH") else {str(own[0])}
    if (shadow := _find_shadow(first | (theirs - ours), greeting.roots)) is not None:
        return f"{shadow} shadows a module that is already imported"
    known = {*greeting.roots, "fastloop"}
    for folder in map(Path, (*theirs, *greeting.path)):
        if not any(folder.is_relative_to(each) for each in (sys.prefix, sys.base_prefix)):
            own.append(folder)
    return _find_early_variable(_list_modules(own, named[1], known) if script is None else {script}, own, known)


def _is_read_early(name: str) -> bool:
    return become.is_read_when_loaded(name) or name.startswith(READ_BY_THEM)


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
        files: the program's first files; their imports are followed.
        folders: the folders of its modules.
        known: packages that are not part of the program.
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
                return f"{file.name} names {text}, which a library reads when it is imported"
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

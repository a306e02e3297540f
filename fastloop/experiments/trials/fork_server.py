"""The process that trials are forked from: it has imported torch and Lightning, and computed nothing.

Run as ``python -m fastloop.experiments.trials.fork_server SOCKET PARENT [IMPORT ...]`` by `preloaded.Server`, with
import statements that are also run.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NoReturn, TypeVar

from fastloop.experiments.trials import become, reaper

PRELOADED = ("torch", "lightning.pytorch", "pytorch_lightning")
"""Imported if installed; with their imports, they take nearly all of the start-up time."""
MOST_DESCRIPTORS = 8
"""Largest number of descriptors in one message between this process and its parent."""
THREADS_END_S = 1.0
"""Time that threads get to end, such as those of a pool that stops for the fork."""
SAFE_THREADS = ("jemalloc_bg_thd",)
"""Threads that a fork may leave behind: jemalloc (PyArrow's allocator) locks itself around a fork and holds no Python
object."""


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
class ForkRequest:
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
    why: str = "the fork server has exited"


Message = Greeting | ForkRequest | Reply
Sent = TypeVar("Sent", Greeting, ForkRequest, Reply)


def send(connection: socket.socket, message: Message, descriptors: Sequence[int] = ()) -> None:
    """Send a message in an unnamed file: a socket message holds about 200 kB, and the variables alone may need more."""
    memory = getattr(os, "memfd_create", None)  # some builds of Python lack it
    with tempfile.TemporaryFile() if memory is None else os.fdopen(memory("fastloop"), "w+b") as file:
        file.write(json.dumps(vars(message)).encode())
        file.seek(0)
        socket.send_fds(connection, [b"."], [file.fileno(), *descriptors])


def receive(connection: socket.socket, kind: type[Sent]) -> tuple[Sent | None, list[int]]:
    """Receive the next message and its descriptors; None if the other process is gone."""
    said, descriptors, _, _ = socket.recv_fds(connection, 1, MOST_DESCRIPTORS)
    if not said:
        return None, []
    with os.fdopen(descriptors[0], "rb") as file:
        return kind(**json.load(file)), descriptors[1:]


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
    for statement in (*(f"import {name}" for name in PRELOADED), *sys.argv[3:]):
        try:
            exec(statement, {})
        except ImportError:
            continue
        except BaseException as error:
            send(connection, Greeting(why=f"{statement} raised an error: {error}"))
            return
    _end_idle_pools()
    keeps_ours = any(each.startswith("import fastloop.") for each in sys.argv[3:])
    if sys.argv[3:] and not keeps_ours and _cannot_fork():
        os.execv(sys.executable, [sys.executable, "-m", __spec__.name, *sys.argv[1:3]])
    added = {name: value for name, value in os.environ.items() if environ.get(name) != value}
    tops = {name.partition(".")[0] for name in sys.modules} - {"fastloop", "__main__", "__mp_main__"}
    roots = {name: getattr(sys.modules.get(name), "__file__", None) for name in tops}
    gc.collect()
    gc.freeze()
    send(connection, Greeting(environ=environ, roots=roots, path=tuple(path)))
    _serve(connection, path, added, keeps_ours=keeps_ours)


def _serve(connection: socket.socket, path: Sequence[str], added: Mapping[str, str], *, keeps_ours: bool) -> None:
    """Fork processes and report how they ended, until the requesting process is gone."""
    while True:
        request, descriptors = receive(connection, ForkRequest)
        if request is None:
            return
        if request.wait is not None:
            answer = Reply(code=os.waitstatus_to_exitcode(os.waitpid(request.wait, 0)[1]))
        elif (threads := count_threads()) != 1:
            answer = Reply(why=f"the fork server has {threads} threads")
        else:
            pid = os.fork()
            if not pid:
                connection.close()
                _lead(replace(request, environ={**added, **request.environ}), descriptors, path, keeps_ours)
            answer = Reply(pid=pid)
        for each in descriptors:
            os.close(each)
        send(connection, answer)


def _end_idle_pools() -> None:
    """Fork once: OpenBLAS, of which NumPy and SciPy load a copy each, ends its thread pools before a fork, and restarts
    them at the next computation."""
    if not (child := os.fork()):
        os._exit(0)
    os.waitpid(child, 0)


def _cannot_fork() -> bool:
    """Whether one of the imports has started a thread, or CUDA."""
    torch = sys.modules.get("torch")
    return count_threads() != 1 or (torch is not None and torch.cuda.is_initialized())


def count_threads() -> int:
    """Count this process's threads, once those that are ending have ended, without those that a fork may leave."""
    end_s = time.monotonic() + THREADS_END_S
    while (count := len(_list_threads())) > 1 and time.monotonic() < end_s:
        time.sleep(0.01)
    return count


def _list_threads() -> list[str]:
    names = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has just ended
            names.append((task / "comm").read_text().strip())
    return [name for name in names if name not in SAFE_THREADS]


def _lead(request: ForkRequest, descriptors: Sequence[int], path: Sequence[str], keeps_ours: bool) -> NoReturn:
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

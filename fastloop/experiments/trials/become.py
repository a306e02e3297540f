"""Turns a forked process into a Python program that cannot distinguish it from a fresh interpreter.

It gets the requested arguments, variables, directory, descriptors, path and streams, and has one thread. It ends as an
interpreter ends, except that imported modules are not torn down, which takes longest. This module imports only the
standard library.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import importlib
import io
import logging
import multiprocessing.process
import os
import random
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import NoReturn

READ_WHEN_LOADED = (
    *("PYTHON", "OMP_", "KMP_", "GOMP_", "MKL_", "OPENBLAS_", "NUMEXPR_", "LD_", "MALLOC_", "GLIBC_", "LC_", "LANG"),
    *("TORCH", "PYTORCH_", "CUDA_"),
)
"""Prefixes of variables that Python and libraries read as they load, except those in `READ_AGAIN`."""
READ_AGAIN = (
    *("PYTHONPATH", "PYTHONSAFEPATH", "PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE"),
    *("TORCHELASTIC", "TORCHINDUCTOR_CACHE_DIR", "TORCH_NCCL", "PYTORCH_NVML_BASED_CUDA_CHECK"),
)


def is_read_when_loaded(name: str) -> bool:
    """Whether changing this variable has no effect once torch is imported."""
    return name.startswith(READ_WHEN_LOADED) and not name.startswith(READ_AGAIN)


def become(
    command: Sequence[str],
    *,
    descriptors: Sequence[int],
    numbers: Sequence[int],
    cwd: str,
    environ: Mapping[str, str],
    path: Sequence[str],
    before: Callable[[], None] = lambda: None,
    after: Callable[[], None] = lambda: None,
) -> NoReturn:
    """Run the program of a command in this process, and end with it.

    Args:
        command: a Python, perhaps ``-u``, and a script, ``-m module`` or ``-c code``, with arguments.
        descriptors: become available under `numbers`, which include 0 to 2; all others are closed.
        path: the module search path after PYTHONPATH.
        before: called before the program; `after`: called when it has ended, before this process ends.
    """
    unbuffered = command[1] == "-u"
    command = [command[0], *command[1 + unbuffered :]]
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    signal.set_wakeup_fd(-1)
    take_descriptors(descriptors, numbers)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environ)
    before()
    open_streams(unbuffered=unbuffered or bool(environ.get("PYTHONUNBUFFERED")))
    tempfile.tempdir = None
    multiprocessing.process.ORIGINAL_DIR = cwd  # type: ignore[attr-defined]
    sys.dont_write_bytecode = bool(environ.get("PYTHONDONTWRITEBYTECODE"))
    _seed(environ.get("PL_GLOBAL_SEED", ""))
    code = 1
    try:
        code = _run(command, path, after)
    except BaseException:
        traceback.print_exc()
    _end(code, after)


def _seed(given: str) -> None:
    """Start new random streams from the given seed, so that runs of a script that seeds nothing are comparable."""
    seed = int(given) if given.isdecimal() else None
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed)
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.seed() if seed is None else torch.manual_seed(seed)


def take_descriptors(descriptors: Sequence[int], numbers: Sequence[int]) -> None:
    """Move these descriptors to these numbers and close all others."""
    above = 1 + max(*descriptors, *numbers)
    copies = [fcntl.fcntl(each, fcntl.F_DUPFD, above) for each in descriptors]
    for copy, number in zip(copies, numbers, strict=True):
        os.dup2(copy, number, inheritable=True)
    for entry in list(Path("/proc/self/fd").iterdir()):
        if int(entry.name) not in numbers:
            with contextlib.suppress(OSError):
                os.close(int(entry.name))


def open_streams(*, unbuffered: bool) -> None:
    """Open the standard streams as an interpreter does, also for loggers that kept the old ones when imported."""
    old = {id(sys.stdout): "stdout", id(sys.stderr): "stderr"}
    sys.stdin = open(0, encoding=sys.stdin.encoding, closefd=False)  # noqa: SIM115
    setattr(sys, "__stdin__", sys.stdin)  # noqa: B010  # only an interpreter sets it
    for number, name in ((1, "stdout"), (2, "stderr")):
        before = getattr(sys, name)
        raw = open(number, "wb", buffering=0 if unbuffered else -1, closefd=False)  # noqa: SIM115
        lines = not unbuffered and (number == 2 or os.isatty(number))
        stream = io.TextIOWrapper(raw, before.encoding, before.errors, line_buffering=lines, write_through=unbuffered)
        vars(stream)["mode"] = "w"
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    for reference in logging._handlerList:  # type: ignore[attr-defined]
        handler = reference()
        if handler is not None and id(vars(handler).get("stream")) in old:
            handler.stream = getattr(sys, old[id(handler.stream)])


def _run(command: Sequence[str], path: Sequence[str], after: Callable[[], None]) -> int:
    """Run a program as the interpreter does, and return its exit code."""
    sys.orig_argv = list(command)
    main = type(sys)("__main__")
    main.__dict__.update(__builtins__=sys.modules["builtins"], __annotations__={})
    sys.modules["__main__"] = main
    if command[1] == "-m":
        first, sys.argv = str(Path.cwd()), ["-m", *command[3:]]
    elif command[1] == "-c":
        first, sys.argv = "", ["-c", *command[3:]]
    else:
        first, sys.argv = str(Path(command[1]).resolve().parent), list(command[1:])
    given = os.environ.get("PYTHONPATH", "")
    folders = [str(Path(each).absolute()) for each in given.split(os.pathsep)] if given else []
    sys.path[:] = list(dict.fromkeys([*folders, *path]))
    sys.path_importer_cache.clear()
    importlib.invalidate_caches()
    with contextlib.suppress(ImportError):
        importlib.import_module("sitecustomize")
    if not os.environ.get("PYTHONSAFEPATH"):
        sys.path.insert(0, first)
    try:
        if command[1] == "-m":
            import runpy

            runpy._run_module_as_main(command[2])  # type: ignore[attr-defined]
        elif command[1] == "-c":
            exec(compile(command[2], "<string>", "exec", dont_inherit=True), main.__dict__)
        else:
            file = str(Path(command[1]).absolute())
            main.__dict__.update(__file__=file, __cached__=None, __loader__=SourceFileLoader("__main__", file))
            exec(compile(Path(file).read_bytes(), file, "exec", dont_inherit=True), main.__dict__)  # our __future__
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return (end.code or 0) & 0xFF
        sys.stdout.flush()
        sys.stderr.write(f"{end.code}\n")
        return 1
    except KeyboardInterrupt as error:
        _show(error)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        atexit._run_exitfuncs()
        sys.stdout.flush()
        after()
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException as error:
        _show(error)
        return 1
    return 0


def _show(error: BaseException) -> None:
    """Print an uncaught error, without the frames of this file."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    sys.stdout.flush()
    sys.excepthook(type(error), error.with_traceback(trace), trace)


def _end(code: int, after: Callable[[], None]) -> NoReturn:
    """End as an interpreter does, but without tearing down imported modules."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    after()
    os._exit(code)

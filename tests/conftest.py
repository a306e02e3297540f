"""What every test is held to: no leaked threads, processes, environment variables or process groups; a time limit."""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests import preloaded

# A test that needs real photographs looks here and skips politely where the folder is absent.
SHARED_DATA = Path(__file__).resolve().parent.parent.parent / "shared" / "data"
_QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
_HAS_QUEUES = _QUEUES in os.environ
"""`dali` sets it for good, and programs of later tests would not be forked with it."""
_ALLOWED_THREADS = (
    "pytest_timeout",
    "tqdm",
    "Dummy",
    "Thread-inductor",
    "SubprocPool",
    "ThreadPoolExecutor",
    "raw-read",
)
_ALLOWED_VARIABLES = (
    "PYTEST_",
    "PL_",
    "COLUMNS",
    "LINES",
    "TORCHINDUCTOR",
    "_TORCHINDUCTOR",
    "TRITON",
    "KMP_",
    "CUDA_MODULE_LOADING",
    "POPLAR",
    "CUDA_DEVICE_ORDER",
    "TORCHELASTIC",
    "PWD",
    "OLDPWD",
    "TF2_BEHAVIOR",
    "MPLBACKEND",
    "TORCH_NCCL",
)


for _number, _handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(_number) is signal.SIG_IGN:  # a job in the background, nohup; children inherit it
        signal.signal(_number, _handler)


# What runs remember for later ones on this machine: the user's stays as it is, and tests share nothing.
_CACHES = os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="fastloop-tests-")
atexit.register(shutil.rmtree, _CACHES, ignore_errors=True)


# Workers share the processors, and what is trained is too small for a second thread. torch reads this when it is
# imported, which no plugin and no setting does before.
os.environ.setdefault("OMP_NUM_THREADS", "1")


# Else each process that compiles with Inductor asks, in processes that import torch, whether it can load code for the
# vector instructions that this CPU says it has.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")


def pytest_configure(config: pytest.Config) -> None:
    """Leave Lightning's hints out, which takes importing it: not in the process that only hands tests to workers."""
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        config.addinivalue_line("filterwarnings", "ignore::lightning.fabric.utilities.warnings.PossibleUserWarning")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long tests come first, so that no worker is left with one when the others have nothing more to do."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


@pytest.fixture(autouse=True)
def police() -> Iterator[None]:
    """Fail a test that leaves something behind, outside of a cache of its own."""
    os.environ["XDG_CACHE_HOME"] = tempfile.mktemp(dir=_CACHES)
    _freeze_imports()
    _seed()
    before_threads = set(threading.enumerate())
    before_variables = dict(os.environ)
    before_passes = list(gc.callbacks)
    before_children = {child.pid for child in _children_of_ours()}
    yield
    if not _HAS_QUEUES:
        os.environ.pop(_QUEUES, None)
    variables = {name for name in set(os.environ) ^ set(before_variables) if not name.startswith(_ALLOWED_VARIABLES)}
    for name in variables:
        os.environ.pop(name, None)
    assert not variables, f"leaked environment variables: {sorted(variables)}"
    heard, gc.callbacks[:] = list(gc.callbacks), before_passes
    assert heard == before_passes, "something still hears the garbage collector"
    assert not (left := _wait(lambda: _threads(before_threads))), f"leaked threads: {left}"
    assert not (left := _wait(lambda: _children(before_children))), f"leaked processes: {left}"


_HAS_DEVICE = sys.platform != "linux" or any(Path("/dev", name).exists() for name in ("nvidiactl", "dxg", "kfd"))


def _seed() -> None:
    """Seed what tests leave unseeded: else their numbers would depend on the tests before."""
    random.seed(0)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(0)
    if (torch := sys.modules.get("torch")) is not None:
        # Without a device, torch notes for each kind of them that it is to be seeded, and from where: a millisecond.
        (torch.manual_seed if _HAS_DEVICE else torch.default_generator.manual_seed)(0)


def _wait(leftovers: object, limit_s: float = 5.0) -> list[str]:
    """Leftovers that are still there after a moment: some need one to end."""
    end = time.monotonic() + limit_s
    while (left := leftovers()) and time.monotonic() < end:  # type: ignore[operator]
        time.sleep(0.05)
    return left


def _threads(before: set[threading.Thread]) -> list[str]:
    return [
        thread.name
        for thread in threading.enumerate()
        if thread not in before
        and thread.is_alive()
        and not thread.daemon
        and not thread.name.startswith(_ALLOWED_THREADS)
    ]


_KEPT = ("compile_worker", "__autotune_main__", "resource_tracker", "forkserver", "orted")
"""Kept for the life of the process: Inductor's pools, Python's resource tracker and fork server, and the daemon of an
Open MPI that Lightning starts by asking whether it is under one."""


def _children_of_ours() -> list[psutil.Process]:
    """All below this process that run, but for the server that forks for tests, which ends with it."""
    found = []
    with contextlib.suppress(ChildProcessError):
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT | _WALL)  # a thousandth of what a scan costs
        for pid in _pids_below(os.getpid(), preloaded.server_pid()):
            with contextlib.suppress(psutil.NoSuchProcess):
                if (child := psutil.Process(pid)).status() != psutil.STATUS_ZOMBIE:
                    found.append(child)
    return found


def _pids_below(pid: int, server: int | None) -> Iterator[int]:
    """Those of children and their children. The kernel lists them by the thread that started them: psutil reads the
    files of all processes of the machine, which takes milliseconds."""
    if not Path("/proc/self/task", str(os.getpid()), "children").exists():
        yield from (each.pid for each in psutil.Process(pid).children(recursive=True) if each.pid != server)
        return
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):
                for child in map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split()):
                    if child != server:
                        yield child
                    yield from _pids_below(child, server)


_WALL = 0x40000000
"""Children of every kind. Source: waitpid(2)."""


def _children(before: set[int]) -> list[str]:
    found = []
    for child in _children_of_ours():
        try:
            command = " ".join(child.cmdline())
            if child.pid not in before and not any(name in command for name in _KEPT):
                found.append(f"{child.pid} {command[:100]}")
        except psutil.NoSuchProcess:
            continue
    return found


@pytest.fixture
def shared_data() -> Path:
    """The folder of real data; skips where it is absent."""
    if not SHARED_DATA.is_dir():
        pytest.skip("no real data beside the repository")
    return SHARED_DATA


@pytest.fixture
def offspring() -> Callable[[], list[psutil.Process]]:
    """Gives all processes below this one."""
    return _children_of_ours


@pytest.fixture
def newborns() -> Callable[[], list[psutil.Process]]:
    """Gives the processes that are there and were not when the test began: Inductor, for one, keeps some for good."""
    before = {child.pid for child in _children_of_ours()}
    return lambda: [child for child in _children_of_ours() if child.pid not in before]


@pytest.fixture
def quick_starts() -> Iterator[None]:
    """Python programs that the test starts are forked with torch and Lightning imported, where they can be."""
    with preloaded.quick_starts(ranks=True):
        yield


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The test's own folder, in which it runs."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def own_place(here: Path, monkeypatch: pytest.MonkeyPatch, quick_starts: None) -> None:
    """A folder and a cache of its own, for a test that starts trainings."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """torch.compile knows nothing of other tests, nor they of this one."""
    import torch

    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def fresh_templates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages are made as in a process that has made none: else the templates are compiled already."""
    from fastloop.report.drawing import html

    monkeypatch.setattr(html, "_compile_templates", html._compile_templates.__wrapped__)


@pytest.fixture
def with_threads() -> Iterator[Callable[[int], None]]:
    """Sets how many threads torch has until the test ends."""
    import torch

    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def no_alarm() -> Iterator[None]:
    """Puts the alarm of pytest's own limit away for the test."""
    before, (left, every) = signal.signal(signal.SIGALRM, signal.SIG_DFL), signal.setitimer(signal.ITIMER_REAL, 0)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)
    signal.setitimer(signal.ITIMER_REAL, left, every)


def pytest_collection_finish() -> None:
    _freeze_imports()


def _freeze_imports() -> None:
    """What is imported by now stays: later passes of the garbage collector need not look through it."""
    global _frozen_modules
    if len(sys.modules) > _frozen_modules + 100:
        gc.collect()
        gc.freeze()
        _frozen_modules = len(sys.modules)


_frozen_modules = 0

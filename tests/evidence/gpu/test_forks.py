"""A fork does not catch another thread inside a C library."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import pytest

from fastloop.evidence.gpu import forks
from fastloop.evidence.gpu.forks import no_fork

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


class Library:
    """Holds its lock while it is called, as NVML does."""

    def __init__(self, call_s: float = 0.0) -> None:
        self.lock, self.call_s, self.inside = threading.Lock(), call_s, threading.Event()
        self.forked = threading.Event()

    def call(self) -> None:
        with self.lock:
            self.inside.set()
            self.forked.wait(self.call_s)


def locked_in_child(library: Library) -> bool:
    """Whether a child forked now finds the library's lock taken."""
    child = os.fork()
    if child == 0:
        os._exit(int(not library.lock.acquire(timeout=0.2)))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1


@pytest.mark.parametrize("gated", [True, False], ids=["gated", "control"])
def test_a_fork_waits_for_the_call_in_progress(gated: bool) -> None:
    with no_fork():
        pass  # the hooks are there
    library = Library(0.3 if gated else 60.0)

    def work() -> None:
        if gated:
            with no_fork():
                library.call()
        else:
            library.call()

    thread = threading.Thread(target=work)
    thread.start()
    assert library.inside.wait(50)
    assert locked_in_child(library) is (not gated)
    library.forked.set()
    thread.join()


def test_a_fork_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forks, "LIMIT_S", 0.2)
    library, release = Library(), threading.Event()

    def work() -> None:
        with no_fork():
            library.inside.set()
            release.wait(20)

    thread = threading.Thread(target=work)
    thread.start()
    assert library.inside.wait(50)
    begun = time.monotonic()
    assert locked_in_child(library) is False
    took = time.monotonic() - begun
    assert 0.2 <= took < 15 and thread.is_alive()
    release.set()
    thread.join()
    with no_fork():
        assert not forks._gate.acquire(blocking=False), "the gate works on in the parent"


def test_the_child_may_use_the_gate_itself() -> None:
    with no_fork():
        pass
    child = os.fork()
    if child == 0:
        with no_fork():
            os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


CHILD = """
import gc, os, sys

class Event:
    def __del__(self):
        if os.getpid() != parent:
            os._exit(3)  # as torch aborts where a CUDA event is destroyed in a forked process

parent = os.getpid()
if sys.argv[1] == "protected":
    from fastloop.evidence.gpu.forks import protect_children
    protect_children()
gc.disable()
event = Event()
event.own = event
del event
child = os.fork()
if not child:
    gc.collect()
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.parametrize(("how", "code"), [("protected", "0"), ("control", "3")])
def test_a_child_does_not_destroy_the_garbage_of_its_parent(how: str, code: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CHILD, how],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    )
    assert done.stdout.strip() == code, done.stderr

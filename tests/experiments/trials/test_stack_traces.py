"""What faulthandler wrote, cut down to where a command stands; and who is asked for it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from fastloop.experiments.trials import stack_traces

CURRENT, OTHER = (f"{name} 0x00007fbe353c8b80 (most recent call first):" for name in ("Current thread", "Thread"))


def frames(*names: str) -> list[str]:
    return [f'  File "/a/train.py", line 3 in {name}' for name in names]


def test_the_innermost_frames_of_the_thread_that_took_the_signal() -> None:
    many = frames(*(f"f{index}" for index in range(30)))
    text = ["step 3", OTHER, *frames("run", "_bootstrap"), CURRENT, *many, "Terminated"]
    found, rest = stack_traces.split(text)
    assert found == ["Current thread (most recent call first):", *many[: stack_traces.FRAMES], "  ..."]
    assert rest == ["step 3", "Terminated"]


def test_of_several_processes_equal_stacks_are_told_once_and_only_so_many() -> None:
    idle = [CURRENT, *frames("poll", "worker")]
    others = [line for index in range(stack_traces.STACKS) for line in (CURRENT, *frames(f"own{index}"))]
    found, rest = stack_traces.split([*idle, *others, *idle, *idle])
    assert found[:3] == ["Current thread (most recent call first), in 3 processes:", *frames("poll", "worker")]
    assert found[-1] == "and 1 other stacks" and rest == []
    assert sum(line.startswith("Current thread") for line in found) == stack_traces.STACKS


def test_where_no_thread_is_called_current_the_last_is_the_main_one() -> None:
    found, _ = stack_traces.split([OTHER, *frames("helper"), OTHER, *frames("main")])
    assert found == ["Current thread (most recent call first):", *frames("main")]


@pytest.mark.parametrize("header", ["Current thread 0x00007fbe [python] (most recent call first):", CURRENT], ids=str)
def test_headers_of_all_versions(header: str) -> None:
    assert stack_traces.split([header, "  <no Python frame>"])[0][1:] == ["  <no Python frame>"]


def test_a_traceback_is_no_stack() -> None:
    text = ["Traceback (most recent call last):", '  File "a.py", line 3, in f', "    g()", "ValueError: no"]
    assert stack_traces.split(text) == ([], text)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere it cannot be told who listens")
def test_who_does_not_listen_is_not_asked() -> None:
    """SIGUSR2 would end it, and with it, say, the tracker that takes shared memory away."""
    deaf = "import time; print('up', flush=True); time.sleep(60)"
    listens = (
        "import signal, time; signal.signal(signal.SIGUSR2, lambda *_: print('heard', flush=True));"
        " print('up', flush=True); time.sleep(60)"
    )
    children = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for code in (deaf, listens)
    ]
    try:
        assert [child.stdout and child.stdout.readline() for child in children] == ["up\n", "up\n"]
        stack_traces.ask(os.getpid())
        assert children[1].stdout is not None and children[1].stdout.readline() == "heard\n"
        assert children[0].poll() is None
    finally:
        for child in children:
            child.kill()
            child.communicate()

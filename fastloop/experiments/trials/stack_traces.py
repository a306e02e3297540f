"""Shows where a silent command hangs: on SIGUSR2, its processes with a handler write their threads' stacks.

faulthandler writes up to 100 frames of every thread, innermost first. This module separates them from other output and
shortens them to the frames that show where it hangs. Source: https://docs.python.org/3/library/faulthandler.html
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import psutil

FRAMES, STACKS = 8, 3
"""Most frames shown of a stack, and most different stacks: a training process, its workers, a worker that hangs."""
MOST_ASKED, EACH_S = 40, 0.05
"""Most processes to signal, and the time each gets to write before the next, so that their lines do not mix."""
_THREAD = re.compile(r"(Current thread|Thread) 0x[0-9a-f]+.* \(most recent call first\):")
_FRAME = re.compile(r"  (File .*, line \S+ in .+|<.*>|\.\.\.|Garbage-collecting)")


def ask(leash: int) -> None:
    """Signal the processes below a leash, parents before children, except those that SIGUSR2 would end.

    Args:
        leash: its process id.
    """
    with contextlib.suppress(psutil.Error):
        listening = [child.pid for child in psutil.Process(leash).children(recursive=True) if _listens(child.pid)]
        for pid in listening[:MOST_ASKED]:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGUSR2)
                time.sleep(EACH_S)


def _listens(pid: int) -> bool:
    if sys.platform != "linux":  # elsewhere it is unknown
        return True
    with contextlib.suppress(OSError):
        caught = re.search(r"^SigCgt:\s*([0-9a-f]+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
        return caught is not None and bool(int(caught[1], 16) >> (signal.SIGUSR2 - 1) & 1)
    return False


def split(lines: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split lines into shortened stacks and all other lines.

    For each process, keep only the thread that received the signal (the main one) or crashed; equal stacks appear once.
    """
    stacks: list[tuple[str, list[str]]] = []
    rest, inside = [], False
    for line in lines:
        if (found := _THREAD.fullmatch(line)) is not None:
            stacks.append((found[1], []))
            inside = True
        elif inside and _FRAME.fullmatch(line):
            stacks[-1][1].append(line)
        else:
            inside = False
            rest.append(line)
    current = [frames for name, frames in stacks if name == "Current thread"] or [frames for _, frames in stacks[-1:]]
    return _write_stacks(current), rest


def _write_stacks(stacks: Sequence[Sequence[str]]) -> list[str]:
    """Format the stacks as lines, in the order in which they were written."""
    shown = [(*stack[:FRAMES], *(["  ..."] if len(stack) > FRAMES else [])) for stack in stacks]
    count = Counter(shown)
    lines = []
    for stack, times in list(count.items())[:STACKS]:
        where = f", in {times} processes" if times > 1 else ""
        lines += [f"Current thread (most recent call first){where}:", *stack]
    if len(count) > STACKS:
        lines.append(f"and {len(count) - STACKS} other stacks")
    return lines

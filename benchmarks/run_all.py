"""The benchmarks and the GPU's tests one after another, within a budget; what they print is passed on line by line.

    python -m benchmarks.run_all --budget 560 [--only tests,attention=200] [--per-gpu] [--log FILE]

Every part is a process that is killed with all it started at its limit: its own, the one given with `=`, or the end of
the budget. A benchmark is told to end ten seconds before that ({s}). Each line has the part's name in front; at its end
come its seconds and its exit code. A part for which less than half of what it takes is left is left out. With --per-gpu
each GPU works through the queue beside the others, with an equal share of the CPUs. At the very end comes the last word
on each case and each failed test, which fits where only the end of the output is kept; --log keeps all of it.

The parts in order, and what they take on one H200 with 16 CPUs, in seconds. A process there needs 17 s until it trains
(a forked one 2), a cold compile 35 to 60. This table is what the program reads:

    tests           220  280  -m pytest tests/gpu -n 3 -m "not alone" -v --tb=short --session-timeout={s}
    first_contact   860  290  -m benchmarks.first_contact --scripts gan,gin,bert,vit --arms plain,full --rounds 3 --budget {s}
    gpt2            280  200  -m benchmarks.compute gpt2 --budget {s}
    resnet50        280  200  -m benchmarks.compute resnet50 --steps 20 --budget {s}
    cifar10         200  160  -m benchmarks.compute cifar10 --budget {s}
    attention       130  160  -m benchmarks.attention --budget {s}
    batch_norm      120  150  -m benchmarks.batch_norm --budget {s}
    host            260  200  -m benchmarks.host --budget {s}
    compile_scope   170  180  -m benchmarks.compile_scope --budget {s}
    feed            250  200  -m benchmarks.feed --budget {s}
    feed_cifar       60   80  -m benchmarks.feed --recipe cifar10 --batch 128 --eager --only "device store" --budget {s}
    counterfactual  650  300  -m benchmarks.counterfactual --scripts bert,gan --budget {s}
    accuracy        200  160  -m benchmarks.accuracy --epochs 10 --budget {s}
    tests_alone     120  160  -m pytest tests/gpu -m alone -v --tb=short --session-timeout={s}

The first number is what all of a part takes, the second its limit: where that is less, the rounds or cases of least
value are left out. Calls of under ten minutes: tests,attention,batch_norm; gpt2,resnet50,host=150;
feed,cifar10,compile_scope; first_contact=560; counterfactual,feed_cifar,tests_alone.
"""  # noqa: E501 (one line for one command)

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

from benchmarks.cases import BEGAN, ROOT
from fastloop.evidence import machine

MARGIN_S = 10.0
TELLS = ("n", "ci95", "error", "left_out", "late_ms_x_plain", "process_s_x_plain", "speed", "holds", "exit_code")


class Part(NamedTuple):
    name: str
    takes_s: float
    limit_s: float
    command: Sequence[str]
    """Of this Python; {s} stands for the seconds that it may take."""


def read_table(text: str) -> list[Part]:
    """The lines of a table: name, two numbers, and a command."""
    rows = [line.split(maxsplit=3) for line in text.splitlines() if line.startswith("    ")]
    table = [row for row in rows if len(row) == 4 and row[1].isdigit()]
    return [Part(name, float(takes), float(limit), shlex.split(command)) for name, takes, limit, command in table]


def choose(parts: Sequence[Part], asked: str) -> list[Part]:
    """Those of ``name,name=seconds``, in that order."""
    named = {part.name: part for part in parts}
    chosen = []
    for name, _, limit_s in (each.partition("=") for each in asked.split(",")):
        if name not in named:
            raise SystemExit(f"got {name}\n  why there is no such part\n  do  name some of {', '.join(named)}")
        chosen.append(named[name]._replace(limit_s=float(limit_s)) if limit_s else named[name])
    return chosen


class Output:
    """Passes lines on, and keeps the last word on each case."""

    def __init__(self, log: Path | None) -> None:
        self.log, self.last, self.lock = log, dict[str, str](), threading.Lock()

    def say(self, name: str, line: str) -> None:
        with self.lock:
            print(f"{name}: {line}", flush=True)
            if self.log is not None:
                with self.log.open("a") as file:
                    file.write(f"{name}: {line}\n")
            if line.startswith(("FAILED", "ERROR", "==")):
                self.last[f"{name}: {line.strip('= ')[:300]}"] = ""
            with contextlib.suppress(ValueError):  # other programs may print braces
                found = json.loads(line) if line.startswith("{") else {}
                case = found.get("case") or f"{found.get('script')} {found.get('arm', '')}"
                told = {key: found[key] for key in found if key in TELLS or key.startswith("median_")}
                self.last |= {f"{name}: {case}": json.dumps(told)[:300]} if told else {}


def run_part(part: Part, limit_s: float, environ: dict[str, str], output: Output) -> int:
    """Its exit code; -9 where it was killed."""
    command = [sys.executable, *(word.replace("{s}", f"{max(1, limit_s - MARGIN_S):.0f}") for word in part.command)]
    began = time.monotonic()
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environ | {BEGAN: str(began)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    assert process.stdout is not None
    lines = process.stdout
    reader = threading.Thread(target=lambda: [output.say(part.name, line.rstrip("\n")) for line in lines], daemon=True)
    reader.start()
    try:
        code: int | None = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        code = None
    finally:
        end_all(process)
    reader.join(5)
    how = f"killed at its limit of {limit_s:.0f} s" if code is None else f"exit {code}"
    output.say(part.name, f"== {how}, {time.monotonic() - began:.1f} s")
    return -signal.SIGKILL if code is None else code


def end_all(process: subprocess.Popen[str]) -> None:
    """Kill it and what it started: all below it, in whatever session, and what is left in its group."""
    with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
        if process.poll() is None:
            below = psutil.Process(process.pid).children(recursive=True)
            process.kill()  # first, or it would start others
            for each in below:
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run_queue(parts: list[Part], until: float, output: Output, place: tuple[str, set[int]] | None) -> bool:
    """Part after part, until none is left: whether all ended well. `place`: a GPU, and CPUs for what it starts."""
    well = True
    environ = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    environ |= {"PYTHONUNBUFFERED": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    if place is not None:
        environ["CUDA_VISIBLE_DEVICES"] = place[0]
        os.sched_setaffinity(0, place[1])
    while parts:
        part, left_s = parts.pop(0), until - time.monotonic()
        limit_s = min(part.limit_s, left_s)
        if limit_s < min(part.takes_s, part.limit_s) / 2:
            output.say(part.name, f"== left out: takes {part.takes_s:.0f} s, {max(0, left_s):.0f} s left")
            continue
        well &= run_part(part, limit_s, environ, output) == 0
    return well


def main(parts: Sequence[Part] = tuple(read_table(__doc__))) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=float, default=560, help="seconds for all of it")
    parser.add_argument("--only", help="parts, in this order, each with its limit if wanted: tests,host=150")
    parser.add_argument("--per-gpu", action="store_true", help="a queue beside the others for each GPU")
    parser.add_argument("--log", type=Path, help="a file to which all output is added")
    options = parser.parse_args()
    left, output = choose(parts, options.only) if options.only else list(parts), Output(options.log)
    places: list[tuple[str, set[int]] | None] = [None]
    if options.per_gpu:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        gpus = visible.split(",") if visible else [str(number) for number, _ in enumerate(machine.list_gpus())]
        cpus = sorted(os.sched_getaffinity(0))
        places = [
            (gpu, set(cpus[len(cpus) * n // len(gpus) : len(cpus) * (n + 1) // len(gpus)] or cpus))
            for n, gpu in enumerate(gpus)
        ]
    until = time.monotonic() + options.budget
    with concurrent.futures.ThreadPoolExecutor(max(1, len(places))) as pool:
        ended = list(pool.map(lambda place: run_queue(left, until, output, place), places))
    print("\n".join(f"== {case} {told}" for case, told in output.last.items()), flush=True)
    return 0 if all(ended) else 1


if __name__ == "__main__":
    sys.exit(main())

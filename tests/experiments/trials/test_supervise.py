"""Whatever a child does, the wait for it ends in time, with the cause, and nothing is left of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fastloop.experiments.trials import supervise as seam
from fastloop.experiments.trials.stack_traces import FRAMES
from fastloop.experiments.trials.supervise import Ended, Limits, read_last_lines, read_steps_done, supervise
from tests.commands.command_line import ROOT, wait_for
from tests.experiments.trials.test_reaper import gone, pids, python

BEATS = """
import os, time
for step in range(1, {steps} + 1):
    with open("next", "w") as file:
        file.write(f"{{step}} {steps}")
    os.replace("next", "beat")  # as a real beat: never empty when somebody looks
    time.sleep({every})
"""


def ended(code: str, folder: Path, once: Sequence[str] = (), **settings: Any) -> Ended:
    """How a program ended.

    Args:
        once: files that the program writes something to as it begins; the limits count from then.
    """
    settings.setdefault("env", {**os.environ, "PYTHONPATH": str(ROOT)})
    limits = {"total_s": 100, "silent_s": 100, "grace_s": 20, **settings.pop("limits", {})}
    start = seam.reaper.start

    def begun(*command: Any, **named: Any) -> Any:
        started = start(*command, **named)
        wait_for(lambda: all((folder / name).is_file() and (folder / name).stat().st_size for name in once))
        return started

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(seam.reaper, "start", begun)
        return supervise(python(code), folder, limits=Limits(**limits), cwd=folder, **settings)


def waited(
    happens: Callable[[float], object],
    folder: Path,
    *,
    ends_s: float,
    computes: Callable[[float], bool] = lambda now_s: False,
    progress: Callable[[str], None] | None = None,
    **limits: float,
) -> str | None:
    """Why a command that does this was to be ended, if it was, in seconds that are counted and not waited for."""
    now_s = 0.0

    def gone(hold: object, patience_s: float) -> bool:
        nonlocal now_s
        now_s += patience_s
        happens(now_s)
        return now_s >= ends_s

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(seam, "time", SimpleNamespace(monotonic=lambda: now_s))
        patch.setattr(seam, "_has_ended", gone)
        work: Any = SimpleNamespace(done=computes)
        return seam._wait(None, folder, Limits(**limits), progress, work)  # type: ignore[arg-type]


def write_every(seconds: float, path: Path) -> Callable[[float], None]:
    """Write the number of the step so often, with the time that is counted."""

    def write(now_s: float) -> None:
        step = int(now_s / seconds)
        if step:
            path.write_text(f"{step} 9")
            os.utime(path, ns=(step, step))

    return write


def test_a_command_that_ends_well_has_no_cause(tmp_path: Path) -> None:
    found = ended("print('said'); open('beat', 'w').write('7 9')", tmp_path)
    assert (found.code, found.cause, found.last_step) == (0, None, 7)
    assert (tmp_path / "stdout.txt").read_text() == "said\n" and 0 < found.seconds < 100


def test_the_wait_for_shared_imports_is_not_the_first_trials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A climb took 14 s of imports for the start of each training: it had time to prove `full`, and did not run it."""
    monkeypatch.setattr(seam.preloaded, "start", lambda *_, **__: (None, time.sleep(2.0)))
    began = time.monotonic()
    found = ended("", tmp_path)
    assert 0 < found.seconds <= time.monotonic() - began - 2.0


def test_it_reads_from_the_descriptor_it_is_given_and_else_from_nothing(tmp_path: Path) -> None:
    echo = "import sys; print(sys.stdin.read())"
    ended(echo, tmp_path)
    assert (tmp_path / "stdout.txt").read_text() == "\n"
    (tmp_path / "in").write_text("told")
    with (tmp_path / "in").open() as source:
        ended(echo, tmp_path, stdin=source.fileno())
    assert (tmp_path / "stdout.txt").read_text() == "told\n"


@pytest.mark.parametrize(
    ("code", "cause"),
    [
        ("import sys; sys.exit('no luck')", "exit code 1: no luck"),
        ("raise ValueError('wrong number')", "exit code 1: ValueError: wrong number"),
        ("import sys; sys.exit(3)", "exit code 3: it printed nothing"),
        ("import sys, warnings; warnings.warn('no error at all'); sys.exit(7)", "exit code 7: it gave no error"),
        ("import sys, warnings; warnings.warn('slow'); sys.exit(1)", "exit code 1: it gave no error"),
        ("import sys; print('done', file=sys.stderr); sys.exit(7)", "exit code 7: it gave no error"),
        (
            "import sys; print('run.py: error: no --lr', file=sys.stderr); sys.exit(2)",
            "exit code 2: run.py: error: no --lr",
        ),
        ("raise UserWarning('slow')", "exit code 1: UserWarning: slow"),
        ("import os; os.kill(os.getpid(), 11)", "killed by SIGSEGV"),
        (
            "import os; open('beat', 'w').write('5 9'); os.kill(os.getpid(), 9)",
            "killed by SIGKILL at step 5: out of memory, or killed from outside",
        ),
        ("import os; open('beat', 'w').write('5 9'); os._exit(1)", "exit code 1 at step 5: it printed nothing"),
    ],
)
def test_the_cause_of_death_is_told(code: str, cause: str, tmp_path: Path) -> None:
    assert ended(code, tmp_path).cause == cause


def test_a_hung_child_is_ended_within_its_limit(tmp_path: Path) -> None:
    up = "open('up', 'w').write('up'); time.sleep(60)"
    found = ended(BEATS.format(steps=2, every=0.1) + up, tmp_path, ["up"], limits={"silent_s": 1.5})
    assert found.cause == "hung: no step, output or CPU use for 1.5 s at step 2; it was ended"
    assert found.seconds < 50 and found.code == -signal.SIGTERM


@pytest.mark.parametrize("sign", ["beat", "stdout.txt", "stderr.txt"])
def test_slow_is_not_hung(sign: str, tmp_path: Path) -> None:
    """A step and output are signs of life."""
    silent = "hung: no step, output or CPU use for 2.4 s"
    assert waited(write_every(2.0, tmp_path / sign), tmp_path, ends_s=9, silent_s=2.4) is None
    assert waited(write_every(3.0, tmp_path / sign), tmp_path, ends_s=9, silent_s=2.4) == silent


COMPUTES = """
import time
open("up", "w").write("up")
end = time.monotonic() + {s}
while time.monotonic() < end: sum(range(10_000))
"""


def test_work_is_a_sign_of_life(tmp_path: Path) -> None:
    assert waited(lambda _: None, tmp_path, ends_s=9, silent_s=2.4, computes=lambda now_s: now_s % 2 == 0) is None


@pytest.mark.parametrize("child", [False, True], ids=["own", "of a child"])
def test_what_computes_for_ever_ends_by_the_total_limit(child: bool, tmp_path: Path) -> None:
    """And by that on silence only where its work, or that of a grandchild of a sleeping child, is no sign of life."""
    (tmp_path / "computes.py").write_text(COMPUTES.format(s=60))
    waits = "import subprocess, sys; subprocess.run([sys.executable, 'computes.py'])"
    code = waits if child else COMPUTES.format(s=60)
    found = ended(code, tmp_path, ["up"], limits={"silent_s": 2.5, "total_s": 3})
    assert found.cause == "exceeded its time limit of 3 s; it was ended"


def test_a_command_with_slow_steps_is_ended_after_a_few(tmp_path: Path) -> None:
    steps = write_every(2, tmp_path / seam.BEAT)
    why = waited(steps, tmp_path, ends_s=100, total_s=1000, silent_s=1000, slowest_step_s=1)
    assert why == "its steps take 2 s, more than 1 s" and (tmp_path / seam.BEAT).read_text() == "12 9"
    assert waited(steps, tmp_path, ends_s=100, total_s=1000, silent_s=1000, slowest_step_s=3) is None


def test_one_long_step_is_no_slow_training(tmp_path: Path) -> None:
    def stalls(now_s: float) -> None:
        step = int(now_s) if now_s < 5 else max(5, int(now_s) - 50)
        (tmp_path / seam.BEAT).write_text(f"{step} 99")

    assert waited(stalls, tmp_path, ends_s=100, total_s=1000, silent_s=1000, slowest_step_s=3) is None


def test_once_it_only_idles_it_is_hung(tmp_path: Path) -> None:
    idles = COMPUTES.format(s=1.5) + "while True: time.sleep(0.05)"
    found = ended(idles, tmp_path, limits={"silent_s": 1.2})
    assert found.cause == "hung: no step, output or CPU use for 1.2 s; it was ended"


def test_a_child_that_lives_on_is_ended_at_its_total_limit(tmp_path: Path) -> None:
    found = ended(BEATS.format(steps=600, every=0.1), tmp_path, ["beat"], limits={"total_s": 1.5})
    assert found.cause == f"exceeded its time limit of 1.5 s at step {found.last_step}; it was ended"
    assert found.last_step is not None and found.seconds < 50


def test_one_that_ignores_sigterm_is_killed_after_the_grace(tmp_path: Path) -> None:
    ignores = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
    found = ended(ignores, tmp_path, ["stdout.txt"], limits={"total_s": 1, "grace_s": 1})
    assert found.code == -signal.SIGKILL and 2 < found.seconds < 50


def test_one_that_needs_a_moment_to_end_gets_it(tmp_path: Path) -> None:
    tidy = (
        "import signal, sys, time\n"
        "def tidy(*_):\n    time.sleep(0.5); print('tidied'); sys.exit(143)\n"
        "signal.signal(15, tidy); open('up', 'w').write('up'); time.sleep(60)"
    )
    found = ended(tidy, tmp_path, ["up"], limits={"total_s": 1})
    assert found.code == 143 and (tmp_path / "stdout.txt").read_text() == "tidied\n"


def test_megabytes_of_output_block_nobody(tmp_path: Path) -> None:
    prints = "import sys\nfor _ in range(64):\n    sys.stdout.write('x' * 2**16); sys.stderr.write('y\\n' * 2**15)"
    found = ended(prints, tmp_path)
    assert found.cause is None and (tmp_path / "stdout.txt").stat().st_size == 2**22
    assert found.tail == "\n".join(["y"] * seam.TAIL_LINES)


def test_one_that_would_fill_the_disk_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seam, "MOST_OUTPUT", 2**20)
    monkeypatch.setattr(seam, "LOOK_S", 0.1)
    prints = "import time\nwhile True:\n    print('x' * 2**16, flush=True); time.sleep(0.01)"
    assert ended(prints, tmp_path).cause == "wrote more than 1 MiB of output; it was ended"


def test_grandchildren_end_with_a_hung_child(tmp_path: Path) -> None:
    family = (
        "import os, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "open('pids', 'w').write(f'{os.getpid()} {child.pid}\\n')\ntime.sleep(60)"
    )
    found = ended(family, tmp_path, ["pids"], limits={"total_s": 1.5})
    assert found.cause is not None and gone(*pids(tmp_path))


def test_a_hung_python_says_where_it_stands(tmp_path: Path) -> None:
    hangs = (
        "import faulthandler, signal, time\nfaulthandler.register(signal.SIGUSR2)\n"
        "def waits_for_ever():\n    open('up', 'w').write('up'); time.sleep(60)\nwaits_for_ever()"
    )
    assert "waits_for_ever" in ended(hangs, tmp_path, ["up"], limits={"total_s": 1}, stacks=True).tail
    (tmp_path / "up").unlink()
    assert "waits_for_ever" not in ended(hangs, tmp_path, ["up"], limits={"total_s": 1}).tail


def test_it_says_the_innermost_frames_of_each_process_and_little_else(tmp_path: Path) -> None:
    hangs = (
        "import faulthandler, os, signal, sys, time\nfaulthandler.register(signal.SIGUSR2)\n"
        "def outermost(depth):\n    deeper(depth)\n"
        "def deeper(depth):\n    deeper(depth - 1) if depth else waits() if os.fork() else sticks()\n"
        "def waits():\n    open('waits', 'w').write('up'); time.sleep(60)\n"
        "def sticks():\n    open('sticks', 'w').write('up'); time.sleep(60)\n"
        "for line in range(99):\n    print('noise', line, file=sys.stderr)\noutermost(20)"
    )
    found = ended(hangs, tmp_path, ["waits", "sticks"], limits={"total_s": 1.5}, stacks=True)
    lines = found.tail.splitlines()
    assert sum(line.startswith("Current thread") for line in lines) == 2
    assert lines[1].endswith(" in waits") and any(line.endswith(" in sticks") for line in lines), "parents first"
    assert "outermost" not in found.tail and lines[-1] == "noise 98" and "noise 95\n" in found.tail
    assert len(lines) == 2 * (1 + FRAMES + 1) + seam.BESIDE_STACKS


def test_a_crash_says_the_innermost_frames(tmp_path: Path) -> None:
    crashes = (
        "import faulthandler, os\nfaulthandler.enable()\n"
        "def deeper(depth):\n    deeper(depth - 1) if depth else crashes()\n"
        "def crashes():\n    os.kill(os.getpid(), 11)\ndeeper(30)"
    )
    found = ended(crashes, tmp_path)
    assert found.cause == "killed by SIGSEGV" and " in crashes\n" in found.tail
    assert "Fatal Python error: Segmentation fault" in found.tail


def test_progress_is_told_now_and_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seam, "SAY_S", 0.9)
    lines: list[str] = []
    assert waited(write_every(1.5, tmp_path / "beat"), tmp_path, ends_s=4.5, progress=lines.append) is None
    first = "step 1 of 9 (the first steps may compile), 2"
    assert lines == [f"{at} s so far" for at in ("starting, 1", first, "step 2 of 9, 3", "step 2 of 9, 4")]


@pytest.mark.parametrize(
    ("number", "raises"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)], ids=["ctrl-c", "sigterm"]
)
def test_stopped_itself_it_takes_the_child_along(number: int, raises: type[BaseException], tmp_path: Path) -> None:
    def stop(*_: object) -> None:
        raise raises

    before = signal.signal(number, stop)
    threading.Thread(target=lambda: (pids(tmp_path), os.kill(os.getpid(), number))).start()
    begun = time.monotonic()
    try:
        with pytest.raises(raises):
            ended("import os, time; open('pids', 'w').write(f'{os.getpid()}\\n'); time.sleep(60)", tmp_path)
    finally:
        signal.signal(number, before)
    assert gone(*pids(tmp_path)) and time.monotonic() - begun < 50


def test_killed_itself_nothing_is_left(tmp_path: Path) -> None:
    child = python("import os, time; open('pids', 'w').write(f'{os.getpid()}\\n'); time.sleep(60)")
    code = (
        f"from pathlib import Path\nfrom fastloop.experiments.trials.supervise import supervise\n"
        f"supervise({child!r}, Path())"
    )
    process = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)})
    family = pids(tmp_path)
    process.kill()
    process.wait()
    wait_for(lambda: gone(*family))


def test_what_an_earlier_command_left_counts_for_nothing(tmp_path: Path) -> None:
    (tmp_path / "beat").write_text("99 100")
    (tmp_path / "stderr.txt").write_text("an old error\n")
    found = ended("import sys; sys.exit(2)", tmp_path)
    assert found.last_step is None and found.cause == "exit code 2: it printed nothing"


RANKS = """
import os, signal, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", {code!r}])
{first}
for name, step, process in (("beat", 12, os.getpid()), ("beat.1", {step}, child.pid)):
    open(name, "w").write(f"{{step}} 25 {{process}}")
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("code", "step", "first", "told"),
    [
        (
            "import os; os.kill(os.getpid(), 19)",
            12,
            "os.waitpid(child.pid, os.WUNTRACED)",
            "is stopped from outside at step 12, the others at step 12",
        ),
        ("pass", 11, "child.wait()", "has ended at step 11, the others at step 12"),
        ("import time; time.sleep(60)", 9, "", "is behind at step 9, the others at step 12"),
    ],
    ids=["stopped", "gone", "behind"],
)
def test_a_hung_command_says_which_rank_it_waits_for(
    code: str, step: int, first: str, told: str, tmp_path: Path
) -> None:
    limits = {"silent_s": 1.5, "grace_s": 2}
    found = ended(RANKS.format(code=code, step=step, first=first), tmp_path, ["beat", "beat.1"], limits=limits)
    process = (tmp_path / "beat.1").read_text().split()[2]
    silent = "hung: no step, output or CPU use for 1.5 s"
    assert found.cause == f"{silent}; rank 1 (process {process}) {told}; it was ended" and found.last_step == 12
    assert gone(int(process)), "a stopped process is ended, too"


def test_ranks_that_are_level_are_not_named(tmp_path: Path) -> None:
    code = RANKS.format(code="import time; time.sleep(60)", step=12, first="")
    found = ended(code, tmp_path, ["beat", "beat.1"], limits={"silent_s": 1.5, "grace_s": 2})
    assert found.cause == "hung: no step, output or CPU use for 1.5 s at step 12; it was ended"


@pytest.mark.parametrize(
    ("beat", "steps"),
    [
        ("3 9", (3, 9)),
        ("9 9", (9, 9)),
        ("12 9", (12, None)),
        ("3 -1", (3, None)),
        ("", (None, None)),
        ("x", (None, None)),
        (None, (None, None)),
    ],
    ids=str,
)
def test_steps_as_the_beat_says(beat: str | None, steps: tuple[int | None, int | None], tmp_path: Path) -> None:
    if beat is not None:
        (tmp_path / "beat").write_text(beat)
    assert read_steps_done(tmp_path) == steps


@pytest.mark.parametrize(("lines", "is_first"), [(30, True), (3, False)])
def test_of_a_long_message_the_first_line_is_the_cause(lines: int, is_first: bool, tmp_path: Path) -> None:
    """Torch lists all its kernels after "Could not run 'aten::ne.Scalar' with arguments from the 'SparseCPU'"."""
    code = f"raise NotImplementedError('Could not run ne' + {lines} * '{chr(92)}nb: kernel')"
    found = ended(code, tmp_path)
    first = "exit code 1: NotImplementedError: Could not run ne"
    assert (found.cause == first) is is_first and (found.cause or "").startswith("exit code 1: ")
    assert len(found.tail.splitlines()) <= 12 and found.tail.endswith("b: kernel")


def test_the_last_lines_are_plain_text(tmp_path: Path) -> None:
    path = tmp_path / "err"
    path.write_bytes(b"first\n" + 9 * b"x\n" + b"\xff\x1b[31mred\x1b[0m\r 10%|x\r\n\n" + b"last \xc3\xa4\n")
    assert read_last_lines(path) == 9 * "x\n" + "\ufffdred\n 10%|x\nlast ä"
    assert read_last_lines(tmp_path / "none") == ""

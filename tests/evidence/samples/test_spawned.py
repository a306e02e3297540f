"""Which loaders workers that do not fork could not serve. The scripts are real, and so are the control's processes."""

from __future__ import annotations

import functools
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest

from fastloop.evidence.samples.spawned import find_spawn_hazard, find_unpicklable
from tests.evidence.samples.test_thread_safety import Items

GUARD = 'if __name__ == "__main__"'


def test_unpicklable_names_the_innermost_place() -> None:
    assert find_unpicklable(Items(a=1)) is None
    found = find_unpicklable(Items(transform=[str.upper, lambda image: image]))
    assert found is not None and found.startswith("dataset.transform[1] (") and "<lambda>)" in found
    assert find_unpicklable(Items(deep={"lock": threading.Lock()})) == "dataset.deep['lock'] (lock)"
    assert find_unpicklable(functools.partial(max, threading.Lock()), "collate_fn") == "collate_fn.args[0] (lock)"
    assert "<lambda>" in str(find_unpicklable(lambda batch: batch, "collate_fn"))


def test_what_cannot_be_pickled_comes_first() -> None:
    found = find_spawn_hazard({"dataset": Items(), "collate_fn": lambda batch: batch})
    assert found is not None and found.startswith("collate_fn (")
    assert found.endswith("cannot be pickled; make it a module-level function or class")
    assert find_spawn_hazard({"dataset": Items(), "collate_fn": None}) is None  # the tests' own script has its guard


CLASS = """
class Squares:
    def __len__(self): return 4
    def __getitem__(self, index): return index * index
"""
TRAIN = """
def train():
    if sys.argv[1] == "look":
        from fastloop.evidence.samples.spawned import find_spawn_hazard
        print(find_spawn_hazard({"dataset": Squares(), "collate_fn": None}))
    else:
        from multiprocessing import get_context
        worker = get_context(sys.argv[1]).Process(target=Squares().__getitem__, args=(3,))
        worker.start()
        worker.join()
        sys.exit(worker.exitcode)
"""
UNGUARDED = f"import sys\n{CLASS}{TRAIN}train()\n"
UNDER_GUARD = f"import sys\n{TRAIN}{GUARD}:\n{textwrap.indent(CLASS, '    ')}    train()\n"
SOUND = {
    "guarded": f"import sys\n{CLASS}{TRAIN}{GUARD}:\n    train()\n",
    "other_guard": f"import multiprocessing, sys\n{CLASS}{TRAIN}if multiprocessing.parent_process() is None: train()\n",
    "in_a_thread": f"import sys, threading\n{CLASS}{TRAIN}{GUARD}:\n"
    "    thread = threading.Thread(target=train)\n    thread.start()\n    thread.join()\n",
    "in_one_line": f"import sys\n{CLASS}{TRAIN}__name__ == '__main__' and train()\n",
    "function_under_guard": f"import sys\n{CLASS}{TRAIN}{GUARD}:\n    def run(): train()\n    run()\n",
}
FAULTY = {
    "unguarded": (
        UNGUARDED,
        f"each would run script.py again, training included (line {UNGUARDED.count(chr(10))}); put that under {GUARD}",
    ),
    "class_under_guard": (
        UNDER_GUARD,
        f"they do not find Squares, which is defined under {GUARD}; define it above that line",
    ),
}


def run(folder: Path, text: str, how: str) -> Any:
    script = folder / "script.py"
    script.write_text(text)
    command = [sys.executable, "script.py", how]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=170)


@pytest.mark.usefixtures("quick_starts")
@pytest.mark.parametrize("text", SOUND.values(), ids=SOUND)
def test_a_script_that_workers_can_run_again(text: str, tmp_path: Path) -> None:
    done = run(tmp_path, text, "look")
    assert done.stdout == "None\n", done.stderr


@pytest.mark.usefixtures("quick_starts")
@pytest.mark.parametrize(("text", "expected"), FAULTY.values(), ids=FAULTY)
def test_a_script_that_they_cannot_is_named(text: str, expected: str, tmp_path: Path) -> None:
    done = run(tmp_path, text, "look")
    assert done.stdout == f"{expected}\n", done.stderr


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
@pytest.mark.parametrize(
    ("text", "works"), [(SOUND["guarded"], True), (UNGUARDED, False), (UNDER_GUARD, False)], ids=["ok", "none", "below"]
)
def test_the_control_real_processes(text: str, works: bool, method: str, tmp_path: Path) -> None:
    done = run(tmp_path, text, method)
    assert (done.returncode == 0) is works, done.stderr


def test_what_no_file_defines_is_not_found() -> None:
    code = f"import sys\n{CLASS}{TRAIN}train()\n"
    done = subprocess.run([sys.executable, "-c", code, "look"], capture_output=True, text=True, timeout=170)
    hidden = "they do not find Squares, which no module defines that they import; move it into one\n"
    assert done.stdout == hidden, done.stderr


@pytest.mark.parametrize("text", [CLASS, "from package.data import Squares\n"], ids=["its_own", "imported"])
def test_a_package_is_not_run_again(text: str, tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    for name, content in {"__init__": "", "data": CLASS, "__main__": f"import sys\n{text}{TRAIN}train()\n"}.items():
        (package / f"{name}.py").write_text(content)
    looked, worked = (
        subprocess.run(
            [sys.executable, "-m", "package", how], cwd=tmp_path, capture_output=True, text=True, timeout=170
        )
        for how in ("look", "spawn")
    )
    assert (looked.stdout == "None\n") is (worked.returncode == 0) is (text != CLASS), looked.stdout + worked.stderr

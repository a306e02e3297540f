"""Runs strangers' scripts, each in a fresh process or fork with a fresh cache, and reads what came of them."""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import itertools
import json
import math
import os
import runpy
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.cases import ROOT
from benchmarks.stamps import PLACE

SCRIPTS = sorted(path.stem for path in (ROOT / "benchmarks" / "foreign").glob("*.py"))
GRACE_S, LEAST_S = 5.0, 25.0
"""For a run to end at its limit; and what one takes, until it has been seen."""
GRAPH = ("replayed_steps", "eager_steps", "eager_ms", "replay_ms", "graph_refused")
_BEST = "15, pin_memory=True, persistent_workers=True"
BY_HAND: dict[str, tuple[tuple[str, str], ...]] = {
    "bert": (("collate_fn=collate)", "collate_fn=collate, num_workers=4, pin_memory=True, persistent_workers=True)"),),
    "contrastive": (("num_workers=0 if tiny else 4", f"num_workers={_BEST}"),),
    "gan": (("num_workers=0 if tiny else 8", f"num_workers={_BEST}"),),
    "segmentation": (("num_workers=workers)", f"num_workers={_BEST})"),),
    "speech": (("num_workers=2)", f"num_workers={_BEST})"),),
    "vit": (("num_workers=workers, pin_memory=True", f"num_workers={_BEST}"),),
}
"""By script: its loader as an engineer would set it on 16 CPUs, as replacements in the script's text."""


class Case(NamedTuple):
    script: str
    arm: str
    round: int


# -- one run ----------------------------------------------------------------------------------------------------------


def make_timer(place: Path) -> Path:
    """A folder for the PYTHONPATH, with which Lightning finds the stamping callback."""
    package = place / "first_contact_timer-0.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: first-contact-timer\nVersion: 0\n")
    group = "[lightning.pytorch.callbacks_factory]"
    (package / "entry_points.txt").write_text(f"{group}\nstamps = benchmarks.stamps:callbacks\n")
    return place


def find_script(name: str) -> Path:
    return ROOT / "benchmarks" / "foreign" / f"{name}.py"


def rewrite(text: str, changes: Sequence[tuple[str, str]]) -> str:
    for old, new in changes:
        if old not in text:
            raise ValueError(f"the script has no {old!r}")
        text = text.replace(old, new)
    return text


def tune_by_hand(script: str, folder: Path) -> Path:
    """A copy of the script with its loader tuned by hand."""
    path = folder / f"{script}.py"
    path.write_text(rewrite(find_script(script).read_text(), BY_HAND[script]))
    return path


def make_command(case: Case, out: Path, options: argparse.Namespace) -> list[str]:
    path = options.paths.get(case.script) or find_script(case.script)
    if case.arm == "by_hand":
        path = tune_by_hand(case.script, out.parent)
    script = [sys.executable, str(path), "--size", options.size, "--devices", str(options.devices)]
    script += ["--steps", str(options.steps)] if options.steps else []
    script += ["--data", options.data] if options.data and '"--data"' in path.read_text() else []
    script += options.more.get(case.script, [])
    if case.arm in ("plain", "by_hand"):
        return script
    ladder = [] if case.arm == "watched" else ["--config", case.arm]
    return [sys.executable, "-m", "fastloop", "exec", "--out", str(out), *ladder, "--", *script]


def run_one(
    case: Case, place: Path, timer: Path, options: argparse.Namespace, limit_s: float, cache: Path | None = None
) -> dict[str, Any]:
    """One script under one arm in a fresh process and a fresh folder, and with a fresh cache unless one is given; what
    came of it."""
    cache = cache or place / "cache"
    out, stamps, printed = place / "fastloop", place / "stamps.json", place / "printed.txt"
    place.mkdir(parents=True)
    path = [str(ROOT), str(timer), *filter(None, [os.environ.get("PYTHONPATH")])]
    environ = os.environ | {
        "PYTHONPATH": os.pathsep.join(path),
        PLACE: str(stamps),
        "XDG_CACHE_HOME": str(cache),
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        "TRITON_CACHE_DIR": str(cache / "triton"),
        "PYTHONUNBUFFERED": "1",
    }
    command, began = make_command(case, out, options), time.perf_counter()
    with printed.open("wb") as file:
        if options.forked:
            process: subprocess.Popen[bytes] | Fork = fork_command(command, place, environ, file.fileno())
        else:
            process = subprocess.Popen(
                command,
                cwd=place,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        code = wait(process, limit_s)
    ended = time.perf_counter()
    return {
        **case._asdict(),
        "size": options.size,
        "devices": options.devices,
        "timed": options.parallel == 1,
        "exit_code": code,
        "over_limit": code is None,
        "forked": options.forked,
        "process_s": round(ended - began, 2),
        **read_stamps(stamps, began, ended),
        **read_records(out),
        **read_output(printed, failed=code != 0),
    }


def wait(process: subprocess.Popen[bytes] | Fork, limit_s: float) -> int | None:
    """Its exit code; None where it did not end in time and was killed, with all that it started."""
    try:
        code = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        code = None
        process.terminate()  # alone: workers that die with it would be an error of the training's
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return code


# -- runs that find their imports done --------------------------------------------------------------------------------


class Fork:
    """A child of this process, with the part of Popen's interface that `wait` needs."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.pid, self._code = os.fork(), None
        if self.pid:
            return
        code = 1
        try:
            os.setsid()
            work()
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def wait(self, limit_s: float = math.inf) -> int:
        until = time.monotonic() + limit_s
        while self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._code = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > until:
                raise subprocess.TimeoutExpired(str(self.pid), limit_s)
            time.sleep(0.01)
        return self._code

    def terminate(self) -> None:
        os.kill(self.pid, signal.SIGTERM)


def import_ahead(scripts: Sequence[str]) -> bool:
    """Import here what these scripts import. Whether a fork can use CUDA then: not if an import has touched it."""
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # then asking whether there is CUDA does not touch it
    for script in scripts:
        for node in ast.walk(ast.parse(find_script(script).read_text())):
            names = [each.name for each in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            with contextlib.suppress(ImportError):
                if isinstance(node, ast.Import):
                    for name in names:
                        importlib.import_module(name)
                elif isinstance(node, ast.ImportFrom) and node.module:
                    module = importlib.import_module(node.module)
                    for name in names:
                        getattr(module, name, None)  # some packages import a name's module only now
    torch = sys.modules["torch"]
    return Fork(lambda: torch.cuda.is_available() and torch.cuda.init()).wait() == 0


def fork_command(command: Sequence[str], place: Path, environ: Mapping[str, str], output: int) -> Fork:
    """Python with a script, or with `-m fastloop exec` before it, in a fork of this process."""

    def enter() -> None:
        os.chdir(place)
        os.dup2(output, 1)
        os.dup2(output, 2)
        if command[1] == "-m":
            from fastloop.commands import execute

            execute._run = lambda script, variables: Fork(lambda: run_script(script[1:], variables)).wait()
            sys.path[1:1] = environ["PYTHONPATH"].split(os.pathsep)
            os.environ.update(environ)
            sys.argv = ["fastloop", *command[3:]]
            runpy.run_module("fastloop", run_name="__main__")
        else:
            run_script(command[1:], environ)

    return Fork(enter)


def run_script(arguments: Sequence[str], environ: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environ)
    sys.argv = list(arguments)
    sys.path[0:1] = [str(Path(arguments[0]).parent), *environ["PYTHONPATH"].split(os.pathsep)]
    runpy.run_path(arguments[0], run_name="__main__")


# -- what came of it --------------------------------------------------------------------------------------------------


def read_stamps(path: Path, began: float, ended: float) -> dict[str, Any]:
    """Times of the longest fit, and its last metrics; the process began and ended at these times."""
    fits = [fit for fit in (json.loads(path.read_text()) if path.is_file() else []) if fit["ends"]]
    if not fits:
        return {"fits": 0}
    fit = max(fits, key=lambda each: len(each["ends"]))
    ends, last = fit["ends"], fit["last"] or fit["ends"][-1]
    middle = len(ends) // 2
    return {
        "fits": len(fits),
        "batches": len(ends),
        "each_ms": [round(1e3 * (b - a), 1) for a, b in itertools.pairwise(ends)],
        "finished": fit["last"] is not None,
        "before_s": round(fit["built"] - began, 3),
        "train_s": round(last - fit["built"], 3),
        "after_s": round(ended - last, 3),
        "first_batch_s": round(ends[0] - fit["start"], 3),
        "first_to_last_s": round(last - ends[0], 3),
        "late_ms": round(1e3 * (last - ends[middle]) / max(1, len(ends) - 1 - middle), 3),
        "metrics": {name: value for name, value in fit["metrics"].items() if "loss" in name},
        "spent_s": {
            name: round(s, 2) for name, s in sorted(fit["spent_s"].items(), key=lambda each: -each[1]) if s >= 0.02
        },
    }


def read_records(out: Path) -> dict[str, Any]:
    """What fastloop wrote of the run; nothing for a plain one."""
    names = ("findings", "verdicts", "measurement")
    paths = {name: out / f"{name}.json" for name in names}
    found = {name: json.loads(path.read_text()) for name, path in paths.items() if path.is_file()}
    answer: dict[str, Any] = {}
    if "findings" in found:
        rows = found["findings"]["findings"]
        answer["findings"] = [[row.get("title") or row["bottleneck"], row["share_pct"]] for row in rows]
    if "verdicts" in found:
        rows = found["verdicts"]["verdicts"]
        answer["took"] = [row["rung"] for row in rows if row["took"]]
        answer["skipped"] = {row["rung"]: row["why"] for row in rows if row["took"] is False}
        answer["untold"] = {row["rung"]: row["why"] for row in rows if row["took"] is None}
        answer["rehearsed"] = {row["rung"]: row["rehearsed"] for row in rows if row.get("rehearsed")}
    if "measurement" in found:
        seen = found["measurement"]
        host = seen["evidence"].get("host") or {}
        answer["graph"] = {name: host.get(name) for name in GRAPH if name in host}
        keys = ("samples_per_s", "step_ms", "steps", "total_steps", "window_too_short", "one_time_s", "partial")
        answer |= {key: seen.get(key) for key in keys}
        answer["parts_ms"] = {name: value for name, value in seen["parts_ms"].items() if value}
        answer["mfu_pct"] = None if seen["mfu"]["datasheet"] is None else 100 * seen["mfu"]["datasheet"]
        answer["losses_last"] = list(seen["loss"][-3:])
        answer["syncs"] = [[row["where"], row["per_step"]] for row in seen["syncs"][:4]]
    return answer


def read_output(path: Path, *, failed: bool) -> dict[str, Any]:
    lines = [line for line in path.read_text(errors="replace").replace("\r", "\n").splitlines() if line.strip()]
    first = next((index for index, line in enumerate(lines) if line.startswith(("FASTLOOP", "fastloop"))), len(lines))
    return {"said": lines[first:][:14], **({"tail": lines[-30:]} if failed else {})}

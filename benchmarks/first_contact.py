"""Scripts that strangers wrote, each plain and under fastloop: does it still train, and is it slower in any way?

    python -m benchmarks.first_contact [--scripts gan,bert] [--arms plain,full] [--rounds 2] [--size tiny] [--limit 120]
        [--budget 280] [--steps 80] [--devices 2] [--data DIR] [--args "bert: --steps 40"] [--parallel 1] [--keep DIR]
        [--forked]
    python -m benchmarks.first_contact --summary lines.jsonl

Every run is a fresh process with a fresh cache: compiled code, remembered failures and passports are those of a first
contact. In each round all scripts and arms take turns, in an order shuffled by the number of the round. Arms: `plain`,
`by_hand` (plain, its loader tuned by hand: `BY_HAND`), `watched` (no rung), or the name of a ladder, a rung or a YAML
file. One JSON line per run:

    process_s        the whole process, imports, compiles and report included
    first_batch_s    from the start of training to the end of the first batch, compiles included
    first_to_last_s  from the end of the first batch to the end of the last, the device waited for then
    late_ms          the same per batch over the second half of the batches
    took, skipped    rungs that did, and that did not with their reason; untold: nobody could tell
    one_time_s       seconds that no later step pays again, by cause, as fastloop tells them
    said             what fastloop printed
    tail             the end of what the process printed, where it failed
    n, late_x_plain  of this arm so far, and its time by that of plain with a 95 % interval

A callback stamps the end of each batch in all arms alike, by Lightning's entry points as fastloop itself comes in; it
waits for the device once, after the last one. With --parallel above 1 nothing is timed, but faults show sooner. With
--forked what the scripts import is imported once for all runs, which saves up to 17 s each; `process_s` is then n/a.
"""

from __future__ import annotations

import argparse
import ast
import concurrent.futures
import contextlib
import importlib
import itertools
import json
import math
import os
import random
import runpy
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from scipy import stats

from benchmarks.cases import ROOT, add_budget, say

SCRIPTS = sorted(path.stem for path in (ROOT / "benchmarks" / "foreign").glob("*.py"))
ARMS = ("plain", "watched", "safe", "full")
GRACE_S, LEAST_S = 5.0, 25.0
"""For a run to end at its limit; and what one takes, until it has been seen."""
GRAPH = ("replayed_steps", "eager_steps", "eager_ms", "replay_ms", "graph_refused")
COMPARED = ("process_s", "late_ms")
STAMPS = "FIRST_CONTACT_STAMPS"
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
TIMER = '''
import json, os, time
from lightning.pytorch import Callback


class Stamps(Callback):
    """When each training batch ended, on the first rank."""

    def __init__(self):
        self.fits = []

    def on_train_start(self, trainer, pl_module):
        self.fits.append({"start": time.perf_counter(), "ends": [], "last": None, "metrics": {}})

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        done = trainer.current_epoch + 1 == trainer.max_epochs and trainer.is_last_batch
        if done or trainer.global_step >= trainer.max_steps > 0:  # before checkpoints are written at the end
            self.finish(trainer)
        self.fits[-1]["ends"].append(time.perf_counter())

    def finish(self, trainer):
        if trainer.strategy.root_device.type == "cuda":
            import torch

            torch.cuda.synchronize()
        self.fits[-1]["last"] = time.perf_counter()

    def on_train_end(self, trainer, pl_module):
        if self.fits[-1]["last"] is None:
            self.finish(trainer)
        self.fits[-1]["metrics"] = {name: float(value) for name, value in trainer.callback_metrics.items()}
        self.write(trainer)

    def on_exception(self, trainer, pl_module, exception):
        self.write(trainer)

    def write(self, trainer):
        if trainer.is_global_zero:
            with open(os.environ["FIRST_CONTACT_STAMPS"], "w") as file:
                json.dump(self.fits, file)


def callbacks():
    return [Stamps()] if os.environ.get("FIRST_CONTACT_STAMPS") else []
'''


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
    (package / "entry_points.txt").write_text(f"{group}\ntimer = _first_contact_timer:callbacks\n")
    (place / "_first_contact_timer.py").write_text(TIMER)
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


def run_one(case: Case, place: Path, timer: Path, options: argparse.Namespace, limit_s: float) -> dict[str, Any]:
    """One script under one arm in a fresh process and a fresh folder; what came of it."""
    out, stamps, printed = place / "fastloop", place / "stamps.json", place / "printed.txt"
    place.mkdir(parents=True)
    path = [str(ROOT), str(timer), *filter(None, [os.environ.get("PYTHONPATH")])]
    environ = os.environ | {
        "PYTHONPATH": os.pathsep.join(path),
        STAMPS: str(stamps),
        "XDG_CACHE_HOME": str(place / "cache"),
        "TORCHINDUCTOR_CACHE_DIR": str(place / "cache" / "inductor"),
        "TRITON_CACHE_DIR": str(place / "cache" / "triton"),
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
    return {
        **case._asdict(),
        "size": options.size,
        "devices": options.devices,
        "timed": options.parallel == 1,
        "exit_code": code,
        "over_limit": code is None,
        "forked": options.forked,
        "process_s": round(time.perf_counter() - began, 2),
        **read_stamps(stamps),
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


def read_stamps(path: Path) -> dict[str, Any]:
    """Times of the longest fit, and its last metrics."""
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
        "first_batch_s": round(ends[0] - fit["start"], 3),
        "first_to_last_s": round(last - ends[0], 3),
        "late_ms": round(1e3 * (last - ends[middle]) / max(1, len(ends) - 1 - middle), 3),
        "metrics": {name: value for name, value in fit["metrics"].items() if "loss" in name},
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


# -- all of them ------------------------------------------------------------------------------------------------------


def list_cases(options: argparse.Namespace) -> Iterator[Case]:
    """Scripts and arms take turns in each round."""
    for number in range(options.rounds):
        cases = [Case(script, arm, number) for script in options.scripts for arm in options.arms]
        yield from random.Random(number).sample(cases, len(cases))


def run_all(options: argparse.Namespace, place: Path) -> None:
    timer = make_timer(place / "timer")
    rows: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)

    def run(case: Case) -> dict[str, Any]:
        before, left_s = rows[case.script, case.arm], options.until - time.monotonic() - GRACE_S
        needed_s = max((row["process_s"] for row in before), default=min(options.limit, LEAST_S))
        if left_s < needed_s:
            return {**case._asdict(), "left_out": f"takes about {needed_s:.0f} s, {max(0, left_s):.0f} s left"}
        limit_s = min(options.limit, left_s)
        return run_one(case, place / f"{case.round}-{case.script}-{Path(case.arm).stem}", timer, options, limit_s)

    with concurrent.futures.ThreadPoolExecutor(options.parallel) as pool:
        for done in concurrent.futures.as_completed([pool.submit(run, case) for case in list_cases(options)]):
            row = done.result()
            if "left_out" not in row:
                runs = rows[row["script"], row["arm"]]
                runs.append(row)
                ratios = {f"{key}_x_plain": compare(runs, rows[row["script"], "plain"], key) for key in COMPARED}
                row = {**row, "n": len(pick_times(runs, "late_ms")), **ratios}
            say("first_contact", row)


# -- the table --------------------------------------------------------------------------------------------------------


def summarize(rows: Sequence[dict[str, Any]]) -> str:
    """A Markdown table of medians, with the spread where there are several runs."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        if row.get("what") == "first_contact" and "left_out" not in row:
            groups[row["script"], row["arm"]].append(row)
    head = ["script", "arm", "n", "ended", "process s", "to batch 1 s", "batch 1 to last s", "late ms/batch"]
    table = [[*head, "process x plain", "late x plain", "took", "did not", "one-time s", "first finding", "last loss"]]
    for (script, arm), runs in sorted(groups.items(), key=lambda item: (item[0][0], rank_arm(item[0][1]))):
        table.append([script, arm, str(len(runs)), *describe(runs, groups.get((script, "plain"), []))])
    table.insert(1, ["---"] * len(table[0]))
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in table)


def rank_arm(arm: str) -> int:
    return ARMS.index(arm) if arm in ARMS else len(ARMS)


def describe(runs: Sequence[dict[str, Any]], plain: Sequence[dict[str, Any]]) -> list[str]:
    ended = sorted({"over the limit" if run["over_limit"] else f"exit {run['exit_code']}" for run in runs})
    last = runs[-1]
    causes = {name: value for name, value in (last.get("one_time_s") or {}).items() if value}
    finding = (last.get("findings") or [["", None]])[0]
    loss = next(iter(last.get("metrics") or {}), "")
    return [
        ", ".join(ended),
        *(show_spread(runs, key) for key in ("process_s", "first_batch_s", "first_to_last_s", "late_ms")),
        *(compare(runs, plain, key) for key in COMPARED),
        ", ".join(last.get("took", [])),
        "; ".join(f"{rung}: {why[:60]}" for rung, why in (last.get("skipped", {}) | last.get("untold", {})).items()),
        ", ".join(f"{name} {value:.1f}" for name, value in causes.items()),
        f"{finding[0]}{'' if finding[1] is None else f' {finding[1]:.0f} %'}",
        f"{loss} {last['metrics'][loss]:.4g}" if loss else "",
    ]


def pick_times(runs: Iterable[dict[str, Any]], key: str) -> list[float]:
    """The times of runs that were alone on the machine and trained to their end."""
    found = [run for run in runs if run["timed"] and run.get("finished") and run.get(key) is not None]
    return [run[key] for run in found if key != "process_s" or not run.get("forked")]


def show_spread(runs: Sequence[dict[str, Any]], key: str) -> str:
    found = pick_times(runs, key)
    if not found:
        return "n/a"
    return f"{statistics.median(found):.1f}" + (f" ({min(found):.1f} to {max(found):.1f})" if len(found) > 1 else "")


def compare(runs: Sequence[dict[str, Any]], plain: Sequence[dict[str, Any]], key: str) -> str:
    """How many times the time of plain runs: geometric means, and a 95 % Welch interval from two runs each."""
    ours, theirs = ([math.log(value) for value in pick_times(each, key)] for each in (runs, plain))
    if not ours or not theirs:
        return "n/a"
    ratio = f"{math.exp(statistics.mean(ours) - statistics.mean(theirs)):.2f}"
    if min(len(ours), len(theirs)) < 2 or runs is plain:
        return ratio
    low, high = stats.ttest_ind(ours, theirs, equal_var=False).confidence_interval()
    return f"{ratio} ({math.exp(low):.2f} to {math.exp(high):.2f})"


# -- the command ------------------------------------------------------------------------------------------------------


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scripts", default=",".join(SCRIPTS))
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--size", choices=["tiny", "default"], default="default")
    parser.add_argument("--steps", type=int, help="instead of each script's own")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--data", help="folder of JPEGs, one folder a class; for scripts that take one")
    parser.add_argument(
        "--args", action="append", default=[], metavar="SCRIPT: ARGS", help="more arguments for one script"
    )
    parser.add_argument("--limit", type=float, default=120, help="seconds for one run")
    add_budget(parser)
    parser.add_argument("--parallel", type=int, default=1, help="runs at a time; nothing is timed above 1")
    parser.add_argument("--forked", action="store_true", help="import what the scripts import once for all runs")
    parser.add_argument("--keep", type=Path, help="folder for what the runs write, instead of a temporary one")
    parser.add_argument(
        "--summary", type=Path, nargs="+", help="files of JSON lines; print a table of them, run nothing"
    )
    options = parser.parse_args()
    options.scripts, options.arms = options.scripts.split(","), options.arms.split(",")
    if unknown := set(options.scripts) - set(SCRIPTS):
        parser.error(f"no such script: {', '.join(sorted(unknown))}; there are {', '.join(SCRIPTS)}")
    if "by_hand" in options.arms and (missing := set(options.scripts) - set(BY_HAND)):
        parser.error(f"nobody tuned the loader of: {', '.join(sorted(missing))}")
    options.data = str(Path(options.data).absolute()) if options.data else None
    named = (text.partition(":") for text in options.args)
    options.paths = {}
    options.more = {script.strip(): shlex.split(text) for script, _, text in named}
    return options


def main() -> None:
    options = parse()
    if options.summary:
        lines = [line for path in options.summary for line in path.read_text().splitlines() if line.startswith("{")]
        print(summarize([json.loads(line) for line in lines]))
        return
    if options.forked and not import_ahead(options.scripts):
        raise SystemExit("got --forked\n  why an import of these scripts touches CUDA\n  do  leave it out")
    with contextlib.ExitStack() as stack:
        place = options.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
        run_all(options, place.absolute())


if __name__ == "__main__":
    main()

"""Scripts that strangers wrote, each plain and under fastloop: does it still train, and is it slower in any way?

    python -m benchmarks.first_contact [--scripts gan,bert] [--arms plain,full] [--rounds 2] [--size tiny] [--limit 120]
        [--budget 280] [--steps 80] [--devices 2] [--data DIR] [--args "bert: --steps 40"] [--parallel 1] [--keep DIR]
        [--forked] [--again]
    python -m benchmarks.first_contact --summary lines.jsonl

Every run is a fresh process with a fresh cache: compiled code, remembered failures and passports are those of a first
contact. In each round all scripts and arms take turns, in an order shuffled by the number of the round. Arms: `plain`,
`by_hand` (plain, its loader tuned by hand: `BY_HAND`), `watched` (no rung), or the name of a ladder, a rung or a YAML
file. One JSON line per run:

    process_s        the whole process, imports, compiles and report included
    before_s         from the start of the process to the Trainer's construction
    train_s          from the Trainer's construction to the end of the last batch, which a user waits for
    after_s          from the end of the last batch to the end of the process
    first_batch_s    from the start of training to the end of the first batch, compiles included
    first_to_last_s  from the end of the first batch to the end of the last, the device waited for then
    late_ms          the same per batch over the second half of the batches
    spent_s          seconds of `train_s` by what the main thread was doing, sampled every 5 ms
    took, skipped    rungs that did, and that did not with their reason; untold: nobody could tell
    one_time_s       seconds that no later step pays again, by cause, as fastloop tells them
    said             what fastloop printed
    tail             the end of what the process printed, where it failed
    n, late_x_plain  of this arm so far, and its time by that of plain with a 95 % interval

A callback stamps the end of each batch in all arms alike, by Lightning's entry points as fastloop itself comes in; it
waits for the device once, after the last one. With --parallel above 1 nothing is timed, but faults show sooner. With
--forked what the scripts import is imported once for all runs, which saves up to 17 s each; `process_s` is then n/a.
With --again a script and arm keep one cache: the first round is the first contact, the others are later runs.
"""

from __future__ import annotations

import argparse
import compileall
import concurrent.futures
import contextlib
import json
import math
import random
import shlex
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from scipy import stats

from benchmarks.cases import ROOT, add_budget, say
from benchmarks.foreign_runs import BY_HAND, GRACE_S, LEAST_S, SCRIPTS, Case, import_ahead, make_timer, run_one

ARMS = ("plain", "watched", "safe", "full")
COMPARED = ("process_s", "train_s", "late_ms")


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
        name = f"{case.script}-{Path(case.arm).stem}"
        cache = place / f"cache-{name}" if options.again else None
        row = run_one(case, place / f"{case.round}-{name}", timer, options, limit_s, cache)
        return row | {"earlier_runs": case.round if options.again else 0}

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
    head = [
        "script",
        "arm",
        "n",
        "ended",
        "process s",
        "training s",
        "to batch 1 s",
        "batch 1 to last s",
        "late ms/batch",
    ]
    table = [
        [
            *head,
            "process x plain",
            "training x plain",
            "late x plain",
            "took",
            "did not",
            "one-time s",
            "first finding",
            "last loss",
        ]
    ]
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
        *(show_spread(runs, key) for key in ("process_s", "train_s", "first_batch_s", "first_to_last_s", "late_ms")),
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
    parser.add_argument("--again", action="store_true", help="keep the cache of a script and arm over the rounds")
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
    compileall.compile_dir(ROOT / "fastloop", quiet=1)  # as pip does when it installs
    with contextlib.ExitStack() as stack:
        place = options.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
        run_all(options, place.absolute())


if __name__ == "__main__":
    main()

"""Is the first finding's remedy the best one? Each rung that applies to a stranger's script is switched on by itself.

    python -m benchmarks.counterfactual [--scripts bert,gan] [--rungs amp,fused] [--budget 280] [--size tiny] [--forked]

A watched run says what the findings are, and one with all rungs on says which of them apply at all. Then come the first
finding's own patch, or its advice as a change of the script's text (`ADVICE`), and every single rung, each a fresh
process as in benchmarks/first_contact.py. A line for each run; after each round of a script one with the ranking by the
later batches' time. It `holds` where the remedy's speed is within 20 % of the best single rung's, or where nothing is
named and no rung gains 10 %; null where there is neither a patch nor a change of the text.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from benchmarks.cases import make_parser, say
from benchmarks.first_contact import pick_times
from benchmarks.foreign_runs import (
    GRACE_S,
    LEAST_S,
    SCRIPTS,
    Case,
    find_script,
    import_ahead,
    make_timer,
    rewrite,
    run_one,
)
from fastloop.ladder import collect_cards

REMEDY = "first finding's remedy"
ADVICE: dict[tuple[str, str], tuple[tuple[str, str], ...]] = {
    ("bert", "sync"): ((" + 0.1 * out.loss.item()", " + 0.1 * out.loss.detach()"),),
    ("contrastive", "data_wait"): (("num_workers=0 if tiny else 4", "num_workers=15"),),
    ("gin", "sync"): (
        ("def forward(self, x, edge_index, batch):", "def forward(self, x, edge_index, batch, size):"),
        ("(self.gnn(x, edge_index), batch)", "(self.gnn(x, edge_index), batch, size)"),
        ("self(data.x, data.edge_index, data.batch)", "self(data.x, data.edge_index, data.batch, data.num_graphs)"),
    ),
    ("lstm", "sync"): (
        ("batch_first=True), lengths\n", "batch_first=True), lengths.tolist()\n"),
        ("lengths.cpu()", "lengths"),
        ("lengths - 1", "[length - 1 for length in lengths]"),
    ),
    ("metrics", "sync"): (
        ("        self.log_dict(self.scores(", "        batch_idx % 50 or self.log_dict(self.scores("),
    ),
    ("segmentation", "data_wait"): (("num_workers=workers)", "num_workers=15)"),),
    ("speech", "data_wait"): (("num_workers=2)", "num_workers=15)"),),
}
"""By script and finding: what it advises in words, as replacements in the script's text, everywhere."""
NEAR, GAIN = 0.8, 1.1
LOADERS = ("dali", "nodes")
"""They take the loader's place, which hides what the others would do: tried alone only, and last."""


class Script:
    """One script, and what its runs came to."""

    def __init__(self, name: str, place: Path, options: argparse.Namespace) -> None:
        self.name, self.place, self.options = name, place, options
        self.runs: dict[str, list[dict[str, Any]]] = defaultdict(list)
        self.findings: list[dict[str, Any]] = []

    def follow_advice(self) -> Path | None:
        """A copy of the script that does what the first finding advises in words; None if nobody wrote that down."""
        finding = self.findings[0]["bottleneck"] if self.findings else ""
        changes = ADVICE.get((self.name, finding))
        if changes is None:
            return None
        path = self.place / f"{self.name}.py"
        path.write_text(rewrite(find_script(self.name).read_text(), changes))
        return path

    def run(self, arm: str, number: int, config: str | dict[str, Any]) -> Path | None:
        """A line; the folder of what fastloop wrote, None where the budget has no room."""
        folder = self.place / f"{number}-{self.name}-{arm.replace(' ', '-')}"
        left_s = self.options.until - time.monotonic() - GRACE_S
        if left_s < max((row["process_s"] for row in self.runs["watched"]), default=LEAST_S):
            say("counterfactual", {"script": self.name, "arm": arm, "left_out": f"{max(0, left_s):.0f} s left"})
            return None
        if isinstance(config, dict):
            path = folder.with_suffix(".yaml")
            path.write_text(json.dumps(config))
            config = str(path)
        timer, limit_s = self.place / "timer", min(self.options.limit, left_s)
        row = run_one(Case(self.name, config, number), folder, timer, self.options, limit_s)
        self.runs[arm].append(row | {"finished": row.get("finished") and row["exit_code"] == 0})
        kept = ("exit_code", "process_s", "late_ms", "took", "skipped", "findings", "tail")
        told = {key: row[key] for key in kept if key in row} | {"speed": self.rate(arm), "n": len(self.runs[arm])}
        say("counterfactual", {"script": self.name, "arm": arm, **told})
        return folder / "fastloop"

    def rate(self, arm: str) -> float | None:
        """How many times as fast as watched, by medians; None where either did not train to its end."""
        base, ours = (pick_times(map(add_late, self.runs[name]), "late") for name in ("watched", arm))
        return statistics.median(base) / statistics.median(ours) if base and ours else None

    def compare(self, number: int) -> None:
        """A round of all arms, and the ranking so far."""
        seen = self.run("watched", number, "watched")
        if seen is None or self.rate("watched") is None:
            return
        if number == 0:
            self.findings = json.loads((seen / "findings.json").read_text())["findings"]
        patch = self.findings[0]["patch"] if self.findings else None
        rungs = self.options.rungs.split(",") if self.options.rungs else None
        if rungs is None:
            left_out = {*LOADERS, *self.options.without.split(",")}
            every = {name: {"enabled": True} for name in collect_cards() if name not in left_out}
            tried = list_applying(self.run("all rungs", number, {"rungs": every}))
            rungs = [rung for rung in tried if rung not in self.options.without.split(",")]
        rewritten = None if patch else self.follow_advice()
        arms = {REMEDY: patch or "watched"} if patch or rewritten else {}
        for arm, config in (arms | {rung: {"rungs": {rung: {"enabled": True}}} for rung in rungs}).items():
            self.options.paths = {self.name: rewritten} if arm == REMEDY and rewritten else {}
            if self.run(arm, number, config) is None:
                break
        self.options.paths = {}
        say("counterfactual", {"script": self.name, "round": number, **self.judge(patch)})

    def judge(self, patch: dict[str, Any] | None) -> dict[str, Any]:
        taken = [arm for arm, runs in self.runs.items() if arm in collect_cards() and arm in runs[-1].get("took", [])]
        rates = sorted(((self.rate(arm) or 0.0, arm) for arm in taken), reverse=True)
        best, remedy = rates[0][0] if rates else 1.0, self.rate(REMEDY)
        first = self.findings[0] if self.findings else {"bottleneck": None, "share_pct": None}
        named = first["bottleneck"] != "none"
        holds = best < GAIN if rates and not named else None if remedy is None else remedy >= NEAR * best
        return {
            "finding": first["bottleneck"],
            "share_pct": first["share_pct"],
            "patch": patch,
            "patch_speed": remedy,
            "ranking": [[arm, rate] for rate, arm in rates],
            "all_rungs": self.rate("all rungs"),
            "holds": holds,
        }


def add_late(row: dict[str, Any]) -> dict[str, Any]:
    """A run with the time of all its batches at the pace of the later ones: of merged batches hooks see fewer."""
    return row if row.get("late_ms") is None else row | {"late": row["late_ms"] * row.get("batches", 1)}


def list_applying(folder: Path | None) -> list[str]:
    """Rungs that the plan with all of them on did not refuse; all where there is no such plan."""
    path = folder / "plan.json" if folder is not None else None
    planned = json.loads(path.read_text())["rungs"] if path is not None and path.is_file() else []
    refused = {row["rung"] for row in planned if row["status"] == "skipped"}
    return sorted(set(collect_cards()) - refused, key=lambda rung: (rung in LOADERS, list(collect_cards()).index(rung)))


def main() -> None:
    parser = make_parser(__doc__, rounds=1)
    parser.add_argument("--scripts", default=",".join(SCRIPTS))
    parser.add_argument("--rungs", help="try these alone; default: all that the plan of all rungs does not refuse")
    parser.add_argument("--without", default="", help="rungs that are not tried: compile,dali")
    parser.add_argument("--steps", type=int, help="instead of each script's own")
    parser.add_argument("--limit", type=float, default=120, help="seconds for one run")
    parser.add_argument("--forked", action="store_true", help="import what the scripts import once for all runs")
    options = parser.parse_args()
    if unknown := set(options.scripts.split(",")) - set(SCRIPTS):
        parser.error(f"no such script: {', '.join(sorted(unknown))}; there are {', '.join(SCRIPTS)}")
    options.devices, options.data, options.more, options.parallel, options.paths = 1, None, {}, 1, {}
    if options.forked and not import_ahead(options.scripts.split(",")):
        raise SystemExit("got --forked\n  why an import of these scripts touches CUDA\n  do  leave it out")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        make_timer(Path(folder) / "timer")
        scripts = [Script(name, Path(folder), options) for name in options.scripts.split(",")]
        for number in range(options.rounds):
            for script in scripts:
                script.compare(number)


if __name__ == "__main__":
    main()

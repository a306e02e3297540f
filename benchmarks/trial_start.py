"""Seconds until a trial reaches its script's first line, and until it has imported torch and Lightning.

    python -m benchmarks.trial_start [--rounds 5] [--budget 60]

`forked` is what `ab --script` and `climb --script` do where they can; `executed` is a fresh interpreter. A script that
is run under fastloop is imported by Lightning's entry points, which is in neither. `server_s` is what the process that
forks takes to start, once an experiment. One JSON line each; the rate is seconds until all is imported.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.cases import Case, make_parser, run_cases
from fastloop.experiments.trials import preloaded
from fastloop.experiments.trials.supervise import Limits, supervise
from fastloop.experiments.trials.trial import allow_quick_starts, make_environment

SCRIPT = """
import time
first = time.time()
import json, torch, lightning
print(json.dumps([first, time.time()]))
"""
EXPECTED_S = 5.0


def start_one(forks: bool, folder: Path, _left_s: float) -> dict[str, Any]:
    """A trial of a script that only says when it began."""
    script = folder / "script.py"
    script.write_text(SCRIPT)
    server = preloaded._server
    preloaded._server = server if forks else None
    began = time.time()
    try:
        limits = Limits(total_s=120)
        ended = supervise([sys.executable, str(script)], folder, limits=limits, env=make_environment(os.environ))
    finally:
        preloaded._server = server
    if ended.code != 0:
        raise RuntimeError(ended.cause)
    first, imported = json.loads((folder / "stdout.txt").read_text())
    return {"started": ended.started, "first_line_s": first - began, "imported_s": imported - began}


def main() -> None:
    options = make_parser(__doc__, rounds=5).parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, allow_quick_starts(scripts=True):
        if preloaded._server is not None:
            preloaded._server.greet()
        once_s = time.monotonic() - began
        cases = [Case(name, partial(start_one, name == "forked", Path(folder)), EXPECTED_S) for name in CASES]
        run_cases("trial_start", cases, options, rate="imported_s", server_s=once_s)


CASES = ("forked", "executed")

if __name__ == "__main__":
    main()

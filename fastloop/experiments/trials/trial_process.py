"""The process of one trial, also run by the ranks that Lightning starts.

``python -m fastloop.experiments.trials.trial_process``.

It reads its request from standard input, writes its current step into ``beat``, and answers with the files in its
directory and its exit code. On SIGUSR2 it writes the stacks of all its threads.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fastloop.config.loading import Config
from fastloop.errors import FastLoopError
from fastloop.experiments.trials import supervise
from fastloop.experiments.trials.failures import Failed, explained, is_first_rank
from fastloop.experiments.trials.trial import ANSWER, UNSAVED, Job, TrialRequest
from fastloop.records import store
from fastloop.records.run_files import PlanFile
from fastloop.records.secrets import make_scrubber


def main() -> int:
    """Carry out the request on stdin and return the exit code."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    request = read_request()
    out, job = Path(request.out), request.job
    try:
        config = job.config()
        with explained(config, out):
            answer = make_scrubber(config.values).clean(_do(job, config, out))
    except FastLoopError as error:
        return _end(f"fastloop: {error}", error.exit_code)
    except Failed as failure:
        return _end(str(failure), failure.exit_code)
    if answer is not None and is_first_rank():
        store.write(out, {ANSWER: store.dump({"schema": store.SCHEMA, **answer})})
    return 0


def read_request() -> TrialRequest:
    """Read the request on stdin, with pread, because all ranks share the file and its offset."""
    content = json.loads(os.pread(0, os.fstat(0).st_size, 0))
    os.lseek(0, 0, os.SEEK_END)  # the user's code must find stdin empty
    request = store.decode(content, TrialRequest)
    assert request is not None, content
    return request


def _do(job: Job, config: Config, out: Path) -> Mapping[str, Any] | None:
    # Imported here, so that a wrong key is reported before torch is imported.
    from fastloop.bridge.fit import dry_run
    from fastloop.bridge.trials import ceilings, gradient_probe, loader_alone, work_count

    beat = out / supervise.BEAT
    answering: dict[str, Callable[[], Mapping[str, Any]]] = {
        "rates": work_count.measure_rates,
        "flops": lambda: work_count.count_flops(config, beat),
        "loader": lambda: loader_alone.measure(config, beat, job.counts, job.enough_ms),
        "plan": lambda: store.to_json(PlanFile.of(dry_run.plan_dry(config, weighs_costs=False).plan)),
        "gradients": lambda: gradient_probe.measure(config, out, beat, job.reference),
    }
    if job.variation in answering:
        return answering[job.variation]()
    ceilings.train(
        config,
        out,
        job.variation,
        beat=beat,
        hunt_syncs=job.hunt_syncs,
        ledger=job.ledger,
        further_steps=job.further_steps,
        unsaved=out / UNSAVED,
    )
    return None


def _end(text: str, code: int) -> int:
    if text:
        sys.stderr.write(f"{text}\n")
    return code


if __name__ == "__main__":
    sys.exit(main())

"""The process of one trial: ``python -m fastloop.commands.trial_child``, also run by the ranks that Lightning starts.

It is told what to do on its standard input, writes the step it is at into ``beat``, and answers by the files of its
directory and its exit code. SIGUSR2 makes it write where each of its threads stands.
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

from fastloop.commands import supervise
from fastloop.commands.answer import Failed
from fastloop.commands.run import explained, first_rank
from fastloop.commands.trial import ANSWER, UNSAVED, Job
from fastloop.config import Config
from fastloop.errors import FastLoopError
from fastloop.report import files


def main() -> int:
    """Do what is asked on stdin; the exit code."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    request = asked()
    out, job = Path(request.pop("out")), Job.of(request)
    try:
        config = job.config()
        with explained(config, out):
            answer = _do(job, config, out)
    except FastLoopError as error:
        return _end(f"fastloop: {error}", error.exit_code)
    except Failed as failure:
        return _end(str(failure), failure.exit_code)
    if answer is not None and first_rank():
        files.write(out, {ANSWER: files.dump({"schema": files.SCHEMA, **answer})})
    return 0


def asked() -> dict[str, Any]:
    """The request on stdin. Read by position: the ranks share the file with the first of them."""
    size = os.fstat(0).st_size
    content = json.loads(os.pread(0, size, 0))
    os.lseek(0, 0, os.SEEK_END)  # for the user's code, stdin is empty
    return dict(content)


def _do(job: Job, config: Config, out: Path) -> Mapping[str, Any] | None:
    # Imported here, so that a wrong key is reported before torch is imported.
    from fastloop.bridge import ceilings, counting, dryrun, gradients, loading

    beat = out / supervise.BEAT
    answering: dict[str, Callable[[], Mapping[str, Any]]] = {
        "rates": counting.rates, "flops": lambda: counting.flops(config, beat),
        "loader": lambda: loading.measure(config, beat, job.counts, job.enough_ms),
        "plan": lambda: files.plan_json(dryrun.dry_run(config).plan),
        "gradients": lambda: gradients.measure(config, out, beat, Path(job.reference) if job.reference else None),
    }  # fmt: skip
    if job.variation in answering:
        return answering[job.variation]()
    ceilings.train(config, out, job.variation, beat=beat, hunt_syncs=job.hunt_syncs, ledger=job.ledger,
                   further_steps=job.further_steps, unsaved=out / UNSAVED)  # fmt: skip
    return None


def _end(text: str, code: int) -> int:
    if text:
        sys.stderr.write(f"{text}\n")
    return code


if __name__ == "__main__":
    sys.exit(main())

"""One training of a configuration, in one fresh and supervised process.

The child is ``python -m fastloop.experiments.trials.trial_process``. It reads its request from its standard input, an
unlinked file that every rank can read, so that secrets on the command line reach neither a named file nor the list of
processes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from fastloop.bridge.fail_open import is_disabled
from fastloop.config.loading import Config, load
from fastloop.errors import ConfigError
from fastloop.experiments.trials import preloaded, supervise
from fastloop.experiments.trials.supervise import Limits
from fastloop.records import store
from fastloop.records.measurement import Measurement
from fastloop.records.readings import read_ranks
from fastloop.records.run_files import MEASUREMENT
from fastloop.records.secrets import Scrubber, make_scrubber
from fastloop.records.trial import ANSWERS, Ledger, Trial, TrialAnswer, Variation

CHILD = "fastloop.experiments.trials.trial_process"
TRIAL, ANSWER, UNSAVED = "trial.json", "answer.json", "unsaved"
NAMES = (TRIAL, ANSWER, UNSAVED, supervise.STDOUT, supervise.STDERR, supervise.BEAT)
"""Files that a trial writes into its directory in addition to those of a run."""
UNWRITTEN = "checkpoints outside the run directories were not written, so the time for that is missing"
LOGS = "lightning_logs"
"""Folder of Lightning's default logger in a script's trial directory, see `bridge/trials/script_callback.py`."""
PER_RANK = ("ledger*.json", "gradients*.pt", f"{supervise.BEAT}.*")

_NOT_FOR_CHILDREN = (
    "FASTLOOP_",
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "NODE_RANK",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_",
    "PL_",
)
"""Variables that would make the child a rank of another run, occupy its port, or disable fastloop."""


ONE_PLAIN_STEP = (
    "run.devices=1",
    "run.resume=null",
    "watch.trace_steps=0",
    "trainer.strategy=auto",
    "trainer.num_nodes=1",
    "trainer.accumulate_grad_batches=1",
    "trainer.limit_val_batches=0",
    "trainer.logger=false",
    "trainer.enable_checkpointing=false",
)


@dataclass(frozen=True, kw_only=True)
class Task:
    """The kind of trial, and what it does besides training."""

    variation: Variation = "as_it_is"
    ledger: bool = False
    """Record which samples each optimizer step saw, see `bridge/trials/sample_ledger.py`."""
    reference: Path | None = None
    """For ``gradients``: the directory of the trial to compare with; None if this is that trial."""
    counts: tuple[int, ...] = ()
    """For ``loader``: the worker counts to measure in sequence; empty for the unchanged loader."""
    enough_ms: float | None = None
    """For ``loader``: stop after the first worker count that takes less than this per step."""


@dataclass(frozen=True, kw_only=True)
class Job(Task):
    """What to train. Paths are relative to the working directory."""

    conf: str
    more: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()
    hunt_syncs: bool = False
    """Name the lines of the user's code that wait for the device."""
    further_steps: int = 0
    """Additional optimizer steps after the configured ones, for work that is not timed."""

    def config(self) -> Config:
        """Return the checked configuration; raises ConfigError."""
        return load(self.conf, more=self.more, overrides=self.overrides)

    def override(self, *overrides: str) -> Job:
        """Return the same job with further overrides."""
        return dataclasses.replace(self, overrides=(*self.overrides, *overrides))

    def counted(self) -> Job:
        """Return the job that counts the FLOPs of one sample of this training."""
        return dataclasses.replace(self.override(*ONE_PLAIN_STEP), variation="flops", hunt_syncs=False)


def run_trial(
    name: str, job: Job, run_dir: Path, *, limits: Limits | None = None, progress: Callable[[str], None] | None = None
) -> Trial:
    """Train in a fresh process, to its end or to a limit.

    Args:
        run_dir: for the files of the run and of the trial; files of an earlier one are deleted.
        progress: receives a line every few seconds.

    Raises:
        ConfigError: the configuration cannot be used, or FASTLOOP_DISABLE or a launcher's variables are set.
        KeyboardInterrupt, SystemExit: it was stopped; the training has then ended, with a partial report.
    """
    refuse(os.environ, script=False)
    hide = make_scrubber(job.config().values)
    run_dir.mkdir(parents=True, exist_ok=True)
    clear(run_dir)
    say = None if progress is None else (lambda line: progress(f"{name}: {line}"))
    with _request(job, run_dir) as request:
        ended = supervise.supervise(
            [sys.executable, "-m", CHILD],
            run_dir,
            limits=limits,
            env=make_environment(os.environ),
            stdin=request,
            stacks=True,
            progress=say,
        )
    for name_of_output in (supervise.STDOUT, supervise.STDERR):
        hide_in(run_dir / name_of_output, hide)
    measurement, answer = load_results(run_dir, job.variation)
    cause = ended.cause and quote_error(ended.cause, ended.tail)
    if cause is None and (answer if job.variation in ANSWERS else measurement) is None:
        cause = "it ended without a result"
    cause = cause or describe_dead_rank(run_dir, measurement)
    trial = Trial(
        name=name,
        ok=cause is None,
        cause=cause and hide.text(cause),
        seconds=ended.seconds,
        run_dir=run_dir,
        code=ended.code,
        last_step=ended.last_step,
        started=ended.started,
        tail=hide.text(ended.tail) if cause else "",
        measurement=measurement,
        answer=answer,
        unsaved=(run_dir / UNSAVED).is_file(),
    )
    store.save(run_dir, {TRIAL: trial})
    return trial


def allow_quick_starts(*, scripts: bool = False, script: str | None = None) -> contextlib.AbstractContextManager[None]:
    """Inside this context, trials are forked if possible, from a process that has imported torch, and what the script
    of all trials imports first."""
    path = None if script is None else Path(script)
    return preloaded.quick_starts(make_environment(os.environ), scripts=scripts, script=path)


def hide_in(path: Path, hide: Scrubber) -> None:
    """Remove the known secrets from a command's output."""
    said = path.read_text(encoding="utf-8", errors="surrogateescape")
    if (clean := hide.text(said)) != said:
        path.write_text(clean, encoding="utf-8", errors="surrogateescape")


def load_results(run_dir: Path, variation: Variation) -> tuple[Measurement | None, TrialAnswer | None]:
    """Load a trial's results: the measurement of its run, and its answer if it has one."""
    kind = ANSWERS.get(variation)
    answer = None if kind is None else store.load(run_dir / ANSWER, kind)
    return store.load(run_dir / MEASUREMENT, Measurement), answer


def describe_dead_rank(run_dir: Path, measurement: Measurement | None) -> str | None:
    """Describe which rank's fit did not finish although rank 0's did, and why; None if all finished.

    Each rank sends a record to rank 0 and may write a ledger into the directory. A rank that left neither was killed,
    at the latest once rank 0, which waits for the records, had exited.
    """
    seen = measurement or Measurement()
    ends = {each.rank: each.ended_by for each in read_ranks(seen)}
    steps: dict[int | None, int | None] = {}
    for path in run_dir.glob("ledger*.json"):
        if (ledger := store.load(path, Ledger)) is not None:
            steps[ledger.rank] = ledger.optimizer_steps
            ends[ledger.rank] = (ledger.ended_by or "an exception") if ledger.partial else ends.get(ledger.rank)
    for rank in range(1, seen.world_size):
        if ended_by := ends.get(rank, "it was killed, or hung" if steps else None):
            return f"rank {rank} died in its fit{f' at step {steps[rank]}' if rank in steps else ''}: {ended_by}"
    return None


def forget(run_dir: Path) -> None:
    """Delete the files of a trial without result, and its directory if that is then empty."""
    clear(run_dir)
    with contextlib.suppress(OSError):
        run_dir.rmdir()


def clear(run_dir: Path) -> None:
    """Delete the files that a run and a trial write into a directory."""
    store.clear(run_dir)
    for name in NAMES:
        (run_dir / name).unlink(missing_ok=True)
    for path in (path for pattern in PER_RANK for path in run_dir.glob(pattern)):
        path.unlink(missing_ok=True)
    shutil.rmtree(run_dir / LOGS, ignore_errors=True)


def read_finished(run_dir: Path, variation: Variation = "as_it_is") -> Trial | None:
    """Return the earlier trial in a directory if it finished and was ok; otherwise None."""
    trial = store.load(run_dir / TRIAL, Trial)
    if trial is None or not trial.ok:
        return None
    measurement, answer = load_results(run_dir, variation)
    return dataclasses.replace(trial, run_dir=run_dir, measurement=measurement, answer=answer)


def make_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return a child's variables: it finds the modules of this process, and is not a rank of another run."""
    kept = {name: value for name, value in environ.items() if not name.startswith(_NOT_FOR_CHILDREN)}
    search_path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
    return {**kept, "PYTHONPATH": search_path, "PYTHONSAFEPATH": "1"}


def quote_error(cause: str, tail: str) -> str:
    """Return the cause in the words of our own error in the child, if there is one, without repeated prefixes."""
    cause = cause.replace("fastloop: the run failed: ", "", 1)
    _, *errors = re.split(r"fastloop: got |FastLoopError: got ", tail)
    said = errors[-1].splitlines() if errors else []
    if not cause.startswith("exit code") or len(said) < 2 or not said[1].startswith("  why "):
        return cause
    return f"{said[0]}: {said[1].removeprefix('  why ')}"


def refuse(environ: Mapping[str, str], *, script: bool) -> None:
    """Raise ConfigError if nothing would be measured, or if this process is one rank of several, which must not start
    trials of a `script` or of a recipe.
    """
    if is_disabled(environ):
        raise ConfigError(got="FASTLOOP_DISABLE", why="nothing would be measured", do="unset it for this command")
    if environ.get("WORLD_SIZE", "1") not in ("", "1"):
        how = "and write torchrun into --script" if script else "without torchrun or srun; run.devices sets the ranks"
        raise ConfigError(
            got=f"WORLD_SIZE={environ['WORLD_SIZE']}",
            why="each trial starts its own ranks",
            do=f"run this command once, {how}",
        )


@dataclass(frozen=True, kw_only=True)
class TrialRequest:
    """The request that a child reads from its standard input."""

    job: Job
    out: str
    """The run directory."""


@contextlib.contextmanager
def _request(job: Job, run_dir: Path) -> Iterator[int]:
    """Yield a descriptor from which the child reads its request."""
    with tempfile.TemporaryFile() as file:
        file.write(store.dump(TrialRequest(job=job, out=str(run_dir.absolute())), ascii_only=True).encode())
        file.flush()
        file.seek(0)
        yield file.fileno()

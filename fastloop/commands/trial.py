"""One arm of an experiment: one training of a configuration, in one fresh and supervised process.

The child is ``python -m fastloop.commands.trial_child``. It reads what to do from its standard input, an unlinked file
that every rank can read, so that a secret on the command line reaches neither the disk nor the list of processes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fastloop.commands import supervise
from fastloop.commands.readback import read
from fastloop.commands.supervise import Limits
from fastloop.config import Config, load
from fastloop.errors import ConfigError
from fastloop.report import files
from fastloop.secrets import Scrubber

Variation = Literal["as_it_is", "replayed", "resident", "no_exchange", "flops", "rates", "gradients", "loader", "plan"]
"""What a trial changes: see `bridge/ceilings.py`. From ``flops`` on they answer something else than a measurement."""
ANSWERING = ("flops", "rates", "gradients", "loader", "plan")

CHILD = "fastloop.commands.trial_child"
TRIAL, ANSWER, UNSAVED = "trial.json", "answer.json", "unsaved"
NAMES = (TRIAL, ANSWER, UNSAVED, supervise.STDOUT, supervise.STDERR, supervise.BEAT)
"""What a trial writes into its directory beside the files of a run."""
UNWRITTEN = "checkpoints outside of the run directories were left alone: the time of writing them is missing"
PER_RANK = ("ledger*.json", "gradients*.pt")

_NOT_FOR_CHILDREN = ("FASTLOOP_", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK",
                     "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_", "PL_")  # fmt: skip
"""Variables that would make the child a rank of something else, or take its port, or switch it off."""


ONE_PLAIN_STEP = ("run.devices=1", "run.resume=null", "watch.trace_steps=0", "trainer.strategy=auto",
                  "trainer.num_nodes=1", "trainer.accumulate_grad_batches=1", "trainer.limit_val_batches=0",
                  "trainer.logger=false", "trainer.enable_checkpointing=false")  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Job:
    """What to train. Paths are relative to the working directory."""

    conf: str
    more: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()
    variation: Variation = "as_it_is"
    hunt_syncs: bool = False
    """Name the lines of the user's code at which the device is waited for."""
    further_steps: int = 0
    """Optimizer steps after those of the configuration, for what is not timed."""
    ledger: bool = False
    """Write down which samples each optimizer step saw, see `bridge/ledger.py`."""
    reference: str | None = None
    """Of ``gradients``: the directory of the trial to compare with; None: be that trial."""
    counts: tuple[int, ...] = ()
    """Of ``loader``: numbers of workers to measure one after the other; empty: the loader as it is."""
    enough_ms: float | None = None
    """Of ``loader``: with a number of workers that takes less for a step, it ends."""

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> Job:
        """A job from its JSON."""
        known: dict[str, Any] = dict(content)
        lists = {key: tuple(known.get(key) or ()) for key in ("more", "overrides", "counts")}
        return cls(**{**known, **lists})

    def config(self) -> Config:
        """The checked configuration; raises ConfigError."""
        return load(self.conf, more=self.more, overrides=self.overrides)

    def but(self, *overrides: str, **changes: Any) -> Job:
        """The same with further overrides and changed fields."""
        return dataclasses.replace(self, overrides=(*self.overrides, *overrides), **changes)

    def counted(self) -> Job:
        """The trial that counts the work of one sample of this training."""
        return self.but(*ONE_PLAIN_STEP, variation="flops", hunt_syncs=False)


@dataclass(frozen=True, kw_only=True)
class Trial:
    """How one training went."""

    name: str
    ok: bool
    cause: str | None
    """Why it is not ok, in one line."""
    seconds: float
    run_dir: Path
    code: int
    """Exit code; the negative number of the signal that ended it."""
    last_step: int | None = None
    tail: str = ""
    """The last lines of its stderr; empty where it is ok."""
    measurement: Mapping[str, Any] | None = None
    """What its ``measurement.json`` holds; of a trial that is not ok, it is a part."""
    answer: Mapping[str, Any] | None = None
    """What was asked for besides: the counted work, the measured rates."""
    began: int | None = None
    """The step that a script's fit began at."""
    unsaved: bool = False
    """Whether checkpoint files were left alone, see `bridge/unsaved.py`."""

    @property
    def samples_per_s(self) -> float | None:
        """Only of a whole run."""
        rate = (self.measurement or {}).get("samples_per_s")
        return float(rate) if self.ok and rate else None

    def row(self) -> dict[str, Any]:
        """As it is listed in the JSON of a command; the whole measurement is in its directory."""
        row = dataclasses.asdict(self)
        del row["measurement"], row["answer"]
        short = (self.measurement or {}).get("window_too_short")
        return {**row, "run_dir": str(self.run_dir), "samples_per_s": self.samples_per_s, "window_too_short": short}


def run_trial(name: str, job: Job, run_dir: Path, *, limits: Limits | None = None,
              progress: Callable[[str], None] | None = None) -> Trial:  # fmt: skip
    """Train in a fresh process, to its end or to a limit.

    Args:
        run_dir: for the files of the run and of the trial; what an earlier one left in it is deleted.
        progress: takes a line every few seconds.

    Raises:
        ConfigError: the configuration cannot be used, or FASTLOOP_DISABLE or a launcher's variables are set.
        KeyboardInterrupt, SystemExit: it was stopped; the training has then ended, with a partial report.
    """
    refuse(os.environ, why="each trial starts its own ranks",
           do="run this command once, without torchrun or srun; run.devices sets the ranks")  # fmt: skip
    hide = Scrubber(job.config().values).text
    run_dir.mkdir(parents=True, exist_ok=True)
    clear(run_dir)
    say = None if progress is None else (lambda line: progress(f"{name}: {line}"))
    with _request(job, run_dir) as request:
        ended = supervise.supervise([sys.executable, "-m", CHILD], run_dir, limits=limits, env=environment(os.environ),
                                    stdin=request, stacks=True, progress=say)  # fmt: skip
    measurement, answer = read(run_dir / "measurement.json"), read(run_dir / ANSWER)
    cause = ended.cause and _in_its_words(ended.cause, ended.tail)
    if cause is None and (measurement if job.variation not in ANSWERING else answer) is None:
        cause = "it ended without a result"
    trial = Trial(name=name, ok=cause is None, cause=cause and hide(cause), seconds=ended.seconds, run_dir=run_dir,
                  code=ended.code, last_step=ended.last_step, tail=hide(ended.tail) if cause else "",
                  measurement=measurement, answer=answer, unsaved=(run_dir / UNSAVED).is_file())  # fmt: skip
    files.write(run_dir, {TRIAL: files.dump({"schema": files.SCHEMA, **trial.row()})})
    return trial


def forget(run_dir: Path) -> None:
    """Take away what a trial wrote that could not begin, and its directory if that is then empty."""
    clear(run_dir)
    with contextlib.suppress(OSError):
        run_dir.rmdir()


def clear(run_dir: Path) -> None:
    """Delete what a run and a trial write into a directory."""
    files.clear(run_dir)
    for name in NAMES:
        (run_dir / name).unlink(missing_ok=True)
    for path in (path for pattern in PER_RANK for path in run_dir.glob(pattern)):
        path.unlink(missing_ok=True)


def finished(run_dir: Path) -> Trial | None:
    """A trial of an earlier day, if it came to its end there and was ok."""
    row = read(run_dir / TRIAL)
    if row is None or not row.get("ok"):
        return None
    known = {field.name for field in dataclasses.fields(Trial)}
    return Trial(**{**{key: value for key, value in row.items() if key in known}, "run_dir": run_dir,
                    "measurement": read(run_dir / "measurement.json"),
                    "answer": read(run_dir / ANSWER)})  # fmt: skip


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of a child: it finds what this process finds, and is no part of another run."""
    kept = {name: value for name, value in environ.items() if not name.startswith(_NOT_FOR_CHILDREN)}
    search_path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
    return {**kept, "PYTHONPATH": search_path, "PYTHONSAFEPATH": "1"}


def _in_its_words(cause: str, tail: str) -> str:
    """The cause, or what the child's own error said of it: got X: why."""
    said = tail.rpartition("fastloop: got ")[2].splitlines()
    if not cause.startswith("exit code") or len(said) < 2 or not said[1].startswith("  why "):
        return cause
    return f"{said[0]}: {said[1].removeprefix('  why ')}"


def refuse(environ: Mapping[str, str], *, why: str, do: str) -> None:
    """Raise ConfigError where nothing would be measured, or where this process is one rank of several.

    Args:
        why: this command is no rank's; ``do``: what to write instead.
    """
    if environ.get("FASTLOOP_DISABLE", "") not in ("", "0"):
        raise ConfigError(got="FASTLOOP_DISABLE", why="nothing would be measured", do="unset it for this command")
    if environ.get("WORLD_SIZE", "1") not in ("", "1"):
        raise ConfigError(got=f"WORLD_SIZE={environ['WORLD_SIZE']}", why=why, do=do)


@contextlib.contextmanager
def _request(job: Job, run_dir: Path) -> Iterator[int]:
    """A descriptor that reads as the child's orders."""
    content = {**dataclasses.asdict(job), "out": str(run_dir.absolute())}
    with tempfile.TemporaryFile() as file:
        file.write(json.dumps(content).encode())
        file.flush()
        file.seek(0)
        yield file.fileno()

"""Builds a Trainer from a configuration, and runs one training in this process."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import logging
import os
import re
import sys
import threading
import time
import warnings
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import rank_zero_only, rank_zero_warn

from fastloop.bridge.fit.callback import FastLoop
from fastloop.bridge.fit.recipes import build_recipe
from fastloop.bridge.fit.shutdown import ends
from fastloop.bridge.fit.trainer_arguments import check_trainer_arguments
from fastloop.config.loading import Config, require_checkpoint
from fastloop.config.schema import find_origin, make_fault
from fastloop.errors import ConfigError, FastLoopError
from fastloop.records import store
from fastloop.records.plan import say_duration
from fastloop.records.secrets import Scrubber, make_scrubber

_HINTS = (
    "lightning.pytorch.utilities.rank_zero",
    "lightning.fabric.utilities.rank_zero",
    "pytorch_lightning.utilities.rank_zero",
    "lightning_fabric.utilities.rank_zero",
)
"""Loggers of Lightning's notices. All its namespaces use the one that was imported last."""
_ANSI = re.compile(r"\x1b\[[0-9;]*m")


@rank_zero_only
def _write_line(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


class ProgressLines(Callback):
    """Prints a line every few seconds, later every minute, for logs and pipes, where a bar would print control codes.

    Args:
        read_once_s: returns the seconds spent so far on one-time costs, which later steps do not pay again.
    """

    FIRST_S, EVERY_S, AT_MOST_S = 2.0, 5.0, 60.0

    def __init__(self, read_once_s: Callable[[], float] = float) -> None:
        self._read_once_s = read_once_s
        self._began_s = self._latest_s = 0.0
        self._start: threading.Timer | None = None
        """Says that the first batch takes long."""
        self._lines: deque[tuple[float, int]] = deque(maxlen=6)
        """Time without one-time costs, and optimizer steps, at the last lines; starts after the first batch."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.is_global_zero:
            begins = f"step {trainer.global_step} of {trainer.max_steps} (the first steps may compile)"
            self._start = threading.Timer(self.FIRST_S, _write_line, [begins])
            self._start.daemon = True
            self._start.start()

    def teardown(self, *_: Any, **__: Any) -> None:
        if self._start is not None:
            self._start.cancel()

    on_exception = teardown

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        now, done = time.monotonic(), trainer.global_step
        if not self._lines:
            self.teardown()
            self._began_s = self._latest_s = now
            self._lines.append((now - self._read_once_s(), done))
        least_s = self.FIRST_S if len(self._lines) == 1 else self.EVERY_S
        pause_s = min(self.AT_MOST_S, max(least_s, (now - self._began_s) / 10))
        if now - self._latest_s < pause_s or not trainer.is_global_zero:
            return
        if done <= self._lines[-1][1]:  # one step of several batches takes this long
            self._latest_s = now
            _write_line(f"step {done} of {trainer.max_steps}, batch {batch_idx + 1} of the epoch")
            return
        self._latest_s, (first_s, first) = now, self._lines[0]
        self._lines.append((now - self._read_once_s(), done))
        took_s = max(0.0, self._lines[-1][0] - first_s)  # a cost may become known late
        left_s = took_s / (done - first) * (trainer.max_steps - done)
        _write_line(f"step {done} of {trainer.max_steps}, about {say_duration(left_s)} left")


class RunLogger(CSVLogger):
    """Writes logged values and hyperparameters to files in the run directory, with secrets masked. If that fails, it
    warns once, and the training goes on."""

    def __init__(self, out: Path, hide: Scrubber) -> None:
        super().__init__(out, name="", version="")
        self._hide, self._failed = hide, False

    def log_hyperparams(self, params: dict[str, Any] | Namespace | None = None) -> None:
        given = vars(params) if isinstance(params, Namespace) else params or {}
        super().log_hyperparams(self._hide.scrub({name: _to_mapping(value) for name, value in given.items()}))

    @rank_zero_only
    def save(self) -> None:
        try:
            super().save()
        except OSError as error:
            if not self._failed:
                rank_zero_warn(f"fastloop: logged values could not be written to {self.log_dir}: {error}")
            self._failed = True


def _to_mapping(value: Any) -> Any:
    """Convert a recipe's settings to a mapping, so that secrets in them are found by their keys."""
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else value


def make_trainer(config: Config, loop: FastLoop | None, out: Path | None) -> pl.Trainer:
    """Create the Trainer that a configuration describes, with `loop` as a callback and its files below `out`.

    Raises:
        ConfigError: Lightning refuses a key or value under ``trainer`` or ``run``, or there are too few devices.
    """
    check_trainer_arguments(config)
    _check_devices(config)
    bar = _is_terminal()
    defaults: dict[str, Any] = {
        "max_epochs": -1,
        "num_sanity_val_steps": 0,
        "default_root_dir": out,
        "logger": RunLogger(out, make_scrubber(config.values)) if out is not None else False,
        "enable_progress_bar": bar,
        "enable_model_summary": bar,
    }
    if config.trainer.get("barebones"):  # the Trainer then refuses the other defaults
        defaults = {"max_epochs": -1, "default_root_dir": out}
    settings = {**defaults, **config.trainer}
    callbacks: list[Callback] = [loop] if loop is not None else []
    if not settings.get("enable_progress_bar"):
        callbacks.append(ProgressLines(float if loop is None else lambda: loop.spent_once_s))
    try:
        return pl.Trainer(
            max_steps=config.run.max_steps,
            devices=config.run.devices,
            callbacks=callbacks,
            accelerator=config.run.accelerator,
            **settings,
        )
    except (MisconfigurationException, ValueError, TypeError, ImportError) as error:
        raise _explain_refusal(config, error) from error


def _is_terminal() -> bool:
    """Whether the output is a terminal that can show a progress bar. Lightning draws it on stdout."""
    streams = [stream for stream in (sys.stdout, sys.stderr) if stream is not None and stream.isatty()]
    return len(streams) == 2 and os.environ.get("TERM") != "dumb"


def _check_devices(config: Config) -> None:
    wanted, visible, accelerator = config.run.devices, torch.cuda.device_count(), config.run.accelerator
    on_cuda = accelerator == "cuda" or (accelerator == "gpu" and not torch.backends.mps.is_available())
    if (on_cuda or (accelerator == "auto" and visible)) and wanted > visible:
        why = f"{visible} CUDA devices are visible here"
        if not visible:
            do = "write run.accelerator: cpu, or check CUDA_VISIBLE_DEVICES"
            raise make_fault("run.accelerator", config.origins["run.accelerator"], why, do, value=accelerator)
        do = f"write at most {visible}, or check CUDA_VISIBLE_DEVICES"
        raise make_fault("run.devices", config.origins["run.devices"], why, do, value=wanted)


def _explain_refusal(config: Config, error: Exception) -> ConfigError:
    """Report Lightning's complaint about its arguments at the key that it names."""
    message = " ".join(str(error).split())
    keys = [*(f"trainer.{name}" for name in config.trainer), "run.accelerator", "run.devices"]
    key = next((key for key in keys if re.search(rf"\b{key.partition('.')[2]}\b", message, re.IGNORECASE)), None)
    if key is None:
        first = next(iter(config.trainer), None)
        place = "" if first is None else f" ({find_origin(f'trainer.{first}', config.origins)} and below)"
        return ConfigError(
            got=f"trainer: {', '.join(config.trainer)}{place}",
            why=f"Lightning rejects one of these: {message}",
            do="write another value, or delete the line",
        )
    section, _, name = key.partition(".")
    value = (config.trainer if section == "trainer" else vars(config.run))[name]
    return make_fault(
        key,
        find_origin(key, config.origins),
        f"Lightning rejects it: {message}",
        "write another value, or delete the line",
        value=value,
    )


def train(
    config: Config,
    out: Path | None,
    *,
    trust_checkpoint: bool = False,
    prepare: Callable[[pl.Trainer, FastLoop], None] | None = None,
) -> FastLoop:
    """Train a recipe in this process; the returned callback holds plan, measurement, verdicts and findings.

    Args:
        out: the run directory, None to write nothing. Files of an earlier run in it are deleted before the first step.
        trust_checkpoint: load ``run.resume`` even if it holds more than tensors and plain values, which runs code.
        prepare: called right before the fit, in every rank, to make a trial's changes (`ceilings.py`).

    Raises:
        ConfigError: the configuration cannot be trained.
        FastLoopError: the training made no optimizer step.
        KeyboardInterrupt: the user stopped it.
        SystemExit: 143, it was terminated.
    """
    _check_checkpoint(config, trust_checkpoint)
    with quiet():
        pl.seed_everything(config.run.seed, verbose=False)
        module, data = build_recipe(config)
        loop = FastLoop.of(config, out=out, quiet=True)
        loop.say = _write_line
        trainer = make_trainer(config, loop, out)
        resume: dict[str, Any] = {} if config.run.resume is None else {"ckpt_path": config.run.resume}
        if resume and "weights_only" in inspect.signature(trainer.fit).parameters:
            # Lightning has this argument from 2.6 on. Older versions load everything; the file was checked above.
            resume["weights_only"] = not trust_checkpoint
        if out is not None:
            rank_zero_only(store.clear)(out)
        if prepare is not None:
            prepare(trainer, loop)
        with ends(trainer):
            trainer.fit(module, datamodule=data, **resume)
    if not trainer.global_step:
        raise make_no_batches_error("a training of 0 optimizer steps")
    return loop


def make_no_batches_error(got: str) -> FastLoopError:
    """Return the error for a loader without batches, which Lightning treats as a successful training."""
    return FastLoopError(
        got=got,
        why="there is nothing to train on",
        do="check for an empty dataset, drop_last with a batch larger than the dataset, or"
        " trainer.limit_train_batches: 0",
    )


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hide Lightning's notices, and its warnings about things that we report ourselves."""
    loggers = [logging.getLogger(name) for name in _HINTS]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore",
                message=r".*(does not have many workers|log_every_n_steps|LeafSpec)",
                module=r"(lightning|pytorch_lightning)\..*",
            )
            yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)


def _check_checkpoint(config: Config, trusted: bool) -> None:
    path = require_checkpoint(config)
    if path is None or trusted:
        return
    try:
        torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        # torch names the class that it refused at the end of a long, colored message.
        refused = re.search(r"Unsupported (?:global|class|operand)[^\n]*?(?:\.\s|\n|$)", str(error))
        why = refused[0].strip() if refused else f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        raise ConfigError(
            got=f"run.resume: {path} ({config.origins['run.resume']})",
            why=f"it holds more than tensors and plain values: {_ANSI.sub('', why)}",
            key="run.resume",
            do="if you made this file yourself, fastloop run … --trust-checkpoint loads it, which runs code from it",
        ) from None

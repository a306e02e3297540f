"""From a configuration to a Trainer, and one training in this process."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import logging
import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger

from fastloop.bridge import survey
from fastloop.bridge.callback import FastLoop
from fastloop.bridge.recipe import build_recipe
from fastloop.config import Config
from fastloop.errors import ConfigError
from fastloop.feeds.tree import tensors
from fastloop.ladder import plan
from fastloop.records import Facts, Plan
from fastloop.schema import fault


class ProgressLines(Callback):
    """A line every few seconds, for logs and pipes, where a progress bar would be control codes."""

    EVERY_S = 5.0

    def __init__(self) -> None:
        self._begun = self._last = time.monotonic()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        now = time.monotonic()
        if now - self._last >= self.EVERY_S and trainer.is_global_zero:
            self._last = now
            done, most = trainer.global_step, trainer.max_steps
            left = (now - self._begun) / max(1, done) * (most - done)
            sys.stderr.write(f"step {done} of {most}, about {left:.0f} s left\n")
            sys.stderr.flush()


def make_trainer(config: Config, loop: FastLoop | None, out: Path | None) -> pl.Trainer:
    """The Trainer a configuration describes, with `loop` in it and its files below `out`.

    Raises:
        ConfigError: an unknown key under ``trainer``, or more devices than there are.
    """
    known = inspect.signature(pl.Trainer).parameters
    for key in config.trainer:
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1)
            raise fault(f"trainer.{key}", config.origins[_leaf(config, f"trainer.{key}")],
                        "Lightning's Trainer takes no such argument",
                        f"write {close[0]}" if close else "see lightning.pytorch.Trainer for its arguments")  # fmt: skip
    _check_devices(config)
    shown = sys.stderr.isatty()
    defaults: dict[str, Any] = {
        "enable_progress_bar": shown, "max_epochs": -1, "enable_model_summary": shown,
        "logger": CSVLogger(out, name="", version="") if out is not None else False,
        "default_root_dir": out, "num_sanity_val_steps": 0,
    }  # fmt: skip
    settings = {**defaults, **config.trainer}
    callbacks: list[Callback] = [loop] if loop is not None else []
    if not settings["enable_progress_bar"]:
        callbacks.append(ProgressLines())
    return pl.Trainer(max_steps=config.run.max_steps, devices=config.run.devices, accelerator=config.run.accelerator,
                      callbacks=callbacks, **settings)  # fmt: skip


def _leaf(config: Config, key: str) -> str:
    """The first leaf at or below a key: origins are kept by leaf."""
    return next(leaf for leaf in config.origins if leaf == key or leaf.startswith(f"{key}."))


def _check_devices(config: Config) -> None:
    wanted, visible = config.run.devices, torch.cuda.device_count()
    on_gpu = config.run.accelerator in ("gpu", "cuda") or (config.run.accelerator == "auto" and visible > 0)
    if on_gpu and wanted > visible:
        raise fault("run.devices", config.origins["run.devices"], f"{visible} CUDA devices are visible here",
                    f"write at most {visible}, or look at CUDA_VISIBLE_DEVICES" if visible else "write run.accelerator: cpu",
                    value=wanted)  # fmt: skip


def train(config: Config, out: Path | None, *, trust_checkpoint: bool = False) -> FastLoop:
    """Train a recipe in this process; the callback then holds plan, measurement, verdicts and findings.

    Args:
        out: the run directory, None to write nothing.
        trust_checkpoint: load ``run.resume`` even if it holds more than tensors and plain values, which runs code.

    Raises:
        ConfigError: the configuration cannot be trained.
        KeyboardInterrupt: the user stopped it (Lightning itself exits with 1).
    """
    if config.run.resume is not None and not trust_checkpoint:
        _check_checkpoint(config)
    _quieten()
    pl.seed_everything(config.run.seed, verbose=False)
    module, data = build_recipe(config)
    loop = FastLoop.of(config, out=out, quiet=True)
    trainer = make_trainer(config, loop, out)
    # Lightning 2.6 can be told; before, torch.load's own default decided, and the file was checked above.
    weights_only: dict[str, Any] = {"weights_only": not trust_checkpoint} if "weights_only" in inspect.signature(trainer.fit).parameters else {}
    resume: dict[str, Any] = {"ckpt_path": config.run.resume, **weights_only} if config.run.resume is not None else {}
    try:
        trainer.fit(module, datamodule=data, **resume)
    except SystemExit:
        if trainer.interrupted and not trainer.received_sigterm:
            raise KeyboardInterrupt from None
        raise
    return loop


def _quieten() -> None:
    """Keep Lightning's hints and its own deprecation warnings out of a report that has to be read."""
    logging.getLogger("lightning.pytorch.utilities.rank_zero").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", module=r"lightning\..*", message=r".*(does not have many workers|LeafSpec|log_every_n)")


def _check_checkpoint(config: Config) -> None:
    path = Path(str(config.run.resume))
    origin = config.origins["run.resume"]
    if not path.is_file():
        raise fault("run.resume", origin, "there is no such file", "write the path of a checkpoint", value=str(path))
    try:
        torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        reason = str(error).strip().splitlines()[0][:200]
        raise fault("run.resume", origin, f"it does not load as tensors and plain values: {reason}",
                    "if you made this file yourself, add --trust-checkpoint; loading it then runs code from it",
                    value=str(path)) from None  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class DryRun:
    """What a configuration would do, without training."""

    plan: Plan
    facts: Facts
    samples_per_step: int | None
    """All ranks and accumulated batches together."""
    bytes_in_flight: int | None
    """Batches that workers and device feed hold ready, in bytes of one rank, as far as a first sample tells."""


def dry_run(config: Config) -> DryRun:
    """Build the recipe and its Trainer, look at one sample, and plan. Trains nothing, writes no files.

    Raises:
        ConfigError: as `train`, and under ``strict`` where a rung cannot apply.
    """
    _quieten()
    pl.seed_everything(config.run.seed, verbose=False)
    module, data = build_recipe(config)
    trainer = make_trainer(config, None, None)
    trainer.strategy.connect(module)
    data.trainer = trainer
    data.prepare_data()
    data.setup("fit")
    loader = data.train_dataloader()
    loader_facts = survey.loader_facts(loader)
    size = sum(tensor.nbytes for tensor in tensors(loader.dataset[0])) if loader_facts.map_style else None
    facts = dataclasses.replace(survey.run_facts(trainer, trainer.strategy),
                                loader=dataclasses.replace(loader_facts, sample_bytes=size))  # fmt: skip
    made = plan(config.ladder, facts)
    for step in made.steps:
        if config.strict and step.status == "skipped":
            raise ConfigError(got=f"rungs.{step.rung} under strict: true", why=step.reason or "it cannot apply",
                              do=f"write rungs.{step.rung}.enabled: false, or strict: false")  # fmt: skip
    samples = facts.loader.batch_size if facts.loader else None
    return DryRun(plan=made, facts=facts, bytes_in_flight=_in_flight(made, facts),
                  samples_per_step=samples * facts.accumulate * facts.world_size if samples else None)  # fmt: skip


def _in_flight(made: Plan, facts: Facts) -> int | None:
    loader, wants = facts.loader, made.wants
    if loader is None or loader.sample_bytes is None or loader.batch_size is None:
        return None
    workers = wants.get("loader.num_workers", loader.num_workers)
    batches = workers * wants.get("loader.prefetch_factor", 2) + wants.get("feed.depth", 0) + 1
    return int(loader.sample_bytes * loader.batch_size * wants.get("loader.window", 1) * batches)



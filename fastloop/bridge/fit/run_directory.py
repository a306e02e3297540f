"""Chooses the directory for a fit's files, and writes them."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from lightning.pytorch.utilities import rank_zero_warn

from fastloop import diagnose
from fastloop.config.loading import Config, list_changes, to_yaml
from fastloop.config.shipped import find_shipped
from fastloop.evidence import machine
from fastloop.ladder import collect_cards, list_left_out
from fastloop.records import store
from fastloop.records.measurement import Measurement
from fastloop.records.plan import Finding, Plan, Verdict
from fastloop.records.run_files import MEASUREMENT
from fastloop.records.secrets import MASK, make_scrubber
from fastloop.records.yaml_text import dump_yaml
from fastloop.report.run import files


class WatchedFit(Protocol):
    """The attributes of a FastLoop after its fit."""

    config: Config
    plan: Plan
    measurement: Measurement | None
    verdicts: tuple[Verdict, ...]
    findings: tuple[Finding, ...]
    report_extras: Mapping[str, Any]
    unwritten: str | None
    out: Path | None
    run_dir: Path | None


def choose_directory(trainer: Any, out: Path | None) -> Path | None:
    """Return `out`, or a new path below it if it holds the report of an experiment.

    Without `out`, it is a new path below the first logger's local directory; None if there is no such directory, and in
    fast_dev_run or barebones.
    """
    if out is None:
        if trainer.fast_dev_run or trainer.barebones or not trainer.loggers:
            return None
        # Not trainer.log_dir, which broadcasts between ranks.
        logger = trainer.loggers[0]
        base = getattr(logger, "log_dir", None) or logger.save_dir
        if not base or "://" in str(base):
            return None
    elif any(store.is_file(out / name) for name in store.EXPERIMENTS) and store.report_in(out) is not None:
        base = out
    else:
        return out
    first = Path(base) / "fastloop" / store.format_utc()
    later = (first.with_name(f"{first.name}-{count}") for count in itertools.count(2))  # two fits in one second
    return first if not first.exists() else next(path for path in later if not path.exists())


def describe_report(trainer: Any, loop: WatchedFit) -> str:
    """Return the report's path, and why it is not in `out`; or why there is no report."""
    if loop.run_dir is not None:
        elsewhere = "" if loop.out in (None, loop.run_dir) else f"   ({loop.out} holds the report of an experiment)"
        return f"{store.report_in(loop.run_dir)}{elsewhere}"
    if loop.unwritten is not None:
        place = loop.out or (choose_directory(trainer, None) or Path()).parent
        return f"none: {place} cannot be written: {loop.unwritten}; write FastLoop(out=DIR) with another folder"
    if trainer.fast_dev_run or trainer.barebones:
        return f"none: in {'fast_dev_run' if trainer.fast_dev_run else 'barebones'} nothing is written without out=DIR"
    why = "the logger has no local directory" if trainer.loggers else "the Trainer has no logger"
    return f"none: {why}; write FastLoop(out=DIR)"


def choose_report_extras(loop: WatchedFit, module: Any) -> dict[str, Any]:
    """Return what a report contains besides the records: ``name``, ``then`` and ``later``, see `summary.write_lines`.

    The name is that of the script that a command runs, or of a configuration with a recipe, else the model's class.
    """
    config, seen = loop.config, loop.measurement
    enabled = config.ladder.enabled()
    then, later = ((), ()) if seen is None else diagnose.list_next_steps(loop.findings, seen, collect_cards(), enabled)
    name = config.script or (config.name if config.recipe_file else type(module).__name__)
    return {"name": name, "then": then, "later": later}


def write(where: Path, loop: WatchedFit) -> bool:
    """Write the run's files, the measurement first; returns whether that worked. If not, a warning and `unwritten` say
    why, and the training goes on."""
    if loop.measurement is None:
        return False
    hide = make_scrubber(loop.config.values)
    environment = hide.scrub(machine.read_environment(sys.argv, os.environ))
    environment |= {"torch_flags": read_torch_flags(), "name": loop.report_extras["name"]}
    contents = files.run_files(
        config_yaml=dump_resolved(loop.config, where),
        changed_yaml=dump_yaml(list_changes(loop.config)),
        env_json=store.dump(environment),
        plan=hide.clean(loop.plan),
        seen=hide.clean(loop.measurement),
        verdicts=hide.clean(loop.verdicts),
        findings=hide.clean(loop.findings),
        left_out=list_left_out(loop.config.ladder),
        **hide.clean(loop.report_extras),
    )
    try:
        store.write(where, {MEASUREMENT: contents[MEASUREMENT], **contents})
    except OSError as error:
        loop.unwritten = str(error.strerror or error)
        rank_zero_warn(f"fastloop: the run's files could not be written to {where}: {error}")
        return False
    return True


def dump_resolved(config: Config, where: Path) -> str:
    """Return all values as YAML for ``fastloop run``, with the recipe, if there is one, as the base."""
    text = to_yaml(config)
    if MASK in text:
        text = f"# {MASK} replaces a secret: pass it again on the command line\n{text}"
    return text if (base := _find_base(config, where)) is None else dump_yaml({"base": base}) + text


def _find_base(config: Config, where: Path) -> str | None:
    """Return the recipe's name if it is shipped, else the relative path to its YAML; None without a recipe."""
    if config.recipe_file is None:
        return None
    for name, path in find_shipped("recipes").items():
        if path.with_suffix(".py") == config.recipe_file:
            return name
    beside = [config.recipe_file.with_suffix(suffix) for suffix in (".yaml", ".yml")]
    return os.path.relpath(next(path for path in beside if path.is_file()), where)


def read_torch_flags() -> dict[str, Any]:
    """Read the flags of this process that change float32 results, to explain differences between runs."""
    backends: Any = torch.backends
    return {
        "float32_matmul_precision": _read_flag(torch.get_float32_matmul_precision),
        "cuda_matmul_fp32_precision": _read_flag(lambda: backends.cuda.matmul.fp32_precision),
        "cudnn_allow_tf32": _read_flag(lambda: backends.cudnn.allow_tf32),
        "cudnn_benchmark": backends.cudnn.benchmark,
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
    }


def _read_flag(read: Callable[[], Any]) -> Any:
    """Read a flag; None if this torch does not have it, or if the user set it by its other name (torch 2.9)."""
    try:
        return read()
    except (AttributeError, RuntimeError):
        return None

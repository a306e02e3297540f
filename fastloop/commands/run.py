"""fastloop run and fastloop plan: train a configuration, or say what it would do."""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path

from fastloop.commands.answer import Answer, Failed
from fastloop.commands.outdir import Place, claim, unclaimed
from fastloop.commands.recipe_keys import check_recipe_keys
from fastloop.config import Config, load
from fastloop.errors import FastLoopError
from fastloop.records import Plan
from fastloop.report import files, summary
from fastloop.secrets import Scrubber

_RANKS = ("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "SLURM_PROCID")


def run(conf: str, *, more: Sequence[str], overrides: Sequence[str], out: str | None, force: bool,
        trust_checkpoint: bool) -> Answer:  # fmt: skip
    """Train, watch, verify, diagnose.

    Raises:
        ConfigError: nothing was trained, because of the configuration or the command line.
        Failed: the training raised or was stopped.
    """
    config = load(conf, more=more, overrides=overrides)
    check_recipe_keys(config)
    place = claim(config.name, out, force=force) if first_rank() else Place(unclaimed(config.name, out))
    try:
        with explained(config, place.path):
            from fastloop.bridge.training import train  # here, so that a wrong key is reported before torch is imported

            loop = train(config, place.path, trust_checkpoint=trust_checkpoint)
    finally:
        place.give_back()
    if not first_rank():
        return Answer(text="")
    if loop.measurement is None:
        return Answer(text="fastloop: FASTLOOP_DISABLE is set; this was a plain training, and nothing was measured",
                      json=files.run_json(str(place.path)))  # fmt: skip
    content = files.run_json(
        str(place.path), plan=files.plan_json(loop.plan), measurement=files.measurement_json(loop.measurement),
        verdicts=files.verdicts_json(loop.verdicts), findings=files.findings_json(loop.findings),
    )  # fmt: skip
    report = files.report_in(place.path)
    lines = summary.lines(loop.measurement, loop.plan, loop.verdicts, loop.findings, report, **loop.words)
    return Answer(text="\n".join(lines), json=content)


def first_rank() -> bool:
    """Whether this process is the one that speaks: the further ranks are started with this very command."""
    return all(os.environ.get(name, "0") in ("0", "") for name in _RANKS)


@contextlib.contextmanager
def explained(config: Config, where: Path) -> Iterator[None]:
    """End a training that raised or was stopped with what happened and where the part before it is; no secret in it."""
    hide = Scrubber(config.values).text
    report = where / "report.md"
    before = _written(report)

    def partial() -> str:
        new = _written(report) not in (None, before)
        return f"; the steps before that are in {report}, flagged as partial" if new else ""

    try:
        yield
    except FastLoopError as error:
        raise type(error)(got=hide(error.got), why=hide(error.why), do=hide(error.do), key=error.key) from None
    except KeyboardInterrupt:
        raise Failed(f"fastloop: interrupted{partial()}" if first_rank() else "", exit_code=130) from None
    except SystemExit as error:
        if error.code != 143:  # the user's own
            raise
        raise Failed(f"fastloop: terminated{partial()}" if first_rank() else "", exit_code=143) from None
    except Exception as error:
        told = "".join(traceback.format_exception(error)).rstrip("\n")
        last = f"fastloop: the run failed: {type(error).__name__}: {error}{partial()}"
        raise Failed(hide(f"{told}\n{last}")) from None


def _written(path: Path) -> int | None:
    return path.stat().st_mtime_ns if path.is_file() else None


def plan(conf: str, *, more: Sequence[str], overrides: Sequence[str]) -> Answer:
    """A dry run: what each rung would do; trains nothing."""
    config = load(conf, more=more, overrides=overrides)
    check_recipe_keys(config)
    with explained(config, Path(os.devnull)):
        from fastloop.bridge.dryrun import dry_run

        dry = dry_run(config)
    facts, batches, flight = dry.facts, dry.batches_in_flight, dry.bytes_in_flight
    size = facts.loader.batch_size if facts.loader else None
    head = [
        f"{config.name}: {facts.world_size}x {facts.device_name or facts.device}, {facts.strategy}, {facts.precision},"
        f" {facts.cpu_count} CPUs usable",
        f"samples per optimizer step: {summary.number(dry.samples_per_step, ',d')}"
        f" (batch {summary.number(size, 'd')} x accumulate {facts.accumulate} x {facts.world_size} ranks)",
        f"batches in flight: {summary.number(batches, 'd')} per rank,"
        f" {summary.number(None if flight is None else flight / 2**20)} MiB",
        f"parity class of the plan: {dry.plan.parity}",
    ]  # fmt: skip
    content = {**files.plan_json(dry.plan), "run_dir": None, "samples_per_step": dry.samples_per_step,
               "batches_in_flight": batches, "bytes_in_flight": flight}  # fmt: skip
    return Answer(text="\n".join([*head, "", *plan_lines(dry.plan)]), json=content)


def plan_lines(made: Plan) -> list[str]:
    """One block per enabled rung: what it would set, what to know, or why it would not apply."""
    if not made.steps:
        return ["no rung is switched on; try --config safe"]
    lines = []
    for step in made.steps:
        wants = [f"{key}={value}" for key, value in step.change.wants.items()]
        wants += [key for action in step.change.actions for key in action.keys]
        planned = step.status == "planned"
        does = f"{', '.join(wants)}  [{step.change.parity}]" if planned else step.reason
        lines.append(f"{step.status:<8} {step.rung:<9} {does}")
        lines += [f"{'':<18} note: {note}" for note in step.change.notes]
    return lines

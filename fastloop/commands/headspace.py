"""fastloop headspace: how fast a training would be without data loading, copies, or gradient exchange.

Each figure comes from a separate training in a fresh process. They are ceilings, each from one run: the most that a
change can gain, not a proof that any change gains it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from fastloop.commands import rerun
from fastloop.commands.config import check_without_torch
from fastloop.commands.console import WATCHED, Answer, Request, attaching
from fastloop.config.loading import Config
from fastloop.config.shipped import OF_RUN
from fastloop.errors import ConfigError
from fastloop.experiments.ab.arms import Progress
from fastloop.experiments.trials.failures import make_failure, writing
from fastloop.experiments.trials.run_directories import claim
from fastloop.experiments.trials.supervise import Limits
from fastloop.experiments.trials.trial import Job, allow_quick_starts, forget, run_trial
from fastloop.numbers import format_short
from fastloop.records import store
from fastloop.records.measurement import CEILINGS, DISTURBED
from fastloop.records.plan import say_duration
from fastloop.records.readings import is_beyond
from fastloop.records.trial import Trial, Variation

NAME = "headspace.json"
FIRST, LAST = "baseline", "baseline-again"
WORTH_PCT = 3.0
"""A smaller gain counts as nothing to gain."""
TOO_FAST = "faster than the unchanged run's timings allow: one of the two runs was disturbed"
TOO_SLOW = "slower than the unchanged run: something else on this machine disturbed it"
BELOW_REPLAYED = "slower than with replayed batches, which do more work: one of the two runs was disturbed"
DOUBTS = (TOO_FAST, TOO_SLOW, BELOW_REPLAYED)
FREE = {
    "replayed": "data were free",
    "resident": "data and copies were free",
    "no_exchange": "data and the exchange were free",
}
FAMILY = {"replayed": "data", "resident": "data and copies", "no_exchange": "data and exchange"}


# -- ``headspace.json``; None = unknown --------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """The unchanged training, before and after the other trials."""

    samples_per_s: float | None = None
    """The geometric mean of both runs."""
    runs: tuple[float, ...] = ()
    """Samples per second of each run."""
    drift_pct: float | None = None
    """How much faster the second run was than the first."""
    window_too_short: bool = False
    why: str | None = None
    """Why one of the runs failed."""

    @property
    def noise(self) -> float:
        """The faster run divided by the slower one: a ratio below it may be noise. 1 if only one was measured."""
        return max(self.runs) / min(self.runs) if self.runs else 1.0


@dataclass(frozen=True, kw_only=True)
class Ceiling:
    """The rate without loading (``replayed``), without loading and copies (``resident``), or without loading and
    gradient exchange (``no_exchange``)."""

    samples_per_s: float | None = None
    ratio: float | None = None
    """Relative to the baseline. The ratio of ``no_exchange`` to ``replayed`` is the cost of the exchange alone."""
    why: str | None = None
    """Why there is no ceiling, or a reason to doubt it."""


@dataclass(frozen=True, kw_only=True)
class CeilingsFile:
    """``headspace.json``."""

    schema: ClassVar[int] = store.SCHEMA

    run_dir: str
    baseline: Baseline
    ceilings: Mapping[str, Ceiling] = field(default_factory=dict)
    trials: tuple[Trial, ...] = ()
    """In the order they ran."""


# -- the command ------------------------------------------------------------------------------------------------------


def headspace(conf: str, asked: Request, progress: Progress) -> Answer:
    """Measure a configuration unchanged and with costs removed.

    Raises:
        ConfigError: nothing was trained, because of the configuration or the command line.
        Failed: the unchanged training failed.
        FastLoopError: the run directory can no longer be written.
    """
    if rerun.is_run(conf):
        raise _refuse_run(Path(conf))
    job = Job(conf=conf, more=asked.more, overrides=(*asked.overrides, *WATCHED))
    config, limits = job.config(), Limits(total_s=asked.limit_s)
    check_without_torch(config)
    with claim(config.name, asked.out, force=asked.force) as path:
        baselines: list[Trial] = []
        ceilings: dict[str, Trial] = {}

        count = 2 + len(list_variations(config))

        def trial(name: str, changed: Job) -> Trial:
            done = [*baselines, *ceilings.values()]
            each_s = sum(made.seconds for made in done) / max(1, len(done))
            left = f", about {say_duration(each_s * (count - len(done)))} left" if done else ""
            progress(f"{name} ({len(done) + 1} of {count}){left}")
            return run_trial(name, changed, path / name, limits=limits, progress=progress)

        def collect() -> CeilingsFile:
            return summarize(str(path), baselines, ceilings, config)

        with attaching(collect, path, progress), writing(path), allow_quick_starts():
            baselines.append(first := trial(FIRST, job))
            if not first.ok:
                if first.code == 2:
                    forget(first.run_dir)
                raise make_failure(first)
            for name in list_variations(config):
                ceilings[name] = trial(name, dataclasses.replace(job, variation=name))
            baselines.append(trial(LAST, job))
            result = collect()
            store.save(path, {NAME: result})
    return Answer(text="\n".join(format_lines(result, config.name)), json=store.to_json(result))


def _refuse_run(where: Path) -> ConfigError:
    conf = rerun.find_configuration(where)
    none = f"name a configuration with a recipe; {OF_RUN} of this run has none"
    return ConfigError(
        got=f"the run directory {where}",
        why="measuring ceilings means training, which needs a configuration",
        do=none if conf is None else f"run fastloop headspace {conf}",
    )


def list_variations(config: Config) -> tuple[Variation, ...]:
    """Return the ceilings that apply to this training."""
    return tuple(name for name in CEILINGS if name != "no_exchange" or config.run.devices > 1)


def summarize(run_dir: str, baselines: Sequence[Trial], trials: Mapping[str, Trial], config: Config) -> CeilingsFile:
    """Return the content of ``headspace.json``."""
    rates = tuple(rate for trial in baselines if (rate := trial.samples_per_s) is not None)
    rate = math.exp(sum(map(math.log, rates)) / len(rates)) if rates else None
    baseline = Baseline(
        samples_per_s=rate,
        runs=rates,
        drift_pct=100 * (rates[1] / rates[0] - 1) if len(rates) == 2 else None,
        window_too_short=any(trial.window_too_short for trial in baselines if trial.ok),
        why=next((f"{trial.name}: {trial.cause}" for trial in baselines if not trial.ok), None),
    )
    found: dict[str, Ceiling] = {
        name: read_ceiling(name, trials.get(name), rate, config, baselines) for name in CEILINGS
    }
    return CeilingsFile(
        run_dir=run_dir,
        baseline=baseline,
        ceilings=_doubt_below_replayed(found, baseline.noise),
        trials=(*baselines[:1], *trials.values(), *baselines[1:]),
    )


def read_ceiling(
    name: str, trial: Trial | None, baseline: float | None, config: Config, baselines: Sequence[Trial] = ()
) -> Ceiling:
    """Return a trial's ceiling, checked against the runs with all costs."""
    if trial is None and name in list_variations(config):
        return Ceiling(why="not measured: the command ended first")
    if trial is None:
        return Ceiling(why=f"run.devices is {config.run.devices}: there is no gradient exchange")
    if not trial.ok:
        return Ceiling(why=trial.cause)
    rate = trial.samples_per_s
    if rate is None or baseline is None:
        return Ceiling(samples_per_s=rate, why="the run was too short to measure a rate")
    doubt = "window too short" if trial.window_too_short else None
    if rate < DISTURBED * baseline:
        doubt = TOO_SLOW
    elif _is_too_fast(trial.name, rate, baselines):
        doubt = TOO_FAST
    return Ceiling(samples_per_s=rate, ratio=rate / baseline, why=doubt)


def _doubt_below_replayed(found: Mapping[str, Ceiling], noise: float) -> dict[str, Ceiling]:
    """Doubt ceilings that are slower than replayed batches, which do more work, by more than the noise."""
    most = found["replayed"].samples_per_s
    if most is None or found["replayed"].why in DOUBTS:
        return dict(found)
    least = min(DISTURBED, 1 / noise) * most
    return {
        name: dataclasses.replace(each, why=BELOW_REPLAYED)
        if each.ratio is not None and each.why not in DOUBTS and (each.samples_per_s or most) < least
        else each
        for name, each in found.items()
    }


def _is_too_fast(name: str, rate: float, baselines: Sequence[Trial]) -> bool:
    """Whether the trial saved more time than the removed parts took in any of the unchanged runs."""
    runs = [trial.measurement for trial in baselines if trial.measurement]
    return bool(runs) and all(is_beyond(dataclasses.replace(seen, ceilings={name: rate}), name) for seen in runs)


def format_lines(result: CeilingsFile, name: str) -> list[str]:
    """Format the answer for the terminal, verdict first."""
    base, found = result.baseline, result.ceilings
    doubtful = [key for key, value in found.items() if value.why in DOUBTS]
    ratios = {key: value.ratio for key, value in found.items() if value.ratio is not None and key not in doubtful}
    head = [f"fastloop {_choose_verdict(ratios, doubtful, base.noise)}   {name}"]
    head += [
        f"if {FREE[key]}: {_format(value, found['replayed'] if key == 'no_exchange' else None)}"
        for key, value in found.items()
    ]
    runs = " and ".join(format_short(rate) for rate in base.runs)
    head.append(
        f"now: {format_short(base.samples_per_s)} samples/s"
        + (f" (before and after: {runs})" if runs else "")
        + ("   window too short" if base.window_too_short else "")
    )
    if base.drift_pct is not None and abs(base.drift_pct) > WORTH_PCT:
        head.append(
            f"NOTE     the baseline changed by {base.drift_pct:+.1f} % between its first and last run: smaller gains"
            " are within this noise"
        )
    if base.why:
        head.append(f"NOTE     {base.why}")
    return [*head, f"FILES    {result.run_dir}/{NAME}"]


def _choose_verdict(ratios: Mapping[str, float], doubtful: Sequence[str], noise: float) -> str:
    """Say what can be gained, by the ceiling that removes the fewest costs of those close to the largest."""
    most = max(ratios.values(), default=0.0)
    if ratios and noise > 1 + WORTH_PCT / 100 and most < noise:
        return f"DISTURBED, RUN IT AGAIN: the unchanged runs differ by {_format_ratio(noise)}, more than any gain"
    if doubtful and most < 1 + WORTH_PCT / 100:
        return f"DISTURBED, RUN IT AGAIN: no ceiling from {' and '.join(doubtful)}"
    if not ratios:
        return "NO CEILING MEASURED"
    if most < 1 + WORTH_PCT / 100:
        return f"NOTHING TO GAIN: less than {WORTH_PCT:g} % without data, copies or exchange"
    nearest = next(name for name in CEILINGS if ratios.get(name, 0) >= most * (1 - WORTH_PCT / 100))
    return f"UP TO {_format_ratio(ratios[nearest])} WITHOUT {FAMILY[nearest].upper()}"


def _format(value: Ceiling, replayed: Ceiling | None) -> str:
    """Format a ceiling, relative to the trial with replayed batches if given and measured, else to the baseline."""
    if value.samples_per_s is None or value.ratio is None:
        return f"n/a: {value.why}"
    doubt = f"; {value.why}" if value.why else ""
    times = _format_ratio(value.ratio)
    if replayed is not None and replayed.samples_per_s:
        times = f"{_format_ratio(value.samples_per_s / replayed.samples_per_s)} of replayed"
    return f"{format_short(value.samples_per_s)} samples/s ({times}, measured{doubt})"


def _format_ratio(ratio: float) -> str:
    return f"{ratio:.2f}x" if ratio < 2 else f"{ratio:.1f}x"

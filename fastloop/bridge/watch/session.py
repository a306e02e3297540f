"""Combines everything that watches one fit on one rank: created in ``setup``, read when training ends."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fastloop.bridge.watch import loader_state
from fastloop.bridge.watch.drift_checks import DriftChecks
from fastloop.bridge.watch.live_metrics import LiveMetrics
from fastloop.bridge.watch.log_marks import LogMarks
from fastloop.bridge.watch.measurement import COMPILATION, build_measurement
from fastloop.bridge.watch.one_time_costs import Compilations, WorkerStarts, sum_one_time_s
from fastloop.bridge.watch.phases import list_empty_hook_actions, list_hooks
from fastloop.bridge.watch.probes import CountWork, FindSyncs, HuntSyncs, TraceProbe
from fastloop.bridge.watch.profiler_proxy import WatchingProfiler
from fastloop.bridge.watch.rank_exchange import LIMIT_S, PARTIAL_LIMIT_S, Ranks, name_cause, record_of_rank
from fastloop.bridge.watch.window import Probe, Watch
from fastloop.config.loading import WatchSettings
from fastloop.errors import quote
from fastloop.evidence import machine
from fastloop.evidence.clock import step_clock
from fastloop.evidence.clock.one_time import OneTime
from fastloop.evidence.gpu import measured_rates, nvml
from fastloop.evidence.gpu.sampler import Board
from fastloop.evidence.model.memory_creep import MemoryLog
from fastloop.evidence.model.optimizer_cost import describe_optimizers
from fastloop.evidence.sync.line_samples import LineSamples
from fastloop.feeds.batch_tree import count_rows, count_samples, walk_storage
from fastloop.records.measurement import COMPILE, MEMORY, VALIDATION_COMPILE, Measurement
from fastloop.records.readings import ANOMALY_MODE, CPU_WORTH_PCT, LINES, OPTIMIZER

COUNTED_STEPS, SYNC_STEP = (1, 3, 4, 5), 2
"""Optimizer steps of the warm-up in which work is counted (later ones only if the earlier found none), and the one in
which synchronizations are searched for: not the first step, which has many one-time events."""
LOADER = "loader"
"""Key in the evidence: how the data was loaded."""
SYNCS = "syncs"
"""Key in the evidence: the number of steps in which every synchronization was hunted."""

CROWDED_PCT = 20
"""Share of the fit spent waiting for a CPU, above which the report mentions the machine's load."""
REPLACED = "the Trainer's profiler was replaced during the fit, and nothing was recorded after that"


class Session:
    """Watches a fit through the Trainer's profiler calls. Issues no collective.

    Args:
        trainer: at ``setup``, when its strategy knows its device.
        warn: receives a one-line warning.
        hunt_syncs: find every synchronization with its line and its cost, in a few steps after the timed ones.
        place: returns the run's directory; called only when there is something to write.
        one_time: collects the fit's one-time costs; other code writes to it too.
        preserve_state: context for running a module once more to count its work, see `CountWork`.
    """

    def __init__(
        self,
        trainer: Any,
        settings: WatchSettings,
        *,
        warn: Callable[[str], None],
        one_time: OneTime,
        hunt_syncs: bool = False,
        place: Callable[[], Any] = lambda: None,
        preserve_state: Callable[..., contextlib.AbstractContextManager[object]] | None = None,
    ) -> None:
        self._began, self._cpu_wait_s = step_clock.now(), machine.read_cpu_wait_s()
        self.one_time = one_time
        self.compilations = Compilations(self.one_time, lambda: self.watch.clock.total_steps)
        self.workers, self.queue = WorkerStarts(), loader_state.QueueReader(trainer)
        self._trainer, self._epoch_begins = trainer, True
        self._drawn: tuple[int, ...] = ()
        """Samples of a batch and of an epoch's last batch, according to the loader's batch sampler."""
        self._take_apart: Callable[[Any], list[Any]] | None = None
        """Splits a combined batch into one batch per loader; None with one loader."""
        self.device: torch.device = trainer.strategy.root_device
        on_cuda = self.device.type == "cuda"
        self.uuid = nvml.find_uuid(self.device) if on_cuda else None
        self.work, self.syncs, self.lines = CountWork(preserve_state), FindSyncs(), LineSamples()
        self.hunt = HuntSyncs(self.device) if hunt_syncs else None
        self.trace = TraceProbe(trainer, self.device, settings.trace_steps, place) if settings.trace_steps else None
        probes: dict[int, Probe] = {
            **dict.fromkeys(COUNTED_STEPS, self.work),
            **({SYNC_STEP: self.syncs} if on_cuda else {}),
        }
        self.watch = Watch(
            self.device,
            settings,
            owed=self.queue.count_owed,
            probes=probes,
            board=Board(self.uuid) if on_cuda else None,
            extras=[extra for extra in (self.hunt, self.trace) if extra is not None],
            one_time=self.one_time,
            note_costs=self._note_costs,
        )
        self.watch.drift_checks = self._drift_checks = DriftChecks(
            self.device,
            warn=warn,
            switch=lambda clock: setattr(self.watch.marks, "clock", clock),
            read_board=self._read_board,
            one_time=self.one_time,
            foresee_end=lambda: self.memory.foresee_end(settings.warmup_steps, list_owners(trainer)),
        )
        self.memory, self._epochs = MemoryLog(self.device), 0
        self._is_anomaly_mode = False
        self._ranks: Ranks | None = None
        self._live: LiveMetrics | None = None
        self._logs: LogMarks | None = None
        self._step = self._passed_steps = self._passed_samples = 0
        self._last_figures: tuple[Any, tuple[float, ...], tuple[float, ...]] = (None, (), ())
        """The inputs of the last live figures: an account, its values, and the totals at that time."""
        self._profiler: Any = None

    def attach(self, trainer: Any, on_request: Callable[[], None], on_batch: Callable[[], None]) -> Callable[[], None]:
        """Wrap the Trainer's profiler, see `WatchingProfiler`; returns the undo."""
        before = trainer.profiler
        ours = WatchingProfiler(before, on_request, on_batch, self.watch.marks.profile)
        trainer.profiler = self._profiler = ours

        def undo() -> None:
            if trainer.profiler is ours:
                trainer.profiler = before

        return undo

    def train_start(self, trainer: Any, module: Any) -> list[Callable[[], None]]:
        """Attach everything that needs the loaders and loggers, which exist now; returns undos."""
        # First: ranks count their fits, and a rank that failed before this line would count one less.
        self._ranks = Ranks(trainer)
        self._step = trainer.global_step
        self.watch.clock.queued_batches = loader_state.count_queued_batches(trainer)
        self.watch.ends_at = count_planned_steps(trainer)
        self._live = LiveMetrics(trainer, self.read_figures)
        self._logs = LogMarks(trainer, module, self.watch.marks)
        self.memory.begin(list_owners(trainer))
        self.watch.marks.empty_hooks = list_empty_hook_actions(trainer, module)
        if self.hunt is not None:
            self.hunt.attach(module)
        if self.trace is not None:
            per_step = max(1, trainer.accumulate_grad_batches)
            self.trace.attach(self.watch.marks, math.ceil(self.watch.clock.queued_batches / per_step))
        shown = self._live.show_on_bar(trainer)
        # Last: this changes a class of torch's, which would stay so if a line after it failed.
        return [shown, self._logs.undo, self.work.attach(module, self.watch.marks)]

    def stop(self) -> None:
        """Stop everything that we started, because we give up or the fit is over."""
        if self._live is not None:
            self._live.shown = {}
        self.lines.stop()
        self.watch.stop()

    def batch_end(self, trainer: Any, outputs: Any, batch: Any, share: float = 1.0) -> None:
        """Record a finished batch, which may be this share of a full accumulation window."""
        step = trainer.global_step
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else None
        step_ends = step != self._step
        self._is_anomaly_mode = torch.is_anomaly_enabled()
        size = self._count(trainer, batch)
        self.work.batch(size)
        self.watch.batch_end(loss, batch, size, step_ends, trainer.accumulate_grad_batches / share)
        self._step, self._epoch_begins = step, trainer.is_last_batch
        self._passed_steps += step_ends
        self._passed_samples += size or 0
        if step_ends:
            if trainer.should_stop:
                self.watch.note_end()
            self.lines.note_step(self._passed_steps, self.watch.settings.warmup_steps)
            self.memory.tick(
                self._passed_steps, lambda: sum(each.nbytes for each in walk_storage(batch) if each.is_cuda)
            )
            if self._live is not None:
                self._live.tick(trainer)

    def _count(self, trainer: Any, batch: Any) -> int | None:
        """Count the samples of a batch, of all its loaders together if each part can be counted. If the first dimension
        equals the only loader's batch size, no other source is used."""
        if self._take_apart is not None:
            with contextlib.suppress(ValueError):  # a hook has merged them into one batch
                counts = [count_samples(each) for each in self._take_apart(batch) if each is not None]
                if None not in counts:
                    return sum(filter(None, counts))
        size, logged = count_rows(batch), None
        if self._logs is not None:
            logged, self._logs.batch_size = self._logs.batch_size, None
        if size and size in self._drawn[:1]:
            return size
        return count_samples(batch, (logged, *(self._drawn[1:] if trainer.is_last_batch else self._drawn[:1])))

    def validation_starts(self) -> None:
        """Attribute compiles until now to training."""
        self.compilations.note(COMPILE)

    def validation_ends(self) -> None:
        """Attribute compiles since validation began to validation."""
        self.compilations.note(VALIDATION_COMPILE)

    def measure(
        self, trainer: Any, evidence: Mapping[str, Mapping[str, Any]], raised: BaseException | None = None
    ) -> Measurement:
        """Close the window and return the measurement, on rank 0 with those of the other ranks.

        Args:
            raised: the exception that ended the fit, if any.
        """
        self.compilations.note(COMPILE)
        self.one_time.note()
        self.lines.stop()
        self.watch.close()
        own = {
            MEMORY: self.memory.find_creep(self.watch.settings.warmup_steps, list_owners(trainer), self._epochs > 2),
            ANOMALY_MODE: {"is_on": True} if self._is_anomaly_mode else None,
            SYNCS: {"hunted_steps": self.hunt.hunted_steps} if self.hunt is not None else None,
            LINES: self.lines.describe(list_hooks(trainer)),
        }
        evidence = {**evidence, **{name: found for name, found in own.items() if found}}
        about = {
            "world_size": trainer.world_size,
            "precision": str(trainer.precision),
            "partial": raised is not None,
            "died_of": describe_death(raised, trainer),
            "device_name": torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else None,
            "flops": self.work.found,
            "syncs": self.hunt.found if self.hunt is not None else self.syncs.found,
            "kernels": self.trace.found if self.trace is not None else None,
            "drift": self._drift_checks.drift.entries,
            "one_time_s": sum_one_time_s(self.one_time, self.compilations, self.workers),
        }
        evidence = {**evidence, **self._describe_costs(evidence)}
        about["rates"] = measured_rates.read_cached(self.uuid, about["device_name"]) if self.uuid is not None else None
        seen = build_measurement(self.watch, about, evidence)
        share = (seen.parts_ms.get("optimizer") or 0.0) / (seen.step_ms.get("mean") or math.inf)
        if raised is None and seen.device == "cpu" and 100 * share >= CPU_WORTH_PCT:
            found = {OPTIMIZER: describe_optimizers(trainer.optimizers, trainer.global_step)}
            seen = dataclasses.replace(seen, evidence={**seen.evidence, **found})
        if (crowded := self._describe_crowd()) is not None:
            found = {"cpu": {"crowded": True, "threads": torch.get_num_threads()}}
            seen = dataclasses.replace(seen, state=(*seen.state, crowded), evidence={**seen.evidence, **found})
        if self._profiler is not None and trainer.profiler is not self._profiler:
            seen = dataclasses.replace(seen, state=(*seen.state, REPLACED))
        if self._live is not None:
            self._live.end(trainer, summarize(seen))
        return self._add_ranks(seen, raised)

    def read_figures(self) -> dict[str, float | None]:
        """Return figures for the loggers and the bar about the steps since the last call: from a clock while one is
        open, else from counts, which tell nothing about waits."""
        account = self.watch.marks.clock.account
        seen = (account.steps, account.samples, account.wall_s + account.once_s, account.wait_s)
        passed = (self._passed_steps, self._passed_samples, step_clock.now())
        last_account, last_seen, last_passed = self._last_figures
        self._last_figures = account, seen, passed
        before = last_seen if last_account is account else (0, 0, 0.0, 0.0)
        steps, samples, wall_s, wait_s = _subtract_before(seen, before)
        waited = {"data_wait_pct": 100 * wait_s / wall_s} if steps > 0 and wall_s > 0 else {}
        if not waited:
            steps, samples, wall_s = _subtract_before(passed, last_passed or passed)
        if steps <= 0 or wall_s <= 0:
            return {}
        world = self._ranks.world_size if self._ranks is not None else 1
        rate = world * samples / wall_s if samples else None
        return {"step_ms": 1e3 * wall_s / steps, "samples_per_s": rate, **waited}

    def _note_costs(self) -> None:
        self.compilations.note(COMPILE)
        self.one_time.note()
        if self._epoch_begins:
            self._epoch_begins = False
            self._begin_epoch()

    def _begin_epoch(self) -> None:
        """Note the arrival of an epoch's first batch; its loaders may differ from those of the last epoch."""
        self.workers.note(self._trainer)
        self._epochs += 1
        self._drawn = loader_state.read_batch_sizes(self._trainer)
        self._take_apart = loader_state.find_nesting(self._trainer)

    def _describe_costs(self, evidence: Mapping[str, Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
        """Facts about one-time costs that findings need, besides their sums."""
        compiled, later_s = self.compilations, self.workers.took_s[1:]
        found: dict[str, Mapping[str, Any]] = {}
        if compiled.count:
            found[COMPILATION] = {
                "count": compiled.count,
                "steps": len(compiled.steps),
                "fit_s": step_clock.now() - self._began,
                "reasons": list(compiled.reasons),
                "at_least": compiled.at_least,
            }
        of_workers: dict[str, Any] = {"worker_threads": threads} if (threads := self.queue.worker_threads) else {}
        if later_s:
            of_workers |= {"worker_restarts": len(later_s), "worker_restart_s": sum(later_s) / len(later_s)}
        return {**found, LOADER: {**evidence.get(LOADER, {}), **of_workers}} if of_workers else found

    def _describe_crowd(self) -> str | None:
        """Return a text if this thread waited long for a CPU, rounded to 10 % so that similar runs report the same."""
        waited_s, before_s = machine.read_cpu_wait_s(), self._cpu_wait_s
        if waited_s is None or before_s is None:
            return None
        pct = round(10 * (waited_s - before_s) / max(1e-9, step_clock.now() - self._began)) * 10
        if pct < CROWDED_PCT:
            return None
        return f"the training waited for a CPU for about {pct} % of the time: the CPUs were oversubscribed"

    def _add_ranks(self, seen: Measurement, raised: BaseException | None) -> Measurement:
        if self._ranks is None:
            return seen
        found = self._ranks.gather(record_of_rank(seen, raised), LIMIT_S if raised is None else PARTIAL_LIMIT_S)
        why = self._ranks.why if self._ranks.rank == 0 else None
        died_of, state = name_cause(seen.died_of, found), (*seen.state, *([why] if why else []))
        return dataclasses.replace(seen, ranks=found, died_of=died_of, state=state)

    def _read_board(self) -> Mapping[str, Any]:
        """Current memory use, and a few NVML readings if there is a GPU."""
        memory = {"memory_bytes": self.memory.read_now()}
        with contextlib.suppress(nvml.Unreadable), contextlib.closing(nvml.Gpu.open(self.uuid)) as gpu:
            clock = gpu.numbers().get("sm_clock_mhz")
            return {**memory, "sm_clock_mhz": clock, "foreign_processes": gpu.find_neighbors().pids}
        return memory


def list_owners(trainer: Any) -> list[object]:
    """Return the objects in whose attributes user code may keep tensors."""
    return [trainer.lightning_module, *trainer.callbacks, *trainer.loggers]


def _subtract_before(now: Sequence[float], before: Sequence[float]) -> list[float]:
    return [new - old for new, old in zip(now, before, strict=True)]


def describe_death(raised: BaseException | None, trainer: Any) -> str | None:
    """Describe the exception that ended a fit, in one line; None if the fit was stopped from outside or did not fail.

    A SIGTERM to the whole process group ends the workers first, and the loader then raises in the training.
    """
    if not isinstance(raised, Exception) or trainer.received_sigterm:
        return None
    return quote(raised, briefly=True)


def summarize(seen: Measurement) -> dict[str, float | None]:
    """Return the figures of a whole fit for the loggers."""
    step, wait = seen.step_ms.get("mean"), seen.parts_ms.get("data_wait")
    return {
        "step_ms": step,
        "samples_per_s": seen.samples_per_s,
        "lead_ms": seen.lead_ms,
        "data_wait_pct": 100 * wait / step if step and wait is not None else None,
        "tflop_per_s": seen.tflop_per_s,
        "mfu": seen.mfu.get("datasheet"),
        "peak_gib": seen.peak_gib,
        "joule_per_sample": seen.joule_per_sample,
        **{name: value for name, value in seen.gpu.items() if name == "watts" or name.endswith("_pct")},
    }


def count_planned_steps(trainer: Any) -> int | None:
    """Return the optimizer steps that this fit will make according to the Trainer; None if it does not know."""
    limits: list[float] = []
    if trainer.max_steps is not None and trainer.max_steps >= 0:
        limits.append(trainer.max_steps - trainer.global_step)
    batches, epochs = trainer.num_training_batches, trainer.max_epochs
    if epochs is not None and epochs >= 0 and isinstance(batches, int):
        done = (trainer.fit_loop.batch_idx + 1) % max(1, batches)  # batches already done if it resumes in mid-epoch
        steps = _count_epoch_steps(trainer, batches, range(trainer.current_epoch, epochs))
        limits.append(steps - done // trainer.accumulate_grad_batches)
    return int(min(limits)) if limits else None


def _count_epoch_steps(trainer: Any, batches: int, epochs: range) -> int:
    """Return the optimizer steps of whole epochs; a GradientAccumulationScheduler may change accumulation per epoch."""
    schedules = (each for each in trainer.callbacks if hasattr(each, "get_accumulate_grad_batches"))
    if (schedule := next(schedules, None)) is not None:
        until = max(0, max(schedule.scheduling, default=0) - epochs.start)  # then accumulation stays the same
        first, count = epochs[: until + 1], schedule.get_accumulate_grad_batches
        steps: list[int] = [math.ceil(batches / count(epoch)) for epoch in first]
        return sum(steps) + (len(epochs) - len(steps)) * (steps[-1] if steps else 0)
    an_epoch: int = math.ceil(batches / trainer.accumulate_grad_batches)
    return an_epoch * len(epochs)

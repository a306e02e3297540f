"""Training steps replayed from a recording of their forward and backward, at the point where Lightning runs them.

Lightning calls training_step, zeroes gradients, and runs the backward. The recorded forward is replayed inside
training_step and the recorded backward in place of the backward, so hooks, zeroing, clipping, schedules and callbacks
run as without us and see the same values. Each replay logs what training_step logs, with its own values. A fused
optimizer's update is also replayed.

A step is recorded in mid-run, after its batch arrives and before it is trained on, and leaves no trace. The replay must
give the same gradients as the eager step; and the step must do nothing in Python that a replay would leave out.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from fastloop.bridge.apply.read_model import overrides
from fastloop.bridge.apply.read_training import find_precision
from fastloop.bridge.apply.rehearse.budget import Terms
from fastloop.bridge.apply.rehearse.played import RunResults, compare_results
from fastloop.bridge.apply.replay.graph_guard import Guard
from fastloop.bridge.apply.replay.recorded_update import RecordedUpdates, is_from
from fastloop.bridge.apply.replay.step_code import find_outside, list_outer_values, list_step_functions
from fastloop.bridge.apply.replay.step_watch import LogCall, StepWatch, WatchedIndex
from fastloop.bridge.apply.site import LiveSite
from fastloop.bridge.apply.state.checkpoints import end_checkpoints
from fastloop.bridge.apply.state.untouched import HOOKS, StateSnapshot, keep_random_streams, preserve_parameters
from fastloop.bridge.attributes import set_attribute
from fastloop.errors import NotApplicable, describe
from fastloop.feeds.batch_tree import iterate_tensors, map_tensors, walk_tensors
from fastloop.feeds.splitting import get_loss
from fastloop.feeds.step_graph.recording import CudaRecorder
from fastloop.feeds.step_graph.static_step import Ran, StaticStep, read_key
from fastloop.judge import rehearsal as judge
from fastloop.numbers import format_short
from fastloop.records.plan import Undo

MOST_SHAPES = 32
"""Give up once more batches than this have differed from the one before them: no recording would be used."""
MOST_RECORDINGS = 3
"""Limit per run: a model that keeps changing is left alone."""
LEAST_GAIN = 0.95
"""A replay that takes more than this share of the eager step's time is not worth its memory."""
PLAYS = 7
"""How often a trial plays the step, including the recording."""
RECORDING_S = 0.1
"""Time that a trial takes besides its plays: saving the state, reading the code, making the graphs."""


class GraphedSteps:
    """Runs the training steps of one fit.

    Args:
        site: the live objects.
        asked: the user enabled this explicitly, so it need not be faster.
        terms: the conditions that limit what trials may cost; None if there are none. Not used if `asked`.
        is_ready: whether all other trials are over.
    """

    make_recorder: Callable[[torch.device], CudaRecorder] = CudaRecorder

    def __init__(self, site: LiveSite, *, asked: bool, terms: Terms | None, is_ready: Callable[[], bool]) -> None:
        self._site, self._asked, self._is_ready, self._one_time = site, asked, is_ready, site.one_time
        self._terms = Terms(weighs_costs=False) if asked or terms is None else terms.of_run(site.trainer)
        self.refused: str | None = None
        """Why no step is replayed from now on; None if steps may be."""
        self.replays = self.eager_steps = self.recordings = self._unlike = self._missed = 0
        self._updates = RecordedUpdates()
        self._seen: dict[str, Any] = {}
        self._launch_share, self._changed = 0.0, ""
        self._allowed, self._lets_one_pass, self._is_wanted = MOST_RECORDINGS, False, False
        self._step_began_s: float | None = None
        self._times_s = deque[float](maxlen=MOST_SHAPES)
        """Times from the start of one eager step to the start of the next, without one-time costs."""
        self._trial_began_s = self._trial_s = 0.0
        self._last_key: Any = None
        self._step: StaticStep | None = None
        self._guard: Guard | None = None
        self._output: Any = None
        self._calls: Sequence[LogCall] = ()
        self._uninstall: Undo | None = None

    def evidence(self) -> Mapping[str, Any]:
        """Counts of replayed steps, eager steps and recordings; why no step is replayed; the same for the optimizer's
        updates; the comparison's numbers."""
        counts = {"replayed_steps": self.replays, "eager_steps": self.eager_steps, "recordings": self.recordings}
        return {**counts, "graph_refused": self.refused or "", **self._updates.evidence(), **self._seen}

    def wrap(self, step: Callable[..., Any], *, runs_whole: bool | None) -> Callable[..., Any]:
        """Return the training_step to run for a batch in one piece. It may be replayed only if batches run so
        (`runs_whole`; None: not decided yet)."""
        if runs_whole is False and self.refused is None:
            self.refused = "batches are split into micro-batches"
            self._drop()
        return partial(self.run, step) if runs_whole else step

    def run(self, step: Callable[..., Any], *args: Any) -> Any:
        """Run one training_step: replayed if possible, else eagerly."""
        if not self._can_replay(step, args):
            self.eager_steps += 1
            self._note_time()
            return step(*args)
        assert self._step is not None
        if self._updates.are_due(self.replays):
            with self._one_time.span("rehearsal"):
                recorder = self.make_recorder(self._site.device)
                self._updates.record(self._site.trainer.optimizers[0], self._step, recorder)
        self._step.forward(args[0])
        self.replays += 1
        made = iter(self._step.made)
        output = map_tensors(self._output, lambda _: next(made).clone())
        module = self._site.module
        for call in self._calls:  # Lightning copies the value
            module.log(call.name, next(made), *call.args, **call.options)
        self._uninstall = set_attribute(self._site.strategy.precision_plugin, "backward", self._run_backward)
        return output

    def after_backward(self) -> None:
        """Lightning has run the backward of a step."""
        if self._uninstall is not None:
            self._uninstall()
            self._uninstall = None

    @property
    def replay_ms(self) -> float | None:
        """How long a replay of the current recording takes; None if there is none."""
        return None if self._step is None else self._seen["replay_ms"]

    def explain_no_time(self, trials: int) -> str | None:
        """Why there is no time to record the step `trials` more times; None if there is."""
        batch_ms = self._seen["replay_ms"]
        return self._terms.explain_no_time(self._count_spent_s(), trials * self._trial_s, batch_ms)

    def estimate_trial_s(self, batch_ms: float) -> float:
        """How long it takes to record a step of `batch_ms` and to compare its replay; 0 if none will be recorded."""
        if self.refused or not self._must_gain or self._terms.explain_too_short(PLAYS) or self._refuse_module():
            return 0.0
        return _estimate_s(PLAYS, batch_ms)

    def record_anew(self) -> None:
        """The step has changed: drop its recording, and make a new one after one eager step, in which torch compiles
        and plans what is new."""
        self._drop()
        self.refused, self._lets_one_pass, self._is_wanted = None, True, True
        self._allowed += 1

    def undo(self) -> None:
        """Run steps eagerly from now on; the counts are kept."""
        self.after_backward()
        self._drop()
        self.refused = self.refused or "training has ended"

    def _run_backward(self, *_: Any, **__: Any) -> None:
        """Replaces the precision plugin's backward, between the hooks before and after it."""
        if self._step is not None:
            self._step.backward()

    def _drop(self) -> None:
        self._updates.drop()
        if self._step is not None:
            self._step.let_go()
        # A play's outputs would keep its activations alive, and autograd nodes of a stream that eager steps do not use.
        self._step, self._guard, self._output, self._calls, self._missed = None, None, None, (), 0

    # -- whether to replay ----------------------------------------------------------------------------------------

    def _can_replay(self, step: Callable[..., Any], args: Sequence[Any]) -> bool:
        if self.refused is not None or not args or not self._is_ready():
            return False
        key = read_key(args[0])
        if self._step is not None and key != self._step.key:
            self._missed += 1
            if self._missed > max(MOST_SHAPES, self.replays):
                self.refused = f"{self._missed} batches differ from the recorded one, {self.replays} matched it"
                self._drop()
            return False
        if self._guard is not None and not self._guard.holds():
            self._changed = self._guard.explain()
            self._drop()  # outdated: a parameter was unfrozen or moved, a module switched, a number set
        if self._step is None and (self._lets_one_pass or _is_observed(self._site.device)):
            self._lets_one_pass = False
            return False
        if self._step is None:
            before, self._last_key = self._last_key, key
            if key != before:
                self._unlike += 1
                if self._unlike > MOST_SHAPES:
                    self.refused = "batch shapes, or values that are not tensors, change every time"
                return False
            self._try(step, args)
        return self._step is not None

    def _try(self, step: Callable[..., Any], args: Sequence[Any]) -> None:
        """Record the step and compare it with the eager one; then restore everything."""
        if self.recordings == self._allowed:
            after = f"after each of {self.recordings} recordings"
            self.refused = f"the model changed {after}, most recently {self._changed}"
            return
        self._trial_began_s = time.perf_counter()
        try:
            with self._one_time.span("rehearsal"):
                self.refused = self._refuse(args[0])
                if self.refused is None:
                    with preserve_parameters(self._site.module.parameters()):
                        self.refused = self._record(step, args)
        except Exception as error:
            self.refused = describe(error)
            end_checkpoints(error)
        self._trial_s, self._is_wanted = time.perf_counter() - self._trial_began_s, False
        if self.refused is not None:
            self._drop()

    def _note_time(self) -> None:
        if self.refused is None:
            began_s, self._step_began_s = self._step_began_s, time.perf_counter() - self._one_time.spent_s
            self._times_s += [] if began_s is None else [self._step_began_s - began_s]

    def _count_spent_s(self) -> float:
        """Seconds that trying rungs has taken so far, one-time costs such as compiles left out."""
        return self._one_time.sum_by_cause().get("rehearsal", 0.0)

    def _explain_too_short(self, plays: int, play_ms: float = 0.0) -> str | None:
        """Why the run is too short for the rest of this trial, `plays` plays of `play_ms` each (0: as long as a step);
        None if it is not."""
        if self._is_wanted or not (play_ms or self._times_s):
            return None
        batch_ms = 1e3 * statistics.median(self._times_s) if self._times_s else play_ms
        spent_s = self._count_spent_s() + time.perf_counter() - self._trial_began_s
        return self._terms.explain_no_time(spent_s, _estimate_s(plays, play_ms or batch_ms), batch_ms)

    def _refuse(self, batch: Any) -> str | None:
        too_short = None if self._is_wanted else self._terms.explain_too_short(PLAYS) or self._explain_too_short(PLAYS)
        if (why := too_short or self._refuse_module()) is not None:
            return why
        found = list(iterate_tensors(batch))
        if not found or len(found) != len(list(walk_tensors(batch))):
            return "the batch holds objects that are neither tensors nor containers"
        if any(tensor.device != self._site.device for tensor in found):
            return "the batch is not on the device"
        return None

    def _refuse_module(self) -> str | None:
        """Why no step of this module can be recorded, whatever its batch."""
        module = self._site.module
        if len(self._site.trainer.optimizers) != 1:
            return "there are several optimizers"
        if overrides(module, "backward"):
            return f"{type(module).__name__} overrides backward"
        if torch.is_anomaly_enabled():
            return "detect_anomaly checks each backward"
        for name, part in module.named_modules():
            for registry in HOOKS:
                if not all(is_from(("torch.", "fastloop."), hook) for hook in getattr(part, registry, {}).values()):
                    return f"{name or type(part).__name__} has a hook, which a replay would not call"
        for name, parameter in module.named_parameters():
            after = (parameter._post_accumulate_grad_hooks or {}).values()  # a replay calls these
            if parameter._backward_hooks or not all(is_from(("fastloop.",), hook) for hook in after):
                return f"{name} has a hook on its gradient, which a replay would not call"
        return None

    # -- recording ------------------------------------------------------------------------------------------------

    def _record(self, step: Callable[..., Any], args: Sequence[Any]) -> str | None:
        module = self._site.module
        watch, self._launch_share = StepWatch(module, self._site.device), 0.0
        kept, streams = StateSnapshot(), keep_random_streams()
        kept.capture_module(module)
        functions = list_step_functions(module, kept)
        if (outside := find_outside(functions)) is not None:
            return f"training_step uses {outside}, which a replay would skip"
        for variables, name in list_outer_values(functions, set()):
            kept.capture(variables[name])

        def run(batch: Any) -> Ran:
            with watch:
                output = step(batch, *(WatchedIndex.of(each, watch.notice) for each in args[1:]))
            self._output, self._calls = output, watch.calls
            loss = get_loss(output)
            if loss is None:
                raise NotApplicable("training_step returned no loss for a batch")
            loss = loss / self._site.trainer.accumulate_grad_batches  # as Lightning does before the backward
            return Ran(loss=loss, made=[*iterate_tensors(output), *(call.value for call in watch.calls)])

        def put_back() -> None:
            kept.restore()
            streams()

        parameters = {name: each for name, each in module.named_parameters() if each.requires_grad}
        recorder = self.make_recorder(self._site.device)
        static = StaticStep(run, args[0], parameters)
        try:
            with recorder.aside():
                syncs = recorder.find_syncs(lambda: static.play(args[0]))
                watch.notice(kept.find_change())
                watch.find_host_draws()
                put_back()
                if syncs:
                    return f"training_step waits for the device: {syncs[0]}"
                if watch.fault is not None:
                    return watch.fault
                first = self._time(recorder, lambda: static.play(args[0]))
                put_back()
                if (too_short := self._explain_too_short(PLAYS - 2, first.ms)) is not None:
                    return too_short
                second = self._time(recorder, lambda: static.play(args[0]))
                put_back()
            if self._must_gain and self._launch_share < judge.LAUNCH_BOUND:
                return f"the device is busy already: the host launches a step in {self._launch_share:.0%} of its time"
            room = recorder.note_memory()
            static.record(recorder)
            put_back()
            if (full := room()) is not None:
                return full
            replayed = self._time(recorder, lambda: static.replay(args[0]))
            put_back()
            again = self._time(recorder, lambda: static.replay(args[0]))
        finally:
            put_back()
            recorder.wait()
        self.recordings += 1
        why = self._judge(first, second, replayed, again)
        if why is None:
            self._step, self._guard = static, Guard(module, self._site.trainer, kept)
            self._output = map_tensors(self._output, lambda tensor: tensor.detach())
            self._calls = [replace(call, value=None) for call in self._calls]
        return why

    @property
    def _must_gain(self) -> bool:
        """Whether a replay must be faster than an eager step, not only equal to it."""
        return not self._asked and not self._is_wanted

    def _time(self, recorder: CudaRecorder, play: Callable[[], tuple[list[Any], dict[str, Any]]]) -> RunResults:
        recorder.wait()
        began = time.perf_counter()
        made, gradients = play()
        launch_ms = 1e3 * (time.perf_counter() - began)
        recorder.wait()
        ms = 1e3 * (time.perf_counter() - began)
        self._launch_share = max(self._launch_share, launch_ms / ms)  # largest: a play may contain a pause
        buffers = [buffer.clone() for buffer in self._site.module.buffers()]
        return RunResults(ms, [*made, *buffers], gradients)

    def _judge(self, first: RunResults, second: RunResults, replayed: RunResults, again: RunResults) -> str | None:
        deviation, noise = compare_results(second, replayed), compare_results(second, first)
        eager_ms, replay_ms = min(first.ms, second.ms), min(replayed.ms, again.ms)
        self._seen = {"deviation": deviation.largest, "eager_ms": eager_ms, "replay_ms": replay_ms}
        if judge.ROUNDINGS * noise.largest > judge.NO_GATE:
            return f"two runs of the step from the same state differ by {noise.largest:.2g}, too much to judge a replay"
        precision = find_precision(self._site.trainer, self._site.module)
        if not judge.is_close(deviation, precision):
            fault, _ = judge.find_fault(deviation, noise, precision)
            if fault is not None:
                return f"the replay does not match the step: {fault}"
        if self._must_gain and replay_ms > LEAST_GAIN * eager_ms:
            times = f"{format_short(eager_ms, 'ms')} eager, {format_short(replay_ms, 'ms')} replayed"
            return f"the device is busy already: {times}"
        return None


def _estimate_s(plays: int, ms: float) -> float:
    """Seconds for a trial with `plays` plays of `ms` each, including everything else that it does."""
    return RECORDING_S + plays * ms / 1e3


def _is_observed(device: torch.device) -> bool:
    """Whether this step's operators or synchronizations are being counted: a trial would add its own to them."""
    return torch._C._len_torch_dispatch_stack() > 0 or (device.type == "cuda" and torch.cuda.get_sync_debug_mode() != 0)

"""What is put together for a fit: the steps it will make, live figures, the summary for the loggers."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter, sleep
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelCheckpoint

from fastloop import FastLoop
from fastloop.bridge.watch import session
from fastloop.bridge.watch.phases import list_empty_hook_actions, list_hooks
from fastloop.bridge.watch.session import (
    REPLACED,
    SYNCS,
    Session,
    count_planned_steps,
    describe_death,
    summarize,
)
from fastloop.config.loading import WatchSettings
from fastloop.evidence import machine
from fastloop.evidence.clock.one_time import OneTime
from fastloop.evidence.clock.step_clock import Clock
from fastloop.records.measurement import GPU_READINGS, Measurement
from tests.bridge.watch.live_fit import Strict
from tests.bridge.watch.made_up import CPU, Time, forget_compiles, run, settings
from tests.models import WEIGHTS_ONLY, Regression, loader, trainer

pytestmark = pytest.mark.short

# -- hooks that nobody has overridden ---------------------------------------------------------------------------------


class Hears(L.Callback):
    def on_train_batch_end(self, *_: Any, **__: Any) -> None: ...


class Steps(Regression):
    def on_after_backward(self) -> None: ...


def test_hooks_are_lightnings_and_not_torchs() -> None:
    hooks = list_hooks(trainer())
    assert {"training_step", "optimizer_step", "lr_scheduler_step", "on_train_batch_end", "on_exception"} <= hooks
    assert not {"forward", "compile", "__call__"} & hooks


def test_only_hooks_that_are_lightnings_own_are_unheard() -> None:
    module, its_own, shared = Steps(), L.Callback(), type("Twin", (L.Callback,), {})
    vars(its_own)["on_before_zero_grad"] = print
    twins = [shared(), shared()]
    vars(twins[0])["on_train_batch_end"] = print
    found = list_empty_hook_actions(
        trainer(callbacks=[Hears(), its_own, *twins, ModelCheckpoint()], enable_checkpointing=True), module
    )
    saver = next(name for name in found if "ModelCheckpoint" in name).rpartition(".")[0]
    for owner, heard in {
        "[Callback]Hears": "on_train_batch_end",
        "[Callback]Callback": "on_before_zero_grad",
        "[Callback]Twin": "on_train_batch_end",
        saver: "on_train_batch_end",
        "[LightningModule]Steps": "on_after_backward",
    }.items():
        assert f"{owner}.{heard}" not in found, owner
        others = {
            "on_train_batch_start",
            "on_before_backward",
            "on_after_backward",
            "on_before_optimizer_step",
            "on_before_zero_grad",
            "on_train_batch_end",
        } - {heard}
        assert {f"{owner}.{hook}" for hook in others} <= found, owner


# -- how long a fit will be -------------------------------------------------------------------------------------------


class Plans(L.Callback):
    """What was planned when training started, and what came of it."""

    planned: int | None = -1
    steps = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.planned, self.begun = count_planned_steps(trainer), trainer.global_step

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.steps = trainer.global_step - self.begun


def planned(ckpt: Path | None = None, data: Any = None, **settings: Any) -> Plans:
    plans = Plans()
    made = trainer(callbacks=[plans, *settings.pop("callbacks", ())], **settings)
    resume = {} if ckpt is None else {"ckpt_path": ckpt, **({"weights_only": False} if WEIGHTS_ONLY else {})}
    made.fit(Regression(), loader() if data is None else data, **resume)
    return plans


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({"max_steps": 11}, 8),
        ({"max_steps": 11, "max_epochs": -1}, 11),
        ({"max_epochs": 3}, 24),
        ({"max_epochs": 3, "max_steps": 10}, 10),
        ({"max_epochs": 3, "limit_train_batches": 5}, 15),
        ({"max_epochs": 3, "limit_train_batches": 0.5}, 12),
        ({"max_epochs": 2, "accumulate_grad_batches": 3}, 6),
        ({"max_steps": 5, "max_epochs": -1, "accumulate_grad_batches": 3}, 5),
        ({"max_epochs": 2, "overfit_batches": 1}, 2),
    ],
    ids=str,
)
def test_the_steps_that_are_planned_are_the_steps_that_are_made(settings: dict[str, Any], steps: int) -> None:
    plans = planned(**settings)
    assert plans.planned == steps == plans.steps


def test_an_accumulation_that_changes_between_epochs_is_counted() -> None:
    plans = planned(max_epochs=3, callbacks=[GradientAccumulationScheduler({0: 1, 2: 4})])
    assert plans.planned == 18 == plans.steps


@pytest.mark.parametrize(
    ("save", "settings"),
    [
        ({"every_n_epochs": 1}, {"max_epochs": 4}),
        ({"every_n_train_steps": 8}, {"max_epochs": 4}),
        ({"every_n_train_steps": 8}, {"max_steps": 21, "max_epochs": -1}),
        ({"every_n_train_steps": 5}, {"max_steps": 21, "max_epochs": -1}),
        ({"every_n_train_steps": 5}, {"max_epochs": 4}),
    ],
    ids=str,
)
def test_a_resumed_fit_makes_the_rest(save: dict[str, int], settings: dict[str, int], tmp_path: Path) -> None:
    saves = ModelCheckpoint(tmp_path, filename="{step}", save_top_k=-1, **save)
    planned(max_epochs=1, callbacks=[saves], enable_checkpointing=True)
    plans = planned(sorted(tmp_path.iterdir())[0], **settings)
    assert plans.planned == plans.steps > 0


class Endless(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([(torch.zeros(8), torch.zeros(1))] * 32)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"max_epochs": 1}, None),
        ({"max_steps": 3, "max_epochs": -1}, 3),
        ({"max_epochs": 1, "limit_train_batches": 2}, 2),
    ],
)
def test_a_loader_of_unknown_length(settings: dict[str, Any], expected: int | None) -> None:
    data = torch.utils.data.DataLoader(Endless(), batch_size=8)
    assert planned(data=data, **settings).planned == expected


# -- live figures -----------------------------------------------------------------------------------------------------


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    return Time(monkeypatch)


@pytest.fixture
def eyes() -> Iterator[Session]:
    made = Session(trainer(), settings(), warn=pytest.fail, one_time=OneTime())
    yield made
    made.stop()


def test_figures_are_of_the_steps_since_the_last_ones(eyes: Session, time: Time) -> None:
    assert eyes.read_figures() == {}
    run(eyes.watch, time, 5)
    assert eyes.read_figures() == pytest.approx({"step_ms": 40.0, "samples_per_s": 100.0, "data_wait_pct": 25.0})
    assert eyes.read_figures() == {}, "no step has ended since"
    run(eyes.watch, time, 5, wait_s=0.05)
    assert eyes.read_figures() == pytest.approx({"step_ms": 80.0, "samples_per_s": 50.0, "data_wait_pct": 62.5})


def test_figures_are_all_ranks_together(eyes: Session, time: Time) -> None:
    eyes._ranks = SimpleNamespace(world_size=4)  # type: ignore[assignment]
    run(eyes.watch, time, 5)
    assert eyes.read_figures()["samples_per_s"] == pytest.approx(400.0)


def test_batches_of_unknown_size_have_no_rate(eyes: Session, time: Time) -> None:
    run(eyes.watch, time, 5, batch="text")
    found = eyes.read_figures()
    assert found["samples_per_s"] is None and found["step_ms"] == pytest.approx(40.0)


def test_a_later_look_has_figures_of_its_own(eyes: Session, time: Time) -> None:
    run(eyes.watch, time, 20)
    eyes.read_figures()
    eyes.watch.close()
    eyes.watch.drift_checks._switch(Clock(CPU, warmup_steps=0, one_time=OneTime()))
    for _ in range(2):
        run(eyes.watch, time, 30, compute_s=0.07)
        assert eyes.read_figures()["step_ms"] == pytest.approx(80.0)


def passes(eyes: Session, time: Time, steps: int, step_s: float = 0.05, batches: int = 1, batch: Any = None) -> None:
    """Steps that nobody marks, as the callback hears of them."""
    site = SimpleNamespace(
        global_step=eyes._step, accumulate_grad_batches=batches, is_last_batch=False, should_stop=False
    )
    for _ in range(steps):
        for number in range(batches):
            time.passes(step_s / batches)
            site.global_step += number == batches - 1
            eyes.batch_end(site, None, torch.zeros(4, 2) if batch is None else batch)


def test_figures_go_on_when_the_window_is_over(eyes: Session, time: Time) -> None:
    run(eyes.watch, time, 20)
    assert "data_wait_pct" in eyes.read_figures()
    eyes.watch.close()
    eyes.read_figures()  # of the window's last step
    passes(eyes, time, 10, batches=2)
    assert eyes.read_figures() == pytest.approx({"step_ms": 50.0, "samples_per_s": 160.0}), "of waits nothing is known"
    passes(eyes, time, 4, step_s=0.1)
    eyes._ranks = SimpleNamespace(world_size=2)  # type: ignore[assignment]
    assert eyes.read_figures() == pytest.approx({"step_ms": 100.0, "samples_per_s": 80.0}), "of the last steps only"
    assert eyes.read_figures() == {}, "no step has ended since"
    passes(eyes, time, 4, batch="text")
    assert eyes.read_figures() == {"step_ms": pytest.approx(50.0), "samples_per_s": None}


def test_figures_of_the_warm_up_leave_out_its_beginning(eyes: Session, time: Time) -> None:
    passes(eyes, time, 1, step_s=60.0)
    assert eyes.read_figures() == {}, "the first steps compile, and fill queues"
    passes(eyes, time, 10)
    assert eyes.read_figures() == pytest.approx({"step_ms": 50.0, "samples_per_s": 80.0})


class Writes(L.Callback):
    """Live figures due at every step."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        loop = next(each for each in trainer.callbacks if isinstance(each, FastLoop))
        self.live = loop._session._live
        self.live._every_s, self.live._due, self.bar = 0.0, 0.0, []

    def on_train_batch_end(self, trainer: Any, *_: Any, **__: Any) -> None:
        self.bar.append(dict(self.live.shown))


def test_a_fit_is_live_to_its_end_and_the_bar_shows_nothing_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastloop.bridge.watch.window.Watch._is_over", lambda watch: watch.clock.total_steps >= 8)
    logger, writes = Strict(), Writes()
    loop = FastLoop({"watch": {"warmup_steps": 2}}, quiet=True)
    trainer(max_epochs=4, callbacks=[loop, writes], logger=logger).fit(Regression(), loader())
    assert loop.measurement is not None and 0 < loop.measurement.steps < 10, "the window ended early"
    written = {step: row for step, row in logger.ours if step < 32}
    assert set(range(10, 32)) <= set(written) and all(row["fastloop/step_ms"] > 0 for row in written.values())
    assert all(row["fastloop/samples_per_s"] > 0 for row in written.values())
    last = written[31]
    assert "fastloop/data_wait_pct" not in last and writes.bar[-1] == {} and {"fed"} in map(set, writes.bar)


def test_the_summary_is_of_numbers_that_are_known() -> None:
    gpu = {
        **dict.fromkeys(GPU_READINGS),
        "watts": 612.0,
        "tensor_active_pct": 7.5,
        "sm_clock_mhz": 1980.0,
        "throttle": ["power"],
    }
    found = summarize(
        Measurement(
            step_ms={"mean": 40.0},
            parts_ms={"data_wait": 10.0},
            samples_per_s=100.0,
            gpu=gpu,
            tflop_per_s=36.1,
            mfu={"datasheet": 0.0365},
            peak_gib=3.0,
        )
    )
    assert found["data_wait_pct"] == 25.0 and found["step_ms"] == 40.0 and found["mfu"] == 0.0365
    assert found["tensor_active_pct"] == 7.5 and found["watts"] == 612.0 and found["nvml_busy_pct"] is None
    assert not {"sm_clock_mhz", "throttle"} & found.keys()
    assert set(summarize(Measurement()).values()) == {None}


# -- setting up and giving up -----------------------------------------------------------------------------------------


def test_attaching_can_be_undone_and_leaves_another_profiler_alone() -> None:
    made = trainer()
    before = made.profiler
    eyes = Session(made, WatchSettings(), warn=pytest.fail, one_time=OneTime())
    undo = eyes.attach(made, lambda: None, lambda: None)
    assert made.profiler is not before and isinstance(made.profiler, type(before))
    undo()
    undo()
    assert made.profiler is before
    other = eyes.attach(made, lambda: None, lambda: None)
    made.profiler = theirs = type(before)()
    other()
    assert made.profiler is theirs


@pytest.mark.parametrize("hunt", [False, True])
@pytest.mark.parametrize("trace_steps", [0, 3])
def test_extras_are_those_asked_for(hunt: bool, trace_steps: int) -> None:
    eyes = Session(
        trainer(), WatchSettings(trace_steps=trace_steps), warn=pytest.fail, hunt_syncs=hunt, one_time=OneTime()
    )
    names = [type(extra).__name__ for extra in eyes.watch._extras]
    assert names == ["HuntSyncs"] * hunt + ["TraceProbe"] * bool(trace_steps)
    assert (eyes.trace is None) == (trace_steps == 0) and eyes.watch.board is None, "no GPU, no board"


@pytest.mark.parametrize(("warmup", "steps"), [(2, [1]), (20, [1, 3, 4, 5])])
def test_work_is_counted_in_one_step_or_else_in_a_later_one(warmup: int, steps: list[int]) -> None:
    eyes = Session(trainer(), WatchSettings(warmup_steps=warmup), warn=pytest.fail, one_time=OneTime())
    assert [step for step, probe in eyes.watch._probes.items() if probe is eyes.work] == steps


class Skips(Regression):
    """Has nothing to learn from the batches whose numbers it is given."""

    def __init__(self, *skipped: int) -> None:
        super().__init__()
        self.skipped = skipped

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx in self.skipped else super().training_step(batch, batch_idx)


def test_a_step_that_was_skipped_is_not_what_work_is_counted_on() -> None:
    forget_compiles()
    found = []
    for skipped in ((), (1,), (1, 3, 4, 5)):
        loop = FastLoop({"watch": {"warmup_steps": 6}}, quiet=True)
        trainer(max_epochs=2, callbacks=[loop]).fit(Skips(*skipped), loader())
        assert loop.measurement is not None
        found.append(loop.measurement.flops)
    assert found[0]["per_sample"] == found[1]["per_sample"] > 0
    assert found[2]["per_sample"] is None and "the counted step had no" in found[2]["why"]
    assert loop.measurement.tflop_per_s is None, "n/a, and not 0"


def test_a_start_that_fails_leaves_torchs_classes_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.output_graph import OutputGraph

    def fail(_self: Any, _trainer: Any) -> None:
        raise LookupError("the bar has no figures")

    usual = OutputGraph.call_user_compiler
    monkeypatch.setattr(session.LiveMetrics, "show_on_bar", fail)
    with pytest.warns(UserWarning, match="the bar has no figures"):
        trainer(callbacks=[FastLoop()]).fit(Regression(), loader())
    assert OutputGraph.call_user_compiler is usual


def test_what_was_hunted_is_said_though_nothing_was_found() -> None:
    for steps, hunted in ((24, 5), (4, 0)):
        loop = FastLoop({"watch": {"warmup_steps": 2}}, quiet=True)
        loop.hunt_syncs = True
        trainer(max_epochs=-1, max_steps=steps, callbacks=[loop]).fit(Regression(), loader())
        assert loop.measurement is not None and loop.measurement.evidence[SYNCS] == {"hunted_steps": hunted}
    plain = FastLoop(quiet=True)
    trainer(callbacks=[plain]).fit(Regression(), loader())
    assert plain.measurement is not None and SYNCS not in plain.measurement.evidence


class Scheduled(Regression):
    """Its learning rate takes a while to find, every step."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        slow = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: sleep(0.002) or 1.0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": slow, "interval": "step"}}


def test_a_slow_schedule_is_named() -> None:
    loop = FastLoop({"watch": {"warmup_steps": 2}}, quiet=True)
    trainer(max_epochs=2, callbacks=[loop]).fit(Scheduled(), loader())
    assert loop.measurement is not None and "Scheduled.lr_scheduler_step" in loop.measurement.hooks_ms


@pytest.mark.parametrize(
    ("raised", "line"),
    [(ValueError("\nfirst\nsecond"), "ValueError: first"), (ValueError(), "ValueError"), (KeyboardInterrupt(), None)],
)
def test_what_a_fit_died_of_is_one_line(raised: BaseException, line: str | None) -> None:
    assert describe_death(raised, SimpleNamespace(received_sigterm=False)) == line


def test_a_fit_that_was_told_to_end_did_not_die_of_its_workers() -> None:
    raised = RuntimeError("DataLoader worker (pid 7) is killed by signal: Terminated.")
    assert describe_death(raised, SimpleNamespace(received_sigterm=True)) is None


class Breaks(L.Callback):
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 12:
            raise KeyError("user's own")


class BreaksAfterwards(L.Callback):
    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        raise KeyError("user's own")


@pytest.mark.parametrize(
    ("ends", "partial", "steps"),
    [((), False, 13), ((Breaks,), True, 9), ((BreaksAfterwards,), True, 13)],
    ids=["well", "badly", "badly once it was measured"],
)
def test_a_fit_that_raises_is_measured_as_far_as_it_went(
    ends: tuple[type[L.Callback], ...], partial: bool, steps: int
) -> None:
    loop = FastLoop({"watch": {"warmup_steps": 2}}, quiet=True)
    made = trainer(max_epochs=2, callbacks=[loop, *(kind() for kind in ends)])
    before = made.profiler
    try:
        made.fit(Regression(), loader())
    except KeyError:
        assert partial
    assert loop.measurement is not None and loop.measurement.partial is partial
    assert loop.measurement.died_of == ('KeyError: "user\'s own"' if partial else None)
    assert [finding.title for finding in loop.findings].count("DIED") == partial
    assert loop.measurement.steps == steps and loop.measurement.samples_per_s
    assert made.profiler is before and vars(made._logger_connector).keys().isdisjoint({"update_train_step_metrics"})


class MixesTypes(Regression):
    terminated = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 5:
            self.trainer._signal_connector.received_sigterm = self.terminated
            torch.zeros(2)[[0]] = torch.zeros(1, dtype=torch.bfloat16)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(("rungs", "terminated"), [({"amp": {"enabled": True}}, False), ({}, False), ({}, True)])
def test_a_report_says_what_a_rung_knows_of_the_error(rungs: Any, terminated: bool) -> None:
    """But not of one that may come from a SIGTERM to the whole process group, such as workers that are gone."""
    loop = FastLoop({"rungs": rungs or {"amp": {"enabled": terminated}}}, quiet=True)
    module = MixesTypes()
    module.terminated = terminated
    with pytest.raises(RuntimeError, match="BFloat16"):
        trainer(callbacks=[loop]).fit(module, loader())
    assert loop.measurement is not None
    assert ("write rungs.amp.enabled: false" in str(loop.measurement.evidence.get("died"))) is bool(rungs)
    assert [each.title for each in loop.findings[:1]].count("DIED") == (not terminated)


def test_where_the_cpu_is_busy_with_the_optimizer_its_fused_form_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    for worth, known in ((0.0, True), (101.0, False)):
        monkeypatch.setattr(session, "CPU_WORTH_PCT", worth)
        loop = FastLoop({"watch": {"warmup_steps": 2}}, quiet=True)
        trainer(max_epochs=2, callbacks=[loop]).fit(Regression(), loader())
        assert loop.measurement is not None
        found = loop.measurement.evidence.get("optimizer", {})
        assert found.keys() == ({"own", "no_fused_form", "fusing_saves_ms"} if known else set())


class SecondOrder(Regression):
    """Computes the loss several times a step."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.01, max_iter=4)


def test_an_optimizer_that_computes_the_loss_several_times_a_step_is_named() -> None:
    """Only the work without gradients was named, although the optimizer took longer."""
    loop = FastLoop({"watch": {"warmup_steps": 2}}, quiet=True)
    trainer(max_epochs=4, callbacks=[loop]).fit(SecondOrder(), loader())
    assert loop.measurement is not None
    found = loop.measurement.evidence["optimizer"]
    assert found["no_fused_form"] == ["LBFGS"] and 1 < found["evaluations_per_step"] <= 5
    assert any("LBFGS takes" in each.why and "which it runs" in each.why for each in loop.findings)


class Replaces(L.Callback):
    """Puts another profiler into the Trainer, as some callbacks do."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.step:
            trainer.profiler = trainer.profiler.__class__()


@pytest.mark.parametrize(("step", "steps"), [(1, 0), (9, 6), (99, 13)])
def test_a_profiler_that_is_replaced_is_said_and_the_steps_before_it_stand(step: int, steps: int) -> None:
    loop = FastLoop({"watch": {"warmup_steps": 2}}, quiet=True)
    trainer(max_epochs=2, callbacks=[loop, Replaces(step)]).fit(Regression(), loader())
    seen = loop.measurement
    assert seen is not None and (seen.steps, seen.total_steps) == (steps, 16)
    assert (REPLACED in seen.state) == (step < 99) and (seen.first_step == 3 or not steps)
    assert loop.findings[0].title == "NOT MEASURED" or steps


@pytest.mark.parametrize(("share", "said"), [(0.1, False), (0.42, True), (None, False)])
def test_a_crowded_machine_is_named(share: float | None, said: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    began = perf_counter()
    wait = (lambda: None) if share is None else (lambda: share * (perf_counter() - began))
    monkeypatch.setattr(machine, "read_cpu_wait_s", wait)
    loop = FastLoop({"watch": {"warmup_steps": 2}}, quiet=True)
    trainer(max_epochs=2, callbacks=[loop]).fit(Regression(), loader())
    assert loop.measurement is not None
    named = [each for each in loop.measurement.state if "waited for a CPU for about 40 % of the time" in each]
    assert bool(named) is said
    assert ("cpu" in loop.measurement.evidence) is said


class FindsAnomalies(Regression):
    def on_train_start(self) -> None:
        torch.autograd.set_detect_anomaly(True)


@pytest.mark.parametrize(
    ("module", "flag", "is_on"), [(Regression, True, True), (FindsAnomalies, False, True), (Regression, False, False)]
)
def test_anomaly_mode_is_seen_wherever_it_was_switched_on(module: type[Regression], flag: bool, is_on: bool) -> None:
    loop = FastLoop({"watch": {"warmup_steps": 2}}, quiet=True)
    trainer(callbacks=[loop], detect_anomaly=flag).fit(module(), loader())
    assert (loop.findings[0].title == "SLOWED BY ANOMALY MODE") is is_on


# -- the garbage collector --------------------------------------------------------------------------------------------

collects = getattr(gc, "collect")  # noqa: B009 (so that no function here names it: a pass of the collector's own)


class Collects(torch.utils.data.Dataset[Any]):
    """Pairs, and one pass over a million objects when a certain one is asked for."""

    def __init__(self) -> None:
        self.kept = [[number] for number in range(1_000_000)]
        self.passes = 0

    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int) -> Any:
        if index == 150:
            self.passes += collects() >= 0
        return torch.ones(8), torch.ones(1)


@pytest.mark.parametrize(("listens", "named"), [(True, "host_other"), (False, "none")])
def test_a_pass_of_the_garbage_collector_is_not_the_loaders(
    listens: bool, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not listens:
        monkeypatch.setattr("fastloop.evidence.clock.gc_pauses.Garbage.start", lambda _: None)
    loop, data, before = FastLoop({"watch": {"warmup_steps": 5}}, quiet=True), Collects(), list(gc.callbacks)
    made = trainer(callbacks=[loop])
    made.fit(Regression(), torch.utils.data.DataLoader(data, batch_size=8))
    assert data.passes == 1 and gc.callbacks == before and loop.measurement is not None
    assert loop.findings[0].bottleneck == named, loop.findings
    assert ("garbage collection took" in loop.findings[0].why) is listens
    step_ms = loop.measurement.step_ms["mean"]
    assert abs(loop.measurement.parts_ms["unexplained"]) < max(1.0, 0.1 * step_ms), "beside other work some is"


class Tidies(Regression):
    """Collects garbage by itself in every step, or not at all."""

    def __init__(self, often: bool) -> None:
        super().__init__()
        self.often = often

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.often:
            gc.collect()
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("often", [True, False])
def test_a_line_that_collects_garbage_is_named(often: bool) -> None:
    host = {"enabled": True, "gc_every_steps": 4}
    loop = FastLoop({"watch": {"warmup_steps": 5}, "rungs": {"host": host}}, quiet=True)
    pairs = torch.utils.data.TensorDataset(torch.ones(80, 8), torch.ones(80, 1))
    trainer(callbacks=[loop]).fit(Tidies(often), torch.utils.data.DataLoader(pairs, batch_size=8))
    assert loop.measurement is not None
    found = loop.measurement.evidence.get("requested_garbage_collection")
    if not often:
        assert found is None, "the rung's own passes are not the user's"
        return
    line = Tidies.training_step.__code__.co_firstlineno + 2
    assert found is not None and str(found["where"]).endswith(f"test_session.py:{line}") and found["ms_per_step"] > 0
    assert f"gc.collect() at {found['where']}" in loop.findings[0].why


class Dozes(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        sleep(0.01)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(("kind", "count"), [(Dozes, 1), (Regression, 0)], ids=["sleeps", "control"])
def test_the_line_that_takes_the_time_is_found_in_the_warm_up(kind: type[Regression], count: int) -> None:
    loop = FastLoop({"watch": {"warmup_steps": 20}}, quiet=True)
    trainer(max_epochs=-1, max_steps=30, callbacks=[loop]).fit(kind(), loader())
    assert loop.measurement is not None
    lines = loop.measurement.evidence.get("lines", {}).get("lines", [])
    named = [line for line in lines if line["share_pct"] > 50]
    assert [(line["of"], line["function"]) for line in named] == count * [("training_step", "training_step")]

"""The callback as its users meet it: what it refuses, says, writes, and what it does when it breaks."""

from __future__ import annotations

import functools
import importlib
import json
import re
from pathlib import Path
from typing import Any

import lightning as L
import numpy
import pytest
import torch
from lightning.pytorch.profilers import SimpleProfiler
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from fastloop import ConfigError, FastLoop, FastLoopError
from fastloop.bridge.apply.applier import Applier
from fastloop.evidence.trace.other_profilers import find_other_profiler
from fastloop.records.plan import Plan
from tests.models import Regression, loader, trainer

pytestmark = pytest.mark.short

CLAIM = re.compile(
    r"speed.?ups?|faster|slower(?! with)|quicker|times as fast|\d %? ?gain|\d(\.\d+)?x(?! (cpu|cuda)\b)", re.I
)
WORKERS = {"watch": {"warmup_steps": 1}, "rungs": {"workers": {"enabled": True, "count": 1}}}
EARLY = {"watch": {"warmup_steps": 2}}
TRACED = {"watch": {"warmup_steps": 2, "trace_steps": 2}}


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The lines it says on rank 0."""
    lines: list[str] = []
    for module in ("callback", "lines"):
        monkeypatch.setattr(f"fastloop.bridge.fit.{module}.rank_zero_info", lines.append)
    return lines


@pytest.fixture
def warned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The warnings it gives on rank 0."""
    lines: list[str] = []
    for module in ("callback", "lines", "run_directory"):
        monkeypatch.setattr(f"fastloop.bridge.fit.{module}.rank_zero_warn", lines.append)
    return lines


def fit(loop: FastLoop | None, **settings: Any) -> Regression:
    torch.manual_seed(0)
    module = Regression()
    trainer(**{"max_epochs": 2, **settings}, callbacks=[loop] if loop else []).fit(module, loader(shuffle=True))
    return module


@functools.cache
def plain_losses() -> list[float]:
    """Those of the same fit without us."""
    return fit(None).losses


# -- what it refuses ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["strict", "quiet"])
@pytest.mark.parametrize("value", ["yes", 2])
def test_a_switch_is_true_or_false(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match="it must be true or false") as caught:
        FastLoop(**{name: value})
    assert caught.value.got == f"{name}: {value!r} (FastLoop)"
    FastLoop(**{name: numpy.bool_(True)})
    FastLoop(**{name: 0})


@pytest.mark.parametrize("space", ["lightning.pytorch", "pytorch_lightning"])
def test_two_in_one_trainer_are_refused_by_us_and_not_by_lightning(space: str) -> None:
    importlib.import_module(space).Trainer(accelerator="cpu", logger=False, callbacks=[FastLoop(), FastLoop()])
    made = trainer(callbacks=[FastLoop(), FastLoop("safe")])
    with pytest.raises(FastLoopError, match="2 FastLoop callbacks in one Trainer") as error:
        made.fit(Regression(), loader())
    assert error.value.do and error.value.why
    assert type(made.strategy).__name__ == "SingleDeviceStrategy"


def test_an_unknown_ladder_is_refused_with_a_suggestion() -> None:
    with pytest.raises(ConfigError) as error:
        FastLoop("saef")
    assert "saef" in error.value.got and "safe" in error.value.do
    with pytest.raises(ConfigError, match=r"rungs\.worker"):
        FastLoop({"rungs": {"worker": {"enabled": True}}})


@pytest.mark.parametrize("strict", ["in the config", "as an argument"])
def test_strict_raises_before_the_first_step(strict: str) -> None:
    config = {"strict": strict == "in the config", "rungs": {"overlap": {"enabled": True}}}
    loop, module = FastLoop(config, strict=None if config["strict"] else True), Regression()
    with pytest.raises(ConfigError, match=r"rungs\.overlap\n  why with strict: true, a rung that") as error:
        trainer(callbacks=[loop]).fit(module, loader())
    assert module.losses == [] and "needs DDP" in error.value.why and loop.measurement is None
    fit(FastLoop(config, strict=False))  # the argument wins over the config


def test_strict_covers_what_waits_for_the_loader() -> None:
    module = Regression()
    with pytest.raises(ConfigError, match=r"rungs\.workers\n  why with strict: true, a rung that"):
        trainer(callbacks=[FastLoop(WORKERS, strict=True)]).fit(module, loader(num_workers=1))
    assert module.losses == []


# -- what it says ---------------------------------------------------------------------------------------------------


def test_sections_it_ignores_are_named_in_one_line(said: list[str], tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    sections = "recipe: {size: tiny}", "run: {max_steps: 3}", "trainer: {}", "rungs: {pin: {enabled: true}}"
    path.write_text("\n".join(sections))
    loop = FastLoop(str(path))
    assert len(said) == 1 and all(name in said[0] for name in ("recipe", "run", "trainer"))
    assert loop.config.run.max_steps == 200 and loop.config.ladder.pin.enabled
    FastLoop(path, quiet=True)
    FastLoop("safe")
    assert len(said) == 1


@pytest.mark.parametrize("config", [None, "safe", "full", WORKERS], ids=["watch", "safe", "full", "workers"])
def test_it_says_at_most_12_lines_once_and_claims_no_gain(
    config: Any, said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **settings: function)  # Inductor would take ten seconds
    fit(FastLoop(config, out=tmp_path))
    assert 2 <= len(said) <= 12 and all("\n" not in line for line in said)
    assert said[0].startswith("fastloop ") and said[-1] == f"REPORT   {tmp_path / 'report.html'}"
    text = "\n".join(said)
    assert not CLAIM.search(text), CLAIM.search(text)
    assert "\x1b" not in text and "\r" not in text
    report = (tmp_path / "report.md").read_text()
    assert not CLAIM.search(
        report.replace("We never claim a speed-up from a single run: that takes an A/B test over several.", "")
    )


def test_the_search_for_claims_finds_some() -> None:
    for claim in ("a speedup of", "1.5x", "30 % gain", "runs faster", "twice the speed-up"):
        assert CLAIM.search(claim), claim
    assert not CLAIM.search("fastloop NO BOTTLENECK FOUND   8x cuda   steps 2-16")


def test_quiet_says_nothing(said: list[str], tmp_path: Path) -> None:
    loop = FastLoop(WORKERS, out=tmp_path, quiet=True)
    fit(loop)
    assert said == [] and loop.run_dir == tmp_path and (tmp_path / "report.md").is_file()


def test_without_watching_and_rungs_it_says_nothing(said: list[str]) -> None:
    loop = FastLoop({"watch": {"enabled": False}})
    fit(loop)
    assert said == [] and loop.plan == Plan() and loop.measurement is not None and loop.measurement.steps == 0


# -- what it knows after fit ----------------------------------------------------------------------------------------


def test_after_fit_the_records_are_there() -> None:
    loop = FastLoop(WORKERS, quiet=True)
    assert (loop.plan, loop.measurement, loop.verdicts, loop.findings) == (Plan(), None, (), ())
    module = fit(loop)
    assert loop.measurement is not None and loop.measurement.total_steps == 16 and loop.measurement.steps > 0
    assert loop.measurement.loss == pytest.approx(module.losses) and loop.measurement.global_batch == 8
    assert [step.rung for step in loop.plan.steps] == ["workers"] == [verdict.rung for verdict in loop.verdicts]
    assert loop.verdicts[0].took and len({finding.bottleneck for finding in loop.findings}) >= 1
    assert loop.measurement.samples_per_s and loop.measurement.watch_us_per_step


def test_rungs_are_verified_without_watching_too() -> None:
    loop = FastLoop({**WORKERS, "watch": {"enabled": False}}, quiet=True)
    fit(loop)
    assert loop.verdicts[0].took, "the workers have ended by the end of fit: evidence is taken after the first batch"
    assert loop.on_train_batch_end is None, "a batch costs microseconds with nothing to do"
    assert loop.measurement is not None and loop.measurement.total_steps is None, "nobody counted them"
    fit(loop)
    assert loop.verdicts[0].took


def test_a_run_too_short_to_judge(said: list[str], tmp_path: Path) -> None:
    loop = FastLoop(out=tmp_path)
    fit(loop, max_epochs=-1, max_steps=3)
    assert loop.measurement is not None and (loop.measurement.steps, loop.measurement.total_steps) == (0, 3)
    assert "TOO SHORT" in said[0] and loop.findings[0].bottleneck == "none" and "not timed" in loop.findings[0].why
    assert json.loads((tmp_path / "measurement.json").read_text())["samples_per_s"] is None


@pytest.mark.parametrize("settings", [{"limit_train_batches": 0}, {"max_epochs": 0}, {"max_steps": 0}])
def test_a_fit_without_steps(settings: dict[str, Any], tmp_path: Path, warned: list[str]) -> None:
    loop = FastLoop("safe", out=tmp_path, quiet=True)
    fit(loop, **settings)
    assert loop.measurement is not None and loop.measurement.total_steps == 0 and not loop.measurement.partial
    assert {verdict.rung for verdict in loop.verdicts} == {"cache", "workers", "pin", "prefetch", "host", "overlap"}
    assert not any(verdict.took for verdict in loop.verdicts) and warned == []
    assert (tmp_path / "measurement.json").is_file()


# -- what it does when it breaks ------------------------------------------------------------------------------------


def broken(*args: Any, **kwargs: Any) -> Any:
    raise ZeroDivisionError("planted")


@pytest.mark.parametrize(
    ("place", "config"),
    [
        ("fastloop.bridge.watch.window.Watch.batch_end", None),
        ("fastloop.bridge.watch.window.Watch.__init__", None),
        ("fastloop.bridge.watch.window.Watch.close", None),
        ("fastloop.bridge.watch.session.Session.train_start", None),
        ("fastloop.bridge.watch.session.build_measurement", None),
        ("fastloop.bridge.watch.session.count_planned_steps", None),
        ("fastloop.bridge.watch.session.LiveMetrics.tick", None),
        ("fastloop.bridge.watch.probes.CountWork.begin", EARLY),
        ("fastloop.bridge.watch.probes.CountWork.end", EARLY),
        ("fastloop.bridge.watch.probes.TraceProbe.begin", TRACED),
        ("fastloop.bridge.watch.probes.TraceProbe.step_ends", TRACED),
        ("fastloop.bridge.watch.probes.TraceProbe.end", TRACED),
        ("fastloop.bridge.watch.token_rates.Tokens.add", EARLY),
        ("fastloop.bridge.watch.log_marks.LogMarks.__init__", None),
        ("fastloop.evidence.clock.step_clock.Clock.note_batch_requested", None),
        ("fastloop.evidence.clock.step_clock.Clock.note_batch_received", None),
        ("fastloop.evidence.clock.step_clock.Clock.close", None),
        ("fastloop.evidence.clock.loss_log.LossLog.add", None),
        ("fastloop.bridge.watch.loader_state.count_queued_batches", None),
        ("fastloop.bridge.watch.loader_state.gather_evidence", None),
        ("fastloop.diagnose.list_findings", None),
        ("fastloop.report.run.summary.write_lines", None),
        ("fastloop.bridge.fit.run_directory.write", None),
        ("fastloop.bridge.fit.callback.verify", WORKERS),
        ("fastloop.bridge.apply.applier.Applier.evidence", WORKERS),
        ("fastloop.bridge.apply.applier.Applier.train_start", WORKERS),
    ],
)
def test_watching_fails_open(
    place: str, config: Any, monkeypatch: pytest.MonkeyPatch, warned: list[str], tmp_path: Path
) -> None:
    plain = plain_losses()
    monkeypatch.setattr(place, broken)
    loop = FastLoop(config, out=tmp_path)
    assert fit(loop).losses == plain
    assert len(warned) == 1 and "ZeroDivisionError: planted" in warned[0] and "training continues" in warned[0], warned
    assert _get_current_dispatch_mode_stack() == [] and find_other_profiler(cuda=False) is None, (
        "nothing of ours goes on"
    )
    monkeypatch.undo()
    fit(loop)
    assert loop.measurement is not None and loop.measurement.total_steps == 16, "the next fit is watched again"


@pytest.mark.parametrize(
    "place",
    [
        "apply.read_facts.read_run_facts",
        "apply.read_facts.read_loader_facts",
        "apply.applier.plan",
        "apply.applier.TrainLoaders",
        "apply.loaders.clone",
        "fit.strategy.mix_in",
    ],
)
def test_a_rung_that_cannot_be_applied_is_skipped_with_the_reason(
    place: str, monkeypatch: pytest.MonkeyPatch, warned: list[str]
) -> None:
    plain = plain_losses()
    monkeypatch.setattr(f"fastloop.bridge.{place}", broken)
    loop = FastLoop(WORKERS, quiet=True)
    module = fit(loop)
    assert module.losses == plain and warned == []
    assert [(verdict.took, "planted" in verdict.why) for verdict in loop.verdicts] == [(False, True)]
    assert loop.measurement is not None and loop.measurement.total_steps == 16
    strict = Regression()
    with pytest.raises(ConfigError, match="planted"):
        trainer(callbacks=[FastLoop(WORKERS, strict=True)]).fit(strict, loader())
    assert strict.losses == []


def test_an_undo_that_fails_does_not_keep_the_others_from_theirs(
    monkeypatch: pytest.MonkeyPatch, warned: list[str]
) -> None:
    loop = FastLoop({"rungs": {"amp": {"enabled": True}, "fused": {"enabled": True}}}, quiet=True)
    made = trainer(callbacks=[loop])
    profiler, precision = made.profiler, made.strategy.precision_plugin
    monkeypatch.setattr("fastloop.bridge.apply.applier.Applier.undo", broken)
    made.fit(Regression(torch.optim.AdamW), loader())
    assert type(made.strategy).__name__ == "SingleDeviceStrategy" and made.profiler is profiler
    assert made.strategy.precision_plugin is not precision, "the undo ran: nothing was tested"
    assert len(warned) == 1 and "planted" in warned[0]


def test_an_undo_that_is_interrupted_goes_on_after_the_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in teardown, which Lightning passes on to on_exception: the Trainer kept our strategy and its settings."""
    undo, calls = Applier.undo, list[Applier]()

    def interrupted(self: Applier) -> None:
        calls.append(self)
        if len(calls) == 1:
            raise KeyboardInterrupt
        undo(self)

    monkeypatch.setattr(Applier, "undo", interrupted)
    made = trainer(callbacks=[FastLoop({"rungs": {"amp": {"enabled": True}, "fused": {"enabled": True}}}, quiet=True)])
    profiler, precision = made.profiler, made.strategy.precision_plugin
    with pytest.raises((KeyboardInterrupt, SystemExit)):  # Lightning 2.5 and later exit
        made.fit(Regression(torch.optim.AdamW), loader())
    assert len(calls) == 2 and calls[0] is calls[1]
    assert type(made.strategy).__name__ == "SingleDeviceStrategy" and made.profiler is profiler
    assert made.strategy.precision_plugin is precision


# -- what switches it off -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("value", "off"), [("1", True), ("yes", True), ("0", False), ("", False)])
def test_the_switch_in_the_environment(
    value: str, off: bool, monkeypatch: pytest.MonkeyPatch, said: list[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("FASTLOOP_DISABLE", value)
    loop = FastLoop(out=tmp_path / "run")
    fit(loop)
    assert (loop.measurement is None) == off == (said == []) == (not (tmp_path / "run").exists())
    if off:
        FastLoop("no such ladder")  # a broken config is no reason to stop what it shall not touch


def test_hooks_without_work_are_not_called() -> None:
    """Lightning skips callback hooks that are not callable, and each one called costs a microsecond or more."""

    def heard(loop: FastLoop) -> set[str]:
        names = (name for name in dir(loop) if name.startswith(("on_train_batch", "on_before", "on_after")))
        return {name for name in names if callable(getattr(loop, name))}

    assert heard(FastLoop({"watch": {"enabled": False}})) == set() == heard(FastLoop())
    watching = FastLoop(quiet=True)
    fit(watching)
    assert heard(watching) == {"on_train_batch_end"}
    silent = FastLoop({"watch": {"enabled": False}})
    fit(silent)
    assert heard(silent) == set()


def test_hooks_of_a_subclass_are_called() -> None:
    class Mine(FastLoop):
        started = ended = 0

        def on_train_batch_start(self, *args: Any) -> None:
            self.started += 1

        def on_train_batch_end(self, *args: Any) -> None:
            self.ended += 1

    mine = Mine({"watch": {"enabled": False}})
    fit(mine)
    assert (mine.started, mine.ended) == (16, 16)


def test_a_profiler_put_in_place_during_fit_stays() -> None:
    class Replaces(L.Callback):
        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            trainer.profiler = self.profiler = SimpleProfiler()

    other = Replaces()
    made = trainer(callbacks=[FastLoop(quiet=True), other])
    made.fit(Regression(), loader())
    assert made.profiler is other.profiler


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_losses_of_one_number_in_any_shape(shape: tuple[int, ...], warned: list[str], tmp_path: Path) -> None:
    class Shaped(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return super().training_step(batch, batch_idx).reshape(shape)

    loop, module = FastLoop(quiet=True, out=tmp_path), Shaped()
    trainer(callbacks=[loop]).fit(module, loader())
    assert loop.measurement is not None and loop.measurement.loss == pytest.approx(module.losses) and warned == []

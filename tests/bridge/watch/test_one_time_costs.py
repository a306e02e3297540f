"""What comes once in a real fit is told apart: compiles, the start of workers, rehearsals. All on the CPU.

Time passes on a clock that nothing else on this machine moves, but for the start of workers.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import psutil
import pytest
import torch
from torch.utils.data import DataLoader

from fastloop import FastLoop
from fastloop.bridge.apply.rehearse.rehearsal import Rehearsal
from fastloop.bridge.watch import one_time_costs
from fastloop.bridge.watch.one_time_costs import Compilations, WorkerStarts
from fastloop.evidence.clock.one_time import OneTime, Reader
from fastloop.records.measurement import ONE_TIME, Measurement
from tests.bridge.watch import planted
from tests.bridge.watch.made_up import forget_compiles
from tests.models import trainer

COMPILE_S, STEP_S = 2.0, 0.01
STEPS, BATCH = 40, 4
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="only /proc tells when a process was started")


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    forget_compiles()
    yield
    forget_compiles()


@pytest.fixture(autouse=True)
def own_clock(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.function in (
        test_the_start_of_workers_is_timed,
        test_a_process_is_not_older_than_the_call_that_started_it,
    ):
        monkeypatch.setattr(planted, "sleep", time.sleep)
        return
    began = time.time() - planted.read_clock_s()
    planted.use_clock(monkeypatch)
    monkeypatch.setattr(time, "perf_counter", planted.read_clock_s)
    monkeypatch.setattr(time, "time", lambda: began + planted.read_clock_s())
    monkeypatch.setattr(time, "time_ns", lambda: int(1e9 * (began + planted.read_clock_s())))


def slow(seconds: float = COMPILE_S) -> Callable[..., Any]:
    """A backend of torch.compile that takes as long as it is told to, and runs the graph as it is."""

    def backend(graph: Any, _inputs: Any) -> Any:
        planted.sleep(seconds)
        return graph.forward

    return backend


class Compiled(L.LightningModule):
    """The user compiles a part of it; its steps last some milliseconds."""

    def __init__(self, backend: Any = None, *, validation_s: float = 0.0, **settings: Any) -> None:
        super().__init__()
        net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
        self.net = net if backend is None else torch.compile(net, backend=backend, **settings)
        self.validation_s, self.step_s = validation_s, STEP_S

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        planted.sleep(self.step_s)
        return self.net(batch).square().mean()

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        planted.sleep(self.validation_s)
        self.net(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def batches(size: int = BATCH, count: int = STEPS, **settings: Any) -> Any:
    return DataLoader(torch.randn(size * count, 8), batch_size=size, **settings)  # type: ignore[arg-type]


def one_by_one(lengths: list[int]) -> Any:
    """A batch of each length."""
    return DataLoader([torch.randn(length, 8) for length in lengths], batch_size=None)  # type: ignore[arg-type]


def fit(module: L.LightningModule, train: Any = None, val: Any = None, *, warmup: int = 4, **settings: Any) -> FastLoop:
    """A fit of `STEPS` steps, watched, with one validation in the window where there is a loader for it."""
    settings = {"max_steps": STEPS, "max_epochs": -1, "num_sanity_val_steps": 0, "val_check_interval": 20, **settings}
    loop = FastLoop({"watch": {"warmup_steps": warmup}}, quiet=True)
    callbacks = [*settings.pop("callbacks", ()), loop]
    made = trainer(callbacks=callbacks, **(settings if val is not None else {**settings, "val_check_interval": None}))
    made.fit(module, batches() if train is None else train, val)
    assert loop.measurement is not None and not loop._stopped and loop.findings
    return loop


def seen(loop: FastLoop) -> Measurement:
    assert loop.measurement is not None
    return loop.measurement


def validation_s(measured: Measurement) -> float:
    """Seconds of the window that count as validation."""
    return (measured.parts_ms["validation"] or 0.0) * measured.steps / 1e3


def names(loop: FastLoop) -> list[str]:
    return [finding.bottleneck for finding in loop.findings]


@pytest.fixture
def count_everything(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """The negative control: nothing is taken out of the steps."""
    return lambda: monkeypatch.setattr(Reader, "take", lambda *_: (0.0, 0.0))


def test_the_compile_of_the_first_validation_is_no_bottleneck(count_everything: Callable[[], None]) -> None:
    measured = seen(loop := fit(Compiled(slow()), val=batches(6, 2)))
    assert measured.one_time_s["validation_compile"] == pytest.approx(COMPILE_S, rel=0.8), measured.one_time_s
    assert (measured.one_time_s["validation_compile"] or 0.0) >= COMPILE_S
    assert (measured.one_time_s["compile"] or 0.0) >= COMPILE_S, "that of the first step is the training's"
    assert validation_s(measured) < COMPILE_S / 2 and names(loop)[0] != "validation"
    assert (measured.wall_ms or 0.0) < 1e3 * COMPILE_S, "two seconds of compiling is in no figure of the window"
    assert measured.samples_per_s == pytest.approx(BATCH * measured.steps / (measured.wall_ms or 0.0) * 1e3)
    count_everything()
    forget_compiles()
    control = fit(Compiled(slow()), val=batches(6, 2))
    assert validation_s(seen(control)) > COMPILE_S and names(control)[0] == "validation", control.findings


def test_a_slow_validation_stays_one_whether_it_compiles_or_not() -> None:
    for backend in (slow(), None):
        loop = fit(Compiled(backend, validation_s=0.4), val=batches(6, 2))
        assert names(loop)[0] == "validation", loop.findings
        assert validation_s(seen(loop)) == pytest.approx(0.8, rel=0.3), "two batches of one validation"
        compiled = seen(loop).one_time_s["validation_compile"]
        assert compiled == 0.0 if backend is None else (compiled or 0.0) >= COMPILE_S


def test_the_sanity_validation_compiles_for_the_validation_too() -> None:
    loop = fit(Compiled(slow(0.3)), val=batches(6, 2), num_sanity_val_steps=1, warmup=STEPS - 5)
    assert (seen(loop).one_time_s["validation_compile"] or 0.0) >= 0.3
    assert loop._session is None and seen(loop).evidence["compilation"]["count"] == 2, "and not again in the fit"


def test_a_compile_for_a_new_shape_is_in_no_step(count_everything: Callable[[], None]) -> None:
    lengths = [5 if step == 25 else BATCH for step in range(STEPS)]
    measured = seen(loop := fit(Compiled(slow(), dynamic=False), one_by_one(lengths)))
    assert (measured.one_time_s["compile"] or 0.0) >= 2 * COMPILE_S, "the first step's, and that of step 25"
    assert (measured.wall_ms or 0.0) < 1e3 * COMPILE_S
    assert "pauses" not in measured.evidence and measured.evidence["compilation"]["count"] == 2
    assert (
        measured.evidence["compilation"]["steps"] == 2
        and "size mismatch" in measured.evidence["compilation"]["reasons"][0]
    )
    assert "ms_per_step" not in measured.evidence["compilation"] and loop.findings[0].title != "SINGLE PAUSES"
    count_everything()
    forget_compiles()
    assert (seen(fit(Compiled(slow(), dynamic=False), one_by_one(lengths))).wall_ms or 0.0) > 1e3 * COMPILE_S


def test_compiles_that_go_on_stay_in_the_figures() -> None:
    """A rate without them would praise a run that does little else."""
    lengths = [BATCH + step % 12 if 5 < step < 35 else BATCH for step in range(STEPS)]
    with torch._dynamo.config.patch(recompile_limit=64):
        measured = seen(loop := fit(Compiled(slow(0.05), dynamic=False), one_by_one(lengths)))
    found = measured.evidence["compilation"]
    assert found["count"] == found["steps"] == 12 and found["ms_per_step"] * measured.steps >= 11 * 50
    assert (measured.one_time_s["compile"] or 0.0) >= 12 * 0.05
    assert (measured.parts_ms["host_other"] or 0.0) >= found["ms_per_step"]
    assert (measured.wall_ms or 0.0) >= 11 * 50
    assert measured.samples_per_s == pytest.approx(sum(lengths[-measured.steps :]) / (measured.wall_ms or 0.0) * 1e3)
    assert loop.findings[0].title == "KEEPS RECOMPILING", loop.findings


@pytest.mark.slow
def test_real_compiles_are_found_with_their_time() -> None:
    """Inductor's own, and the validation's for another shape."""
    measured = seen(loop := fit(Compiled("inductor", dynamic=False), val=batches(6, 2)))
    compiled, validation = (measured.one_time_s[cause] or 0.0 for cause in ("compile", "validation_compile"))
    assert compiled > 0.05 and validation > 0.05, measured.one_time_s
    assert measured.one_time_s["autotune"] == 0.0
    assert validation_s(measured) < validation and names(loop)[0] != "validation"
    assert measured.evidence["compilation"]["count"] == 2


def test_a_rehearsal_is_in_no_step_and_its_compile_counts_as_one() -> None:
    class Rehearses(L.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            if trainer.global_step == 10:
                assert loop._session is not None
                began = time.perf_counter()
                with loop._session.one_time.span("rehearsal"):
                    planted.sleep(COMPILE_S)
                    torch.compile(torch.nn.Linear(3, 3), backend=slow(0.3))(torch.randn(2, 3))
                took_s.append(time.perf_counter() - began)

    took_s: list[float] = []
    loop = FastLoop({"watch": {"warmup_steps": 4}}, quiet=True)
    trainer(callbacks=[Rehearses(), loop], max_steps=STEPS, max_epochs=-1).fit(Compiled(), batches())
    measured = seen(loop)
    assert (measured.one_time_s["rehearsal"] or 0.0) >= COMPILE_S and (measured.one_time_s["compile"] or 0.0) >= 0.3
    in_all = sum(seconds or 0.0 for seconds in measured.one_time_s.values())
    assert in_all == pytest.approx(took_s[0], abs=0.1), "each moment counts once"
    assert (measured.wall_ms or 0.0) < 1e3 * COMPILE_S, "of 36 steps of some milliseconds"


@pytest.mark.parametrize("rehearsal", ["on", "off"])
def test_the_rehearsal_of_a_rung_is_told_apart(rehearsal: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Rehearsal.run
    monkeypatch.setattr(Rehearsal, "run", lambda self, *how: (planted.sleep(COMPILE_S), run(self, *how))[1])
    config = {"watch": {"warmup_steps": 1}, "rehearsal": rehearsal, "rungs": {"amp": {"enabled": True}}}
    loop = FastLoop(config, quiet=True)
    trainer(callbacks=[loop], max_steps=STEPS, max_epochs=-1).fit(Compiled(), batches())
    took, measured = seen(loop).one_time_s["rehearsal"], seen(loop)
    assert took is not None and (took >= COMPILE_S if rehearsal == "on" else took == 0.0)
    assert (loop.verdicts[0].rehearsed is not None) is (rehearsal == "on")
    assert measured.steps == STEPS - 2 and (measured.wall_ms or 0.0) < 1e3 * COMPILE_S, "from the second step on"


class Naps(torch.nn.Linear):
    """A layer that sleeps, from a step on."""

    def __init__(self, from_step: int) -> None:
        super().__init__(8, 1)
        self.steps, self.from_step = 0, from_step

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        planted.sleep(0.03 if self.steps >= self.from_step else 0.0)
        return super().forward(x)


def test_steps_that_turn_out_slower_than_rehearsed_blame_no_rung() -> None:
    """The layer naps on its own account. Whether a rung is to blame shows only with and without it."""

    class Slow(Compiled):
        def on_train_batch_end(self, *_: Any) -> None:
            self.net.steps += 1

    module, config = Slow(), {"watch": {"warmup_steps": 8}, "rungs": {"amp": {"enabled": True}}}
    module.net, module.step_s = Naps(5), 0.0
    loop = FastLoop(config, quiet=True)
    trainer(callbacks=[loop], max_steps=STEPS, max_epochs=-1).fit(module, batches())
    rehearsed = loop.verdicts[0].rehearsed
    assert rehearsed is not None and rehearsed.of_batch and (rehearsed.eager_ms or 99.0) < 15
    assert (seen(loop).parts_ms["forward"] or 0.0) > 25, "it did nap"
    assert not any(each.title.startswith("SLOWER WITH") for each in loop.findings)


def test_nothing_compiled_is_no_time_and_a_torch_that_does_not_tell_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = seen(fit(Compiled(), warmup=STEPS - 5))
    assert measured.one_time_s == dict.fromkeys(ONE_TIME, 0.0) and "compilation" not in measured.evidence
    monkeypatch.delattr("torch._dynamo.utils.get_compilation_metrics")
    measured = seen(fit(Compiled(slow(0.01)), warmup=STEPS - 5))
    assert [measured.one_time_s[cause] for cause in ("compile", "validation_compile", "autotune")] == [None] * 3


def record(start_s: float, end_s: float, **others: Any) -> Any:
    return SimpleNamespace(start_time_us=int(1e6 * start_s), end_time_us=int(1e6 * end_s), **others)


def test_records_of_dynamo_are_read_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where its list has forgotten the last one that was read, and where a record lacks its times."""
    wall = time.time()
    records = [record(wall - 50, wall - 40)]
    utils = SimpleNamespace(get_compilation_metrics=lambda: list(records))
    monkeypatch.setitem(sys.modules, "torch._dynamo.utils", utils)  # type: ignore[arg-type]
    ledger = OneTime()
    compiled = Compilations(ledger, lambda: 7)
    compiled.note("compile")
    assert compiled.count == 0 and not ledger.spans, "that was before the fit"
    records += [
        record(wall - 30, wall - 20, is_forward=True, recompile_reason="0/0: tensor 'x' size mismatch"),
        record(wall - 20, wall - 18, is_forward=False),
        record(wall - 15, wall - 10, is_runtime=True, runtime_triton_autotune_time_us=2_000_000),
        record(wall - 9, wall - 5, compile_time_autotune_time_us=1_000_000),
    ]
    compiled.note("compile")
    compiled.note("compile")
    assert compiled.count == 2 and compiled.steps == {7} and list(compiled.reasons) == ["tensor 'x' size mismatch"]
    assert compiled.sum_s() == {
        "compile": pytest.approx(15.0),
        "validation_compile": 0.0,
        "autotune": pytest.approx(3.0),
    }
    assert not compiled.at_least
    records[:] = [record(wall - 4, wall - 4 + index / 64) for index in range(64)]
    compiled.note("validation_compile")
    assert compiled.count == 66 and compiled.at_least, "there may have been more of them"
    records.append(SimpleNamespace())
    compiled.note("compile")
    assert compiled.sum_s() == {"compile": None, "validation_compile": None, "autotune": None}


def start_slowly(_worker: int) -> None:
    time.sleep(0.2)


@LINUX
@pytest.mark.parametrize("persistent", [False, True])
def test_the_start_of_workers_is_timed(persistent: bool) -> None:
    train = batches(count=10, num_workers=1, worker_init_fn=start_slowly, persistent_workers=persistent)
    measured = seen(fit(Compiled(), train))
    took = measured.one_time_s["workers"]
    assert took is not None and 0.2 <= took < 20
    loader = measured.evidence["loader"]
    if persistent:
        assert "worker_restarts" not in loader, "an epoch that goes on with its workers starts none"
    else:
        assert loader["worker_restarts"] == 3 and 0.2 <= loader["worker_restart_s"] < 20


@LINUX
def test_a_process_is_not_older_than_the_call_that_started_it() -> None:
    """psutil's boot time is in whole seconds: workers that started in 0.03 s took "0.51 s each"."""
    tick_s, clock = 1 / os.sysconf("SC_CLK_TCK"), time.CLOCK_BOOTTIME
    before = time.clock_gettime(clock)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        age_s = one_time_costs._read_age_in_ticks_s(child.pid)
        after = time.clock_gettime(clock)
        if age_s is None or abs(age_s - (after - before)) > one_time_costs.MOST_APART_S:
            pytest.skip("this machine's /proc has no start that belongs to its clock")
        assert 0 <= age_s <= after - before + tick_s


@pytest.mark.parametrize(
    ("ticks", "created", "age_s"),
    [
        (96_947, 969.0, 0.53),  # psutil says 1 s
        (97_001, 969.0, 0.0),  # a clock that was set back
        (0, 969.0, 1.0),  # a sandbox without starts
        (3_000, 969.0, 1.0),  # a container with a clock of its own
        (None, 969.0, 1.0),
        (96_947, None, None),
    ],
)
def test_an_age_is_read_from_ticks_where_they_are_plausible(
    ticks: int | None, created: float | None, age_s: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Process:
        def __init__(self, pid: int) -> None:
            if created is None:
                raise psutil.NoSuchProcess(pid)

        def create_time(self) -> float | None:
            return created

    if ticks is not None:
        (tmp_path / "proc/7").mkdir(parents=True)
        (tmp_path / "proc/7/stat").write_text(f"7 (a (b) c) S {' '.join(['1'] * 18)} {ticks} 5 6\n")
    monkeypatch.setattr(one_time_costs, "ROOT", tmp_path)
    monkeypatch.setattr(psutil, "Process", Process)
    monkeypatch.setattr(os, "sysconf", lambda _: 100)
    monkeypatch.setattr(time, "time", lambda: 970.0)
    monkeypatch.setattr(time, "CLOCK_BOOTTIME", 7, raising=False)
    monkeypatch.setattr(time, "clock_gettime", lambda _: 970.0)
    assert one_time_costs._read_age_s(7) == (None if age_s is None else pytest.approx(age_s))


def test_workers_that_cannot_be_read_are_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Any] = [SimpleNamespace(pid=os.getpid())]
    monkeypatch.setattr("fastloop.bridge.watch.one_time_costs.find_workers", lambda _: found)
    starts = WorkerStarts()
    starts.note(None)
    starts.note(None)
    if sys.platform == "linux":
        assert len(starts.took_s) == 1 and (starts.first_s or 0.0) > 0, "the same workers were not started anew"
    found[:] = [SimpleNamespace(pid=2**30)]
    starts.note(None)
    assert not starts.is_known
    gone = WorkerStarts()
    gone.note(None)
    assert gone.first_s is None
    monkeypatch.setattr("fastloop.bridge.watch.one_time_costs.find_workers", lambda _: None)
    other = WorkerStarts()
    other.note(None)
    assert other.first_s is None, "a loader that is none of torch's"

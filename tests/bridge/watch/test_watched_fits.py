"""Real fits on the CPU: what each of Lightning's calls takes is found under its part of the step."""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.profilers import SimpleProfiler
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, IterableDataset, default_collate

from fastloop import FastLoop
from fastloop.bridge.watch.live_metrics import LiveMetrics
from fastloop.records.measurement import Measurement
from fastloop.records.readings import compute_validation_loading_pct
from tests.bridge.watch import planted
from tests.bridge.watch.made_up import forget_compiles
from tests.bridge.watch.planted import (
    BATCH,
    NAP_MS,
    Data,
    Sleepy,
    SleepyIO,
    SleepyLogger,
    batches,
    collate,
    count_naps,
    watched,
)
from tests.models import Regression, trainer

HALF = NAP_MS / 2
"""Below it a part holds no nap. A step takes about 1 ms here; the rest is room for a busy machine."""
LITTLE = 0.25
"""Of a step: a machine that takes the processor away for some milliseconds. A part that is missed is nearly all."""


class Manual(Sleepy):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return loss


class Fetches(Sleepy):
    """Its training_step asks for the batch."""

    def training_step(self, dataloader_iter: Any) -> torch.Tensor:
        batch, batch_idx, _ = next(dataloader_iter)
        return super().training_step(batch, batch_idx)

    def log(self, *args: Any, **kwargs: Any) -> None:
        super().log(*args, **{**kwargs, "batch_size": BATCH})


class TwoLoaders(Sleepy):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step(batch["a"], batch_idx)


class Stream(IterableDataset[Any]):
    """Of unknown length: Lightning fetches a batch ahead."""

    def __iter__(self) -> Any:
        data = Data(planted.EPOCH * BATCH)
        return (data[index] for index in range(len(data)))


def two_loaders() -> Any:
    return CombinedLoader({"a": batches(), "b": batches()}, "min_size")


def unexplained(seen: Measurement) -> float:
    """The rest of a step, as a share of it."""
    parts = [value for part, value in seen.parts_ms.items() if value is not None and part != "unexplained"]
    assert seen.step_ms["mean"] == pytest.approx(sum(parts) + (seen.parts_ms["unexplained"] or 0.0))
    return abs(seen.parts_ms["unexplained"] or 0.0) / (seen.step_ms["mean"] or 1.0)


@pytest.fixture(scope="module")
def calm() -> Measurement:
    """The same fit without any sleep."""
    return watched(None, val=batches(2), val_check_interval=4, logger=SleepyLogger(), log_every_n_steps=1)


MICRO = {"rungs": {"batch": {"enabled": True, "micro_batch": BATCH // 4}}}
Fit = Callable[[str], Measurement]
PLAIN = [
    ("data_wait", "dataset", watched, 1),
    ("data_wait", "collate", watched, 1),
    ("h2d", "transfer_batch_to_device", watched, 1),
    ("forward", "training_step", watched, 1),
    ("backward", "backward", watched, 1),
    ("optimizer", "optimizer", watched, 1),
    ("validation", "validation_step", partial(watched, val=batches(2), val_check_interval=2), 1),
]
KINDS: list[tuple[str, str, Fit, float]] = [
    *(
        (part, place, partial(watched, accumulate_grad_batches=2), 2)
        for part, place in [
            ("data_wait", "collate"),
            ("forward", "training_step"),
            ("backward", "backward"),
            ("callbacks_logging", "on_train_batch_end"),
        ]
    ),
    *(
        (part, part_place, lambda place: watched(place, Manual()), 1)
        for part, part_place in [("forward", "training_step"), ("backward", "backward"), ("optimizer", "optimizer")]
    ),
    *(
        (part, part_place, lambda place: watched(place, Fetches()), 1)
        for part, part_place in [
            ("data_wait", "collate"),
            ("forward", "training_step"),
            ("callbacks_logging", "on_train_batch_end"),
        ]
    ),
    *(
        (part, part_place, lambda place: watched(place, train=DataLoader(Stream(), BATCH, collate_fn=collate)), 1)
        for part, part_place in [("data_wait", "collate"), ("forward", "training_step")]
    ),
    ("data_wait", "collate", lambda place: watched(place, TwoLoaders(), two_loaders()), 2),
    *(
        (part, place, partial(watched, config=MICRO), times)
        for part, place, times in [
            ("data_wait", "collate", 1),
            ("forward", "training_step", 4),
            ("backward", "backward", 4),
            ("optimizer", "optimizer", 1),
        ]
    ),
    *(
        (part, part_place, lambda place: watched(place, profiler=SimpleProfiler()), 1)
        for part, part_place in [
            ("data_wait", "collate"),
            ("forward", "training_step"),
            ("backward", "backward"),
            ("optimizer", "optimizer"),
            ("callbacks_logging", "on_train_batch_end"),
        ]
    ),
]
NAMES = (
    ["plain"] * len(PLAIN)
    + ["accumulated"] * 4
    + ["manual"] * 3
    + ["dataloader_iter"] * 3
    + ["stream"] * 2
    + ["two loaders"]
    + ["micro-batches"] * 4
    + ["own profiler"] * 5
)


@pytest.mark.parametrize(
    ("part", "place", "fit", "a_step"),
    PLAIN + KINDS,
    ids=[f"{name}-{place}" for name, (_, place, *_) in zip(NAMES, PLAIN + KINDS, strict=True)],
)
def test_what_a_call_takes_is_found_in_its_part(
    part: str, place: str, fit: Fit, a_step: float, calm: Measurement, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = fit(place)
    # The first batch of an epoch is waited for in the gap before it, except where training_step fetches.
    found = (seen.parts_ms[part] or 0.0) + (seen.parts_ms["epoch_gap"] or 0.0) * (part == "data_wait")
    assert 0.9 * NAP_MS * a_step <= found <= NAP_MS * a_step + 3 * HALF, seen.parts_ms
    others = {name: ms for name, ms in seen.parts_ms.items() if name != part and ms and ms > HALF * max(1, a_step / 2)}
    assert others == {} and unexplained(seen) < LITTLE and seen.partial is False
    assert (calm.parts_ms[part] or 0.0) < HALF, "the control: without the nap the part is small"


@pytest.mark.parametrize("hook", ["on_train_batch_start", "on_before_zero_grad", "on_train_batch_end"])
def test_a_slow_hook_is_callbacks_and_named(hook: str, calm: Measurement) -> None:
    seen, name = watched(hook), f"SleepyCallback.{hook}"
    assert 0.9 * NAP_MS <= (seen.parts_ms["callbacks_logging"] or 0.0) <= NAP_MS + 3 * HALF
    assert next(iter(seen.hooks_ms)) == name, "the slowest first"
    assert seen.hooks_ms[name] == pytest.approx(NAP_MS, rel=0.25), "per optimizer step"
    assert unexplained(seen) < LITTLE and calm.hooks_ms.get(name, 0.0) < HALF


def test_a_slow_hook_of_the_module_is_named_too() -> None:
    seen = watched("module.on_after_backward")
    assert next(iter(seen.hooks_ms)) == "Sleepy.on_after_backward"
    assert (seen.parts_ms["callbacks_logging"] or 0.0) >= 0.9 * NAP_MS > HALF > (seen.parts_ms["backward"] or 0.0)


def test_a_slow_logger_is_callbacks_and_named(calm: Measurement) -> None:
    seen = watched("logger", logger=SleepyLogger(), log_every_n_steps=1)
    assert next(iter(seen.hooks_ms)) == "loggers" and seen.hooks_ms["loggers"] == pytest.approx(NAP_MS, rel=0.25)
    assert 0.9 * NAP_MS <= (seen.parts_ms["callbacks_logging"] or 0.0) <= NAP_MS + 3 * HALF
    assert calm.hooks_ms.get("loggers", 0.0) < HALF and unexplained(seen) < LITTLE
    seldom = watched("logger", logger=SleepyLogger(), log_every_n_steps=8)
    assert (seldom.parts_ms["callbacks_logging"] or 0.0) < HALF


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_cost_of_self_log_is_per_step(accumulate: int) -> None:
    class Slow(Sleepy):
        def log(self, *args: Any, **kwargs: Any) -> None:
            planted.nap("log")
            super().log(*args, **kwargs)

    seen = watched("log", Slow(), accumulate_grad_batches=accumulate)
    assert next(iter(seen.hooks_ms)) == "self.log"
    assert seen.hooks_ms["self.log"] == pytest.approx(accumulate * NAP_MS, rel=0.25)
    assert (seen.parts_ms["callbacks_logging"] or 0.0) >= 0.9 * NAP_MS * accumulate
    assert (seen.parts_ms["forward"] or 0.0) < HALF, "logging is no arithmetic"


def test_a_checkpoint_every_step(tmp_path: Path, calm: Measurement) -> None:
    seen = watched(
        "save_checkpoint",
        callbacks=[ModelCheckpoint(tmp_path, every_n_train_steps=1)],
        plugins=[SleepyIO()],
        enable_checkpointing=True,
    )
    assert 0.9 * NAP_MS <= (seen.parts_ms["checkpoint"] or 0.0) <= NAP_MS + 3 * HALF
    assert (seen.parts_ms["callbacks_logging"] or 0.0) < HALF and calm.parts_ms["checkpoint"] == 0.0
    assert unexplained(seen) < LITTLE


def test_a_checkpoint_within_validation_is_a_checkpoint(tmp_path: Path) -> None:
    saves = ModelCheckpoint(tmp_path, monitor="val_loss", save_top_k=-1, save_on_train_epoch_end=False)
    seen = watched(
        "save_checkpoint",
        callbacks=[saves],
        plugins=[SleepyIO()],
        enable_checkpointing=True,
        val=batches(1),
        val_check_interval=1,
    )
    assert count_naps() >= planted.STEPS - 1, "one validation a step, and a save in each"
    assert 0.9 * NAP_MS <= (seen.parts_ms["checkpoint"] or 0.0) <= NAP_MS + 3 * HALF
    assert (seen.parts_ms["validation"] or 0.0) < 2 * HALF


@pytest.mark.parametrize("place", ["collate in validation", "validation_step"])
def test_how_long_validation_waits_for_its_batches(place: str) -> None:
    def collate(samples: list[Any]) -> Any:
        planted.nap("collate in validation")
        return default_collate(samples)

    val = DataLoader(planted.Data(2 * planted.BATCH), planted.BATCH, collate_fn=collate)
    seen = watched(place, val=val, val_check_interval=1)
    assert seen.parts_ms["validation"] == pytest.approx(2 * NAP_MS, rel=0.25), "two batches a step"
    waits = compute_validation_loading_pct(seen)
    assert waits is not None and (waits > 80 if place != "validation_step" else waits < 20)
    assert not any("val_next" in name for name in seen.hooks_ms)


@pytest.mark.parametrize("follows", ["checkpoint", "validation"])
def test_a_slow_hook_stays_one_where_something_rare_follows_it(follows: str, tmp_path: Path) -> None:
    rare: dict[str, Any] = {"val": batches(1), "val_check_interval": 1}
    if follows == "checkpoint":
        rare = {"callbacks": [ModelCheckpoint(tmp_path, every_n_train_steps=1)], "enable_checkpointing": True}
    seen = watched("on_train_batch_end", **rare)
    assert 0.9 * NAP_MS <= (seen.parts_ms["callbacks_logging"] or 0.0) <= NAP_MS + 3 * HALF
    assert seen.parts_ms[follows] and max(seen.parts_ms[follows] or 0.0, seen.parts_ms["host_other"] or 0.0) < HALF


@pytest.mark.parametrize("place", ["on_train_epoch_end", "on_train_epoch_start"])
def test_what_lies_between_two_epochs(place: str, calm: Measurement) -> None:
    seen = watched(place, train=batches(2))
    assert 0.45 * NAP_MS <= (seen.parts_ms["epoch_gap"] or 0.0) <= 0.5 * NAP_MS + 2 * HALF, "every other step"
    assert unexplained(seen) < LITTLE and (calm.parts_ms["epoch_gap"] or 0.0) < HALF / 2
    assert max(ms for part, ms in seen.parts_ms.items() if ms and part != "epoch_gap") < 0.45 * NAP_MS


@pytest.mark.parametrize("place", ["training_step", "backward", "optimizer"])
def test_a_sleep_within_the_work_is_time_off_the_processor(place: str, calm: Measurement) -> None:
    seen = watched(place)
    assert seen.blocked_ms == pytest.approx(NAP_MS, rel=0.3)
    assert calm.blocked_ms is not None and calm.blocked_ms < HALF


def test_arithmetic_and_waiting_for_data_are_no_time_off_the_processor() -> None:
    assert (watched("collate").blocked_ms or 0.0) < HALF
    assert (watched("on_train_batch_end").blocked_ms or 0.0) < HALF


# -- work -------------------------------------------------------------------------------------------------------------

BY_HAND = {"first layer": 2 * 8 * 16 * 2, "second layer": 2 * 16 * 1 * 3}
"""Forward and the gradient of the weights; the first layer's input needs no gradient."""


@pytest.fixture
def nothing_is_compiled() -> None:
    forget_compiles()


@pytest.mark.usefixtures("nothing_is_compiled")
@pytest.mark.parametrize(
    ("module", "settings"),
    [
        (Regression, {}),
        (Regression, {"accumulate_grad_batches": 2}),
        (Manual, {}),
        (Fetches, {}),
        (Regression, {"config": MICRO}),
        (Regression, {"profiler": SimpleProfiler()}),
    ],
    ids=["plain", "accumulated", "manual", "dataloader_iter", "micro-batches", "own profiler"],
)
def test_the_counted_work_is_the_work(module: type[L.LightningModule], settings: dict[str, Any]) -> None:
    seen = watched(None, module(), **settings)
    assert seen.flops["per_sample"] == sum(BY_HAND.values()) == seen.flops["matmul"], seen.flops
    assert seen.flops["recomputed"] == 0 and not seen.flops["at_least"] and seen.samples_per_s
    assert seen.tflop_per_s == pytest.approx(seen.flops["per_sample"] * seen.samples_per_s / 1e12)
    assert seen.peaks == {} and set(seen.mfu.values()) == {None}, "no peak of a CPU is known"


@pytest.mark.usefixtures("nothing_is_compiled")
def test_work_is_counted_in_a_step_right_after_an_epochs_end() -> None:
    assert watched(None, Regression(), batches(1)).flops["per_sample"] == sum(BY_HAND.values())
    seen = watched(None, Regression(), val=batches(1), val_check_interval=1, num_sanity_val_steps=0)
    assert seen.flops["per_sample"] == sum(BY_HAND.values())


def test_without_warm_up_no_work_is_counted() -> None:
    seen = watched(None, Regression(), config={"watch": {"warmup_steps": 1}})
    assert seen.flops["per_sample"] is None and "too short" in seen.flops["why"] and seen.tflop_per_s is None


@pytest.mark.usefixtures("nothing_is_compiled")
@pytest.mark.parametrize("hunted", [0, 5])
def test_a_compiled_module_is_counted_and_stays_compiled(hunted: int) -> None:
    module, calls = Regression(), []

    def backend(graph: Any, _: Any) -> Any:
        return lambda *inputs: (calls.append(1), graph(*inputs))[1]

    module.net = torch.compile(module.net, backend=backend)
    seen = watched(None, module, hunt_syncs=bool(hunted))
    assert seen.flops["per_sample"] == sum(BY_HAND.values()) and "without data" in seen.flops["source"]
    assert len(calls) == planted.STEPS - hunted, "every step that was not looked into ran the compiled graph"
    forget_compiles()


@pytest.mark.parametrize("module", [Regression, Manual, Fetches])
def test_losses_are_the_same_to_the_bit(module: type[Regression]) -> None:
    plain = watched_losses(module, None)
    assert plain == watched_losses(module, FastLoop({"watch": {"warmup_steps": 2}}, quiet=True))
    hunting = FastLoop({"watch": {"warmup_steps": 2, "trace_steps": 2}}, quiet=True)
    hunting.hunt_syncs = True
    assert plain == watched_losses(module, hunting)


def watched_losses(module: type[Regression], loop: FastLoop | None) -> list[float]:
    torch.manual_seed(0)
    made = module()
    trainer(callbacks=[loop] if loop else [], max_epochs=5).fit(made, batches())
    assert loop is None or (loop.measurement is not None and loop.measurement.steps > 5)
    assert len(made.losses) == 5 * planted.EPOCH == len(set(made.losses))
    return made.losses


# -- where people look ------------------------------------------------------------------------------------------------


def test_live_figures_arrive_in_the_users_logger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastloop.bridge.watch.session.LiveMetrics", partial(LiveMetrics, every_s=0.0))
    watched("collate", logger=CSVLogger(tmp_path, name="", version="0"), log_every_n_steps=1)
    rows = list(csv.DictReader((tmp_path / "0" / "metrics.csv").open()))
    live = [row for row in rows if row.get("fastloop/data_wait_pct")]
    assert len(live) > 3, "some while it ran, and one at its end"
    assert 50 < float(live[-1]["fastloop/data_wait_pct"]) <= 100
    assert float(live[-1]["fastloop/step_ms"]) == pytest.approx(NAP_MS, rel=1.0)
    assert any(row.get("loss") for row in rows), "the user's own are there too"


def test_a_trace_is_written_into_the_run_directory(tmp_path: Path) -> None:
    loop = FastLoop({"watch": {"warmup_steps": 2, "trace_steps": 3}}, out=tmp_path, quiet=True)
    trainer(max_steps=40, max_epochs=-1, callbacks=[loop]).fit(Sleepy(), batches())
    assert loop.measurement is not None and loop.measurement.kernels is not None
    assert loop.measurement.kernels.get("skipped") is None and loop.measurement.kernels["steps"] == 3
    with gzip.open(tmp_path / "trace.json.gz", "rt") as file:
        names = {event.get("name") for event in json.load(file)["traceEvents"]}
    assert {"fastloop/forward", "fastloop/backward", "fastloop/optimizer", "fastloop/data_wait"} <= names
    assert loop.measurement.steps == 40 - 2 - 1 - (3 + 1 + 2) - 1, "the traced steps are none of the timed ones"


def test_a_trace_over_the_end_of_an_epoch_knows_its_phases(tmp_path: Path) -> None:
    loop = FastLoop({"watch": {"warmup_steps": 2, "trace_steps": 4}}, out=tmp_path, quiet=True)
    trainer(max_steps=30, max_epochs=-1, callbacks=[loop]).fit(Sleepy(), batches(2))
    with gzip.open(tmp_path / "trace.json.gz", "rt") as file:
        names = [event.get("name") for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]
    assert names.count("fastloop/forward") == names.count("fastloop/backward") >= 4


@pytest.mark.parametrize("module", [Sleepy, Fetches], ids=["loop fetches", "dataloader_iter"])
def test_a_trace_shorter_than_the_fit_leaves_a_window(module: type[Sleepy]) -> None:
    seen = watched("collate", module(), config={"watch": {"warmup_steps": 2, "trace_steps": 2}})
    assert seen.kernels is not None and seen.kernels["steps"] == 2 and seen.steps >= 10
    assert next(iter(seen.hooks_ms.values()), 0.0) < HALF


def test_the_hunt_finds_a_planted_line() -> None:
    class Syncs(Sleepy):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = super().training_step(batch, batch_idx)
            self.last = loss.detach().item()  # planted
            return loss

    loop = FastLoop({"watch": {"warmup_steps": 2}}, quiet=True)
    loop.hunt_syncs = True
    trainer(max_steps=40, max_epochs=-1, callbacks=[loop]).fit(Syncs(), batches())
    assert loop.measurement is not None
    lines = Path(__file__).read_text().splitlines()
    here = 1 + next(number for number, line in enumerate(lines) if line.endswith("# planted"))
    found = {sync["where"]: sync for sync in loop.measurement.syncs}
    sync = next((found[where] for where in found if where.endswith(f"test_watched_fits.py:{here}")), None)
    assert sync is not None, found
    assert sync["per_step"] == 1.0 and sync["ms_per_step"] is None and ".item()" in sync["what"] and sync["instead"]
    assert not any(where.endswith(f":{here + 1}") for where in found)

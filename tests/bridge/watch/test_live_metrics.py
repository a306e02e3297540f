"""Live figures in loggers and on the bar: when, with which step, and that nobody else's are hurt."""

from __future__ import annotations

import copy
import csv
import pickle
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import LearningRateMonitor, ProgressBar, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from fastloop.bridge.watch import live_metrics
from fastloop.bridge.watch.live_metrics import LiveMetrics, find_logged_step, shorten
from tests.bridge.watch.live_fit import BARS, Live, Logs, Strict
from tests.models import loader, trainer

pytestmark = pytest.mark.short


def fit(*callbacks: Any, module: Any = None, **settings: Any) -> L.Trainer:
    """Two epochs of 8 steps, unless said otherwise; always the same."""
    torch.manual_seed(0)
    made = trainer(**{"max_epochs": 2, "callbacks": list(callbacks), "log_every_n_steps": 3, **settings})
    made.fit(Logs() if module is None else module, loader(), loader(samples=16))
    return made


def rows(folder: Path) -> list[dict[str, str]]:
    (file,) = folder.rglob("metrics.csv")
    with file.open() as text:
        return list(csv.DictReader(text))


def own(row: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in row.items() if not name.startswith("fastloop/")}


# -- loggers ----------------------------------------------------------------------------------------------------------


def test_csv_keeps_the_users_rows_and_columns(tmp_path: Path) -> None:
    fit(logger=CSVLogger(tmp_path / "plain", name=""))
    fit(Live(), logger=CSVLogger(tmp_path / "ours", name=""))
    found = rows(tmp_path / "ours")
    ours = [row for row in found if row["fastloop/step_ms"]]
    assert [int(row["step"]) for row in ours] == [*range(16), 16] and ours[0]["fastloop/data_wait_pct"] == "86.0"
    assert [row["fastloop/step_ms"] for row in ours[-2:]] == ["12.5", "11.0"] and "fastloop/lead_ms" not in ours[0]
    assert all(not value for row in ours for name, value in own(row).items() if name != "step")
    kept = [row for row in found if not row["fastloop/step_ms"]]
    plain = rows(tmp_path / "plain")
    assert [own(row) for row in kept] == plain and len(plain) >= 8


def test_figures_that_appear_later_take_no_rows_away(tmp_path: Path) -> None:
    class Later(Live):
        def read(self) -> Any:
            self.reads += 1
            return {"step_ms": 1.0, **({"watts": 600.0} if self.reads > 9 else {})}

    fit(Later(), logger=CSVLogger(tmp_path, name=""))
    found = rows(tmp_path)
    assert sum(bool(row["fastloop/watts"]) for row in found) == 7
    assert sum(bool(row["fastloop/step_ms"]) for row in found) == 17
    assert sum(bool(row["loss"]) for row in found) == 5 and sum(bool(row["mean_loss"]) for row in found) == 2


def test_tensorboard_shows_a_curve_and_the_users_own(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    fit(Live(), logger=TensorBoardLogger(tmp_path, name=""))
    events = EventAccumulator(str(next(tmp_path.rglob("events.*")).parent))
    events.Reload()
    assert [event.step for event in events.Scalars("fastloop/step_ms")] == [*range(16), 16]
    assert len(events.Scalars("loss")) == 5 and len(events.Scalars("val_loss")) == 2


@pytest.mark.parametrize("accumulate", [1, 4])
def test_steps_never_fall_where_a_logger_refuses_that(accumulate: int) -> None:
    logger = Strict()
    fit(Live(), LearningRateMonitor("step"), logger=logger, accumulate_grad_batches=accumulate, val_check_interval=4)
    assert logger.refused == [] and len(logger.ours) == 17
    assert {step for step, _ in logger.ours} == set(range(16 // accumulate + 1))
    users = [step for step, row in logger.rows if "loss" in row]
    assert users and set(users) <= {step for step, _ in logger.ours}, "the same count of steps"


@pytest.mark.parametrize("error", [RuntimeError, OSError, ModuleNotFoundError])
def test_a_logger_that_raises_is_dropped_with_one_warning(error: type[Exception], tmp_path: Path) -> None:
    broken, module = Strict(error), Logs()
    with pytest.warns(UserWarning, match="live figures in Strict are now off: .*wandb is not logged in") as said:
        fit(Live(), logger=[broken, CSVLogger(tmp_path, name="")], module=module)
    assert broken.failed == 1 and sum("live figures" in str(warning.message) for warning in said) == 1
    assert len(module.losses) == 16 and [row for _, row in broken.rows if "loss" in row], "its own go on"
    assert sum(bool(row["fastloop/step_ms"]) for row in rows(tmp_path)) == 17, "the other logger goes on"


def test_nothing_without_loggers_or_figures() -> None:
    silent, logger = Live({}), Strict()
    fit(silent, logger=logger)
    assert silent.reads == 16 and [step for step, _ in logger.ours] == [16]
    alone = Live()
    fit(alone, logger=False)
    assert alone.reads == 16


def test_only_finite_numbers_that_are_on_the_host_are_written() -> None:
    class OnDevice(torch.Tensor):
        def __float__(self) -> float:
            raise AssertionError("fetched from the device")

    logger = Strict()
    figures = {
        "step_ms": 3,
        "watts": float("nan"),
        "lead_ms": None,
        "throttle": ["power"],
        "partial": True,
        "loss": torch.ones(()).as_subclass(OnDevice),
    }
    fit(Live(figures), logger=logger)
    assert logger.ours[0] == (0, {"fastloop/step_ms": 3.0})


# -- when -------------------------------------------------------------------------------------------------------------


def stand_in(rank: int = 0, **loops: Any) -> Any:
    return SimpleNamespace(
        is_global_zero=rank == 0,
        loggers=[Strict()],
        global_step=40,
        progress_bar_callback=None,
        fit_loop=SimpleNamespace(**loops),
    )


def test_every_ten_seconds_and_once_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    time = SimpleNamespace(s=100.0)
    monkeypatch.setattr(live_metrics, "now", lambda: time.s)
    site, reads = stand_in(), []
    live = LiveMetrics(site, lambda: reads.append(time.s) or {"step_ms": 1.0})
    for _ in range(350):
        time.s += 0.1
        live.tick(site)
    assert reads == pytest.approx([110.0, 120.0, 130.0], abs=0.5)
    live.end(site, {"step_ms": 2.0})
    live.end(site, {"step_ms": 3.0})
    time.s += 1000
    live.tick(site)
    assert [row["fastloop/step_ms"] for _, row in site.loggers[0].rows] == [1.0, 1.0, 1.0, 2.0] and len(reads) == 3


def test_only_global_rank_0_writes_and_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_metrics, "now", lambda: 0.0)
    for rank, written in ((0, 2), (1, 0)):
        site, bar = stand_in(rank), TQDMProgressBar()
        site.progress_bar_callback = bar
        live = LiveMetrics(site, lambda: {"step_ms": 1.0}, every_s=0)
        undo = live.show_on_bar(site)
        assert ("get_metrics" in vars(bar)) == (rank == 0)
        live.tick(site)
        live.end(site, {"step_ms": 1.0})
        undo()
        assert len(site.loggers[0].rows) == written


def test_the_step_is_lightnings_or_the_public_count() -> None:
    assert find_logged_step(stand_in(epoch_loop=SimpleNamespace(_batches_that_stepped=7))) == 7
    assert find_logged_step(stand_in(epoch_loop=SimpleNamespace())) == find_logged_step(stand_in()) == 40


# -- the bar ----------------------------------------------------------------------------------------------------------


def noting(kind: type) -> type:
    class Noting(kind):  # type: ignore[misc]
        """Notes what it was going to show."""

        def __init__(self) -> None:
            super().__init__(refresh_rate=1)
            self.shown: list[dict[str, Any]] = []

        def get_metrics(self, *args: Any) -> Any:
            return {**super().get_metrics(*args), "own": 1}

        def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
            super().on_train_batch_end(trainer, pl_module, *args)
            self.shown.append(self.get_metrics(trainer, pl_module))

    return Noting


@pytest.mark.parametrize("kind", BARS)
def test_the_bar_shows_how_well_the_device_is_fed(kind: type, capfd: pytest.CaptureFixture[str]) -> None:
    bar = noting(kind)()
    fit(Live(), bar, enable_progress_bar=True)
    assert bar.shown[-1]["fed"] == "14%" and {"own", "loss"} <= set(bar.shown[-1])
    assert "get_metrics" not in vars(bar), "undone"
    drawn = capfd.readouterr()
    assert "fed" in drawn.out + drawn.err and "14%" in drawn.out + drawn.err


def test_without_a_data_wait_there_is_nothing_to_show() -> None:
    assert shorten({"data_wait_pct": None}) == shorten({}) == {}
    assert (shorten({"data_wait_pct": 0.4}), shorten({"data_wait_pct": 100.2})) == ({"fed": "100%"}, {"fed": "0%"})
    bar = noting(TQDMProgressBar)()
    fit(Live({"step_ms": 1.0}), bar, enable_progress_bar=True)
    assert all("fed" not in shown for shown in bar.shown) and len(bar.shown) == 16


def dressed(bar: Any) -> tuple[LiveMetrics, Any]:
    site = stand_in()
    site.progress_bar_callback = bar
    live = LiveMetrics(site, dict)
    undo = live.show_on_bar(site)
    live.shown = {"fed": "14%"}
    return live, undo


class Odd(ProgressBar):
    def get_metrics(self, *args: Any) -> Any:
        return args[0]


def test_a_name_of_the_users_wins_and_odd_bars_keep_their_ways() -> None:
    bar = Odd()
    dressed(bar)
    assert bar.get_metrics({"fed": 3}) == {"fed": 3} and bar.get_metrics({"a": 1}) == {"a": 1, "fed": "14%"}
    assert bar.get_metrics(None) is None
    with pytest.raises(IndexError):
        bar.get_metrics()
    for without in (None, object()):
        dressed(without)[1]()


def test_undo_puts_back_what_was_there() -> None:
    bar = Odd()
    theirs = bar.get_metrics = lambda *args: {"theirs": 1}
    _, undo = dressed(bar)
    assert bar.get_metrics() == {"theirs": 1, "fed": "14%"}
    undo()
    undo()
    assert bar.get_metrics is theirs
    bar = Odd()
    _, undo = dressed(bar)
    ours = bar.get_metrics
    wrapped = bar.get_metrics = lambda *args: ours(*args)
    undo()
    assert bar.get_metrics is wrapped and bar.get_metrics({"a": 1}) == {"a": 1}, "theirs stays, ours is silent"


@pytest.mark.parametrize("own_method", [False, True])
@pytest.mark.parametrize("way", [copy.deepcopy, lambda bar: pickle.loads(pickle.dumps(bar))], ids=["copy", "pickle"])
def test_a_copy_of_the_bar_is_free_of_us(way: Any, own_method: bool) -> None:
    bar = Odd()
    if own_method:
        bar.get_metrics = dict
    dressed(bar)
    twin = way(bar)
    assert twin.get_metrics({"a": 1}) == {"a": 1} and bar.get_metrics({"a": 1}) == {"a": 1, "fed": "14%"}
    assert own_method or twin.get_metrics.__self__ is twin, "not the first bar's"


class Copies(L.Callback):
    def __init__(self) -> None:
        self.twins: list[Any] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 3 and not self.twins:
            bar = trainer.progress_bar_callback
            assert "get_metrics" in vars(bar)
            bar, bar._trainer = copy.copy(bar), None
            self.twins = [pickle.loads(pickle.dumps(callback)) for callback in (bar, trainer.callbacks[0])]


def test_callbacks_can_be_pickled_in_the_middle_of_a_fit() -> None:
    copies = Copies()
    made = fit(Live(), copies, Odd(), enable_progress_bar=True)
    assert len(copies.twins) == 2
    pickle.dumps(made.callbacks)


def test_no_warning_of_ours_in_an_ordinary_fit(tmp_path: Path) -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        fit(Live(), logger=[CSVLogger(tmp_path, name=""), Strict()], enable_progress_bar=True)
    assert [str(warning.message) for warning in said if "fastloop" in str(warning.message)] == []

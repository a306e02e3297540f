"""Logged metrics of a split or merged run against the plain run's."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torchmetrics
from lightning.pytorch.loggers.logger import Logger

from fastloop.bridge.apply.micro.piece_logs import PieceLogs
from tests.runs import Net, Run, batches, run

SPLIT = {"batch": {"micro_batch": 3}}


class Memory(Logger):
    """Keeps what is logged."""

    name = version = "memory"

    def __init__(self) -> None:
        super().__init__()
        self.logged: list[tuple[int | None, dict[str, float]]] = []

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        if not any(name.startswith("fastloop/") for name in metrics):  # our figures of the whole fit, at its end
            self.logged.append((step, {name: float(value) for name, value in metrics.items()}))

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None: ...


class Logs(Net):
    """Logs in every way that Lightning has. Sums are of sums, extremes of extremes: parts make up the whole."""

    def __init__(self) -> None:
        super().__init__()
        self.error = torchmetrics.MeanSquaredError()
        self.both = torchmetrics.MetricCollection(
            {"mse": torchmetrics.MeanSquaredError(), "mae": torchmetrics.MeanAbsoluteError()}
        )
        self.confusion = torchmetrics.ConfusionMatrix("binary")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch[0], batch[1]
        loss = super().training_step(batch, batch_idx)
        every = {"on_step": True, "on_epoch": True}
        self.log("default", loss)
        self.log("mean", loss, **every)
        self.log("sum", x.sum(), reduce_fx="sum", **every)
        self.log("largest", x.max(), reduce_fx=torch.max, **every)
        self.log("smallest", x.min(), reduce_fx="min", **every)
        self.log("positional", y.max(), False, True, True, True, "max")
        self.log("sized", loss, batch_size=len(x), **every)
        self.log("number", float(loss), **every)
        self.log("bar", loss.detach(), prog_bar=True)
        self.log_dict({"one": loss, "two": loss * 2}, on_epoch=True)
        prediction = self.net(x)
        self.error(prediction, y)
        self.log("metric", self.error, **every)
        self.both(prediction, y)
        self.log_dict(self.both, **every)
        return loss


def logged(rungs: Any, module: Any = Logs, **settings: Any) -> tuple[list[Any], Run]:
    memory = Memory()
    done = run(
        rungs,
        batches(settings.pop("samples", 20)),
        module,
        logger=memory,
        log_every_n_steps=1,
        max_epochs=3,
        **settings,
    )
    return memory.logged, done


def equal(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(
        step == other
        and set(metrics) == set(others)
        and all(metrics[name] == pytest.approx(others[name], rel=1e-5, abs=1e-6) for name in metrics)
        for (step, metrics), (other, others) in zip(a, b, strict=True)
    )


@pytest.mark.parametrize("accumulate", [1, 2])
def test_step_and_epoch_metrics_of_a_split_run(accumulate: int, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, plain_run = logged(None, accumulate_grad_batches=accumulate)
    split, split_run = logged(SPLIT, accumulate_grad_batches=accumulate)
    names = {name for _, metrics in plain for name in metrics}
    assert {"mean_step", "mean_epoch", "sum_step", "largest_epoch", "sized_step", "metric_step", "mse_epoch"} <= names
    assert equal(plain, split)
    assert split_run.trainer.callback_metrics.keys() == plain_run.trainer.callback_metrics.keys()
    assert split_run.trainer.progress_bar_metrics == pytest.approx(plain_run.trainer.progress_bar_metrics, rel=1e-5)

    # The control: logging piece by piece is what Lightning would do by itself.
    monkeypatch.setattr(
        PieceLogs, "take", lambda logs, *args, **options: type(logs.module).log(logs.module, *args, **options)
    )
    loose, _ = logged(SPLIT, accumulate_grad_batches=accumulate)
    assert not equal(plain, loose)


def test_epoch_metrics_of_a_merged_run() -> None:
    def epochs(entries: list[Any]) -> list[dict[str, float]]:
        ends = [{name: value for name, value in metrics.items() if name.endswith("_epoch")} for _, metrics in entries]
        return [end for end in ends if end]

    settings = {"samples": 84, "accumulate_grad_batches": 4}
    plain, _ = logged(None, **settings)
    merged, done = logged({"batch": {"micro_batch": 16}}, **settings)
    assert done.seen("batch")["merged_batches"] == 4
    assert len(epochs(plain)) == 3 and "metric_epoch" in epochs(plain)[0]
    assert equal([(0, metrics) for metrics in epochs(plain)], [(0, metrics) for metrics in epochs(merged)])
    other, _ = logged({"batch": {"micro_batch": 16}}, samples=80, accumulate_grad_batches=4)
    assert not equal([(0, metrics) for metrics in epochs(plain)], [(0, metrics) for metrics in epochs(other)])


def test_the_users_own_log_is_called_once_a_batch_and_stays() -> None:
    class Own(Net):
        def __init__(self) -> None:
            super().__init__()
            self.names: list[str] = []

        def log(self, name: str, value: Any, **options: Any) -> None:
            self.names.append(name)
            super().log(f"mine/{name}", value, **options)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.log("loss", loss)
            return loss

    done = run(SPLIT, batches(), Own, max_epochs=1)
    assert done.module.names == ["loss"] * 3 and "mine/loss" in done.trainer.callback_metrics
    assert "log" not in vars(done.module)


def test_a_log_on_the_instance_is_put_back() -> None:
    kept = []

    class Wrapped(Net):
        def __init__(self) -> None:
            super().__init__()
            self.log = partial(self.note)  # as torch.compiler.disable(module.log) leaves it

        def note(self, *args: Any, **options: Any) -> None:
            kept.append(args)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.log("loss", loss)
            if batch_idx == 2:
                raise RuntimeError("planted")
            return loss

    module = Wrapped()
    before = module.log
    with pytest.raises(RuntimeError, match="planted"):
        run(SPLIT, batches(), lambda: module, max_epochs=1)
    assert module.log is before and len(kept) == 2


def test_narrow_and_odd_values() -> None:
    class Odd(Net):
        def __init__(self) -> None:
            super().__init__()
            self.confusion = torchmetrics.ConfusionMatrix("binary")

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.log("narrow", torch.tensor(0.1, dtype=torch.bfloat16), on_step=True, on_epoch=True)
            self.log("last_only", torch.tensor(3), batch_size=1, on_step=True)
            if len(batch[0]) == 2:  # only the last piece of a full batch
                self.log("seldom", loss * 0 + 5)
            self.confusion((self.net(batch[0]) > 0).int(), (batch[1] > 0).int())
            return loss

    done = run(SPLIT, batches(16), Odd, max_epochs=1)
    metrics = done.trainer.callback_metrics
    assert metrics["narrow_step"] == pytest.approx(0.1, rel=4e-3) and metrics["narrow_step"].dtype == torch.float32
    assert metrics["last_only"] == 3 and metrics["seldom"] == 5
    assert int(done.module.confusion.compute().sum()) == 16


def test_a_reduction_lightning_does_not_know_gets_lightnings_message() -> None:
    class Median(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("median", batch[0].median(), reduce_fx=torch.median)
            return super().training_step(batch, batch_idx)

    with pytest.raises(Exception, match="are supported"):
        run(SPLIT, batches(), Median)

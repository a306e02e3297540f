"""What is left out of Lightning's loop: nobody sees a difference, and all of it comes back."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torchmetrics
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar

from fastloop.bridge.apply.loop import thin_loop
from fastloop.bridge.apply.loop.thin_loop import LateNumbers
from tests import models
from tests.rungs.fits import Raises, evidence, fit, seeded

THIN: dict[str, Any] = {"host": {"gc_every_steps": None, "step_graph": False}}


class Logs(models.Regression):
    """Logs in every way there is, and notes what can be read after each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("both", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("most", loss.detach(), on_epoch=True, reduce_fx="max", prog_bar=True)
        self.log("rate", 0.5 * batch_idx, prog_bar=batch_idx >= 0)
        return loss

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.seen.append("zero")

    def on_train_epoch_end(self) -> None:
        self.seen.append(self.read())

    def read(self) -> Any:
        kinds = ("callback_metrics", "logged_metrics", "progress_bar_metrics")
        return [{name: float(value) for name, value in getattr(self.trainer, kind).items()} for kind in kinds]


class Reads(L.Callback):
    """Looks at every third batch, as a bar would, so that numbers wait for it in between."""

    def __init__(self) -> None:
        self.types: set[type] = set()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % 3 == 0:
            pl_module.seen.append(pl_module.read())
            self.types |= {type(value) for value in {**trainer.progress_bar_metrics}.values()}


class Notes:
    """A bar that notes what it shows."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.shown: list[Any] = []

    def get_metrics(self, *args: Any) -> Any:
        found = super().get_metrics(*args)  # type: ignore[misc]
        self.shown.append({name: value for name, value in found.items() if name != "v_num"})
        return found


class Shown(Notes, TQDMProgressBar):
    pass


class RichShown(Notes, RichProgressBar):
    pass


@pytest.fixture
def items(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Numbers that were read off tensors."""
    read: list[Any] = []
    item = torch.Tensor.item

    def counted(self: torch.Tensor) -> Any:
        read.append(1)
        return item(self)

    monkeypatch.setattr(torch.Tensor, "item", counted)
    yield read


def run(rungs: Any, *more: Any, **settings: Any) -> tuple[Any, Logs, L.Trainer]:
    module = seeded(Logs)
    watcher, trainer = fit(rungs, module, val=models.loader(16), max_epochs=2, callbacks=more, **settings)
    return watcher, module, trainer


@pytest.mark.parametrize("kind", [Shown, RichShown])
def test_every_value_is_what_it_was(kind: Any, items: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thin_loop, "REFRESH_S", 1000.0)
    bars = kind(), kind()
    reads = Reads(), Reads()
    _, plain, others = run(None, reads[0], bars[0], enable_progress_bar=True)
    before = len(items)
    watcher, ours, trainer = run(THIN, reads[1], bars[1], enable_progress_bar=True)
    assert ours.seen == plain.seen and plain.seen.count("zero") == 16 and len(plain.seen) > 16
    assert reads[0].types == reads[1].types == {float}
    assert bars[1].shown[-1] == bars[0].shown[-1] and len(bars[1].shown) < len(bars[0].shown)
    assert len(items) - before < before / 2, "numbers wait on the device until somebody looks"
    found = evidence(watcher, "host")
    assert found["moves_left_out"] > 30 and found["flat_batches"] == 16
    assert trainer.progress_bar_metrics == others.progress_bar_metrics
    assert type(trainer._logger_connector._progress_bar_metrics) is dict


@pytest.mark.parametrize("raises", [False, True])
def test_nothing_of_it_stays(raises: bool) -> None:
    bar = Shown()
    if raises:
        module = seeded(Logs)
        with pytest.raises(RuntimeError, match="planted"):
            fit(THIN, module, callbacks=(Raises(), bar), enable_progress_bar=True)
    else:
        _, module, trainer = run(THIN, bar, enable_progress_bar=True)
        loop = trainer.fit_loop.epoch_loop
        assert "_build_kwargs" not in vars(loop) and "metrics" not in vars(loop._results)
        assert not [each for each in loop._results.values() if "to" in vars(each)]
    assert "on_train_batch_end" not in vars(bar)
    assert callable(module.on_train_batch_start) and callable(bar.on_before_zero_grad)


def test_numbers_are_read_however_somebody_looks() -> None:
    def late() -> LateNumbers:
        return LateNumbers({"a": torch.tensor(1.5), "b": 2})

    plain = {"a": 1.5, "b": 2}
    assert [{**late()}, dict(late()), late().copy(), json.loads(json.dumps(late()))] == [plain] * 4
    assert late() == plain and repr(late()) == repr(plain) and list(late().values()) == [1.5, 2]
    assert late()["a"] == late().get("a") == late().pop("a") == late().setdefault("a", 0) == 1.5
    assert late() | {"c": 3} == {"c": 3} | late() == {**plain, "c": 3}
    assert type(copy.copy(late())) is type(copy.deepcopy(late())) is dict
    assert LateNumbers({"a": torch.tensor(0.1)}) != {"a": 0.1}, "as 32 bits have it"
    assert type(dict.__getitem__(late(), "a")) is torch.Tensor


def test_a_checkpoint_that_holds_the_numbers_loads_without_us(tmp_path: Path) -> None:
    torch.save({"shown": LateNumbers({"a": torch.tensor(1.5)})}, tmp_path / "numbers.pt")
    assert torch.load(tmp_path / "numbers.pt", weights_only=True) == {"shown": {"a": 1.5}}


class CallsHooks(models.Regression):
    """Calls an empty hook of its own, and has it copied."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.on_after_backward()
        self.copied = copy.copy(vars(self))
        return super().training_step(batch, batch_idx)


def test_hooks_of_the_module_stay_callable() -> None:
    watcher, _ = fit(THIN, module := seeded(CallsHooks), callbacks=(L.Callback(),))
    assert "on_after_backward" not in module.copied and evidence(watcher, "host")["flat_batches"] == 8


class LogsVector(models.Regression):
    """What no bar can show, from a metric of several numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.metric = torchmetrics.MeanSquaredError(num_outputs=2)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.metric(torch.ones(4, 2), torch.zeros(4, 2))
        self.log("vector", self.metric, on_step=True, on_epoch=False, prog_bar=True, logger=False)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("rungs", [None, THIN])
def test_what_is_no_number_is_refused_as_lightning_does(rungs: Any) -> None:
    with pytest.raises(ValueError, match="does not contain a single element"):
        fit(rungs, seeded(LogsVector))


def test_a_bar_with_a_rate_of_its_own_keeps_it() -> None:
    bar = Shown(refresh_rate=3)
    run(THIN, bar, enable_progress_bar=True)
    assert len([each for each in bar.shown if "most" in str(each)]) >= 4

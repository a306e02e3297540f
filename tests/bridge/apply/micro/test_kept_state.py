"""What training_step keeps from batch to batch: what would change with the number of its calls leaves batches whole."""

from __future__ import annotations

import itertools
import time
from collections import deque
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn.utils import parametrizations, spectral_norm
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from fastloop.bridge.apply.micro import gradient_check
from tests.runs import Net, batches, both, distance, run

EVEN = partial(batches, 96)
SPLIT: Any = ({"batch": {"micro_batch": 2}}, {}, "per micro-batch instead of once per batch")
MERGED: Any = ({"batch": {"micro_batch": 32}}, {"accumulate_grad_batches": 4}, "per window instead of once per batch")
WAYS = pytest.mark.parametrize(("rungs", "settings", "how"), [SPLIT, MERGED], ids=["split", "merged"])


class Meter:
    """An average over samples, as many scripts have one."""

    def __init__(self) -> None:
        self.sum, self.count, self.average, self.last = 0.0, 0, 0.0, 0.0

    def update(self, value: float, samples: int) -> None:
        self.sum, self.count, self.last = self.sum + value * samples, self.count + samples, value
        self.average = self.sum / self.count


class Keeps(Net):
    """Keeps something in its training_step."""

    def keep(self, batch: Any, loss: torch.Tensor) -> None: ...

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        with torch.no_grad():
            self.keep(batch, loss.detach())
        return loss


class Average(Keeps):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ema", torch.zeros(16, 8))

    def keep(self, batch: Any, loss: torch.Tensor) -> None:
        self.ema.lerp_(self.net[0].weight, 0.02)


class Replaced(Average):
    def keep(self, batch: Any, loss: torch.Tensor) -> None:
        self.ema = torch.lerp(self.ema, self.net[0].weight, 0.02)


class Counter(Keeps):
    calls = 0

    def keep(self, batch: Any, loss: torch.Tensor) -> None:
        self.calls += 1


class Inside(Keeps):
    def __init__(self) -> None:
        super().__init__()
        self.meter, self.shadow = Meter(), [torch.zeros(16, 8)]
        self.rates = {"beta": 1.0}

    def keep(self, batch: Any, loss: torch.Tensor) -> None:
        self.meter.update(float(loss), 1)
        self.shadow[0].lerp_(self.net[0].weight, 0.1)
        self.rates["beta"] *= 0.9


class First(Keeps):
    """An average that begins with its first value."""

    average: Any = None

    def keep(self, batch: Any, loss: torch.Tensor) -> None:
        self.average = float(loss) if self.average is None else 0.9 * self.average + 0.1 * float(loss)


class Warms(Keeps):
    def keep(self, batch: Any, loss: torch.Tensor) -> None:
        for group in self.optimizers().param_groups:
            group["lr"] *= 0.9


class Spectral(Net):
    def __init__(self, make: Any = parametrizations.spectral_norm) -> None:
        super().__init__()
        make(self.net[0])


@WAYS
@pytest.mark.parametrize(
    ("module", "names"),
    [
        (Average, "ema"),
        (Replaced, "ema"),
        (Counter, "calls"),
        (Inside, "meter.sum, meter.count, rates and 1 more"),
        (First, "average"),
        (Warms, "the learning rate"),
        (Spectral, "spectral_norm of net.0"),
        (partial(Spectral, spectral_norm), "spectral_norm of net.0"),
    ],
)
def test_what_advances_with_each_call_leaves_batches_whole(
    rungs: Any, settings: Any, how: str, module: Any, names: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, ours = both(rungs, EVEN, module, max_epochs=2, **settings)
    verdict = ours.verdict("batch")
    assert verdict.took is False and f"training_step changes {names}: once {how}" in verdict.why
    assert distance(plain, ours) == 0 and ours.record.rates == plain.record.rates
    buffers = zip(plain.module.buffers(), ours.module.buffers(), strict=True)
    assert all(torch.equal(*both) for both in buffers), "the comparison left no trace"
    # The control: nobody asks, and it trains that way, unless the gradient differs by as much.
    monkeypatch.setattr(gradient_check.KeptState, "find_changed", lambda *_: set())
    blind = run(rungs, EVEN(), module, max_epochs=1, **settings).verdict("batch")
    assert blind.took is True or (names == "spectral_norm of net.0" and "gradient" in blind.why)


class Scheduled(Keeps):
    """Takes the next weight of its loss from an iterator."""

    def __init__(self) -> None:
        super().__init__()
        self.factors = itertools.cycle([1.0, 0.5, 0.25])

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step(batch, batch_idx) * next(self.factors)


@WAYS
def test_an_iterator_leaves_batches_whole(rungs: Any, settings: Any, how: str) -> None:
    plain, ours = both(rungs, EVEN, Scheduled, max_epochs=2, **settings)
    assert ours.verdict("batch").took is False and "the model keeps an iterator (cycle)" in ours.verdict("batch").why
    assert distance(plain, ours) == 0
    other = run(None, EVEN(), Keeps, max_epochs=2, **settings)
    assert distance(plain, other) > 0, "the control: the weights matter"


class Harmless(Keeps):
    """Collects, adds up over samples, overwrites, notes times, and makes what it needs when it first needs it."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[Any] = []
        self.recent: deque[float] = deque(maxlen=3)
        self.meter, self.seen, self.cache = Meter(), 0, None
        self.last_loss, self.noise, self.took, self.now = 0.0, 0.0, 0.0, 0.0
        self.mean, self.accuracy = MeanMetric(), MulticlassAccuracy(2)
        self.register_buffer("queue", torch.zeros(64, 8))
        self.register_buffer("place", torch.zeros((), dtype=torch.long))
        self.register_buffer("steps", torch.zeros(()))
        self.mask: Any = None

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.started = time.perf_counter()

    def keep(self, batch: Any, loss: torch.Tensor) -> None:
        rows, now = batch[0], time.perf_counter()
        self.outputs.append(rows)
        self.recent.append(float(loss))
        self.meter.update(float(loss), len(rows))
        self.seen += len(rows)
        self.mask = torch.ones(len(rows)) if self.mask is None or len(self.mask) < len(rows) else self.mask
        self.cache = torch.arange(8) if self.cache is None else self.cache
        self.last_loss, self.noise = float(loss), float(torch.rand(()))
        self.now, self.took = now, now - self.started
        self.mean.update(loss)
        self.accuracy.update(torch.ones(len(rows)), torch.ones(len(rows)))
        self.queue[(int(self.place) + torch.arange(len(rows))) % 64] = rows
        self.place.add_(len(rows)).remainder_(64)
        self.steps.fill_(self.trainer.global_step)


@WAYS
def test_what_adds_up_or_is_overwritten_is_no_reason(rungs: Any, settings: Any, how: str) -> None:
    plain, ours = both(rungs, EVEN, Harmless, max_epochs=2, **settings)
    assert ours.verdict("batch").took is True, ours.verdict("batch").why
    for name in ("queue", "place", "steps"):
        assert torch.equal(getattr(plain.module, name), getattr(ours.module, name))
    assert ours.module.seen == plain.module.seen == 192 and ours.module.meter.count == 192


class Normed(Net):
    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.net.insert(1, norm)


@pytest.mark.parametrize(
    "norm",
    [
        partial(torch.nn.BatchNorm1d, 16),
        lambda: torch.nn.Sequential(
            torch.nn.Unflatten(1, (2, 8)), torch.nn.InstanceNorm1d(2, track_running_stats=True), torch.nn.Flatten()
        ),
    ],
)
def test_norms_of_batches_are_judged_elsewhere(norm: Any) -> None:
    ours = run(SPLIT[0], EVEN(), Normed(norm()), max_epochs=1)
    assert ours.verdict("batch").took is True and ours.verdict("batch").parity_class == "changes-training"


class StartsLate(Counter):
    def keep(self, batch: Any, loss: torch.Tensor) -> None:
        if self.trainer.global_step >= 2:
            super().keep(batch, loss)


@WAYS
def test_what_begins_later_is_found_later(rungs: Any, settings: Any, how: str) -> None:
    ours = run({"batch": {"micro_batch": 4}} if not settings else rungs, batches(192), StartsLate, **settings)
    verdict = ours.verdict("batch")
    assert "from optimizer step 4 on, training_step changes calls" in verdict.why
    assert verdict.took is True and verdict.parity_class == "changes-training"


def test_settings_of_optimizers_are_put_back() -> None:
    class Steps(Warms):
        def keep(self, batch: Any, loss: torch.Tensor) -> None:
            super().keep(batch, loss)
            self.lr_schedulers().step()

    schedule = lambda optimizer, _module: torch.optim.lr_scheduler.StepLR(optimizer, 2)  # noqa: E731
    plain, ours = both(SPLIT[0], EVEN, lambda: Steps(schedule=schedule), max_epochs=2)
    assert ours.verdict("batch").took is False and ours.record.rates == plain.record.rates

"""Whether windows may be merged: what is found out on the first one, and that finding it out leaves no trace."""

from __future__ import annotations

import copy
import random
import signal
from contextlib import nullcontext
from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.plugins.precision import MixedPrecision
from torch.nn.functional import cross_entropy, dropout
from torch.utils.data import DataLoader, TensorDataset

from fastloop.bridge.apply.micro import choice, gradient_check
from fastloop.bridge.apply.micro.choice import PieceChoice
from fastloop.bridge.apply.micro.windows import StepCall
from fastloop.bridge.apply.rehearse import played
from fastloop.bridge.apply.rehearse.recorded_calls import CallRecorder
from fastloop.bridge.apply.state.untouched import StateSnapshot
from fastloop.errors import FastLoopError
from fastloop.feeds.batch_norm.groups import BatchGroups
from fastloop.feeds.batch_tree import CannotRegroup
from fastloop.feeds.splitting import Piece
from tests.noted import Noted
from tests.runs import Net, Run, batches, both, distance, run

MERGE = {"batch": {"micro_batch": 32}}
ACCUMULATE = {"accumulate_grad_batches": 4}
EVEN = partial(batches, 96)
TOKENS, WORDS = 12, 20


class Tagger(Net):
    """A class for each token of 12; what is padding has the target -100 and no part in the mean."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Embedding(WORDS, 8), torch.nn.Tanh(), torch.nn.Linear(8, WORDS))

    def loss(self, batch: Any) -> torch.Tensor:
        return cross_entropy(self.net(batch[0]).flatten(0, 1), batch[1].flatten())


def sentences(shortest: int, samples: int = 96) -> DataLoader[Any]:
    """All of the same shape; `shortest` tokens of 12 and more of each are real."""
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(0, WORDS, (samples, TOKENS), generator=generator)
    lengths = torch.randint(shortest, TOKENS + 1, (samples, 1), generator=generator)
    targets = words.roll(1, 1).masked_fill(torch.arange(TOKENS) >= lengths, -100)
    return DataLoader(TensorDataset(words, targets, torch.arange(samples)), batch_size=8)


def accumulated_like(plain: Run, ours: Run) -> bool:
    """Batch by batch as without us, bit for bit."""
    return ours.module.samples == plain.module.samples and distance(plain, ours) == 0


def test_token_means_are_not_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, ours = both(MERGE, partial(sentences, 2), Tagger, max_epochs=3, **ACCUMULATE)
    verdict = ours.verdict("batch")
    assert verdict.took is False and accumulated_like(plain, ours)
    start = "windows run batch by batch: the loss is not a mean over samples: the merged gradient differs by "
    assert verdict.why.startswith(start) and float(verdict.why.removeprefix(start).partition(";")[0]) > 1e-2
    assert ours.seen("batch")["apart_steps"] == 9 and ours.seen("batch")["changed_steps"] == 0
    # The control: what merging them without a look trains is something else.
    monkeypatch.setattr("fastloop.bridge.apply.micro.choice.explain_difference", lambda *_: None)
    blind = run(MERGE, sentences(2), Tagger, max_epochs=3, **ACCUMULATE)
    assert blind.verdict("batch").took is True and distance(plain, blind) > 1e-3


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true", "64-true"])
def test_means_are_merged(precision: Any) -> None:
    """The control: the same sentences without padding, and cross-entropy over samples."""
    plain, ours = both(MERGE, partial(sentences, TOKENS), Tagger, max_epochs=2, precision=precision, **ACCUMULATE)
    assert ours.verdict("batch").took is True and ours.seen("batch")["changed_steps"] == 6
    assert ours.loop is not None and ours.loop.measurement is not None
    assert (ours.loop.measurement.one_time_s["rehearsal"] or 0) > 0 and ours.module.samples == plain.module.samples


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_rounding_hides_no_weights(precision: Any) -> None:
    ours = run(MERGE, sentences(6), Tagger, max_epochs=1, precision=precision, **ACCUMULATE)
    assert ours.verdict("batch").took is False and "not a mean over samples" in ours.verdict("batch").why


class Rounds(Tagger):
    """A mean that arithmetic in bfloat16 makes a hundredth larger in large batches, unless `breaks` in float32."""

    breaks = False

    def loss(self, batch: Any) -> torch.Tensor:
        rounds = torch.is_autocast_enabled("cpu")
        if self.breaks and not rounds:
            raise RuntimeError("this kernel takes no float32")
        return super().loss(batch) * (1.01 if rounds and len(batch[0]) > 8 else 1.0)


class RoundsOnly(Rounds):
    breaks = True


@pytest.mark.parametrize(("module", "took"), [(Rounds, True), (RoundsOnly, False)])
def test_what_rounding_may_have_done_is_computed_in_float32(module: Any, took: bool) -> None:
    """A gpt2 in bfloat16 was off by 0.006 in step 260: all windows after it ran batch by batch, for no reason. Without
    float32 it stays so."""
    ours = run(MERGE, sentences(TOKENS), module, max_epochs=1, precision="bf16-mixed", **ACCUMULATE)
    assert ours.verdict("batch").took is took and ("is not a mean" in ours.verdict("batch").why) is not took


def test_float32_finds_smaller_weights_than_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sentences of 11 and 12 tokens; the control has no limit for doubt."""
    for doubts, took in ((True, False), (False, True)):
        if not doubts:
            monkeypatch.setattr(gradient_check, "IN_DOUBT", 1.0)
        ours = run(MERGE, sentences(TOKENS - 1), Tagger, max_epochs=1, precision="bf16-mixed", **ACCUMULATE)
        assert ours.verdict("batch").took is took, ours.verdict("batch").why


@pytest.mark.parametrize(("shortest", "took"), [(TOKENS, True), (6, False)])
def test_with_the_scaler_of_float16(shortest: int, took: bool) -> None:
    scaler = torch.amp.GradScaler("cpu")
    plugins = [MixedPrecision("16-mixed", "cpu", scaler)]
    ours = run(MERGE, sentences(shortest), Tagger, max_epochs=1, plugins=plugins, **ACCUMULATE)
    assert ours.verdict("batch").took is took and ("is not a mean" in ours.verdict("batch").why) is not took


class Contrast(Net):
    def loss(self, batch: Any) -> torch.Tensor:
        keys = self.net(batch[0])
        return cross_entropy(keys @ batch[1].T, torch.arange(len(keys)))


class OfEight(Net):
    def loss(self, batch: Any) -> torch.Tensor:
        return super().loss([member.reshape(8, -1) for member in batch[:2]])


class Noisy(Net):
    def loss(self, batch: Any) -> torch.Tensor:
        return super().loss([batch[0] + torch.randn_like(batch[0]), batch[1] * torch.randn_like(batch[1])])


class Skips(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return [loss, None][batch_idx % 4 in (1, 3)]  # a form that the code does not show


class Broken(Net):
    def loss(self, batch: Any) -> torch.Tensor:
        return super().loss(batch) * float("nan")


@pytest.mark.parametrize(
    ("module", "why"),
    [
        (Contrast, "the loss is not a mean over samples: the merged gradient differs by "),
        (OfEight, "could not compare accumulated and merged gradients: RuntimeError: "),
        (Noisy, "training_step draws its own random numbers: accumulated and merged gradients differ by "),
        (Skips, "could not compare accumulated and merged gradients: ValueError: training_step returned no loss"),
    ],
)
def test_what_else_is_left_as_it_was(module: Any, why: str) -> None:
    plain, ours = both(MERGE, EVEN, module, max_epochs=2, **ACCUMULATE)
    assert ours.verdict("batch").took is False
    assert ours.verdict("batch").why.startswith(f"windows run batch by batch: {why}")
    assert accumulated_like(plain, ours)
    with pytest.raises(FastLoopError, match="strict off to train batch by batch"):
        run(MERGE, EVEN(), module, max_epochs=1, strict=True, **ACCUMULATE)


def test_a_gradient_that_is_no_number() -> None:
    ours = run(MERGE, EVEN(), Broken, max_epochs=1, **ACCUMULATE)
    assert "could not compare accumulated and merged gradients: the gradient is not finite" in ours.verdict("batch").why


def test_the_users_own_error_arrives_once_and_as_it_is() -> None:
    class Mine(Exception):
        pass

    class Raises(Net):
        def loss(self, batch: Any) -> torch.Tensor:
            raise Mine("planted")

    with pytest.raises(Mine, match="planted"):
        run(MERGE, EVEN(), Raises, max_epochs=1, **ACCUMULATE)


STRUCK = Noted()
"""A global: what a model and its class keep is put back."""


def test_what_a_signal_raises_arrives_although_it_is_raised_once() -> None:
    """As torch says that a worker was killed: from a handler, wherever the main thread is."""

    class Killed(Exception):
        pass

    def handle(_number: int, _frame: Any) -> None:
        raise Killed("planted")

    class Struck(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if STRUCK.add(batch_idx) == 2:
                signal.raise_signal(signal.SIGUSR1)
            return super().training_step(batch, batch_idx)

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        with pytest.raises(Killed, match="planted"):
            run(MERGE, EVEN(), Struck, max_epochs=1, **ACCUMULATE)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert STRUCK.take() == [0, 1], "it struck while gradients were compared"


def test_the_users_word_is_not_looked_into(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastloop.bridge.apply.micro.choice.explain_difference", lambda *_: 1 / 0)
    word = {"batch": {"micro_batch": 32, "loss_is_mean": True}}
    assert run(word, sentences(2), Tagger, max_epochs=1, **ACCUMULATE).verdict("batch").took is True


class Keeps(Net):
    """Changes whatever a forward can change, drops out, and notes where the first batch that counts finds it."""

    def __init__(self) -> None:
        super().__init__()
        random.seed(0)
        self.net = torch.nn.Sequential(
            torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Dropout(0.3), torch.nn.Linear(16, 1)
        )
        self.register_buffer("queue", torch.zeros(4))
        self.calls, self.seen = 0, [0.0]
        self.found: dict[str, Any] = {}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.calls, self.queue = self.calls + 1, self.queue.roll(1) + self.calls
        self.seen.append(float(batch[0].sum()))
        batch[1].mul_(1.5)
        loss = self.loss([dropout(batch[0], 0.1, self.training), batch[1]]) * (1 + 1e-3 * random.random())
        self.log("loss", loss)
        return loss

    def state(self) -> dict[str, Any]:
        parts = {f"{name}.training": part.training for name, part in self.named_modules()}
        grads = {name: copy.copy(parameter.grad) for name, parameter in self.named_parameters()}
        own = {"calls": self.calls, "seen": list(self.seen), "streams": (torch.get_rng_state(), random.getstate())}
        return {**own, **parts, **grads, **{name: buffer.clone() for name, buffer in self.named_buffers()}}


def test_comparing_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    states: list[dict[str, Any]] = []
    ran: list[int] = []
    written: list[bool] = []
    compare = gradient_check.explain_difference

    def watched(strategy: Any, own: Any, merged: Any, step: Any, *more: Any) -> str | None:
        module = strategy.lightning_module
        before = [tensor.clone() for piece in own for tensor in piece.batch]
        states.append(module.state())

        def count(batch: Any, number: int) -> Any:
            ran.append(number)
            return step(batch, number)

        compare(strategy, own, merged, count, *more)
        states.append(module.state())
        written.append(not all(map(torch.equal, before, [tensor for piece in own for tensor in piece.batch])))
        return "planted"

    monkeypatch.setattr("fastloop.bridge.apply.micro.choice.explain_difference", watched)
    plain, ours = both(MERGE, EVEN, Keeps, max_epochs=2, **ACCUMULATE)
    assert ran == [0, 1, 2, 3, 0, 3, 3], "it did run, each batch, then all of them, and for what it keeps the last"
    first, second = states
    assert first.keys() == second.keys()
    assert all(_same(first[name], second[name]) for name in first) and written == [False]
    assert distance(plain, ours) == 0 and plain.module.seen == ours.module.seen
    # The control: without the guard the traces show.
    states.clear()
    monkeypatch.setattr(gradient_check, "map_tensors", lambda batch, _clone: batch)
    monkeypatch.setattr(gradient_check, "preserve_state", lambda *_modules: nullcontext(StateSnapshot()))
    run(MERGE, EVEN(), Keeps, max_epochs=1, **ACCUMULATE)
    assert {name for name in states[0] if not _same(states[0][name], states[1][name])} >= {"calls", "seen", "queue"}
    assert written == [False, True]


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    return bool(a == b)


class Writes(Net):
    """Logs by hand, and has a teacher that follows its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = torch.nn.Linear(8, 16).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.logger.experiment.write(batch_idx)
        self.teach(self.teacher.weight, self.net[0].weight.detach())
        return super().training_step(batch, batch_idx)

    def teach(self, teacher: Any, student: torch.Tensor) -> None:
        teacher.lerp_(student, 0.1)


class WritesData(Writes):
    def teach(self, teacher: Any, student: torch.Tensor) -> None:
        teacher.data.lerp_(student, 0.1)


class AssignsData(Writes):
    def teach(self, teacher: Any, student: torch.Tensor) -> None:
        teacher.data = torch.lerp(teacher.data, student, 0.1)


class Book(Logger):
    """A logger that keeps what it is told."""

    name = version = "book"

    def __init__(self) -> None:
        super().__init__()
        self.written: list[int] = []
        self.experiment = self

    def write(self, batch_idx: int) -> None:
        self.written.append(batch_idx)

    def log_metrics(self, *_: Any, **__: Any) -> None: ...

    def log_hyperparams(self, *_: Any, **__: Any) -> None: ...


@pytest.mark.parametrize("kind", [Writes, WritesData, AssignsData])
def test_loggers_and_parameters_are_left_alone(kind: Any) -> None:
    books = [Book(), Book()]
    plain, ours = (
        run(rungs, EVEN(), kind, max_epochs=2, logger=book, **ACCUMULATE)
        for rungs, book in zip((None, MERGE), books, strict=True)
    )
    assert books[0].written == books[1].written == [*range(12)] * 2
    assert "training_step changes parameters" in ours.verdict("batch").why
    assert accumulated_like(plain, ours) and ours.trainer.loggers == [books[1]]


def test_compiled_modules_are_not_compiled_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    stances: list[str] = []

    class Looks(Net):
        def loss(self, batch: Any) -> torch.Tensor:
            stances.append(torch._dynamo.eval_frame._stance.stance)
            return super().loss(batch)

    assert run(MERGE, EVEN(), Looks, max_epochs=1, **ACCUMULATE).verdict("batch").took
    assert stances == ["force_eager"] * 5 + ["default"] * 3


def test_a_recorder_of_calls_sees_the_step_alone() -> None:
    """What a rehearsal plays again are the calls of the first step, not those that were compared before it."""
    recorders: list[CallRecorder] = []

    class Recorded(Net):
        def on_train_start(self) -> None:
            recorders.append(CallRecorder(self, ["net"], groups=BatchGroups()))

    assert run(MERGE, EVEN(), Recorded, max_steps=1, **ACCUMULATE).verdict("batch").took
    assert [call.args[0].shape for call in recorders[0].calls] == [(32, 8)]


class LogsRoots(Net):
    """Logs a mean over samples, a root of one, the extreme of means, an extreme over samples, and a sum over them."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("mse", loss)
        self.log("rmse", loss.sqrt())
        self.log("most", loss, reduce_fx="max")
        self.log("largest", batch[0].max(), reduce_fx="max")
        self.log("samples", float(len(batch[0])), reduce_fx=torch.sum)
        return loss


@pytest.mark.parametrize(
    ("rungs", "settings"), [({"batch": {"micro_batch": 2}}, {}), (MERGE, ACCUMULATE)], ids=["split", "merged"]
)
def test_logged_values_that_are_no_means_over_samples_are_named(rungs: Any, settings: Any) -> None:
    with pytest.warns(UserWarning, match="logged values that are not means over samples will differ .*: rmse, most$"):
        ours = run(rungs, EVEN(), LogsRoots, **settings)
    assert ours.seen("batch")["unequal_logs"] == ["rmse", "most"]
    assert (
        ours.verdict("batch").took
        and "logged values that are not means over samples differ: rmse, most" in ours.verdict("batch").why
    )
    honest = run(rungs, EVEN(), Net, **settings)
    assert honest.seen("batch")["unequal_logs"] == [] and "logged values" not in honest.verdict("batch").why


@pytest.mark.parametrize(
    ("rungs", "settings"), [({"batch": {"micro_batch": 2}}, {}), (MERGE, ACCUMULATE)], ids=["split", "merged"]
)
@pytest.mark.parametrize("is_lost", [True, False])
def test_a_lost_device_ends_it_with_the_users_error(
    rungs: Any, settings: Any, is_lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reason why batches run whole would be followed by errors that say nothing of the cause."""
    asserts = RuntimeError("CUDA error: device-side assert triggered")
    calls = []

    class Asserts(Net):
        def loss(self, batch: Any) -> torch.Tensor:
            calls.append(len(batch[0]))
            if len(calls) == 2:
                raise asserts
            return super().loss(batch)

    def wait(_device: Any) -> None:
        if is_lost and len(calls) >= 2:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(played, "synchronize", wait)
    if is_lost:
        with pytest.raises(RuntimeError, match="device-side assert") as raised:
            run(rungs, EVEN(), Asserts, **settings)
        assert raised.value is asserts and len(calls) == 2
    else:
        why = run(rungs, EVEN(), Asserts, **settings).verdict("batch").why
        assert "RuntimeError: CUDA error: device-side assert triggered" in why


def sentences_padded_late(full: int = 64) -> DataLoader[Any]:
    """The first `full` sentences have no padding."""
    loader = sentences(2, samples=192)
    words, targets, numbers = loader.dataset.tensors  # type: ignore[attr-defined]
    return DataLoader(TensorDataset(words, torch.cat([words[:full].roll(1, 1), targets[full:]]), numbers), batch_size=8)


class LateStd(Net):
    """Its loss couples the samples from the third step on."""

    def loss(self, batch: Any) -> torch.Tensor:
        out = self.net(batch[0])
        loss = (out - batch[1]).square().mean()
        return loss + (out.std() if self.trainer.global_step >= 2 else 0)


@pytest.mark.parametrize(
    ("rungs", "load", "kind", "settings"),
    [
        (MERGE, sentences_padded_late, Tagger, ACCUMULATE),
        (MERGE, partial(batches, 192), LateStd, ACCUMULATE),
        ({"batch": {"micro_batch": 4}}, EVEN, LateStd, {}),
        ({"batch": {"micro_batch": 3}}, EVEN, LateStd, {}),
    ],
    ids=["padding", "coupled, merged", "coupled, split", "coupled, in pieces without halves"],
)
def test_a_loss_that_differs_later_is_found(rungs: Any, load: Any, kind: Any, settings: Any) -> None:
    """On the fourth window or batch; the first shows nothing."""
    with pytest.warns(UserWarning, match="from optimizer step 4 on, the loss "):
        ours = run(rungs, load(), kind, max_epochs=2, **settings)
    seen = ours.seen("batch")
    assert seen["changed_steps"] == 3 and seen["steps"] > 6, seen
    why = ours.verdict("batch").why
    assert "from optimizer step 4 on" in why and "the 2 before it were not compared, and may have changed" in why
    assert ours.verdict("batch").parity_class == "changes-training" and ours.loop is not None
    step = ours.loop.plan.step("batch")
    assert step is not None and "may have changed" in step.change.notes[-1]


class NewEpoch(Net):
    """Its loss couples the samples from the third epoch on."""

    coupled_from = 2

    def loss(self, batch: Any) -> torch.Tensor:
        out = self.net(batch[0])
        loss = (out - batch[1]).square().mean()
        return loss + (out.std() if self.current_epoch >= self.coupled_from else 0)


class Grown(Net):
    """Where a callback changes the module as an epoch starts."""

    is_coupled = False

    def loss(self, batch: Any) -> torch.Tensor:
        out = self.net(batch[0])
        return (out - batch[1]).square().mean() + (out.std() if self.is_coupled else 0)


class Grows(L.Callback):
    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.is_coupled = trainer.current_epoch >= 2


@pytest.mark.parametrize(
    ("rungs", "settings", "step"), [(MERGE, ACCUMULATE, 7), ({"batch": {"micro_batch": 4}}, {}, 25)]
)
@pytest.mark.parametrize(("kind", "callbacks"), [(NewEpoch, []), (Grown, [Grows()])])
def test_a_loss_that_differs_in_later_epochs_is_found_as_they_start(
    kind: Any, callbacks: Any, rungs: Any, settings: Any, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, ours = (run(each, EVEN(), kind, max_epochs=4, callbacks=callbacks, **settings) for each in (None, rungs))
    assert f"from optimizer step {step} on, the loss" in ours.verdict("batch").why and distance(plain, ours) < 1e-6
    monkeypatch.setattr("fastloop.bridge.apply.micro.choice.FEW", 0)
    blind = run(rungs, EVEN(), kind, max_epochs=4, callbacks=callbacks, **settings)
    assert distance(plain, blind) > 1e-4, "the control"


def test_comparisons_get_rarer(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = list[int]()
    original = gradient_check.explain_difference

    def note(strategy: Any, *args: Any) -> Any:
        compared.append(strategy.lightning_module.trainer.global_step)
        return original(strategy, *args)

    monkeypatch.setattr("fastloop.bridge.apply.micro.choice.explain_difference", note)
    ours = run(MERGE, EVEN(), Net, max_epochs=8, **ACCUMULATE)
    assert compared == [0, 3, 15] and ours.seen("batch")["changed_steps"] == ours.seen("batch")["steps"] == 24


def test_a_batch_that_cannot_be_cut_is_not_compared_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """With several ranks every batch counts, also one that runs whole."""
    refused = list[int]()

    def refuse(batch: Any, size: int, *_: Any, **__: Any) -> Any:
        refused.append(size)
        raise CannotRegroup("two first dimensions")

    def leave_whole(self: Any, call: StepCall) -> list[Piece]:
        return [Piece(call.batch, 8, 1.0), Piece(call.batch, 8, 1.0)]

    first = iter([True])
    monkeypatch.setattr(PieceChoice, "_weigh", _skip_first(PieceChoice._weigh, first))
    monkeypatch.setattr(PieceChoice, "_cut", leave_whole)
    monkeypatch.setattr(choice, "cut", refuse)
    ours = run({"batch": {"micro_batch": 4}}, EVEN(), Net, max_epochs=1)
    assert ours.trainer.global_step == 12 and refused == [4], "the fourth batch, and none before"


def _skip_first(original: Any, first: Any) -> Any:
    return lambda *args, **named: None if next(first, False) else original(*args, **named)

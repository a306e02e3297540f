"""Which pieces a batch runs in, where a first step may need more memory than all later ones."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fastloop.bridge.apply.live_plan import LivePlan
from fastloop.bridge.apply.micro import choice
from fastloop.bridge.apply.micro.choice import PieceChoice
from fastloop.bridge.apply.site import LiveSite
from fastloop.evidence.clock.one_time import OneTime
from fastloop.feeds.batch_tree import BatchWindow
from fastloop.ladder import Ladder
from fastloop.records.facts import Facts
from tests.runs import Net, batches, run

MERGE, ACCUMULATE = {"batch": {"micro_batch": 16}}, {"accumulate_grad_batches": 4}
WAITING = threading.local()
"""The rungs that wait for their rehearsal on this thread's rank."""
ROOM = "micro-batches of 4 only fit once these rungs start, after the first step: amp"


class Ranks:
    """The exchanges of two ranks, each of which is a thread. A rank that asks alone raises BrokenBarrierError."""

    root_device = torch.device("cpu")
    lightning_module = SimpleNamespace(training_step=None)

    def __init__(self) -> None:
        self.barrier, self.told = threading.Barrier(2, timeout=10), dict[int, bool]()

    def reduce_boolean_decision(self, decision: bool, *, all: bool) -> bool:
        assert all
        self.told[threading.get_ident()] = decision
        self.barrier.wait()
        answer = False not in self.told.values()
        self.barrier.wait()
        return answer


def choose_windows(ranks: Any, windows: Sequence[Any], held: Sequence[Sequence[str]]) -> list[tuple[bool, int, Any]]:
    """For each window: whether it runs apart, in how many pieces, and the reason of the first that does."""
    trainer = SimpleNamespace(fit_loop=SimpleNamespace(total_batch_idx=0), current_epoch=0)
    site = LiveSite(trainer, ranks, Facts(), None, warn=str, say=str, one_time=OneTime())  # type: ignore[arg-type]
    live = LivePlan(Ladder(), strict=False, refused={}, cheaper=set())
    made = PieceChoice(4, "batch", {}, site, live)
    made.windows.sampler = SimpleNamespace(window=2, sizes=deque([(2, 2)] * len(windows)))  # type: ignore[assignment]
    found = []
    for number, batch in enumerate(windows):
        WAITING.rungs = live.held = frozenset(held[number])
        shown = made.windows.show(batch, made.refused) if isinstance(batch, BatchWindow) else batch
        trainer.fit_loop.total_batch_idx = number
        pieces, apart = made.choose(shown, (number,))
        found.append((apart, len(pieces), made.evidence()["apart_why"]))
    return found


@pytest.mark.parametrize("differs", ["first", "second"])
def test_ranks_ask_each_other_equally_often(differs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank's window is not one batch while the other rank's does not fit: neither may wait for the other."""
    monkeypatch.setattr(choice, "LIMITED", ("cpu",))
    monkeypatch.setattr(choice, "fits_in_memory", lambda *_: not WAITING.rungs)
    monkeypatch.setattr(choice, "explain_difference", lambda *_: None)
    ranks, whole, uneven = Ranks(), torch.zeros(4, 3), BatchWindow([torch.zeros(2, 3), torch.zeros(2, 4)])
    first = [uneven, whole, whole] if differs == "first" else [whole, uneven, whole]
    held = [["amp"], ["amp"], []]
    with ThreadPoolExecutor(2) as threads:
        one = threads.submit(choose_windows, ranks, first, held)
        other = threads.submit(choose_windows, ranks, [whole] * 3, held)
    assert [each[:2] for each in other.result()] == [(True, 2), (True, 2), (False, 1)]
    assert other.result()[0][2] == ROOM and [each[:2] for each in one.result()] == [(True, 2), (True, 2), (False, 1)]


def test_a_refusal_after_a_step_without_room_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "LIMITED", ("cpu",))
    answers = [False, True]
    monkeypatch.setattr(choice, "fits_in_memory", lambda *_: answers.pop(0))
    monkeypatch.setattr(choice, "explain_difference", lambda *_: "the loss is not a mean over samples")
    ours = run({**MERGE, "amp": {}}, batches(96, shuffle=True), Net, max_epochs=2, **ACCUMULATE)
    assert ours.verdict("batch").took is False
    assert "windows run batch by batch: the loss is not a mean over samples" in ours.verdict("batch").why


@pytest.mark.parametrize("later", [False, True])
def test_a_window_that_did_not_fit_is_tried_again_once_nothing_waits(
    later: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rungs that were to make room may have been refused meanwhile: merging would end the training."""
    answers = [False, later]
    monkeypatch.setattr(choice, "LIMITED", ("cpu",))
    monkeypatch.setattr(choice, "fits_in_memory", lambda *_: answers.pop(0))
    ours = run({**MERGE, "amp": {}}, batches(96, shuffle=True), Net, max_epochs=2, **ACCUMULATE)
    seen, verdict = ours.seen("batch"), ours.verdict("batch")
    assert not answers and ours.trainer.global_step == 6
    assert (seen["apart_steps"], seen["changed_steps"]) == ((1, 5) if later else (6, 0)), seen
    assert verdict.took is later
    assert later or "windows run batch by batch: micro-batches of 16 do not fit in memory" in verdict.why


class Counts(Net):
    """Writes to a parameter in training_step, as a momentum encoder is updated."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.count = torch.nn.Parameter(torch.zeros(()), requires_grad=False)

    def training_step(self, *args: Any, **named: Any) -> Any:
        with torch.no_grad():
            self.count.add_(1)
        return super().training_step(*args, **named)


def test_trying_whether_a_window_fits_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "LIMITED", ("cpu",))
    ours = run({**MERGE, "amp": {}}, batches(96, shuffle=True), Counts, max_epochs=1, **ACCUMULATE)
    assert ours.verdict("batch").took is False and "changes parameters" in ours.verdict("batch").why
    assert float(ours.module.count) == 12


class Box:
    """A batch of the user's own class: it moves itself, and nothing can take it apart."""

    def __init__(self, rows: list[Any]) -> None:
        self._rows = rows

    def to(self, *_: Any, **__: Any) -> Box:
        return self


class OfBoxes(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if isinstance(batch, Box):
            batch = torch.utils.data.default_collate(batch._rows)
        self.log("loss", loss := super().training_step(batch, batch_idx))
        return {"loss": loss, "mean": loss.detach()}


def test_windows_of_objects_without_a_size_are_trained_on() -> None:
    """Nothing says how many samples such a batch holds, but the sampler does."""
    made = [
        run(rungs, batches(96, shuffle=True, collate_fn=Box), OfBoxes, max_epochs=2, **ACCUMULATE)
        for rungs in (None, MERGE)
    ]
    plain, ours = made
    assert ours.verdict("batch").took is False and "holds no tensor" in ours.verdict("batch").why
    assert ours.module.samples == plain.module.samples and len(plain.module.samples) == 6
    assert all(map(torch.allclose, plain.weights.values(), ours.weights.values()))


@pytest.mark.parametrize("micro", [16, 32])
def test_later_comparisons_take_two_batches(micro: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """`LateStd` of the gradients' tests is a loss that these find."""
    seen = []
    really = choice.explain_difference

    def watched(strategy: Any, own: Any, merged: Any, *rest: Any) -> str | None:
        seen.append([[piece.samples for piece in pieces] for pieces in (own, merged)])
        return really(strategy, own, merged, *rest)

    monkeypatch.setattr(choice, "explain_difference", watched)
    ours = run({"batch": {"micro_batch": micro}}, batches(160), max_epochs=1, **ACCUMULATE)
    assert seen == [[[8] * 4, [micro] * (32 // micro)], [[8, 8], [16]]]
    assert ours.verdict("batch").took and ours.trainer.global_step == 5

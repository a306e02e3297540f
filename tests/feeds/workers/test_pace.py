"""How many workers keep up, and whether they pay, from the times of batches."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest

from fastloop.feeds.workers.in_worker import TIMED
from fastloop.feeds.workers.pace import LOSES, Left, Pace, WorkerCosts


def pace(workers: int, waited_ms: float, took_ms: float, batches: int | None = None) -> Pace:
    found = Pace(workers)
    for _ in range(workers + 2 * max(4, workers) if batches is None else batches):
        found.note(waited_ms / 1e3, took_ms / 1e3)
    return found


@pytest.mark.parametrize(
    ("seen", "most", "left", "expected"),
    [
        (pace(4, 130, 180), 15, Left(1000, 1000), (15, True)),  # needs 4 * 180 / 50 = 14.4
        (pace(4, 130, 180), 7, Left(1000, 1000), (7, True)),
        (pace(4, 80, 180), 15, Left(1000, 1000), (11, True)),  # 7.2 keep up with steps of 100 ms
        (pace(4, 20, 180), 15, Left(1000, 1000), None),  # waits too little
        (pace(4, 130, 180), 4, Left(1000, 1000), None),  # may not have more
        (pace(4, 130, 180), 15, Left(), (15, True)),  # unknown lengths
        # It saves 130 ms a batch and costs 15 starts of 50 ms; it must pay twice.
        (pace(4, 130, 180), 15, Left(12, 12), (15, True)),
        (pace(4, 130, 180), 15, Left(11, 11), None),
        (pace(4, 130, 180), 15, Left(11, 1000), (15, False)),
        (pace(4, 130, 180), 15, Left(11, None), (15, False)),
        (pace(4, 43, 60, batches=11), 15, Left(1000, 1000), None),  # the first of each worker do not count
        (pace(4, 175, 190, batches=8), 15, Left(1000, 1000), (15, True)),  # unless a round was waited for long
        (pace(4, 124, 140, batches=8), 15, Left(1000, 1000), None),
        (pace(4, 650, 900, batches=4), 15, Left(1000, 1000), None),  # the first worker's second batch tells its time
        (pace(4, 650, 900, batches=5), 15, Left(1000, 1000), (15, True)),
        (pace(4, 124, 300, batches=5), 15, Left(1000, 1000), None),  # if it was waited for long
        (pace(1, 200, 200), 3, Left(1000, 1000), (3, True)),  # steps of no time at all
    ],
)
def test_more_start_where_they_pay(seen: Pace, most: int, left: Left, expected: Any) -> None:
    assert seen.find_more(most, left, loses=False) == expected


@pytest.mark.parametrize(("batches", "counts"), [(8, False), (7, True), (None, False)])
def test_the_start_of_an_epoch_does_not_count_where_there_is_more(batches: int | None, counts: bool) -> None:
    seen = pace(4, 0, 100)
    seen.begin_epoch(batches)
    for took_s in (0.9, 0.9, 0.9, 0.9, *[0.1] * 4):
        seen.note(0.0, took_s)
    assert seen.batch_s == pytest.approx(0.5 if counts else 0.1)


def test_batches_that_are_made_again_have_to_pay_too() -> None:
    """A batch of each of the old workers, 720 ms, besides the starts."""
    assert pace(4, 130, 180).find_more(15, Left(23, 23), loses=True) == (15, True)
    assert pace(4, 130, 180).find_more(15, Left(22, 22), loses=True) is None


def test_what_was_ready_before_it_was_asked_for_does_not_count() -> None:
    seen = Pace(2, ready=6)
    for waited_s in (*[0.0] * 6, *[0.1] * 7):
        seen.note(waited_s, 0.1)
    assert seen.batch_s is None, "seven of eight"
    seen.note(0.1, 0.1)
    assert seen._read() is not None and seen._read().step_s == 0.0


def test_a_pace_forgets_what_is_long_ago() -> None:
    seen = pace(4, 130, 180)
    assert seen._read()[:2] == pytest.approx((0.18 * 8, 0.13 * 8)) and seen.batch_s == pytest.approx(0.18)
    for _ in range(10):
        seen.note(0.0, 0.05)
    assert seen.batch_s == pytest.approx(0.05) and seen.find_more(15, Left(), loses=False) is None


@pytest.mark.parametrize(("batches", "is_known"), [(8, False), (49, False), (50, True), (90, True)])
def test_a_pace_is_that_of_half_a_second(batches: int, is_known: bool) -> None:
    """Eight batches of a fast loader are over in the time of one hiccup."""
    seen = Pace(2)
    for _ in range(2 + batches):
        seen.note(0.004, 0.0101)
    assert (seen.batch_s is not None) is is_known
    assert not is_known or (seen.batch_s, seen._read().step_s) == pytest.approx((0.0101, 0.0061))
    assert len(seen._spans) <= 51


def test_workers_that_stay_start_for_the_next_epoch_too() -> None:
    seen = pace(4, 130, 180)
    assert seen.find_more(15, Left(5, 1000), loses=False) == (15, False)
    assert seen.find_more(15, Left(5, 1000), loses=False, stay=True) == (15, True)
    assert seen.find_more(15, Left(5, None), loses=False, stay=True) == (15, True)
    assert seen.find_more(15, Left(5, 11), loses=False, stay=True) is None


def test_a_limit_below_zero_batches_is_none() -> None:
    assert pace(2, 100, 100).find_more(4, Left(0, 0), loses=False) is None
    assert pace(2, 100, 100).find_more(4, Left(0, math.ceil(1e6)), loses=False) == (4, False)


@dataclass
class Queue:
    """Workers that take their time for each batch and hold two, and a training that takes batches in order."""

    workers: int
    each_s: float
    now: float = 0.0

    def __post_init__(self) -> None:
        self.done = [self.each_s] * self.workers + [2 * self.each_s] * self.workers
        """When each batch is finished; a worker begins another one as soon as one is taken."""
        self.taken = 0

    def take(self, step_s: float) -> tuple[float, float, int]:
        """The wait for the next batch, the time since the last, and how many are ready then; `step_s` for training."""
        asked = self.now + step_s
        came = max(asked, self.done[self.taken])
        self.done.append(max(self.done[-self.workers], came) + self.each_s)
        waited_s, took_s, self.now = came - asked, came - self.now, came
        self.taken += 1
        return waited_s, took_s, sum(done <= came for done in self.done[self.taken :])


@pytest.mark.parametrize(("stalls", "knows"), [(True, True), (True, False), (False, True)])
def test_batches_that_a_pause_of_the_training_left_ready_are_no_sign_of_a_pace(stalls: bool, knows: bool) -> None:
    """Eight workers take 1.2 s for a batch, so one comes every 150 ms. A training that rehearsed for three seconds
    found sixteen ready, took 84 ms for the pace of its workers, and gave up fifteen, who made one every 106 ms."""
    queue, seen = Queue(8, 1.2), Pace(8)
    seen.begin_epoch(None)
    for number in range(24):
        waited_s, took_s, ready = queue.take(3.0 if stalls and number == 0 else 0.03)
        seen.note(waited_s, took_s, ready if knows else None)
    assert seen.batch_s is not None and (seen.batch_s == pytest.approx(0.15, rel=0.2)) is (knows or not stalls)
    assert knows or not stalls or seen.batch_s < 0.1, "the control"


@pytest.mark.parametrize(("first_step_s", "at"), [(0.03, 9), (0.4, 9), (3.0, 24)])
def test_workers_that_are_far_too_few_are_known_after_one_round(first_step_s: float, at: int) -> None:
    """Eight workers that take 1.2 s for a batch: the ninth comes 1.2 s after the first, unless the training took longer
    for its first step, and sixteen were ready. A run of 120 batches knew it after sixteen."""
    queue, seen = Queue(8, 1.2), Pace(8)
    seen.begin_epoch(None)
    known = []
    for number in range(1, 25):
        waited_s, took_s, ready = queue.take(first_step_s if number == 2 else 0.03)
        seen.note(waited_s, took_s, ready)
        known += [number] * (seen.batch_s is not None)
        if known == [number]:
            assert seen.batch_s == pytest.approx(0.15, rel=0.2)
            assert seen.find_more(15, Left(100, 100), loses=False) == (15, True)
    assert known[0] == at


def test_a_round_of_workers_that_began_before_tells_nothing() -> None:
    queue, seen = Queue(8, 1.2), Pace(8, ready=16)
    for number in range(20):
        seen.note(*queue.take(0.03))
        assert seen.batch_s is None, number


def test_a_queue_that_runs_dry_is_no_wait() -> None:
    seen = Pace(2)
    for ready in range(30, 0, -1):
        seen.note(0.0, 0.1, ready)
    assert seen.batch_s is None, "nothing was made"
    seen.note(0.0, 0.1, 3)
    assert seen.find_more(8, Left(), loses=False) is None


# -- what workers cost ------------------------------------------------------------------------------------------------


def costs(made_ms: float, epochs: list[list[float]], start_ms: float = 0.0) -> WorkerCosts:
    """After epochs in which each batch was waited for so long."""
    found = WorkerCosts()
    found.provide(2)
    found.made_ms[0] = made_ms
    for waits_ms in epochs:
        found.begin_epoch(start_ms)
        for wait_ms in waits_ms:
            found.note(wait_ms, was_ready=False)
        found.end_epoch()
    return found


@pytest.mark.parametrize(
    ("made_ms", "waits_ms", "start_ms", "loses"),
    [
        (1.0, [4.0, 0.2], 0.0, True),  # two batches an epoch: 4.2 ms for what takes 2
        (2.0, [4.0, 0.2], 0.0, False),
        (1.0, [4.0, *[0.1] * 9], 0.0, False),  # ten batches: 4.9 ms for what takes 10
        (1.0, [1.0, 0.1], 5.0, True),  # the start counts
        (1.0, [LOSES, LOSES], 0.0, False),
    ],
)
def test_waits_of_whole_epochs_are_weighed_against_making_the_batches(
    made_ms: float, waits_ms: list[float], start_ms: float, loses: bool
) -> None:
    found = costs(made_ms, [waits_ms] * TIMED, start_ms).explain_loss_of_epochs()
    assert (found is not None) is loses


def test_a_loss_is_told_with_its_figures_and_not_too_early() -> None:
    assert costs(1.0, [[4.0, 0.2]] * 4).explain_loss_of_epochs() is None, "eight batches are too few"
    said = costs(1.0, [[4.0, 0.2]] * 5).explain_loss_of_epochs()
    assert said == "a batch takes 1 ms to make, but in epochs this short, waiting for workers takes 2.1 ms a batch"
    assert costs(0.0, [[4.0, 0.2]] * 5).explain_loss_of_epochs() is None, "no worker has told its time"


def test_ready_batches_alone_are_compared_with_making_them() -> None:
    found = costs(1.0, [])
    for _ in range(TIMED):
        assert found.compare_ready() is None
        found.note(50.0, was_ready=False)
        found.note(2.0, was_ready=True)
    assert found.compare_ready() == (2.0, 1.0)


def test_more_workers_find_room_and_persistent_ones_keep_theirs() -> None:
    found = costs(1.0, [])
    kept = found.made_ms
    found.provide(1)
    assert found.made_ms is kept
    found.provide(3)
    assert len(found.made_ms) == 3 and list(kept) == [1.0, 0.0]

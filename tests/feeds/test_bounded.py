"""An epoch's batches without the question after the last: the generator then shuffles the next epoch as it would."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from fastloop.feeds.lazy_loader import Bounded, bound_batches


def unbounded() -> None:
    """As many batches as there are."""


def sampler(drop_last: bool = False, samples: int = 32) -> BatchSampler:
    order = RandomSampler(range(samples), generator=torch.Generator().manual_seed(0))
    return BatchSampler(order, 8, drop_last)


def epochs(batches: object, count: int, asks: int) -> list[list[list[int]]]:
    """As many batches an epoch as a loop asks for."""
    found = []
    for _ in range(count):
        iterator = iter(batches)  # type: ignore[call-overload]
        found.append([batch for batch in (next(iterator, None) for _ in range(asks)) if batch is not None])
    return found


@pytest.mark.parametrize(("drop_last", "samples"), [(False, 32), (True, 32), (True, 35)])
def test_reading_on_changes_the_next_epoch_and_a_bound_keeps_it(drop_last: bool, samples: int) -> None:
    loops = epochs(sampler(drop_last, samples), 3, 4)
    assert epochs(Bounded(sampler(drop_last, samples), lambda: 4), 3, 9) == loops
    assert epochs(sampler(drop_last, samples), 3, 9) != loops, "without it, reading on is seen"


def test_a_short_last_batch_is_still_there() -> None:
    assert epochs(Bounded(sampler(samples=35), lambda: 5), 3, 9) == epochs(sampler(samples=35), 3, 5)


def test_not_where_the_user_has_workers_or_the_loader_a_state() -> None:
    generator = torch.Generator().manual_seed(0)
    found = bound_batches(DataLoader(range(32), batch_size=8, shuffle=True, generator=generator), unbounded)  # type: ignore[arg-type]
    assert isinstance(found, Bounded) and found.sampler.num_samples == 32, "Lightning looks at the sampler behind it"
    stateful = StatefulDataLoader(range(32), batch_size=8, shuffle=True, generator=generator)  # type: ignore[arg-type]
    theirs = DataLoader(range(32), shuffle=True, generator=generator, num_workers=2)  # type: ignore[arg-type]
    assert bound_batches(theirs, unbounded) is None, "the user's own workers ask beyond the end"
    assert bound_batches(stateful, unbounded) is None and bound_batches([1, 2], unbounded) is None
    one_by_one = bound_batches(DataLoader(range(4), batch_size=None), lambda: 3)  # type: ignore[arg-type]
    assert one_by_one is not None and list(one_by_one) == [0, 1, 2]

"""Short batches: which are told from the others, and who runs them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fastloop.feeds.short_batches import EagerWhenShort, Ragged


def rare(sizes: list[int]) -> list[int]:
    """The places of the calls that are taken for exceptions."""
    ragged = Ragged()
    return [place for place, size in enumerate(sizes) if ragged((torch.zeros(size, 3),))]


def test_the_last_batch_of_an_epoch_is_an_exception() -> None:
    epoch = [64] * 17 + [8]
    assert rare(epoch * 3) == [17, 35, 53]


@pytest.mark.parametrize(
    "sizes",
    [[96, 96, 64] * 20, [8, *[64] * 20], [64] * 20, [64, 8], [8, 16, 32, 64]],
    ids=["pieces of a batch", "a short first one", "all alike", "too early to tell", "growing"],
)
def test_what_is_no_exception(sizes: list[int]) -> None:
    assert rare(sizes) == []


def test_other_dimensions_and_other_arguments_are_no_exception() -> None:
    ragged = Ragged()
    lengths = [ragged((torch.zeros(64, length),)) for length in [9] * 20 + [7, 5]]
    assert not any(lengths) and not ragged((None, "text", torch.tensor(1.0))) and not ragged(())


class Doubles(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


def test_short_batches_run_eager_and_are_counted_apart_in_evaluation() -> None:
    sizes: list[int] = []

    def compiled(x: Any) -> Any:
        sizes.append(len(x))
        return 2 * x

    module = Doubles()
    call = EagerWhenShort(module, compiled)
    for size in [*[8] * 12, 3]:
        assert call(torch.ones(size)).tolist() == [2.0] * size
    assert sizes == [8] * 12 and call.eager == 1
    module.eval()
    call(x=torch.ones(3))  # evaluation has batches of its own size
    assert sizes[-1] == 3 and call.eager == 1

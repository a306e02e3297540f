"""What tells a loss that is no mean from rounding."""

from __future__ import annotations

import math

import pytest
import torch

from fastloop.evidence.model import merged_gradient
from fastloop.evidence.model.merged_gradient import MOST_ALONG, MOST_APART, measure_difference, sample_gradient

GENERATOR = torch.Generator().manual_seed(0)
OWN = [torch.randn(20_000, generator=GENERATOR, dtype=torch.float64) + 1 for _ in range(4)]
EQUAL = [0.25] * 4


def add_up(weights: list[float]) -> torch.Tensor:
    return torch.stack([weight * own for weight, own in zip(weights, OWN, strict=True)]).sum(0)


def scatter(size: float) -> torch.Tensor:
    target = add_up(EQUAL)
    noise = torch.randn(len(target), generator=GENERATOR, dtype=torch.float64)
    return noise * (size * target.norm() / noise.norm())


@pytest.mark.parametrize("size", [0.0, 1e-6, 1e-3, 0.05])
def test_rounding_is_apart_and_hardly_along(size: float) -> None:
    found = measure_difference(OWN, EQUAL, add_up(EQUAL) + scatter(size))
    assert found is not None and found.apart == pytest.approx(size, abs=1e-9)
    assert found.along <= MOST_ALONG / 5


@pytest.mark.parametrize("size", [0.0, 0.05])
def test_other_weights_show_through_rounding(size: float) -> None:
    found = measure_difference(OWN, EQUAL, add_up([0.26, 0.24, 0.255, 0.245]) + scatter(size))
    assert found is not None and found.along > MOST_ALONG
    whole = measure_difference(OWN, EQUAL, add_up(EQUAL) * 1.01)
    assert whole == pytest.approx((0.01, 0.01))


def test_batches_that_are_alike() -> None:
    alike = [OWN[0]] * 4
    found = measure_difference(alike, EQUAL, OWN[0] + scatter(1e-4))
    assert found is not None and found.along < 1e-5 and MOST_APART["fp32"] > found.apart > 5e-5


def test_no_numbers_and_no_gradient() -> None:
    bad = OWN[0].clone()
    bad[3] = math.nan
    assert measure_difference(OWN, EQUAL, bad) is None and measure_difference([bad, *OWN[1:]], EQUAL, OWN[0]) is None
    nothing = [torch.zeros(5, dtype=torch.float64)] * 2
    assert measure_difference(nothing, [0.5, 0.5], nothing[0]) == (0.0, 0.0)
    assert measure_difference(nothing, [0.5, 0.5], torch.ones(5, dtype=torch.float64)) == (math.inf, math.inf)


def test_a_sample_of_a_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merged_gradient, "SAMPLED", 20)
    used, unused = torch.nn.Linear(10, 10), torch.nn.Parameter(torch.ones(3))
    table = torch.nn.Embedding(5, 2, sparse=True)
    parameters = [*used.parameters(), unused, table.weight]
    loss = (used(torch.ones(2, 10)).sum(0) * torch.arange(10.0)).sum() + table(torch.tensor([1])).sum()
    sampled = sample_gradient(loss, parameters)
    stride = -(-(110 + 3 + 10) // 20)
    weight = (2 * torch.arange(10.0)[:, None].expand(10, 10)).reshape(-1)[::stride]
    rest = [(2 * torch.arange(10.0))[::stride], torch.zeros(3)[::stride]]
    assert torch.equal(sampled[:-2], torch.cat([weight, *rest]).double()) and sampled.dtype == torch.float64
    assert all(parameter.grad is None for parameter in parameters)


@pytest.mark.filterwarnings("error")
def test_both_halves_of_a_complex_gradient_are_sampled() -> None:
    parameter = torch.nn.Parameter(torch.tensor([1.0 + 2.0j, 3.0 - 1.0j]))
    sampled = sample_gradient((parameter * parameter.conj()).real.sum(), [parameter])
    assert sampled.tolist() == [2.0, 4.0, 6.0, -2.0]

"""How far two gradients are apart."""

from __future__ import annotations

import math

import pytest
import torch

from fastloop.evidence.model.gradient_distance import is_finite, measure_gradient_distance

BASE = {"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([[4.0]])}


def test_the_norm_of_the_whole_and_the_worst_tensor() -> None:
    found = measure_gradient_distance(BASE, {"a": torch.tensor([3.0, 0.5]), "b": torch.tensor([[4.0]])})
    assert found["deviation"] == pytest.approx(0.1) and found["kept"] == pytest.approx(1)
    (worst,) = found["worst"]
    assert worst["name"] == "a" and worst["deviation"] == pytest.approx(0.5 / 3) and worst["share"] == 0.6
    assert found["lost"] == found["astray"] == [] and found["finite"]


def test_layers_count_alike_however_small() -> None:
    base = {"head": torch.full((10, 10), 1e3), "conv": torch.full((4, 1, 3, 3), 1.0), "bias": torch.ones(4)}
    found = measure_gradient_distance(base, {**base, "conv": base["conv"] * 1.36, "bias": torch.zeros(4)})
    assert found["deviation"] < 1e-3 and found["layers"] == pytest.approx(0.36 / math.sqrt(2))
    assert measure_gradient_distance({"bias": base["bias"]}, {"bias": base["bias"]})["layers"] is None


def test_the_same_is_zero() -> None:
    found = measure_gradient_distance(BASE, {name: tensor.clone() for name, tensor in BASE.items()})
    assert found["deviation"] == 0 and found["worst"] == []


def test_small_numbers_do_not_vanish_beside_large_ones() -> None:
    base = {"a": torch.full((10**6,), 1e-3), "b": torch.tensor([1e3])}
    assert measure_gradient_distance(base, {"a": base["a"] * 2, "b": base["b"]})["deviation"] == pytest.approx(
        1e-3, rel=1e-4
    )


def test_a_factor_shows_in_what_is_kept_and_noise_does_not() -> None:
    torch.manual_seed(0)
    base = {"a": torch.randn(10_000)}
    assert measure_gradient_distance(base, {"a": base["a"] / 4})["kept"] == pytest.approx(0.25)
    noisy = measure_gradient_distance(base, {"a": base["a"] + 0.3 * torch.randn(10_000)})
    assert noisy["deviation"] == pytest.approx(0.3, rel=0.05) and noisy["kept"] == pytest.approx(1, abs=0.02)
    assert noisy["astray"] == []
    assert measure_gradient_distance(base, {"a": -base["a"]})["astray"] == ["a"]


def test_a_tensor_without_gradient_counts_as_zeros_and_is_named() -> None:
    found = measure_gradient_distance(BASE, {"a": BASE["a"]})
    assert found["deviation"] == pytest.approx(0.8) and found["lost"] == found["astray"] == ["b"]
    zeros = measure_gradient_distance(BASE, {**BASE, "b": torch.zeros(1, 1)})
    assert zeros["lost"] == ["b"]
    more = measure_gradient_distance(BASE, {**BASE, "c": torch.tensor([5.0])})
    assert more["deviation"] == pytest.approx(1) and more["lost"] == []


def test_a_gradient_that_is_zero_but_for_rounding_may_be_zero() -> None:
    base = {"a": torch.ones(100), "bias": torch.full((10,), 1e-7)}
    assert measure_gradient_distance(base, {"a": torch.ones(100), "bias": torch.zeros(10)})["lost"] == []
    assert measure_gradient_distance({**base, "bias": torch.full((10,), 1e-2)}, {"a": torch.ones(100)})["lost"] == [
        "bias"
    ]


def test_another_shape_has_nothing_in_common() -> None:
    found = measure_gradient_distance(BASE, {**BASE, "b": torch.tensor([4.0])})
    assert found["deviation"] == pytest.approx(math.sqrt(32) / 5) and found["astray"] == ["b"]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_numbers_that_are_none(bad: float) -> None:
    arm = {**BASE, "b": torch.tensor([[bad]])}
    found = measure_gradient_distance(BASE, arm)
    assert not found["finite"] and not math.isfinite(found["deviation"]) and not is_finite(arm) and is_finite(BASE)


def test_nothing_against_nothing_and_half_precision() -> None:
    assert (
        measure_gradient_distance({}, {})["deviation"] == 0
        and measure_gradient_distance({}, BASE)["deviation"] == math.inf
    )
    half = {name: tensor.bfloat16() for name, tensor in BASE.items()}
    assert measure_gradient_distance(half, half)["deviation"] == 0


@pytest.mark.filterwarnings("error")
def test_both_halves_of_complex_numbers_are_compared() -> None:
    base, arm = {"w": torch.tensor([3.0 + 4.0j])}, {"w": torch.tensor([3.0 + 5.0j]).conj().conj()}
    assert measure_gradient_distance(base, arm)["deviation"] == pytest.approx(0.2)
    assert measure_gradient_distance(base, {"w": torch.tensor([3.0 - 4.0j]).conj()})["deviation"] == 0.0


def test_sparse_gradients_are_measured_as_their_dense_ones() -> None:
    rows = torch.nn.Embedding(9, 3, sparse=True)
    rows(torch.tensor([1, 1, 2])).sum().backward()  # type: ignore[no-untyped-call]
    sparse = {"rows": rows.weight.grad}
    twice = {"rows": 2 * rows.weight.grad}
    assert rows.weight.grad.is_sparse and not rows.weight.grad.is_coalesced()
    dense, dense_twice = ({name: each.to_dense() for name, each in pair.items()} for pair in (sparse, twice))
    assert measure_gradient_distance(sparse, twice) == measure_gradient_distance(dense, dense_twice)
    assert measure_gradient_distance(sparse, sparse)["deviation"] == 0 and is_finite(sparse)
    assert not is_finite({"rows": rows.weight.grad * math.nan})

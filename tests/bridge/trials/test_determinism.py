"""A step that comes out the same twice."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy
import pytest
import torch
from torch.nn import functional

from fastloop.bridge.trials import determinism

X = torch.arange(1.0, 65.0).reshape(2, 4, 8)
CALLS: dict[str, Callable[[], torch.Tensor]] = {
    "function": lambda: functional.dropout(X, 0.5, training=True),
    "default": lambda: functional.dropout(X),
    "alpha": lambda: functional.alpha_dropout(X, 0.5, True),
    "2d": lambda: functional.dropout2d(X[None], 0.5, True),
    "feature": lambda: functional.feature_alpha_dropout(X, 0.5, training=True),
    "layer": lambda: torch.nn.Dropout(0.5)(X),
    "attention": lambda: functional.scaled_dot_product_attention(X, X, X, None, 0.5),
    "named": lambda: functional.scaled_dot_product_attention(X, X, X, dropout_p=0.5, is_causal=True),
}


@pytest.mark.parametrize("name", list(CALLS))
def test_nothing_is_dropped_inside_and_everything_after(name: str) -> None:
    call = CALLS[name]
    torch.manual_seed(0)
    assert not torch.equal(call(), call()), "as it is, it draws"
    with determinism.make_repeatable():
        before = torch.get_rng_state()
        assert torch.equal(call(), call()) and torch.equal(torch.get_rng_state(), before)
        if "attention" not in name and name != "named":
            assert torch.equal(call().reshape(X.shape), X)
    assert not torch.equal(call(), call())


def test_modes_are_on_inside_and_back_after_an_error() -> None:
    torch.backends.cudnn.benchmark = True
    try:
        with pytest.raises(ValueError), determinism.make_repeatable():
            assert torch.are_deterministic_algorithms_enabled() and torch.backends.cudnn.deterministic
            assert torch.is_deterministic_algorithms_warn_only_enabled() and not torch.backends.cudnn.benchmark
            torch.use_deterministic_algorithms(False)  # as a Trainer does that is told so
            determinism.make_deterministic()
            assert torch.are_deterministic_algorithms_enabled()
            raise ValueError
        assert not torch.are_deterministic_algorithms_enabled() and torch.backends.cudnn.benchmark
    finally:
        torch.backends.cudnn.benchmark = False


def test_all_streams_begin_at_a_number() -> None:
    def drawn(number: int) -> tuple[float, float, float]:
        determinism.seed_everything(number)
        return float(torch.rand(())), random.random(), float(numpy.random.rand())

    assert drawn(3) == drawn(3) and len({*drawn(3), *drawn(4)}) == 6


@pytest.mark.parametrize("seed", [7, -1])
def test_shifted_streams_follow_from_what_was_seeded(seed: int) -> None:
    def draw(offset: int) -> tuple[float, ...]:
        determinism.seed_everything(7)
        torch.manual_seed(seed)
        determinism.shift_seeds(offset)
        return random.random(), float(numpy.random.random()), float(torch.rand(()))

    assert draw(1) == draw(1)
    assert all(one != other for one, other in zip(draw(1), draw(2), strict=True))


def test_the_environment_is_the_users_where_it_is_set() -> None:
    environ = {"CUBLAS_WORKSPACE_CONFIG": ":16:8"}
    determinism.prepare(environ)
    assert environ == {"CUBLAS_WORKSPACE_CONFIG": ":16:8"}
    fresh: dict[str, str] = {}
    determinism.prepare(fresh)
    assert fresh == determinism.ENVIRONMENT

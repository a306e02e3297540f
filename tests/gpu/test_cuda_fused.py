"""Fused kernels on a real device: torch's usual update whatever the memory layouts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fastloop.feeds.fused_layouts import GAPS, SPARSE
from tests.feeds.test_fused_layouts import KINDS, column_major, compare, load, move

pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"), pytest.mark.timeout(60)]
ON_CUDA = [each for each in KINDS if each[0] is not torch.optim.Adagrad]  # its fused kernel is the CPU's


@pytest.fixture(autouse=True)
def on_device() -> Any:
    with torch.device("cuda"):
        yield


@pytest.mark.parametrize(("kind", "settings"), ON_CUDA)
@pytest.mark.parametrize(
    "how",
    [{"give": lambda _parameter, gradient: column_major(gradient)}, {"between": move}, {"between": load}],
    ids=["gradient", "parameter", "state"],
)
def test_other_layouts_change_nothing(kind: Any, settings: dict[str, Any], how: dict[str, Any]) -> None:
    start = torch.ones(4, 6)
    assert start.is_cuda
    assert compare(kind, start, settings, **how) == []


@pytest.mark.parametrize(("kind", "settings"), ON_CUDA)
def test_a_parameter_with_gaps_is_left_to_torch(kind: Any, settings: dict[str, Any]) -> None:
    assert compare(kind, torch.ones(4, 12)[:, ::2], settings) == [GAPS]


def test_sparse_gradients_are_left_to_torch() -> None:
    def give(_parameter: torch.nn.Parameter, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.to_sparse(1) if gradient[0, 0] > 0 else gradient

    assert compare(torch.optim.SGD, torch.ones(4, 6), {}, give=give) == [SPARSE]

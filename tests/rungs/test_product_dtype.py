"""The dtype of arithmetic, as autocast makes it."""

from __future__ import annotations

import pytest
import torch

from fastloop.rungs.amp import product_dtype

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_inside_and_outside_autocast(dtype: torch.dtype) -> None:
    assert product_dtype(CPU) == "torch.float32"
    with torch.autocast("cpu", dtype=dtype):
        assert product_dtype(CPU) == str(dtype)
        with torch.autocast("cpu", enabled=False):
            assert product_dtype(CPU) == "torch.float32"
    assert product_dtype(CPU) == "torch.float32"


def test_it_draws_no_random_numbers() -> None:
    before = torch.get_rng_state()
    product_dtype(CPU)
    assert torch.equal(before, torch.get_rng_state())

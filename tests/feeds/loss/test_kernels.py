"""The Triton kernels' losses and gradients are PyTorch's: run by Triton's interpreter, without a GPU.

The interpreter is in a process of its own, since Triton's own reductions are interpreted only if it is on from the
import on.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch.nn import functional as F

NONE = float("-inf")
ROWS, CLASSES = 12, 5000
CLOSE = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 1e-3}
TARGET = torch.tensor([0, 17, -100, 4999, 4999, 2048, -100, 1, 2, 3, 4, 5])


def compare(dtype: torch.dtype) -> dict[str, float]:
    """Deviations from PyTorch, with logits [12, 5000] in rows of 5,056; one row begins with a block of -inf, one has a
    single finite logit."""
    from fastloop.feeds.loss import kernels

    torch.manual_seed(0)
    logits = 3 * torch.randn(ROWS, CLASSES + 56)[:, :CLASSES]
    logits[3, :2500], logits[4, :4999] = NONE, NONE
    logits = logits.to(dtype).requires_grad_()
    scale = torch.linspace(0.5, 2.0, ROWS)
    expected = F.cross_entropy(logits.float(), TARGET, reduction="none")
    (gradient,) = torch.autograd.grad((expected * scale).sum(), [logits])
    given, ours = logits.detach(), torch.full((ROWS, CLASSES + 56), 7.0, dtype=dtype)
    losses, sums = kernels.reduce_rows(given, TARGET, -100)

    def measure(scale: torch.Tensor) -> float:
        kernels.write_gradient(given, TARGET, sums, scale, ours[:, :CLASSES], -100)
        return float((ours[:, :CLASSES] - gradient).float().norm() / gradient.float().norm())

    return {
        "losses": float((losses - expected).abs().max()),
        "sums": float((sums - given.float().logsumexp(1)).abs().max()),
        "gradient": measure(scale),
        "control": measure(1.1 * scale),
        "between": float((ours[:, CLASSES:] - 7.0).abs().max()),
    }


def ask_for(target: int) -> str:
    """The error with a target that is no class."""
    from fastloop.feeds.loss import kernels

    try:
        kernels.reduce_rows(torch.zeros(ROWS, CLASSES), torch.full((ROWS,), target), -100)
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.fixture(scope="module")
def found() -> Any:
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-m", __name__],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("dtype", CLOSE)
def test_losses_and_gradients_are_pytorchs(found: Any, dtype: torch.dtype) -> None:
    apart, close = found[str(dtype)], CLOSE[dtype]
    assert apart["losses"] < 1e-5 and apart["sums"] < 1e-5
    assert apart["gradient"] < close < apart["control"]
    assert apart["between"] == 0.0, "what lies between rows was written"


@pytest.mark.parametrize("target", [CLASSES, -1])
def test_a_target_that_is_no_class_is_an_error(found: Any, target: int) -> None:
    assert "a target is not below the number of classes, 5000" in found[str(target)]


if __name__ == "__main__":
    made: dict[str, Any] = {str(dtype): compare(dtype) for dtype in CLOSE}
    print(json.dumps(made | {str(target): ask_for(target) for target in (CLASSES, -1)}))

"""Triton's kernels without a GPU: run by Triton's interpreter."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

import pytest

NAME = "fastloop.feeds.device_store.kernels"


@pytest.fixture(scope="session")
def kernels() -> Any:
    """The module as it is where Triton interprets, whatever Triton is for other tests of this process."""
    spec = importlib.util.find_spec("triton") and importlib.util.find_spec(NAME)
    if spec is None or spec.loader is None:
        pytest.skip("needs triton")
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")  # is read where a kernel is declared
        spec.loader.exec_module(module)
    return module


@pytest.fixture
def kernels_in_use(kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stores resize pictures by them."""
    monkeypatch.setitem(sys.modules, NAME, kernels)
    monkeypatch.setattr(sys.modules[NAME.rpartition(".")[0]], "kernels", kernels, raising=False)

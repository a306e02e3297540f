"""A process in which nothing has been compiled."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.bridge.watch.made_up import forget_compiles


@pytest.fixture
def nothing_is_compiled() -> Iterator[None]:
    forget_compiles()
    torch.manual_seed(0)
    yield
    forget_compiles()

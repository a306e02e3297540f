"""The version of torch that tests run with: some of what fastloop works around, later versions mend themselves."""

from __future__ import annotations

import torch

TORCH = tuple(map(int, torch.__version__.split(".")[:2]))

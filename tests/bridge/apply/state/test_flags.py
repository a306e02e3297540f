"""torch's settings are put back, also where one of them cannot be read."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fastloop.bridge.apply.state import flags


def test_what_changed_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> Any:
        raise RuntimeError("you have used a mix of the legacy and new APIs")

    monkeypatch.setattr(flags, "_FLAGS", [(refuse, print), *flags._FLAGS])
    before = torch.backends.cudnn.benchmark, torch.get_default_dtype()
    restore = flags.keep_flags()
    torch.backends.cudnn.benchmark = not before[0]
    torch.set_default_dtype(torch.float64)
    restore()
    assert (torch.backends.cudnn.benchmark, torch.get_default_dtype()) == before

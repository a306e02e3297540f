"""Exceptions whose text leaves the user guessing, explained in one line."""

from __future__ import annotations

import re
from typing import Any


def hint(exception: BaseException, module: Any) -> str | None:
    """One line that adds what the exception does not say; None where we know nothing better."""
    text = str(exception)
    if "did not receive grad for rank" in text:
        return _unused_parameters(text, module)
    if "Can't detach views in-place" in text:
        return "a gradient was detached in place, which rungs.overlap.gradient_as_bucket_view forbids: write false"
    return None


def _unused_parameters(text: str, module: Any) -> str | None:
    """DDP counts the parameters that got no gradient; people know them by name."""
    match = re.search(r"did not receive grad for rank \d+: ([\d ]+)", text)
    if match is None or module is None:
        return None
    ignored = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
    names = [name for name, parameter in module.named_parameters() if parameter.requires_grad and name not in ignored]
    unused = [names[int(index)] for index in match[1].split() if int(index) < len(names)]
    return f"parameters without a gradient: {', '.join(unused)}" if unused else None

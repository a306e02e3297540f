"""What Dynamo captured since a given moment: graphs, recompiles and graph breaks."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Count:
    """Dynamo's counters at one moment."""

    graphs: int
    breaks: Mapping[str, int]
    latest: Any
    """The last entry of Dynamo's list of compilations, which keeps only the latest; None if it is empty."""


def count_captured() -> int:
    """Graphs captured in this process so far. Does not import Dynamo."""
    utils = sys.modules.get("torch._dynamo.utils")
    return 0 if utils is None else int(utils.counters["stats"]["unique_graphs"])


def count() -> Count:
    """Dynamo's counters now."""
    from torch._dynamo.utils import counters

    return Count(graphs=count_captured(), breaks=dict(counters["graph_break"]), latest=(read_records() or [None])[-1])


def count_since(before: Count) -> dict[str, Any]:
    """What happened since `before`: graphs (int), recompiles and breaks (causes), limit_hit (bool)."""
    now, new = count(), list_new(read_records() or [], before.latest)
    breaks = [cause.splitlines()[0] for cause, times in now.breaks.items() if times > before.breaks.get(cause, 0)]
    recompiles = [
        shorten_reason(metric.recompile_reason) for metric in new if getattr(metric, "recompile_reason", None)
    ]
    limit_hit = any(_is_limit(str(getattr(metric, "fail_reason", ""))) for metric in new)
    return {
        "graphs": now.graphs - before.graphs,
        "recompiles": list(dict.fromkeys(recompiles)),
        "breaks": breaks,
        "limit_hit": limit_hit,
    }


def read_records() -> list[Any] | None:
    """Dynamo's records of its latest 64 compilations; None if this torch has none. Does not import Dynamo."""
    utils = sys.modules.get("torch._dynamo.utils")
    if utils is None:
        return []
    read = getattr(utils, "get_compilation_metrics", None)  # private, and not in every torch
    return None if read is None else list(read())


def list_new(records: Sequence[Any], latest: Any) -> list[Any]:
    """The records after `latest`; all of them if it is no longer in the list."""
    return list(takewhile(lambda record: record is not latest, reversed(records)))[::-1]


def _is_limit(fail_reason: str) -> bool:
    return re.search(r"(recompile|cache[ _]size)[ _]limit", fail_reason, re.IGNORECASE) is not None


def shorten_reason(reason: str) -> str:
    """The guard that failed, without Dynamo's frame and compilation numbers."""
    lines = [line.strip(" -") for line in reason.strip().splitlines() if line.strip(" -")]
    return re.sub(r"^\d+/\d+: ", "", lines[-1] if lines else reason)[:160]

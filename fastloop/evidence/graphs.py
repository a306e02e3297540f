"""What Dynamo captured: graphs, recompiles and breaks since a given moment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Count:
    """Dynamo's counters at one moment."""

    graphs: int
    breaks: Mapping[str, int]
    compilations: int
    """Entries in Dynamo's list of compilations, which keeps the latest ones only."""


def count() -> Count:
    """Dynamo's counters now."""
    from torch._dynamo.utils import counters

    return Count(graphs=counters["stats"]["unique_graphs"], breaks=dict(counters["graph_break"]),
                 compilations=len(_compilations()))  # fmt: skip


def since(before: Count) -> dict[str, Any]:
    """What happened since `before`: graphs (int), recompiles and breaks (causes), limit_hit (bool)."""
    now = count()
    new = _compilations()[before.compilations:]
    breaks = [cause.splitlines()[0] for cause, times in now.breaks.items() if times > before.breaks.get(cause, 0)]
    recompiles = [_one_line(metric.recompile_reason) for metric in new if getattr(metric, "recompile_reason", None)]
    limits = [metric for metric in new if "recompile limit" in str(getattr(metric, "fail_reason", "")).lower()]
    return {"graphs": now.graphs - before.graphs, "recompiles": list(dict.fromkeys(recompiles)), "breaks": breaks,
            "limit_hit": bool(limits)}  # fmt: skip


def _compilations() -> list[Any]:
    try:
        from torch._dynamo.utils import get_compilation_metrics
    except ImportError:  # not in every torch; causes are then missing, counts stay
        return []
    return list(get_compilation_metrics())


def _one_line(reason: str) -> str:
    lines = [line.strip(" -") for line in reason.strip().splitlines() if line.strip(" -")]
    return (lines[-1] if lines else reason)[:160]

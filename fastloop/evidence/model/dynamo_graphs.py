"""What Dynamo captured since a given moment: graphs, recompiles and graph breaks."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from traceback import FrameSummary
from typing import Any

_PLAIN = {"generic_jump": "Data-dependent branching", "step_unsupported": "Unsupported operation"}
"""Dynamo's own names for causes of graph breaks that a user would not understand."""
_KERNELS = os.path.join(Path(__file__).parents[2], "feeds", "")  # noqa: PTH118 (it ends with a separator)
"""The folder of fastloop's functions that are compiled for a rung."""


@dataclass(frozen=True, kw_only=True)
class Count:
    """Dynamo's counters at one moment."""

    graphs: int
    latest: Any
    """The last entry of Dynamo's list of compilations, which keeps only the latest; None if it is empty."""
    latest_break: Any
    """The last entry of Dynamo's list of graph breaks; None if it is empty."""


def count_captured() -> int:
    """Graphs captured in this process so far. Does not import Dynamo."""
    utils = sys.modules.get("torch._dynamo.utils")
    return 0 if utils is None else int(utils.counters["stats"]["unique_graphs"])


def is_forced_eager() -> bool:
    """Whether compiled code runs eagerly at present: ``torch.compiler.set_stance("force_eager")``. Does not import
    Dynamo."""
    frames = sys.modules.get("torch._dynamo.eval_frame")
    return getattr(getattr(frames, "_stance", None), "stance", None) == "force_eager"


def follow_users_graphs() -> Callable[[], int]:
    """Return a function that counts the graphs captured since then, except those of fastloop's own kernels. Does not
    import Dynamo."""
    before, latest = count_captured(), (read_records() or [None])[-1]

    def count_users() -> int:
        new = list_new(read_records() or [], latest)
        ours = sum(str(each.co_filename).startswith(_KERNELS) and bool(each.graph_op_count) for each in new)
        return max(0, count_captured() - before - ours)

    return count_users


def count() -> Count:
    """Dynamo's counters now."""
    from torch._dynamo.utils import graph_break_reasons

    latest_break = graph_break_reasons[-1] if graph_break_reasons else None
    return Count(graphs=count_captured(), latest=(read_records() or [None])[-1], latest_break=latest_break)


def count_since(before: Count, name_line: Callable[[Sequence[FrameSummary]], str]) -> dict[str, Any]:
    """What happened since `before`: graphs (int), recompiles (causes), breaks (causes with their line), limit_hit
    (bool). `name_line` names the line to blame in a stack of the user's code, outermost frame first."""
    from torch._dynamo.utils import graph_break_reasons

    now, new = count(), list_new(read_records() or [], before.latest)
    broken = list_new(graph_break_reasons, before.latest_break)
    own = [each for each in broken if not each.reason.startswith("DDPOptimizer")]  # cuts between buckets, on purpose
    breaks = [
        _shorten_break(each.reason) + (f" at {name_line(each.user_stack)}" if each.user_stack else "") for each in own
    ]
    recompiles = [
        shorten_reason(metric.recompile_reason) for metric in new if getattr(metric, "recompile_reason", None)
    ]
    limit_hit = any(_is_limit(str(getattr(metric, "fail_reason", ""))) for metric in new)
    return {
        "graphs": now.graphs - before.graphs,
        "recompiles": list(dict.fromkeys(recompiles)),
        "breaks": list(dict.fromkeys(breaks)),
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


def _shorten_break(reason: str) -> str:
    """The cause of a graph break, without Dynamo's explanations and hints."""
    first = reason.splitlines()[0]
    return _PLAIN.get(first.split()[0], first)[:160]


def shorten_reason(reason: str) -> str:
    """The guard that failed, without Dynamo's frame and compilation numbers and without its hints."""
    lines = [line.strip(" -") for line in reason.strip().splitlines() if line.strip(" -")]
    failed = re.sub(r"^\d+/\d+: ", "", lines[-1] if lines else reason)
    return failed.partition(". Guard failed on ")[0][:160]

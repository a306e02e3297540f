"""The parts of a step as a trace has them: what the clock's events are held against."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from fastloop.evidence.trace.chrome import Source, load
from fastloop.evidence.trace.kernel_account import list_marks
from fastloop.evidence.trace.phases import Reached, list_phases


def read_parts(source: Source, steps: int | None = None) -> dict[str, Any]:
    """Time per phase on the device's time line, as a chain of events recorded at the phases' ends would read it.

    Returns:
        ``parts_ms`` {phase: ms per step}, ``between_ms`` (outside all phases), ``step_ms`` (their sum) and ``steps``.

    Raises:
        FastLoopError: the trace cannot be read or marks no steps.
    """
    trace = load(source)
    marks = list_marks(trace, steps)
    phases, reached = list_phases(trace, trace.steps[0].thread), Reached(trace)
    spent, per_step = defaultdict[str, float](float), 1e3 * (len(marks) - 1)
    for begin, end, name in phases.between(marks[0], marks[-1]):
        spent[name] += reached(end) - reached(begin)
    whole = reached(marks[-1]) - reached(marks[0])
    return {
        "steps": len(marks) - 1,
        "step_ms": whole / per_step,
        "parts_ms": {name: us / per_step for name, us in spent.items()},
        "between_ms": (whole - sum(spent.values())) / per_step,
    }

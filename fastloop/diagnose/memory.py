"""The finding about memory that grows with every step and so ends a long training."""

from __future__ import annotations

from fastloop.records.measurement import MEMORY, Measurement
from fastloop.records.plan import Finding
from fastloop.records.readings import to_number

HORIZON_STEPS = 1_000_000
"""If memory lasts longer than this, growth without kept graphs is not reported."""


def find_memory_creep(seen: Measurement) -> Finding | None:
    """Find kept tensors of past steps: graphs always, others only if memory runs out within a million steps."""
    found = seen.evidence.get(MEMORY) or {}
    pace, left = to_number(found.get("mib_per_1000_steps")), to_number(found.get("steps_left"))
    if not found or (not found.get("holds_graphs") and left is not None and left > HORIZON_STEPS):
        return None
    name, at = found.get("name"), f" ({found['where']})" if found.get("where") else ""
    if name is None:
        cause = "no list in the module, a callback or a logger explains it; torch.cuda.memory._snapshot() shows more"
    elif found.get("holds_graphs"):
        cause = f"{name} keeps the graphs of {found['tensors']} steps{at}: add .detach(), or use .item() occasionally"
    else:
        cause = f"{name} keeps {found['tensors']} tensors{at}: keep numbers instead, or clear it"
    lasts = "" if left is None else f" and will run out in about {float(f'{left:.2g}'):,.0f} more steps"
    memory = "GPU memory" if found.get("of") == "GPU" else "host memory"
    grew = "" if pace is None else f"{memory} grew by {pace:,.0f} MiB per 1,000 steps{lasts}; "
    return Finding(bottleneck="memory_creep", share_pct=None, why=f"{grew}{cause}", title="MEMORY GROWS EVERY STEP")

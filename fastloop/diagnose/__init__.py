"""From a measurement to findings: what slows the loop down, by how much, and the YAML that addresses it. Pure rules."""

from fastloop.diagnose.remedies import list_next_steps
from fastloop.diagnose.rules import list_findings

__all__ = ["list_findings", "list_next_steps"]

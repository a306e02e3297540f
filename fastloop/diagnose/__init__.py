"""From a measurement to findings: what slows the loop down, by how much, and the YAML that addresses it. Pure rules."""

from fastloop.diagnose.attribution import WORTH_NAMING_PCT
from fastloop.diagnose.remedies import list_next_steps
from fastloop.diagnose.rules import list_findings
from fastloop.records.readings import is_beyond

__all__ = ["WORTH_NAMING_PCT", "is_beyond", "list_findings", "list_next_steps"]

"""From a measurement to findings: what holds the loop up, how much, and the YAML that addresses it. Pure rules."""

from fastloop.diagnose.headline import next_steps
from fastloop.diagnose.reading import is_beyond
from fastloop.diagnose.rules import findings
from fastloop.diagnose.split import WORTH_NAMING_PCT

__all__ = ["WORTH_NAMING_PCT", "findings", "is_beyond", "next_steps"]

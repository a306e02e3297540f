"""The commands of the command line, one per file. They compute and return an Answer; only cli.py prints."""

# ruff: noqa: F401  # for type checkers

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fastloop.commands import (
        ab,
        cache,
        climb,
        config,
        diagnose,
        doctor,
        execute,
        headspace,
        listing,
        report,
        run,
        tune,
    )

COMMANDS = (
    *("ab", "cache", "climb", "config", "diagnose", "doctor", "execute", "headspace", "listing", "report", "run"),
    "tune",
)


def __getattr__(name: str) -> ModuleType:
    """Import a command's file when the command is used: the imports of some take a second."""
    if name not in COMMANDS:  # Inductor looks for `torch` in every module
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__name__}.{name}")

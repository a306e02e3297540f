"""What the command line does, one command a file. They compute and return an Answer; only cli.py prints."""

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
    """A command's file, imported when the command is used: what some of them need takes a second."""
    if name not in COMMANDS:  # Inductor looks for `torch` in every module there is
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__name__}.{name}")

"""Lightning exists under two names, `lightning.pytorch` and `pytorch_lightning`, with separate classes."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from typing import Any

from lightning_utilities.core import rank_zero

NAMES = ("lightning.pytorch", "pytorch_lightning")


def find_namespace(lightning_object: Any) -> str:
    """Return the namespace of a Trainer, a strategy or their class: that of the first Lightning class among its bases.

    Raises:
        TypeError: it is not a Lightning class.
    """
    kind = lightning_object if isinstance(lightning_object, type) else type(lightning_object)
    for base in kind.__mro__:
        for name in NAMES:
            if base.__module__ == name or base.__module__.startswith(f"{name}."):
                return name
    raise TypeError(f"{kind.__module__}.{kind.__qualname__} is not a Lightning class")


def load(namespace: str, path: str) -> Any:
    """Load a class or function by its path below a namespace: ``load(name, "strategies.DDPStrategy")``."""
    module, _, attribute = path.rpartition(".")
    return getattr(importlib.import_module(f"{namespace}.{module}"), attribute)


def list_installed() -> Iterator[str]:
    """Yield the installed namespaces. Both packages may be installed, and a script may use either."""
    for name in NAMES:
        if name in sys.modules or importlib.util.find_spec(name.split(".")[0]) is not None:
            yield name


def find_everywhere(path: str) -> Iterator[tuple[str, Any]]:
    """Yield namespace and object at a path, for every installed namespace that can be imported."""
    for name in list_installed():
        try:
            found = _load_keeping_log(name, path)
        except Exception:  # too old for this torch, or half uninstalled: it cannot train
            continue
        yield name, found


def _load_keeping_log(name: str, path: str) -> Any:
    """Load, and keep sending Lightning's messages to the logger they went to before. Importing a namespace redirects
    the messages of both to its own logger, which ignores the level and handlers that a user has set on the other."""
    is_first, log = sys.modules.keys().isdisjoint(NAMES), rank_zero.log
    try:
        return load(name, path)
    finally:
        if not is_first:
            rank_zero.log = log


def make_callback_class() -> Any:
    """Make a callback base class that both namespaces accept; before 2.6 each refuses callbacks of the other."""
    return type("Callback", tuple(kind for _, kind in find_everywhere("callbacks.Callback")), {})

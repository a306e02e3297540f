"""Which line logs which metric: Lightning synchronises for it much later, when that line is no longer on the stack."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

from fastloop.evidence.callsite import site
from fastloop.evidence.synctally import LogSite

_METHODS = ("log", "log_dict")


class LogSites:
    """Notes, inside ``with``, the lines that call ``log`` and ``log_dict`` of an object that has such methods.

    The object gets attributes of its own in front of its class's; they are gone afterwards.
    """

    def __init__(self, module: Any) -> None:
        self.sites: dict[str, LogSite] = {}
        """By the name of the metric."""
        self._module = module
        self._before: dict[str, Any] = {}
        self._inside = False

    def __enter__(self) -> LogSites:
        for method in _METHODS:
            original = getattr(self._module, method, None)
            if callable(original):
                self._before[method] = vars(self._module).get(method)
                setattr(self._module, method, self._noting(original))
        return self

    def __exit__(self, *_: object) -> None:
        for method, before in self._before.items():
            if before is None:
                vars(self._module).pop(method, None)
            else:
                setattr(self._module, method, before)
        self._before.clear()

    def _noting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        try:
            signature = inspect.signature(original)
        except (TypeError, ValueError):
            signature = None

        def log(*args: Any, **kwargs: Any) -> Any:
            if self._inside:  # a `log_dict` that calls `log`
                return original(*args, **kwargs)
            with contextlib.suppress(Exception):  # noting must never break the step
                self._note(signature.bind_partial(*args, **kwargs).arguments if signature else kwargs)
            self._inside = True
            try:
                return original(*args, **kwargs)
            finally:
                self._inside = False

        return log

    def _note(self, arguments: Mapping[str, Any]) -> None:
        names = arguments["dictionary"] if "dictionary" in arguments else (arguments["name"],)
        found = LogSite(
            where=site(sys._getframe(2)).where, prog_bar=bool(arguments.get("prog_bar", False)),
            sync_dist=bool(arguments.get("sync_dist", False)), on_step=arguments.get("on_step"),
            logger=arguments.get("logger"),
        )  # fmt: skip
        self.sites.update({str(name): found for name in names})

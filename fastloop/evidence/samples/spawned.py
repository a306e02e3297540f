"""What workers that do not fork receive of a loader: its pickled parts, and the script, which they run again."""

from __future__ import annotations

import ast
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import FrameType, FunctionType
from typing import Any

from fastloop.evidence.samples.dataset import list_members

_DEEPEST = 7
_GUARDS = {"__name__", "parent_process", "current_process"}
"""Names by which a script tells whether it runs as the training or in a worker."""
_GUARD = 'if __name__ == "__main__"'


def find_spawn_hazard(parts: Mapping[str, Any]) -> str | None:
    """Why workers that do not fork would fail with these parts of a loader, and what to do; None if nothing is known.

    Args:
        parts: what is sent to them, by name.
    """
    needed = set[str]()
    for name, part in parts.items():
        if (unpicklable := find_unpicklable(part, name, needed)) is not None:
            return f"{unpicklable} cannot be pickled; make it a module-level function or class"
    return _find_second_run() or _find_hidden(needed)


def find_unpicklable(root: Any, name: str = "dataset", needed: set[str] | None = None) -> str | None:
    """Attribute path of the innermost object that cannot be pickled; None if everything can.

    Args:
        needed: receives the names of the script's classes and functions among what was pickled.
    """
    if _pickles(root, needed):
        return None
    path, item = name, root
    for _ in range(_DEEPEST):
        bad = next(((step, member) for step, member in list_members(item) if not _pickles(member)), None)
        if bad is None:
            break
        path, item = f"{path}{bad[0]}", bad[1]
    return f"{path} ({getattr(item, '__qualname__', type(item).__name__)})"


def _pickles(item: Any, needed: set[str] | None = None) -> bool:
    try:
        with Path(os.devnull).open("wb") as nowhere:  # so that the attempt costs no memory
            _NotingPickler(nowhere, set() if needed is None else needed).dump(item)
    except Exception:  # whatever a __reduce__ raises means: no
        return False
    return True


class _NotingPickler(ForkingPickler):
    def __init__(self, file: Any, needed: set[str]) -> None:
        super().__init__(file)
        self._needed = needed

    def reducer_override(self, item: Any) -> Any:
        if isinstance(item, (type, FunctionType)) and item.__module__ == "__main__":
            self._needed.add(item.__qualname__.partition(".")[0])
        return NotImplemented


# -- the script -------------------------------------------------------------------------------------------------------


def _find_second_run() -> str | None:
    """Where a worker's run of the script would start the training again; None if it would not, or that is unknown."""
    main = sys.modules["__main__"]
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and not (frame.f_code.co_name == "<module>" and frame.f_globals is vars(main)):
        frame = frame.f_back
    tree = None if _is_package() else _parse_script()
    if frame is None or tree is None or _is_guarded(tree, frame):
        return None
    name = Path(str(main.__file__)).name
    return f"each would run {name} again, training included (line {frame.f_lineno}); put that under {_GUARD}"


def _is_package() -> bool:
    """Whether ``python -m package`` was called: workers do not run a ``__main__.py`` again.

    Source: multiprocessing/spawn.py, _fixup_main_from_name.
    """
    name = getattr(sys.modules["__main__"].__spec__, "name", "")
    return name == "__main__" or name.endswith(".__main__")


def _is_guarded(tree: ast.Module, frame: FrameType) -> bool:
    guards = (node for node in ast.walk(tree) if isinstance(node, (ast.If, ast.IfExp, ast.BoolOp)) and _is_guard(node))
    return any(node.lineno <= frame.f_lineno <= (node.end_lineno or 0) for node in guards)


def _find_hidden(needed: set[str]) -> str | None:
    """Which of the script's names a worker would not find; None if it finds all, or that is unknown."""
    if needed and (_is_package() or getattr(sys.modules["__main__"], "__file__", None) is None):
        return f"they do not find {min(needed)}, which no module defines that they import; move it into one"
    if not needed or (tree := _parse_script()) is None:
        return None
    above = {name for node in tree.body if not _is_guard(node) for name in _list_bound(node)}
    below = {name for node in tree.body if _is_guard(node) for name in _list_bound(node)}
    hidden = sorted(needed & (below - above))
    return (
        f"they do not find {hidden[0]}, which is defined under {_GUARD}; define it above that line" if hidden else None
    )


def _parse_script() -> ast.Module | None:
    """The script's syntax tree; None if it has no file, as in a notebook, or that cannot be read."""
    path = getattr(sys.modules["__main__"], "__file__", None)
    try:
        return None if path is None else ast.parse(Path(path).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None


def _is_guard(node: ast.AST) -> bool:
    test = node.values[0] if isinstance(node, ast.BoolOp) else getattr(node, "test", None)
    if test is None:
        return False
    named = (getattr(each, "id", getattr(each, "attr", None)) for each in ast.walk(test))
    return not _GUARDS.isdisjoint(named)


def _list_bound(node: ast.AST) -> Iterator[str]:
    for each in ast.walk(node):
        if isinstance(each, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield each.name
        elif isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store):
            yield each.id
        elif isinstance(each, ast.alias):
            yield (each.asname or each.name).partition(".")[0]

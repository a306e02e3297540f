"""Finds the user's line that led to a point deep inside torch or Lightning."""

from __future__ import annotations

import linecache
import re
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from traceback import FrameSummary
from types import CodeType, FrameType
from typing import Any, Literal, NamedTuple

from fastloop.evidence.samples.sample_code import holds_packages

Owner = Literal["user", "torch", "lightning", "fastloop", "library", "package", "generated"]

_OURS = str(Path(__file__).resolve().parents[2])
_RECIPES = "_shipped/recipes/"
_LIBRARY = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib")})
_TORCH = {"torch", "torchgen", "functorch", "triton"}
_LIGHTNING = {"lightning", "pytorch_lightning", "lightning_fabric", "lightning_utilities"}
_TRANSPARENT = {
    *(f"fastloop.evidence.sync.{name}" for name in ("hunt", "cuda_warnings")),
    *(f"fastloop.bridge.{name}" for name in ("apply.loop.thin_loop", "watch.live_metrics")),
}
"""The modules that hunt synchronizations, and those that stand in for Lightning's reads of logged values: their frames
lie between the line that waits and its call."""
_COMPILED = ("torch._dynamo.", "torch._inductor.", "torch._functorch.")
"""Modules that run compiled code."""
_LOADERS = ("torch.utils.data.", "torchdata.")
_LOOPS = ".loops."
_LIGHTNINGS_LOADERS, _VALIDATION = (".combined_loader", ".fetchers"), ".evaluation_loop"
"""How the names of Lightning's modules end that ask a loader for a batch, and of the one that validates."""
_ENTRIES = {"fit", "validate", "test", "predict", "_call_and_handle_interrupt", "launch"}
"""Lightning's entry points: the lines that call these belong to the user's script as a whole and are not to blame."""


@dataclass(frozen=True, kw_only=True)
class Cause:
    """The part of the framework that caused it."""

    kind: str
    """prog_bar, logger, sync_dist, number, sigterm, scaler, checks, callback, transfer."""
    name: str | None = None
    """Name of the metric; or of the callback, with its frequency: ``ModelCheckpoint(every_n_train_steps=50)``."""


@dataclass(frozen=True, kw_only=True)
class CallSite:
    """The place of a call."""

    where: str
    """``train.py:42``, relative to the working directory, or to the folder that contains a package."""
    users: bool
    """True for a line of the user's own code; False for the innermost line of Lightning or of a package."""
    ours: bool = False
    """fastloop itself made the call: `inside` names the rung, if known, or `where` does if no user line led there.
    Never names a file of fastloop."""
    text: str = ""
    """The source: the exact expression from Python 3.11 on, else the line."""
    inside: str | None = None
    """The package line that the user's line called, if a package made the call, or fastloop's part."""
    through: tuple[str, ...] = ()
    """torch functions between that line and the event, outermost first."""
    cause: Cause | None = None
    of_optimizer: bool = False
    """The call comes from torch.optim, not from the user."""
    of_loading: bool = False
    """A data loader of this process was running."""


def find_site(start: FrameType | None) -> CallSite:
    """The place to blame for the event in the frame `start`, found by walking outwards; keeps no frame afterwards."""
    walk, frame = _Walk(), start
    while frame is not None and walk.visit(frame):
        frame = frame.f_back
    return walk.name_site(start)


class _Walk:
    """The state of a walk up the stack from an event's frame."""

    def __init__(self) -> None:
        self.places: dict[Owner, FrameType] = {}
        """The first frame of each owner who may be blamed."""
        self.ours: list[str] = []
        """fastloop's own modules, met before any such frame."""
        self.made_by_fastloop = False
        """Whether fastloop itself made the call. If not, it only called the user's compiled code, or is not on the
        stack."""
        self._in_compiled = False
        self._between: list[str] = []
        self._of_optimizer = False
        self._cause: Cause | None = None

    def visit(self, frame: FrameType) -> bool:
        """Note what this frame shows; returns whether to walk on."""
        module, function = str(frame.f_globals.get("__name__", "")), frame.f_code.co_name
        owner = _find_owner(frame.f_code.co_filename, module)
        if owner == "user":
            self.places["user"] = frame
        if owner == "user" or _is_entry(owner, module, function):
            if not self.made_by_fastloop:
                self.places.setdefault(owner, frame)
            return False
        self._in_compiled = self._in_compiled or (not self.places and module.startswith(_COMPILED))
        if owner == "fastloop" and not self.places:
            self.ours.append(module)
            self.made_by_fastloop = self.made_by_fastloop or not self._in_compiled
        if self.made_by_fastloop:  # from now on, look only for a user line
            return True
        if owner == "torch" and not self.places:
            self._between.append(function)
            self._of_optimizer = self._of_optimizer or module.startswith("torch.optim")
        self._cause = self._cause or _find_cause(owner, module, function, frame)
        if owner in ("lightning", "package"):
            self.places.setdefault(owner, frame)
        return True

    def name_site(self, start: FrameType | None) -> CallSite:
        """The place to blame, once the walk has ended."""
        own_part = self._name_own_part()
        flags: dict[str, Any] = {"of_optimizer": self._of_optimizer, "of_loading": _is_loading(start)}
        flags |= {"cause": self._cause, "through": tuple(reversed(self._between)), "users": "user" in self.places}
        if own_part is not None and not self.places:
            return CallSite(where=own_part, ours=True, **flags)
        order: tuple[Owner, ...] = ("user", "package", "lightning") if self.ours else ("user", "lightning", "package")
        place = next((self.places[owner] for owner in order if owner in self.places), start)
        if own_part is not None:
            return CallSite(where=_describe_place(place), ours=True, inside=own_part, **flags)
        package = self.places.get("package")
        inside = None if package is None or package is place else _describe_place(package)
        return CallSite(where=_describe_place(place), text=_read_line(place), inside=inside, **flags)

    def _name_own_part(self) -> str | None:
        """fastloop's own part that made the call, or that led to it if no other code did; otherwise None."""
        if self.made_by_fastloop:
            return name_ours(self.ours[0])
        return name_ours(self.ours[-1]) if self.ours and not self.places else None


def name_line(stack: Sequence[FrameSummary]) -> str:
    """The user's innermost line in a stack, outermost frame first, as ``train.py:42``; without one, the innermost."""
    users = [frame for frame in stack if _find_owner(frame.filename, "") == "user"]
    frame = (users or stack)[-1]
    return name_place(frame.filename, frame.lineno)


def name_place(filename: str, line: int | None) -> str:
    """A line as ``train.py:42``, without machine-specific folders; a notebook's as ``Cell In[3]:42``."""
    return f"{_name_cell(filename) or _shorten_path(filename)}:{line}"


class UserStack(NamedTuple):
    """The user's functions on a stack, from the one that Lightning called to the innermost."""

    lines: tuple[tuple[CodeType, int], ...]
    """Each with its current line; empty if only library code runs."""
    is_loading: bool
    """A data loader of this process was asked for a batch."""
    caller: str = ""
    """Lightning's function that called the outermost of them."""


def read_user_stack(frame: FrameType | None) -> UserStack | None:
    """The user's functions on a thread's stack, whose variables are not read; None during a validation."""
    lines: list[tuple[CodeType, int]] = []
    is_loading = is_complete = False
    caller = ""
    while frame is not None:
        module, code = str(frame.f_globals.get("__name__", "")), frame.f_code
        owner = _find_owner(code.co_filename, module)
        if _is_entry(owner, module, code.co_name):
            return UserStack(tuple(reversed(lines)), is_loading, caller)
        if owner == "lightning":
            if module.endswith(_VALIDATION):
                return None
            is_loading = is_loading or (not is_complete and module.endswith(_LIGHTNINGS_LOADERS))
            caller = code.co_name if lines and not is_complete else caller
            # Beyond Lightning's loops is only what called them: an optimizer_step, for the closure's backward.
            is_complete = is_complete or bool(lines) or _LOOPS in module
        elif not is_complete:
            if owner == "user":
                lines.append((code, frame.f_lineno or code.co_firstlineno))
            is_loading = is_loading or module.startswith(_LOADERS)
        frame = frame.f_back
    return UserStack((), False)


def name_ours(module: str) -> str:
    """A name for fastloop's own code: its rung, also for that rung's package in ``feeds``; never a file."""
    _, room, name, *_ = f"{module}..".split(".")
    is_rung = room in ("rungs", "feeds") and Path(_OURS, "rungs", f"{name}.py").is_file()
    return f"fastloop's own rung {name}" if is_rung else "fastloop itself"


def _is_entry(owner: Owner, module: str, function: str) -> bool:
    return owner == "lightning" and function in _ENTRIES and module.rpartition(".")[2] in ("trainer", "call")


def _is_loading(frame: FrameType | None) -> bool:
    while frame is not None:
        if str(frame.f_globals.get("__name__", "")).startswith(_LOADERS):
            return True
        frame = frame.f_back
    return False


@lru_cache(maxsize=4096)
def _find_owner(filename: str, module: str) -> Owner:
    top = module.partition(".")[0]
    if _RECIPES in filename or ".recipe_modules." in module:
        return "user"
    if module in _TRANSPARENT:
        return "library"
    if top == "fastloop" or filename.startswith(_OURS):
        return "fastloop"
    if top in _TORCH:
        return "torch"
    if top in _LIGHTNING:
        return "lightning"
    if re.search("/(site|dist)-packages/", filename) or (module != "__main__" and _find_folder(filename)):
        return "package"
    if filename.startswith("<") and not filename.startswith("<ipython") and module != "__main__":
        return "generated"
    return "library" if filename.startswith(_LIBRARY) else "user"


def _describe_place(frame: FrameType | None) -> str:
    if frame is None:
        return "unknown"
    return name_place(frame.f_code.co_filename, frame.f_lineno)


def _find_folder(filename: str) -> str | None:
    """The folder of sys.path that contains installed packages, under any name (``pip install --target``)."""
    inside = [path for path in map(str, sys.path) if path and filename.startswith(path.rstrip("/") + "/")]
    return next((path for path in inside if holds_packages(Path(path))), None)


def _name_cell(filename: str) -> str | None:
    """The cell that was compiled under this name, as IPython's tracebacks call it; None outside a notebook. Not cached:
    a cell that runs again gets another number. IPython before 8 has no such name: its ``filename`` tells the cell."""
    ipython = sys.modules.get("IPython")
    compiler: Any = None if ipython is None else getattr(ipython.get_ipython(), "compile", None)
    named = compiler.format_code_name(filename) if hasattr(compiler, "format_code_name") else None
    return None if named is None else " ".join(named)


@lru_cache(maxsize=4096)
def _shorten_path(filename: str) -> str:
    """A path short enough for a table, without machine-specific folders."""
    inside = re.split("/(?:site|dist)-packages/|/_shipped/", filename)
    if len(inside) > 1:
        return inside[-1]
    try:
        return Path(filename).relative_to(_find_folder(filename) or Path.cwd()).as_posix()
    except (ValueError, OSError):  # elsewhere, or the working directory is gone
        path = Path(filename)
        return path.name if filename.startswith("<") else f"{path.parent.name}/{path.name}".lstrip("/")


def _read_line(frame: FrameType | None) -> str:
    if frame is None:
        return ""
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
    if sys.version_info >= (3, 11):
        positions = list(frame.f_code.co_positions())[frame.f_lasti // 2]
        start_line, end_line, start, end = positions
        if start_line == end_line == frame.f_lineno and start is not None and end is not None and start < end:
            # Columns count bytes of UTF-8. A compiled function may have none.
            return line.encode()[start:end].decode(errors="replace")
    return line.strip()


def _find_cause(owner: Owner, module: str, function: str, frame: FrameType) -> Cause | None:
    """The cause inside Lightning or torch, if a frame and its local variables show it."""
    if owner == "torch":
        return Cause(kind="scaler") if module == "torch.amp.grad_scaler" else None
    if owner != "lightning":
        return None
    metric = frame.f_locals.get("result_metric") if function == "metrics" else frame.f_locals.get("self")
    meta = getattr(metric, "meta", None)
    if function == "metrics" and meta is not None:
        return Cause(kind="prog_bar", name=meta.name)
    if function in ("update", "compute") and meta is not None and module.endswith(".result"):
        return Cause(kind="sync_dist", name=meta.name)
    if function == "log_metrics" and module.endswith(".logger_connector"):
        return Cause(kind="logger")
    if function in ("__to_tensor", "_LightningModule__to_tensor"):
        return Cause(kind="number", name=frame.f_locals.get("name"))
    if "sigterm" in function:
        return Cause(kind="sigterm")
    if "detect_nan" in function or "finite" in function:
        return Cause(kind="checks")
    if function == "batch_to" and module.endswith(".apply_func"):
        return Cause(kind="transfer")
    if ".callbacks.progress" in module:
        return Cause(kind="prog_bar")
    if ".callbacks." in module:
        return Cause(kind="callback", name=None if metric is None else _describe_callback(metric))
    return None


def _describe_callback(callback: Any) -> str:
    """A callback as its user wrote it, reduced to the settings of its frequency."""
    every = ((name, getattr(callback, f"_{name}", None)) for name in ("every_n_train_steps", "every_n_epochs"))
    given = ", ".join(f"{name}={number}" for name, number in every if isinstance(number, int) and number > 0)
    return type(callback).__name__ + (f"({given})" if given else "")


def find_logged_name(frame: FrameType | None, tensor: Any) -> str | None:
    """The name under which Lightning is about to log this tensor."""
    while frame is not None:
        if frame.f_code.co_name == "log_metrics" and isinstance(metrics := frame.f_locals.get("metrics"), dict):
            return next((str(name) for name, value in metrics.items() if value is tensor), None)
        frame = frame.f_back
    return None

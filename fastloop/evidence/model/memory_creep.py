"""Memory that grows with every step: how fast, and which attribute keeps the tensors, with the line that adds to it.

Reads at the end of steps, at most every 20 ms and less often in a long fit: the memory of tensors on the GPU (without
the batch, whose shape may grow), and this process's malloc memory on the host. Nothing is synchronized. Memory that an
allocator keeps in reserve does not count: resident memory stays constant while the reserve is used up.

Only steady growth counts: each quarter of the readings above the one before, at a similar pace. That is not proof yet:
a filling cache looks the same. So the tensors are searched for once, at the end of the fit, where user code keeps them:
in attributes of the LightningModule, callbacks and loggers, and in global variables of their files and of others in the
same folders. Datasets are skipped: what they keep is a cache. A list that the code clears elsewhere counts only if it
has grown beyond an epoch. A container that keeps a graph for each step counts even without growth: backward has freed
the large tensors of most graphs, and the rest (nodes, on the host) may be too small to notice in a short fit.
"""

from __future__ import annotations

import ctypes
import inspect
import math
import os
import statistics
import sys
import time
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import psutil
import torch

from fastloop.evidence import machine
from fastloop.evidence.model.kept_lines import find_line

SHORTEST_S, SHARE, TIMES_COST = 0.02, 1 / 200, 500
"""Time between two readings, whichever is longest: seconds; a share of the time since the first; a multiple of a
reading's own cost, usually some 20 us, but malloc's count visits every free block."""
FEWEST = 16
"""Fewest readings for a result."""
LEAST_MIB = 2.0
"""Smallest growth over all readings for a result."""
FORESEE_AFTER_S, OUT_WITHIN_S = 30 * 60.0, 24 * 3600.0
"""During a fit, a warning comes after the first time at the earliest, because a cache may be filling, and only if
memory will run out within the second time."""
GPU, HOST = "GPU", "host"
STEADY = 0.4
"""The slowest pace between quarters must be this share of the fastest: a start-up or a filled cache slows down."""
PER_STEP = 0.5
"""Tensors per optimizer step of the fit that a container must keep to count as the one that grows."""
MOST_OBJECTS, MOST_ITEMS = 100_000, 256
"""Objects that the search visits, and items that it examines in one container."""
_LIBRARIES = sys.stdlib_module_names - {"__main__"} | {
    *("torch", "lightning", "pytorch_lightning", "lightning_fabric", "torchmetrics", "fastloop")
}
"""Packages whose objects are not searched, except for modules: a metric that is never reset keeps tensors."""
_CONTAINERS = {list, dict, set, deque, defaultdict, OrderedDict}
"""Exact types only: subclasses may run the user's code when inspected."""


@dataclass(frozen=True, kw_only=True)
class Holder:
    """The attribute or variable that keeps tensors of past steps."""

    name: str
    """``Net.losses``."""
    tensors: int
    holds_graphs: bool
    where: str | None = None
    """``train.py:42``: the line that adds to it; None if not found in the source."""
    cleared: bool = False
    """Some function empties it, or replaces it."""


class MemoryLog:
    """Readings of memory at the end of optimizer steps: on the GPU, if there is one, and on the host."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._read: dict[str, Callable[[], int]] = {HOST: _find_heap_reader()}
        if device.type == "cuda":
            self._read = {GPU: lambda: torch.cuda.memory_allocated(device), **self._read}
        self.readings: dict[str, list[tuple[int, int]]] = {memory: [] for memory in self._read}
        """Optimizer steps and bytes."""
        self._before: Mapping[int, int] = {}
        """Number of items in each container when training started, by id."""
        self._began_s = self._next_s = 0.0
        self._cost_s = math.inf
        self._warned = False

    def begin(self, roots: Sequence[object]) -> None:
        """Training starts: items that containers already hold do not count."""
        self._before = {id(value): len(value) for *_, value in _walk(roots) if not isinstance(value, torch.Tensor)}

    def tick(self, step: int, batch_bytes: Callable[[], int]) -> None:
        """An optimizer step has ended; its last batch is still on the device."""
        if (now_s := time.monotonic()) < self._next_s:
            return
        self._began_s = self._began_s or now_s
        for memory, read in self._read.items():
            self.readings[memory].append((step, read() - (batch_bytes() if memory == GPU else 0)))
        before_s, self._cost_s = self._cost_s, time.monotonic() - now_s  # one of the two may have been delayed
        pause_s = TIMES_COST * min(before_s, self._cost_s)
        self._next_s = now_s + max(SHORTEST_S, SHARE * (now_s - self._began_s), pause_s)

    def read_now(self) -> int:
        """Return how many bytes are in use of the memory that a training fills first: the GPU's, if there is one."""
        return next(iter(self._read.values()))()

    def foresee_end(self, after_step: int, roots: Sequence[object]) -> str | None:
        """Return a long fit's only warning that memory will run out within a day, with what keeps the tensors; else
        None.

        Args:
            after_step, roots: as for `find_creep`.
        """
        memory, readings = next(iter(self.readings.items()))
        kept, passed_s = [each for each in readings if each[0] > after_step], time.monotonic() - self._began_s
        pace, free = find_pace(kept), self._read_free_bytes(memory)
        if self._warned or passed_s < FORESEE_AFTER_S or not pace or not free:
            return None
        steps, left_steps = kept[-1][0] - readings[0][0], free / pace
        left_s = left_steps * passed_s / steps
        if left_s > OUT_WITHIN_S:
            return None
        self._warned, holder = True, self.find_holder(roots, kept[-1][0])
        keeps = "" if holder is None else f": {holder.name} keeps {holder.tensors} tensors ({holder.where or 'n/a'})"
        return (
            f"memory grew by {1000 * pace / 2**20:,.0f} MiB per 1,000 steps since step {kept[0][0]}; at this pace it"
            f" runs out after about {left_steps:,.0f} more steps, in {left_s / 3600:.1f} hours{keeps}"
        )

    def _read_free_bytes(self, memory: str) -> int | None:
        """Memory still available; on the GPU including the reserve of the caching allocator."""
        if memory == HOST:
            return machine.read_memory_free_bytes()
        held_back = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        return int(torch.cuda.mem_get_info(self._device)[0]) + held_back

    def find_holder(self, roots: Sequence[object], steps: int) -> Holder | None:
        """Return what keeps a tensor for at least every second step; if several do, one with graphs, then the
        largest."""
        found: list[tuple[bool, int, _Owner, str, str]] = []
        for owner, prefix, name, value in _walk(roots):
            if isinstance(value, torch.Tensor):
                held, graphs = (_measure_chain(value), True) if value.grad_fn is not None else (0, False)
            else:
                held, graphs = _count_tensors(value)
                held -= self._before.get(id(value), 0)
            if held >= max(1.0, PER_STEP * steps):
                found.append((graphs, held, owner, prefix, name))
        if not found:
            return None
        graphs, held, owner, prefix, name = max(found, key=lambda each: each[:2])
        where, cleared = find_line(_list_places(owner, [type(root) for root in roots]), name)
        name = f"{prefix}.{name}" if prefix else f"the global {name}"
        return Holder(name=name, tensors=held, holds_graphs=graphs, where=where, cleared=cleared)

    def find_creep(self, after_step: int, roots: Sequence[object], several_epochs: bool) -> dict[str, Any]:
        """The growth and the container that keeps the tensors; empty if memory does not creep, or that is unknown.

        Args:
            after_step: readings up to this step are warm-up.
            roots: the module, callbacks and loggers.
            several_epochs: the readings span the end of an epoch, when code clears lists.
        """
        kept = {memory: [each for each in read if each[0] > after_step] for memory, read in self.readings.items()}
        paces = {memory: pace for memory, read in kept.items() if (pace := find_pace(read))}
        steps = max((step for read in kept.values() for step, _ in read), default=0)
        holder = self.find_holder(roots, steps) if steps - after_step >= FEWEST else None
        if holder is not None and holder.cleared and not several_epochs:
            holder = None
        if holder is None:
            paces.pop(HOST, None)  # a library or the dataset may keep it
            paces = paces if several_epochs else {}  # a cache fills for an epoch
        memory = next(iter(paces), None)
        if memory is None and not (holder is not None and holder.holds_graphs):
            return {}
        found: dict[str, Any] = {} if holder is None else {**vars(holder)}
        found.pop("cleared", None)
        if memory is not None:
            free, pace = self._read_free_bytes(memory), paces[memory]
            found |= {"of": memory, "mib_per_1000_steps": 1000 * pace / 2**20}
            found["steps_left"] = None if free is None else int(free / pace)
        return found


class _MallInfo(ctypes.Structure):
    """Source: mallinfo(3). ``hblkhd`` bytes are in separate maps, ``uordblks`` in use in the heaps."""

    _fields_ = [(name, ctypes.c_size_t) for name in (*"abcd", "hblkhd", *"ef", "uordblks", *"gh")]


def _find_heap_reader() -> Callable[[], int]:
    """A function that returns the bytes allocated by malloc; if malloc does not report them, the resident memory."""
    read = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if read is None:
        process = psutil.Process()
        return lambda: int(process.memory_info().rss)
    read.restype = _MallInfo

    def read_heap() -> int:
        found = read()
        return int(found.hblkhd + found.uordblks)

    return read_heap


def find_pace(readings: Sequence[tuple[int, int]]) -> float | None:
    """Bytes per step if they grow steadily, else None.

    Args:
        readings: steps and bytes, in order.
    """
    if len(readings) < FEWEST:
        return None
    size = len(readings) // 4
    quarters = [readings[start : start + size] for start in (0, size, 2 * size, len(readings) - size)]
    steps, sizes = ([statistics.median(each[side] for each in part) for part in quarters] for side in (0, 1))
    paces = [(sizes[i + 1] - sizes[i]) / max(1, steps[i + 1] - steps[i]) for i in range(3)]
    if sizes[-1] - sizes[0] < LEAST_MIB * 2**20 or min(paces) < STEADY * max(paces):
        return None
    return (sizes[-1] - sizes[0]) / max(1, steps[-1] - steps[0])


# -- what keeps the tensors -------------------------------------------------------------------------------------------


_Owner = type | ModuleType
"""The class of the object that holds a container, or the module of a global variable."""


def _walk(roots: Sequence[object]) -> Iterator[tuple[_Owner, str, str, Any]]:
    """Containers and tensors below these objects, with class, name and attribute of the object that holds them; for a
    library's object, those of the user's attribute that it is in."""
    waiting: deque[tuple[_Owner, str, str, Any]] = deque()
    for module in _list_modules(roots):
        waiting += [
            (module, "", name, value)
            for name, value in [*vars(module).items()]
            if type(value) in _CONTAINERS or _is_searched(value)
        ]
    waiting += [(type(root), type(root).__name__, "", root) for root in roots]
    seen: set[int] = set()
    while waiting and len(seen) < MOST_OBJECTS:
        owner, prefix, name, value = waiting.popleft()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            yield owner, prefix, name, value
        elif type(value) in _CONTAINERS:
            if not (isinstance(value, deque) and value.maxlen is not None):
                yield owner, prefix, name, value
                waiting += [
                    (owner, prefix, name, each) for each in _sample_items(value) if not isinstance(each, torch.Tensor)
                ]
        elif _is_searched(value):
            kind, members = type(value), {**vars(value), **vars(value).get("_modules", {})}
            users = _may_keep_tensors(kind)
            waiting += [
                (kind, kind.__name__, key, each) if users or not name else (owner, prefix, name, each)
                for key, each in members.items()
                if key not in ("_parameters", "_buffers", "_modules")
            ]


def _list_modules(roots: Sequence[object]) -> list[ModuleType]:
    """The modules of the user's classes, and the others that were imported from the same folders."""
    names = {type(root).__module__ for root in roots if _may_keep_tensors(type(root))}
    folders = {_find_folder(sys.modules[name]) for name in names if name in sys.modules} - {None}
    return [
        module
        for name, module in [*sys.modules.items()]
        if name in names or (folders and _find_folder(module) in folders)
    ]


def _find_folder(module: ModuleType) -> str | None:
    file = _find_module_file(module)
    return None if file is None else file.rpartition(os.sep)[0]


def _find_module_file(module: ModuleType) -> str | None:
    """Some entries of ``sys.modules`` are no modules."""
    file = vars(module).get("__file__") if type(module) is ModuleType else None
    return file if isinstance(file, str) else None


def _is_searched(value: object) -> bool:
    return isinstance(value, torch.nn.Module) or bool(
        _may_keep_tensors(type(value)) and type(value).__dictoffset__ and not isinstance(value, type)
    )


def _may_keep_tensors(kind: type) -> bool:
    """Whether a class is the user's and may keep tensors; what a dataset or loader keeps is a cache."""
    if issubclass(kind, (torch.utils.data.Dataset, torch.utils.data.DataLoader, torch.utils.data.Sampler, type)):
        return False
    return kind.__module__.partition(".")[0] not in _LIBRARIES


def _sample_items(value: Any) -> Iterator[object]:
    """All items of a small container, or an even selection from a large one."""
    every = -(-len(value) // MOST_ITEMS) or 1
    with suppress(RuntimeError):  # another thread adds to it
        yield from list(value.values() if isinstance(value, dict) else value)[::every]


def _count_tensors(value: Any) -> tuple[int, bool]:
    """Number of items that are tensors or directly contain some, and whether most of them keep a graph."""
    held = graphs = looked = 0
    for each in _sample_items(value):
        looked += 1
        found = [member for member in _list_members(each) if type(member) is torch.Tensor]  # no parameters
        held += bool(found)
        graphs += any(member.grad_fn is not None for member in found)
    return round(held * len(value) / max(1, looked)), graphs > held / 2


def _list_members(item: Any) -> Iterable[object]:
    """The contents of a container's item: several for a step's results, ``{"loss": ..., "logits": ...}``."""
    if type(item) is dict:
        return item.values()
    return item if type(item) in (list, tuple) and len(item) <= 16 else (item,)


def _measure_chain(value: torch.Tensor) -> int:
    """How many times in a row an operation took its own previous result, as in ``total = total + loss``."""
    length, node = 0, value.grad_fn
    while node is not None:
        length += 1
        below = [each for each, _ in node.next_functions if each is not None]
        below += [each for between in below for each, _ in between.next_functions if each is not None]  # 0.9 * total
        node = next((each for each in below if each.name() == node.name()), None)
    return length


def _list_places(owner: _Owner, roots: Sequence[type]) -> list[tuple[str, str | None]]:
    """Where the code may be: for an attribute in the classes of the owner and the roots, for a global variable in its
    own file, then in theirs."""
    is_global = isinstance(owner, ModuleType)
    found: list[tuple[str | None, str | None]] = []
    if isinstance(owner, ModuleType):
        found.append((_find_module_file(owner), None))
    kinds = [base for kind in (*([] if is_global else [owner]), *roots) for base in kind.__mro__]
    found += [(_find_file(kind), None if is_global else kind.__name__) for kind in kinds if _may_keep_tensors(kind)]
    return [(file, kind) for file, kind in found if file is not None]


def _find_file(kind: type) -> str | None:
    with suppress(TypeError, OSError):
        return inspect.getsourcefile(kind)
    return None

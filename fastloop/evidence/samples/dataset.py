"""Reads from a dataset's objects and code whether it can move to worker processes. Takes no sample."""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import io
import logging
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from types import ModuleType
from typing import Any

import torch
from torch.utils.data import TensorDataset

from fastloop.errors import let_through
from fastloop.evidence.samples import sample_code

_MOST_OBJECTS, _MOST_MEMBERS, _MOST_ITEMS, _DEEPEST = 5000, 200, 50, 7
_MANY_OBJECTS = 1_000_000
_HANDLE_MODULES = ("h5py", "lmdb", "sqlite3", "tables", "zarr")
SHARED = "is a connection or its client, and replies to several workers would get mixed up; open it in __getitem__"
POOL = "runs threads or processes, which workers do not inherit"
DRAWS_ITSELF = "is a random generator: every worker would draw the same numbers from its copy, again in every epoch"
TRAINING = "is part of the training, and workers hold copies from before it started"
ITERATOR = "is an iterator, and each worker would iterate over its own copy"
_CHANGES = "changes between epochs or samples, and workers hold copies of it"
_MAY_CHANGE = "may change between epochs, and workers hold copies of it"
_SEEKS = "moves the position of a file descriptor, which workers would share; use os.pread"
_FOREIGN: Mapping[str, tuple[str, ...]] = {
    SHARED: (
        "socket.socket",
        "_socket.socket",
        "http.client.HTTPConnection",
        "multiprocessing.connection._ConnectionBase",
        "multiprocessing.queues.Queue",
        "multiprocessing.queues.SimpleQueue",
        "subprocess.Popen",
        "fsspec.asyn.AsyncFileSystem",
        "cv2.VideoCapture",
    ),
    POOL: (
        "concurrent.futures._base.Executor",
        "multiprocessing.pool.Pool",
        "threading.Thread",
        "queue.Queue",
        "_queue.SimpleQueue",
        "multiprocessing.process.BaseProcess",
        "asyncio.events.AbstractEventLoop",
        "polars.dataframe.frame.DataFrame",
        "polars.lazyframe.frame.LazyFrame",
        "polars.series.series.Series",
    ),
    DRAWS_ITSELF: (
        "random.Random",
        "numpy.random._generator.Generator",
        "numpy.random.mtrand.RandomState",
        "torch._C.Generator",
    ),
    TRAINING: (
        "torch.optim.optimizer.Optimizer",
        "lightning.pytorch.trainer.trainer.Trainer",
        "pytorch_lightning.trainer.trainer.Trainer",
        "lightning.pytorch.core.module.LightningModule",
        "pytorch_lightning.core.module.LightningModule",
        "lightning.pytorch.callbacks.callback.Callback",
        "pytorch_lightning.callbacks.callback.Callback",
    ),
}
"""Reasons against copying an object, and the classes they apply to."""
_PACKAGES: Mapping[str, tuple[str, ...]] = {
    SHARED: tuple(
        f"{name}."
        for name in (
            *("redis", "valkey", "requests", "httpx", "urllib3", "aiohttp", "websocket", "websockets", "grpc", "zmq"),
            *("boto3", "botocore", "s3transfer", "minio", "google.cloud", "azure", "pymongo", "motor", "elasticsearch"),
            *("psycopg", "psycopg2", "psycopg2_", "asyncpg", "pymysql", "MySQLdb", "mysql", "sqlalchemy", "pyodbc"),
            *("oracledb", "cx_Oracle", "duckdb", "_duckdb", "cassandra", "clickhouse_connect", "clickhouse_driver"),
            *("kafka", "confluent_kafka", "pika", "pymemcache", "memcache", "etcd3", "plyvel", "rocksdb", "leveldb"),
            *("paramiko", "ftplib", "smbclient", "hdfs", "netCDF4", "rasterio", "osgeo", "decord", "av"),
        )
    )
}
"""Packages whose objects are connections or lead to one."""
_PLAIN = (str, bytes, int, float, complex, bool, type(None), type, ModuleType)
_EPOCH_NAMES = ("epoch", "_epoch", "current_epoch")
_ASKS_PROCESS = {"get_worker_info", "current_process", "parent_process"}


def walk(root: Any, name: str = "dataset") -> Iterator[tuple[str, Any]]:
    """Objects reachable from `root` through attributes and containers, breadth first, with their attribute paths."""
    queue, seen = deque([(name, root, 0)]), set[int]()
    while queue and len(seen) < _MOST_OBJECTS:
        path, item, depth = queue.popleft()
        if id(item) in seen or not _shows_class(item) or isinstance(item, (*_PLAIN, logging.Filterer)):
            continue
        seen.add(id(item))
        yield path, item
        if depth < _DEEPEST and not isinstance(item, torch.Tensor) and _find_foreign(item) is None:
            queue.extend((f"{path}{step}", member, depth + 1) for step, member in list_members(item))


def _shows_class(item: Any) -> bool:
    """Whether an object lets anybody ask for its class; the names in a NumPy archive do not."""
    try:
        return item.__class__ is not None
    except Exception as error:
        let_through(error)
        return False


def is_opaque(item: Any) -> bool:
    """Whether there is no need to look inside an object: a logger, or something that no worker can copy."""
    return isinstance(item, logging.Filterer) or (
        not isinstance(item, torch.Tensor) and _find_foreign(item) is not None
    )


def list_members(item: Any) -> Iterator[tuple[str, Any]]:
    """Direct members with the step that leads to them. Only dicts: other mappings may load items on access."""
    if isinstance(item, dict):
        yield from ((f"[{key!r}]", value) for key, value in islice(item.items(), _MOST_ITEMS))
    elif isinstance(item, (list, tuple, set, frozenset)):
        yield from ((f"[{place}]", value) for place, value in enumerate(islice(item, _MOST_ITEMS)))
    elif inspect.ismethod(item) or (inspect.isbuiltin(item) and not inspect.ismodule(item.__self__)):
        yield ".__self__", item.__self__
    elif isinstance(item, functools.partial):
        yield from ((".func", item.func), (".args", item.args), (".keywords", item.keywords))
    elif isinstance(item, functools._lru_cache_wrapper):
        kept = (each for each in gc.get_referents(item) if each is not vars(item))  # results, or a dict of them
        yield from ((".<cache>", each) for each in islice(kept, _MOST_MEMBERS))
    yield from ((f".{name}", value) for name, value in islice(read_attributes(item).items(), _MOST_MEMBERS))
    if inspect.isfunction(item):
        yield from ((f".<closure {name}>", value) for name, value in sample_code.list_closure(item))


def read_attributes(item: Any) -> dict[str, Any]:
    try:
        return {**read_slots(item), **vars(item)}
    except TypeError:  # it has no __dict__
        return read_slots(item)


def read_slots(item: Any) -> dict[str, Any]:
    """The values of the slots that classes written in Python declare."""
    found, kind = dict[str, Any](), type(item)
    for name, slot in _list_slots(kind):  # type: ignore[arg-type]
        with contextlib.suppress(AttributeError):  # nothing was set
            found[name] = slot.__get__(item)
    return found


@functools.lru_cache(maxsize=512)
def _list_slots(kind: type) -> tuple[tuple[str, Any], ...]:
    members = [member for base in kind.__mro__ if "__slots__" in vars(base) for member in vars(base).items()]
    return tuple((name, member) for name, member in members if inspect.ismemberdescriptor(member))


def find_worker_hazards(dataset: Any, collate: Any = None) -> tuple[str, ...]:
    """Why worker processes would break or change this dataset's samples, each with its location."""
    held = [*walk(dataset), *walk(collate, "collate_fn")]
    hazards = ((path, _find_foreign(item) or _find_epoch_state(item)) for path, item in held)
    found = [f"{path}{hazard}" for path, hazard in hazards if hazard]
    functions, reached = list_running(held)
    for path, owner, function in functions:
        for state in sample_code.list_changes(function, type(owner)):
            if not is_in_shared_memory(_read_state(function, state, owner)):
                found.append(f"{path}{state} {_CHANGES}")
        if "lseek" in sample_code.list_names(function.__code__):
            found.append(f"{path} ({function.__qualname__}) {_SEEKS}")
    found += [f"{path}{foreign}" for path, item in reached if (foreign := _find_foreign(item))]
    return tuple(dict.fromkeys(found))


def list_asking(dataset: Any, collate: Any = None) -> tuple[str, ...]:
    """The functions that run for a sample and ask which process they are in: in a worker the sample may differ."""
    held = [*walk(dataset), *walk(collate, "collate_fn")]
    running = (function for _, _, function in list_running(held)[0])
    asking = (each for each in running if not _ASKS_PROCESS.isdisjoint(sample_code.list_names(each.__code__)))
    return tuple(dict.fromkeys(each.__qualname__ for each in asking))


def list_running(held: Sequence[tuple[str, Any]]) -> tuple[list[tuple[str, Any, Any]], list[tuple[str, Any]]]:
    """The user's functions that may run for a sample of these objects, each as path, object and function; and further
    objects, which these functions read from globals, closures and their classes."""
    found, items, functions = [*held], [item for _, item in held], list[tuple[str, Any, Any]]()
    known, read = set(map(id, items)), set[Any]()
    for place, function in sample_code.follow(items):
        (path, owner), outer = found[place], list[tuple[str, Any]]()
        functions.append((path, owner, function))
        if function not in read:
            outer += (*sample_code.list_globals(function), *sample_code.list_closure(function))
        if (function, type(owner)) not in read:
            outer += ((f"{path}.{name}", value) for name, value in _list_class_values(function, owner))
        read |= {function, (function, type(owner))}
        for name, value in outer:
            for path, item in () if id(value) in known else walk(value, name):
                if id(item) not in known and not inspect.isroutine(item):
                    known.add(id(item))
                    found.append((path, item))
                    items.append(item)
    return functions, found[len(held) :]


def _list_class_values(function: Any, owner: Any) -> Iterator[tuple[str, Any]]:
    """Attributes of the user's classes themselves, if the function names them."""
    hidden = set(read_attributes(owner))
    for base in type(owner).__mro__:
        if not sample_code.is_installed(base):
            names = set(sample_code.list_names(function.__code__)) - hidden
            yield from ((name, value) for name, value in list(vars(base).items()) if name in names)
            hidden |= set(vars(base))


def _read_state(function: Any, state: str, item: Any) -> Any:
    """The value of state that a function of this object touches: ``.fd``, or `` (the outer FD)``; None if it is
    unknown."""
    if state.startswith("."):
        return read_attributes(item).get(state[1:], inspect.getattr_static(type(item), state[1:], None))
    outer = sample_code.read_outer(function)
    return outer.get(state.removeprefix(" (the outer ").removesuffix(")"))


def is_in_shared_memory(value: Any) -> bool:
    """Whether it is a tensor in memory that all processes share. A sparse one has no storage to ask."""
    is_dense = isinstance(value, torch.Tensor) and value.device.type == "cpu" and value.layout is torch.strided
    return is_dense and value.is_shared()


def _find_foreign(item: Any) -> str | None:
    """Why an object cannot be copied into a worker safely, regardless of its use."""
    if isinstance(item, _PLAIN) or inspect.isroutine(item):
        return None
    if isinstance(item, torch.Tensor):
        return " is a CUDA tensor, which a forked worker cannot use" if item.is_cuda else None
    if (handle := find_handle(item)) is not None:
        return f" is an open {handle} handle; open it in __getitem__ instead"
    reason = None if isinstance(item, io.IOBase) else find_reason(type(item))  # type: ignore[arg-type]
    return None if reason is None else f" ({type(item).__name__}) {reason}"


@functools.lru_cache(maxsize=512)
def find_reason(kind: type) -> str | None:
    """Why an object of this kind cannot be copied into a worker."""
    names = {f"{base.__module__}.{base.__name__}" for base in kind.__mro__}
    for reason, kinds in _FOREIGN.items():
        if any(name in kinds or name.startswith(_PACKAGES.get(reason, ())) for name in names):
            return reason
    return ITERATOR if hasattr(kind, "__next__") else None


def find_handle(item: Any) -> str | None:
    """The kind of open handle: "file", "h5py"; None if it is not a handle."""
    kind = type(item)
    package = (kind.__module__ or "").split(".")[0]
    if package in _HANDLE_MODULES:
        return package
    if isinstance(item, io.IOBase) and not isinstance(item, (io.BytesIO, io.StringIO)):
        return "file"  # forked workers would share its position
    # lmdb's C types report builtins as their module.
    return "lmdb" if kind.__module__ == "builtins" and kind.__name__ in ("Environment", "Transaction") else None


def _find_epoch_state(item: Any) -> str | None:
    """A hint in an object's names that it may change between epochs, even if no code that changes it was found."""
    if not hasattr(type(item), "__getitem__") or sample_code.is_framework(type(item)):
        return None
    if callable(getattr(item, "set_epoch", None)):
        return f" has a set_epoch(), so it {_MAY_CHANGE}"
    return next((f".{name} {_MAY_CHANGE}" for name in _EPOCH_NAMES if name in read_attributes(item)), None)


def sample_bytes(dataset: Any) -> int | None:
    """Bytes of one sample, if known without taking one: from tensors that already exist."""
    if type(dataset) is not TensorDataset or not len(dataset):
        return None
    return sum(tensor.nbytes for tensor in dataset.tensors) // len(dataset)


def list_long(dataset: Any) -> tuple[str, ...]:
    """Containers with very many Python objects: forked workers copy each object they touch, so their memory grows."""
    return tuple(
        f"{path} holds {len(item) / 1e6:.1f} million Python objects"
        for path, item in walk(dataset)
        if isinstance(item, (list, tuple, dict)) and len(item) >= _MANY_OBJECTS
    )

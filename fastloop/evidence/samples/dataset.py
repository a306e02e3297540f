"""Reads from a dataset's objects and code whether it can move to worker processes. Takes no sample."""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import io
import logging
import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from types import ModuleType
from typing import Any

import torch
from torch.utils.data import TensorDataset

from fastloop.errors import let_through
from fastloop.evidence.samples import sample_code

_MOST_OBJECTS, _MOST_MEMBERS, _DEEPEST = 5000, 200, 7
_MANY_OBJECTS = 1_000_000
_HANDLE_MODULES = ("h5py", "lmdb", "sqlite3", "tables", "zarr")
SHARED = "is a connection or its client, and replies to several workers would get mixed up; open it in __getitem__"
POOL = "runs threads or processes, which workers do not inherit"
DRAWS_ITSELF = "is a random generator: every worker would draw the same numbers from its copy, again in every epoch"
TRAINING = "is part of the training, and workers hold copies from before it started"
ITERATOR = "is an iterator, and each worker would iterate over its own copy"
_CHANGES = "changes between epochs or samples, and workers hold copies of it"
_PREAD = "use os.pread, or open it in __getitem__"
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
DRAWS = re.compile(
    r"random|rand(n|int|range|perm|bytes)?|randn?_like|getrandbits|shuffle|choices?|r?sample|rvs|\w+variate|permut(ed|ation)"
    r"|uniform|normal|gauss|bernoulli|multinomial|default_rng|RandomState|dropout"
    r"|(exponential|cauchy|geometric|random|uniform|bernoulli|(log_|trunc_)?normal)_"
    r"|initial_seed"
)
"""Names of functions that draw random numbers, or give their seed."""
_SEEDS = {"random", "initial_seed", "default_rng", "RandomState"}
"""Names that also stand where generators are only seeded."""
_ASKS_PROCESS = {"get_worker_info", "current_process", "parent_process"}
_RANDOM_TRANSFORMS = re.compile(
    r"Random|ColorJitter|(\w*Dropout)|(Auto|Rand)Augment|TrivialAugment|AugMix|MixUp|CutMix|ElasticTransform|Gaussian(Blur|Noise)|JPEG"
)
_BEFORE_SAMPLES = ("__init__", "__new__", "__len__", "__setstate__", "setup", "prepare_data")
"""Methods that run before the first sample is requested: their random draws happen in the main process either way."""


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
    """Whether what the object holds is of no concern for samples: a logger, or something that no worker can copy."""
    return isinstance(item, logging.Filterer) or (
        not isinstance(item, torch.Tensor) and _find_foreign(item) is not None
    )


def list_members(item: Any) -> Iterator[tuple[str, Any]]:
    """Direct members with the step that leads to them. Only dicts: other mappings may load items on access."""
    if isinstance(item, dict):
        yield from ((f"[{key!r}]", value) for key, value in islice(item.items(), _MOST_MEMBERS))
    elif isinstance(item, (list, tuple, set, frozenset)):
        yield from ((f"[{place}]", value) for place, value in enumerate(islice(item, _MOST_MEMBERS)))
    elif inspect.ismethod(item) or (inspect.isbuiltin(item) and not inspect.ismodule(item.__self__)):
        yield ".__self__", item.__self__
    elif isinstance(item, functools.partial):
        yield from ((".func", item.func), (".args", item.args), (".keywords", item.keywords))
    elif isinstance(item, functools._lru_cache_wrapper):
        kept = (each for each in gc.get_referents(item) if each is not vars(item))  # results, or a dict of them
        yield from ((".<cache>", each) for each in islice(kept, _MOST_MEMBERS))
    yield from ((f".{name}", value) for name, value in islice(_read_attributes(item).items(), _MOST_MEMBERS))
    if inspect.isfunction(item):
        yield from ((f".<closure {name}>", value) for name, value in sample_code.list_closure(item))


def _read_attributes(item: Any) -> dict[str, Any]:
    kind: type = type(item)
    slots = {name: value for name, slot in _list_slots(kind) if (value := _read_slot(slot, item)) is not None}
    try:
        return {**slots, **vars(item)}
    except TypeError:  # it has no __dict__
        return slots


@functools.lru_cache(maxsize=512)
def _list_slots(kind: type) -> tuple[tuple[str, Any], ...]:
    members = [member for base in kind.__mro__ if "__slots__" in vars(base) for member in vars(base).items()]
    return tuple((name, member) for name, member in members if inspect.ismemberdescriptor(member))


def _read_slot(slot: Any, item: Any) -> Any:
    with contextlib.suppress(AttributeError):  # nothing was set
        return slot.__get__(item)


def find_worker_hazards(dataset: Any, collate: Any = None) -> tuple[str, ...]:
    """Why worker processes would break or change this dataset's samples, each with its location."""
    found: dict[str, None] = {}
    held = [*walk(dataset), *walk(collate, "collate_fn")]
    found.update(dict.fromkeys(f"{path}{hazard}" for path, item in held if (hazard := _find_hazard(item)) is not None))
    inside = len(held)
    for path, owner, function in list_running(held):
        for state in sample_code.list_changes(function, type(owner)):
            if not is_in_shared_memory(_read_state(function, state, owner)):
                found[f"{path}{state} {_CHANGES}"] = None
        for state in sample_code.list_descriptors(function, type(owner)):
            if isinstance(_read_state(function, state, owner), int):  # not one that is still to be opened
                found[f"{path}{state} is an open file descriptor, and workers would share its position; {_PREAD}"] = (
                    None
                )
    for path, item in held[inside:]:
        if (foreign := _find_foreign(item)) is not None:
            found[f"{path}{foreign}"] = None
    return tuple(found)


def list_asking(dataset: Any, collate: Any = None) -> tuple[str, ...]:
    """The functions that run for a sample and ask which process they are in: a worker may give other samples."""
    held = [*walk(dataset), *walk(collate, "collate_fn")]
    running = (function for _, _, function in list_running(held))
    asking = (each for each in running if not _ASKS_PROCESS.isdisjoint(sample_code.list_names(each.__code__)))
    return tuple(dict.fromkeys(each.__qualname__ for each in asking))


def list_running(held: list[tuple[str, Any]]) -> Iterator[tuple[str, Any, Any]]:
    """The user's functions that may run for a sample of these objects, each as path, object and function. The objects
    that they read from globals, closures and their classes are added to `held`."""
    items = [item for _, item in held]
    known, read = set(map(id, items)), set[Any]()
    for place, function in sample_code.follow(items):
        (path, owner), outer = held[place], list[tuple[str, Any]]()
        yield path, owner, function
        if function not in read:
            outer += (*sample_code.list_globals(function), *sample_code.list_closure(function))
        if (function, type(owner)) not in read:
            outer += ((f"{path}.{name}", value) for name, value in _list_class_values(function, owner))
        read |= {function, (function, type(owner))}
        for name, value in outer:
            for path, item in () if id(value) in known else walk(value, name):
                if id(item) not in known and not inspect.isroutine(item):
                    known.add(id(item))
                    held.append((path, item))
                    items.append(item)


def _list_class_values(function: Any, owner: Any) -> Iterator[tuple[str, Any]]:
    """Attributes of the user's classes themselves, if the function names them."""
    hidden = set(_read_attributes(owner))
    for base in type(owner).__mro__:
        if not sample_code.is_installed(base):
            names = set(sample_code.list_names(function.__code__)) - hidden
            yield from ((name, value) for name, value in list(vars(base).items()) if name in names)
            hidden |= set(vars(base))


def _read_state(function: Any, state: str, item: Any) -> Any:
    """The value of state that a function of this object touches: ``.fd``, or `` (the outer FD)``; None if it is
    unknown."""
    if state.startswith("."):
        return _read_attributes(item).get(state[1:], inspect.getattr_static(type(item), state[1:], None))
    outer = sample_code.read_outer(function)
    return outer.get(state.removeprefix(" (the outer ").removesuffix(")"))


def is_in_shared_memory(value: Any) -> bool:
    """Whether it is a tensor in memory that all processes share. A sparse one has no storage to ask."""
    is_dense = isinstance(value, torch.Tensor) and value.device.type == "cpu" and value.layout is torch.strided
    return is_dense and value.is_shared()


def _find_hazard(item: Any) -> str | None:
    if (foreign := _find_foreign(item)) is not None:
        return foreign
    return None if (state := _find_epoch_state(item)) is None else f"{state} {_CHANGES}"


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
    if not hasattr(type(item), "__getitem__") or sample_code.is_framework(type(item)):
        return None
    if callable(getattr(item, "set_epoch", None)):
        return ".set_epoch()"
    return next((f".{name}" for name in _EPOCH_NAMES if name in _read_attributes(item)), None)


def draws_random(*roots: Any) -> tuple[str, ...]:
    """Names of transforms and functions reachable from the dataset whose code draws random numbers."""
    items = [item for root in roots for _, item in walk(root)]
    return list_draws(items, items)


def list_init_draws(init: Any) -> tuple[str, ...]:
    """The functions of a ``worker_init_fn`` that draw random numbers other than seeds."""
    drawing = (
        function
        for _, _, function in list_running(list(walk(init, "worker_init_fn")))
        if any(DRAWS.fullmatch(name) for name in {*sample_code.list_names(function.__code__)} - _SEEDS)
    )
    return tuple(dict.fromkeys(function.__qualname__ for function in drawing))


def list_draws(items: Sequence[Any], held: Sequence[Any]) -> tuple[str, ...]:
    """Names of the transforms and functions among `items` that draw random numbers, in samples made of all `held`."""
    ones = {item if inspect.isfunction(item) else type(item): item for item in items}.values()  # one of each class
    found = [item for item in ones if _find_draw(item, None) is not None]
    is_packaged = any(sample_code.is_packaged(base) for item in found for base in type(item).__mro__)
    called = _list_called_names(held) if is_packaged else None  # takes long in large datasets
    return tuple(dict.fromkeys(name for item in found if (name := _find_draw(item, called)) is not None))


def _find_draw(item: Any, called: set[str] | None) -> str | None:
    """The name of a transform or function that draws random numbers; None if it draws none. Of an installed package's
    class only what is `called` counts: a table has a method ``sample``, and a dataset one that shuffles it."""
    kind: type = type(item)
    if inspect.isfunction(item):
        return item.__qualname__.split(".")[-1] if draws_random_numbers(item) else None
    if _RANDOM_TRANSFORMS.match(kind.__name__):
        return kind.__name__
    for base in kind.__mro__:
        if sample_code.is_framework(base):
            continue
        counts = called if called is not None and sample_code.is_packaged(base) and "getattr" not in called else None
        for name, member in vars(base).items():
            function = _get_function(member)
            if name in _BEFORE_SAMPLES or (counts is not None and name not in counts):
                continue
            if function is not None and draws_random_numbers(function):
                return f"{kind.__name__}.{name}"
    return None


def _get_function(member: Any) -> Any:
    """The function behind a member of a class, a property's too; None if there is none."""
    member = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
    function = inspect.unwrap(member) if callable(member) else None
    return function if inspect.isfunction(function) else None


def _list_called_names(held: Sequence[Any]) -> set[str]:
    """Names of the methods that samples may call on any of these objects: entries, and all that functions with such
    names name in turn, those of installed packages too, with the strings of those that call ``getattr``."""
    names = set(sample_code.ENTRIES)
    for _, _, function in list_running([("", item) for item in held]):
        names.update(sample_code.list_names(function.__code__))
    for item in held:  # methods that are kept as attributes, and names for ``getattr``
        kept = _read_attributes(item).values()
        names.update(each.__name__ for each in kept if inspect.isroutine(each))
        names.update(each for each in kept if isinstance(each, str))
    bases = dict.fromkeys(base for item in held for base in type(item).__mro__ if sample_code.is_packaged(base))
    left = [(name, made) for base in bases for name, each in vars(base).items() if (made := _get_function(each))]
    while left:
        reached, left = [each for each in left if each[0] in names], [each for each in left if each[0] not in names]
        if not reached:
            break
        for _, function in reached:
            named = set(sample_code.list_names(function.__code__))
            consts = {each for code in sample_code.walk_code(function.__code__) for each in code.co_consts}
            names |= named - {"getattr"} | (consts if "getattr" in named else set())
    return names


def draws_random_numbers(function: Any, depth: int = 3) -> bool:
    """Whether a function names a way to draw random numbers, itself or in the user's functions that it names."""
    names = set(sample_code.list_names(function.__code__))
    if any(DRAWS.fullmatch(name) for name in names):
        return True
    called = [function.__globals__.get(name) for name in names] if depth else []
    return any(
        inspect.isfunction(other) and not sample_code.is_framework(other) and draws_random_numbers(other, depth - 1)
        for other in called
    )


def sample_bytes(dataset: Any) -> int | None:
    """Bytes of one sample, if known without taking one: from tensors that already exist."""
    if type(dataset) is not TensorDataset or not len(dataset):
        return None
    return sum(tensor.nbytes for tensor in dataset.tensors) // len(dataset)


def list_long(dataset: Any) -> tuple[str, ...]:
    """Containers with very many Python objects: forked workers copy each object they touch, so their memory grows."""
    found = []
    for path, item in walk(dataset):
        if isinstance(item, (list, tuple, dict)) and len(item) >= _MANY_OBJECTS:
            found.append(f"{path} holds {len(item) / 1e6:.1f} million Python objects")
    return tuple(found)

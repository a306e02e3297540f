"""Reads from a dataset's objects and code whether several threads can take samples from it at once. Takes no sample.

Worker processes have copies; threads share one dataset. So threads have more hazards: anything a sample leaves behind,
such as a lazily opened file or a cached sample, may be visible to another thread half done.
"""

from __future__ import annotations

import dis
import functools
import inspect
from collections import deque
from collections.abc import Iterator, Mapping
from types import CodeType
from typing import Any

import torch

from fastloop.evidence.samples import dataset as datasets
from fastloop.evidence.samples import random_draws, sample_code, writes

_REASONS: Mapping[str, str] = {
    datasets.SHARED: "is a connection or its client, and replies to several threads would get mixed up",
    datasets.POOL: "runs its own threads or processes, whose order the loading threads would change",
    datasets.DRAWS_ITSELF: "is a random generator, and it would be random which thread draws which number",
    datasets.TRAINING: "is part of the training, which continues while threads load",
    datasets.ITERATOR: "is an iterator, and it would be random which thread gets which item",
}
_CHANGES_ITSELF = (
    *("tokenizers.", "_io.BytesIO", "_io.StringIO", "io.BytesIO", "io.StringIO", "cv2.", "zstandard."),
    *("zlib.", "_bz2.", "_lzma.", "_hashlib.", "_blake2.", "pyexpat.", "encodings."),
)
"""Classes with a position or settings that each call changes."""
_BY_TORCH = frozenset(
    {"AutoAugment", "ColorJitter", "ElasticTransform", "GaussianBlur", "RandAugment", "RandomAdjustSharpness"}
    | {"RandomAffine", "RandomApply", "RandomAutocontrast", "RandomCrop", "RandomEqualize", "RandomErasing"}
    | {"RandomGrayscale", "RandomHorizontalFlip", "RandomInvert", "RandomPerspective", "RandomPosterize"}
    | {"RandomResizedCrop", "RandomRotation", "RandomSolarize", "RandomVerticalFlip", "TrivialAugmentWide"}
)
"""torchvision transforms that draw random numbers only through torch functions that accept a generator."""
_WRITTEN = "is written while a sample is made, and threads would write it concurrently"
_DRAWN = "draws random numbers, and it would be random which thread draws which"
_NOT_FOR_THREADS = frozenset({"netCDF4", "tables", "osgeo", "pyhdf", "matplotlib", "lseek"})
"""Packages whose libraries only one thread may call at a time, and that do not lock them; and ``os.lseek``, which moves
the position of a file for all threads."""


def find_thread_hazards(dataset: Any, collate: Any = None) -> tuple[str, ...]:
    """Why threads that share this dataset might get different samples than one thread, each with its location."""
    found = list[str]()
    held = [*datasets.walk(dataset), *datasets.walk(collate, "collate_fn")]
    queues = [path for path, item in held if isinstance(item, deque)]
    for path, item in held:
        found += [f"{path}{hazard}" for hazard in (_find_foreign(item), _find_installed(item)) if hazard]
    functions, reached = datasets.list_running(held)
    for path, item, function in functions:
        found += [f"{path}{hazard}" for hazard in _list_hazards(function, type(item))]
        if "rotate" in function.__code__.co_names:  # pictures also have a method of this name, which changes nothing
            found += [f"{queue} {_WRITTEN}" for queue in queues]
    found += [f"{path}{foreign}" for path, item in reached if (foreign := _find_foreign(item))]
    return tuple(dict.fromkeys(found))


def list_shared_draws(*roots: Any) -> tuple[str, ...]:
    """The results of `draws_random` that cannot get one generator per thread."""
    held = [item for root in roots for _, item in datasets.walk(root)]
    return random_draws.list_draws([item for item in held if not _draws_by_torch(type(item))], held)


def _draws_by_torch(kind: type) -> bool:
    return kind.__module__.startswith("torchvision.transforms.") and kind.__name__ in _BY_TORCH


def _list_hazards(function: Any, kind: type) -> Iterator[str]:
    """Hazards of one of the user's functions, on an object of this kind."""
    names = function.__code__.co_names
    if (written := _find_write(function, kind)) is not None:
        yield f"{written} {_WRITTEN}"
    for name in names:
        if isinstance(inspect.getattr_static(kind, name, None), functools.cached_property):
            yield f".{name} {_WRITTEN}"
    if random_draws.draws_random_numbers(function):
        yield f" ({function.__qualname__}) {_DRAWN}"
    for name in sorted(_NOT_FOR_THREADS.intersection(names)):
        yield f" ({function.__qualname__}) uses {name}, which is not thread-safe"


def _find_write(function: Any, kind: type) -> str | None:
    """What a function on an object of this kind writes outside its local variables, where another thread may access
    it: ``.cache``, or `` (the outer CACHE)``; None if it writes nothing."""
    if sample_code.parse(function) is None:
        return _find_stores(function.__code__)
    return next(sample_code.list_touched(function, writes.list_targets, kind), None)


def _find_stores(code: CodeType) -> str | None:
    """The same from bytecode, for a function without source; it does not tell which object a write goes to."""
    stores = ("STORE_ATTR", "STORE_SUBSCR", "STORE_GLOBAL", "STORE_SLICE", "DELETE_ATTR", "DELETE_SUBSCR")
    for each in sample_code.walk_code(code):
        changes = {name for name in each.co_names if writes.is_change(name) or name in writes.FILLS}
        if changes or any(step.opname in stores for step in dis.get_instructions(each)):
            return f" (something in {each.co_name}, whose source cannot be read)"
    return None


def _find_installed(item: Any) -> str | None:
    """The hazard of a dataset class from an installed package: reads only its ``__getitem__``."""
    function = inspect.getattr_static(type(item), "__getitem__", None)
    if not inspect.isfunction(function) or not sample_code.is_installed(function):
        return None
    if random_draws.draws_random_numbers(function):
        return f" ({type(item).__name__}) {_DRAWN}"
    written = _find_write(function, type(item))
    return None if written is None else f"{written} {_WRITTEN}"


def _find_foreign(item: Any) -> str | None:
    """Why several threads cannot use an object at once, regardless of its use."""
    if inspect.isroutine(item) or inspect.ismodule(item) or isinstance(item, type):
        return None
    kind = type(item)
    if f"{kind.__module__}.{kind.__name__}".startswith(_CHANGES_ITSELF):
        return f" ({kind.__name__}) keeps a position or settings that each use changes"
    if isinstance(item, torch.nn.Module) and item.training and getattr(item, "track_running_stats", False):
        return f" ({kind.__name__}) is in training mode, so each use changes its running statistics; call .eval() on it"
    if (handle := datasets.find_handle(item)) is not None:
        return f" is an open {handle} handle, which threads would share; open it in __getitem__ instead"
    reason = datasets.find_reason(kind)  # type: ignore[arg-type]
    return None if reason is None else f" ({kind.__name__}) {_REASONS[reason]}"

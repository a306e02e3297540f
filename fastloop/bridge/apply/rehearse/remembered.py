"""What earlier runs of this model found out: rehearsals, micro-batches, numbers of workers.

They are optional: a cache that cannot be read or written is treated as empty.
"""

from __future__ import annotations

import contextlib
import hashlib
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.nn.parameter import is_lazy

from fastloop.evidence import machine
from fastloop.evidence.gpu.nvml import read_driver
from fastloop.feeds.workers.more_workers import FoundWorkers
from fastloop.records import store

FILE = "rehearsals.json"
MOST = 200


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A rung that failed in a rehearsal."""

    rung: str = ""
    why: str = ""
    date: str = ""


@dataclass(frozen=True, kw_only=True)
class KeptSize:
    """The micro-batch that a search found, as in `FoundSize`."""

    size: int = 0
    uncompiled: int | None = None
    later: int | None = None


@dataclass(frozen=True, kw_only=True)
class RehearsalsFile:
    """``rehearsals.json`` in the cache, by fingerprint of rung, model and versions."""

    schema: ClassVar[int] = store.SCHEMA
    failures: Mapping[str, Failure] = field(default_factory=dict)
    first_call_s: Mapping[str, float] = field(default_factory=dict)
    """How much longer a rung's first call took than its second: mostly compile time."""
    found_sizes: Mapping[str, KeptSize] = field(default_factory=dict)
    found_workers: Mapping[str, FoundWorkers] = field(default_factory=dict)


class Remembered:
    """Reads and writes this model's entries in the file, by fingerprint."""

    def __init__(
        self, modules: Sequence[torch.nn.Module], device: torch.device, optimizers: Sequence[Any] = ()
    ) -> None:
        self.optimizers = describe_optimizers(optimizers)
        """Decides, with the model, whether a rung that changes optimizers works."""
        self.folder = machine.find_cache_home() / "fastloop"
        self._model = fingerprint(modules, device)

    @property
    def path(self) -> Path:
        return self.folder / FILE

    def find_failure(self, rung: str, settings: Any) -> Failure | None:
        return self._read().failures.get(self._make_key(rung, settings))

    def find_first_call_s(self, rung: str, settings: Any) -> float | None:
        return self._read().first_call_s.get(self._make_key(rung, settings))

    def keep_failure(self, rung: str, settings: Any, why: str) -> None:
        date = datetime.now(timezone.utc).date().isoformat()
        self._keep("failures", self._make_key(rung, settings), Failure(rung=rung, why=why, date=date))

    def keep_first_call_s(self, rung: str, settings: Any, seconds: float) -> None:
        self._keep("first_call_s", self._make_key(rung, settings), seconds)

    def find_size(self, settings: str) -> KeptSize | None:
        return self._read().found_sizes.get(self._make_key("", settings))

    def keep_size(self, settings: str, size: KeptSize) -> None:
        self._keep("found_sizes", self._make_key("", settings), size)

    def find_workers(self, loader: str) -> FoundWorkers | None:
        return self._read().found_workers.get(self._make_key("", loader))

    def keep_workers(self, loader: str, found: FoundWorkers) -> None:
        self._keep("found_workers", self._make_key("", loader), found)

    def _make_key(self, rung: str, settings: Any) -> str:
        return _digest(rung, repr(settings), self._model)

    def _read(self) -> RehearsalsFile:
        return store.load(self.path, RehearsalsFile) or RehearsalsFile()

    def _keep(self, table: str, key: str, value: object) -> None:
        """Save an entry; a table holds at most `MOST`, the newest last."""
        known = self._read()
        others = [each for each in getattr(known, table).items() if each[0] != key]
        with contextlib.suppress(OSError):
            store.save(self.folder, {FILE: replace(known, **{table: dict([*others[-(MOST - 1) :], (key, value)])})})


def fingerprint(modules: Sequence[torch.nn.Module], device: torch.device) -> str:
    """Hash what decides whether a rung works: the modules' classes and code, parameter shapes, versions, device."""
    parts: list[Any] = [machine.read_versions((machine.DISTRIBUTION,)), torch.__version__, device.type]
    if device.type == "cuda":
        parts += [torch.cuda.get_device_name(device), read_driver()]
    kinds: dict[type, None] = {}
    for module in modules:
        kinds.update(dict.fromkeys(type(inner) for inner in module.modules()))
        for name, each in module.named_parameters():
            # A lazy module's parameters have no shape before its first call.
            parts.append((name, None if is_lazy(each) else tuple(each.shape), str(each.dtype)))
    parts += [f"{kind.__module__}.{kind.__qualname__}" for kind in kinds]
    return _digest(*map(repr, [*parts, *_hash_code(kinds)]))


def describe_optimizers(optimizers: Sequence[Any]) -> str:
    """Hash what decides whether optimizers can be changed: their classes and code, settings, and parameters. Of numbers
    such as learning rates, which schedules change, only whether they are zero."""
    parts: list[Any] = list(_hash_code({type(each): None for each in optimizers}))
    for each in optimizers:
        parts.append(f"{type(each).__module__}.{type(each).__qualname__}")
        for group in getattr(each, "param_groups", ()):
            parts.append(sorted((name, _describe_setting(value)) for name, value in group.items() if name != "params"))
            parts.append([(tuple(one.shape), str(one.dtype), one.device.type) for one in group["params"]])
    return _digest(*map(repr, parts))


def _describe_setting(setting: Any) -> str:
    if isinstance(setting, float):
        return f"float {setting != 0}"
    if isinstance(setting, (list, tuple)):
        return ", ".join(map(_describe_setting, setting))
    return repr(setting) if isinstance(setting, (bool, int, str, type(None))) else type(setting).__qualname__


def _hash_code(kinds: Iterable[type]) -> Iterator[str]:
    """Hash the files that define these classes, except torch's own."""
    names = {kind.__module__ for kind in kinds if not kind.__module__.startswith("torch.")}
    for file in sorted({getattr(sys.modules.get(name), "__file__", None) or "" for name in names}):
        with contextlib.suppress(OSError):  # code that was typed into an interpreter has no file
            yield hashlib.sha256(Path(file).read_bytes()).hexdigest()


def _digest(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:24]

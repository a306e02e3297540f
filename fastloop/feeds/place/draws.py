"""Saves and restores the random state behind a sampler's order, so that it draws the same order again.

Holds only plain values and tensors, so that a checkpoint with them loads without fastloop, also with ``weights_only``.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SubsetRandomSampler, WeightedRandomSampler
from torch.utils.data.distributed import DistributedSampler

from fastloop.evidence.samples import sample_code
from fastloop.evidence.samples.dataset import walk
from fastloop.evidence.samples.random_draws import find_system_seed
from fastloop.feeds.lazy_loader import draw_seed, name_sampler

Order = dict[str, dict[str, Any]]
"""``own``: the sampler's generators; ``values``: its attributes; ``streams``: the global random streams. Keys are the
paths or names of what each entry belongs to."""
_KNOWN = ("torch", "lightning", "pytorch_lightning", "lightning_fabric", "numpy", "builtins", "fastloop")
"""Packages whose samplers draw only from torch's generators and keep no state except ``seed`` and ``epoch``."""
_SHUFFLERS = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
_SCALARS = (bool, int, float, str, type(None))


def explain_lost_place(loader: Any, ranks: int) -> str | None:
    """Return why a run cannot resume in the middle of an epoch; None if it can, or if the loader saves its own state.

    Args:
        ranks: processes that train; a checkpoint holds only the first one's state.
    """
    if hasattr(loader, "state_dict"):
        return None
    if not isinstance(loader, DataLoader):
        return f"{type(loader).__name__} does not reveal its order"
    if isinstance(loader.dataset, IterableDataset):
        return f"{type(loader.dataset).__name__} is an IterableDataset, whose order cannot be drawn again"
    sampler = getattr(loader, name_sampler(loader))
    with contextlib.suppress(TypeError, NotImplementedError):  # the loader or its sampler has no length
        if len(loader) != len(sampler):
            return f"{type(loader).__name__} has a different number of batches than its sampler"
    parts = dict(_list_parts(loader))
    for path, item in parts.items():
        for state in sample_code.list_changed_state(item):
            if not isinstance(getattr(item, state.removeprefix("."), parts), _SCALARS):
                return f"{path}{state} changes during iteration, and is not a plain value"
            if ranks > 1:
                return f"{path}{state} changes during iteration, and only rank 0's is saved"
    if (found := find_system_seed(parts)) is not None:
        return f"{found} draws from the system's randomness, which cannot be drawn again"
    if ranks > 1 and not any(isinstance(item, DistributedSampler) for item in parts.values()):
        found = next((path for path, item in parts.items() if _is_source(item)), None)
        if found is not None:
            return f"{found} is a separate generator on each rank, and only rank 0's is saved"
        if any(isinstance(item, _SHUFFLERS) for item in parts.values()):
            return "each rank draws its own order, and only rank 0's is saved"
    return None


class Draws:
    """All state that decides the order in which a loader's sampler draws.

    Args:
        ranks: processes that train. With several, state that may differ between ranks is neither read nor restored.
    """

    def __init__(self, loader: DataLoader[Any], ranks: int) -> None:
        parts = dict(_list_parts(loader))
        known = all(_is_known(type(item)) for item in parts.values())
        self.draws_at_once = known
        """The sampler draws from the global streams only when it makes an epoch's first batch."""
        shared = ranks == 1 or (known and any(isinstance(item, DistributedSampler) for item in parts.values()))
        self._seeds_workers: Any = None if loader.persistent_workers else loader.generator
        """Generator of each epoch's worker seed, drawn before the sampler's order; persistent workers keep theirs."""
        self._own = {path: item for path, item in parts.items() if shared and _is_source(item)}
        self._streams: dict[str, Any] = {"torch": torch.default_generator} if shared else {}
        if shared and not known:
            self._streams["random"] = random
            if "numpy" in sys.modules:
                self._streams["numpy"] = sys.modules["numpy"].random
        self._values = {
            f"{path}.{name}": (item, name)
            for path, item in parts.items()
            if shared or isinstance(item, DistributedSampler)
            for name in _list_values(item)
        }

    def read(self, *, between_epochs: bool = False) -> Order:
        """Return the state that decides the order of the epoch that begins now. Between epochs, return only what the
        next epoch inherits: the global streams move on, and ``set_epoch`` sets the epoch's number."""
        own = {path: _read_source(item) for path, item in self._own.items()}
        kept = dict(self._values)
        if between_epochs:
            own |= {path: _draw_seed(item) for path, item in self._own.items() if item is self._seeds_workers}
            kept = {path: each for path, each in kept.items() if not callable(getattr(each[0], "set_epoch", None))}
        return {
            "own": own,
            "values": {path: getattr(*each) for path, each in kept.items()},
            "streams": {} if between_epochs else self._read_streams(),
        }

    def put_back(self, order: Mapping[str, Mapping[str, Any]]) -> None:
        """Restore the sampler's own state; this and later epochs continue from there."""
        for path, state in order["own"].items():
            if path in self._own:
                _write_source(self._own[path], state)
        for path, value in order["values"].items():
            if path in self._values:
                setattr(*self._values[path], value)

    @contextlib.contextmanager
    def on_streams(self, states: dict[str, Any]) -> Iterator[None]:
        """Set the global streams to `states` inside the context; on exit, update `states` with their new positions and
        restore the streams."""
        outside = self._read_streams()
        self._write_streams(states)
        try:
            yield
        finally:
            states.update(self._read_streams())
            self._write_streams(outside)

    def _read_streams(self) -> dict[str, Any]:
        return {name: _read_source(source) for name, source in self._streams.items()}

    def _write_streams(self, states: Mapping[str, Any]) -> None:
        for name, source in self._streams.items():
            if name in states:
                _write_source(source, states[name])


def _list_parts(loader: DataLoader[Any]) -> Iterator[tuple[str, Any]]:
    """Yield the sampler and its parts, except the dataset."""
    inside = {id(item) for _, item in walk(loader.dataset)}
    sampler = getattr(loader, name_sampler(loader))
    yield from ((path, item) for path, item in walk(sampler, "sampler") if id(item) not in inside)


def _list_values(item: Any) -> list[str]:
    """List the plain attributes that decide an order: a seed, an epoch, and those that iterating changes."""
    names = ("seed", "epoch", *(state.removeprefix(".") for state in sample_code.list_changed_state(item)))
    own = getattr(item, "__dict__", {})
    return [name for name in dict.fromkeys(names) if type(own.get(name)) in (bool, int, float, str)]


def _is_known(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in _KNOWN or kind is random.Random


# -- random sources: torch's generators, Python's, NumPy's -------------------------------------------------------------


def _is_source(item: Any) -> bool:
    if isinstance(item, (torch.Generator, random.Random)):
        return True
    return type(item).__module__.startswith("numpy.random") and hasattr(item, "random")


def _draw_seed(generator: torch.Generator) -> torch.Tensor:
    """Return the generator's state after a loader has drawn the seed of an epoch's workers."""
    ahead = torch.Generator().set_state(generator.get_state())
    draw_seed(ahead)
    return ahead.get_state()


def _read_source(source: Any) -> Any:
    if isinstance(source, torch.Generator):
        return source.get_state()
    if hasattr(source, "getstate"):
        version, numbers, gauss = source.getstate()
        return [version, list(numbers), gauss]
    return _make_plain(source.get_state(legacy=False) if hasattr(source, "get_state") else source.bit_generator.state)


def _write_source(source: Any, state: Any) -> None:
    if isinstance(source, torch.Generator):
        source.set_state(state)
    elif hasattr(source, "setstate"):
        source.setstate((state[0], tuple(state[1]), state[2]))
    elif hasattr(source, "set_state"):
        source.set_state(state)
    else:
        source.bit_generator.state = state


def _make_plain(state: Any) -> Any:
    """Turn NumPy's arrays and numbers into lists and numbers."""
    if isinstance(state, dict):
        return {name: _make_plain(value) for name, value in state.items()}
    return state.tolist() if hasattr(state, "tolist") else state

"""Tracks the sizes of a module's arguments across calls: which dimensions vary, and which calls deserve a graph."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

import torch

GRAPHS = 2
"""Most graphs of a module in training, and in evaluation. A graph with breaks counts once, with all its pieces."""
RARE = 0.1
"""Sizes that fit no graph, such as an epoch's short last batch, are exceptions up to this share of calls."""
LEARN = 2
"""Calls with new sizes that run eagerly before a second graph is made; they show which dimensions vary."""
STORM = 0.5
"""Once both graphs exist, all calls run eagerly if more than this share of them fits neither."""
RECENT, ENOUGH = 50, 10
"""These shares are over the last RECENT calls; a verdict needs at least ENOUGH of them."""
DEPTH, MEMBERS = 5, 500
"""Limits on the search through arguments: what lies beyond, such as behind a reference to the trainer, is not part of a
batch."""

_CLOSED = (type(None), str, int, float, torch.nn.Module, torch.dtype, torch.device)
_PLACES = tuple(f"args[{place}]" for place in range(64))

Sizes = dict[str, tuple[int, ...]]
"""Shape of each tensor among the arguments, by its path."""


def find_tensors(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Find the tensors among the arguments of a call, by path.

    Looks into mappings, lists, tuples and, unlike `batch_tree`, the attributes of any object, such as a graph library's
    batch.
    """
    found: dict[str, torch.Tensor] = {}
    seen = set[int]()
    level = [*zip(_PLACES, args, strict=False), *kwargs.items()]
    for _ in range(DEPTH):
        inside: list[tuple[str, Any]] = []
        for way, value in level:
            if isinstance(value, torch.Tensor):
                if not value.is_nested:  # the compiler knows that a nested tensor's lengths vary
                    found[way] = value
            elif not isinstance(value, _CLOSED) and id(value) not in seen and len(seen) < MEMBERS:
                seen.add(id(value))
                inside += ((f"{way}.{key}", member) for key, member in islice(_open(value), MEMBERS))
        if not inside:
            break
        level = inside
    return found


def read_sizes(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sizes:
    """Read the shapes of the tensors among the arguments of a call."""
    return {way: tensor.shape for way, tensor in find_tensors(args, kwargs).items()}


def describe_kind(module: torch.nn.Module) -> tuple[Any, ...]:
    """Describe which modules can share graphs: those with the same class and parameter shapes."""
    return (type(module), *(parameter.shape for parameter in module.parameters()))


def find_changes(before: Sizes, after: Sizes) -> dict[int, int]:
    """Map sizes in one batch to those in another; leave out sizes that some dimension kept, since these do not show
    which dimensions change."""
    pairs = [
        pair
        for way in before.keys() & after.keys()
        if len(before[way]) == len(after[way])
        for pair in zip(before[way], after[way], strict=True)
    ]
    kept = {old for old, new in pairs if old == new}
    return {old: new for old, new in pairs if old not in kept}


def _open(value: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(value, (list, tuple)):
        return enumerate(value)
    if isinstance(value, Mapping):
        return value.items()
    return getattr(value, "__dict__", {}).items()


class Seen:
    """Records which dimensions varied across calls."""

    def __init__(self) -> None:
        self.varying: dict[str, frozenset[int]] = {}
        self._first: Sizes = {}

    def note(self, sizes: Sizes) -> None:
        """Learn from one more call."""
        for way, shape in sizes.items():
            first = self._first.setdefault(way, shape)
            if first != shape and len(first) == len(shape):
                differ = {dim for dim, (a, b) in enumerate(zip(first, shape, strict=True)) if a != b}
                self.varying[way] = self.varying.get(way, frozenset()) | differ


class Fitting:
    """Tells which calls fit one graph: sizes equal those it was made for, or are 2 or more in dynamic dimensions."""

    def __init__(self, sizes: Sizes, varying: Mapping[str, Collection[int]]) -> None:
        self._varying = dict(varying)
        self._pattern = self._mask_varying(sizes)
        self._latest = sizes

    def __call__(self, sizes: Sizes) -> bool:
        if sizes == self._latest:  # nearly always true, and fast to check
            return True
        fits = self._mask_varying(sizes) == self._pattern
        if fits:
            self._latest = sizes
        return fits

    def _mask_varying(self, sizes: Sizes) -> Sizes:
        """Replace sizes that may vary by -1. Sizes 0 and 1 may not: compilers specialize on them."""
        masked = dict(sizes)
        for way, dims in self._varying.items():
            if way in sizes:
                masked[way] = tuple(-1 if at in dims and size > 1 else size for at, size in enumerate(sizes[way]))
        return masked


class Replays:
    """Counts the replayed steps of this process, in which no module is called."""

    count = 0


class Resized:
    """Counts how often this process changed the size of its micro-batches: new sizes are no exceptions then."""

    count = 0


class GraphLimit:
    """Counts a module's graphs in training, or in evaluation, and the calls that run without one.

    Attributes:
        graphs: graphs made so far: calls in which something was compiled.
        calls, eager: all calls since the first graph, and those that ran eagerly.
        spent: why every later call runs eagerly; empty while graphs are in use.
    """

    def __init__(self) -> None:
        self.graphs = self.calls = self.eager = 0
        self.spent = ""
        self.seen = Seen()
        self._fitting: list[Fitting] = []
        self._recent = deque[bool](maxlen=RECENT)
        self._replays, self._resized = Replays.count, Resized.count

    @property
    def exhausted(self) -> bool:
        return self.graphs >= GRAPHS

    def forget_graphs(self) -> None:
        """Drop graphs that are no longer correct; keep what is known about sizes."""
        self.graphs, self.spent = 0, ""
        self._fitting.clear()
        self._recent.clear()

    def fits(self, sizes: Sizes) -> bool:
        """Whether a graph was made for such sizes."""
        if not any(fits(sizes) for fits in self._fitting):
            return False
        self._resized = Resized.count
        return True

    def deserves(self) -> bool:
        """Whether new sizes get a graph: the first sizes do, those that we chose, and others once they are no longer
        exceptions. Steps that were replayed count as usual ones."""
        if self.exhausted:
            return False
        replayed, self._replays = Replays.count - self._replays, Replays.count
        self._recent.extend([False] * min(replayed, RECENT))
        new, is_chosen, self._resized = sum(self._recent), Resized.count > self._resized, Resized.count
        return not self._fitting or is_chosen or (new >= LEARN and new > RARE * len(self._recent))

    def expect(self, sizes: Sizes, varying: Mapping[str, Collection[int]]) -> None:
        """Register the sizes that the next graph is made for."""
        self._fitting.append(Fitting(sizes, varying))

    def count(self, *, captured: bool, eager: bool) -> None:
        """Count a call, whether it captured a graph, and whether it ran eagerly because no graph fitted."""
        self.calls += 1
        self.eager += eager
        if captured:
            self.graphs += 1
            self._recent.clear()
        if captured or self.spent:
            return
        self._recent.append(eager)
        if self.exhausted and len(self._recent) >= ENOUGH and sum(self._recent) > STORM * len(self._recent):
            self.spent = f"{sum(self._recent)} of the last {len(self._recent)} calls matched none of {GRAPHS} graphs"


def merge(*each: Mapping[str, frozenset[int]]) -> dict[str, list[int]]:
    """Merge the dimensions that vary in any of these, sorted."""
    ways = dict.fromkeys(way for varying in each for way in varying)
    return {way: sorted(frozenset[int]().union(*(varying.get(way, ()) for varying in each))) for way in ways}

"""Cache the part of each sample that never changes: read and decode once, augment anew in every epoch.

Faster because  later epochs copy a decoded image from memory instead of decoding it again. Rows that are in memory
                already (a TensorDataset) are picked a batch at a time, on the device if they fit there.
Costs           space for the decoded samples in shared memory, on disk or on a server; the first epoch only fills it.
Don't use when  each sample is read only once, the decoded samples fit nowhere, or loading is not the bottleneck.
Evidence        the hit rate: share of requested samples that were in the store; batches made on the device, or at once
Source          https://docs.pytorch.org/docs/stable/data.html#dataset-types
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from fastloop.errors import ConfigError, NotApplicable, require_positive
from fastloop.evidence.worker_limits import LITTLE_SHM_BYTES, count_draws
from fastloop.feeds.cache.wanted import KeptSamples, compute_share
from fastloop.feeds.device_store.wanted import SHARE, explain_no_engine, plan_on_device
from fastloop.feeds.rows.wanted import explain_no_rows, plan_rows
from fastloop.records.card import Card, ClimbState, Settings, Variant
from fastloop.records.facts import Facts, LoaderFacts, PrefixFacts, RowFacts, format_bytes
from fastloop.records.images import ImageFacts, RandomResizedCrop
from fastloop.records.measurement import Measurement
from fastloop.records.plan import Change, Verdict, say_count
from fastloop.records.readings import is_worth_handing_over, loads_little_for_validation, read_loader

SHARE_OF_SHM, SHARE_OF_MEMORY, SHARE_OF_DISK = 0.8, 0.5, 0.8
"""Shares of the free space. Files in shared memory use memory, which the training needs too."""
LEAST_SHARE = 0.5
"""Smallest share of the samples that is stored if no size is set: the same memory can hold more of the files, which are
smaller."""
LITTLE_BYTES = 2 * 10**8
"""`auto` may put pictures on a GPU if they take no more than this: 50,000 of 32 x 32 pixels."""
LITTLE_ROW_SHARE = 0.02
"""Share of the GPU's free memory that rows may take unless the user sets ``store: device`` or ``size_gb``."""
ENGINES = ("dali", "nodes")
"""Rungs that make the batches, in place of a store on the device."""


def _list_variants(state: ClimbState) -> Iterator[Variant]:
    """Try keeping decoded samples if a trial repeats them, and keeping all pictures on the device from the start."""
    if state.epochs_end:
        yield Variant(changes="engine")
    if state.on_cuda and state.image_files:
        replaced = tuple(engine for engine in ENGINES if engine in state.stack)
        device = {"store": "device"}
        yield Variant(name="device", settings=(device,), changes="engine", together=True, replaces=replaced)


def _applies(seen: Measurement) -> bool:
    decodes = read_loader(seen).get("decode_ms") is not None
    return _picks_rows(seen) or (decodes and is_worth_handing_over(seen))


def _picks_rows(seen: Measurement) -> bool:
    return read_loader(seen).get("rows") is not None


def _pick_for_validation(seen: Measurement) -> tuple[Settings, str] | None:
    """Pick validation rows only if the train loader has rows too: otherwise the rung does not apply to the training."""
    refused = seen.evidence.get("refused") or {}
    has_rows = _picks_rows(seen) and read_loader(seen).get("validation_rows") is not None
    if not has_rows or "cache" in refused or loads_little_for_validation(seen):
        return None
    return {"enabled": True}, "with the cache rung, all rows of a validation batch are picked at once"


CARD = Card(
    family="feed",
    does=lambda seen: (
        "with the cache rung, all rows of a batch are picked at once"
        if _picks_rows(seen)
        else "the cache keeps decoded samples, so that later epochs need not decode them again"
    ),
    answers={"data_wait": 3, "decoding": 2, "mostly_decoding": 1, "picking": 1, "validation": 1},
    applies=_applies,
    replaces_loader=_picks_rows,
    remedies={"validation": _pick_for_validation},
    variants=_list_variants,
)


@dataclass(frozen=True, kw_only=True)
class Cache:
    """Samples stored as they are before the random transforms. For train loaders; in validation loaders, only rows are
    picked at once."""

    enabled: bool = False
    store: Literal["auto", "device", "shm", "disk", "redis"] = "auto"
    """shm = shared memory, for this run only; disk and redis persist for later runs. device = all pictures on the
    device, which also makes the batches, if these are bit-identical to those of a loader without workers. auto = the
    device if that is a GPU and the pictures are few and need no resizing, else shm if the samples fit, else disk if
    `path` is set, else as many as fit into shm."""
    size_gb: float | Literal["auto"] = "auto"
    """Most space to use (1 GB = 10^9 bytes); auto = what the samples need, up to a share of the free space."""
    path: str | None = None
    """Directory of the disk store; null = the user's cache directory (XDG_CACHE_HOME)."""
    url: str | None = None
    """Address of the server: redis://host:port/0. A password is read from FASTLOOP_REDIS_PASSWORD."""

    def __post_init__(self) -> None:
        why, do = "a store of size zero keeps nothing", "write gigabytes or auto, or cache.enabled: false"
        require_positive("cache.size_gb", self.size_gb, why=why, do=do)
        server = "write rungs.cache.url: redis://host:6379/0"
        if self.store == "redis" and not self.url:
            raise ConfigError(key="cache.store", got="cache.store: redis", why="the server is not known", do=server)
        if self.url and "@" in self.url:
            why, do = "it would be written into run directories", f"{server}, and set FASTLOOP_REDIS_PASSWORD"
            raise ConfigError(key="cache.url", got="cache.url with a name or password", why=why, do=do)

    def plan(self, facts: Facts) -> Change:
        """Request a store if part of each sample can be cached, and samples are requested more than once."""
        if facts.loader is None:
            engines = ("loader.engine", "evaluation.engine")
            may_want = {"device": engines, "auto": (*engines, "dataset.cache")}
            return Change(waits_for="the train loader", may_want=may_want.get(self.store, ("dataset.cache",)))
        if facts.evaluates:
            return self._plan_validation(facts)
        if isinstance(facts.loader.rows, RowFacts) and self.store in ("auto", "device"):
            return plan_rows(facts, facts.loader, self._most_bytes, share=self._find_row_share())
        if self.store == "device" or self._suits_device(facts, facts.loader):
            return plan_on_device(facts, facts.loader, self._most_bytes)
        prefix = self._find_prefix(facts.loader)
        draws = count_draws(facts.loader, facts)
        if self.store in ("auto", "shm") and draws is not None and draws <= prefix.samples:
            raise NotApplicable(
                f"the run draws {draws:,} samples from {prefix.samples:,}: too few repeats to pay off; write"
                " cache.store: disk to keep them for later runs"
            )
        store, budget = self._choose(facts.loader, prefix, facts)
        share = compute_share(prefix, budget)
        if share < LEAST_SHARE and self.size_gb == "auto":
            raise NotApplicable(
                f"{prefix.samples:,} samples need {_format_need(prefix)}, and {store} only has room for"
                f" {share:.0%} of them; write cache.size_gb, or cache.path for another disk"
            )
        want = KeptSamples(store=store, budget_bytes=budget, prefix=prefix, path=self.path, url=self.url)
        left = {"shm_free_bytes": max(0, facts.shm_free_bytes - (budget or 0))} if facts.shm_free_bytes else {}
        note = _describe(prefix, store, budget, share)
        return Change(wants={"dataset.cache": want}, notes=(note,), facts=left if store == "shm" else {})

    def goes_first(self, facts: Facts) -> bool:
        """Whether to plan this rung before other engines: for few small pictures, because the device makes such batches
        faster than anything else decodes them."""
        return facts.loader is not None and not facts.evaluates and self._suits_device(facts, facts.loader)

    def _plan_validation(self, facts: Facts) -> Change:
        """Pick rows at once for validation too; other validation loaders do not change."""
        assert facts.loader is not None
        if not isinstance(facts.loader.rows, RowFacts) or explain_no_rows(facts, facts.loader) is not None:
            return Change()
        planned = plan_rows(facts, facts.loader, self._most_bytes, share=self._find_row_share())
        return Change(wants={"evaluation.engine": planned.wants["loader.engine"]})

    def without_engine(self) -> Cache | None:
        """Return what `auto` chooses if the device cannot keep the pictures; None if the store is not `auto`."""
        return dataclasses.replace(self, store="shm") if self.store == "auto" else None

    def _suits_device(self, facts: Facts, loader: LoaderFacts) -> bool:
        """Whether `auto` keeps the pictures on the device: they take little memory, batches are little work there, and
        they equal those of the loader as configured, including its workers."""
        if (self.store, self.size_gb, self.path, facts.device) != ("auto", "auto", None, "cuda") or facts.strict:
            return False  # strict: pin and prefetch, which have nothing to do then, would be errors
        if explain_no_engine(facts, loader) is not None or (loader.num_workers and loader.draws_random):
            return False
        need = None if isinstance(loader.prefix, str) else _need(loader.prefix)
        resizes = isinstance(loader.images, ImageFacts) and any(
            isinstance(step, RandomResizedCrop) for step in loader.images.steps
        )
        return not resizes and need is not None and need <= LITTLE_BYTES

    @property
    def _most_bytes(self) -> int | None:
        return None if self.size_gb == "auto" else int(self.size_gb * 1e9)

    def _find_row_share(self) -> float:
        """Share of the device's free memory that rows may take if no size is set."""
        return SHARE if self.store == "device" else LITTLE_ROW_SHARE

    def _find_prefix(self, loader: LoaderFacts) -> PrefixFacts:
        if not loader.is_dataloader:
            raise NotApplicable(f"{loader.kind} is not a DataLoader: its samples are unknown")
        if not loader.map_style:
            raise NotApplicable("samples of an iterable dataset have no index")
        if loader.engine is not None:
            raise NotApplicable(f"{loader.engine} reads and decodes the files itself")
        if isinstance(loader.prefix, str):
            raise NotApplicable(loader.prefix)
        if not loader.prefix.names_files and self.store in ("disk", "redis"):
            raise NotApplicable(
                f"it is unknown which files {loader.prefix.what.removeprefix('what ')} reads, so samples kept in"
                f" {self.store} would go stale when a file changes; use @cached_prefix(file=...)"
            )
        return loader.prefix

    def _choose(
        self, loader: LoaderFacts, prefix: PrefixFacts, facts: Facts
    ) -> tuple[Literal["shm", "disk", "redis"], int | None]:
        """Choose the store, and its size in bytes."""
        need, size = _need(prefix), self._most_bytes
        workers = loader.num_workers + facts.validation_workers
        room = _measure_room(facts, leaves_batches=workers > 0 and size is None)
        most = {store: free if size is None else min(size, free) for store, free in room.items()}
        wanted = {store: free if need is None else min(need, free) for store, free in most.items()}
        if self.store == "redis":
            return "redis", size
        if self.store == "disk":
            return "disk", (size or need or room["disk"]) if self.path else wanted["disk"]
        if self.store == "auto" and self.path and prefix.names_files and need is not None and most["shm"] < need:
            return "disk", min(size or need, need)
        if not wanted["shm"]:
            beside = " beside the batches of your workers" if workers else ""
            raise NotApplicable(
                f"there is no room in shared memory{beside}; give the container --shm-size, or write store: disk"
            )
        return "shm", wanted["shm"]

    def verify(self, seen: Measurement) -> Verdict:
        """The rung took effect if samples came from the store."""
        found = seen.evidence.get("cache", {})
        if (batches := found.get("row_batches")) is not None:
            why = f"{say_count(batches, 'batch')} picked at once out of {found['rows']:,} rows"
            if more := found.get("validation_row_batches"):
                why += f", and {more:,} for validation"
            why += f", {format_bytes(found['kept_bytes'])} on the device" if found["kept_bytes"] else ""
            return Verdict(took=batches > 0, why=why)
        if (batches := found.get("device_batches")) is not None:
            kept = f"{found['pictures']:,} images kept there ({format_bytes(found['kept_bytes'])})"
            return Verdict(took=batches > 0, why=f"{say_count(batches, 'batch')} made on the device from {kept}")
        hits, misses = found.get("hits", 0), found.get("misses", 0)
        if not hits + misses:
            return Verdict(took=False, why="no sample was requested")
        size = found.get("kept_bytes")
        kept = "" if size is None else f"; {format_bytes(size)} kept in {found['store']}"
        if changed := found.get("changed"):
            kept = f"; your dataset changed in training, so {say_count(changed, 'sample')} bypassed the store{kept}"
        if not hits:
            could = "could be stored, a warning says why" if found.get("not_kept") == misses else "was in the store yet"
            return Verdict(took=False, why=f"none of {misses:,} samples {could}{kept}")
        total = hits + misses
        return Verdict(took=True, why=f"hit rate {hits / total:.0%}: {hits:,} of {total:,} samples{kept}")


def _need(prefix: PrefixFacts) -> int | None:
    """Return the bytes that all samples take, with a margin; None if unknown."""
    return None if prefix.sample_bytes is None else int(1.05 * prefix.samples * (prefix.sample_bytes + 256))


def _measure_room(facts: Facts, *, leaves_batches: bool) -> dict[str, int]:
    """Return the bytes that each store may take; with `leaves_batches`, /dev/shm keeps room for those of workers."""
    free = facts.shm_free_bytes or 0
    shm = int(SHARE_OF_SHM * free)
    if leaves_batches:
        shm = max(0, min(shm, free - LITTLE_SHM_BYTES))
    if facts.memory_free_bytes is not None:
        shm = min(shm, int(SHARE_OF_MEMORY * facts.memory_free_bytes))
    return {"shm": shm, "disk": int(SHARE_OF_DISK * (facts.disk_free_bytes or 0))}


def _describe(prefix: PrefixFacts, store: str, budget: int | None, share: float) -> str:
    if prefix.sample_bytes is None:
        most = "what the server has room for" if budget is None else format_bytes(budget)
        return f"keeps {prefix.what} in {store}, up to {most}: the sample size is known once one has been loaded"
    size = f"{prefix.samples:,} samples of {format_bytes(prefix.sample_bytes)}, {_format_need(prefix)}"
    part = "" if share >= 1 else f"; {store} holds {share:.0%} of them, the others are loaded each time"
    return f"keeps {prefix.what} in {store}: {size}{part}"


def _format_need(prefix: PrefixFacts) -> str:
    need = _need(prefix)
    return "an unknown size" if need is None else format_bytes(need)

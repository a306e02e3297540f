"""Caches samples of image-file datasets, and results of methods marked with ``cached_prefix``."""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch.utils.data import ConcatDataset, Subset

from fastloop.feeds.cache.fingerprint import NoFingerprint, digest_texts, identify_files, read_method
from fastloop.feeds.cache.marking import MARK
from fastloop.feeds.cache.sample_cache import SampleCache
from fastloop.feeds.images.nested import list_leaves, list_parts
from fastloop.feeds.images.own_samples import check_named
from fastloop.feeds.images.reading import ImageSource, list_calls, read_source, read_steps
from fastloop.feeds.lazy_loader import StandInDataset

_PLAIN = (bool, int, float, str, type(None))


# -- image files ------------------------------------------------------------------------------------------------------


class CachedImages(StandInDataset):
    """Stands in for a dataset of image files: takes pictures from a store, then applies the remaining transforms.

    If the user changes the dataset during training, for example its transform, the dataset itself makes the samples.

    Args:
        inner: the user's dataset.
        sample_cache: looks pictures up in the store, or makes them.
        fingerprint: identifies the transforms that were applied to the stored pictures.
    """

    _OWN = ("inner", "sample_cache", "fingerprint")

    def __init__(self, inner: Any, sample_cache: SampleCache, fingerprint: bytes) -> None:
        self.inner, self.sample_cache, self.fingerprint = inner, sample_cache, fingerprint
        object.__setattr__(self, "_reading", _Reading(inner))

    def __getitem__(self, index: Any) -> Any:
        reading: _Reading = self._reading
        if type(index) is not int or index < 0:
            return self.inner[index]
        if not reading.holds():
            self.sample_cache.note_changed()
            return self.inner[index]
        path, label = reading.source.locate(index)
        try:
            key = digest_texts(self.fingerprint.hex(), identify_files(path))
        except OSError:  # opening the file will raise a clear error
            key = None
        return reading.finish(self.sample_cache.fetch(key, lambda: reading.make(path))), label


class _Reading:
    """The parts and transforms of an image dataset as first read, and whether they have changed since."""

    def __init__(self, dataset: Any) -> None:
        self.source: ImageSource = read_source(dataset)
        self._seen = tuple(_list_settings(dataset))
        self._leaf = list_leaves(dataset)[0]
        self._calls = list(list_calls(getattr(self._leaf, "transform", None)))
        self._prefix = self.source.transforms[: len(self.source.facts.prefix)]

    def holds(self) -> bool:
        """Whether the dataset's parts and transforms are still the ones first read."""
        calls = list(list_calls(getattr(self._leaf, "transform", None)))
        return (
            all(getattr(item, name, None) is value for item, name, value in self._seen)
            and len(calls) == len(self._calls)
            and all(map(operator.is_, calls, self._calls))
            and all(read_steps(each.call) == each.steps for each in self._prefix)
        )

    def make(self, path: str) -> Any:
        """Decode the picture and apply the transforms that belong to the stored part."""
        picture = _open_picture(path)
        for each in self._prefix:
            picture = each.call(picture)
        if self.source.unknown is None:
            picture.info = {}  # none of the remaining transforms reads it
        return picture

    def make_sample(self, index: int) -> Any:
        """Make a sample without a store."""
        path, label = self.source.locate(index)
        return self.finish(self.make(path)), label

    def finish(self, picture: Any) -> Any:
        """Apply the remaining transforms."""
        for call in self._calls[len(self._prefix) :]:
            picture = call(picture)
        return picture


def _list_settings(dataset: Any) -> Iterator[tuple[Any, str, Any]]:
    """Yield the attributes that decide what samples are, and that the user may set: owner, name and value."""
    names = {Subset: ("indices", "dataset"), ConcatDataset: ("datasets",)}
    for name in names.get(type(dataset), ("transform", "target_transform", "loader")):
        yield dataset, name, getattr(dataset, name, None)
    for part in list_parts(dataset):
        yield from _list_settings(part)


def _open_picture(path: str) -> Any:
    """Open a picture, with torchvision's loader if torchvision is imported."""
    folder = sys.modules.get("torchvision.datasets.folder")
    if folder is not None:
        return folder.default_loader(path)
    from PIL import Image

    with Path(path).open("rb") as file:
        return Image.open(file).convert("RGB")


def fingerprint_images(source: ImageSource) -> bytes:
    """Fingerprint the stored part of an image dataset's work."""
    return digest_texts("pictures", str(source.unknown is None), *map(repr, source.facts.prefix))


def check_images(dataset: Any) -> None:
    """Compare a few samples with those that `CachedImages` makes.

    Raises:
        NotApplicable: they differ.
    """
    check_named(dataset, lambda leaf: _Reading(leaf).make_sample)


# -- marked methods ---------------------------------------------------------------------------------------------------


class KeptMethod:
    """Stands in for a marked method of one dataset, as an attribute of the object.

    Args:
        owner: the dataset.
        name: the method's name.
        cache: looks its results up in the store, or makes them.
    """

    def __init__(self, owner: Any, name: str, cache: SampleCache) -> None:
        self.owner, self.name, self.cache = owner, name, cache
        self.fingerprint, reads = read_method(owner, getattr(type(owner), name))
        self._seen = {each: getattr(owner, each) for each in reads}

    def __call__(self, *given: Any, **named: Any) -> Any:
        function = getattr(type(self.owner), self.name)
        key = self._make_key(function, *given, *named.values()) if len(given) + len(named) == 1 else None
        return self.cache.fetch(key, lambda: function(self.owner, *given, **named))

    def _make_key(self, function: Any, index: Any) -> bytes | None:
        if any(not _is_same(getattr(self.owner, name, None), value) for name, value in self._seen.items()):
            return None
        try:
            number = index if isinstance(index, str) else operator.index(index)
            file = getattr(function, MARK)
            files = "" if file is True else identify_files(file(self.owner, index))
        except (OSError, TypeError):  # the method will raise a clear error
            return None
        return digest_texts(self.fingerprint.hex(), repr(number), files)


def _is_same(value: Any, before: Any) -> bool:
    return value is before or (type(value) is type(before) and isinstance(value, _PLAIN) and value == before)


def list_marked(dataset: Any) -> Iterator[tuple[Any, str]]:
    """Yield the marked methods of a dataset, also inside Subset and ConcatDataset: owner and method name."""
    for leaf in list_leaves(dataset):
        for name in dir(type(leaf)):
            if hasattr(getattr(type(leaf), name, None), MARK):
                yield leaf, name


def read_marked(dataset: Any) -> tuple[bytes, bool, str | None]:
    """Read marked methods: their joint fingerprint, whether all name their files, and why results cannot be stored.

    The reason is None if they can be stored, and empty if no method is marked.
    """
    found, names_files = [], True
    for owner, name in list_marked(dataset):
        function = getattr(type(owner), name)
        if not hasattr(owner, "__dict__"):
            return b"", False, f"{type(owner).__name__} keeps its attributes in slots"
        try:
            found.append(read_method(owner, function)[0].hex())
        except NoFingerprint as reason:
            return b"", False, str(reason)
        names_files &= getattr(function, MARK) is not True
    return digest_texts("marked", *found), names_files, None if found else ""


def put_in(dataset: Any, cache: SampleCache) -> list[tuple[Any, str]]:
    """Cache the results of marked methods; return owners and method names for `take_out`."""
    done = []
    for owner, name in list(list_marked(dataset)):
        if name not in vars(owner):
            vars(owner)[name] = KeptMethod(owner, name, cache)
            done.append((owner, name))
    return done


def take_out(done: list[tuple[Any, str]]) -> None:
    """Restore the datasets."""
    for owner, name in done:
        vars(owner).pop(name, None)
    done.clear()

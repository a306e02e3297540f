"""Finds the part of a dataset's work that could be cached, from its code and a few file headers. Loads no sample."""

from __future__ import annotations

import os
from typing import Any

from fastloop.errors import describe
from fastloop.feeds.cache import datasets
from fastloop.feeds.images.nested import list_leaves
from fastloop.feeds.images.reading import ImageSource, NotImages, read_source
from fastloop.records.facts import PrefixFacts
from fastloop.records.images import CenterCrop, Resize

_LOOKED_AT = 64
"""Files whose headers are read to estimate the size of a decoded image."""


def read_prefix(dataset: Any) -> PrefixFacts | str:
    """Return the part of a dataset's work that is the same each time, or why no part can be cached."""
    try:
        return _read(dataset)
    except Exception as error:  # the user's code may not expect such calls
        return f"{type(dataset).__name__} could not be inspected: {describe(error)}"


def _read(dataset: Any) -> PrefixFacts | str:
    if not hasattr(type(dataset), "__len__") or not hasattr(type(dataset), "__getitem__"):
        return f"{type(dataset).__name__} has no samples that can be indexed"
    leaves = list_leaves(dataset)
    fingerprint, names_files, why = datasets.read_marked(dataset)
    if why is None:
        names = dict.fromkeys(f"{type(owner).__name__}.{name}" for owner, name in datasets.list_marked(dataset))
        what, size = f"what {' and '.join(names)} returns", None
    elif why:
        return why
    else:
        try:
            source = read_source(dataset)
        except NotImages as reason:
            return f"{reason}, and none of its methods is marked by fastloop.cached_prefix"
        fingerprint, size = datasets.fingerprint_images(source), _measure_images(source)
        steps = [type(step).__name__ for step in source.facts.prefix]
        what = "decoded images" + (f" after {', '.join(steps)}" if steps else "")
    return PrefixFacts(
        what=what,
        dataset=f"{type(leaves[0]).__name__}{f' of {root}' if (root := _find_root(leaves[0])) else ''}",
        fingerprint=fingerprint.hex(),
        samples=min(len(dataset), sum(map(len, leaves))),
        sample_bytes=size,
        names_files=names_files,
    )


def _find_root(leaf: Any) -> str | None:
    root = getattr(leaf, "root", None)
    return os.fspath(root) if isinstance(root, (str, os.PathLike)) else None


def _measure_images(source: ImageSource) -> int | None:
    """Estimate the mean bytes of a stored image."""
    from PIL import Image

    sizes = []
    for path in source.list_paths(_LOOKED_AT):
        try:
            with Image.open(path) as picture:
                width, height = picture.size
        except (OSError, ValueError):  # not an image: the training will report it
            continue
        for step in source.facts.prefix:
            width, height = _apply(step, width, height)
        sizes.append(3 * width * height)
    return sum(sizes) // len(sizes) if sizes else None


def _apply(step: Any, width: int, height: int) -> tuple[int, int]:
    """Return width and height after a step."""
    if isinstance(step, CenterCrop) or (isinstance(step, Resize) and isinstance(step.size, tuple)):
        return step.size[1], step.size[0]  # type: ignore[index]
    shorter = min(width, height)
    return step.size * width // shorter, step.size * height // shorter

"""The engine that makes a loader's batches from pictures on the device."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from fastloop.errors import NotApplicable
from fastloop.feeds.device_store.draws import Drawing, draw, draw_parts
from fastloop.feeds.device_store.pictures import Pictures, fill
from fastloop.feeds.images.byte_batches import ToFloats, is_color, make_bytes, replace_transform
from fastloop.feeds.images.nested import find_user_dataset
from fastloop.feeds.images.own_samples import untouched_generators
from fastloop.feeds.images.reading import ImageSource, Transform, read_source, spread_indices
from fastloop.records.facts import format_bytes
from fastloop.records.images import RandomCrop, RandomHorizontalFlip, RandomResizedCrop, ToFloat

COMPARED = 16
"""Samples that must equal those of the user's dataset, bit for bit, before the engine is used."""


@dataclass(frozen=True)
class Recipe:
    """The transforms to apply once per picture, and those to apply in each batch."""

    once: tuple[Transform, ...]
    drawings: tuple[Drawing, ...]
    """Random steps in order; after a `RandomResizedCrop` only flips."""
    to_floats: ToFloats
    resized: RandomResizedCrop | None = None

    @property
    def crop(self) -> RandomCrop | RandomResizedCrop | None:
        """The crop that gives batches their size; None if the pictures already have it."""
        crops = (each.step for each in self.drawings if isinstance(each.step, RandomCrop))
        return self.resized or next(crops, None)


def read_recipe(transforms: Sequence[Transform]) -> Recipe:
    """Split the user's transforms, which `explain_no_engine` has accepted."""
    color = [each for each in transforms if is_color(each)]
    kinds = (RandomCrop, RandomHorizontalFlip, RandomResizedCrop)
    random = [each for each in transforms if isinstance(each.steps[0], kinds)]
    later = next(place for place, each in enumerate(transforms) if each in random or ToFloat() in each.steps)
    drawings, resized = [], None
    for each in random:
        step = each.steps[0]
        if isinstance(step, RandomResizedCrop):
            resized = step
        elif isinstance(step, (RandomCrop, RandomHorizontalFlip)):
            drawings.append(Drawing(step, by_side=type(each.call).__module__.startswith("torchvision.transforms.v2")))
    return Recipe(tuple(transforms[:later]), tuple(drawings), ToFloats(color), resized)


class DeviceEngine:
    """Returns the same batches as the loader without workers, bit for bit, and uses the same random numbers.

    Args:
        loader: its batch sampler chooses the samples.
        pictures: the pictures of all samples.
    """

    begins_at_iter = True

    def __init__(
        self, loader: DataLoader[Any], pictures: Pictures, recipe: Recipe, evidence: Mapping[str, Any]
    ) -> None:
        self.loader, self.pictures, self.recipe = loader, pictures, recipe
        self.batches, self._evidence = 0, evidence
        self.wants_channels_last: Callable[[], bool] = lambda: False
        """Called before each batch."""
        crop = recipe.crop
        self.size: tuple[int, int] = tuple(pictures.sizes[0].tolist()) if crop is None else crop.size
        self.fill = crop.fill if isinstance(crop, RandomCrop) else 0

    def load(self, seed: int) -> Iterator[Any]:
        """Return one epoch's batches. The seed is unused, as in a loader without workers."""
        return map(self._make_next, iter(self.loader.batch_sampler))  # type: ignore[arg-type]

    def _make_next(self, indices: Sequence[int]) -> list[torch.Tensor]:
        self.batches += 1
        return self.make(indices)

    def make(self, indices: Sequence[int]) -> list[torch.Tensor]:
        """Make the batch [images, labels] of these samples, in the form of the default collate function."""
        samples = np.asarray(indices, dtype=np.int64)
        samples = np.where(samples < 0, samples + len(self.pictures.slots), samples)
        heights, widths = self.pictures.sizes[self.pictures.slots[samples]].T
        layout = torch.channels_last if self.wants_channels_last() else torch.contiguous_format
        output = self.recipe.to_floats, layout
        if self.recipe.resized is None:
            placed = draw(self.recipe.drawings, heights, widths)
            images = self.pictures.cut(samples, placed, self.size, self.fill, *output)
        else:
            flips = [each.step for each in self.recipe.drawings if isinstance(each.step, RandomHorizontalFlip)]
            parts, mirrored = draw_parts(self.recipe.resized, flips, heights, widths)
            images = self.pictures.resize(samples, parts, mirrored, self.size, *output)
        return [images, self.pictures.find_labels(samples)]

    def evidence(self) -> Mapping[str, Any]:
        """Return the number of batches made, and facts about the stored pictures."""
        return {"device_batches": self.batches, **self._evidence}


def make_engine(
    loader: DataLoader[Any],
    device: torch.device,
    *,
    most_bytes: int,
    workers: int,
    say: Callable[[str], None] = lambda _line: None,
) -> DeviceEngine:
    """Copy the pictures to the device and verify the engine on a few samples.

    Raises:
        NotApplicable: the pictures do not fit, or a batch differs from the user's dataset.
    """
    began = time.monotonic()
    dataset = find_user_dataset(loader.dataset)
    source = read_source(dataset)
    recipe = read_recipe(source.transforms)
    bytes_of = replace_transform(dataset, make_bytes(recipe.once))
    with untouched_generators():  # the dataset may draw numbers besides its transform's
        pictures = fill(bytes_of, source, device, most_bytes=most_bytes, workers=workers, say=say)
    _check_sizes(pictures, recipe)
    kept = {
        "pictures": len(pictures.sizes),
        "kept_bytes": pictures.pixels.numel(),
        "fill_s": round(time.monotonic() - began, 2),
    }
    engine = DeviceEngine(loader, pictures, recipe, kept)
    try:
        prove(engine, dataset, source)
    except NotApplicable:
        raise
    except Exception as error:
        if not pictures.fused and recipe.resized is None:
            raise
        needs = "install triton" if isinstance(error, ImportError) else "Triton needs a C compiler (gcc)"
        why = f"Triton's kernels do not run ({type(error).__name__}: {error}); {needs}"
        if recipe.resized is not None:
            raise NotApplicable(f"images can only be resized there by Triton: {why}") from error
        say(f"{why}; torch's own operations crop the images instead")
        pictures.fused = False
        prove(engine, dataset, source)
    say(
        f"{kept['pictures']:,} images ({format_bytes(kept['kept_bytes'])} of at most {format_bytes(most_bytes)}) are on"
        f" the device after {kept['fill_s']:.1f} s"
    )
    return engine


def _check_sizes(pictures: Pictures, recipe: Recipe) -> None:
    crop = recipe.crop
    if crop is None and len(np.unique(pictures.sizes, axis=0)) > 1:
        raise NotApplicable("the images differ in size, and no crop makes them equal")
    if isinstance(crop, RandomCrop):
        left, top, right, bottom = crop.padding
        if (pictures.sizes + [top + bottom, left + right] < crop.size).any():
            raise NotApplicable(f"some images are smaller than the crop of {crop.size[0]} x {crop.size[1]}")


def prove(engine: DeviceEngine, dataset: Any, source: ImageSource) -> None:
    """Compare a few samples, and the random numbers used, with the user's dataset. Restores the random generators.

    Raises:
        NotApplicable: they differ.
    """
    chosen = spread_indices(source.count, COMPARED)
    with untouched_generators():
        state = torch.get_rng_state()
        samples = [dataset[index] for index in chosen]
        after = torch.get_rng_state()
        torch.set_rng_state(state)
        images, labels = engine.make(chosen)
        same_draws = torch.equal(after, torch.get_rng_state())
    expected = torch.utils.data.default_collate(samples)
    if not torch.equal(images.cpu(), expected[0].as_subclass(torch.Tensor)) or not torch.equal(
        labels.cpu(), expected[1]
    ):
        raise NotApplicable("a batch made on the device differs from the dataset's")
    if not same_draws:
        raise NotApplicable("a batch made on the device uses different random numbers than the dataset's transforms")

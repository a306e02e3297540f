"""Inside OwnDraws each transform that is said to draw by torch does, from the given generator and from no other."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from fastloop.evidence.samples import thread_safety
from fastloop.feeds.nodes.own_draws import OwnDraws

pytestmark = pytest.mark.timeout(200)
SETTINGS: dict[str, tuple[Any, ...]] = {
    "ColorJitter": (0.5, 0.5, 0.5, 0.3),
    "GaussianBlur": (3,),
    "RandomAdjustSharpness": (3, 0.5),
    "RandomAffine": (30,),
    "RandomCrop": (20,),
    "RandomErasing": (0.5, (0.02, 0.33), (0.3, 3.3), "random"),
    "RandomGrayscale": (0.5,),
    "RandomPosterize": (3, 0.5),
    "RandomResizedCrop": (16,),
    "RandomRotation": (30,),
    "RandomSolarize": (100, 0.5),
}
NEVER_DIFFERS = {"RandomAutocontrast", "RandomEqualize"}
"""On pictures that have all values."""


def draw(seed: int, make: Callable[[], Any]) -> Any:
    with OwnDraws(seed):
        return make()


def read(made: Any) -> bytes:
    return made.numpy().tobytes() if isinstance(made, torch.Tensor) else made.tobytes()  # type: ignore[no-any-return]


@pytest.mark.parametrize("version", ["transforms", "transforms.v2"])
@pytest.mark.parametrize("name", sorted(thread_safety._BY_TORCH))
def test_a_known_transform_draws_from_the_given_generator_alone(name: str, version: str) -> None:
    transforms: Any = pytest.importorskip(f"torchvision.{version}")
    functional = pytest.importorskip("torchvision.transforms.functional")
    pixels = np.random.default_rng(0).integers(0, 256, (40, 40, 3), np.uint8)
    picture = pytest.importorskip("PIL.Image").fromarray(pixels)
    if name == "RandomErasing":
        picture = functional.to_tensor(picture)
    settings = ([transforms.RandomHorizontalFlip(1.0)],) if name == "RandomApply" else SETTINGS.get(name, ())
    transform = getattr(transforms, name)(*settings)
    own, pythons = torch.get_rng_state(), random.getstate()
    first = [read(draw(seed, lambda: transform(picture))) for seed in range(12)]
    torch.manual_seed(77)
    moved = torch.get_rng_state()
    again = [read(draw(seed, lambda: transform(picture))) for seed in range(12)]
    assert again == first and torch.equal(torch.get_rng_state(), moved) and random.getstate() == pythons
    assert len(set(first)) > 1 or name in NEVER_DIFFERS
    torch.set_rng_state(own)


def test_outside_of_it_and_in_other_threads_all_is_as_it_was() -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    drawn: list[torch.Tensor] = []
    with OwnDraws(5):
        inside = torch.rand(4)
        other = threading.Thread(target=lambda: drawn.append(torch.rand(4)))
        other.start()
        other.join()
    assert torch.equal(drawn[0], expected), "the other thread has the stream that all share"
    assert torch.equal(inside, torch.rand(4, generator=torch.Generator().manual_seed(5)))


def test_a_generator_that_is_named_is_used() -> None:
    def make() -> torch.Tensor:
        return torch.randint(0, 100, (8,), generator=torch.Generator().manual_seed(9))

    assert torch.equal(draw(1, make), make())

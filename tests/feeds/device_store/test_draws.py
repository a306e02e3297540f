"""A batch's random numbers, drawn at once, are those that the user's transforms draw one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fastloop.feeds.device_store.draws import Drawing, draw, draw_parts, draw_words
from fastloop.records.images import RandomCrop, RandomHorizontalFlip, RandomResizedCrop

pytest.importorskip("torchvision")
from torchvision.transforms import transforms as v1
from torchvision.transforms import v2


@pytest.mark.parametrize("count", [0, 1, 2, 7, 256])
def test_words_leave_the_generator_where_single_draws_leave_it(count: int) -> None:
    for seed in range(5):
        torch.manual_seed(seed)
        single = [int(torch.randint(0, 1000, (1,))) for _ in range(count)]
        after, state = torch.rand(3), torch.get_rng_state()
        torch.manual_seed(seed)
        words = draw_words(count)
        assert (words % 1000).tolist() == single and words.shape == (count,)
        assert torch.equal(torch.rand(3), after) and torch.equal(torch.get_rng_state(), state)


SIZES = [(32, 32), (40, 36), (32, 50), (24, 24), (32, 32)]
CROP, PADDED = RandomCrop(size=(24, 24)), RandomCrop(size=(32, 30), padding=(1, 4, 2, 4))


def place_by_calls(moves: list[Any], height: int, width: int) -> tuple[int, int, int]:
    """Row and column of the first pixel of an image, and the step of its columns, as the transforms have it: read off
    a picture whose pixels say where they are."""
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    picture = torch.stack([rows + 100, columns + 100])
    for move in moves:
        picture = move(picture)
    y, x = next((y, x) for y in range(9, 20) for x in range(9, 20) if picture[0, y, x] and picture[0, y, x + 1])
    step = int(picture[1, y, x + 1] - picture[1, y, x])
    return int(picture[0, y, x]) - 100 - y, int(picture[1, y, x]) - 100 - step * x, step


@pytest.mark.parametrize("generation", [v1, v2])
@pytest.mark.parametrize(
    ("steps", "makes"),
    [
        ([PADDED, RandomHorizontalFlip()], lambda v: [v.RandomCrop((32, 30), (1, 4, 2, 4)), v.RandomHorizontalFlip()]),
        ([RandomHorizontalFlip(p=0.3), CROP], lambda v: [v.RandomHorizontalFlip(0.3), v.RandomCrop(24)]),
        ([RandomHorizontalFlip(), RandomHorizontalFlip()], lambda v: [v.RandomHorizontalFlip() for _ in "ab"]),
        ([CROP], lambda v: [v.RandomCrop(24)]),
    ],
)
def test_the_same_places_as_the_transforms_draw(generation: Any, steps: list[Any], makes: Any) -> None:
    sizes = [size for size in SIZES if PADDED not in steps or min(size) > 24] * 8
    heights, widths = np.array(sizes).T
    moves = makes(generation)
    for seed in range(4):
        torch.manual_seed(seed)
        expected = [place_by_calls(moves, *size) for size in sizes]
        state = torch.get_rng_state()
        torch.manual_seed(seed)
        placed = draw([Drawing(step, by_side=generation is v2) for step in steps], heights, widths)
        assert list(zip(placed.top.tolist(), placed.left.tolist(), placed.step.tolist(), strict=True)) == expected
        assert torch.equal(torch.get_rng_state(), state)


def test_the_two_generations_draw_differently() -> None:
    """The control: where one side has one place only, v1 draws for it and v2 does not."""
    heights, widths = np.array([[24, 40]] * 6).T
    ends = []
    for by_side in (False, True):
        torch.manual_seed(0)
        draw([Drawing(CROP, by_side=by_side)], heights, widths)
        ends.append(torch.get_rng_state())
    assert not torch.equal(*ends)


@pytest.mark.parametrize("generation", [v1, v2])
@pytest.mark.parametrize(
    ("scale", "ratio", "flips"),
    [((0.08, 1.0), (3 / 4, 4 / 3), 1), ((0.5, 1.0), (0.3, 2.5), 0), ((0.9, 1.0), (1.0, 1.0), 2)],
)
def test_the_same_parts_as_the_transforms_draw(generation: Any, scale: Any, ratio: Any, flips: int) -> None:
    """Many pictures, long ones too, of which every try may fail."""
    sizes = [(375, 500), (500, 375), (333, 500), (224, 224), (30, 640), (640, 30), (41, 43)] * 150
    heights, widths = np.array(sizes).T
    move = generation.RandomResizedCrop(8, scale=scale, ratio=ratio)
    torch.manual_seed(7)
    expected, turned, blank = [], [], torch.zeros(1)
    for height, width in sizes:
        picture = blank.expand(3, height, width)
        if generation is v1:
            expected.append(move.get_params(picture, list(scale), list(ratio)))
        else:
            params = move.make_params([picture])
            expected.append(tuple(params[name] for name in ("top", "left", "height", "width")))
        turned.append(sum(bool(torch.rand(1) < 0.4) for _ in range(flips)) % 2 == 1)
    state = torch.get_rng_state()
    torch.manual_seed(7)
    step = RandomResizedCrop(size=(8, 8), scale=scale, ratio=ratio)
    parts, ours = draw_parts(step, [RandomHorizontalFlip(p=0.4)] * flips, heights, widths)
    assert list(map(tuple, parts.tolist())) == expected and ours.tolist() == turned
    assert torch.equal(torch.get_rng_state(), state)
    if scale[0] == 0.9:
        middle = [(30 - 30) // 2, (640 - 30) // 2, 30, 30]
        assert parts[4].tolist() == middle, "all tries fail"

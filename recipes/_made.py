"""Data that needs no network: generated once, from fixed seeds, and as costly to read as the real thing.

Photographs are 500 x 375 JPEGs of about 100 KB, at the quality and with the full-size colour planes that most ImageNet
photographs have (mean 107 KB). Thumbnails are 32 x 32 PNGs of about 3 KB. So decoding costs what it costs in real life.
The hue of the objects in a picture is its class, so there is something to learn. The text is English words put together
by a small grammar, each word drawn by Zipf's law.
"""

from __future__ import annotations

import colorsys
import math
import os
import random
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.progress import Progress

if TYPE_CHECKING:
    from PIL import Image, ImageDraw

VERSION = "v1"
"""Part of the cached folder's name: change it whenever a byte of the generated data changes."""
HUES = ("red", "orange", "lime", "green", "mint", "cyan", "azure", "blue", "violet", "pink")
"""The classes, in equal steps around the colour circle."""
BAR_AFTER_S = 2.0


def photographs(folder: Path, train: int, val: int) -> None:
    """Fill ``folder`` with train/<hue>/*.jpg and val/<hue>/*.jpg, so many pictures of each in all."""
    _gallery(folder, {"train": train, "val": val}, (500, 375), "jpg", quality=95, subsampling="4:4:4")


def thumbnails(folder: Path, train: int, val: int) -> None:
    """The same as ``photographs``, 32 x 32 pixels, as lossless PNGs."""
    _gallery(folder, {"train": train, "val": val}, (32, 32), "png")


def _gallery(folder: Path, counts: dict[str, int], size: tuple[int, int], suffix: str, **saving: Any) -> None:
    for split in counts:
        for hue in HUES:
            (folder / split / hue).mkdir(parents=True)

    def make(job: tuple[int, str, int]) -> None:
        part, split, index = job
        label = index % len(HUES)
        picture = _paint(np.random.default_rng([part, index]), label / len(HUES), size)
        picture.save(folder / split / HUES[label] / f"{index:05d}.{suffix}", **saving)

    jobs = [(part, split, index) for part, (split, count) in enumerate(counts.items()) for index in range(count)]
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:  # numpy and PIL let go of the GIL
        for _ in _with_bar(pool.map(make, jobs), len(jobs), f"making {len(jobs)} pictures, once"):
            pass


def _paint(rng: np.random.Generator, hue: float, size: tuple[int, int]) -> Image.Image:
    """One picture: a pale ground that fades from one colour to another, things of the class's hue, texture over all."""
    from PIL import Image, ImageDraw  # torchvision brings it along, and gpt2 goes without

    width, height = size
    across, down = np.meshgrid(np.linspace(0, 1, width), np.linspace(0, 1, height))
    angle = rng.uniform(0, 2 * math.pi)
    fade = np.clip(0.5 + (across - 0.5) * math.cos(angle) + (down - 0.5) * math.sin(angle), 0, 1)[..., None]
    here, there = (np.array(_rgb(rng.uniform(), 0.25, rng.uniform(0.3, 0.9))) for _ in range(2))
    picture = Image.fromarray((here + (there - here) * fade).astype(np.uint8))

    draw = ImageDraw.Draw(picture)
    for _ in range(rng.integers(3, 8)):
        _draw_thing(draw, rng, size, _rgb(hue + rng.normal(0, 0.01), rng.uniform(0.6, 1), rng.uniform(0.5, 1)))

    detail = rng.lognormal(math.log(14), 0.4)  # in grey levels; pictures differ in detail, and so in bytes
    pixels = np.asarray(picture, np.float32) + detail * _texture(rng, size)[..., None]
    return Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))


def _draw_thing(
    draw: ImageDraw.ImageDraw, rng: np.random.Generator, size: tuple[int, int], colour: tuple[int, int, int]
) -> None:
    """An ellipse or a polygon, a tenth to a quarter of the picture wide, anywhere in it."""
    width, height = size
    x, y = rng.uniform(0, width), rng.uniform(0, height)
    radius = rng.uniform(0.1, 0.25) * width
    if rng.uniform() < 0.5:
        flat = rng.uniform(0.5, 1)
        draw.ellipse((x - radius, y - radius * flat, x + radius, y + radius * flat), fill=colour)
    else:
        turns = np.sort(rng.uniform(0, 2 * math.pi, rng.integers(3, 8)))
        draw.polygon([(x + radius * math.cos(turn), y + radius * math.sin(turn)) for turn in turns], fill=colour)


def _texture(rng: np.random.Generator, size: tuple[int, int]) -> np.ndarray:
    """Noise of every scale, each octave as strong as the next, which is the spectrum of natural pictures. [H, W]"""
    from PIL import Image

    width, height = size
    total = np.zeros((height, width), np.float32)
    cells = 4
    while cells <= width:
        grid = rng.standard_normal((math.ceil(cells * height / width), cells), np.float32)
        total += np.asarray(Image.fromarray(grid).resize(size, Image.Resampling.BICUBIC))
        cells *= 2
    return total


def _rgb(hue: float, saturation: float, value: float) -> tuple[int, int, int]:
    red, green, blue = (round(255 * part) for part in colorsys.hsv_to_rgb(hue % 1, saturation, value))
    return red, green, blue


def _with_bar(items: Iterable[Any], total: int, what: str) -> Iterator[Any]:
    """Pass ``items`` through; once that has taken more than two seconds, with a progress bar on stderr."""
    bar = Progress(console=Console(stderr=True), transient=True)
    task = bar.add_task(what, total=total)
    start_s = time.monotonic()
    try:
        for item in items:
            yield item
            bar.advance(task)
            if not bar.live.is_started and time.monotonic() - start_s > BAR_AFTER_S:
                bar.start()
    finally:
        bar.stop()


WORDS = {
    "D": "the a this that every one each another no some",
    "A": """
        old new good great small large long young early late little high low strong quiet dark bright cold warm slow
        quick deep simple heavy clear empty open strange gentle narrow broken golden hidden distant patient clever
        honest bitter
    """,
    "N": """
        time year people way day man thing woman life child world school state family student group country problem
        hand part place case week company system question work night point home water room mother area money story
        fact month lot right study book eye job word business issue side kind head house service friend father power
        hour game line end member law car city community name president team minute idea body information back
        parent face level office door health person art war history party result change morning reason research girl
        guy moment air teacher force river mountain garden engine letter window captain harbour winter shadow
        kitchen mirror bridge village lantern
    """,
    "V": """
        sees makes takes finds gives tells keeps leaves calls needs holds brings meets follows shows hears plays
        moves likes believes loses pays carries sets leads understands watches stops creates reads spends grows
        opens wins teaches offers remembers considers buys serves builds answers crosses paints measures repairs
        forgets
    """,
    "P": "of in to for with on at from by about into over after under between near behind beyond",
    "R": "often never always again slowly gladly perhaps then soon once almost together",
}
"""Determiners, adjectives, nouns, verbs, prepositions and adverbs, the frequent ones first."""
SENTENCES = (
    "D N V D N",
    "D A N V D N",
    "D N V D A N P D N",
    "R D N V D N P D A N",
    "D N P D N V D N",
    "D A A N R V D N and V D N",
    "P D N , D N V D A N",
)
"""Their shapes: a key of ``WORDS`` stands for one of its words, all else for itself."""


def text(length: int = 1_000_000) -> bytes:
    """English-looking text of ``length`` bytes in paragraphs, always the same."""
    rng = random.Random(0)
    words = {kind: known.split() for kind, known in WORDS.items()}
    zipf = {kind: [1 / rank for rank in range(1, len(known) + 1)] for kind, known in words.items()}

    def sentence() -> str:
        shape = rng.choice(SENTENCES).split()
        chosen = (rng.choices(words[part], zipf[part])[0] if part in words else part for part in shape)
        plain = " ".join(chosen).replace(" ,", ",")
        return plain[0].upper() + plain[1:] + rng.choices(".?!", (8, 1, 1))[0]

    paragraphs: list[str] = []
    size = 0
    while size < length:
        paragraphs.append(" ".join(sentence() for _ in range(rng.randint(2, 6))) + "\n\n")
        size += len(paragraphs[-1])
    return "".join(paragraphs).encode()[:length]

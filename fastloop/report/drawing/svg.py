"""Drawing with matplotlib's objects alone, and its SVG made fit to stand inside a page.

``pyplot`` is never imported and the user's settings are put back, so a training that draws pictures of its own does not
notice. What is drawn in ``INK`` takes the page's text colour, dark or light.
"""

from __future__ import annotations

import html
import io
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from fastloop.report.drawing.document import Picture

COLUMN = 380.0
"""CSS pixels of a picture that stands in a column and grows with it."""
WIDE, NARROW = 900.0, 340.0
"""CSS pixels of a picture's two drawings; the page shows the one that fits the screen."""
INK = "#010203"
"""Stands for the page's text colour."""
_OURS = {
    "svg.fonttype": "none",
    "svg.hashsalt": "fastloop",
    "text.parse_math": False,
    "text.usetex": False,
    "font.family": ["sans-serif"],
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 11,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "savefig.facecolor": "none",
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.labelsize": 10,
    "ytick.labelsize": 10,
    "grid.color": INK,
    "grid.alpha": 0.15,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 10,
    "lines.linewidth": 1.4,
}
_STYLED = (
    "axes.",
    "figure.",
    "font.",
    "grid.",
    "hatch.",
    "legend.",
    "lines.",
    "mathtext.",
    "patch.",
    "path.",
    "savefig.",
    "svg.",
    "text.",
    "xtick.",
    "ytick.",
)
"""What a user's style sheet may have changed, and we start from matplotlib's own defaults in."""
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


@contextmanager
def style() -> Iterator[None]:
    """Our settings, then again the user's. No warning of a glyph that a font lacks leaves it."""
    import matplotlib

    with warnings.catch_warnings(), matplotlib.rc_context():
        warnings.simplefilter("ignore")
        settings: Any = matplotlib.rcParams
        settings.update({key: value for key, value in matplotlib.rcParamsDefault.items() if key.startswith(_STYLED)})
        settings.update(_OURS)
        yield


def canvas(width: float, height: float) -> Any:
    """An empty ``Figure`` of so many CSS pixels."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width / 72, height / 72), dpi=72)


def printable(text: str) -> str:
    """A text without what XML cannot hold."""
    return _CONTROL.sub("", text)


def embed(figure: Any, name: str, title: str, description: str) -> str:
    """The figure as an ``svg`` element with a title and a description, its ids apart from those of other figures."""
    stream = io.StringIO()
    figure.savefig(stream, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    text = stream.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", text, flags=re.DOTALL)
    text = re.sub(r' id="(?![mphc][0-9a-f]{8,}")[^"]*"', "", text)  # only what is referred to keeps its name
    text = re.sub(r'( id="|url\(#|href="#)', rf"\g<1>{name}-", text)
    text = text.replace(INK, "currentColor").replace(" font-family: 'DejaVu Sans', sans-serif;", "")
    text = re.sub(r' transform="rotate\(-0 [^)]*\)"', "", text)
    text = re.sub(r"\s*\n\s*", " ", text)
    opening = re.match(r"<svg[^>]*>", text)
    box = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', opening[0]) if opening else None
    if opening is None or box is None:
        raise ValueError("matplotlib's SVG begins in another way than it used to")
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" class="{name}"'
        f' viewBox="0 0 {box[1]} {box[2]}" role="img" aria-labelledby="{name}-title {name}-desc">'
        f'<title id="{name}-title">{html.escape(printable(title))}</title>'
        f'<desc id="{name}-desc">{html.escape(printable(description))}</desc>'
    )
    return head + text[opening.end() :].strip()


def draw(name: str, title: str, words: str, make: Callable[[], Any]) -> Picture | None:
    """One picture; None where ``make`` returns none. Never raises: a failure is in it.

    Args:
        name: of its class and its ids.
        words: the picture in words.
        make: draws a ``Figure``.
    """
    try:
        with style():
            figure = make()
            return None if figure is None else Picture(markup=embed(figure, name, title, words))
    except Exception as error:  # no picture is worth a report
        return Picture(why_not=f"{type(error).__name__}: {error}")


def draw_wide_and_narrow(name: str, title: str, words: str, make: Callable[[float], Any]) -> tuple[Picture, ...]:
    """One picture, wide and narrow; nothing where ``make`` returns None.

    Args:
        make: draws a ``Figure`` of so many CSS pixels' width.
    """
    wide = draw(f"{name}-wide", title, words, lambda: make(WIDE))
    narrow = draw(f"{name}-narrow", title, words, lambda: make(NARROW))
    return tuple(picture for picture in (wide, narrow) if picture is not None)

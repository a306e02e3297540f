"""Drawing with matplotlib's objects alone, and its SVG made fit to stand inside a page.

``pyplot`` is never imported and the user's settings are put back, so a training that draws pictures of its own does not
notice. What is drawn in ``INK`` takes the page's text colour, dark or light.
"""

from __future__ import annotations

import html
import io
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

INK = "#010203"
"""Stands for the page's text colour."""
_OURS = {"svg.fonttype": "none", "svg.hashsalt": "fastloop", "text.parse_math": False, "text.usetex": False,
         "font.family": ["sans-serif"], "font.sans-serif": ["DejaVu Sans"], "font.size": 11, "axes.linewidth": 0.6,
         "axes.spines.top": False, "axes.spines.right": False, "axes.facecolor": "none", "figure.facecolor": "none",
         "savefig.facecolor": "none", "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": INK,
         "xtick.color": INK, "ytick.color": INK, "xtick.labelsize": 10, "ytick.labelsize": 10, "grid.color": INK,
         "grid.alpha": 0.15, "grid.linewidth": 0.6, "legend.frameon": False, "legend.fontsize": 10,
         "lines.linewidth": 1.4, "hatch.color": INK, "hatch.linewidth": 0.5}  # fmt: skip
_STYLED = ("axes.", "figure.", "font.", "grid.", "hatch.", "legend.", "lines.", "mathtext.", "patch.", "path.",
           "savefig.", "svg.", "text.", "xtick.", "ytick.")  # fmt: skip
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


class Sheet:
    """A figure to draw on in CSS pixels, y downwards."""

    def __init__(self, width: float, height: float) -> None:
        self.figure = canvas(width, height)
        self._axes = self.figure.add_axes((0, 0, 1, 1))
        self._axes.set(xlim=(0, width), ylim=(height, 0))
        self._axes.set_axis_off()

    def bar(self, x: float, y: float, width: float, height: float, colour: str, *, empty: bool = False) -> None:
        """A filled rectangle; ``empty``: hatched, for what is not known."""
        from matplotlib.patches import Rectangle

        drawn = Rectangle((x, y), width, height, linewidth=0)
        if empty:
            drawn.set(facecolor="none", edgecolor=INK, hatch="////", alpha=0.35, linewidth=0.5)
        else:
            drawn.set(facecolor=colour)
        self._axes.add_patch(drawn)

    def line(self, x: float, y: float, to_x: float, to_y: float, faint: bool = True) -> None:
        self._axes.plot([x, to_x], [y, to_y], color=INK, alpha=0.25 if faint else 1.0, linewidth=0.8)

    def text(self, x: float, y: float, said: str, *, size: float = 12, align: str = "left", colour: str = INK,
             faint: bool = False, bold: bool = False) -> None:  # fmt: skip
        """One line of text, centred on ``y``."""
        self._axes.text(x, y, printable(said), fontsize=size, ha=align, va="center_baseline", color=colour,
                        alpha=0.7 if faint else 1.0, fontweight="bold" if bold else "normal")  # fmt: skip


def printable(text: str) -> str:
    """A text without what XML cannot hold."""
    return _CONTROL.sub("", text)


def on(colour: str) -> str:
    """Black or white: what can be read on a colour."""
    red, green, blue = (int(colour[start : start + 2], 16) for start in (1, 3, 5))
    return "#000000" if 0.299 * red + 0.587 * green + 0.114 * blue > 140 else "#ffffff"


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
    head = (f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" class="{name}"'
            f' viewBox="0 0 {box[1]} {box[2]}" role="img" aria-labelledby="{name}-title {name}-desc">'
            f'<title id="{name}-title">{html.escape(printable(title))}</title>'
            f'<desc id="{name}-desc">{html.escape(printable(description))}</desc>')  # fmt: skip
    return head + text[opening.end() :].strip()

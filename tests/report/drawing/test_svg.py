"""SVG that can stand in a page, and a user's matplotlib left as it was."""

from __future__ import annotations

import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from typing import Any

import matplotlib
import pytest

from fastloop.report.drawing import svg
from fastloop.report.drawing.document import Picture
from tests.report.samples import HOSTILE


def drawn(name: str = "one", said: str = "text") -> str:
    with svg.style():
        figure = svg.canvas(200, 100)
        axes = figure.add_axes((0.1, 0.1, 0.8, 0.8))
        axes.plot([1, 2], [1, 2], "o-", color="#d9480f")
        axes.text(1, 1, svg.printable(said), alpha=0.7)
        axes.set(xticks=(1, 2), yticks=())
        return svg.embed(figure, name, said, f"about {said}")


def test_it_is_small_xml_in_css_pixels() -> None:
    root = ElementTree.fromstring(drawn())
    assert root.get("viewBox") == "0 0 200 100" and root.get("width") is None
    assert "#d9480f" in drawn() and "currentColor" in drawn() and svg.INK not in drawn()
    assert "metadata" not in drawn() and "<style" not in drawn() and len(drawn()) < 7000
    assert ">text</text>" in drawn(), "text stays text"


def test_it_is_the_same_every_time() -> None:
    assert drawn() == drawn()


def test_ids_of_two_figures_differ() -> None:
    names = [
        {element.get("id") for element in ElementTree.fromstring(drawn(name)).iter() if element.get("id")}
        for name in ("one", "two")
    ]
    assert names[0] and not names[0] & names[1]
    for name, found in zip(("one", "two"), names, strict=True):
        assert f"url(#{name}-p" in drawn(name) and all(str(each).startswith(f"{name}-") for each in found)


def test_names_are_text_and_no_formula() -> None:
    text = drawn(said=HOSTILE)
    root = ElementTree.fromstring(text)
    assert "script" not in {element.tag.rpartition("}")[2] for element in root.iter()}
    assert "alert('x')" in text and "\x00" not in text and "\\frac{1$" in text


@pytest.mark.parametrize("text", ["a\x00b", "a\x1bb", "a\ud800b", "a\uffffb", "a\x7fb"])
def test_printable(text: str) -> None:
    assert svg.printable(text) == "ab" and svg.printable("ü\n\t€") == "ü\n\t€"


def test_the_user_s_settings_neither_show_nor_change() -> None:
    plain = drawn()
    with matplotlib.rc_context(
        {
            "lines.linewidth": 9.0,
            "text.usetex": True,
            "font.size": 40,
            "path.simplify": False,
            "axes.facecolor": "red",
            "axes.linewidth": 7.0,
        }
    ):
        before = dict(matplotlib.rcParams)
        assert drawn() == plain
        assert dict(matplotlib.rcParams) == before
    with pytest.raises(ZeroDivisionError), svg.style():
        1 / 0  # noqa: B018
    assert matplotlib.rcParams["svg.fonttype"] != "none", "put back after an exception too"


def test_pyplot_is_not_imported_and_no_backend_is_chosen() -> None:
    code = (
        "import sys, matplotlib; before = matplotlib.rcParams._get_backend_or_none()\n"
        "from tests.report.run.test_figures import shown; from tests.report.samples import gpt2\n"
        "assert len(shown(gpt2().seen)) == 2\n"
        "assert matplotlib.rcParams._get_backend_or_none() == before\n"
        "assert 'matplotlib.pyplot' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_a_picture_is_made_wide_and_narrow() -> None:
    widths = []

    def make(width: float) -> Any:
        widths.append(width)
        return svg.canvas(width, 50)

    wide, narrow = svg.draw_wide_and_narrow("some", "Title", "words", make)
    assert widths == [900.0, 340.0]
    assert 'viewBox="0 0 900 50"' in wide.markup and 'class="some-narrow"' in narrow.markup


def test_a_picture_that_fails_says_why() -> None:
    def fails() -> Any:
        raise ValueError("too steep")

    assert svg.draw("some", "Title", "words", fails) == Picture(why_not="ValueError: too steep")
    assert svg.draw("some", "Title", "words", lambda: None) is None

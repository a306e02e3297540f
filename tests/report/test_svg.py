"""SVG that can stand in a page, and a user's matplotlib left as it was."""

from __future__ import annotations

import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import matplotlib
import pytest

from fastloop.report import svg
from tests.report.samples import HOSTILE


def drawn(name: str = "one", said: str = "text") -> str:
    with svg.style():
        sheet = svg.Sheet(200, 100)
        sheet.bar(10, 10, 50, 20, "#d9480f")
        sheet.bar(60, 10, 50, 20, "", empty=True)
        sheet.line(0, 50, 200, 50)
        sheet.text(10, 70, said, faint=True)
        return svg.embed(sheet.figure, name, said, f"about {said}")


def test_it_is_small_xml_in_css_pixels() -> None:
    root = ElementTree.fromstring(drawn())
    assert root.get("viewBox") == "0 0 200 100" and root.get("width") is None
    assert "#d9480f" in drawn() and "currentColor" in drawn() and svg.INK not in drawn()
    assert "metadata" not in drawn() and "<style" not in drawn() and len(drawn()) < 6000
    assert ">text</text>" in drawn(), "text stays text"


def test_it_is_the_same_every_time() -> None:
    assert drawn() == drawn()


def test_ids_of_two_figures_differ() -> None:
    names = [{element.get("id") for element in ElementTree.fromstring(drawn(name)).iter() if element.get("id")}
             for name in ("one", "two")]  # fmt: skip
    assert names[0] and not names[0] & names[1]
    for name, found in zip(("one", "two"), names, strict=True):
        assert f"url(#{name}-h" in drawn(name) and all(str(each).startswith(f"{name}-") for each in found)


def test_names_are_text_and_no_formula() -> None:
    text = drawn(said=HOSTILE)
    root = ElementTree.fromstring(text)
    assert "script" not in {element.tag.rpartition("}")[2] for element in root.iter()}
    assert "alert('x')" in text and "\x00" not in text and "\\frac{1$" in text


@pytest.mark.parametrize("text", ["a\x00b", "a\x1bb", "a\ud800b", "a\uffffb", "a\x7fb"])
def test_printable(text: str) -> None:
    assert svg.printable(text) == "ab" and svg.printable("ü\n\t€") == "ü\n\t€"


def test_black_or_white_on_a_colour() -> None:
    assert svg.on("#ffffff") == svg.on("#e8a317") == "#000000" and svg.on("#000000") == svg.on("#2f6fb5") == "#ffffff"


def test_the_user_s_settings_neither_show_nor_change() -> None:
    plain = drawn()
    with matplotlib.rc_context({"lines.linewidth": 9.0, "text.usetex": True, "font.size": 40, "path.simplify": False,
                                "axes.facecolor": "red", "hatch.linewidth": 7.0}):  # fmt: skip
        before = dict(matplotlib.rcParams)
        assert drawn() == plain
        assert dict(matplotlib.rcParams) == before
    with pytest.raises(ZeroDivisionError), svg.style():
        1 / 0  # noqa: B018
    assert matplotlib.rcParams["svg.fonttype"] != "none", "put back after an exception too"


def test_pyplot_is_not_imported_and_no_backend_is_chosen() -> None:
    code = ("import sys, matplotlib; before = matplotlib.rcParams._get_backend_or_none()\n"
            "from tests.report.test_figures import shown; from tests.report.samples import gpt2\n"
            "assert len(shown(gpt2().seen)) > 3\n"
            "assert matplotlib.rcParams._get_backend_or_none() == before\n"
            "assert 'matplotlib.pyplot' not in sys.modules")  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr

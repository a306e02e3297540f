"""The page as people see it: laid out by a real browser, as wide as a phone and as a screen, light and dark."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.report import browser
from tests.report.browser import Browser
from tests.report.run.test_html import made
from tests.report.samples import RUNS

Image = pytest.importorskip("PIL.Image")
WIDTHS = (375, 1280)


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Browser:
    return browser.installed(tmp_path_factory.mktemp("chromium"))


@pytest.mark.parametrize("run", sorted(RUNS))
def test_no_page_scrolls_sideways_and_no_label_lies_over_another(chromium: Browser, run: str) -> None:
    looks = chromium.look(made(run), *WIDTHS)
    assert [(seen.view, seen.width) for seen in looks] == [(width, width) for width in WIDTHS]
    assert [seen.overlaps for seen in looks] == ["", ""]
    assert run == "empty" or looks[0].height > looks[1].height > 1000


def test_what_is_too_wide_and_what_overlaps_would_be_seen(chromium: Browser) -> None:
    wide = made("cpu").replace("<main>", '<main><div style="width:400px">x</div>')
    assert [seen.width for seen in chromium.look(wide, *WIDTHS)] == [416, 1280]
    texts = '<svg viewBox="0 0 90 20"><text x="0" y="15">one</text><text x="5" y="15">two</text></svg>'
    assert chromium.look(made("cpu").replace("<main>", f"<main>{texts}"), 375)[0].overlaps == "one / two"
    names = '<figure class="bars"><b class="value">three</b><b class="value" style="margin-left:-9px">four</b></figure>'
    assert chromium.look(made("cpu").replace("<main>", f"<main>{names}"), 375)[0].overlaps == "three / four"


def pixels(path: Path, width: int) -> tuple[set[tuple[int, int, int]], float]:
    """The colors of a picture and the brightness of the one that most of it has, 0 to 255."""
    picture = Image.open(path).convert("RGB")
    assert picture.width >= width
    colors = picture.crop((0, 0, width, picture.height)).getcolors(1 << 24)
    most = max(colors)[1]
    return {color for _, color in colors}, sum(most) / 3


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_it_is_a_picture_in_the_reader_s_colors(chromium: Browser, width: int, dark: bool) -> None:
    page = made("gpt2")
    (seen,) = chromium.look(page, width, dark=dark)
    assert seen.dark is dark and seen.height > 1500
    colors, ground = pixels(chromium.picture(page, width, 1500, dark=dark), width)
    assert len(colors) > 200, "blank"
    assert ground < 60 if dark else ground > 200
    assert any(max(color) - min(color) > 100 for color in colors), "no color at all: the pictures are missing"


def test_a_blank_page_would_be_seen(chromium: Browser) -> None:
    colors, ground = pixels(chromium.picture("<body style='background:#fff'></body>", 375, 300, dark=False), 375)
    assert len(colors) == 1 and ground == 255


def test_a_browser_that_hangs_is_killed_with_its_children(tmp_path: Path) -> None:
    child = "import subprocess, sys, time; print(subprocess.Popen(['sleep', '60']).pid, flush=True); time.sleep(60)"
    started = time.monotonic()
    with pytest.raises(subprocess.TimeoutExpired) as caught:
        browser.run([sys.executable, "-c", child], tmp_path, limit_s=3.0)
    assert time.monotonic() - started < 20
    said = caught.value.stdout
    grandchild = int(said if isinstance(said, str) else said.decode())
    end = time.monotonic() + 5
    while Path(f"/proc/{grandchild}").exists() and "Z" not in state(grandchild) and time.monotonic() < end:
        time.sleep(0.05)
    assert not Path(f"/proc/{grandchild}").exists() or state(grandchild) == "Z"


def state(process: int) -> str:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


def test_without_a_browser_it_skips(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", os.devnull)
    with pytest.raises(pytest.skip.Exception, match="no Chromium"):
        browser.installed(tmp_path)

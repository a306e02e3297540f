"""Chromium without a window, for tests that look at a page. Local files only; nothing is left running."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
LIMIT_S = 60.0
_DARK, _LIGHT = 0, 1  # Blink's PreferredColorScheme
_MEASURE = """<script>
const inside = (box, frame) => {
  if (!frame) return box;
  const edge = frame.getBoundingClientRect();
  return {left: Math.max(box.left, edge.left), right: Math.min(box.right, edge.right),
    top: Math.max(box.top, edge.top), bottom: Math.min(box.bottom, edge.bottom)};
};
addEventListener("load", () => parent.postMessage({
  width: document.documentElement.scrollWidth, height: document.documentElement.scrollHeight, view: innerWidth,
  dark: matchMedia("(prefers-color-scheme: dark)").matches, boxes: document.querySelectorAll("svg").length,
  overlaps: [...document.querySelectorAll("svg, figure.bars")].flatMap(picture => {
    const labels = "text, .name, .value, .detail, .note, .ruler span, .legend span, .legend b, .legend small, " +
      ".solid b, .solid span span";
    const texts = [...picture.querySelectorAll(labels)].filter(text => text.textContent)
      .map(text => [text.textContent, inside(text.getBoundingClientRect(), text.closest(".solid"))])
      .filter(([, box]) => box.right - box.left > 1 && box.bottom - box.top > 1);
    return texts.flatMap(([one, a], index) => texts.slice(index + 1).filter(([, b]) =>
      Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1 &&
      Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 3).map(([two]) => one + " / " + two));
  }).join(", ")}, "*"));
</script>"""
"""Goes into a copy of the page only: the page itself needs no script."""
_FRAME = """<!DOCTYPE html><body style="margin:0">
<script>addEventListener("message", event => {{
  const said = document.body.appendChild(document.createElement("data"));
  for (const [name, value] of Object.entries(event.data)) said.setAttribute("data-" + name, value);
}});</script>{frames}</body>"""
"""A window cannot be made as narrow as a phone, but a frame in it can."""
_INSIDE = '<iframe src="page.html" style="border:0;width:{width}px;height:{height}px;display:block"></iframe>'


@dataclass(frozen=True)
class Seen:
    """What a browser made of a page."""

    width: int
    """Of the content: more than ``view`` means that the page scrolls sideways."""
    view: int
    height: int
    dark: bool
    overlaps: str
    """Texts of one picture that lie over each other."""


class Browser:
    """One Chromium with its own profile below ``folder``."""

    def __init__(self, program: str, folder: Path) -> None:
        self._program, self._folder = program, folder

    def look(self, page: str, *widths: int, dark: bool = False) -> list[Seen]:
        """Lay the page out at so many CSS pixels, in one start of the browser for all of the widths."""
        assert "</body>" in page
        html = self._run(page.replace("</body>", f"{_MEASURE}</body>"), widths, 800, dark, "--dump-dom")
        told = [dict(re.findall(r'data-(\w+)="([^"]*)"', data)) for data in re.findall(r"<data [^>]*>", html)]
        seen = {
            int(found["view"]): Seen(
                int(found["width"]),
                int(found["view"]),
                int(found["height"]),
                found["dark"] == "true",
                found["overlaps"],
            )
            for found in told
        }
        return [seen[width] for width in widths]

    def picture(self, page: str, width: int, height: int, *, dark: bool) -> Path:
        """A screenshot as PNG: as wide as the window, so at least ``width``."""
        path = self._folder / "shot.png"
        path.unlink(missing_ok=True)
        self._run(page, (width,), height, dark, f"--screenshot={path}")
        return path

    def _run(self, page: str, widths: Sequence[int], height: int, dark: bool, *wanted: str) -> str:
        (self._folder / "page.html").write_text(page, encoding="utf-8")
        frame = self._folder / "frame.html"
        frames = "".join(_INSIDE.format(width=width, height=height) for width in widths)
        frame.write_text(_FRAME.format(frames=frames), encoding="utf-8")
        return run(
            [
                self._program,
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--disable-dev-shm-usage",
                "--hide-scrollbars",
                "--no-first-run",
                "--disable-background-networking",
                f"--user-data-dir={self._folder / 'profile'}",
                f"--window-size={max(500, *widths)},{height}",
                f"--blink-settings=preferredColorScheme={_DARK if dark else _LIGHT}",
                "--virtual-time-budget=3000",
                *wanted,
                frame.as_uri(),
            ],
            self._folder,
        )


def run(command: Sequence[str], home: Path, limit_s: float = LIMIT_S) -> str:
    """Run a program in a process group of its own and leave none of it behind; what it wrote to its output."""
    environment = {**os.environ, "HOME": str(home), "XDG_RUNTIME_DIR": str(home)}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment, start_new_session=True
    )
    try:
        return process.communicate(timeout=limit_s)[0]
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if process.stdout:
            process.stdout.close()


def installed(folder: Path) -> Browser:
    """A browser; skips the test where there is none."""
    program = next((path for name in NAMES if (path := shutil.which(name))), None)
    if program is None or sys.platform != "linux":
        pytest.skip("no Chromium on this machine")
    return Browser(program, folder)

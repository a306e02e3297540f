"""The line that adds to an attribute, in each way of writing it, and what empties it."""

from __future__ import annotations

from pathlib import Path

import pytest

from fastloop.evidence.model.kept_lines import find_line

SOURCE = """
class Net:
    def __init__(self):
        self.kept = []

    def training_step(self, batch, batch_idx):
        other.append(batch)
        {line}

    def {hook}(self):
        {end}

class Other:
    def step(self):
        self.kept.append(1)
"""


def find(folder: Path, line: str, hook: str = "on_train_epoch_end", end: str = "pass") -> tuple[str | None, bool]:
    file = folder / hook / "net.py"  # a file is read once
    file.parent.mkdir()
    file.write_text(SOURCE.format(line=line, hook=hook, end=end))
    return find_line([(str(file), "Net")], "kept")


@pytest.mark.parametrize(
    "line",
    [
        "self.kept.append(batch)",
        "self.kept['loss'].append(batch)",
        "self.kept[batch_idx] = batch",
        "self.kept += [batch]",
        "self.kept = self.kept + [batch]",
        "self.kept.update(batch)",
        "self.kept(batch)",
    ],
)
def test_a_line_that_adds(line: str, tmp_path: Path) -> None:
    assert find(tmp_path, line) == ("net.py:8", False)


@pytest.mark.parametrize("line", ["print(self.kept)", "self.kept.count(batch)", "self.keep(batch)", "kept = batch"])
def test_a_line_that_adds_nothing(line: str, tmp_path: Path) -> None:
    assert find(tmp_path, line)[0] is None


@pytest.mark.parametrize("end", ["self.kept.clear()", "self.kept = []", "self.kept.reset()", "del self.kept[:]"])
def test_what_empties_it_counts_except_at_the_start(end: str, tmp_path: Path) -> None:
    assert find(tmp_path, "self.kept.append(batch)", end=end) == ("net.py:8", True)
    assert find(tmp_path, "self.kept.append(batch)", "on_train_start", end) == ("net.py:8", False)

"""The source of code objects is that of `inspect`, without its search through all imported modules."""

from __future__ import annotations

import inspect
import json
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from fastloop.evidence.samples.source import parse_code, read_source
from tests import models


def decorated(function: Any) -> Any:
    return function


@decorated
def function(x: int) -> int:
    return x + 1


pick = lambda pair: (  # noqa: E731
    pair[0]
)


@pytest.mark.parametrize("what", [function, pick, json.dumps, models.trainer, torch.nn.Linear.forward])
def test_it_is_what_inspect_reads(what: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    said = inspect.getsource(what.__code__)
    with monkeypatch.context() as patch:
        patch.setattr(inspect, "getmodule", None)  # the search
        assert read_source(what.__code__) == said


def test_a_module_in_an_archive_is_read_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with zipfile.ZipFile(tmp_path / "packed.zip", "w") as archive:
        archive.writestr("in_an_archive.py", "def add(x):\n    return x + 1\n")
    monkeypatch.syspath_prepend(str(tmp_path / "packed.zip"))
    import in_an_archive  # type: ignore[import-not-found]

    assert read_source(in_an_archive.add.__code__) == "def add(x):\n    return x + 1\n"
    monkeypatch.delitem(sys.modules, "in_an_archive")


def test_what_has_no_source_says_so() -> None:
    made: dict[str, Any] = {}
    exec("def typed(): return 1", made)
    with pytest.raises(OSError, match="source"):
        read_source(made["typed"].__code__)
    with pytest.raises(TypeError):
        read_source(None)
    assert parse_code(made["typed"].__code__) is None and parse_code(None) is None


def test_a_file_that_became_shorter_since_has_no_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left of it is not the code that runs."""
    path = tmp_path / "became_shorter.py"
    path.write_text("import os\n\n\ndef add(x):\n    return x + 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import became_shorter  # type: ignore[import-not-found]

    assert "x + 1" in read_source(became_shorter.add.__code__)
    path.write_text("import os\n")
    with pytest.raises(OSError, match="shorter"):
        read_source(became_shorter.add.__code__)
    monkeypatch.delitem(sys.modules, "became_shorter")

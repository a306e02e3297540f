"""Which imports of a script may be made before it runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from fastloop.experiments.trials.first_imports import list_first_imports

BEGINS = '"""A script."""\nfrom __future__ import annotations\nimport os, sys\nimport torch\n'


@pytest.mark.parametrize(
    ("then", "more"),
    [
        ("from torchvision import models, transforms as T", ["from torchvision import models, transforms as T"]),
        ("import json\nimport torchmetrics.text", ["import torchmetrics.text"]),
        ("import os, numpy as np", ["import os, numpy as np"]),
        ("os.environ['HF_HOME'] = '/a'\nimport transformers", []),
        ("import sets_variables\nimport transformers", []),
        ("from . import mine\nimport transformers", []),
        ("import mine\nimport transformers", []),
        ("import timm.models\nimport transformers", []),
        ("if True:\n    import transformers", []),
        ("try:\n    import transformers\nexcept ImportError: ...", []),
    ],
)
def test_what_precedes_all_other_code(tmp_path: Path, then: str, more: list[str]) -> None:
    """`mine` and `timm` lie beside the script."""
    (tmp_path / "mine.py").touch()
    (tmp_path / "timm").mkdir()
    script = tmp_path / "train.py"
    script.write_text(f"{BEGINS}{then}\nprint()\nimport scipy\n")
    assert list_first_imports(script) == ["import torch", *more]


@pytest.mark.parametrize("text", [None, "import torch\nthis is no Python", "\0"])
def test_what_cannot_be_read_has_none(tmp_path: Path, text: str | None) -> None:
    script = tmp_path / "train.py"
    if text is not None:
        script.write_text(text)
    assert list_first_imports(script) == []

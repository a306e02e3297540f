"""What is wrong below ``trainer:`` is told from Lightning's source alone."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import inspect
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args

import lightning.pytorch as pl
import pytest

from fastloop.bridge.fit.trainer_arguments import SOURCE, check_trainer_arguments, read_arguments
from fastloop.config.loading import load
from fastloop.errors import ConfigError


def refusal(override: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        check_trainer_arguments(load("resnet50", overrides=[override]))
    return caught.value


@pytest.mark.short
def test_the_arguments_are_those_of_the_installed_trainer() -> None:
    parameters = inspect.signature(pl.Trainer).parameters
    known = read_arguments()
    assert known is not None and list(known) == list(parameters)
    wrong = [
        name
        for name, kinds in known.items()
        if kinds
        and not isinstance(parameters[name].default, tuple(kind for kind in kinds if isinstance(kind, type)))
        and type(parameters[name].default) is not int
    ]
    assert wrong == [], "a default that its own argument would refuse"
    assert known["profiler"] == (str, type(None)) and known["inference_mode"] == (bool,)
    assert known["precision"] is not None and "bf16-mixed" in get_args(known["precision"][0])


@pytest.mark.short
@pytest.mark.parametrize(
    ("override", "got", "why", "do"),
    [
        ("trainer.max_epoch=3", "trainer.max_epoch", "takes no such argument", "write max_epochs"),
        ("trainer.wurst=3", "trainer.wurst", "takes no such argument", "see lightning.pytorch.Trainer"),
        ("trainer.profiler={class_path: Simple}", "trainer.profiler: {", "text or null; {", "write text or null"),
        ("trainer.logger=[csv]", "trainer.logger: ['csv']", "true, false or null", "write true, false or null"),
        ("trainer.min_epochs=2.5", "trainer.min_epochs: 2.5", "2.5 is a float", "an integer or null"),
        ("trainer.accumulate_grad_batches='4'", "grad_batches: '4'", "'4' is text", "write 4, without quotes"),
        ("trainer.accumulate_grad_batches=0", "grad_batches: 0", "at least 1", "write 1 or more"),
        ("trainer.accumulate_grad_batches=-2", "grad_batches: -2", "at least 1", "write 1 or more"),
        ("trainer.limit_val_batches=none", "limit_val_batches: 'none'", "a number or null", "a number or null"),
        ("trainer.detect_anomaly=yes", "detect_anomaly: 'yes'", "must be true or false", "write true"),
        ("trainer.precision={a: 1}", "trainer.precision: {'a': 1}", "it must be one of 64, 32, 16", "write one of 64"),
        ("trainer.precision=bf17", "trainer.precision: 'bf17'", "64-true, bf16 or null; 'bf17' is not", "write bf16"),
        ("trainer.precision=bf16-mxied", "'bf16-mxied'", "it must be one of", "write bf16-mixed"),
        ("trainer.precision=true", "trainer.precision: true", "true is a boolean", "write one of 64, 32, 16"),
        ("trainer.precision=8", "trainer.precision: 8", "8 is not", "write one of 64, 32, 16"),
        ("trainer.deterministic=wran", "'wran'", "'wran' is not", "write warn"),
        ("trainer.plugins=[slurm]", "trainer.plugins: ['slurm']", "it must be null", "write null"),
        ("run.accelerator=gpuu", "run.accelerator: 'gpuu'", "one of auto, cpu, cuda, gpu, mps, tpu", "write gpu"),
        ("run.accelerator=cdua", "run.accelerator: 'cdua'", "one of auto, cpu, cuda, gpu, mps, tpu", "write cuda"),
        ("trainer.max_time=[1, 2]", "trainer.max_time: [1, 2]", "text or a mapping or null", "text or a mapping"),
        ("trainer.deterministic='yes'", "'yes'", "'yes' is not", "write true"),
        ("trainer.max_time=12:30", "'12:30'", "four parts", 'write "00:00:12:30"'),
        ("trainer.max_time=1:12:30", "'1:12:30'", "four parts", 'write "00:1:12:30"'),
    ],
)
def test_what_no_trainer_takes_is_refused(override: str, got: str, why: str, do: str) -> None:
    error = refusal(override)
    assert got in error.got and why in error.why and do in error.do and "(command line)" in error.got


@pytest.mark.short
@pytest.mark.parametrize(
    "override",
    [
        "trainer.precision=32",
        "trainer.precision='32'",
        "trainer.precision=bf16",
        "trainer.precision=bf16-mixed",
        "trainer.precision=null",
        "run.accelerator=gpu",
        "run.accelerator=xpu",
        "run.accelerator=hpu",
        "trainer.profiler=simple",
        "trainer.profiler=null",
        "trainer.max_time={minutes: 5}",
        "trainer.max_time='00:00:05:00'",
        "trainer.limit_val_batches=2",
        "trainer.limit_val_batches=0.5",
        "trainer.fast_dev_run=7",
        "trainer.fast_dev_run=true",
        "trainer.deterministic=warn",
        "trainer.strategy=ddp",
        "trainer.default_root_dir=out",
    ],
)
def test_what_a_trainer_takes_passes(override: str) -> None:
    config = load("resnet50", overrides=[override])
    check_trainer_arguments(config)
    assert set(config.trainer) <= set(read_arguments() or ()), "nothing was checked"


@pytest.mark.parametrize(
    "source",
    [None, "class Trainer(:", "class Trainer: pass", "class Trainer:\n    def __init__(self, **all): ...\n"],
    ids=["missing", "broken", "bare", "open"],
)
def test_a_lightning_that_does_not_show_them_is_left_to_lightning(
    source: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load("resnet50", overrides=["trainer.max_epoch=3"])
    with pytest.raises(ConfigError):
        check_trainer_arguments(config)
    (tmp_path / SOURCE).parent.mkdir(parents=True)
    if source is not None:
        (tmp_path / SOURCE).write_text(source)
    spec = importlib.machinery.ModuleSpec("lightning", None, origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    assert read_arguments() is None
    check_trainer_arguments(config)


def test_annotations_of_a_later_style_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / SOURCE).parent.mkdir(parents=True)
    (tmp_path / SOURCE).write_text(
        "class Trainer:\n"
        "    def __init__(self, *, a: int | None = 1, b: Logger | list[Logger] | bool = True, c=3): ...\n"
    )
    spec = importlib.machinery.ModuleSpec("lightning", None, origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    assert read_arguments() == {"a": (int, type(None)), "b": (bool,), "c": None}


PARTS = {
    SOURCE: """
from lightning.fabric.parts import _WORDS as _A, _PATH, _OPEN
class Trainer:
    def __init__(self, *, a: Optional[_A], b: _PATH, c: _OPEN, d: _GONE, e: Union[str, _A]): ...
""",
    "fabric/parts/__init__.py": """
from lightning.fabric.parts.words import _WORDS
_PATH = Union[str, Path]
_OPEN = frozenset()
""",
    "fabric/parts/words.py": """
_NUMBERS = Literal[1]
_WORDS = Union[_NUMBERS, Literal["b", "c"]]
""",
}


def test_aliases_are_followed_through_lightnings_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path, source in PARTS.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(source)
    spec = importlib.machinery.ModuleSpec("lightning", None, origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    assert read_arguments() == {
        "a": (Literal[1, "b", "c"], type(None)),
        "b": (str,),
        "c": None,
        "d": None,
        "e": (Literal[1], str),
    }
    config = replace(load("resnet50"), trainer={"a": "c", "c": "word", "d": 3, "e": "anything"})
    check_trainer_arguments(config)
    with pytest.raises(ConfigError, match="it does not take a plain value of this type"):
        check_trainer_arguments(replace(config, trainer={"c": [1]}))


@pytest.mark.parametrize(
    "arguments",
    [
        ("run", "resnet50"),
        ("plan", "resnet50"),
        ("tune", "resnet50", "workers"),
        ("ab", "resnet50", "--vs", "amp"),
        ("climb", "resnet50"),
        ("headspace", "resnet50"),
        ("diagnose", "resnet50"),
    ],
    ids=lambda arguments: arguments[0],
)
def test_every_command_says_so_without_torch(arguments: Any, tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "sys.modules['torch'] = None  # an import of it fails, and of Lightning, too\n"
        "from fastloop.cli import main\nmain()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments, "trainer.deterministic=wran"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 2 and "do  write warn" in done.stderr, done.stderr
    assert list(tmp_path.iterdir()) == []

"""A fit's files: where they go, what they hold, what must never be in them."""

from __future__ import annotations

import dataclasses
import errno
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.loggers.logger import DummyLogger

from fastloop import FastLoop, diagnose
from fastloop.bridge.fit import run_directory
from fastloop.config.loading import load, load_callback_config
from fastloop.ladder import collect_cards
from fastloop.records.measurement import PARTS, Measurement
from fastloop.records.plan import Finding
from tests.models import Regression, loader, trainer

WORKERS = {"watch": {"warmup_steps": 1}, "rungs": {"workers": {"enabled": True, "count": 1}}}


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """All it says and warns of on rank 0."""
    lines: list[str] = []
    for module in ("callback", "lines", "run_directory"):
        for name in ("rank_zero_info", "rank_zero_warn"):
            monkeypatch.setattr(f"fastloop.bridge.fit.{module}.{name}", lines.append, raising=False)
    return lines


def fit(loop: FastLoop | None, **settings: Any) -> None:
    settings = {"max_epochs": 2, **settings, "callbacks": [loop] if loop else []}
    trainer(**settings).fit(Regression(), loader())


# -- what they hold -------------------------------------------------------------------------------------------------

NUMBER = (int, float, type(None))
SHAPES: dict[str, dict[str, Any]] = {
    "measurement.json": {
        "schema": int,
        "steps": int,
        "samples_per_s": NUMBER,
        "wall_ms": NUMBER,
        "lead_ms": NUMBER,
        "loss": list,
        "step_ms": dict.fromkeys(("mean", "median", "p10", "p90"), NUMBER),
        "window_too_short": bool,
        "parts_ms": dict.fromkeys(PARTS, NUMBER),
        "peak_gib": NUMBER,
        "tflop_per_s": NUMBER,
        "evidence": dict,
        "gpu": {
            "nvml_busy_pct": NUMBER,
            "sm_active_pct": NUMBER,
            "tensor_active_pct": NUMBER,
            "dram_active_pct": NUMBER,
            "watts": NUMBER,
        },
        "mfu": dict.fromkeys(("datasheet", "measured_peak", "dtype_in_use"), NUMBER),
        "tokens_per_s": NUMBER,
        "joule_per_sample": NUMBER,
        "usd_per_million_samples": NUMBER,
        "watch_us_per_step": NUMBER,
    },
    "verdicts.json": {
        "schema": int,
        "verdicts": [{"rung": str, "took": (bool, type(None)), "why": str, "parity_class": str}],
    },
    "findings.json": {
        "schema": int,
        "findings": [
            {
                "bottleneck": str,
                "share_pct": NUMBER,
                "why": str,
                "patch": (dict, type(None)),
                "ceiling_gain_pct": NUMBER,
            }
        ],
    },
    "plan.json": {"schema": int, "parity_class": str, "rungs": [{"rung": str, "status": str}]},
    "env.json": {
        "schema": int,
        "hardware": dict,
        "driver": (str, type(None)),
        "versions": dict,
        "commit": (str, type(None)),
    },
}
"""The contract of design.md 2.4: keys that must be there and what they hold."""
FILES = {*SHAPES, "config.resolved.yaml", "config.diff.yaml", "report.md", "report.html"}


def breaches(content: Any, shape: Any, path: str = "") -> list[str]:
    """Where a file's content breaks its contract."""
    if isinstance(shape, dict):
        if not isinstance(content, dict):
            return [f"{path} is no object"]
        missing = [f"{path}.{key} is missing" for key in shape if key not in content]
        there = [key for key in shape if key in content]
        return missing + [each for key in there for each in breaches(content[key], shape[key], f"{path}.{key}")]
    if isinstance(shape, list):
        return [each for index, item in enumerate(content) for each in breaches(item, shape[0], f"{path}[{index}]")]
    right = isinstance(content, shape) and not (isinstance(content, bool) and shape in (int, NUMBER))
    return [] if right else [f"{path} is {content!r}"]


def strictly(text: str) -> Any:
    """JSON as the standard has it: no NaN, no Infinity."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.mark.parametrize("steps", [3, 40])
@pytest.mark.parametrize("config", [None, WORKERS], ids=["watch", "workers"])
def test_the_files_keep_the_contract(config: Any, steps: int, tmp_path: Path) -> None:
    fit(FastLoop(config, out=tmp_path, quiet=True), max_epochs=-1, max_steps=steps)
    assert {path.name for path in tmp_path.iterdir()} == FILES
    for name, shape in SHAPES.items():
        content = strictly((tmp_path / name).read_text())
        assert breaches(content, shape, name) == []
        assert content["schema"] == 1
    assert strictly((tmp_path / "env.json").read_text())["name"] == "Regression"
    measured = strictly((tmp_path / "measurement.json").read_text())
    assert len(measured["loss"]) == steps and (measured["step_ms"]["mean"] is None) == (measured["steps"] == 0)


def test_the_contract_check_finds_breaches() -> None:
    shape = SHAPES["verdicts.json"]
    good = {"schema": 1, "verdicts": [{"rung": "pin", "took": None, "why": "", "parity_class": "exact"}]}
    assert breaches(good, shape) == []
    assert breaches({"schema": True, "verdicts": [{"rung": 1}]}, shape) == [
        ".schema is True",
        ".verdicts[0].took is missing",
        ".verdicts[0].why is missing",
        ".verdicts[0].parity_class is missing",
        ".verdicts[0].rung is 1",
    ]
    with pytest.raises(ValueError, match="NaN is not JSON"):
        strictly('{"loss": [NaN]}')


def test_losses_that_are_no_numbers_become_null(tmp_path: Path) -> None:
    class Diverges(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return super().training_step(batch, batch_idx) * (float("nan") if batch_idx == 2 else float("inf"))

    trainer(callbacks=[FastLoop(out=tmp_path, quiet=True)]).fit(Diverges(), loader())
    assert strictly((tmp_path / "measurement.json").read_text())["loss"] == [None] * 8


def test_all_reports_use_the_same_words(tmp_path: Path, said: list[str]) -> None:
    loop = FastLoop(out=tmp_path)
    fit(loop)
    assert loop.report_extras == {"name": "Regression", "then": (), "later": ()}
    assert "   Regression 32-true   1x cpu" in said[0] and said[0] in (tmp_path / "report.md").read_text()
    assert "Regression 32-true" in (tmp_path / "report.html").read_text()


def test_their_name_is_the_recipe_s_where_there_is_one_and_next_steps_follow_the_findings() -> None:
    config = load("cifar10")
    waits = Finding(bottleneck="data_wait", share_pct=50.0, why="x", patch={"rungs": {"workers": {"enabled": True}}})
    seen = Measurement(device="cuda", evidence={"loader": {"kind": "DataLoader", "num_workers": 0, "usable_cpus": 8}})
    loop: Any = SimpleNamespace(config=config, findings=(waits,), measurement=seen)
    assert run_directory.choose_report_extras(loop, Regression())["name"] == "cifar10"
    assert (
        run_directory.choose_report_extras(loop, None)["then"],
        run_directory.choose_report_extras(loop, None)["later"],
    ) == diagnose.list_next_steps((waits,), seen, collect_cards())
    assert "prefetch" in run_directory.choose_report_extras(loop, None)["then"]
    loop.config = load("cifar10", more=["prefetch"])
    assert "prefetch" not in run_directory.choose_report_extras(loop, None)["then"]
    loop.config, _ = load_callback_config("safe")
    assert run_directory.choose_report_extras(loop, Regression())["name"] == "Regression"
    loop.config = dataclasses.replace(loop.config, script="train")
    assert run_directory.choose_report_extras(loop, Regression())["name"] == "train"


# -- where they go --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [CSVLogger, TensorBoardLogger])
def test_files_go_below_the_log_dir(kind: type, tmp_path: Path) -> None:
    loop = FastLoop(quiet=True)
    logger = kind(tmp_path, name="läufe mit leerzeichen", version="1")
    places = []
    for _ in range(2):
        fit(loop, logger=logger)
        places.append(loop.run_dir)
    assert places[0] != places[1], "a second fit in the same second must not overwrite the first one's files"
    for place in places:
        assert place is not None and place.parent == Path(logger.log_dir) / "fastloop"
        assert re.fullmatch(r"\d{8}T\d{6}Z(-\d+)?", place.name) and {path.name for path in place.iterdir()} == FILES


@pytest.mark.parametrize("kind", ["comparison.json", "climb.json", "tune.json"])
def test_the_report_of_an_experiment_is_not_replaced(kind: str, tmp_path: Path, said: list[str]) -> None:
    (tmp_path / kind).write_text("{}")
    fit(FastLoop(out=tmp_path))
    assert (tmp_path / "report.md").is_file(), "there was no report to replace"
    (tmp_path / "report.html").unlink()
    (tmp_path / "report.md").write_text("of the experiment")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    loop = FastLoop(out=tmp_path)
    fit(loop)
    assert loop.run_dir is not None and loop.run_dir.parent == tmp_path / "fastloop"
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == before
    report = loop.run_dir / "report.html"
    assert said[-1] == f"REPORT   {report}   ({tmp_path} holds the report of an experiment)"


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({}, "the Trainer has no logger; write FastLoop(out=DIR)"),
        ({"fast_dev_run": 2}, "in fast_dev_run nothing is written without out=DIR"),
    ],
    ids=["no logger", "fast_dev_run"],
)
def test_without_a_log_dir_nothing_is_written(
    settings: Any, why: str, tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    loop = FastLoop()
    fit(loop, **settings)
    assert loop.run_dir is None and list(tmp_path.iterdir()) == [] and said[-1] == f"REPORT   none: {why}"


def test_a_log_dir_on_another_machine_is_none(tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    class Remote(DummyLogger):
        save_dir = "s3://bucket/runs"

    loop = FastLoop()
    fit(loop, logger=Remote())
    assert said[-1] == "REPORT   none: the logger has no local directory; write FastLoop(out=DIR)"
    assert loop.run_dir is None and loop.measurement is not None and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["../../x", "ünï cödé", "a" * 300, "-rf", ".."])
def test_the_name_of_a_config_cannot_lead_elsewhere(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "down"
    folder.mkdir(parents=True)
    (tmp_path / "x.yaml").write_text("watch: {warmup_steps: 1}\n")
    path = folder / f"{name[:200]}.yaml"
    if not path.exists():
        path.write_text("watch: {warmup_steps: 1}\n")
    before = set(tmp_path.rglob("*"))
    loop = FastLoop(path, out=folder / "run", quiet=True)
    fit(loop)
    written = set(tmp_path.rglob("*")) - before
    assert written and all((folder / "run") in [each, *each.parents] for each in written)
    assert "/" not in loop.config.name and loop.config.name not in ("", ".", "..") and len(loop.config.name) <= 100


def test_secrets_reach_no_file_and_no_line(tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    secret = "hunter2-very-secret"
    monkeypatch.setattr(sys, "argv", ["train.py", f"--hf_token={secret}", "--api-key", secret])
    monkeypatch.setenv("FASTLOOP_PASSWORD", secret)
    config = {
        "recipe": {"api_key": secret, "path": f"https://{secret}@host"},
        "trainer": {"logger_token": secret},
        "watch": {"warmup_steps": 1},
    }
    fit(FastLoop(config, out=tmp_path))
    texts = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert "***" in texts["env.json"]
    assert not [name for name, text in texts.items() if secret in text]
    assert secret not in "\n".join(said)
    assert "api-key" in texts["env.json"], "the arguments were not written at all: nothing was masked"


@pytest.mark.parametrize("kind", ["below a file", "no permission"])
def test_a_folder_that_cannot_be_written_is_one_warning(
    kind: str, tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    where = tmp_path / "file" / "run"
    if kind == "no permission":
        where = tmp_path / "run"
        monkeypatch.setattr(Path, "mkdir", lambda *args, **kwargs: (_ for _ in ()).throw(PermissionError("read-only")))
    loop = FastLoop(out=where)
    fit(loop)
    warnings = [line for line in said if "could not be written" in line]
    assert len(warnings) == 1 and str(where) in warnings[0]
    assert loop.run_dir is None and loop.measurement is not None
    assert (
        said[-1]
        == f"REPORT   none: {where} cannot be written: {loop.unwritten}; write FastLoop(out=DIR) with another folder"
    )
    assert loop.unwritten == ("read-only" if kind == "no permission" else "Not a directory")


def test_of_a_disk_that_fills_up_the_measurement_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace, room = Path.replace, iter([True])

    def take_one(path: Path, target: Path) -> Path:
        if not next(room, False):
            raise OSError(errno.ENOSPC, "No space left on device")
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", take_one)
    loop = FastLoop(out=tmp_path)
    with pytest.warns(UserWarning, match="could not be written"):
        fit(loop)
    assert loop.unwritten == "No space left on device"
    assert [path.name for path in tmp_path.iterdir()] == ["measurement.json"]

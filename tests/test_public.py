"""What other people's scripts and files rely on: nine names, the YAML keys with their defaults, a cheap import."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import inspect
import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

import fastloop
from fastloop.config.loading import RunSettings, WatchSettings, load_callback_config
from fastloop.ladder import Ladder
from tests.bridge.launch import python

NAMES = [
    "ConfigError",
    "FastLoop",
    "FastLoopError",
    "Finding",
    "Ladder",
    "Measurement",
    "Plan",
    "Verdict",
    "cached_prefix",
]

KEYS: dict[str, Any] = {
    "strict": False,
    "rehearsal": "on",
    "run": {"max_steps": 200, "seed": 0, "devices": 1, "accelerator": "auto", "resume": None},
    "watch": {"enabled": True, "warmup_steps": 20, "trace_steps": 0, "usd_per_gpu_hour": None},
    "rungs": {
        "dali": {"enabled": False, "decode": "auto", "threads": "auto", "resize": "auto", "validation": False},
        "cache": {"enabled": False, "store": "auto", "size_gb": "auto", "path": None, "url": None},
        "nodes": {"enabled": False, "threads": "auto"},
        "workers": {
            "enabled": False,
            "count": "auto",
            "grow": False,
            "across_epochs": False,
            "prefetch_factor": 2,
            "persistent": "auto",
            "start_method": "auto",
        },
        "pin": {"enabled": False},
        "prefetch": {"enabled": False, "depth": 2, "uint8": "auto"},
        "batch": {
            "enabled": False,
            "micro_batch": "auto",
            "target_memory": 0.9,
            "global_batch": "keep",
            "lr_scaling": "none",
            "batch_norm": "groups",
            "loss_is_mean": False,
        },
        "amp": {"enabled": False, "mode": "bf16-mixed", "keep_fp32": [], "cache_weights": False},
        "layout": {"enabled": False},
        "attention": {"enabled": False, "backend": "auto"},
        "loss": {"enabled": False, "pad_vocabulary": "auto", "chunks": 1},
        "fused": {"enabled": False},
        "compile": {"enabled": False, "mode": "default", "dynamic": "auto", "scope": "auto", "pay_back": "auto"},
        "host": {"enabled": False, "gc_every_steps": "auto", "step_graph": False},
        "overlap": {
            "enabled": False,
            "gradient_as_bucket_view": True,
            "bucket_cap_mb": None,
            "static_graph": False,
            "comm_hook": "none",
        },
    },
}
"""A changed name or default breaks files that people have. Change this only together with a note in CHANGELOG.md."""


def test_the_names_are_these_nine_and_sorted() -> None:
    assert fastloop.__all__ == NAMES == sorted(NAMES)
    for name in NAMES:
        assert getattr(fastloop, name).__name__ == name
        assert inspect.getdoc(getattr(fastloop, name)), f"{name} has no docstring"
    with pytest.raises(AttributeError, match="no attribute 'FastLop'"):
        fastloop.FastLop  # noqa: B018


def test_importing_it_imports_neither_torch_nor_lightning(tmp_path: Path) -> None:
    heavy = "('torch', 'lightning', 'pytorch_lightning', 'numpy', 'omegaconf')"
    program = (
        "import sys, fastloop\n"
        f"print('FIRST', [name for name in {heavy} if name in sys.modules], len(fastloop.__version__) > 0)\n"
        "fastloop.Plan, fastloop.ConfigError, fastloop.Ladder, fastloop.cached_prefix\n"
        f"print('RECORDS', [name for name in {heavy} if name in sys.modules])\n"
        "from fastloop import FastLoop\n"
        "print('LOOP', 'torch' in sys.modules, 'lightning' in sys.modules)\n"
    )
    said = python("-c", program, cwd=tmp_path, executed=True)
    assert "FIRST [] True" in said and "RECORDS []" in said and "LOOP True True" in said, said


def test_it_is_typed() -> None:
    assert (files("fastloop") / "py.typed").is_file()


def test_the_version_is_the_distributions() -> None:
    assert fastloop.__version__ == importlib.metadata.version("lightning-fastloop")


def test_the_arguments_of_the_callback() -> None:
    arguments = inspect.signature(fastloop.FastLoop).parameters
    assert {name: argument.default for name, argument in arguments.items()} == {
        "config": None,
        "out": None,
        "strict": None,
        "quiet": False,
    }
    kinds = {name: argument.kind.name for name, argument in arguments.items()}
    assert kinds.pop("config") == "POSITIONAL_OR_KEYWORD" and set(kinds.values()) == {"KEYWORD_ONLY"}


def test_the_yaml_keys_and_their_defaults() -> None:
    config, _ = load_callback_config(None)
    assert {
        "run": dataclasses.asdict(RunSettings()),
        "watch": dataclasses.asdict(WatchSettings()),
        "rungs": json.loads(json.dumps(dataclasses.asdict(Ladder()))),  # tuples are lists in YAML
        "strict": config.strict,
        "rehearsal": config.rehearsal,
    } == KEYS
    assert config.values == {**KEYS, "recipe": {}, "trainer": {}}
    assert list(config.values["rungs"]) == list(KEYS["rungs"]), "the order of the ladder is the order of planning"

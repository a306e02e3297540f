"""Going on with an experiment: only where it began, as far as that is known."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fastloop.errors import ConfigError
from fastloop.evidence import machine as facts
from fastloop.experiments.ab import manifest
from fastloop.experiments.ab.arms import Ask
from fastloop.records import store
from fastloop.records.measurement import Measurement
from fastloop.records.run_files import Environment
from fastloop.records.store import decode
from tests.experiments.made_arms import MadeArm

H200 = {"name": "NVIDIA H200"}


def machine(
    gpus: list[dict[str, Any]] | None = None, cpu: str | None = "EPYC", driver: str | None = None, **versions: str
) -> dict[str, Any]:
    """What of ``env.json`` is looked at."""
    known = {"torch": "2.11.0", "lightning": "2.6.6", "lightning-fastloop": "0.1.0", **versions}
    return {"versions": known, "driver": driver, "hardware": {"cpu_model": cpu, "gpus": gpus or []}}


ON_GPU = machine([H200], driver="580")


def ran(folder: Path, environment: dict[str, Any], device: str, fails: bool = False) -> None:
    """A run of an earlier day."""
    trial = MadeArm(fails_at=0 if fails else None).run("base", folder, Ask())
    (folder / "env.json").write_text(json.dumps(environment))
    if not fails:
        store.save(folder, {"measurement.json": replace(trial.measurement or Measurement(), device=device)})


def refused(
    before: dict[str, Any], now: dict[str, Any], device: str, place: Path, patch: pytest.MonkeyPatch, **more: Any
) -> str:
    """Why it is refused; empty where it is not."""
    ran(place / "base" / "run-0", before, device, **more)
    patch.setattr(facts, "read_environment", lambda *_: now)
    try:
        manifest.refuse_others(place, [place / "base", place / "1-amp"])
    except ConfigError as error:
        assert error.got == f"--resume {place}" and error.do
        return error.why
    return ""


@pytest.mark.parametrize(
    ("before", "now", "device", "why"),
    [
        (machine(torch="2.10.0"), machine(), "cpu", "its runs are from torch 2.10.0, this is 2.11.0"),
        (
            machine(**{"lightning-fastloop": "0.0.9", "lightning": "2.5.0"}),
            machine(),
            "cpu",
            "its runs are from lightning 2.5.0, this is 2.6.6; fastloop 0.0.9, this is 0.1.0",
        ),
        (machine(cpu="Xeon"), machine(), "cpu", "its runs are from Xeon, this is EPYC"),
        (machine([H200], driver="570"), ON_GPU, "cuda", "its runs are from driver 570, this is 580"),
        (machine([{"name": "NVIDIA A100"}]), ON_GPU, "cuda", "its runs are from NVIDIA A100, this is NVIDIA H200"),
        (
            machine([H200] * 3 + [{"name": "NVIDIA L4"}]),
            ON_GPU,
            "cuda",
            "its runs are from NVIDIA H200, NVIDIA L4, this is NVIDIA H200",
        ),
        (ON_GPU, machine(), "cuda", "its runs are from NVIDIA H200, this is a machine without a GPU"),
    ],
    ids=["torch", "two", "cpu", "driver", "gpu", "another kind beside", "none"],
)
def test_elsewhere_it_does_not_go_on(
    before: dict[str, Any], now: dict[str, Any], device: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert refused(before, now, device, tmp_path, monkeypatch) == why


@pytest.mark.parametrize(
    ("before", "now", "device"),
    [
        (machine(), machine(), "cpu"),
        (ON_GPU, ON_GPU, "cuda"),
        (machine([H200] * 4), ON_GPU, "cuda"),
        (machine(), machine(driver="580"), "cpu"),  # no driver was known
        (machine(), ON_GPU, "cuda"),  # NVML could not be asked then
        (machine([H200], cpu="Xeon"), machine([H200]), "cuda"),
        (machine(cpu=None), machine(), "cpu"),
        ({}, machine(), "cpu"),
        (machine(torch="2.11.0"), {}, "cpu"),
    ],
    ids=["cpu", "gpu", "fewer", "no driver", "no NVML", "a GPU's CPU", "no CPU", "nothing then", "now"],
)
def test_where_it_began_it_does_and_what_is_not_known_differs_from_nothing(
    before: dict[str, Any], now: dict[str, Any], device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert refused(before, now, device, tmp_path, monkeypatch) == ""


def test_a_run_that_will_be_repeated_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert refused(machine(torch="2.10.0"), machine(), "cuda", tmp_path, monkeypatch, fails=True) == ""


def test_what_an_environment_says_of_versions() -> None:
    known = decode(ON_GPU, Environment)
    assert known is not None and manifest.list_versions(known) == {
        "torch": "2.11.0",
        "lightning": "2.6.6",
        "fastloop": "0.1.0",
        "driver": "580",
    }
    assert set(manifest.list_versions(Environment()).values()) == {None}

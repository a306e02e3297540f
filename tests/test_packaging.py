"""The wheel: what is in it, that it works without the repository, and that it moves no other package."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import zipfile
from email import message_from_string
from email.message import Message
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import fastloop
from tests.commands.command_line import ROOT

pytestmark = pytest.mark.slow
FOUND_NOTHING = re.compile("No matching distribution|Could not find a version|Retrying|ConnectionError|Temporary fail")


def run(*command: str | Path, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "FASTLOOP_RECIPES")}
    return subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**clean, **env},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )


def pip(*arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    return run(sys.executable, "-m", "pip", "install", "--quiet", *arguments, cwd=cwd)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    done = run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, ROOT, cwd=out)
    assert done.returncode == 0, done.stdout + done.stderr
    (made,) = out.glob("*.whl")
    return made


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel installed in it and nothing else."""
    target = tmp_path_factory.mktemp("site")
    done = pip("--no-deps", "--target", target, wheel, cwd=target)
    assert done.returncode == 0, done.stderr
    return target


def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("/METADATA")]
        return message_from_string(archive.read(name).decode())


def needs(wheel: Path) -> dict[str, Requirement]:
    """What it requires without any extra."""
    every = [Requirement(text) for text in metadata(wheel).get_all("Requires-Dist", [])]
    return {canonicalize_name(one.name): one for one in every if one.marker is None}


def test_what_is_in_the_wheel(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    for folder in ("configs", "recipes"):
        wanted = {
            f"fastloop/_shipped/{path.relative_to(ROOT).as_posix()}"
            for path in (ROOT / folder).rglob("*")
            if path.suffix in (".yaml", ".py")
        }
        assert wanted and wanted <= names
    package = {path.relative_to(ROOT).as_posix() for path in (ROOT / "fastloop").rglob("*.py")}
    assert package | {"fastloop/py.typed"} <= names
    assert {name.split("/")[0].partition("-")[0] for name in names} == {"fastloop", "lightning_fastloop"}, (
        "something else is at the top"
    )
    assert [name for name in names if "test" in name or "__pycache__" in name] == []
    assert any(name.endswith("dist-info/licenses/LICENSE") for name in names)


def test_what_it_says_of_itself(wheel: Path) -> None:
    said, required = metadata(wheel), needs(wheel)
    assert said["Name"] == "lightning-fastloop" and said["Version"] == fastloop.__version__
    assert said["License-Expression"] == "Apache-2.0" and said["Requires-Python"] == ">=3.10"
    assert {"dali-cuda12", "dali-cuda13", "redis", "recipes", "dev", "all"} <= set(said.get_all("Provides-Extra", []))
    lightning, omegaconf = required["lightning"].specifier, required["omegaconf"].specifier
    assert "2.5.0.post0" in lightning and "2.6.6" in lightning and "2.4.0" not in lightning
    assert "2.6.2" not in lightning and "2.6.3" not in lightning, "those two were malware"
    assert "2.3.0" in omegaconf and "2.2.3" not in omegaconf, "hydra-core 1.3 needs one below 2.4"
    others = {
        "torch",
        "click",
        "rich",
        "psutil",
        "scipy",
        "jinja2",
        "nvidia-ml-py",
        "torchdata",
        "msgspec",
    }
    assert others < set(required)
    assert not {"torchvision", "hydra-core", "jsonargparse", "pytorch-lightning", "redis"} & set(required)


def test_it_trains_from_an_empty_folder(site: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    pytest.importorskip("torchvision")
    here = {"PYTHONPATH": str(site), "XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache")), "OMP_NUM_THREADS": "1"}
    program = (
        "import fastloop, sys; print('FROM', fastloop.__file__, file=sys.stderr)\nfrom fastloop.cli import main; main()"
    )
    done = run(
        sys.executable,
        "-c",
        program,
        "run",
        "cifar10",
        "recipe.size=tiny",
        "run.max_steps=25",
        "run.accelerator=cpu",
        "--json",
        "-",
        cwd=tmp_path,
        **here,
    )
    assert done.returncode == 0, done.stderr
    assert f"FROM {site / 'fastloop' / '__init__.py'}" in done.stderr.splitlines()
    content = json.loads(done.stdout)
    assert content["measurement"]["total_steps"] == 25 and content["measurement"]["steps"] > 0
    assert (tmp_path / content["run_dir"] / "report.md").is_file()
    assert (tmp_path / content["run_dir"] / "config.resolved.yaml").read_text().startswith("base: cifar10\n")
    assert [path.name for path in tmp_path.iterdir()] == ["fastloop-runs"]


def test_names_are_found_without_the_repository(site: Path, tmp_path: Path) -> None:
    program = [site / "bin" / "fastloop"] if (site / "bin").is_dir() else [sys.executable, "-m", "fastloop"]
    shown = run(*program, "config", "show", "cifar10", "--config", "safe", cwd=tmp_path, PYTHONPATH=str(site))
    assert shown.returncode == 0, shown.stderr
    assert re.search(r"rungs\.workers\.enabled: true +# configs/ladders/safe\.yaml:\d+", shown.stdout)
    assert re.search(r"run\.max_steps: 400 +# recipes/cifar10\.yaml:\d+", shown.stdout)
    assert run(*program, "recipes", cwd=tmp_path, PYTHONPATH=str(site)).stdout.startswith("cifar10 ")


def planned(wheel: Path, *more: str) -> dict[str, str]:
    """What pip would install into this environment, by its own resolver."""
    done = pip("--dry-run", "--report", "-", wheel, *more, cwd=wheel.parent)
    if done.returncode and "ResolutionImpossible" not in done.stderr and FOUND_NOTHING.search(done.stderr):
        pytest.skip("the package registry cannot be reached")
    assert done.returncode == 0, done.stderr
    content = json.loads(done.stdout)
    return {canonicalize_name(each["metadata"]["name"]): each["metadata"]["version"] for each in content["install"]}


def test_installing_it_beside_hydra_moves_neither_torch_nor_lightning(wheel: Path) -> None:
    plan = planned(wheel, "hydra-core==1.3.2")
    assert plan["hydra-core"] == "1.3.2" and "lightning-fastloop" in plan
    assert {"torch", "lightning", "pytorch-lightning"} & set(plan) == set()
    omegaconf = Version(plan.get("omegaconf") or importlib.metadata.version("omegaconf"))
    assert Version("2.3") <= omegaconf < Version("2.4")


def test_installing_it_beside_what_is_pinned_changes_none_of_it(wheel: Path) -> None:
    pinned = [f"{name}=={importlib.metadata.version(name)}" for name in ("torch", "pytorch-lightning", "lightning")]
    assert set(planned(wheel, *pinned)) <= {"lightning-fastloop"}


def test_a_user_of_hydra_can_keep_to_the_constraints(tmp_path: Path) -> None:
    taken_by_hydra = Requirement("omegaconf<2.4,>=2.2").specifier
    assert any(pin.version in taken_by_hydra for pin in constraints()["omegaconf"].specifier)
    wanted = ("hydra-core==1.3.2", "-c", ROOT / "constraints.txt")
    done = pip("--dry-run", "--ignore-installed", *wanted, cwd=tmp_path)
    if "ResolutionImpossible" not in done.stderr and FOUND_NOTHING.search(done.stderr):
        pytest.skip("the package registry cannot be reached")
    assert done.returncode == 0, done.stderr


def test_a_conflict_would_be_found(wheel: Path) -> None:
    done = pip("--dry-run", wheel, "omegaconf==2.2.3", cwd=wheel.parent)
    if FOUND_NOTHING.search(done.stderr):
        pytest.skip("the package registry cannot be reached")
    assert done.returncode != 0 and "conflict" in done.stderr, done.stderr


def constraints() -> dict[str, Any]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return {
        requirement.name: requirement
        for line in lines
        if line and not line.startswith("#")
        for requirement in [Requirement(line)]
    }


def test_the_constraints_are_what_is_installed_here() -> None:
    wrong = []
    for name, requirement in constraints().items():
        ends = {pin.operator: pin.version for pin in requirement.specifier}
        assert set(ends) in ({"=="}, {">=", "<="}), f"{requirement} pins nothing"
        if requirement.marker is None or requirement.marker.evaluate():
            try:
                installed = Version(importlib.metadata.version(name)).base_version
            except importlib.metadata.PackageNotFoundError:
                installed = "nothing"
            if installed != (ends.get("==") or ends["<="]):
                wrong.append(f"{requirement}, and {installed} is installed")
    assert wrong == []


def test_every_requirement_is_among_the_constraints(wheel: Path) -> None:
    pinned = {canonicalize_name(name): requirement for name, requirement in constraints().items()}
    for name, requirement in needs(wheel).items():
        assert name in pinned, f"{name} is tested in no version"
        assert all(pin.version in requirement.specifier for pin in pinned[name].specifier)


def test_the_lower_end_of_a_range_is_what_the_oldest_suite_installs() -> None:
    lowest = {
        f"{name}=={pin.version}"
        for name, requirement in constraints().items()
        for pin in requirement.specifier
        if pin.operator == ">="
    }
    assert lowest == {"omegaconf==2.3.0"} and all(each in (ROOT / "Makefile").read_text() for each in lowest)

"""Names become files, in a clone and in a wheel; names for runs stay inside their folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from fastloop.config import shipped as module
from fastloop.config.loading import load_callback_config
from fastloop.config.shipped import find_root, find_shipped, is_path, locate
from fastloop.errors import ConfigError
from fastloop.ladder import plan
from fastloop.records.facts import Facts, LoaderFacts, PrefixFacts
from fastloop.records.images import ImageFacts, RandomResizedCrop, ToFloat, ToTensor
from fastloop.records.store import make_safe_name


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A clone with one recipe, two ladders and a rung."""
    for name in ("recipes/resnet50", "configs/ladders/safe", "configs/ladders/full", "configs/rungs/amp"):
        path = tmp_path / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    monkeypatch.setattr(module, "__file__", str(tmp_path / "fastloop" / "config" / "shipped.py"))
    return tmp_path


def test_a_clone_ships_from_its_root_and_a_wheel_from_inside_the_package(root: Path) -> None:
    assert find_root() == root
    (root / "fastloop" / "_shipped" / "recipes").mkdir(parents=True)
    (root / "fastloop" / "_shipped" / "recipes" / "gpt2.yaml").touch()
    assert find_root() == root / "fastloop" / "_shipped"
    assert find_shipped("recipes") == {"gpt2": root / "fastloop" / "_shipped" / "recipes" / "gpt2.yaml"}


def test_names_by_kind(root: Path) -> None:
    assert find_shipped("recipes") == {"resnet50": root / "recipes" / "resnet50.yaml"}
    assert list(find_shipped("ladders")) == ["full", "safe"]
    assert find_shipped("climbs") == {}


@pytest.mark.parametrize(
    ("text", "path"),
    [("x.yaml", True), ("x.yml", True), ("./x", True), ("a/b", True), ("resnet50", False), ("yaml", False)],
)
def test_is_path(text: str, path: bool) -> None:
    assert is_path(text) is path


def test_names_are_looked_up_in_order_of_kind(root: Path) -> None:
    assert locate("amp", root, got="") == root / "configs" / "rungs" / "amp.yaml"
    (root / "recipes" / "amp.yaml").touch()
    assert locate("amp", root, got="") == root / "recipes" / "amp.yaml"


def test_paths_start_at_the_folder_that_is_given(root: Path) -> None:
    (root / "own.yaml").touch()
    assert locate("../own.yaml", root / "recipes", got="") == root / "own.yaml"
    assert locate(str(root / "own.yaml"), Path("elsewhere"), got="") == root / "own.yaml"


KNOWN = "recipes: resnet50; ladders: full, safe; rungs: amp"


@pytest.mark.parametrize(
    ("text", "why", "do"),
    [
        ("resnet5", "no recipe, ladder, climb or rung has this name", "write resnet50"),
        ("apm", "no recipe, ladder, climb or rung has this name", "write amp"),
        (
            "zzz",
            f"no recipe, ladder, climb or rung has this name; there are {KNOWN}",
            "write one of these names, or a path that ends in .yaml",
        ),
        (
            "own",
            "no recipe, ladder, climb or rung has this name",
            "write own.yaml; a file needs its extension",
        ),
        (
            "full,amp",
            "no recipe, ladder, climb or rung has this name",
            "put base: [full, amp] into a YAML file, and pass that file",
        ),
    ],
)
def test_unknown_names(root: Path, text: str, why: str, do: str) -> None:
    (root / "own.yaml").touch()
    with pytest.raises(ConfigError) as caught:
        locate(text, root, got=repr(text))
    assert str(caught.value) == f"got {text!r}\n  why {why}\n  do  {do}"


@pytest.mark.parametrize("text", ["train.py", "./src/train.py"])
def test_a_script_in_place_of_a_configuration(root: Path, text: str) -> None:
    (root / "src").mkdir()
    (root / text).touch()
    with pytest.raises(ConfigError, match=r"a script, not a configuration\n.*exec -- python .*train.py"):
        locate(text, root, got=repr(text))
    with pytest.raises(ConfigError, match=r"exec -- python 'my train\.py' to see .* --script 'my train\.py'$"):
        locate("my train.py", root, got="")


@pytest.mark.parametrize("text", ["", " "])
def test_an_empty_name(root: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"why it is empty\n  do  write a shipped name"):
        locate(text, root, got=repr(text))


@pytest.mark.parametrize("text", ["mine", "runs/mine/"])
def test_the_directory_of_a_run_in_place_of_a_configuration(root: Path, text: str) -> None:
    (root / text).mkdir(parents=True)
    (root / text / "config.resolved.yaml").touch()
    with pytest.raises(
        ConfigError, match=rf"directory of a run\n  do  write {text.rstrip('/')}/config\.resolved\.yaml "
    ):
        locate(text, root, got=repr(text))


def test_missing_files(root: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        locate("gone.yaml", root, got="base: gone.yaml (my.yaml:1)", chain=" (my.yaml -> gone.yaml)")
    assert caught.value.got == "base: gone.yaml (my.yaml:1)"
    assert caught.value.why == "there is no such file (my.yaml -> gone.yaml)"
    assert caught.value.do == f"check the path; it starts at {root}"


def test_a_directory_in_place_of_a_file(root: Path) -> None:
    (root / "d.yaml").mkdir()
    for text in ("d.yaml", "./d.yaml"):
        with pytest.raises(ConfigError, match=rf"why {text} is a directory\n  do  write a path that ends in .yaml, or"):
            locate(text, root, got=repr(text))
    (root / "nets").mkdir()
    (root / "nets" / "b.yaml").touch()
    (root / "nets" / "a.yaml").mkdir()
    with pytest.raises(ConfigError, match=r"why nets is a directory\n  do  write a file in it: nets/b.yaml"):
        locate("nets", root, got="'nets'")


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("resnet50", "resnet50"),
        ("my run 3", "my-run-3"),
        ("../../x", "x"),
        ("/etc/passwd", "etc-passwd"),
        ("..", "run"),
        ("", "run"),
        ("--help", "help"),
        ("été", "ete"),
        ("日本", "run"),
        ("a.b_c-d", "a.b_c-d"),
        ("x" * 300, "x" * 80),
        ("x" * 79 + " y", "x" * 79),
        ("a\x00b\nc", "a-b-c"),
    ],
)
def test_safe_name(text: str, name: str) -> None:
    assert make_safe_name(text) == name


FAVOURABLE = Facts(
    cpu_count=16,
    local_ranks=2,
    device="cuda",
    compute_capability=(9, 0),
    compiler="g++",
    world_size=2,
    is_ddp=True,
    strategy="DDPStrategy",
    classes=50257,
    convs=("conv",),
    attends_by_hand=("attention",),
    compile_targets=("network",),
    has_dali=True,
    shm_free_bytes=2**40,
    memory_free_bytes=2**40,
    loader=LoaderFacts(
        kind="DataLoader",
        batch_size=64,
        batches=100,
        images=ImageFacts(steps=(RandomResizedCrop(size=(8, 8)), ToTensor(), ToFloat()), count=6400),
        prefix=PrefixFacts(what="decoded images", dataset="ImageFolder", fingerprint="0", samples=6400),
    ),
)


def refused(rungs: Mapping[str, Any]) -> dict[str, str | None]:
    """The rungs that even a run in which everything applies, and no other rung loads, would be without, and why."""
    alone = [load_callback_config({"rungs": {name: rungs[name]}})[0].ladder for name in rungs]
    steps = [step for ladder in alone for step in plan(ladder, FAVOURABLE).steps]
    return {step.rung: step.reason for step in steps if step.status == "skipped"}


@pytest.mark.parametrize("name", find_shipped("ladders"))
def test_a_shipped_ladder_switches_nothing_on_that_is_always_refused(name: str) -> None:
    rungs = yaml.safe_load(find_shipped("ladders")[name].read_text())["rungs"]
    assert rungs and refused(rungs) == {}
    control = {**rungs, "batch": {"enabled": True, "micro_batch": 64}}
    assert list(refused(control)) == ["batch"], "the control: batches have 64 samples already"

"""The structure of the house, as design.md sections 3 and 5 draw it, held by a test."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from fastloop.ladder import Ladder, manual

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = sorted((ROOT / "fastloop").rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("test_*.py"))
RUNGS = [field.name for field in dataclasses.fields(Ladder)]
MANUAL = ("Faster because", "Costs", "Don't use when", "Evidence", "Source")
SAME_FOUR = ("test_plan", "test_takes", "test_parity", "test_undo")
WITHOUT_TEST = {"__init__.py", "__main__.py", "bridge/__init__.py", "commands/__init__.py", "diagnose/__init__.py",
                "evidence/__init__.py", "feeds/__init__.py", "report/__init__.py", "rungs/__init__.py",
                "traces/__init__.py"}  # fmt: skip
"""Files of the package that hold nothing to test, or (`__init__`) are tested by test_public.py."""


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def parsed(text: str) -> ast.Module:
    return ast.parse(text)


def functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node


# -- one rung, one name, four places ----------------------------------------------------------------------------------


def test_a_rung_is_one_file_and_one_field() -> None:
    files = {path.stem for path in (ROOT / "fastloop" / "rungs").glob("*.py")} - {"__init__"}
    assert files == set(RUNGS) == {path.stem for path in (ROOT / "configs" / "rungs").glob("*.yaml")}
    for name, rung in Ladder().rungs():
        assert type(rung).__module__ == f"fastloop.rungs.{name}" and type(rung).__name__.lower() == name
        assert not rung.enabled, f"{name} is on by default"


@pytest.mark.parametrize("rung", RUNGS)
def test_its_yaml_switches_it_on_and_nothing_else(rung: str) -> None:
    text = (ROOT / "configs" / "rungs" / f"{rung}.yaml").read_text()
    assert yaml.safe_load(text) == {"rungs": {rung: {"enabled": True}}}


@pytest.mark.parametrize("rung", RUNGS)
def test_it_has_the_same_four_tests(rung: str) -> None:
    tree = parsed((ROOT / "tests" / "rungs" / f"test_{rung}.py").read_text())
    names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert set(SAME_FOUR) <= names, f"tests/rungs/test_{rung}.py lacks {sorted(set(SAME_FOUR) - names)}"


@pytest.mark.parametrize("rung", RUNGS)
def test_its_docstring_is_its_manual(rung: str) -> None:
    lines = manual(rung).splitlines()
    found = [heading for heading in MANUAL for line in lines if line.startswith(f"{heading}  ")]
    assert found == list(MANUAL) and lines[0].endswith(".") and not lines[1]
    assert "http" in manual(rung).partition("Source")[2], "the source is an address"


def test_the_readme_names_every_rung() -> None:
    readme = (ROOT / "README.md").read_text()
    assert [rung for rung in RUNGS if f"`{rung}`" not in readme] == []


# -- sizes and names --------------------------------------------------------------------------------------------------


def most_lines(path: Path) -> int:
    return 120 if path.parent.name == "rungs" else 300


def too_long(tree: ast.Module) -> list[str]:
    """Functions of more than 40 lines."""
    sizes = ((node.name, (node.end_lineno or 0) - node.lineno + 1) for node in functions(tree))
    return [f"{name} has {lines} lines" for name, lines in sizes if lines > 40]


@pytest.mark.parametrize("path", PACKAGE, ids=name_of)
def test_files_and_functions_are_short(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= most_lines(path), f"over {most_lines(path)} lines: find the seam"
    assert too_long(parsed(text)) == []


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").glob("[a-z]*.py")), ids=name_of)
def test_recipes_are_short_and_plain(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= 120
    assert "fastloop" not in {alias.name.split(".")[0] for node in ast.walk(parsed(text))
                              if isinstance(node, ast.Import) for alias in node.names}  # fmt: skip
    assert (path.with_suffix(".yaml")).is_file()


def test_no_file_is_a_drawer_for_odds_and_ends() -> None:
    drawers = {"util", "utils", "common", "helper", "helpers", "base", "misc", "shared"}
    folders = [ROOT / name for name in ("fastloop", "tests", "recipes", "benchmarks")]
    files = [path for folder in folders for path in folder.rglob("*.py")]
    assert files and [name_of(path) for path in files if drawers & {path.stem.strip("_"), path.parent.name}] == []


# -- who may do what --------------------------------------------------------------------------------------------------


def prints(tree: ast.Module) -> list[int]:
    return [node.lineno for node in ast.walk(tree)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"]  # fmt: skip


def writes_to_lightning(tree: ast.Module) -> list[int]:
    """Lines that assign, delete or setattr an attribute of something called trainer or strategy."""
    found = []
    for node in ast.walk(tree):
        written: list[ast.expr] = []
        if isinstance(node, (ast.Assign, ast.Delete)):
            written = node.targets
        elif isinstance(node, (ast.AugAssign, ast.AnnAssign)):
            written = [node.target]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("setattr", "delattr"):
            written = [ast.Attribute(value=node.args[0])]
        owners = [target.value for target in written if isinstance(target, ast.Attribute)]
        if any({"trainer", "strategy"} & set(_words(owner)) for owner in owners):
            found.append(node.lineno)
    return found


def _words(owner: ast.expr) -> Iterator[str]:
    for node in ast.walk(owner):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr


@pytest.mark.parametrize("path", PACKAGE, ids=name_of)
def test_only_the_command_line_prints_and_only_the_bridge_changes_lightning(path: Path) -> None:
    tree = parsed(path.read_text())
    assert path.name == "cli.py" or prints(tree) == []
    assert path.parent.name == "bridge" or writes_to_lightning(tree) == []


# -- tests ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PACKAGE, ids=name_of)
def test_every_file_has_its_mirrored_test(path: Path) -> None:
    inside = path.relative_to(ROOT / "fastloop")
    mirrored = ROOT / "tests" / inside.parent / f"test_{inside.name}"
    assert str(inside) in WITHOUT_TEST or mirrored.is_file(), f"{name_of(mirrored)} is missing"


def test_the_list_of_exceptions_is_no_longer_than_it_must_be() -> None:
    assert [name for name in WITHOUT_TEST if not (ROOT / "fastloop" / name).is_file()] == []
    assert all((ROOT / "fastloop" / name).read_text().count("def ") <= 1 for name in WITHOUT_TEST)


def checks(node: ast.AST, known: frozenset[str] = frozenset()) -> bool:
    """Whether a function asserts, expects an exception or a warning, or calls a function known to."""
    calls = {part.func.attr if isinstance(part.func, ast.Attribute) else getattr(part.func, "id", "")
             for part in ast.walk(node) if isinstance(part, ast.Call)}  # fmt: skip
    return any(isinstance(part, ast.Assert) for part in ast.walk(node)) or bool(
        calls & {"raises", "warns", "fail", *known}
    )


@functools.cache
def shared_checks() -> frozenset[str]:
    """Functions that tests share, and that check something."""
    trees = [parsed(path.read_text()) for path in (ROOT / "tests").rglob("*.py")]
    shared = [node for tree in trees for node in functions(tree) if not node.name.startswith("test_")]
    return frozenset(node.name for node in shared if checks(node))


def cannot_fail(tree: ast.Module) -> list[str]:
    """Test functions that check nothing."""
    tests = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"))
    return [node.name for node in tests if not checks(node, shared_checks())]


@pytest.mark.parametrize("path", TESTS, ids=name_of)
def test_every_test_can_fail(path: Path) -> None:
    assert cannot_fail(parsed(path.read_text())) == []


# -- the checks themselves --------------------------------------------------------------------------------------------

PLANTED = """
def long():
{body}

def speaks(site, strategy):
    print("done")
    site.trainer.limit_train_batches = 1
    setattr(strategy, "model", None)
    del strategy.model
    own = strategy.model
    own_strategy = 1

def test_nothing():
    long()

def test_something():
    assert long() is None
"""


def test_planted_faults_are_found() -> None:
    tree = parsed(PLANTED.format(body="\n".join(["    pass"] * 40)))
    assert too_long(tree) == ["long has 41 lines"]
    assert len(prints(tree)) == 1 and len(writes_to_lightning(tree)) == 3
    assert cannot_fail(tree) == ["test_nothing"]
    assert too_long(parsed(inspect.getsource(test_planted_faults_are_found))) == []

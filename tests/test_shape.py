"""The structure of the house: floors, rooms and rungs. Each test lists all offenders at once."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import re
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from fastloop.ladder import Ladder, read_manual

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = sorted((ROOT / "fastloop").rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("test_*.py"))
RUNGS = [field.name for field in dataclasses.fields(Ladder)]
MANUAL = ("Faster because", "Costs", "Don't use when", "Evidence", "Source")
SAME_FOUR = {"test_plan", "test_takes", "test_parity", "test_undo"}
MOST_LINES = {"rung": 160, "file": 400, "function": 60, "recipe": 130}
MOST_FILES = 14


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@pytest.fixture(scope="module", autouse=True)
def trees_are_let_go() -> Iterator[None]:
    """They are two million objects, through which each pass of the garbage collector in this process would look."""
    yield
    parsed.cache_clear()


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


def test_the_yaml_of_a_rung_switches_it_on_and_nothing_else() -> None:
    found = {rung: yaml.safe_load((ROOT / "configs" / "rungs" / f"{rung}.yaml").read_text()) for rung in RUNGS}
    assert found == {rung: {"rungs": {rung: {"enabled": True}}} for rung in RUNGS}


def test_every_rung_has_the_same_four_tests() -> None:
    missing = {}
    for rung in RUNGS:
        tree = parsed(ROOT / "tests" / "rungs" / f"test_{rung}.py")
        missing[rung] = SAME_FOUR - {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert {rung: names for rung, names in missing.items() if names} == {}


def test_the_docstring_of_a_rung_is_its_manual() -> None:
    for rung in RUNGS:
        lines = read_manual(rung).splitlines()
        found = [heading for heading in MANUAL for line in lines if line.startswith(f"{heading}  ")]
        assert found == list(MANUAL) and lines[0].endswith(".") and not lines[1], rung
        assert "http" in read_manual(rung).partition("Source")[2], f"the source of {rung} is no address"


def test_the_readme_names_every_rung() -> None:
    readme = (ROOT / "README.md").read_text()
    assert [rung for rung in RUNGS if f"`{rung}`" not in readme] == []


# -- sizes and names --------------------------------------------------------------------------------------------------


def count_lines(path: Path) -> int:
    return len(path.read_text().splitlines())


def oversized(tree: ast.Module, most: int) -> list[str]:
    """Functions of more than so many lines."""
    sizes = ((node.name, (node.end_lineno or 0) - node.lineno + 1) for node in functions(tree))
    return [f"{name}: {lines} lines" for name, lines in sizes if lines > most]


def test_sizes_are_warned_about() -> None:
    """A cap that is passed asks for a seam; it fails nothing, for lines are cut to meet a limit otherwise."""
    offenders = []
    for path in PACKAGE:
        most = MOST_LINES["rung" if path.parent.name == "rungs" else "file"]
        if count_lines(path) > most:
            offenders.append(f"{name_of(path)}: {count_lines(path)} lines")
        offenders += [f"{name_of(path)} {found}" for found in oversized(parsed(path), MOST_LINES["function"])]
    for offender in offenders:
        warnings.warn(f"over its cap: {offender}", stacklevel=1)
    assert len(PACKAGE) > 100, "the package was not found"


def test_no_folder_is_a_heap() -> None:
    """Rungs excepted, which are one file each; commands may have two more."""
    counted = Counter(path.parent for path in PACKAGE if path.name != "__init__.py" and path.parent.name != "rungs")
    most = {folder: MOST_FILES + 2 * (folder.name == "commands") for folder in counted}
    assert {name_of(folder): files for folder, files in counted.items() if files > most[folder]} == {}


def test_recipes_are_short_and_plain() -> None:
    recipes = sorted((ROOT / "recipes").glob("[a-z]*.py"))
    offenders = [name_of(path) for path in recipes if count_lines(path) > MOST_LINES["recipe"]]
    offenders += [name_of(path) for path in recipes if not path.with_suffix(".yaml").is_file()]
    for path in recipes:
        imports = [node for node in ast.walk(parsed(path)) if isinstance(node, (ast.Import, ast.ImportFrom))]
        names = [name for node in imports for name in (*(alias.name for alias in node.names), node_module(node))]
        offenders += [f"{name_of(path)} imports {name}" for name in names if name.split(".")[0] == "fastloop"]
    assert recipes and offenders == []


def node_module(node: ast.Import | ast.ImportFrom) -> str:
    return (node.module or "") if isinstance(node, ast.ImportFrom) else ""


def test_no_file_is_a_drawer_for_odds_and_ends() -> None:
    drawers = {"util", "utils", "common", "helper", "helpers", "base", "misc", "shared"}
    folders = [ROOT / name for name in ("fastloop", "tests", "recipes", "benchmarks")]
    files = [path for folder in folders for path in folder.rglob("*.py")]
    assert files and [name_of(path) for path in files if drawers & {path.stem.strip("_"), path.parent.name}] == []


# -- rungs know themselves --------------------------------------------------------------------------------------------

JSON_KEYS = {"workers", "fused", "compile", "cache", "attention", "loss", "host"}
"""Names of rungs that are also keys of JSON files: of a loader trial's answer, of what the user's own model does, of
costs that come once, of a machine; and that of a command. Two are also what kernels compute, and what a training
lowers."""
NAMES_RUNGS: dict[str, str] = {}
"""Files outside `rungs/` that may name a rung, each with its reason; at most three."""


def names_of_rungs(tree: ast.Module, rungs: list[str]) -> list[str]:
    """Rungs named in string constants (docstrings left out) and read as attributes of a ladder, with their lines."""
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            text = node.value
            named = [rung for rung in rungs if re.search(rf"\brungs\.{rung}\b", text)]
            named += [text] if text in rungs and text not in JSON_KEYS else []
            found += [f"{node.lineno}: {name}" for name in named]
        elif isinstance(node, ast.Attribute) and node.attr in rungs and {"ladder", "rungs"} & {*_words(node.value)}:
            found.append(f"{node.lineno}: {node.attr}")
    return found


def test_no_other_file_names_a_rung() -> None:
    outside = [path for path in PACKAGE if path.parent.name != "rungs" and path.name != "ladder.py"]
    found = {name_of(path): names_of_rungs(parsed(path), RUNGS) for path in outside}
    assert {name: lines for name, lines in found.items() if lines and name not in NAMES_RUNGS} == {}
    assert len(NAMES_RUNGS) <= 3 and all(found[name] and reason for name, reason in NAMES_RUNGS.items())


# -- records, not JSON ------------------------------------------------------------------------------------------------

TYPED = ("experiments", "judge", "report")
"""Rooms in which records travel: their public signatures hold no JSON object, under whatever name."""
MAPPINGS = {"dict", "Dict", "Mapping", "MutableMapping", "OrderedDict"}


def name_in(node: ast.AST | None) -> str:
    """The last part of a name: ``Any`` of ``typing.Any``."""
    return getattr(node, "id", getattr(node, "attr", ""))


def holds_json(annotation: ast.AST, aliases: frozenset[str] = frozenset()) -> bool:
    """Whether an annotation holds ``object``, a bare mapping, one of Any or of object, or another name of such."""
    nodes = list(ast.walk(annotation))
    subscripts = [node for node in nodes if isinstance(node, ast.Subscript) and name_in(node.value) in MAPPINGS]
    written = {id(node.value) for node in subscripts}
    return any(
        isinstance(node.slice, ast.Tuple) and name_in(node.slice.elts[-1]) in {"Any", "object"} for node in subscripts
    ) or any(
        name_in(node) in {"object", *aliases} or (name_in(node) in MAPPINGS and id(node) not in written)
        for node in nodes
    )


def aliases_of_json(trees: list[ast.Module]) -> frozenset[str]:
    """Names that modules give to such types, and names of those names."""
    assigned = [node for tree in trees for node in tree.body if isinstance(node, (ast.Assign, ast.AnnAssign))]
    found: frozenset[str] = frozenset()
    while True:
        named = {
            name_in(target)
            for node in assigned
            if isinstance(node.value, (ast.Subscript, ast.Name, ast.BinOp)) and holds_json(node.value, found)
            for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        }
        if named <= found:
            return found
        found |= named


def signatures_of_json(tree: ast.Module, aliases: frozenset[str] = frozenset()) -> list[str]:
    """Parameters, results and fields of public functions and classes whose type is such a one, and ``**more: Any``."""
    found = []
    for owner in (tree, *(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name[0] != "_")):
        for node in owner.body:
            annotated: list[tuple[str, ast.expr | None]] = []
            if isinstance(node, ast.AnnAssign) and isinstance(owner, ast.ClassDef):
                annotated = [(name_in(node.target), node.annotation)]
            elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and (
                not node.name.startswith("_") or node.name == "__init__"
            ):
                given = node.args
                named = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
                annotated = [(each.arg, each.annotation) for each in named if each is not None]
                annotated.append(("return", node.returns))
                if given.kwarg is not None and name_in(given.kwarg.annotation) == "Any":
                    found.append(f"{node.lineno}: {node.name}(**{given.kwarg.arg})")
            where = getattr(node, "name", getattr(owner, "name", ""))
            found += [
                f"{node.lineno}: {where}({name})"
                for name, annotation in annotated
                if annotation is not None and not name.startswith("_") and holds_json(annotation, aliases)
            ]
    return found


def test_signatures_hold_records() -> None:
    typed = [path for path in PACKAGE if path.relative_to(ROOT / "fastloop").parts[0] in TYPED]
    aliases = aliases_of_json([parsed(path) for path in PACKAGE])
    found = {name_of(path): signatures_of_json(parsed(path), aliases) for path in typed}
    assert len(typed) > 30 and {name: lines for name, lines in found.items() if lines} == {}


# -- who may do what --------------------------------------------------------------------------------------------------


def prints(tree: ast.Module) -> list[int]:
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    return [call.lineno for call in calls if isinstance(call.func, ast.Name) and call.func.id == "print"]


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


def test_only_the_command_line_prints() -> None:
    assert [name_of(path) for path in PACKAGE if path.name != "cli.py" and prints(parsed(path))] == []


def test_only_the_bridge_changes_lightning() -> None:
    bridge = ROOT / "fastloop" / "bridge"
    others = [path for path in PACKAGE if bridge not in path.parents]
    assert [name_of(path) for path in others if writes_to_lightning(parsed(path))] == []


# -- tests ------------------------------------------------------------------------------------------------------------


def test_every_package_has_its_tests() -> None:
    packages = {path.parent.relative_to(ROOT / "fastloop") for path in PACKAGE}
    assert [str(inside) for inside in packages if not any((ROOT / "tests" / inside).rglob("test_*.py"))] == []


def checks(node: ast.AST, known: frozenset[str] = frozenset()) -> bool:
    """Whether a function asserts, expects an exception or a warning, or calls a function known to."""
    calls = {
        part.func.attr if isinstance(part.func, ast.Attribute) else getattr(part.func, "id", "")
        for part in ast.walk(node)
        if isinstance(part, ast.Call)
    }
    return any(isinstance(part, ast.Assert) for part in ast.walk(node)) or bool(
        calls & {"raises", "warns", "fail", *known}
    )


@functools.cache
def shared_checks() -> frozenset[str]:
    """Functions that tests share, and that check something."""
    trees = [parsed(path) for path in (ROOT / "tests").rglob("*.py")]
    shared = [node for tree in trees for node in functions(tree) if not node.name.startswith("test_")]
    return frozenset(node.name for node in shared if checks(node))


def cannot_fail(tree: ast.Module) -> list[str]:
    """Test functions that check nothing."""
    tests = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"))
    return [node.name for node in tests if not checks(node, shared_checks())]


def test_every_test_can_fail() -> None:
    found = {name_of(path): cannot_fail(parsed(path)) for path in TESTS}
    assert {name: tests for name, tests in found.items() if tests} == {}


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


NAMED = """
config.ladder.amp.enabled
text = "write rungs.pin: {enabled: true}"
choice = {"prefetch": 1, "workers": 2}
torch.compile(model).workers
"""


JSON = """
from typing import Any
Json = dict[str, Any]
Ledger = Json | None
def reads(path, content: Mapping[str, Any]) -> None: ...
def told() -> Callable[[], typing.Mapping[str, object]]: ...
def start(command: list[str], **settings: Any) -> dict: ...
def alias(base: Ledger) -> list[Json]: ...
def fine(rates: Mapping[str, float], figure: Any, *, names: dict[str, tuple[Any, ...]]) -> None: ...
def _private(content: Json) -> object: ...
class Answer:
    json: Json | None = None
    rates: dict[str, float]
    _known: Json
    def __init__(self, known: object) -> None: ...
    def _inside(self) -> Json: ...
"""


def test_planted_json_in_signatures_is_found() -> None:
    tree = ast.parse(JSON)
    aliases = aliases_of_json([tree])
    assert aliases == {"Json", "Ledger"}
    assert signatures_of_json(tree, aliases) == [
        "5: reads(content)",
        "6: told(return)",
        "7: start(**settings)",
        "7: start(return)",
        "8: alias(base)",
        "8: alias(return)",
        "12: Answer(json)",
        "15: __init__(known)",
    ]


def test_planted_names_of_rungs_are_found() -> None:
    assert sorted(names_of_rungs(ast.parse(NAMED), RUNGS)) == ["2: amp", "3: pin", "4: prefetch"]


def test_planted_faults_are_found() -> None:
    tree = ast.parse(PLANTED.format(body="\n".join(["    pass"] * 60)))
    assert oversized(tree, MOST_LINES["function"]) == ["long: 61 lines"]
    assert len(prints(tree)) == 1 and len(writes_to_lightning(tree)) == 3
    assert cannot_fail(tree) == ["test_nothing"]
    assert oversized(ast.parse(inspect.getsource(test_planted_faults_are_found)), MOST_LINES["function"]) == []

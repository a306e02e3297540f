"""Reads the user's functions: which ones run, what they name, and what they change. Nothing is called."""

from __future__ import annotations

import ast
import contextlib
import dis
import functools
import inspect
import sys
import sysconfig
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from types import CodeType
from typing import Any

from fastloop.evidence.samples import carried, writes
from fastloop.evidence.samples.source import parse_code

ENTRIES = ("__getitem__", "__getitems__", "__call__", "__iter__", "__next__", "forward")
_BEFORE = ("__init__", "__new__", "__setstate__", "__setattr__", "__len__", "setup", "prepare_data", "load_state_dict")
"""Methods that change an object before its samples are requested."""
_Pick = Callable[[ast.AST, str | None], Iterator[ast.AST]]
_DEEPEST = 3
_STDLIB = sysconfig.get_path("stdlib")
FRAMEWORKS = ("torch.", "torchvision.", "numpy.", "builtins.", "PIL.", "collections.", "functools.", "pathlib.")
"""Packages whose own code for samples is known."""


def is_installed(thing: Any) -> bool:
    """Whether a class, function or module is not the user's but belongs to Python, fastloop or an installed package."""
    module = sys.modules.get((thing.__name__ if inspect.ismodule(thing) else getattr(thing, "__module__", None)) or "")
    return module is not None and _is_installed_module(module.__name__, getattr(module, "__file__", None))


@functools.lru_cache(maxsize=4096)
def _is_installed_module(name: str, file: str | None) -> bool:
    if name == "__main__" or ".recipe_modules." in name:
        return False
    if file is None or file.startswith(_STDLIB) or name.startswith("fastloop."):
        return True
    folders, depth = Path(file).parents, name.count(".") + (Path(file).name == "__init__.py")
    outer, dot, _ = name.partition(".")  # PyTorch Geometric writes some of its modules into the temporary folder
    in_place = depth < len(folders) and holds_packages(folders[depth])
    return in_place or (bool(dot) and is_installed(sys.modules.get(outer)))


def is_framework(thing: Any) -> bool:
    """Whether a class or function belongs to one of ``FRAMEWORKS``."""
    return f"{thing.__module__}.".startswith(FRAMEWORKS)


def is_packaged(kind: type) -> bool:
    """Whether a class belongs to an installed package that is none of ``FRAMEWORKS``."""
    return not is_framework(kind) and is_installed(kind)


@functools.cache
def holds_packages(folder: Path) -> bool:
    """Whether packages were installed into this folder, wherever it is."""
    return next(folder.glob("*.dist-info"), None) is not None


def list_changed_state(item: Any) -> Iterator[str]:
    """State that one sample changes and the next may read: ``.count``, or `` (the outer COUNT)``."""
    return (state for function in list_sample_functions(item) for state in list_changes(function, type(item)))


def list_sample_functions(item: Any) -> tuple[Any, ...]:
    """The user's functions that run when `item` is called or returns a sample, including those they call by
    ``self.name()`` or by their own names."""
    return tuple(_follow([item], type(item))) if inspect.isfunction(item) else list_sample_functions_of(type(item))  # type: ignore[arg-type]


@functools.lru_cache(maxsize=512)
def list_sample_functions_of(kind: type) -> tuple[Any, ...]:
    return tuple(_follow([find_method(kind, name) for name in ENTRIES], kind))


def list_called(functions: Iterable[Any], kind: type) -> tuple[Any, ...]:
    """The user's functions among these methods and those they call: methods of their object, functions of modules."""
    return tuple(_follow(functions, kind, modules=True))


def list_with_called(function: Any, kind: type) -> tuple[Any, ...]:
    """A method, even an installed package's, and the user's functions that it calls."""
    return tuple(dict.fromkeys((function, *list_called([function], kind))))


def _follow(starts: Iterable[Any], kind: type, modules: bool = False) -> Iterator[Any]:
    queue, seen = deque(starts), set[int]()
    while queue:
        function = queue.popleft()
        if not inspect.isfunction(function) or id(function) in seen or is_installed(function):
            continue
        seen.add(id(function))
        yield function
        named = tuple(list_names(function.__code__))
        queue.extend(find_method(kind, name) for name in named)
        if "super" in named or any(base.__name__ in named for base in kind.__mro__[1:]):
            queue.extend(_unwrap(vars(base)[name]) for base in kind.__mro__ for name in named if name in vars(base))
        outer = [value for _, value in list_globals(function)]
        queue.extend(outer)
        if modules:
            queue.extend(value for _, value in list_closure(function))
            queue.extend(vars(each).get(name) for each in outer if inspect.ismodule(each) for name in named)


def list_globals(function: Any) -> Iterator[tuple[str, Any]]:
    """Objects that a function reads from its module's globals, with their names."""
    for name in dict.fromkeys(list_global_names(function.__code__)):
        if name in function.__globals__:
            yield name, function.__globals__[name]


def list_imported(function: Any) -> tuple[str, ...]:
    """Names of the modules that a function imports when it runs."""
    return tuple(dict.fromkeys(list_arguments(function.__code__, "IMPORT_NAME")))


def list_closure(function: Any) -> Iterator[tuple[str, Any]]:
    """Objects that a function holds in its closure, with their names."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        with contextlib.suppress(ValueError):  # an empty one
            yield name, cell.cell_contents


def read_outer(function: Any) -> dict[str, Any]:
    """Objects from outside a function by the names that it reads; its closure's before its module's."""
    return {**dict(list_globals(function)), **dict(list_closure(function))}


def walk_code(code: CodeType) -> Iterator[CodeType]:
    """A function's code, and that of functions and comprehensions inside it."""
    yield code
    for const in code.co_consts:
        if inspect.iscode(const):
            yield from walk_code(const)


def list_names(code: CodeType) -> Iterator[str]:
    """Names of globals and attributes in a function's code, including nested functions."""
    return (name for each in walk_code(code) for name in each.co_names)


def list_arguments(code: CodeType, *operations: str) -> Iterator[Any]:
    """The arguments of these instructions in a function's code, including nested functions."""
    steps = (step for each in walk_code(code) for step in dis.get_instructions(each))
    return (step.argval for step in steps if step.opname in operations)


@functools.lru_cache(maxsize=4096)
def list_global_names(code: CodeType) -> tuple[str, ...]:
    return tuple(list_arguments(code, "LOAD_GLOBAL", "LOAD_NAME"))


def list_writers(kind: type) -> Iterator[tuple[str, str]]:
    """Methods of a user's class that change its objects and do not run for a sample: ``("set_level", "level")``."""
    running = {function.__name__ for function in list_sample_functions_of(kind)}
    for base in kind.__mro__:
        for name, member in {} if is_installed(base) else dict(vars(base)).items():
            function = _find_writer(member)
            is_run = name in running and not isinstance(member, property)
            if function is not None and not is_run and name not in _BEFORE:
                yield from ((name, written) for written in _list_written(function))


def _find_writer(member: Any) -> Any:
    """The function through which a member of a class may change its object: for a property, its setter."""
    if isinstance(member, property):
        return member.fset
    return find_function(member.__func__ if isinstance(member, classmethod) else member)


def find_function(called: Any) -> Any:
    """The function behind something that can be called, without its decorators; None if there is none."""
    function = inspect.unwrap(called) if callable(called) else None
    return function if inspect.isfunction(function) else None


@functools.lru_cache(maxsize=4096)
def find_method(kind: type, name: str) -> Any:
    return _unwrap(inspect.getattr_static(kind, name, None))


def find_super(function: Any, kind: type, name: str) -> Any:
    """What a method calls by ``super().name`` on an object of this kind; None if that is unknown."""
    owner, bases = dict(list_closure(function)).get("__class__"), kind.__mro__
    later = bases[bases.index(owner) + 1 :] if owner in bases else ()
    return next((_unwrap(vars(base)[name]) for base in later if name in vars(base)), None)


def _unwrap(member: Any) -> Any:
    """The function that runs for a member of a class; None if it is something else."""
    if isinstance(member, property):
        return member.fget
    return inspect.unwrap(member) if inspect.isfunction(member) else None


# -- source -----------------------------------------------------------------------------------------------------------


def parse(function: Any) -> tuple[ast.AST, str | None] | None:
    """A function's syntax tree, and its name for its own object (``self``) if it has one; None if there is no source to
    read."""
    if (tree := parse_code(getattr(inspect.unwrap(function), "__code__", None))) is None:
        return None
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    return tree, names[0] if names and "." in function.__qualname__ else None


def list_changes(function: Any, kind: type = object) -> tuple[str, ...]:
    """State that one call, on an object of this kind, leaves for the next: incremented, collected, advanced, or read
    before it is set. State that is only set, such as a lazily opened file or a cached sample, is the same in every
    worker."""
    advanced = list_touched(function, writes.list_advanced, kind)
    kept = _list_kept_defaults(function)
    touched = _find_touched(function, writes.list_advanced, kind, kept, _DEEPEST) if kept else ()
    defaults = (f" (the default of {name})" for name in kept if name in touched)
    parsed = parse(function)
    return tuple(dict.fromkeys((*advanced, *defaults, *(carried.list_carried(*parsed) if parsed else ()))))


def _list_kept_defaults(function: Any) -> tuple[str, ...]:
    """Parameters whose default is a list, dictionary or set, which all calls share, and that the function never
    rebinds."""
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    given = dict(zip(reversed(names), reversed(function.__defaults__ or ()), strict=False))
    defaults = given | (function.__kwdefaults__ or {})
    set_anew = set(list_arguments(function.__code__, "STORE_FAST"))
    return tuple(
        name for name, value in defaults.items() if isinstance(value, (list, dict, set)) and name not in set_anew
    )


def list_remembered(item: Any) -> Iterator[str]:
    """What samples put into a container that outlives them, such as a cache: ``.cache``, or `` (the outer CACHE)``."""
    for function in list_sample_functions(item):
        if (parsed := parse(function)) is not None:
            tree, me = parsed
            objects, _ = _list_outer(function)
            for node in ast.walk(tree):
                adds = isinstance(node, ast.Call) and getattr(node.func, "attr", None) == "setdefault"
                puts = (each for each in writes.list_targets(node) if adds or isinstance(each, ast.Subscript))
                yield from filter(None, (writes.name_state(each, me, objects) for each in puts))


def follow(items: Sequence[Any]) -> Iterator[tuple[int, Any]]:
    """The user's functions that may run for a sample, each with the index of its object in `items`: those from
    `list_sample_functions`, and whatever they may call by name on any of the objects or in the user's modules. Items
    that are added meanwhile are also followed."""
    seen, names = set[tuple[int, int]](), set(ENTRIES)
    grows = True
    while grows:
        grows = False
        for place, item in enumerate(items):
            kind: type = type(item)
            called = sorted(names.difference(_BEFORE))
            starts = [item] if inspect.isfunction(item) else [find_method(kind, name) for name in called]
            for function in _follow(starts, kind, modules=True):
                if (place, id(function)) not in seen:
                    seen.add((place, id(function)))
                    new = set(list_names(function.__code__)) - names
                    grows = grows or bool(new)
                    names |= new
                    yield place, function


def list_roots_written(function: Any, kind: type = object) -> Iterator[str]:
    """What a function on an object of this kind writes to, at any depth, itself or through functions that it passes it
    to: ``.x`` for an attribute of its object, or the name of an outer object."""
    if (parsed := parse(function)) is not None:
        modules = {name: name for name, value in list_globals(function) if inspect.ismodule(value)}
        for node in ast.walk(parsed[0]):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                package = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
                modules |= {each.asname or each.name: f"{package}{each.name}" for each in node.names}
        for state in list_touched(function, writes.list_targets, kind, modules):
            name = state.removeprefix(" (the outer ").removesuffix(")")
            yield modules.get(name, name)


def list_chains_written(function: Any, *, calls: bool = True) -> Iterator[list[str]]:
    """The chains of names that lead to what a function writes to: ``["trainer", "datamodule", "dataset", "level"]`` for
    ``trainer.datamodule.dataset.level = 1``, or for ``data.level = 1`` where ``data`` is a local name for that dataset;
    with `calls`, also those that lead to methods called only for their effect."""
    if (parsed := parse(function)) is None:
        return
    local = dict(writes.list_local_chains(parsed[0]))
    for node in ast.walk(parsed[0]):
        targets = [each for each in writes.list_targets(node) if not writes.is_rebound(node, each)]
        if calls and isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            targets.append(node.value.func)
        for target in targets:
            chain = list(writes.list_chain(target))[::-1]
            yield [*local.get(chain[0], chain[:1]), *chain[1:]] if chain else chain


def list_touched(
    function: Any,
    pick: _Pick,
    kind: type,
    modules: Collection[str] = (),
    parameters: Collection[str] = (),
    depth: int = _DEEPEST,
) -> Iterator[str]:
    """The state that contains the nodes that `pick` takes from each statement and call of a function, and of functions
    that it passes its objects to, up to this depth. Of `parameters`, also those that contain such nodes."""
    if (parsed := parse(function)) is None:
        return
    tree, me = parsed
    objects, classes = _list_outer(function)
    code = {name for name, value in list_globals(function) if inspect.ismodule(value) or inspect.isroutine(value)}
    declared = {name for node in ast.walk(tree) if isinstance(node, (ast.Global, ast.Nonlocal)) for name in node.names}
    outer = declared | objects | classes | set(modules)
    aliases = dict(writes.list_aliases(tree, me, outer, parameters))
    for node in ast.walk(tree):
        given = _list_given(function, node, pick, me, kind, depth) if depth and isinstance(node, ast.Call) else ()
        for target in (*pick(node, me), *given):
            if isinstance(target, ast.Name) and not isinstance(node, ast.Call):
                state = f" (the outer {target.id})" if target.id in declared else None
            elif isinstance(target, ast.Name) and target.id in code:
                state = None  # `ops.add(x)` calls a module's function
            elif writes.is_own(target, me):
                state = " (attributes by their names)"
            else:
                state = writes.name_state(target, me, outer) or aliases.get(writes.find_root(target))
            if state is not None:
                yield state


def _list_given(
    function: Any, call: ast.Call, pick: _Pick, me: str | None, kind: type, depth: int
) -> Iterator[ast.AST]:
    """Arguments of a call that the called function touches. Only names and attributes: an item may be a new object."""
    called = _find_called(function, call.func, me, kind)
    if not inspect.isfunction(called) or is_installed(called):
        return
    code = called.__code__
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    touched = _find_touched(called, pick, kind, names, depth - 1)
    on = getattr(call.func, "value", call)
    is_method = writes.is_super(on) or writes.is_own(on, me)
    given = [*zip(names[is_method:], call.args, strict=False), *((each.arg, each.value) for each in call.keywords)]
    for name, value in given:
        if name in touched and not any(isinstance(part, (ast.Subscript, ast.Call)) for part in ast.walk(value)):
            yield value


@functools.lru_cache(maxsize=4096)
def _find_touched(function: Any, pick: _Pick, kind: type, parameters: tuple[str, ...], depth: int) -> frozenset[str]:
    """As `list_touched`, but cached: code calls the same functions over and over."""
    return frozenset(list_touched(function, pick, kind, parameters=parameters, depth=depth))


def _find_called(function: Any, called: ast.AST, me: str | None, kind: type) -> Any:
    """What a function calls by this name: its own object's method, a function of its module or of an imported one."""
    outer = read_outer(function)
    if not isinstance(called, ast.Attribute):
        return outer.get(getattr(called, "id", ""))
    if writes.is_own(called.value, me):
        return find_method(kind, called.attr)
    if writes.is_super(called.value):
        return find_super(function, kind, called.attr)
    module = outer.get(writes.find_root(called.value))
    return vars(module).get(called.attr) if inspect.ismodule(module) else None


def _list_outer(function: Any) -> tuple[set[str], set[str]]:
    """Names of the outer objects that a function uses, including the user's functions and modules, and names of the
    outer classes."""
    outer = read_outer(function)
    own = {*function.__code__.co_varnames, *function.__code__.co_cellvars}
    found = {name: value for name, value in outer.items() if name not in own}
    classes = {name for name, value in found.items() if isinstance(value, type)}
    others = {
        name
        for name, value in found.items()
        if not ((inspect.isroutine(value) or inspect.ismodule(value)) and is_installed(value))
    }
    return others - classes, classes


def _list_written(function: Any) -> Iterator[str]:
    """Attributes of its own object that a method sets or changes."""
    if (parsed := parse(function)) is None or parsed[1] is None:
        return
    tree, me = parsed
    for node in ast.walk(tree):
        targets: list[ast.AST] = []
        if isinstance(node, ast.Assign):
            targets = list(node.targets)
        elif isinstance(node, (ast.AugAssign, ast.AnnAssign)):
            targets = [node.target]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in writes.CHANGES:
            targets = [node.func.value]
        for target in targets:
            if (found := writes.name_state(target, me, set())) is not None:
                yield found.removeprefix(".")

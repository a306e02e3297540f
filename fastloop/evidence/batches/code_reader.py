"""Reads whether a function changes its arguments in place: a batch, or what a batch contains.

Depths are counted as in `known_calls`.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from fastloop.evidence.batches.known_calls import FACTS, SAME, Depth, find_result, join, refill, take, wrap
from fastloop.evidence.samples import sample_code, writes

_MOST_CALLS = 8
"""Calls are followed this far; beyond, a function may change anything."""
_STORES = ("append", "appendleft", "extend", "add", "insert", "update", "setdefault", "put", "put_nowait")
_STORES_MEMBERS = ("extend", "update")


class CodeReader:
    """Reads functions of one owner, which may hold some of the values.

    Args:
        owner: the module or callback whose methods are read.
        kinds: the user's classes whose objects a batch may contain.

    Attributes:
        kept: attributes of the owner (``self.last``) in which the functions keep a value, with its depth.
    """

    def __init__(self, owner: Any, kinds: Collection[type] = ()) -> None:
        self.owner, self.kinds = owner, kinds
        self.kept: dict[str, int] = {}
        self.known: dict[Any, tuple[bool, Depth]] = {}

    def changes(self, function: Any, given: Mapping[str, Depth]) -> bool:
        """Whether a method, or a function that it calls, changes what these parameters hold."""
        return self.read(function, self.owner, dict(given), 0)[0]

    def read(self, function: Any, me: Any, given: dict[str, Depth], calls: int) -> tuple[bool, Depth]:
        """Return whether a function of the object `me` changes what it is given, and the depth of what it returns."""
        key = function, id(me), tuple(sorted((name, -1 if depth is None else depth) for name, depth in given.items()))
        if key not in self.known:
            least = join(given.values())
            self.known[key] = False, least  # if it calls itself
            parsed = sample_code.parse(function)
            if parsed is None or calls > _MOST_CALLS:
                self.known[key] = least is not None, least
            else:
                run = _Run(self, function, me, parsed[1], given, calls)
                run.execute(parsed[0])
                self.known[key] = run.changes, run.returned
        return self.known[key]


class _Run:
    """One function, read statement by statement."""

    def __init__(
        self, reader: CodeReader, function: Any, me: Any, own: str | None, given: dict[str, Depth], calls: int
    ) -> None:
        self.reader, self.function, self.me, self.own, self.calls = reader, function, me, own, calls
        self.depths = dict(given)
        self.local: dict[str, ast.AST] = {}
        """Functions defined inside."""
        self.entered: list[Any] = []
        self.outer = sample_code.read_outer(function)
        self.changes = False
        self.returned: Depth = None

    # -- statements ----------------------------------------------------------------------------------------------------

    def execute(self, node: Any) -> None:
        """Read a function's syntax tree."""
        if isinstance(node, ast.Lambda):
            self.returned = self.find_depth(node.body)
            return
        body = node.body if isinstance(node, ast.Module) else [node]
        for each in body:
            self._do(each.body if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef)) else [each])

    def _do(self, body: Iterable[ast.stmt]) -> None:
        for node in body:
            self._do_one(node)

    def _do_one(self, node: Any) -> None:
        if isinstance(node, ast.Assign):
            depth = self.find_depth(node.value)
            for target in node.targets:
                self._assign(target, depth, node.value)
        elif isinstance(node, ast.AnnAssign):
            if node.value is not None:
                self._assign(node.target, self.find_depth(node.value), node.value)
        elif isinstance(node, ast.AugAssign):
            self._add(node)
        elif isinstance(node, (ast.For, ast.AsyncFor)):
            items = take(self.find_depth(node.iter))
            self._repeat(node, lambda: self._assign(node.target, items, None))
        elif isinstance(node, ast.While):
            self._repeat(node, lambda: self.find_depth(node.test))
        elif isinstance(node, ast.If):
            self.find_depth(node.test)
            self._branch(node.body, node.orelse)
        elif isinstance(node, (ast.With, ast.AsyncWith)):
            for item in node.items:
                depth = self.find_depth(item.context_expr)
                if item.optional_vars is not None:
                    self._assign(item.optional_vars, depth, None)
            self._do(node.body)
        elif isinstance(node, ast.Try):
            self._branch(node.body, [])
            self._branch(*(handler.body for handler in node.handlers), [])
            self._do([*node.orelse, *node.finalbody])
        elif isinstance(node, ast.Match):
            depth = self.find_depth(node.subject)
            names = [each for case in node.cases for each in ast.walk(case.pattern)]
            found = (getattr(each, "name", None) or getattr(each, "rest", None) for each in names)
            self.depths.update({name: None if depth is None else 0 for name in found if name})
            self._branch(*(case.body for case in node.cases), [])
        elif isinstance(node, ast.Return):
            if node.value is not None:
                self.returned = join((self.returned, self.find_depth(node.value)))
        elif isinstance(node, ast.Delete):
            for target in node.targets:
                if isinstance(target, (ast.Attribute, ast.Subscript)):
                    self._write(self.find_depth(target.value))
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            self.local[node.name] = node
            self._read_where_defined(node)
        elif not isinstance(node, ast.ClassDef):
            for each in ast.iter_child_nodes(node):
                if isinstance(each, ast.expr):
                    self.find_depth(each)

    def _read_where_defined(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        """Read an inner function, which may only be passed on, such as an optimizer's closure."""
        before = dict(self.depths), self.returned
        self.depths.update({each.arg: None for each in ast.walk(node.args) if isinstance(each, ast.arg)})
        self._do(node.body)
        self.depths, self.returned = before

    def _repeat(self, node: Any, begin: Callable[[], Any]) -> None:
        for _ in range(2):  # a second time with what the first has left
            before = dict(self.depths)
            begin()
            self._do(node.body)
            self._merge(before)
        self._do(node.orelse)

    def _branch(self, *bodies: Iterable[ast.stmt]) -> None:
        before, ends = dict(self.depths), []
        for body in bodies:
            self.depths = dict(before)
            self._do(body)
            ends.append(self.depths)
        self.depths = ends[0] if ends else before
        for each in ends[1:]:
            self._merge(each)

    def _merge(self, other: Mapping[str, Depth]) -> None:
        names = {*self.depths, *other}
        self.depths = {name: join((self.depths.get(name), other.get(name))) for name in names}

    def _write(self, depth: Depth) -> None:
        self.changes = self.changes or depth == 0

    def _add(self, node: ast.AugAssign) -> None:
        """Read ``x += y``, which changes a tensor or list in place."""
        now, added = self.find_depth(node.target), self.find_depth(node.value)
        self._write(now)
        if not isinstance(node.target, ast.Name):
            self._write(self.find_depth(node.target.value))
        elif isinstance(node.op, ast.Add):
            self.depths[node.target.id] = join((now, refill(added)))

    def _assign(self, target: Any, depth: Depth, value: Any) -> None:
        if isinstance(target, ast.Name):
            self.depths[target.id] = depth
        elif isinstance(target, ast.Starred):
            self._assign(target.value, refill(depth), None)
        elif isinstance(target, (ast.Tuple, ast.List)):
            pairs = isinstance(value, (ast.Tuple, ast.List)) and len(value.elts) == len(target.elts)
            is_even = pairs and not any(isinstance(each, ast.Starred) for each in (*target.elts, *value.elts))
            members = [self.find_depth(each) for each in value.elts] if is_even else [take(depth)] * len(target.elts)
            for each, member in zip(target.elts, members, strict=True):
                self._assign(each, member, None)
        else:
            self._write(self.find_depth(target.value))
            self._store(target if isinstance(target, ast.Attribute) else target.value, depth, target)

    def _store(self, place: ast.AST, depth: Depth, target: ast.AST | None = None) -> None:
        """Note that a local name, or an attribute of the owner, now holds a value of this depth."""
        if depth is None:
            return
        if (kept := self._name_kept(place)) is not None:
            is_it = place is target and isinstance(place, ast.Attribute) and writes.is_own(place.value, self.own)
            now = depth if is_it else depth + 1
            self.reader.kept[kept] = min(now, self.reader.kept.get(kept, now))
        elif root := writes.find_root(place):
            self.depths[root] = join((self.depths.get(root), depth + 1))

    def _name_kept(self, node: ast.AST) -> str | None:
        """The attribute of the owner to which a node leads, ``last`` for ``self.last[0].x``; None if to none."""
        while isinstance(node, (ast.Attribute, ast.Subscript)):
            if isinstance(node, ast.Attribute) and self._is_own_attribute(node):
                return node.attr
            node = node.value
        return None

    # -- expressions ---------------------------------------------------------------------------------------------------

    def find_depth(self, node: Any) -> Depth:
        """Return the depth of an expression's value, and note what the expression changes."""
        if isinstance(node, ast.Name):
            return self.depths.get(node.id)
        if isinstance(node, ast.Attribute):
            if self._is_own_attribute(node):
                return self.reader.kept.get(node.attr)
            depth = self.find_depth(node.value)
            return None if node.attr in FACTS else depth if node.attr in SAME else take(depth)
        if isinstance(node, ast.Subscript):
            self.find_depth(node.slice)
            return take(self.find_depth(node.value))
        if isinstance(node, ast.Call):
            return self._call(node)
        if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
            return wrap(join(map(self._find_member, node.elts)))
        if isinstance(node, ast.Dict):
            pairs = zip(node.keys, node.values, strict=True)
            found = [self.find_depth(value) if key else take(self.find_depth(value)) for key, value in pairs]
            return wrap(join(found))
        if isinstance(node, (ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.DictComp)):
            return wrap(self._comprehend(node))
        if isinstance(node, ast.NamedExpr):
            self._assign(node.target, depth := self.find_depth(node.value), node.value)
            return depth
        if isinstance(node, ast.Lambda):
            return self._do_inside({}, lambda: self.find_depth(node.body)) and None
        inner = [self.find_depth(each) for each in ast.iter_child_nodes(node) if isinstance(each, ast.expr)]
        if isinstance(node, ast.IfExp):
            return join(inner[1:])
        if isinstance(node, (ast.BoolOp, ast.Starred, ast.Await)):
            return join(inner)
        if isinstance(node, (ast.Yield, ast.YieldFrom)):
            self.returned = join((self.returned, *map(wrap, inner)))
        if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.BitOr)):
            return refill(join(inner))  # of lists or dictionaries
        return None

    def _is_own_attribute(self, node: ast.Attribute) -> bool:
        return writes.is_own(node.value, self.own) and self.me is self.reader.owner

    def _find_member(self, node: Any) -> Depth:
        depth = self.find_depth(node)
        return take(depth) if isinstance(node, ast.Starred) else depth

    def _comprehend(self, node: Any) -> Depth:
        def read() -> Depth:
            for each in node.generators:
                self._assign(each.target, take(self.find_depth(each.iter)), None)
                for condition in each.ifs:
                    self.find_depth(condition)
            if isinstance(node, ast.DictComp):
                self.find_depth(node.key)
                return self.find_depth(node.value)
            return self.find_depth(node.elt)

        return self._do_inside({}, read)

    def _do_inside(self, given: Mapping[str, Depth], read: Callable[[], Depth]) -> Depth:
        """Read in an inner scope, whose names end with it."""
        before = self.depths
        self.depths = {**before, **given}
        try:
            return read()
        finally:
            self.depths = before

    def _call(self, node: ast.Call) -> Depth:
        name = writes.name_called(node)
        on = self.find_depth(node.func.value) if isinstance(node.func, ast.Attribute) else None
        if not isinstance(node.func, (ast.Attribute, ast.Name)):
            self.find_depth(node.func)
        given = [(each, self.find_depth(each)) for each in node.args]
        named = {each.arg: self.find_depth(each.value) for each in node.keywords}
        for key in ("out", "dst"):
            self._write(named.get(key))
        if name in writes.FILLS:
            for _, depth in given[: 2 if name == "pack_into" else 1]:
                self._write(depth)
        if writes.is_change(name):
            self._write(on)
        stored = join((*(depth for _, depth in given), *named.values()))
        everything = join((on, stored))
        if isinstance(node.func, ast.Attribute) and name in _STORES:
            self._store(node.func.value, take(refill(stored)) if name in _STORES_MEMBERS else stored)
        if everything is None and not self.reader.kept:
            return None
        called = self._find_called(node.func, on)
        if called:
            return join([self._enter(*each, given, named, on) for each in called])
        is_super = isinstance(node.func, ast.Attribute) and writes.is_super(node.func.value)
        return None if everything is None else find_result(name, everything, is_super=is_super)

    def _enter(
        self, function: Any, me: Any, is_bound: bool, given: list[Any], named: dict[Any, Depth], on: Depth
    ) -> Depth:
        """Read a function that is called, and return the depth of its result."""
        if isinstance(function, ast.AST):
            names: list[str] = [each.arg for each in function.args.args]  # type: ignore[attr-defined]
            local = dict(zip(names, (depth for _, depth in given), strict=False)) | named
            body = function.body  # type: ignore[attr-defined]
            if function in self.entered:  # it calls itself
                return None
            self.entered.append(function)
            before, self.returned = self.returned, None
            self._do_inside(local, lambda: self._do(body))
            found, self.returned = self.returned, before
            self.entered.pop()
            return found
        is_class = isinstance(function, type)
        is_bound = is_bound or is_class
        start = sample_code.find_method(function, "__init__") if is_class else function
        made = wrap(join((*(depth for _, depth in given), *named.values())))
        if not inspect.isfunction(start):
            return made
        code = start.__code__
        names = list(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])
        inside: dict[str, Depth] = {names[0]: None if is_class else on} if names and is_bound else {}
        plain = iter(names[int(is_bound) : code.co_argcount])
        rest = len(names)
        for node, depth in given:
            if isinstance(node, ast.Starred):
                inside |= dict.fromkeys(plain, take(depth))
            elif (name := next(plain, None)) is not None:
                inside[name] = depth
            elif code.co_flags & inspect.CO_VARARGS:
                inside[code.co_varnames[rest]] = join((inside.get(code.co_varnames[rest]), wrap(depth)))
        for key, depth in named.items():
            if key in names:
                inside[key] = depth
            elif key is None:
                inside.update(dict.fromkeys(set(names) - set(inside), take(depth)))
            elif code.co_flags & inspect.CO_VARKEYWORDS:
                last = code.co_varnames[rest + bool(code.co_flags & inspect.CO_VARARGS)]
                inside[last] = join((inside.get(last), wrap(depth)))
        changes, returned = self.reader.read(start, me, inside, self.calls + 1)
        self.changes = self.changes or changes
        return made if is_class else returned

    def _find_called(self, called: ast.AST, on: Depth) -> list[tuple[Any, Any, bool]]:
        """Return the user's functions that a call may reach, each with its object and whether it is bound to that."""
        if isinstance(called, ast.Name) and called.id in self.local:
            return [(self.local[called.id], self.me, False)]
        if isinstance(called, ast.Attribute) and on is not None:  # a method of a batch's member
            members = (sample_code.find_method(kind, called.attr) for kind in self.reader.kinds)
            return [(each, None, True) for each in dict.fromkeys(members) if _is_users(each)]
        if isinstance(called, ast.Attribute) and writes.is_super(called.value):
            found = sample_code.find_super(self.function, type(self.me), called.attr)
            return [(found, self.me, True)] if _is_users(found) else []
        value, me = self._find_object(called)
        if isinstance(value, type):
            return [] if sample_code.is_installed(value) else [(value, None, True)]
        if isinstance(value, staticmethod):
            value, me = value.__func__, None
        if inspect.ismethod(value):
            value, me = value.__func__, getattr(value, "__self__", None)
        if (found := sample_code.find_function(value)) is not None:
            return [(found, me, me is not None)] if _is_users(found) else []
        kind: Any = type(value)
        for name in ("forward", "__call__"):
            if _is_users(found := sample_code.find_method(kind, name)):
                return [(found, value, True)]
        return []

    def _find_object(self, node: ast.AST) -> tuple[Any, Any]:
        """Return what a chain of names leads to, and if it is a method, its object; None for what is unknown."""
        if isinstance(node, ast.Name):
            return self.me if node.id == self.own else self.outer.get(node.id), None
        if not isinstance(node, ast.Attribute):
            return None, None
        holder, _ = self._find_object(node.value)
        held = getattr(holder, "__dict__", {})
        found = held.get(node.attr, (held.get("_modules") or {}).get(node.attr))
        if found is not None or holder is None:
            return found, None
        if isinstance(holder, type):
            return inspect.getattr_static(holder, node.attr, None), None
        return inspect.getattr_static(type(holder), node.attr, None), holder


def _is_users(function: Any) -> bool:
    return inspect.isfunction(function) and not sample_code.is_installed(function)

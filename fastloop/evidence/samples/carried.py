"""State that one sample sets and the next one reads, such as the previous sample: in source, it is read and then set.

What is set under a test of its own, such as a file that is opened once, is left out.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from fastloop.evidence.samples import writes

Touched = tuple[set[str], set[str]]
"""What a method reads and what it sets: ``.x`` for its object's attribute, or the name of a global."""


def list_carried(tree: ast.AST, me: str | None, call: Callable[[str], Touched]) -> Iterator[str]:
    """State that a function reads first and then sets: ``.prev``, or `` (the outer PREV)``.

    Args:
        me: its name for its own object.
        call: returns what a method of that object reads and sets, by the method's name.
    """
    yield from _walk(tree, me, call).carried


def list_touched(tree: ast.AST, me: str | None, call: Callable[[str], Touched]) -> Touched:
    """What a function reads, and what it sets without a test of it."""
    walked = _walk(tree, me, call)
    return walked.read, walked.written


def _walk(tree: ast.AST, me: str | None, call: Callable[[str], Touched]) -> _Walk:
    declared = {name for node in ast.walk(tree) if isinstance(node, (ast.Global, ast.Nonlocal)) for name in node.names}
    walked = _Walk(me, declared, call)
    for node in tree.body if isinstance(tree, ast.Module) else ():
        walked.visit(getattr(node, "body", ()), set())
    return walked


@dataclass
class _Walk:
    me: str | None
    declared: set[str]
    call: Callable[[str], Touched]
    read: set[str] = field(default_factory=set)
    """What was read so far as an earlier call left it."""
    written: set[str] = field(default_factory=set)
    carried: dict[str, None] = field(default_factory=dict)
    fresh: set[str] = field(default_factory=set)
    """What was certainly set so far: reading it reads this call's own."""

    def visit(self, block: Iterable[ast.stmt], tested: set[str]) -> None:
        """Go through statements in order; `tested` is what the way to them depends on."""
        for node in block:
            if isinstance(node, (ast.If, ast.While)):
                test, before = self._list_read(node.test), {*self.read}
                self._visit_branch(node.body, tested | test)
                if isinstance(node.body[-1], (ast.Return, ast.Raise, ast.Continue, ast.Break)):
                    tested, self.read = tested | test, before
                self._visit_branch(node.orelse, tested | test)
                self.read |= test
            elif isinstance(node, (ast.For, ast.AsyncFor)):
                self.read |= self._list_read(node.iter)
                self._visit_branch([*node.body, *node.orelse], tested)
            elif isinstance(node, (ast.With, ast.AsyncWith)):
                self.read |= {state for item in node.items for state in self._list_read(item.context_expr)}
                self.visit(node.body, tested)
            elif isinstance(node, ast.Try):
                before = {*self.read}
                self._visit_branch(node.body, tested)
                for handler in node.handlers:
                    self._visit_branch(handler.body, tested | (self.read - before))
                self.visit([*node.orelse, *node.finalbody], tested)
            elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                self._visit_simple(node, tested)

    def _visit_branch(self, block: Iterable[ast.stmt], tested: set[str]) -> None:
        fresh = {*self.fresh}
        self.visit(block, tested)
        self.fresh = fresh

    def _visit_simple(self, node: ast.stmt, tested: set[str]) -> None:
        called = [self.call(name) for name in self._list_called(node)]
        own = {state for target in _list_targets(node) if (state := self._name(target)) is not None}
        written = own.union(*(writes for _, writes in called)) - tested
        self.read |= {state for reads, _ in called for state in reads} - self.fresh
        self.written |= written
        self.carried |= dict.fromkeys(sorted(written & self.read))
        self.read |= self._list_read(node)
        self.fresh |= own

    def _list_called(self, node: ast.AST) -> Iterator[str]:
        """Methods of its own object that are called."""
        calls = (part.func for part in ast.walk(node) if isinstance(part, ast.Call))
        return (each.attr for each in calls if isinstance(each, ast.Attribute) and writes.is_own(each.value, self.me))

    def _list_read(self, node: ast.AST) -> set[str]:
        """State that an expression reads, or asks for by ``hasattr``, as an earlier call left it."""
        found = set[str | None]()
        for part in ast.walk(node):
            if isinstance(part, (ast.Attribute, ast.Name)) and isinstance(part.ctx, ast.Load):
                found.add(self._name(part))
            elif isinstance(part, ast.Call) and getattr(part.func, "id", "") == "hasattr":
                name = getattr(part.args[-1], "value", None) if writes.is_own(part.args[0], self.me) else None
                found.add(f".{name}" if isinstance(name, str) else None)
        return {state for state in found if state is not None} - self.fresh

    def _name(self, node: ast.AST) -> str | None:
        if isinstance(node, ast.Attribute) and writes.is_own(node.value, self.me):
            return f".{node.attr}"
        return f" (the outer {node.id})" if isinstance(node, ast.Name) and node.id in self.declared else None


def _list_targets(node: ast.stmt) -> Iterator[ast.expr]:
    """What a statement sets as a whole; items are put into what is there."""
    for target in node.targets if isinstance(node, ast.Assign) else ():
        yield from target.elts if isinstance(target, (ast.Tuple, ast.List)) else [target]
    if isinstance(node, ast.AnnAssign) and node.value is not None:
        yield node.target

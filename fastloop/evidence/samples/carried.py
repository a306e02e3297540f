"""Finds state that one sample sets and the next one reads, such as the previous sample: code reads it and then sets it.

State that is set under a test of itself, or of other state set with it, is left out: a file that is opened once, the
shard that holds the current sample.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass, field

from fastloop.evidence.samples import writes

_ENDS = ("close", "release", "shutdown", "terminate", "join")
"""Methods that are called on an old value before it is replaced, and that read nothing from it."""
_LEAVES = (ast.Return, ast.Raise, ast.Continue, ast.Break)


def list_carried(tree: ast.AST, me: str | None) -> tuple[str, ...]:
    """State that a function reads first and then sets: ``.prev``, or `` (the outer PREV)``.

    Args:
        me: the function's name for its own object.
    """
    declared = {name for node in ast.walk(tree) if isinstance(node, (ast.Global, ast.Nonlocal)) for name in node.names}
    walked = _Walk(me, declared)
    for node in tree.body if isinstance(tree, ast.Module) else ():
        walked.visit(getattr(node, "body", ()), set())
    return tuple(walked.carried)


@dataclass
class _Walk:
    me: str | None
    declared: set[str]
    read: set[str] = field(default_factory=set)
    """State that was read so far with the value that an earlier call left."""
    carried: dict[str, None] = field(default_factory=dict)
    fresh: set[str] = field(default_factory=set)
    """State that this call has certainly set so far: reading it returns this call's own value."""
    derived: dict[str, set[str]] = field(default_factory=dict)
    """By local name: the state that its value was made from."""

    def visit(self, block: Iterable[ast.stmt], tested: set[str]) -> None:
        """Go through statements in order; `tested` is the state that decides whether they run."""
        for node in block:
            if isinstance(node, (ast.If, ast.While)):
                test, before = self._list_named(node.test), {*self.read}
                self._visit_branch(node.body, self._exempt(node, test) | tested)
                if isinstance(node.body[-1], _LEAVES):
                    tested, self.read = tested | self._exempt(node, test), before
                self._visit_branch(node.orelse, tested | test)
                self.read |= self._list_read(node.test)
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
            elif isinstance(node, ast.Match):
                for case in node.cases:
                    self._visit_branch(case.body, tested | self._list_named(node.subject))
            elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                self._visit_simple(node, tested)

    def _exempt(self, node: ast.If | ast.While, test: set[str]) -> set[str]:
        """The tested state; if some of it is set under the test, also all other state that is set there."""
        written = {state for each in ast.walk(node) if isinstance(each, ast.stmt) for state in self._list_set(each)}
        return test | written if test & written else test

    def _visit_branch(self, block: Iterable[ast.stmt], tested: set[str]) -> None:
        fresh = {*self.fresh}
        self.visit(block, tested)
        self.fresh = fresh

    def _visit_simple(self, node: ast.stmt, tested: set[str]) -> None:
        written = self._list_set(node)
        self.carried |= dict.fromkeys(sorted((written - tested) & self.read))
        self.read |= self._list_read(node)
        self.fresh |= written
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            self.derived[node.targets[0].id] = self._list_named(node.value)

    def _list_set(self, node: ast.stmt) -> set[str]:
        """State that a statement rebinds. Assigning to an item does not count: the container stays the same."""
        targets = writes.list_targets(node) if isinstance(node, (ast.Assign, ast.AnnAssign)) else ()
        return {state for target in targets if (state := self._name(target)) is not None}

    def _list_named(self, node: ast.AST) -> set[str]:
        """State that an expression depends on, also through a local name or ``hasattr``."""
        found = set[str]()
        for part in ast.walk(node):
            if (state := self._name(part)) is not None:
                found.add(state)
            elif isinstance(part, ast.Name):
                found |= self.derived.get(part.id, set())
            elif isinstance(part, ast.Call) and getattr(part.func, "id", "") == "hasattr":
                name = getattr(part.args[-1], "value", None) if writes.is_own(part.args[0], self.me) else None
                found |= {f".{name}"} if isinstance(name, str) else set()
        return found

    def _list_read(self, node: ast.AST) -> set[str]:
        """State that an expression reads with the value that an earlier call left; testing it for None or closing it
        does not count."""
        if isinstance(node, ast.Compare) and isinstance(node.ops[0], (ast.Is, ast.IsNot)):
            return set()
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in _ENDS:
            return set()
        state = self._name(node) if isinstance(getattr(node, "ctx", None), ast.Load) else None
        inner = (self._list_read(child) for child in ast.iter_child_nodes(node))
        return set[str]().union(*inner, () if state is None else [state]) - self.fresh

    def _name(self, node: ast.AST) -> str | None:
        if isinstance(node, ast.Attribute) and writes.is_own(node.value, self.me):
            return f".{node.attr}"
        return f" (the outer {node.id})" if isinstance(node, ast.Name) and node.id in self.declared else None

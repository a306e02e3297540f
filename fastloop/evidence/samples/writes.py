"""What a statement or call writes to, read from its syntax tree."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator

CHANGES = (
    *("append", "appendleft", "extend", "add", "insert", "update"),
    *("pop", "popleft", "popitem", "remove", "clear", "send"),
)
_MOVES = (
    *("setdefault", "discard", "sort", "reverse", "fill", "write", "put", "seed", "manual_seed"),
    *("seek", "read", "readline", "readinto"),
)
"""Methods that change an object or its position, of which each process has its own copy."""
_SETS = ("copy_", "fill_", "zero_", "requires_grad_", "share_memory_")
"""Methods of tensors that replace all of a tensor's values, or none."""
FILLS = (
    *("copyto", "put", "putmask", "place", "put_along_axis", "fill_diagonal", "shuffle", "pack_into"),
    *("readinto", "readinto1", "recv_into", "heappush", "heappop", "heapify", "insort"),
)
"""Functions that write into their first argument, or into their second after a format."""


def spell_out(tree: ast.AST) -> ast.AST:
    """The same tree with ``x.k`` for ``getattr(x, "k")`` and ``x.k = 1`` for ``setattr(x, "k", 1)``."""
    return _Spelled().visit(tree)  # type: ignore[no-any-return]


class _Spelled(ast.NodeTransformer):
    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        is_read = isinstance(node.func, ast.Name) and node.func.id == "getattr" and len(node.args) > 1
        return _make_attribute(node) if is_read else node

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        self.generic_visit(node)
        call = node.value
        if not (isinstance(call, ast.Call) and getattr(call.func, "id", None) == "setattr" and len(call.args) == 3):
            return node
        return ast.copy_location(ast.Assign([_make_attribute(call)], call.args[2]), node)


def _make_attribute(call: ast.Call) -> ast.Attribute:
    """The attribute that a call names; ``x.<name>`` where the name is a variable's value."""
    name = call.args[1]
    named = str(name.value) if isinstance(name, ast.Constant) else f"<{ast.unparse(name)}>"
    return ast.copy_location(ast.Attribute(call.args[0], named, ast.Load()), call)


def list_chain(node: ast.AST) -> Iterator[str]:
    while isinstance(node, (ast.Subscript, ast.Attribute)):
        if isinstance(node, ast.Attribute):
            yield node.attr
        node = node.value
    if isinstance(node, ast.Name):
        yield node.id


def list_local_chains(tree: ast.AST) -> Iterator[tuple[str, list[str]]]:
    """Local names for what a chain of attributes leads to, or for its items in a loop, each with the names in the
    chain."""
    for node in ast.walk(tree):
        value = node.value if isinstance(node, ast.Assign) else node.iter if isinstance(node, ast.For) else None
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for target in targets:
            if isinstance(target, ast.Name) and isinstance(value, (ast.Attribute, ast.Subscript)):
                yield target.id, list(list_chain(value))[::-1]


def name_called(call: ast.Call) -> str:
    """The name of the function or method that is called; empty if an expression gives it."""
    return getattr(call.func, "attr", getattr(call.func, "id", ""))


def find_root(node: ast.AST) -> str:
    while isinstance(node, (ast.Subscript, ast.Attribute)):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def list_targets(node: ast.AST, _me: str | None = None) -> Iterator[ast.AST]:
    """The targets that a statement or call writes to."""
    if isinstance(node, (ast.Assign, ast.Delete)):
        queue: list[ast.AST] = list(node.targets)
    elif isinstance(node, (ast.AugAssign, ast.AnnAssign, ast.For, ast.NamedExpr)):
        queue = [node.target]
    elif isinstance(node, ast.withitem) and node.optional_vars is not None:
        queue = [node.optional_vars]
    elif isinstance(node, ast.Call):
        queue = [keyword.value for keyword in node.keywords if keyword.arg in ("out", "dst")]
        if isinstance(node.func, ast.Attribute) and is_change(node.func.attr):
            queue.append(node.func.value)
        name = name_called(node)
        if name in FILLS or (isinstance(node.func, ast.Name) and name in ("next", "setattr", "delattr")):
            queue += node.args[: 2 if name == "pack_into" else 1]
    else:
        return
    while queue:
        target = queue.pop()
        if isinstance(target, (ast.Tuple, ast.List)):
            queue += target.elts
        else:
            yield target.value if isinstance(target, ast.Starred) else target


def is_rebound(node: ast.AST, target: ast.AST) -> bool:
    """Whether a statement only rebinds this target, a name: the object that it named before is not changed. A call or
    ``+=`` does change that object."""
    return isinstance(target, ast.Name) and not isinstance(node, (ast.Call, ast.AugAssign))


def list_advanced(node: ast.AST, me: str | None) -> Iterator[ast.AST]:
    """The targets that a statement or call increments, collects into or advances, rather than sets."""
    if isinstance(node, ast.AugAssign):
        yield node.target
    elif isinstance(node, ast.Assign) and not isinstance(node.value, (ast.BoolOp, ast.IfExp)):
        if _reads(node.value, node.targets[0], me):
            yield node.targets[0]
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        advances = node.func.attr in CHANGES or (is_in_place(node.func.attr) and node.func.attr not in _SETS)
        if advances and not is_own(node.func.value, me):
            yield node.func.value
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "next":
        yield from node.args[:1]


def _reads(value: ast.AST, target: ast.AST, me: str | None) -> bool:
    """Whether an assigned value is made from what its target held; for an item, whether it is calculated from that."""
    if isinstance(target, ast.Subscript):
        read = {ast.unparse(target), f"{ast.unparse(target.value)}.get({ast.unparse(target.slice)}, 0)"}
        return isinstance(value, ast.BinOp) and any(ast.unparse(part) in read for part in (value.left, value.right))
    root = {find_root(target)}
    return (state := name_state(target, me, root)) is not None and any(
        name_state(part, me, root) == state for part in ast.walk(value)
    )


def is_change(method: str) -> bool:
    """Whether a method changes its object; torch's in-place methods end with one underscore."""
    return method in CHANGES or method in _MOVES or is_in_place(method)


def is_in_place(method: str) -> bool:
    return method.endswith("_") and not method.endswith("__")


def name_state(node: ast.AST, me: str | None, outer: set[str]) -> str | None:
    """``.x`` for ``self.x`` and anything below it, the name in `outer` for anything below that; None for a local."""
    while isinstance(node, (ast.Subscript, ast.Attribute)):
        if isinstance(node, ast.Attribute) and is_own(node.value, me):
            return f".{node.attr}"
        node = node.value
    return f" (the outer {node.id})" if isinstance(node, ast.Name) and node.id in outer else None


def list_aliases(
    tree: ast.AST, me: str | None, outer: set[str], parameters: Collection[str] = ()
) -> Iterator[tuple[str, str]]:
    """Local names for such state, each with the state, and for `parameters` or their items, each with the parameter's
    name; not names that are later rebound to something made from it."""
    assigned = [(node, name) for node in ast.walk(tree) if isinstance(node, ast.Assign) for name in node.targets]
    local = [(name.id, node.value) for node, name in assigned if isinstance(name, ast.Name)]
    made = {
        name
        for name, value in local
        if find_root(value) != name and any(isinstance(part, ast.Name) and part.id == name for part in ast.walk(value))
    }
    yield from ((name, name) for name in parameters if name not in made)
    for node, target in assigned:
        root = find_root(node.value) if isinstance(node.value, (ast.Name, ast.Subscript)) else ""
        taken = target.elts if isinstance(target, (ast.Tuple, ast.List)) else [target]
        if root in parameters and root not in made and (len(taken) > 1 or isinstance(node.value, ast.Subscript)):
            yield from ((each.id, root) for each in taken if isinstance(each, ast.Name) and each.id not in made)
    for name, value in local:
        state = name_state(value, me, outer) if isinstance(value, (ast.Attribute, ast.Name)) else None
        if state is not None and name not in made:
            yield name, state


def is_super(node: ast.AST) -> bool:
    """Whether a node is ``super()``."""
    return isinstance(node, ast.Call) and getattr(node.func, "id", "") == "super"


def is_own(node: ast.AST, me: str | None) -> bool:
    """Whether a node is self, type(self) or self.__class__."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "type" and node.args:
        return is_own(node.args[0], me)
    if isinstance(node, ast.Attribute) and node.attr == "__class__":
        return is_own(node.value, me)
    return isinstance(node, ast.Name) and node.id == me

"""The source text of functions, and its syntax trees."""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
import textwrap
import tokenize
from typing import Any

from fastloop.evidence.samples import writes


def read_source(code: Any) -> str:
    """The source of a function's code object; raises what ``inspect.getsource`` raises.

    That looks at every imported module when it gets its first code object, which takes 0.1 s in a training.
    """
    if not inspect.iscode(code):
        raise TypeError(f"{code!r} is not a code object")
    linecache.checkcache(code.co_filename)
    if not (lines := linecache.getlines(code.co_filename)):
        return inspect.getsource(code)  # of a module in an archive
    if code.co_firstlineno > len(lines):
        raise OSError("the file is shorter than the code that was imported from it")
    try:
        return "".join(inspect.getblock(lines[code.co_firstlineno - 1 :]))
    except (tokenize.TokenError, IndentationError) as error:
        raise OSError(f"the file has changed since it was imported: {error}") from error


@functools.lru_cache(maxsize=512)
def parse_code(code: Any) -> ast.AST | None:
    """The syntax tree of a function's code object; None if there is no source to read."""
    try:
        tree = writes.spell_out(ast.parse(textwrap.dedent(read_source(code))))
    except (OSError, TypeError, SyntaxError):
        return None
    lambdas = [node for node in ast.walk(tree) if isinstance(node, ast.Lambda) and code.co_name == "<lambda>"]
    return lambdas[0] if len(lambdas) == 1 else tree  # not the statement around it

"""fastloop recipes and fastloop rungs: what is there, from the docstrings."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import inspect
from pathlib import Path

from fastloop.commands import passports
from fastloop.commands.answer import Answer
from fastloop.errors import ConfigError
from fastloop.ladder import Ladder, manual
from fastloop.report import files
from fastloop.schema import spell
from fastloop.shipped import shipped


def recipes() -> Answer:
    """Shipped recipes with the first line of their docstrings; imports none of them."""
    found = {name: _first_line(path.with_suffix(".py")) for name, path in shipped("recipes").items()}
    text = "\n".join(f"{name:<10} {line}" for name, line in found.items())
    content = [{"name": name, "summary": line} for name, line in found.items()]
    return Answer(text=text, json={"schema": files.SCHEMA, "run_dir": None, "recipes": content})


def _first_line(path: Path) -> str:
    return (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").partition("\n")[0]


def rungs(name: str | None) -> Answer:
    """All rungs in planning order, or one rung's manual page and settings.

    Raises:
        ConfigError: there is no rung of that name.
    """
    ladder = dict(Ladder().rungs())
    if name is None:
        rows = {rung: manual(rung).partition("\n")[0] for rung in ladder}
        content = [{"name": rung, "summary": line} for rung, line in rows.items()]
        return Answer(text="\n".join(f"{rung:<9} {line}" for rung, line in rows.items()),
                      json={"schema": files.SCHEMA, "run_dir": None, "rungs": content})  # fmt: skip
    if name not in ladder:
        close = difflib.get_close_matches(name, ladder, n=1)
        raise ConfigError(got=f"rung {name!r}", why=f"the rungs are {', '.join(ladder)}",
                          do=f"write {close[0]}" if close else "write one of them")  # fmt: skip
    rung = ladder[name]
    settings = {field.name: getattr(rung, field.name) for field in dataclasses.fields(rung)}  # type: ignore[arg-type]
    lines = [manual(name), "", inspect.cleandoc(type(rung).__doc__ or ""), "", *passports.lines(name)]
    lines += ["", f"rungs.{name}:"]
    lines += [f"  {field}: {spell(value)}" for field, value in settings.items()]
    page = {"schema": files.SCHEMA, "run_dir": None, "name": name, "manual": manual(name), "settings": settings,
               "passports": passports.of(name)}  # fmt: skip
    return Answer(text="\n".join(lines), json=page)

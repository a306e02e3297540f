"""fastloop recipes and fastloop rungs: list the shipped recipes and rungs, described by their docstrings."""

from __future__ import annotations

import ast
import dataclasses
import inspect

from fastloop.commands.console import Answer, answer_without_run
from fastloop.config.schema import spell
from fastloop.config.shipped import find_shipped
from fastloop.config.suggestions import find_nearest
from fastloop.errors import ConfigError
from fastloop.experiments.ab import passports
from fastloop.ladder import Ladder, read_manual


def list_recipes() -> Answer:
    """List the shipped recipes with the first line of their docstrings, importing none of them."""
    found = {}
    for name, path in find_shipped("recipes").items():
        source = ast.parse(path.with_suffix(".py").read_text(encoding="utf-8"))
        found[name] = (ast.get_docstring(source) or "").partition("\n")[0]
    text = "\n".join(f"{name:<10} {line}" for name, line in found.items())
    content = [{"name": name, "summary": line} for name, line in found.items()]
    return answer_without_run(text, recipes=content)


def list_rungs(name: str | None) -> Answer:
    """List all rungs in planning order, or show one rung's manual page and settings.

    Raises:
        ConfigError: there is no rung with that name.
    """
    ladder = dict(Ladder().rungs())
    if name is None:
        rows = {rung: read_manual(rung).partition("\n")[0] for rung in ladder}
        content = [{"name": rung, "summary": line} for rung, line in rows.items()]
        return answer_without_run("\n".join(f"{rung:<10} {line}" for rung, line in rows.items()), rungs=content)
    if name not in ladder:
        near = find_nearest(name, ladder)
        yet = "this version does not have it yet; " if name in Ladder.coming else ""
        raise ConfigError(
            got=f"rung {name!r}",
            why=f"{yet}the rungs are {', '.join(ladder)}",
            do=f"write {near}" if near else "write one of them",
        )
    rung = ladder[name]
    settings = {field.name: getattr(rung, field.name) for field in dataclasses.fields(rung)}  # type: ignore[arg-type]
    lines = [read_manual(name), "", inspect.cleandoc(type(rung).__doc__ or ""), "", *passports.describe(name)]
    lines += ["", f"rungs.{name}:"]
    lines += [f"  {field}: {spell(value)}" for field, value in settings.items()]
    page = {"name": name, "manual": read_manual(name), "settings": settings, "passports": passports.load(name)}
    return answer_without_run("\n".join(lines), **page)

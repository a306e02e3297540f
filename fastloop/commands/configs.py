"""fastloop config show and fastloop config diff."""

from __future__ import annotations

from collections.abc import Sequence

from fastloop.commands.answer import Answer
from fastloop.config import diff, load, show
from fastloop.report import files
from fastloop.schema import spell


def show_config(conf: str, *, more: Sequence[str], overrides: Sequence[str]) -> Answer:
    """Every value with the place it came from; secrets masked."""
    rows = show(load(conf, more=more, overrides=overrides))
    width = min(44, max(len(f"{key}: {spell(value)}") for key, value, _ in rows))
    text = "\n".join(f"{f'{key}: {spell(value)}':<{width}}  # {origin}" for key, value, origin in rows)
    values = [{"key": key, "value": value, "origin": str(origin)} for key, value, origin in rows]
    return Answer(text=text, json={"schema": files.SCHEMA, "run_dir": None, "values": values})


def diff_configs(a: str, b: str) -> Answer:
    """The leaves in which two configurations differ; lists are compared whole, as merging replaces them whole."""
    rows = diff(load(a), load(b))
    text = "\n".join(f"{key}: {spell(left)} -> {spell(right)}" for key, left, right in rows) or "no difference"
    content = [{"key": key, "a": left, "b": right} for key, left, right in rows]
    return Answer(text=text, json={"schema": files.SCHEMA, "run_dir": None, "differences": content})

"""fastloop cache: list and delete the samples that runs have kept."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fastloop.commands.console import Answer, answer_without_run
from fastloop.errors import ConfigError, NotApplicable
from fastloop.feeds.cache import places, records, server
from fastloop.records.facts import format_bytes

NOTHING = "there are no cached samples"


@dataclass(frozen=True, kw_only=True)
class _Kept:
    """One cache, and how to delete it."""

    row: Mapping[str, Any]
    clear: Callable[[], bool]


def list_kept(*, path: str | None, url: str | None) -> Answer:
    """List this user's caches on this machine, in `path` and on the server at `url`.

    Raises:
        ConfigError: there is no such directory, or the server does not answer.
    """
    rows = [kept.row for kept in _find(path, url)]
    lines = [_describe(row) for row in rows] or [NOTHING]
    if any(row["old"] for row in rows):
        lines.append("old: written by other versions and no longer used; fastloop cache clear NAME deletes them")
    return answer_without_run("\n".join(lines), caches=rows)


def clear_kept(names: Sequence[str], *, path: str | None, url: str | None) -> Answer:
    """Delete caches, all of them or those with these name prefixes.

    Raises:
        ConfigError: no cache has such a name, there is no such directory, or the server does not answer.
    """
    found = _find(path, url)
    for name in names:
        if not any(kept.row["name"].startswith(name) for kept in found):
            why = f"the caches are {', '.join(kept.row['name'] for kept in found)}" if found else NOTHING
            do = "write one of these names" if found else "see --path and --url for other places"
            raise ConfigError(got=f"cache {name!r}", why=why, do=do)
    chosen = [kept for kept in found if not names or kept.row["name"].startswith(tuple(names))]
    results = [{**kept.row, "removed": kept.clear()} for kept in chosen]
    lines = [f"{'removed' if row['removed'] else 'left, in use'}  {_describe(row)}" for row in results]
    return answer_without_run("\n".join(lines) or NOTHING, caches=results)


def _find(path: str | None, url: str | None) -> list[_Kept]:
    roots = {"shm": places.find_shm_root(), "disk": places.find_disk_root()}
    if path is not None:
        if not os.path.isdir(os.path.expanduser(path)):  # noqa: PTH111, PTH112 (Path's raise)
            why, do = "there is no such directory", f"check the path; it starts at {Path.cwd()}"
            raise ConfigError(got=f"--path {path}", why=why, do=do)
        roots["path"] = places.find_disk_root(path)
    kept = []
    for kind, root in roots.items():
        for found in places.list_caches(root):
            row = _make_row(kind, found.path.name, found.kept_bytes, found.info)
            row |= {"path": str(found.path), "age_s": round(found.age_s, 1), "in_use": found.in_use}
            kept.append(_Kept(row=row, clear=partial(places.clear, found)))
    if url is not None:
        try:
            for name, size, info in server.list_server(url):
                row = _make_row("redis", name, size, info) | {"path": url}
                kept.append(_Kept(row=row, clear=partial(server.clear_server, url, name)))
        except NotApplicable as reason:
            do = "start it, or check the address"
            raise ConfigError(got=f"--url {url}", why=str(reason), do=do) from None
    return kept


def _make_row(kind: str, name: str, size: int, info: Mapping[str, Any]) -> dict[str, Any]:
    old = info.get("format") != records.FORMAT or info.get("versions") != records.describe_versions()
    about = {key: info.get(key) for key in ("dataset", "what", "samples", "versions", "made_utc")}
    return {"name": name, "store": kind, "kept_bytes": size, "age_s": None, "in_use": None, "old": old, **about}


def _describe(row: Mapping[str, Any]) -> str:
    age = "" if row["age_s"] is None else f", {_describe_age(row['age_s'])} old"
    marks = "".join(f", {word}" for word, is_so in (("in use", row["in_use"]), ("old", row["old"])) if is_so)
    return (
        f"{row['name'][:12]:<12}  {row['store']:<5} {format_bytes(row['kept_bytes']):>8}{age}{marks}"
        f"  {row['what'] or 'an unfinished cache'} ({row['dataset'] or 'unknown'})"
    )


def _describe_age(seconds: float) -> str:
    for unit, size in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"

"""fastloop cache ls and clear."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fastloop.commands import cache
from fastloop.errors import ConfigError
from fastloop.feeds.cache import places, records
from fastloop.feeds.cache.mapped import MappedStore, open_store
from tests.commands.command_line import CommandLine


@pytest.fixture(autouse=True)
def roots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(places, "find_shm_root", lambda: tmp_path / "shm")
    yield tmp_path


def keep(root: Path, name: str, **info: Any) -> MappedStore:
    about = {"format": records.FORMAT, "versions": records.describe_versions(), "dataset": "ImageFolder of /data"}
    about |= {"what": "decoded images", "samples": 3, **info}
    store = open_store(root, name, capacity=10**6, samples=3, info=about, remove=False)
    store.put(b"k" * 16, records.pack(b"k" * 16, b"x" * 100_000))
    return store


def test_what_is_kept_is_listed_and_cleared(tmp_path: Path) -> None:
    used = keep(tmp_path / "shm", "1-used")
    keep(places.find_disk_root(), "1-now").close()
    keep(places.find_disk_root(), "0-before", format=0).close()
    keep(places.find_disk_root(str(tmp_path / "given")), "1-given", versions="python 2.7").close()
    os.utime(places.find_disk_root() / "1-now" / "samples.bin", (time.time() - 7300,) * 2)
    for file in (places.find_disk_root() / "1-now").iterdir():
        os.utime(file, (time.time() - 7300,) * 2)
    said = cache.list_kept(path=str(tmp_path / "given"), url=None)
    assert said.json is not None
    rows = {row["name"]: row for row in said.json["caches"]}
    assert {name: (row["store"], row["in_use"], row["old"]) for name, row in rows.items()} == {
        "1-used": ("shm", True, False),
        "0-before": ("disk", False, True),
        "1-now": ("disk", False, False),
        "1-given": ("path", False, True),
    }
    assert all(100_000 < row["kept_bytes"] < 300_000 and row["samples"] == 3 for row in rows.values())
    assert "1-now         disk    143 kB, 2 h old" in said.text and "decoded images (ImageFolder of /data)" in said.text
    assert "in use" in said.text and "fastloop cache clear NAME deletes them" in said.text

    cleared = cache.clear_kept(["0-", "1-g"], path=str(tmp_path / "given"), url=None)
    assert cleared.text.count("removed") == 2 and "0-before" in cleared.text and "1-given" in cleared.text
    cleared = cache.clear_kept([], path=None, url=None)
    assert cleared.json is not None
    assert {row["name"]: row["removed"] for row in cleared.json["caches"]} == {"1-used": False, "1-now": True}
    assert "left, in use  1-used" in cleared.text and used.get(b"k" * 16) is not None
    used.close()
    assert cache.clear_kept([], path=None, url=None).text.startswith("removed  1-used")
    assert cache.list_kept(path=None, url=None).text == "there are no cached samples"
    assert cache.clear_kept([], path=None, url=None).text == "there are no cached samples"


def test_a_name_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there are no cached samples"):
        cache.clear_kept(["2"], path=None, url=None)
    keep(places.find_disk_root(), "1-now").close()
    with pytest.raises(ConfigError) as caught:
        cache.clear_kept(["2"], path=None, url=None)
    assert (caught.value.got, caught.value.why) == ("cache '2'", "the caches are 1-now")
    for command in (cache.list_kept, lambda **places: cache.clear_kept([], **places)):
        with pytest.raises(
            ConfigError, match=r"got --path nope\n  why there is no such directory\n  do  check the path"
        ):
            command(path="nope", url=None)
    with pytest.raises(ConfigError, match="no server answers"):
        cache.list_kept(path=None, url="redis://127.0.0.1:1/0")


def test_on_the_command_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    fastloop = CommandLine(tmp_path / "here", capfd, monkeypatch)
    keep(places.find_disk_root(), "1-now").close()
    said = fastloop("cache", "ls", "--json", "-")
    assert said.code == 0 and "1-now" in [row["name"] for row in said.json["caches"]] and said.json["schema"] == 1
    said = fastloop("cache", "clear", "1-now")
    assert said.code == 0 and said.out.startswith("removed  1-now") and said.err == ""
    said = fastloop("cache", "clear", "1-now")
    assert said.code == 2 and "got cache '1-now'" in said.err

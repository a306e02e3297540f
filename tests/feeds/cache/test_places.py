"""Directories of caches: whose they are, how long they stay, and what is left after a crash."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from fastloop.errors import NotApplicable
from fastloop.feeds.cache import places
from fastloop.feeds.cache.places import clear, enter, find_disk_root, find_shm_root, list_caches, make_private, sweep


def fill(draft: Path) -> None:
    (draft / places.DATA).write_bytes(b"x" * 5000)
    (draft / places.INFO).write_text(json.dumps({"dataset": "mine"}))


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir()) if root.exists() else []


def test_a_root_is_made_for_its_user_alone(tmp_path: Path) -> None:
    root = tmp_path / "deep" / "root"
    make_private(root)
    assert root.stat().st_mode & 0o777 == 0o700
    make_private(root)
    assert find_disk_root("~/x") == Path.home() / "x" / "samples"


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
def test_a_root_that_others_may_write_to_is_refused(mode: int, tmp_path: Path) -> None:
    """K5."""
    root = tmp_path / "root"
    root.mkdir()
    root.chmod(mode)
    with pytest.raises(NotApplicable, match="others may write to"):
        enter(root, "a", fill)
    assert names(root) == []


def test_a_root_of_somebody_else_or_a_link_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(NotApplicable, match="is not a directory"):
        make_private(tmp_path / "link")
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    with pytest.raises(NotApplicable, match=f"belongs to user {me}"):
        make_private(tmp_path / "elsewhere")


def test_what_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(NotApplicable, match="cannot be created"):
        make_private(tmp_path / "file" / "root")


def test_the_last_user_removes_it(tmp_path: Path) -> None:
    root = tmp_path / "root"
    one, two = enter(root, "a", fill), enter(root, "a", lambda _: pytest.fail("it was there"))
    assert one.path == two.path and names(one.path) == ["alive", "info.json", "samples.bin"]
    one.leave(remove=True)
    one.leave(remove=True)
    (found,) = list_caches(root)
    assert found.in_use and found.info == {"dataset": "mine"} and found.kept_bytes >= 5000 and found.age_s < 60
    assert not clear(found) and two.path.exists(), "somebody uses it"
    two.leave(remove=True)
    assert not root.exists()


def test_one_on_disk_stays(tmp_path: Path) -> None:
    root = tmp_path / "root"
    enter(root, "a", fill).leave(remove=False)
    sweep(root, drafts_only=True)
    (found,) = list_caches(root)
    assert not found.in_use and clear(found) and names(root) == []


def test_what_is_not_ours_to_lock_is_not_called_used(tmp_path: Path) -> None:
    enter(tmp_path / "root", "a", fill).leave(remove=False)
    alive = tmp_path / "root" / "a" / "alive"
    alive.unlink()
    alive.mkdir()  # cannot be opened, for root neither
    (found,) = list_caches(tmp_path / "root")
    assert not found.in_use and not clear(found) and alive.exists()


def test_a_fill_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def fail(draft: Path) -> None:
        fill(draft)
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        enter(tmp_path / "root", "a", fail)
    assert names(tmp_path / "root") == []


def test_two_that_make_the_same_at_once_share_one(tmp_path: Path) -> None:
    both, made, found = threading.Barrier(2), [], []

    def slow(draft: Path) -> None:
        both.wait(10)
        fill(draft)
        made.append(draft)

    def go() -> None:
        found.append(enter(tmp_path / "root", "a", slow))

    threads = [threading.Thread(target=go) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(made) == 2 and {place.path for place in found} == {tmp_path / "root" / "a"}
    assert names(tmp_path / "root") == ["a"]
    found[0].leave(remove=True)
    assert found[1].path.exists()
    found[1].leave(remove=True)
    assert not (tmp_path / "root").exists()


def test_a_forked_child_leaves_nothing(tmp_path: Path) -> None:
    place = enter(tmp_path / "root", "a", fill)
    if not (child := os.fork()):
        place.leave(remove=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0 and place.path.exists()
    place.leave(remove=True)


HOLDER = """
    import os, sys, time
    from pathlib import Path
    from fastloop.feeds.cache import places
    place = places.enter(Path(sys.argv[1]), "a", lambda draft: (draft / "samples.bin").write_text("x"))
    if sys.argv[2] == "in a draft":
        places.enter(Path(sys.argv[1]), "b", lambda draft: print("held", flush=True) or time.sleep(1000))
    print("held", flush=True)
    time.sleep(1000)
"""


def hold(root: Path, how: str = "") -> subprocess.Popen[str]:
    command = [sys.executable, "-c", textwrap.dedent(HOLDER), str(root), how]
    holder = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None and holder.stdout.readline() == "held\n"
    return holder


@pytest.mark.parametrize("how", ["", "in a draft"])
def test_what_a_killed_process_held_is_swept_and_not_before(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(places, "_YOUNG_S", 0.0)
    root = tmp_path / "root"
    with hold(root, how) as holder:
        sweep(root)
        assert len(names(root)) == 2 if how else names(root) == ["a"]
        holder.send_signal(signal.SIGKILL)
    assert names(root)
    sweep(root)
    assert names(root) == []


def test_a_cache_that_lost_its_files_is_made_anew(tmp_path: Path) -> None:
    root = tmp_path / "root"
    enter(root, "a", fill).leave(remove=False)
    (root / "a" / "alive").unlink()
    made: list[Any] = []
    enter(root, "a", lambda draft: made.append(draft) or fill(draft)).leave(remove=True)
    assert len(made) == 1


def test_unreadable_things_in_a_root_are_listed_as_unknown(tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "odd").mkdir(parents=True)
    (root / "file").write_text("")
    (root / "odd" / "info.json").write_text("[1")
    os.utime(root / "odd" / "info.json", (time.time() - 7200,) * 2)
    (found,) = list_caches(root)
    assert found.info == {} and found.age_s >= 7200 and not found.in_use
    assert list(list_caches(tmp_path / "nowhere")) == []
    assert find_shm_root().name.endswith(str(os.geteuid()))

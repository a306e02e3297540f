"""Run directories: made for a run, never somebody else's, and given back when nothing came of it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fastloop.errors import ConfigError
from fastloop.experiments.trials import run_directories

pytestmark = pytest.mark.usefixtures("here")


def below(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_the_default_place(here: Path) -> None:
    place = run_directories.claim("gpt2", None)
    assert re.fullmatch(r"fastloop-runs/gpt2/\d{8}T\d{6}Z", str(place.path)) and below(place.path) == []
    assert place.made == (place.path, place.path.parent, place.path.parent.parent)


def test_runs_of_the_same_second_do_not_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_directories, "format_utc", lambda: "20261120T093000Z")
    names = [run_directories.claim("gpt2", None).path.name for _ in range(3)]
    assert names == ["20261120T093000Z", "20261120T093000Z-2", "20261120T093000Z-3"]


@pytest.mark.parametrize("name", ["../../x", "..", "/etc", "~root", "läuft schon", "a b", "x" * 300, "", "-rf", "a\nb"])
def test_a_name_leads_nowhere_else(name: str, here: Path) -> None:
    path = run_directories.claim(name, None).path.resolve()
    assert path.parent.parent == here / "fastloop-runs" and re.fullmatch(r"[\w.-]{1,80}", path.parent.name)


def test_a_directory_of_ones_own(here: Path) -> None:
    path = Path("a/b c/ünï")
    made = run_directories.claim("x", str(path))
    assert made == run_directories.ClaimedDirectory(path, (path, Path("a/b c"), Path("a")))
    (path / "notes").touch()
    made.give_back()
    (path / "notes").unlink()
    assert run_directories.claim("x", str(path)) == run_directories.ClaimedDirectory(path, ()), (
        "an empty one may be there already"
    )


def test_one_that_is_not_empty_needs_force(here: Path) -> None:
    (here / "a").mkdir()
    (here / "a" / "notes").write_text("mine")
    with pytest.raises(ConfigError, match="--out a") as caught:
        run_directories.claim("x", "a")
    assert caught.value.do == "choose another directory, or add --force to write into this one"
    assert run_directories.claim("x", "a", force=True).made == ()
    assert below(here) == ["a", "a/notes"]


@pytest.mark.parametrize("force", [False, True])
def test_one_that_another_command_uses_is_refused_although_it_is_still_empty(force: bool, here: Path) -> None:
    with run_directories.claim("x", "a"), pytest.raises(ConfigError, match="another fastloop is using it"):
        run_directories.claim("x", "a", force=force)
    with run_directories.claim("x", "a") as path:
        assert below(here) == ["a"] and path.is_dir(), "free again"


def test_one_that_is_missing_cannot_be_resumed(here: Path) -> None:
    for resume in (
        lambda: run_directories.refuse_alone("ab", "a"),
        lambda: run_directories.claim_or_resume("x", None, force=False, resume="a", holds="x.json"),
    ):
        with pytest.raises(ConfigError, match="there is no such directory"):
            resume()
    Path("a").mkdir()
    with pytest.raises(ConfigError, match="not the command that began it"):
        run_directories.refuse_alone("ab", "a")


def test_one_that_is_resumed_is_locked_too(here: Path) -> None:
    (here / "a").mkdir()
    (here / "a" / "x.json").write_text("{}")
    options = {"out": None, "force": False, "resume": "a", "holds": "x.json"}
    with run_directories.claim_or_resume("x", **options), pytest.raises(ConfigError, match="is using it"):  # type: ignore[arg-type]
        run_directories.claim_or_resume("x", **options)  # type: ignore[arg-type]


def test_one_of_a_command_that_lives_is_refused_and_of_one_that_was_killed_it_is_free(here: Path) -> None:
    code = "from fastloop.experiments.trials.run_directories import claim; claim('x', 'a'); print('mine', flush=True); "
    command = [sys.executable, "-c", f"{code}input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "mine\n"
        with pytest.raises(ConfigError, match="another fastloop is using it"):
            run_directories.claim("x", "a")
        other.kill()
        other.wait(200)
        with run_directories.claim("x", "a") as path:
            assert path.is_dir()


def test_the_tilde_is_ones_home(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(here / "home"))
    assert run_directories.claim("x", "~/run").path == here / "home" / "run"


@pytest.mark.parametrize("out", ["file/below", "x" * 300, "a/" + "x" * 300])
def test_a_place_that_cannot_be(out: str, here: Path) -> None:
    (here / "file").write_text("")
    with pytest.raises(ConfigError, match="it cannot be written") as caught:
        run_directories.claim("x", out)
    assert caught.value.got == f"run directory {out}" and caught.value.exit_code == 2
    assert below(here) in (["file"], ["a", "file"])


def test_a_file_is_no_place(here: Path) -> None:
    (here / "file").write_text("kept")
    for force in (False, True):
        with pytest.raises(ConfigError, match="got --out file\n  why it is a file, not a directory"):
            run_directories.claim("x", "file", force=force)
    assert (here / "file").read_text() == "kept"


def test_a_read_only_place(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(path: Path, *args: object, **kwargs: object) -> None:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "mkdir", refuses)
        with pytest.raises(ConfigError, match="it cannot be written: Permission denied"):
            run_directories.claim("x", None)
    monkeypatch.setattr(Path, "touch", refuses)  # it can be made, but nothing in it
    with pytest.raises(ConfigError, match="it cannot be written: Permission denied"):
        run_directories.claim("x", "a/b")
    assert below(here) == [], "what had been made was not taken away"


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may write anywhere")
def test_a_place_of_somebody_elses(here: Path) -> None:
    (here / "theirs").mkdir(mode=0o555)
    with pytest.raises(ConfigError, match="Permission denied"):
        run_directories.claim("x", "theirs/a")


def test_giving_back_takes_away_only_what_was_made_and_is_empty(here: Path) -> None:
    (here / "kept").mkdir()
    first, second = run_directories.claim("x", "kept/a/b"), run_directories.claim("x", "kept/a/c")
    first.give_back()
    assert below(here) == ["kept", "kept/a", "kept/a/c"]
    (second.path / "report.md").write_text("")
    second.give_back()
    assert below(here) == ["kept", "kept/a", "kept/a/c", "kept/a/c/report.md"]
    (here / "empty").mkdir()
    run_directories.claim("x", "empty").give_back()
    run_directories.ClaimedDirectory(Path("nowhere")).give_back()
    assert (here / "empty").is_dir(), "an empty directory of the user's is the user's"


def test_ranks_that_write_nothing_make_nothing(here: Path) -> None:
    assert run_directories.name_unclaimed("gpt2", "a/b") == Path("a/b")
    assert run_directories.name_unclaimed("gp t2", None).parent == Path("fastloop-runs/gp-t2")
    assert below(here) == []


def test_what_was_stopped_says_how_to_go_on() -> None:
    assert run_directories.describe_partial(Path("a")).endswith(
        "partial results are in a; to continue, repeat the command with --resume a"
    )


def test_a_forked_child_does_not_keep_a_directory_locked(tmp_path: Path) -> None:
    place = run_directories.claim("run", str(tmp_path / "a"))
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        os.close(write)
        os.read(read, 1)  # until the parent closes its end
        os._exit(0)
    try:
        with pytest.raises(ConfigError, match="another fastloop is using it"):
            run_directories.claim("run", str(tmp_path / "a"))
        place.give_back()
        run_directories.claim("run", str(tmp_path / "a")).give_back()
    finally:
        os.close(write)
        os.waitpid(child, 0)

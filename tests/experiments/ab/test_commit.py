"""The working tree against a commit: whose code each arm runs, where, and that nothing is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fastloop.errors import ConfigError
from fastloop.experiments.ab import commit
from fastloop.experiments.ab.arms import Ask
from fastloop.experiments.ab.commit import Versus
from fastloop.experiments.ab.script_arms import ScriptArm, make_command
from tests.commands.command_line import ROOT, run, strictly

TRAIN = """
import sys, time
from pathlib import Path
import torch
import lightning.pytorch as pl
from torch.utils.data import DataLoader, TensorDataset
import parts

class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(8, 1)

    def training_step(self, batch, batch_idx):
        time.sleep(parts.SLEEP_S)
        return torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=parts.RATE)

if __name__ == "__main__":
    pl.seed_everything()
    x = torch.randn(512, 8) * float(Path("data/scale.txt").read_text())
    data = DataLoader(TensorDataset(x, x.sum(dim=1, keepdim=True)), batch_size=8, shuffle=True)
    pl.Trainer(accelerator="cpu", max_epochs=9, logger=False, enable_checkpointing=False,
               enable_progress_bar=False, enable_model_summary=False).fit(Net(), data)
"""
SLOW, FAST = "SLEEP_S, RATE = 0.02, 0.05\n", "SLEEP_S, RATE = 0.0, 0.05\n"


def git(*command: str) -> str:
    own = ("-c", "user.name=A", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false")
    return subprocess.run(["git", *own, *command], check=True, capture_output=True, text=True).stdout


@pytest.fixture
def jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick_starts: None) -> Path:
    """A folder of a repository with a script, its module, and data that git does not track."""
    folder = tmp_path / "repo" / "jobs"
    (folder / "data").mkdir(parents=True)
    (tmp_path / "temporary").mkdir()
    monkeypatch.chdir(folder)
    for name, value in {"OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path / "temporary")}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("tempfile.tempdir", None)
    (folder / "data" / "scale.txt").write_text("1.0")
    (folder / "train.py").write_text(TRAIN)
    (folder / "parts.py").write_text(SLOW)
    git("init", "-q", "-b", "main", "..")
    git("add", "train.py", "parts.py")
    git("commit", "-q", "-m", "slow")
    return folder


def versus(ref: str = "HEAD", *, aa: bool = False, say: Any = lambda _: None) -> Any:
    arm = ScriptArm(name="base", command=make_command("train.py"), overrides=("watch.warmup_steps=2",))
    return commit.compare_with(ref, arm, aa=aa, say=say)


def left(jobs: Path) -> list[str]:
    """What a comparison has left behind: directories, and worktrees in the user's repository."""
    trees = git("worktree", "list", "--porcelain").count("worktree ")
    return [*map(str, (jobs.parents[1] / "temporary").iterdir()), *(["a worktree"] if trees > 1 else [])]


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_a_faster_working_tree_is_faster_than_its_commit(jobs: Path) -> None:
    (jobs / "parts.py").write_text(FAST)
    options = ("--runs", "3", "--steps", "30", "--out", "../out", "--json", "-", "watch.warmup_steps=5")
    said = run("ab", "--script", "train.py", "--vs-commit", "main", *options, cwd=jobs, limit_s=200)
    assert said.code == 0, said.err
    found = strictly(said.out)
    assert found["verdict"] == "faster" and found["ratio"] > 1.5 and found["parity"]["passed"]
    hash_ = git("rev-parse", "main")[:7]
    assert [each["name"] for each in found["arms"]] == [f"main ({hash_})", "working tree with 1 changed file"]
    assert not left(jobs) and (jobs / "parts.py").read_text() == FAST


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_another_training_fails_the_gate(jobs: Path) -> None:
    (jobs / "parts.py").write_text(SLOW.replace("0.05", "0.5"))
    options = ("--runs", "3", "--steps", "20", "--out", "../out", "--json", "-", "watch.warmup_steps=5")
    said = run("ab", "--script", "train.py", "--vs-commit", "main", *options, cwd=jobs, limit_s=200)
    assert said.code == 3, said.err
    assert strictly(said.out)["parity"]["passed"] is False and not left(jobs)


@pytest.mark.slow
def test_a_base_that_imports_the_working_tree_gives_no_verdict(jobs: Path, tmp_path: Path) -> None:
    """As by an editable install that an import hook serves: the module comes from the working tree in both arms."""
    (jobs / "train.py").write_text(f"import sys; sys.path.insert(0, {str(jobs)!r})\n{TRAIN}")
    git("commit", "-q", "-a", "-m", "from one place")
    (jobs / "parts.py").write_text(FAST)
    with versus() as found:
        base, ours = (side.arm.run("x", tmp_path / side.folder, Ask(steps=9)) for side in found.sides)
    assert str(base.cause).startswith(
        f"it imported the working tree's {jobs / 'parts.py'}: both arms would run the same"
    )
    assert not base.ok and ours.ok, ours.cause


@pytest.mark.slow
def test_an_edit_during_the_comparison_ends_it(jobs: Path, tmp_path: Path) -> None:
    (jobs / "parts.py").write_text(FAST)
    with versus() as found:
        (jobs / "parts.py").write_text(FAST + "MORE = 1\n")
        base, ours = (side.arm.run("x", tmp_path / side.folder, Ask(steps=9)) for side in found.sides)
    assert base.ok, base.cause
    assert not ours.ok and "were edited during the comparison" in str(ours.cause)


def arms(found: Versus) -> list[ScriptArm]:
    return [side.arm for side in found.sides if isinstance(side.arm, ScriptArm)]


def test_the_base_has_the_commits_files_and_the_data(jobs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (jobs / "parts.py").write_text(FAST)
    (jobs / "new.py").write_text("")
    odd = os.fsdecode(b"b\xe9d.txt")  # of another encoding
    (jobs / odd).touch()
    monkeypatch.setenv("PYTHONPATH", f"{jobs}:relative:/elsewhere")
    monkeypatch.syspath_prepend(str(jobs.parent / "src"))  # as a .pth of an editable install adds it
    said: list[str] = []
    with versus(say=said.append) as found:
        base, ours = arms(found)
        assert base.place.cwd is not None and base.place.search_path is not None
        assert (base.place.cwd / "parts.py").read_text() == SLOW and not (base.place.cwd / "new.py").exists()
        assert (base.place.cwd / "data" / "scale.txt").read_text() == "1.0"
        assert (base.place.cwd / odd).is_symlink()
        tree = base.place.cwd.parent
        assert base.place.search_path.split(":") == [str(tree / "jobs"), "relative", "/elsewhere", str(tree / "src")]
        assert base.command == (sys.executable, "train.py") and ours.place.cwd is None
        assert ours.name == "working tree with 2 changed files"
    assert said and said[0].endswith("in a separate git worktree; the working tree differs in 2 files")
    assert not left(jobs) and (jobs / "data" / "scale.txt").exists(), "the link went, not what it led to"


def test_from_another_folder_only_the_script_moves(jobs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (jobs / "parts.py").write_text(FAST)
    monkeypatch.chdir(jobs.parents[1])
    arm = ScriptArm(name="base", command=make_command("repo/jobs/train.py", "--out results --data=repo/jobs/data"))
    with commit.compare_with("HEAD", arm, aa=False, say=lambda _: None) as found:
        base = arms(found)[0]
        assert base.place.cwd is None
        script, *rest = base.command[1:]
        assert Path(script).parent.joinpath("parts.py").read_text() == SLOW
        assert rest[:2] == ["--out", "results"] and rest[2] == f"--data={Path(script).parent / 'data'}"


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit, RuntimeError])
def test_nothing_is_left_however_it_ends(jobs: Path, stop: type[BaseException]) -> None:
    (jobs / "parts.py").write_text(FAST)
    with pytest.raises(stop), versus():
        assert left(jobs), "the commit is checked out"
        raise stop
    assert not left(jobs)


def test_the_next_takes_away_what_a_killed_one_left(jobs: Path) -> None:
    (jobs / "parts.py").write_text(FAST)
    code = (
        "import os, signal\nfrom tests.experiments.ab.test_commit import versus\n"
        "with versus():\n    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    killed = subprocess.run([sys.executable, "-c", code], cwd=jobs, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert killed.returncode == -signal.SIGKILL and len(left(jobs)) == 2
    with versus():
        pass
    assert not left(jobs)


def _remove_script(jobs: Path) -> None:
    git("rm", "-q", "--cached", "train.py")
    git("commit", "-q", "-m", "gone")


@pytest.mark.parametrize(
    ("ref", "spoil", "why"),
    [
        ("no-such", lambda _: None, "has no such commit"),
        ("--help", lambda _: None, "has no such commit"),
        ("HEAD", lambda _: None, "equals this commit"),
        ("HEAD", _remove_script, "has no such file"),
        ("HEAD", lambda jobs: (jobs.parent / ".git").rename(jobs.parents[1] / "x"), "is not in a git repository\n"),
    ],
    ids=["unknown", "option", "equal", "later", "none"],
)
def test_what_cannot_be_compared(jobs: Path, ref: str, spoil: Callable[[Path], Any], why: str) -> None:
    spoil(jobs)
    with pytest.raises(ConfigError, match=why), versus(ref):
        pass
    assert not list((jobs.parents[1] / "temporary").iterdir())


def test_submodules_and_lfs_are_told(jobs: Path) -> None:
    (jobs.parent / ".gitattributes").write_text("*.bin filter=lfs\n")
    git("add", "../.gitattributes")
    head = git("rev-parse", "HEAD").strip()
    git("update-index", "--add", "--cacheinfo", f"160000,{head},libs/theirs")
    git("commit", "-q", "-m", "more")
    said: list[str] = []
    with versus("HEAD", aa=True, say=said.append):
        pass
    assert said[1].endswith("in the base's tree: libs/theirs") and "Git LFS" in said[2]

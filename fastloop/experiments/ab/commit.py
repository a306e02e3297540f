"""The two arms of ``ab --vs-commit``: a script at a commit, and the same script in the working tree.

The commit is checked out into a separate git worktree, in a private temporary directory that is deleted afterwards.
The script runs there from the folder that corresponds to the user's. Untracked files, such as data, are linked in, so
that relative paths find them; untracked Python files are not, because they are not part of the commit. Entries of
PYTHONPATH and of an editable install's path that point into the working tree are replaced by those of the commit's
tree. If the base still imports a module from the working tree, the experiment ends: both arms would run the same code.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from fastloop.errors import ConfigError
from fastloop.experiments.ab.arms import Progress
from fastloop.experiments.ab.experiment import SOURCE, Side
from fastloop.experiments.ab.manifest import READ, name_folder
from fastloop.experiments.ab.script_arms import ArmPlace, ScriptArm
from fastloop.experiments.trials.script_injection import private_directory
from fastloop.records.plan import say_count

_OF_ANOTHER_REPOSITORY = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX", "GIT_COMMON_DIR")
"""Variables that git sets for hooks, and that would direct our calls to the hook's index."""
HOME = Path(__file__).resolve().parents[3]
"""The folder of fastloop itself: this copy measures both arms."""


@dataclass(frozen=True, kw_only=True)
class Versus:
    """Both sides of the comparison, and fingerprints of their sources for ``--resume``."""

    sides: list[Side]
    sources: Mapping[str, str]


@contextlib.contextmanager
def compare_with(ref: str, arm: ScriptArm, *, aa: bool, say: Progress) -> Iterator[Versus]:
    """Yield both sides of the comparison; the commit's files are in place until the context ends.

    Args:
        arm: the script as the user would run it.
        aa: allow a working tree that is equal to the commit.

    Raises:
        ConfigError: no repository, no such commit, or nothing differs.
    """
    script = next((Path(word) for word in arm.command if word.endswith(".py") and Path(word).is_file()), None)
    tree = _WorkingTree.find(Path.cwd() if script is None else script.resolve().parent)
    commit = tree.resolve(ref)
    uncommitted, differing = tree.list_changed("HEAD"), tree.list_changed(commit)
    if not differing and not aa:
        raise ConfigError(
            got=f"--vs-commit {ref}",
            why="the working tree equals this commit, so both arms are the same training",
            do="name another commit, such as main or HEAD~1; or use --aa for an A/A test",
        )
    with private_directory() as private, tree.checked_out(commit, private / tree.top.name) as other:
        apart = say_count(len(differing), "file")
        say(f"base: {ref} ({commit[:7]}), in a separate git worktree; the working tree differs in {apart}")
        for line in tree.describe_gaps(commit):
            say(line)
        before = tree.fingerprint(commit)
        base = dataclasses.replace(
            arm,
            name=f"commit {commit[:7]}" if commit.startswith(ref) else f"{ref} ({commit[:7]})",
            command=tree.move_command(arm.command, other, commit),
            place=ArmPlace(
                cwd=_move_folder(Path.cwd(), tree.top, other),
                search_path=tree.move_search_path(other),
                not_from=tree.top,
                find_fault=partial(tree.find_wrong_imports, other),
            ),
        )
        ours = dataclasses.replace(
            arm,
            name="working tree" + (f" with {say_count(len(uncommitted), 'changed file')}" if uncommitted else ""),
            place=ArmPlace(find_fault=lambda _: tree.find_edit(commit, before)),
        )
        yield Versus(
            sides=[
                Side(arm=base, folder=name_folder(0, base.name)),
                Side(arm=ours, folder=name_folder(1, "working-tree"), changed_keys=(SOURCE,)),
            ],
            sources={"the commit": commit, "the working tree": before},
        )


def _move_folder(folder: Path, top: Path, other: Path) -> Path | None:
    """Return the corresponding folder in the other tree, created if missing; None if outside the working tree."""
    folder = folder.resolve()
    if not folder.is_relative_to(top):
        return None
    moved = other / folder.relative_to(top)
    moved.mkdir(parents=True, exist_ok=True)
    return moved


@dataclass(frozen=True)
class _WorkingTree:
    """The user's repository, as git sees it. Nothing in it is changed except the list of its worktrees."""

    top: Path

    @classmethod
    def find(cls, folder: Path) -> _WorkingTree:
        """Return the working tree that contains a folder; raises ConfigError if there is none."""
        try:
            return cls(Path(_run_git(folder, "rev-parse", "--show-toplevel").rstrip("\n")).resolve())
        except FileNotFoundError:
            raise ConfigError(got="--vs-commit", why="git is not installed", do="install git") from None
        except subprocess.CalledProcessError as error:
            said = _read_last_line(error)
            more = "" if said.startswith("not a git repository") else f": {said}"
            raise ConfigError(
                got="--vs-commit",
                why=f"{folder} is not in a git repository{more}",
                do="commit the script to a repository first",
            ) from None

    def resolve(self, ref: str) -> str:
        """Return the full hash of a branch, tag or short hash; raises ConfigError if there is no such commit."""
        options = ("--verify", "--quiet", "--end-of-options")
        try:
            return _run_git(self.top, "rev-parse", *options, f"{ref}^{{commit}}").strip()
        except subprocess.CalledProcessError:
            raise ConfigError(
                got=f"--vs-commit {ref}",
                why=f"{self.top} has no such commit",
                do=f"write a branch, tag or hash; in a shallow clone first: git fetch --depth 1 origin {ref}",
            ) from None

    def list_changed(self, commit: str) -> list[str]:
        """List tracked files that differ from a commit, and new Python files; a training may write other new files."""
        tracked = _split_names(_run_git(self.top, "diff", "--name-only", "--no-renames", "-z", commit))
        new = _split_names(_run_git(self.top, "ls-files", "-z", "--others", "--exclude-standard"))
        return sorted({*tracked, *(name for name in new if name.endswith(".py"))})

    def fingerprint(self, commit: str) -> str:
        """Hash the source files that differ from a commit; files that a training writes do not count."""
        digest = hashlib.sha256()
        for name in self.list_changed(commit):
            if name.endswith(READ):
                path = self.top / name
                digest.update(os.fsencode(f"{name}\0") + (path.read_bytes() if path.is_file() else b"gone"))
        return digest.hexdigest()

    def find_edit(self, commit: str, before: str) -> str | None:
        """Return a message if the working tree has changed since the comparison began, otherwise None."""
        if self.fingerprint(commit) == before:
            return None
        return "source files in the working tree were edited during the comparison, so its runs used different versions"

    @contextlib.contextmanager
    def checked_out(self, commit: str, place: Path) -> Iterator[Path]:
        """Create a worktree of the commit with the untracked files linked in; it is removed afterwards."""
        try:
            self._add_worktree(commit, place)
            self._link_untracked(place)
            yield place
        finally:
            with contextlib.suppress(subprocess.CalledProcessError):  # it was not created
                _run_git(self.top, "worktree", "remove", "--force", "--force", str(place))

    def _add_worktree(self, commit: str, place: Path) -> None:
        try:  # without the user's hooks, which do not expect to run in this folder
            _run_git(self.top, "-c", "core.hooksPath=/dev/null", "worktree", "add", "--detach", str(place), commit)
        except subprocess.CalledProcessError as error:
            raise ConfigError(
                got=f"git worktree add {commit[:7]}", why=_read_last_line(error), do="fix what git reports"
            ) from None

    def _link_untracked(self, place: Path) -> None:
        own = set(_split_names(_run_git(self.top, "ls-files", "-z", "--others", "--exclude-standard")))
        entries = _split_names(_run_git(self.top, "ls-files", "-z", "--others", "--directory", "--no-empty-directory"))
        for name in entries:
            path = Path(name)
            link = place / path
            compiled = "__pycache__" in path.parts or path.suffix == ".pyc"
            if compiled or (name in own and path.suffix == ".py") or place.is_relative_to(self.top / path):
                continue
            with contextlib.suppress(FileExistsError, NotADirectoryError):  # the commit has something of that name
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(self.top / path)

    def describe_gaps(self, commit: str) -> list[str]:
        """List what a worktree of the commit may lack, one line each."""
        entries = _split_names(_run_git(self.top, "ls-tree", "-r", "-z", commit))
        modules = [entry.partition("\t")[2] for entry in entries if entry.startswith("160000 ")]
        said = [f"submodules are empty in the base's tree: {', '.join(modules)}"] if modules else []
        with contextlib.suppress(subprocess.CalledProcessError):  # none found
            _run_git(self.top, "grep", "-q", "filter=lfs", commit, "--", "*.gitattributes")
            said.append("the repository uses Git LFS: without git-lfs its files are only pointers in the base's tree")
        return said

    def move_command(self, command: Sequence[str], other: Path, commit: str) -> tuple[str, ...]:
        """Return the command with paths in the working tree replaced by those in the other tree.

        Raises:
            ConfigError: the commit has no such script.
        """
        moved = tuple(self._move_word(word, other) for word in command)
        for was in command:
            path = Path(was).resolve()
            if was.endswith(".py") and path.is_relative_to(self.top) and path.is_file():
                if not (other / path.relative_to(self.top)).is_file():
                    raise ConfigError(
                        got=f"--script {was}", why=f"commit {commit[:7]} has no such file", do="name a later commit"
                    )
                break
        return moved

    def _move_word(self, word: str, other: Path) -> str:
        """Return a word of the command with its path moved to the other tree. A relative path stays as it is if the
        script runs inside the working tree."""
        key, equals, value = word.partition("=") if "=" in word else ("", "", word)
        path = Path(value)
        inside = Path.cwd().resolve().is_relative_to(self.top)
        if not value or (inside and not path.is_absolute()) or not path.exists() or path.is_relative_to(sys.prefix):
            return word
        found = path.resolve()
        moved = other / found.relative_to(self.top) if found.is_relative_to(self.top) else found
        return f"{key}{equals}{moved}" if moved.exists() else word

    def move_search_path(self, other: Path) -> str:
        """Return PYTHONPATH for the base: the user's entries, and the other tree's in place of those that an editable
        install has added, so that they take precedence over installed packages."""
        given = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
        seen = [entry for entry in sys.path if entry and not Path(entry).resolve().is_relative_to(sys.prefix)]
        moved = []
        for entry in dict.fromkeys([*given, *seen]):
            path = Path(entry).resolve()
            ours = path == HOME or not path.is_relative_to(self.top)
            if not ours and Path(entry).is_absolute():
                moved.append(str(other / path.relative_to(self.top)))
            elif entry in given:
                moved.append(entry)
        return os.pathsep.join(moved)

    def find_wrong_imports(self, other: Path, imported: Sequence[str]) -> str | None:
        """Return a message if the base has imported the working tree's code; both arms share the files git ignores."""
        found = [path for each in imported if not (path := Path(each)).is_relative_to(other.resolve())]
        found = [path for path in found if not path.is_relative_to(HOME / "fastloop")]
        ignored = self._list_ignored(found)
        wrong = sorted(str(path) for path in found if path not in ignored or path.suffix != ".py")
        if not wrong:
            return None
        named = f"{', '.join(wrong[:3])}{' and others' if wrong[3:] else ''}"
        return f"it imported the working tree's {named}: both arms would run the same code; set PYTHONPATH=FOLDER"

    def _list_ignored(self, paths: Sequence[Path]) -> set[Path]:
        if not paths:
            return set()
        try:
            names = "\0".join(map(str, paths))
            return set(map(Path, _split_names(_run_git(self.top, "check-ignore", "-z", "--stdin", given=names))))
        except subprocess.CalledProcessError:  # none is ignored
            return set()


def _run_git(folder: Path, *command: str, given: str | None = None) -> str:
    environ = {name: value for name, value in os.environ.items() if name not in _OF_ANOTHER_REPOSITORY}
    ran = subprocess.run(
        ["git", "-C", str(folder), *command],
        input=given,
        stdin=subprocess.DEVNULL if given is None else None,
        capture_output=True,
        encoding="utf-8",
        errors="surrogateescape",  # file names are bytes
        check=True,
        env=environ,
    )
    return ran.stdout


def _split_names(text: str) -> list[str]:
    return [name for name in text.split("\0") if name]


def _read_last_line(error: subprocess.CalledProcessError) -> str:
    said = str(error.stderr or error).strip().splitlines()
    return said[-1].removeprefix("fatal: ") if said else "git gave no reason"

"""What is injected into a user's command: an entry point for Lightning, orders, and a file that collects events.

They are in a private directory, which is first on that command's PYTHONPATH and deleted when it has ended; if a
fastloop was killed, the next one deletes its directory. Nothing is installed, and no other Trainer on this machine sees
it. The other end is ``bridge/trials/script_callback.py``.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from fastloop.config.interpolation import escape
from fastloop.config.layers import Leaf, flatten, nest
from fastloop.config.loading import DEFAULT, Config
from fastloop.errors import ConfigError
from fastloop.records import store
from fastloop.records.store import decode
from fastloop.records.trial import FAST_DEV_RUN, ScriptEvent, ScriptOrders

ORDERS, EVENTS = "FASTLOOP_EXEC", "events.jsonl"
"""The same values as in ``bridge/trials/script_callback.py``."""
GROUPS = {
    "lightning.pytorch": "add_callbacks",
    "pytorch_lightning": "add_callbacks",
    "lightning.fabric": "add_to_fabric",
    "lightning_fabric": "add_to_fabric",
}
"""Packages that look for callbacks, and our function for each. Source: lightning/fabric/utilities/registry.py."""
DOOR = '''"""Of one fastloop command; gone when that has ended."""

import contextlib
import json
import os
import shlex
import sys


def _ours(name):
    place = os.path.dirname(__file__)
    if os.environ.get("FASTLOOP_EXEC", "") != os.path.join(place, "orders.json"):
        return []
    try:
        try:
            import fastloop.errors
        except ImportError:
            sys.modules.pop("fastloop", None)
            sys.path.append({home!r})
        from fastloop.bridge.trials import script_callback

        return getattr(script_callback, name)()
    except Exception as error:
        why = f"{{type(error).__name__}}: {{error}}"
        with contextlib.suppress(OSError), open(os.path.join(place, "events.jsonl"), "a") as file:
            file.write(json.dumps({{"event": "broken", "why": why}}) + "\\n")
        with open(os.environ["FASTLOOP_EXEC"]) as file:
            if json.load(file).get("disposable"):  # it would train to its end, and overwrite its checkpoints
                raise SystemExit("fastloop cannot be imported by this Python: " + why)
        return []


def add_callbacks():
    return _ours("add_callbacks")


def add_to_fabric():
    return _ours("add_to_fabric")
'''
"""The entry points' target: it loads fastloop, or if the command's Python cannot import it, records the reason."""
PREFIX, HELD = "fastloop-exec-", "held"
"""Prefix of the directory's name, and the file in it that is locked while its process lives."""


@contextlib.contextmanager
def carried(orders: ScriptOrders, environ: Mapping[str, str]) -> Iterator[tuple[dict[str, str], Path]]:
    """Yield the variables that pass orders to a command, and the private directory, which is deleted afterwards."""
    with private_directory() as private:
        package = private / "fastloop_exec-0.dist-info"
        package.mkdir()
        (package / "METADATA").write_text("Metadata-Version: 2.1\nName: fastloop-exec\nVersion: 0\n")
        (package / "entry_points.txt").write_text(
            "".join(
                f"[{group}.callbacks_factory]\nfastloop = _fastloop_exec:{answers}\n"
                for group, answers in GROUPS.items()
            )
        )
        (private / "_fastloop_exec.py").write_text(DOOR.format(home=str(Path(__file__).parents[3])), encoding="utf-8")
        store.write(private, {"orders.json": store.dump(orders, ascii_only=True)})
        path = [str(private), *filter(None, [environ.get("PYTHONPATH")])]
        yield {ORDERS: str(private / "orders.json"), "PYTHONPATH": os.pathsep.join(path)}, private


@contextlib.contextmanager
def private_directory() -> Iterator[Path]:
    """Yield a temporary directory, deleted afterwards, or by the next fastloop if this process is killed."""
    _sweep()
    with tempfile.TemporaryDirectory(prefix=PREFIX, ignore_cleanup_errors=True) as folder:
        private = Path(folder).resolve()
        with (private / f".{HELD}").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            Path(file.name).rename(private / HELD)  # only once locked: another process may be sweeping
            yield private


def _sweep() -> None:
    """Delete this user's directories left by killed processes: the kernel has released their locks."""
    for held in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/{HELD}"):
        folder = held.parent
        with contextlib.suppress(OSError):  # it is in use
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            with held.open() as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                for tree in (each.parent for each in folder.glob("*/.git")):  # its repository lists it as a worktree
                    remove = ["git", "-C", str(tree), "worktree", "remove", "--force", "--force", str(tree)]
                    subprocess.run(remove, capture_output=True)
                shutil.rmtree(folder, ignore_errors=True)


def read_events(private: Path) -> list[ScriptEvent]:
    """Return the events that the callbacks in a command have recorded."""
    try:
        lines = (private / EVENTS).read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    events = []
    for line in lines:
        with contextlib.suppress(ValueError):  # truncated, because a rank was killed
            events.append(decode(json.loads(line), ScriptEvent))
    return [event for event in events if event is not None]


def make_orders(config: Config, out: Path, name: str | None = None) -> ScriptOrders:
    """Make orders for an unchanged training, called `name` in its reports: the non-default values of the keys that a
    callback uses."""
    written = {
        path: Leaf(value, DEFAULT)
        for path, value in flatten(config.values)
        if path[0] in ("watch", "strict", "rehearsal", "rungs") and config.origins[".".join(path)] != DEFAULT
    }
    return ScriptOrders(
        out=str(out.absolute()),
        config=dict(escape(nest(written))),
        name=name,
        by_ladder=tuple(sorted(config.by_ladder)),
    )


def check(command: Sequence[str]) -> None:
    """Raise ConfigError if there is no such command."""
    if not command:
        raise ConfigError(
            got="no command",
            why="there is nothing to run",
            do="write it after two dashes: fastloop exec -- python train.py",
        )
    if shutil.which(command[0]) is None:
        if "=" in command[0]:
            do = "write them into a file: fastloop exec --config FILE.yaml -- python train.py"
            raise ConfigError(got=repr(command[0]), why="exec takes no overrides", do=do)
        if Path(command[0]).is_dir():
            raise make_folder_error(repr(command[0]), Path(command[0]))
        script, there = command[0].endswith(".py"), Path(command[0]).is_file()
        why = "it is a script that is not executable" if script and there else "there is no such command"
        do = f"write python {shlex.quote(command[0])}" if script else "write the command as you would in a shell"
        raise ConfigError(got=repr(command[0]), why=why, do=do)


def make_folder_error(got: str, folder: Path) -> ConfigError:
    """Return the error for a directory in place of a script; it names a script inside, if there is one."""
    inside = sorted(folder.glob("*.py"), key=lambda path: (path.name != "train.py", path.name))
    do = f"write a script in it: {shlex.quote(str(inside[0]))}" if inside else "write the path of a script"
    return ConfigError(got=got, why="it is a directory, not a script", do=do)


def name_of(command: Sequence[str]) -> str:
    """Return a readable name: the script's, or that of the module or program."""
    script = next((Path(part).stem for part in command if part.endswith(".py")), None)
    if script is None and "-m" in command[:-1]:
        script = command[command.index("-m") + 1].rpartition(".")[2]
    return script or Path(command[0]).stem


def name_file(command: Sequence[str]) -> str:
    """Return the script's file name for a sentence, or if it has none, the readable name."""
    return next((Path(part).name for part in command if part.endswith(".py")), None) or name_of(command)


# -- results ----------------------------------------------------------------------------------------------------------


def list_notes(events: Sequence[ScriptEvent]) -> list[str]:
    """Return remarks to show with a measurement."""
    trained = [event for event in events if event.event == "fit_began" and event.why != FAST_DEV_RUN]
    times, others = ("twice", "the other") if len(trained) == 2 else (f"{len(trained)} times", "the others")
    said = f"fit ran {times}; only the first one was measured"
    if all(event.only_rungs for event in trained if not event.measured):
        said += f"; {others} had the same rungs enabled, and each fit decided by itself which to keep"
    notes = [
        f"fastloop was disabled for one fit by an error: {event.why}" for event in events if event.event == "gave_up"
    ]
    notes += [f"the report could not be written: {event.why}" for event in events if event.event == "unwritten"]
    return [said, *notes] if len(trained) > 1 else notes


def explain_unmeasured(name: str, events: Sequence[ScriptEvent], code: int) -> str:
    """Return why a command has left no measurement, in one line."""
    last = {event.event: event for event in events}
    after = f" with exit code {code}" if code else ""
    if "broken" in last:
        return f"fastloop cannot be imported by the Python of {name}: {last['broken'].why}"
    if "gave_up" in last:
        return f"fastloop was disabled in {name} by an error: {last['gave_up'].why}"
    if "constructed" not in last:
        if "fabric" in last:
            return f"{name} uses Lightning's Fabric without a Trainer, so there is no loop to measure"
        if code:
            return f"{name} ended{after} before it made a Trainer"
        hidden = "`python -I`, `-E` or a wrapper that resets PYTHONPATH hides it from fastloop"
        return f"{name} ended without creating a Trainer. If it does create one, {hidden}"
    if "yielded" in last and "fit" not in last:
        return f"{name} has a FastLoop that turns on rungs: it writes its own report, and this command changed nothing"
    if "fit" not in last:
        return f"{name} made a Trainer, but never called fit"
    if all(event.why == FAST_DEV_RUN for event in events if event.event == "fit"):
        return f"every fit of {name} is a fast_dev_run, which only tries the code"
    if "unwritten" in last:
        return f"the report of {name} could not be written: {last['unwritten'].why}"
    why = f": {last['exception'].why}" if "exception" in last else ""
    if "fit_began" not in last:
        return f"the fit of {name} ended before its first step{why}"
    if "fit_ended" in last:
        return f"the fit of {name} ended without a report{why}"
    return f"{name} ended{after} inside its fit{why}"


def find_first_step(events: Sequence[ScriptEvent]) -> int | None:
    """Return the step at which the measured fit began, above 0 if it loaded a checkpoint; None if unknown."""
    return next((event.step for event in events if event.event == "fit_began" and event.measured), None)


def step_of(events: Sequence[ScriptEvent]) -> int | None:
    """Return the step at which the measured fit ended; None if unknown."""
    ends = [event for event in events if event.event in ("fit_ended", "exception") and event.measured]
    return next((event.step for event in ends), None)

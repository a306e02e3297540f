"""What goes along with a command, what it can do there, and what is said when nothing came of it."""

from __future__ import annotations

import fcntl
import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fastloop.bridge.trials import script_callback
from fastloop.config.loading import load, load_callback_config
from fastloop.errors import ConfigError
from fastloop.experiments.trials import script_injection
from fastloop.experiments.trials.script_injection import (
    carried,
    check,
    explain_unmeasured,
    find_first_step,
    list_notes,
    make_orders,
    name_file,
    name_of,
    read_events,
    step_of,
)
from fastloop.records.store import load as load_record
from fastloop.records.trial import ScriptEvent, ScriptOrders
from fastloop.records.yaml_text import dump_yaml

DOORS = {
    "lightning.pytorch.callbacks_factory",
    "pytorch_lightning.callbacks_factory",
    "lightning.fabric.callbacks_factory",
    "lightning_fabric.callbacks_factory",
}


def event(name: str, **more: Any) -> ScriptEvent:
    return ScriptEvent(event=name, **more)


# -- the directory ----------------------------------------------------------------------------------------------------


def test_entry_points_in_a_directory_of_its_own_that_is_gone_afterwards() -> None:
    with carried(ScriptOrders(out="x"), {"PYTHONPATH": "/a:b"}) as (variables, private):
        assert variables == {"PYTHONPATH": f"{private}:/a:b", "FASTLOOP_EXEC": f"{private}/orders.json"}
        assert private.stat().st_mode & 0o777 == 0o700
        (found,) = importlib.metadata.distributions(path=[str(private)])
        assert found.metadata["Name"] == "fastloop-exec" and {each.group for each in found.entry_points} == DOORS
        assert load_record(private / "orders.json", ScriptOrders) == ScriptOrders(out="x")
        (private / "__pycache__").mkdir()
    assert not private.exists()
    with pytest.raises(KeyboardInterrupt), carried(ScriptOrders(), {}) as (variables, private):
        assert variables["PYTHONPATH"] == str(private), "no empty entry, which would be the working directory"
        raise KeyboardInterrupt
    assert not private.exists()


@pytest.fixture
def own_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def test_what_a_killed_fastloop_left_is_taken_away(own_tmp: Path) -> None:
    code = (
        "import os\nfrom fastloop.experiments.trials.script_injection import carried, ScriptOrders\n"
        "with carried(ScriptOrders(), {}) as (_, private):\n"
        "    print(private, flush=True); os.kill(os.getpid(), 9)"
    )
    environ = {**os.environ, "TMPDIR": str(own_tmp), "PYTHONPATH": str(Path(script_injection.__file__).parents[3])}
    killed = subprocess.Popen([sys.executable, "-c", code], env=environ, text=True, stdout=subprocess.PIPE)
    assert killed.stdout is not None
    with killed.stdout:
        left = Path(killed.stdout.read().strip())
    assert left.parent == own_tmp and (left / "orders.json").is_file()
    killed.wait()
    with carried(ScriptOrders(), {}) as (_, private):
        assert not left.exists() and private.is_dir()
        with carried(ScriptOrders(), {}):
            assert private.is_dir(), "one that is at work stays"


def test_one_that_is_being_made_stays(own_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock, kinds = fcntl.flock, list[int]()

    def sweep_first(file: Any, kind: int) -> None:
        kinds.append(kind)
        if kind == fcntl.LOCK_EX:
            script_injection._sweep()
        lock(file, kind)

    monkeypatch.setattr(fcntl, "flock", sweep_first)
    with script_injection.private_directory() as private:
        assert private.is_dir() and fcntl.LOCK_EX in kinds
        script_injection._sweep()
        assert private.is_dir() and fcntl.LOCK_EX | fcntl.LOCK_NB in kinds, "and it was looked at once it was made"


def test_what_is_not_surely_ours_stays(own_tmp: Path) -> None:
    target, bare = own_tmp / "elsewhere", own_tmp / "fastloop-exec-bare"
    for folder in (target, bare):
        folder.mkdir()
    (target / script_injection.HELD).touch()
    (own_tmp / "fastloop-exec-link").symlink_to(target)
    with carried(ScriptOrders(), {}):
        assert bare.is_dir() and (target / script_injection.HELD).is_file()


def test_one_of_another_user_stays(own_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = own_tmp / "fastloop-exec-x"
    folder.mkdir()
    (folder / script_injection.HELD).touch()
    with monkeypatch.context() as patch:
        patch.setattr(os, "getuid", lambda: folder.stat().st_uid + 1)
        with carried(ScriptOrders(), {}):
            assert folder.is_dir()
    with carried(ScriptOrders(), {}):
        assert not folder.exists()


def test_both_ends_use_the_same_names() -> None:
    assert (script_injection.ORDERS, script_injection.EVENTS) == (script_callback.ORDERS, script_callback.EVENTS)
    for name in script_injection.GROUPS.values():
        assert callable(getattr(script_callback, name)) and f"def {name}()" in script_injection.DOOR


def door(variables: dict[str, str], code: str = "") -> str:
    """What the entry point gives in a Python without torch and Lightning, which need the site directory."""
    program = f"import _fastloop_exec as door; {code}\nprint(door.add_callbacks(), door.add_to_fabric())"
    done = subprocess.run(
        [sys.executable, "-S", "-c", program],
        env={"PATH": os.environ["PATH"], **variables},
        cwd="/",
        text=True,
        capture_output=True,
        check=True,
        timeout=200,
    )
    return done.stdout.strip()


def test_where_fastloop_cannot_be_imported_the_command_goes_on_and_the_reason_is_told(tmp_path: Path) -> None:
    with carried(ScriptOrders(out="x"), {}) as (variables, private):
        assert door(variables) == "[] []"
        broken = read_events(private)
        assert [each.event for each in broken] == ["broken", "broken"] and "No module named" in broken[0].why
        (tmp_path / "fastloop").mkdir()  # a folder of the user's by that name is no package
        path = f"{variables['PYTHONPATH']}:{tmp_path}"
        assert door({**variables, "PYTHONPATH": path}, code="import fastloop") == "[] []"
        assert read_events(private)[2].why == broken[0].why, "it got as far as without that folder"


def test_one_that_would_overwrite_its_checkpoints_does_not_go_on() -> None:
    with carried(ScriptOrders(disposable=True), {}) as (variables, private):
        with pytest.raises(subprocess.CalledProcessError) as ended:
            door(variables)
        assert "fastloop cannot be imported by this Python: ModuleNotFoundError" in ended.value.stderr
        assert [each.event for each in read_events(private)] == ["broken"]


def test_a_command_that_outlives_it_or_has_no_orders_is_left_alone() -> None:
    with carried(ScriptOrders(), {}) as (variables, private):
        for other in ({}, {"FASTLOOP_EXEC": ""}, {"FASTLOOP_EXEC": "/elsewhere/orders.json"}):
            assert door({"PYTHONPATH": variables["PYTHONPATH"], **other}) == "[] []"
        assert read_events(private) == []


def test_what_was_told_is_read_as_far_as_it_is_whole(tmp_path: Path) -> None:
    assert read_events(tmp_path) == []
    (tmp_path / "events.jsonl").write_text('{"event": "fit"}\n{"event": "exc')
    assert read_events(tmp_path) == [event("fit")]


# -- the orders -------------------------------------------------------------------------------------------------------


def test_a_callback_gets_what_was_written_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        dump_yaml(
            {
                "base": "safe",
                "recipe": {"name": "$x"},
                "run": {"max_steps": 7},
                "strict": True,
                "watch": {"warmup_steps": 3},
            }
        )
    )
    config = load(str(path), overrides=("rungs.workers.count=2",))
    mapping = make_orders(config, tmp_path).config
    assert set(mapping) == {"watch", "strict", "rungs"} and mapping["watch"] == {"warmup_steps": 3}
    assert mapping["rungs"]["workers"]["count"] == 2 and "batch" not in mapping["rungs"]
    again, ignored = load_callback_config(json.loads(json.dumps(mapping)))
    assert (again.ladder, again.watch, again.strict, ignored) == (config.ladder, config.watch, True, ())
    assert make_orders(load_callback_config(None)[0], tmp_path, "train").config == {}


# -- the command ------------------------------------------------------------------------------------------------------


def test_a_command_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    check([sys.executable, "no_such_file.py"])
    with pytest.raises(ConfigError, match="there is nothing to run"):
        check([])
    with pytest.raises(ConfigError, match=r"got 'phyton'\n  why there is no such command"):
        check(["phyton", "train.py"])
    with pytest.raises(ConfigError, match=r"exec takes no overrides\n  do  write them into a file"):
        check(["rungs.workers.count=2", "--", "python", "train.py"])
    with pytest.raises(ConfigError, match=r"not executable\n  do  write python train\.py"):
        check(["train.py"])
    with pytest.raises(ConfigError, match=r"no such command\n  do  write python gone\.py"):
        check(["gone.py"])


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("python -u train.py --out eval.py", "train"),
        ("torchrun --nproc-per-node 2 a/fit.py", "fit"),
        ("python -m pkg.train -x", "train"),
        ("/opt/bin/train", "train"),
        ("uv run python ./x.py", "x"),
    ],
)
def test_a_command_has_the_name_of_its_script(command: str, name: str) -> None:
    assert name_of(command.split()) == name


def test_a_sentence_names_the_scripts_file() -> None:
    assert name_file(["python", "a/not.py", "--out", "x"]) == "not.py"
    assert name_file(["python", "-m", "pkg.train"]) == "train"


# -- what became of it ------------------------------------------------------------------------------------------------

MADE, FIT, BEGAN = event("constructed"), event("fit", measured=True), event("fit_began", measured=True, step=0)


@pytest.mark.parametrize(
    ("events", "code", "said"),
    [
        ([], 0, "train ended without creating a Trainer. If it does create one, `python -I`, `-E` or a wrapper"),
        ([], 2, "train ended with exit code 2 before it made a Trainer"),
        ([event("fabric")], 0, "train uses Lightning's Fabric without a Trainer"),
        (
            [event("broken", why="ImportError: x")],
            0,
            "fastloop cannot be imported by the Python of train: ImportError: x",
        ),
        ([MADE], 0, "train made a Trainer, but never called fit"),
        ([MADE, event("yielded")], 0, "train has a FastLoop that turns on rungs"),
        ([MADE, FIT, event("exception", why="ValueError: x")], 1, "ended before its first step: ValueError: x"),
        ([MADE, FIT, BEGAN], 137, "train ended with exit code 137 inside its fit"),
        ([MADE, FIT, BEGAN, event("fit_ended", step=4)], 0, "the fit of train ended without a report"),
        (
            [MADE, FIT, BEGAN, event("fit_ended", step=4), event("unwritten", why="No space left on device")],
            0,
            "the report of train could not be written: No space left on device",
        ),
        (
            [MADE, event("gave_up", why="setup: OSError: no room")],
            0,
            "fastloop was disabled in train by an error: setup: OSError",
        ),
    ],
)
def test_why_nothing_was_measured(events: list[ScriptEvent], code: int, said: str) -> None:
    assert said in explain_unmeasured("train", events, code)


def test_what_to_know_beside_a_measurement() -> None:
    ended = event("fit_ended", measured=True, step=9)
    once = [MADE, FIT, BEGAN, ended]
    assert list_notes(once) == [] and step_of(once) == 9
    twice = [
        *once,
        event("fit", measured=False),
        event("fit_began", measured=False, step=0),
        event("fit_ended", measured=False, step=3),
    ]
    assert list_notes(twice) == ["fit ran twice; only the first one was measured"] and step_of(twice) == 9
    folds = [*once, event("fit_began", only_rungs=True, step=0)]
    assert list_notes(folds)[0].endswith(
        "; the other had the same rungs enabled, and each fit decided by itself which to keep"
    )
    more = event("fit_began", only_rungs=True, step=0)
    assert list_notes([*folds, more])[0].startswith("fit ran 3 times; only the first one was measured; the others ")
    assert "other" not in list_notes([*folds, event("fit_began", only_rungs=False, step=0)])[0]
    assert step_of([MADE, FIT, BEGAN]) is None
    assert list_notes([*once, event("unwritten", why="no room")]) == ["the report could not be written: no room"]


def test_where_the_measured_fit_began() -> None:
    other = event("fit_began", measured=False, step=3)
    assert find_first_step([MADE, FIT, other, event("fit_began", measured=True, step=40)]) == 40
    assert find_first_step([MADE, FIT, BEGAN]) == 0 and find_first_step([MADE, FIT, other]) is None

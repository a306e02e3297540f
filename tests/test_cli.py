"""The command line: what it says, to which stream, and how it ends."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import torch

from fastloop import __version__, cli
from fastloop import commands as command_files
from fastloop.commands.console import Answer
from fastloop.errors import FastLoopError
from tests.commands.command_line import CONTROL, ROOT, CommandLine, run, strictly
from tests.trainings import NET

FORGE = "import sys; sys.modules.update(dict.fromkeys(('torch', 'lightning', 'pytorch_lightning', 'omegaconf'))); "
"""In front of a program: importing any of these is an ImportError."""
MAIN = "from fastloop.cli import main; main()"


@pytest.fixture
def fastloop(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> CommandLine:
    return CommandLine(tmp_path, capfd, monkeypatch)


def commands(group: click.Group = cli.cli, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The arguments of every command and group there is."""
    yield path
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))
        else:
            yield (*path, name)


def typed_as(arguments: Any) -> str:
    """A command as the id of a test, without the folders of this machine."""
    return " ".join(Path(each).name for each in arguments) if isinstance(arguments, list) else str(arguments)


# -- what there is ----------------------------------------------------------------------------------------------------


def test_the_commands_of_the_contract() -> None:
    there = {" ".join(path) for path in commands()}
    assert {"doctor", "recipes", "rungs", "config show", "config diff", "plan", "run", "report"} <= there


@pytest.mark.short
def test_version(fastloop: CommandLine) -> None:
    assert fastloop("--version") == type(fastloop("rungs"))(0, f"fastloop {__version__}\n", "")


def test_help_of_every_command_needs_neither_torch_nor_lightning(tmp_path: Path) -> None:
    asked = [[*path, flag] for path in commands() for flag in ("--help", "-h")]
    code = (
        f"{FORGE}from fastloop.cli import cli\n"
        f"for asked in {asked!r}:\n"
        "    assert cli.main(asked, prog_name='fastloop', standalone_mode=False) == 0, asked\n"
        "    print('END OF', *asked)\n"
    )
    said = run(cwd=tmp_path, code=code)
    assert said.code == 0, said.err
    pages = re.split(r"END OF .*\n", said.out)[:-1]
    assert len(pages) == len(asked)
    for page, path in zip(pages, asked, strict=True):
        assert page.startswith(f"Usage: {' '.join(['fastloop', *path[:-1]])} ") and "Show this message" in page
    assert said.err == ""


def test_the_forgery_would_find_an_import(tmp_path: Path) -> None:
    said = run("plan", "cifar10", cwd=tmp_path, code=FORGE + MAIN)
    assert said.code == 1 and "ModuleNotFoundError" in said.err


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["rungs", "amp"], 0),
        (["recipes"], 0),
        (["config", "show", "safe"], 0),
        (["run", "cifar11"], 2),
        (["config", "diff", "safe", "full"], 0),
        (["plan", "cifar10", "rungs.amp.mod=tf32"], 2),
        (["report", "."], 2),
        (["doctr"], 2),
        (["run", "cifar10", "rungs.amp.enabled=yes"], 2),
        (["run", "cifar10", "recipe.nonsense=1"], 2),
        (["plan", "cifar10", "recipe.nonsense=1"], 2),
    ],
    ids=typed_as,
)
def test_what_needs_no_torch_imports_none(arguments: Any, code: int, tmp_path: Path) -> None:
    if code == 0 and arguments[0] == "config":
        pytest.importorskip("omegaconf")
    forge = FORGE.replace(", 'omegaconf'", "")  # which resolves ${…}
    said = run(*arguments, cwd=tmp_path, code=forge + MAIN)
    assert said.code == code, said.err
    assert "ImportError" not in said.err and list(tmp_path.glob("fastloop-runs*")) == []


def test_help_is_there_at_once(tmp_path: Path) -> None:
    used = []
    for _ in range(3):
        child = subprocess.Popen(
            [sys.executable, "-m", "fastloop", "--help"],
            cwd=tmp_path,
            stdout=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        assert child.returncode == 0
        used.append(usage.ru_utime + usage.ru_stime)
    assert min(used) < 0.5, f"CPU seconds: {used}"


# -- mistyped ---------------------------------------------------------------------------------------------------------

KNOWN = "doctor, recipes, rungs, config, plan, run, diagnose, headspace, ab, climb, tune, exec, cache, report"
RUNGS = "dali, cache, nodes, workers, pin, prefetch, batch, amp, layout, attention, loss, fused, compile, host, overlap"
MISTYPED = [
    ("frobnicate", "command 'frobnicate'", f"the commands are {KNOWN}", "run fastloop --help"),
    ("doctr", "command 'doctr'", f"the commands are {KNOWN}", "write doctor"),
    ("rung", "command 'rung'", f"the commands are {KNOWN}", "write rungs"),
    ("cache rm", "command 'rm'", "the commands are ls, clear", "run fastloop cache --help"),
    ("config shwo", "command 'shwo'", "the commands are show, diff", "write show"),
    ("run", "fastloop run", "CONF is missing", "see fastloop run --help"),
    ("config diff safe", "fastloop config diff", "B is missing", "see fastloop config diff --help"),
    ("report", "fastloop report", "RUN_DIR is missing", "see fastloop report --help"),
    ("run cifar10 --forse", "fastloop run", "fastloop run has no option --forse", "write --force"),
    (
        "exec python train.py --lr 0.1",
        "fastloop exec",
        "without -- before your command, fastloop reads --lr as its own option",
        "write fastloop exec -- python train.py --lr 0.1",
    ),
    ("diagnose cifar10 --sync", "fastloop diagnose", "fastloop diagnose has no option --sync", "write --syncs"),
    (
        "run cifar10 --recipe.size=tiny",
        "fastloop run",
        "fastloop run has no option --recipe.size",
        "write recipe.size=…, without dashes",
    ),
    (
        "exec --json -- python train.py",
        "--json --",
        "--json needs a value, and -- is an option",
        "write --json FILE|-, or drop --json",
    ),
    (
        "run cifar10 --config safe --config --json -",
        "--config --json",
        "--config needs a value, and --json is an option",
        "write --config MORE.yaml, or drop --config",
    ),
    (
        "run cifar10 --out --force",
        "--out --force",
        "--out needs a value, and --force is an option",
        "write --out DIR, or drop --out",
    ),
    (
        "exec --config safe --config amp -- python train.py",
        "--config safe --config amp",
        "only one is taken",
        "put base: [safe, amp] into a YAML file, and pass that file",
    ),
    ("rungs amp --json", "--json", "Option '--json' requires an argument.", "write a value after --json, or drop it"),
    ("diagnose gpt2 --trace x", "--trace x", "it must be an integer of 1 or more", "write an integer of 1 or more"),
    ("diagnose gpt2 --trace 0", "--trace 0", "it must be an integer of 1 or more", "write an integer of 1 or more"),
    ("ab gpt2 --vs amp --band 0", "--band 0.0", "it must be a number of 0.1 or more", "write a number of 0.1 or more"),
    ("climb gpt2 --allow all", "--allow all", "it must be changes-training", "write changes-training"),
    (
        "ab cifar10 --vs amp --args --lr=1",
        "--args '--lr=1'",
        "only a script takes arguments",
        "write --script train.py as well, or key=value for a configuration",
    ),
    ("config diff safe fulll", "'fulll'", "no recipe, ladder, climb or rung has this name", "write full"),
    ("config show sfae", "'sfae'", "no recipe, ladder, climb or rung has this name", "write safe"),
    ("config show cifar10 recipe.sise=tiny", "recipe.sise (command line)", "recipe has no key sise", "write size"),
    (
        "config show cifar10 trainer.benchmrak=true",
        "trainer.benchmrak (command line)",
        "Lightning's Trainer takes no such argument",
        "write benchmark",
    ),
    (
        "tune --script train.py workers",
        "fastloop tune",
        "fastloop tune has no option --script",
        "write fastloop exec -- python train.py to diagnose a script; only ab and climb take --script",
    ),
    (
        "ab cifar10 --vs amp, compile",
        "--vs 'amp,'",
        "nothing follows the last comma",
        "write --vs amp,compile, without a space",
    ),
    ("run recipe.size=tiny", "'recipe.size=tiny'", "no recipe", "write a name or a file first, key=value after it"),
    ("--json - doctor", "fastloop", "fastloop has no option --json", "see fastloop --help"),
    ("rungs amps", "rung 'amps'", f"the rungs are {RUNGS}", "write amp"),
    ("rungs wurst", "rung 'wurst'", f"the rungs are {RUNGS}", "write one of them"),
    (
        "plan nope",
        "'nope'",
        "no recipe, ladder, climb or rung has this name; there are recipes: cifar10, gpt2, "
        "resnet50; ladders: bf16, full, safe; climbs: cifar10_h200, gpt2_h200, resnet50_h200; rungs: amp, attention, "
        "batch, cache, compile, dali, fused, host, layout, loss, nodes, overlap, pin, prefetch, workers",
        "write one of these names, or a path that ends in .yaml",
    ),
    (
        "tune resnet50 workerz",
        "fastloop tune … workerz",
        "there is no such rung",
        "write workers",
    ),
    (
        "tune resnet50 amp",
        "fastloop tune … amp",
        "it has no setting to tune",
        "write one of workers, prefetch, batch, overlap",
    ),
    ("plan cifar10 --config saef", "'saef'", "no recipe, ladder", "write safe"),
    ("run nowhere/net.yaml", "'nowhere/net.yaml'", "there is no such file", "check the path; it starts at {cwd}"),
    (
        "run safe",
        "safe",
        "neither it nor its bases name a recipe, so there is nothing to train",
        "write one of cifar10, gpt2, resnet50, with --config safe",
    ),
]


@pytest.mark.parametrize(("typed", "got", "why", "do"), MISTYPED, ids=[row[0] for row in MISTYPED])
def test_what_was_mistyped_is_answered_in_three_lines(
    typed: str, got: str, why: str, do: str, fastloop: CommandLine
) -> None:
    said = fastloop(*typed.split())
    lines = said.err.splitlines()
    assert (said.code, said.out, len(lines)) == (2, "", 3), said.err
    assert lines[0] == f"fastloop: got {got}"
    assert lines[1].startswith(f"  why {why}")
    assert lines[2] == f"  do  {do.format(cwd=fastloop.folder)}"
    assert list(fastloop.folder.iterdir()) == [], "something was left behind"


def test_a_file_is_named_with_its_line(fastloop: CommandLine) -> None:
    (fastloop.folder / "mine.yaml").write_text("base: cifar10\nrungs:\n  amp: {enabled: true, mode: fp8}\n")
    said = fastloop("run", "mine.yaml")
    assert said.code == 2
    assert said.err.splitlines()[0] == "fastloop: got rungs.amp.mode: 'fp8' (mine.yaml:3)"
    assert "one of bf16-mixed, 16-mixed, bf16-true, 16-true, tf32" in said.err


@pytest.mark.parametrize("arguments", [[], ["config"]], ids=["fastloop", "fastloop config"])
def test_a_group_alone_shows_its_help(arguments: list[str], fastloop: CommandLine) -> None:
    said = fastloop(*arguments)
    assert said.code == 2 and said.out == "" and "Commands:" in said.err


@pytest.mark.parametrize("name", ["a" * 300, "a" * 300 + ".yaml", "../" * 60 + "x.yaml", "ünï cödé.yaml", "-x.yaml\n"])
def test_odd_names_are_errors_as_any_other(name: str, fastloop: CommandLine) -> None:
    said = fastloop("config", "show", "--", name)
    assert said.code == 2 and said.err.startswith("fastloop: got ") and "Traceback" not in said.err


# -- one object for programs ------------------------------------------------------------------------------------------

READING = [
    ["doctor"],
    ["recipes"],
    ["rungs"],
    ["rungs", "amp"],
    ["config", "show", "safe"],
    ["config", "diff", "safe", "full"],
    ["plan", str(NET)],
]


@pytest.mark.parametrize("arguments", READING, ids=typed_as)
def test_json_to_stdout_and_all_else_to_stderr(
    arguments: list[str], fastloop: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fastloop.commands.console.SLOW_S", 60.0)  # a busy machine is no other answer
    plain = fastloop(*arguments)
    said = fastloop(*arguments, "--json", "-")
    assert said.code == plain.code
    assert said.json["schema"] == 1 and "run_dir" in said.json
    assert plain.out and said.err == plain.err + plain.out


@pytest.mark.short
def test_json_to_a_file(fastloop: CommandLine) -> None:
    said = fastloop("rungs", "--json", "rungs.json")
    assert said.out.startswith("dali ") and said.err == ""
    content = strictly((fastloop.folder / "rungs.json").read_text())
    assert [rung["name"] for rung in content["rungs"]] == RUNGS.split(", ")


@pytest.mark.parametrize("place", ["missing/x.json", ".", "file/x.json"])
def test_a_json_file_that_cannot_be_written_is_found_before_anything_runs(place: str, fastloop: CommandLine) -> None:
    (fastloop.folder / "file").write_text("")
    said = fastloop("run", NET, "--json", place)
    assert said.code == 2 and said.out == "" and said.err.startswith(f"fastloop: got --json {place}\n  why it cannot")
    assert [path.name for path in fastloop.folder.iterdir()] == ["file"]


def test_a_json_file_from_before_outlives_a_mistake(fastloop: CommandLine) -> None:
    kept, new = fastloop.folder / "kept.json", fastloop.folder / "new.json"
    kept.write_text("precious")
    assert fastloop("run", NET, "recipe.batch=x", "--json", kept).code == 2
    assert fastloop("run", NET, "recipe.batch=x", "--json", new).code == 2
    assert kept.read_text() == "precious" and not new.exists()


@pytest.mark.short
def test_what_a_training_and_its_children_print_is_no_json(fastloop: CommandLine) -> None:
    noise = ["said by the training", "written by the training", "said by its child"]
    said = fastloop("run", NET, "recipe.at=3", "recipe.does=print", "--json", "-", "--out", "there")
    assert said.code == 0
    assert said.json["run_dir"] == "there" and said.json["measurement"]["total_steps"] == 25
    assert {"plan", "verdicts", "findings"} <= set(said.json)
    assert all(line in said.err for line in noise) and "REPORT" in said.err
    plain = fastloop("run", NET, "recipe.at=3", "recipe.does=print")
    assert all(line in plain.out for line in noise), "the training was not heard at all"


@pytest.mark.parametrize("error", [FastLoopError(got="x", why="y", do="z"), ValueError("x"), KeyboardInterrupt()])
def test_an_error_gives_stdout_back(
    error: BaseException, monkeypatch: pytest.MonkeyPatch, fastloop: CommandLine, capfd: pytest.CaptureFixture[str]
) -> None:
    def fails() -> Answer:
        os.write(1, b"noise\n")
        raise error

    before = sys.stdout
    with pytest.raises(type(error)):
        cli._run_and_print(fails, "-")
    assert sys.stdout is before
    os.write(1, b"by descriptor\n")
    print("by print", flush=True)
    assert capfd.readouterr() == ("by descriptor\nby print\n", "noise\n")


def test_exit_handlers_do_not_spoil_the_object(tmp_path: Path) -> None:
    said = run("rungs", "--json", "-", cwd=tmp_path, code=f"import atexit; atexit.register(print, 'too late'); {MAIN}")
    assert said.code == 0 and said.json["schema"] == 1 and "too late" in said.err


# -- streams ----------------------------------------------------------------------------------------------------------


def test_a_reader_that_leaves_is_no_failure(tmp_path: Path) -> None:
    child = subprocess.Popen(
        [sys.executable, "-m", "fastloop", "config", "show", "full"],
        cwd=tmp_path,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert child.stdout is not None and child.stderr is not None
    child.stdout.close()
    said = child.stderr.read()
    child.stderr.close()
    assert child.wait(30) in (0, 1) and said == ""


def test_a_log_that_nobody_reads_any_more_changes_no_exit_code(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "fastloop", "rungs", "apm"]
    ended = subprocess.run(command, cwd=tmp_path, stderr=writing, env={**os.environ, "PYTHONPATH": str(ROOT)})
    os.close(writing)
    assert ended.returncode == 2


def test_letters_the_terminal_does_not_have(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("recipe: {data: köln…}\n", encoding="utf-8")
    for arguments in (["mine.yaml"], ["mine.yaml", "--json", "-"]):
        said = run("config", "show", *arguments, cwd=tmp_path, env={"PYTHONIOENCODING": "ascii"})
        assert said.code == 0 and said.err.count("Traceback") == 0
    assert {"key": "recipe.data", "value": "köln…", "origin": "mine.yaml:1"} in said.json["values"]


@pytest.mark.parametrize("arguments", [*READING, ["run", str(NET)], ["--help"], ["run", "--help"]], ids=typed_as)
def test_no_control_codes_without_a_terminal(
    arguments: list[str], fastloop: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"NO_COLOR": "1", "COLUMNS": "40", "TERM": "xterm-256color"}.items():
        monkeypatch.setenv(name, value)
    said = fastloop(*arguments)
    text = said.out + said.err
    assert text and CONTROL.findall(text) == []
    if "--help" in arguments:
        assert max(map(len, text.splitlines())) <= 40


def test_control_codes_would_be_found() -> None:
    assert CONTROL.findall("Straße … 10 µs\n\tx") == [] and CONTROL.findall("\x1b[1m\r") == ["\x1b", "\r"]


# -- how it ends ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "code", "last"),
    [
        (KeyboardInterrupt(), 130, "fastloop: interrupted"),
        (SystemExit("enough"), 1, "enough"),
        (SystemExit(7), 7, ""),
        (RuntimeError("a bug"), 1, "fastloop: this is a bug in fastloop: RuntimeError: a bug"),
    ],
    ids=["interrupt", "exit with a text", "exit with a code", "bug"],
)
def test_exit_codes(
    error: BaseException, code: int, last: str, fastloop: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: Any, **kwargs: Any) -> Answer:
        raise error

    monkeypatch.setattr("fastloop.commands.listing.list_recipes", fails)
    said = fastloop("recipes")
    assert said.code == code and said.out == "" and (said.err.splitlines() or [""])[-1] == last
    assert ("Traceback" in said.err) == isinstance(error, RuntimeError)


def test_an_interrupt_that_an_import_swallowed(tmp_path: Path) -> None:
    code = (
        "import os, signal, time; from fastloop.commands import listing\n"
        "def list_recipes():\n"
        "    try:\n"
        "        os.kill(os.getpid(), signal.SIGINT); time.sleep(5)\n"
        "    except KeyboardInterrupt:\n"
        "        raise ImportError('half there')\n"
        f"listing.list_recipes = list_recipes; {MAIN}"
    )
    assert run("recipes", cwd=tmp_path, code=code).code == 130
    assert run("recipes", cwd=tmp_path, code=code.replace("SIGINT", "SIGTERM")).code == 143


def test_more_devices_than_there_are(fastloop: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    for command in ("run", "plan"):
        said = fastloop(command, NET, "run.devices=2", "run.accelerator=gpu")
        assert (said.code, said.out) == (2, "")
        assert said.err.splitlines() == [
            "fastloop: got run.devices: 2 (command line)",
            "  why 1 CUDA devices are visible here",
            "  do  write at most 1, or check CUDA_VISIBLE_DEVICES",
        ]
    assert list(fastloop.folder.iterdir()) == []


def test_report_opens_the_file(fastloop: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr(click, "launch", opened.append)
    (fastloop.folder / "there").mkdir()
    (fastloop.folder / "there" / "report.md").write_text("# fastloop report\n")
    assert fastloop("report", "there").out == "# fastloop report\n" and opened == []
    assert fastloop("report", "there", "--open", "--json", "-").json["run_dir"] == "there"
    (fastloop.folder / "there" / "report.html").write_text("<p>report")
    assert fastloop("report", "there/report.html", "--open").out == "# fastloop report\n"
    assert opened == ["there/report.md", "there/report.html"]


def test_whoever_looks_through_all_modules_finds_no_more_than_commands() -> None:
    """Inductor asks every module for `torch`, and an error other than AttributeError ends its compile."""
    assert not hasattr(command_files, "torch") and not hasattr(command_files, "__path_of_nothing__")
    files = {path.stem for path in Path(command_files.__file__ or "").parent.glob("[a-z]*.py")}
    assert set(command_files.COMMANDS) <= files and all(hasattr(command_files, name) for name in command_files.COMMANDS)

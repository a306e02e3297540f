"""The command line. The only file that prints; imports torch and Lightning only once a command needs them."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import click

from fastloop import __version__
from fastloop.commands import shell
from fastloop.commands.answer import Answer, left

_json = click.option("--json", "json_to", metavar="FILE|-", help="One JSON object to a file, or to stdout with '-'.")
_more = click.option("--config", "more", multiple=True, metavar="MORE.yaml", help="A patch: a file, rung or ladder.")
_out = click.option("--out", metavar="DIR", help="Run directory; default fastloop-runs/<name>/<utc>.")
_force = click.option("--force", is_flag=True, help="Write into a directory that is not empty.")
_limit = click.option("--limit", "limit_s", type=click.FloatRange(min=1), default=3600.0, show_default=True,
                      metavar="SECONDS", help="For each training; 600 s without a sign of life, too.")  # fmt: skip
_overrides = click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
_resume = click.option("--resume", metavar="DIR", help="Go on where it stopped; repeats nothing that finished.")


def _trains(command: Callable[..., None]) -> Callable[..., None]:
    """The options of every command that trains in processes of its own."""
    for option in (_json, _limit, _force, _out, _more):
        command = option(command)
    return command


@click.group(cls=shell.Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="fastloop %(version)s")
def cli() -> None:
    """Find out why a Lightning training loop does not fill its GPU, apply the fix and prove it.

    CONF is a path (contains '/' or ends in .yaml) or a shipped name: a recipe, ladder or rung.
    """


@cli.command()
@click.option("--comm", is_flag=True, help="Measure the exchange between devices too.")
@_json
def doctor(comm: bool, json_to: str | None) -> None:
    """What this machine and these versions can do, and what is wrong with them."""
    from fastloop.commands import doctor as command

    _answer(lambda: command.doctor(comm=comm), json_to)


@cli.command()
@_json
def recipes(json_to: str | None) -> None:
    """The shipped recipes."""
    from fastloop.commands import listing

    _answer(listing.recipes, json_to)


@cli.command()
@click.argument("name", required=False)
@_json
def rungs(name: str | None, json_to: str | None) -> None:
    """The rungs, or one rung's manual page."""
    from fastloop.commands import listing

    _answer(lambda: listing.rungs(name), json_to)


@cli.group(cls=shell.Commands)
def config() -> None:
    """Show or compare configurations."""


@config.command("show")
@click.argument("conf")
@_overrides
@_more
@_json
def config_show(conf: str, overrides: Sequence[str], more: Sequence[str], json_to: str | None) -> None:
    """Every value, resolved, with the file it came from."""
    from fastloop.commands import configs

    _answer(lambda: configs.show_config(conf, more=more, overrides=overrides), json_to)


@config.command("diff")
@click.argument("a")
@click.argument("b")
@_json
def config_diff(a: str, b: str, json_to: str | None) -> None:
    """What differs between two configurations."""
    from fastloop.commands import configs

    _answer(lambda: configs.diff_configs(a, b), json_to)


@cli.command()
@click.argument("conf")
@_overrides
@_more
@_json
def plan(conf: str, overrides: Sequence[str], more: Sequence[str], json_to: str | None) -> None:
    """A dry run: what each rung would do. Trains nothing."""
    from fastloop.commands import run as command

    _answer(lambda: command.plan(conf, more=more, overrides=overrides), json_to)


@cli.command()
@click.argument("conf")
@_overrides
@_more
@_out
@_force
@click.option("--trust-checkpoint", is_flag=True, help="Resume from a checkpoint that needs code to load.")
@_json
def run(conf: str, json_to: str | None, **asked: Any) -> None:
    """Train, watch, verify, diagnose."""
    from fastloop.commands import run as command

    _answer(lambda: command.run(conf, **asked), json_to)


@cli.command()
@click.argument("target", metavar="RUN_DIR|CONF")
@_overrides
@click.option("--syncs", is_flag=True, help="Name the lines of your code that wait for the device.")
@click.option("--trace", type=click.IntRange(min=1), metavar="N", help="Record N steps after the timed ones.")
@_trains
def diagnose(target: str, json_to: str | None, **asked: Any) -> None:
    """Why the GPU is idle: of a run there was, or of a configuration, which it runs."""
    from fastloop.commands import diagnose as command

    _answer(lambda: command.diagnose(target, progress=_say, **asked), json_to)


@cli.command()
@click.argument("conf")
@_overrides
@_trains
def headspace(conf: str, json_to: str | None, **asked: Any) -> None:
    """The ceilings: replayed batch, resident batch, no exchange."""
    from fastloop.commands import headspace as command

    _answer(lambda: command.headspace(conf, progress=_say, **asked), json_to)


@cli.command()
@click.argument("base", required=False)
@_overrides
@click.option("--vs", multiple=True, metavar="PATCH.yaml|RUNG|KEY=VALUE[,…]", help="One arm; repeat for more.")
@click.option("--script", metavar="TRAIN.py", help="Compare on a Lightning script of yours, unmodified.")
@click.option("--args", default="", metavar="'…'", help="The script's arguments.")
@click.option("--runs", default="5", show_default=True, metavar="N|auto", help="Runs of each arm.")
@click.option("--steps", default="auto", show_default=True, metavar="N|auto", help="Optimizer steps of each run.")
@click.option("--aa", is_flag=True, help="Allow arms that are the same: this tests the judge.")
@click.option("--band", "band_pct", type=click.FloatRange(min=0.1), default=3.0, show_default=True, metavar="PERCENT",
              help="A difference that nobody cares about.")  # fmt: skip
@_resume
@_trains
def ab(out: str | None, force: bool, resume: str | None, json_to: str | None, **asked: Any) -> None:
    """Is a change faster, and is it still the same training? The runs decide."""
    from fastloop.commands import ab as command

    request = command.request(**asked)
    _answer(lambda: command.ab(request, out=out, force=force, resume=resume, progress=_say), json_to)


@cli.command()
@click.argument("conf")
@_overrides
@click.option("--budget", default="20m", show_default=True, metavar="TIME", help="90s, 20m or 2h.")
@click.option("--allow", multiple=True, type=click.Choice(["changes-training"]), help="Try rungs of this class too.")
@_resume
@_trains
def climb(conf: str, budget: str, json_to: str | None, **asked: Any) -> None:
    """Find the fastest stack of rungs that is still the same training, and prove it."""
    from fastloop.commands import climb as command

    budget_s = shell.seconds(budget, "--budget")
    _answer(lambda: command.climb(conf, budget_s=budget_s, progress=_say, **asked), json_to)


@cli.command()
@click.argument("conf")
@click.argument("what", metavar="WHAT")
@_overrides
@_trains
def tune(conf: str, what: str, json_to: str | None, **asked: Any) -> None:
    """One search, for one number: WHAT is workers, prefetch, batch or overlap. Prints a YAML patch."""
    from fastloop.commands import tune as command

    _answer(lambda: command.tune(conf, what, progress=_say, **asked), json_to)


@cli.command("exec")
@click.option("--config", metavar="LADDER", help="Rungs to switch on: a ladder, rung or file; default: only watch.")
@_out
@_force
@_json
@click.argument("command", nargs=-1, type=click.UNPROCESSED, required=True, metavar="-- COMMAND…")
def exec_(command: Sequence[str], json_to: str | None, **asked: Any) -> None:
    """Run a Lightning script of yours, unmodified, with FastLoop in its Trainer."""
    from fastloop.commands import execute

    _answer(lambda: execute.execute(command, progress=_say, **asked), json_to, aside=True)


@cli.command()
@click.argument("run_dir")
@click.option("--open", "open_it", is_flag=True, help="Open the report in its usual program.")
@_json
def report(run_dir: str, open_it: bool, json_to: str | None) -> None:
    """Show the report of a run directory."""
    from fastloop.commands import reporting

    def show() -> Answer:
        answer = reporting.report(run_dir)
        if open_it and answer.json is not None:
            click.launch(reporting.to_open(answer.json["run_dir"]))
        return answer

    _answer(show, json_to)


def _answer(command: Callable[[], Answer], json_to: str | None, *, aside: bool = False) -> None:
    """Run a command and print its answer: to stdout, with `aside` to stderr; with ``--json -`` the object there."""
    if json_to is not None and json_to != "-":
        shell.check_writable(Path(json_to))
    answer: Answer | None = None
    try:
        with shell.stdout_to_stderr() if json_to == "-" else contextlib.nullcontext():
            answer = command()
            _say(answer.text, aside=aside)
    except BaseException as error:
        with contextlib.suppress(Exception):  # it must not hide what happened
            _give(left(error) if answer is None else answer.json, json_to)
        raise
    _give(answer.json, json_to)
    if answer.exit_code:
        raise SystemExit(answer.exit_code)


def _give(content: Mapping[str, Any] | None, json_to: str | None) -> None:
    if content is None or json_to is None:
        return
    from fastloop.report.files import dump

    if json_to == "-":
        _say(dump(content, ascii_only=True), aside=False, end="")
    else:
        shell.write(Path(json_to), dump(content))


def main() -> NoReturn:
    """Entry point: errors meant for people in three lines on stderr, everything else as a failed run."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # better than no report where the terminal has no such letter
    heard = shell.hear_signals()
    code = _main()
    if code == 1 and heard:  # some libraries swallow Ctrl-C while they are imported, and are then half there
        code = 128 + heard[-1]
    try:
        sys.stdout.flush()
        os.dup2(2, 1)  # what a training's exit handlers print is no part of the answer
    except (OSError, ValueError, AttributeError):  # nobody reads: a closed pipe, or no stdout at all
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.exit(code)


def _main() -> int:
    try:
        columns = shutil.get_terminal_size().columns
        cli.main(prog_name="fastloop", standalone_mode=False, terminal_width=max(30, min(columns, 80) - 2))
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return 2
    except BaseException as error:
        text, code = shell.last_words(error)
        _say(text)
        return code
    return 0


def _say(text: str, *, aside: bool = True, end: str = "\n") -> None:
    """To stderr; or to stdout, at once, so that a full disk is told of. That nobody reads on there is no fault."""
    with contextlib.nullcontext() if aside else shell.to_stdout():
        if text:
            print(text, end=end, file=sys.stderr if aside else None, flush=True)


if __name__ == "__main__":
    main()

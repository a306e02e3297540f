"""The command line. The only file that prints; imports torch and Lightning only once a command needs them."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import click

from fastloop import __version__, commands
from fastloop.commands import console
from fastloop.commands.console import Answer, Request, get_attached
from fastloop.errors import ConfigError
from fastloop.records.secrets import make_scrubber
from fastloop.records.store import Record, dump

Given = TypeVar("Given", str, None, tuple[str, ...])


def _refuse_option(_: click.Context, option: click.Parameter, given: Given) -> Given:
    """Return an option's value unless it is the next option, or the ``--`` before a command, which it would swallow."""
    values: Sequence[str] = (given,) if isinstance(given, str) else given or ()
    for value in values:
        if value.startswith("--"):
            name = option.opts[0]
            do = f"write {name} {option.metavar}, or drop {name}"
            raise ConfigError(got=f"{name} {value}", why=f"{name} needs a value, and {value} is an option", do=do)
    return given


_json = click.option(
    "--json",
    "json_to",
    metavar="FILE|-",
    callback=_refuse_option,
    help="Write one JSON object to FILE, or to stdout with '-'.",
)
_more = click.option(
    "--config",
    "more",
    multiple=True,
    metavar="MORE.yaml",
    callback=_refuse_option,
    help="Merge a file, rung or ladder on top.",
)
_out = click.option(
    "--out", metavar="DIR", callback=_refuse_option, help="Run directory; default fastloop-runs/<name>/<utc>."
)
_force = click.option("--force", is_flag=True, help="Write into a non-empty DIR, replacing an earlier run.")
_limit = click.option(
    "--limit",
    "limit_s",
    type=click.FloatRange(min=1),
    default=3600.0,
    show_default=True,
    metavar="SECONDS",
    help="Time limit per run; a run without progress for 600 s is stopped too.",
)
_overrides = click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
_resume = click.option("--resume", metavar="DIR", help="Continue from DIR; finished runs are kept.")
_script = click.option(
    "--script", metavar="TRAIN.py", help="Your own Lightning script, unmodified. Each run writes its own logs."
)
_args = click.option("--args", default="", metavar="'…'", help="Arguments of the script.")


def _training_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options of every command that trains in separate processes."""
    for option in (_json, _limit, _force, _out, _more):
        command = option(command)
    return command


@click.group(cls=console.Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="fastloop %(version)s")
def cli() -> None:
    """Find out why a Lightning training loop leaves its GPU idle, apply the fix and prove it.

    CONF is a path (it contains '/' or ends in .yaml) or a shipped name: a recipe, a ladder, a rung, or a stack found by
    climb, such as gpt2_h200.
    """


@cli.command()
@click.option("--comm", is_flag=True, help="Also measure all-reduce bandwidth.")
@_json
def doctor(comm: bool, json_to: str | None) -> None:
    """Check this machine, its GPUs and the installed versions."""
    _run_and_print(lambda: commands.doctor.doctor(comm=comm), json_to)


@cli.command()
@_json
def recipes(json_to: str | None) -> None:
    """List the shipped recipes."""
    _run_and_print(commands.listing.list_recipes, json_to)


@cli.command()
@click.argument("name", required=False)
@_json
def rungs(name: str | None, json_to: str | None) -> None:
    """List the rungs, or show one rung's manual page."""
    _run_and_print(lambda: commands.listing.list_rungs(name), json_to)


@cli.group(cls=console.Commands)
def config() -> None:
    """Show or compare configurations."""


@config.command("show")
@click.argument("conf")
@_overrides
@_more
@_json
def config_show(conf: str, overrides: Sequence[str], more: Sequence[str], json_to: str | None) -> None:
    """Show every resolved value and the file it came from."""
    _run_and_print(lambda: commands.config.show_config(conf, more=more, overrides=overrides), json_to)


@config.command("diff")
@click.argument("a")
@click.argument("b")
@_json
def config_diff(a: str, b: str, json_to: str | None) -> None:
    """Show where two configurations differ."""
    _run_and_print(lambda: commands.config.diff_configs(a, b), json_to)


@cli.command()
@click.argument("conf")
@_overrides
@_more
@_json
def plan(conf: str, overrides: Sequence[str], more: Sequence[str], json_to: str | None) -> None:
    """Show what each rung would do, without training."""

    def show() -> Answer:
        with console.telling_if_slow("planning: the training is built first", _print):
            return commands.run.plan(conf, more=more, overrides=overrides)

    _run_and_print(show, json_to)


@cli.command()
@click.argument("conf")
@_overrides
@_more
@_out
@_force
@click.option(
    "--trust-checkpoint", is_flag=True, help="Let run.resume load pickled code: only from a source you trust."
)
@_json
def run(conf: str, json_to: str | None, **options: Any) -> None:
    """Train, measure, verify the rungs and diagnose."""
    _run_and_print(lambda: commands.run.run(conf, **options), json_to)


@cli.command(short_help="Explain why the GPU is idle.")
@click.argument("target", metavar="RUN_DIR|CONF")
@_overrides
@click.option("--syncs", is_flag=True, help="List the lines of your code that wait for the GPU.")
@click.option(
    "--trace", type=click.IntRange(min=1), metavar="N", help="Record a trace of N steps after the timed ones."
)
@_training_options
def diagnose(target: str, syncs: bool, trace: int | None, json_to: str | None, **options: Any) -> None:
    """Explain why the GPU is idle, from a run directory or by running a configuration."""
    asked = Request(**options)
    _run_and_print(lambda: commands.diagnose.diagnose(target, asked, _print, syncs=syncs, trace=trace), json_to)


@cli.command()
@click.argument("conf")
@_overrides
@_training_options
def headspace(conf: str, json_to: str | None, **options: Any) -> None:
    """Measure how fast training could be if loading cost nothing.

    Trains with one replayed batch (no data loading), with one batch kept on the GPU (no copies either) and, on several
    devices, without gradient exchange.
    """
    _run_and_print(lambda: commands.headspace.headspace(conf, Request(**options), _print), json_to)


@cli.command()
@click.argument("base", required=False)
@_overrides
@click.option(
    "--vs", multiple=True, metavar="PATCH.yaml|RUNG|KEY=VALUE[,…]", help="What one arm changes; repeat for more arms."
)
@_script
@_args
@click.option("--vs-commit", metavar="REF", help="With --script: compare the working tree with a commit.")
@click.option("--runs", default="5", show_default=True, metavar="N|auto", help="Runs per arm.")
@click.option("--steps", default="auto", show_default=True, metavar="N|auto", help="Optimizer steps per run.")
@click.option("--aa", is_flag=True, help="Allow identical arms: an A/A test of the false-alarm rate.")
@click.option(
    "--band",
    "band_pct",
    type=click.FloatRange(min=0.1),
    default=3.0,
    show_default=True,
    metavar="PERCENT",
    help='Differences within ±PERCENT count as "no difference".',
)
@_resume
@_training_options
def ab(json_to: str | None, **options: Any) -> None:
    """A/B test: is a change faster, and the same training?

    Trains BASE and one arm per --vs several times each, in fresh processes and alternating order.
    """
    _refuse_stray_args(options)
    request = commands.ab.request(**options)
    _run_and_print(lambda: commands.ab.ab(request, _print), json_to)


@cli.command()
@click.argument("conf", required=False)
@_overrides
@_script
@_args
@click.option("--budget", default="20m", show_default=True, metavar="TIME", help="Time to spend: 90s, 20m or 2h.")
@click.option(
    "--allow", multiple=True, type=click.Choice(["changes-training"]), help="Also try rungs of this parity class."
)
@_resume
@_training_options
def climb(budget: str, json_to: str | None, **options: Any) -> None:
    """Find the fastest stack of rungs and prove it by A/B test.

    Rungs that change the training are left out unless --allow says otherwise.
    """
    _refuse_stray_args(options)
    request = commands.climb.ClimbRequest(budget_s=console.parse_seconds(budget, "--budget"), **options)
    _run_and_print(lambda: commands.climb.climb(request, _print), json_to)


def _refuse_stray_args(options: Mapping[str, Any]) -> None:
    if options["args"] and options["script"] is None:
        do = "write --script train.py as well, or key=value for a configuration"
        raise ConfigError(got=f"--args {options['args']!r}", why="only a script takes arguments", do=do)


@cli.command()
@click.argument("conf")
@click.argument("what", metavar="WHAT")
@_overrides
@_training_options
def tune(conf: str, what: str, json_to: str | None, **options: Any) -> None:
    """Tune one setting of one rung and print a YAML patch.

    WHAT is the name of a rung that has a setting to tune, such as workers.
    """
    _run_and_print(lambda: commands.tune.tune(conf, what, Request(**options), _print), json_to)


def _take_one(context: click.Context, option: click.Parameter, given: tuple[str, ...]) -> str | None:
    """Return an option's only value: given twice, the first would be dropped, while other commands merge both."""
    values, name = _refuse_option(context, option, given), option.opts[0]
    if len(values) > 1:
        do = f"put base: [{', '.join(values)}] into a YAML file, and pass that file"
        raise ConfigError(got=" ".join(f"{name} {value}" for value in values), why="only one is taken", do=do)
    return values[0] if values else None


@cli.command("exec")
@click.option(
    "--config",
    multiple=True,
    metavar="LADDER",
    callback=_take_one,
    help="Rungs to enable: a ladder, rung or file; default: only watch.",
)
@_out
@_force
@_json
@click.argument("command", nargs=-1, type=click.UNPROCESSED, required=True, metavar="-- COMMAND…")
def exec_(command: Sequence[str], json_to: str | None, **options: Any) -> None:
    """Run your own Lightning script with FastLoop in its Trainer.

    The script needs no change and may start under torchrun.
    """
    _run_and_print(lambda: commands.execute.execute(command, progress=_print, **options), json_to, aside=True)


@cli.group(cls=console.Commands)
def cache() -> None:
    """List or delete cached samples."""


def _cache_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options for further places to look."""
    path = click.option("--path", metavar="DIR", help="Also look in DIR (`path` in a configuration).")
    url = click.option("--url", metavar="URL", help="Also look on this server (`url` in a configuration).")
    return _json(url(path(command)))


@cache.command("ls")
@_cache_options
def cache_ls(path: str | None, url: str | None, json_to: str | None) -> None:
    """List cached samples with their location, size and age."""
    _run_and_print(lambda: commands.cache.list_kept(path=path, url=url), json_to)


@cache.command("clear")
@click.argument("names", nargs=-1, metavar="[NAME]...")
@_cache_options
def cache_clear(names: Sequence[str], path: str | None, url: str | None, json_to: str | None) -> None:
    """Delete cached samples: all of them, or those named.

    Caches that a run is using are left alone.
    """
    _run_and_print(lambda: commands.cache.clear_kept(names, path=path, url=url), json_to)


@cli.command()
@click.argument("run_dir")
@click.option("--open", "open_it", is_flag=True, help="Open the report in its default application.")
@_json
def report(run_dir: str, open_it: bool, json_to: str | None) -> None:
    """Show the report of a run directory."""

    def show() -> Answer:
        answer = commands.report.report(run_dir)
        if open_it and answer.json is not None:
            click.launch(commands.report.to_open(answer.json["run_dir"]))
        return answer

    _run_and_print(show, json_to)


def _run_and_print(command: Callable[[], Answer], json_to: str | None, *, aside: bool = False) -> None:
    """Run a command and print its answer to stdout, or to stderr if `aside`. ``--json -`` puts the object on stdout."""
    if json_to is not None and json_to != "-":
        console.check_writable(Path(json_to))
    answer: Answer | None = None
    try:
        with console.stdout_to_stderr() if json_to == "-" else contextlib.nullcontext():
            answer = command()
            _print(answer.text, aside=aside)
    except BaseException as error:
        with contextlib.suppress(Exception):  # the first error matters more
            _write_json(get_attached(error) if answer is None else answer.json, json_to)
        raise
    _write_json(answer.json, json_to)
    if answer.exit_code:
        raise SystemExit(answer.exit_code)


def _write_json(content: Record | Mapping[str, Any] | None, json_to: str | None) -> None:
    if content is None or json_to is None:
        return
    if json_to == "-":
        _print(dump(console.to_json(content), ascii_only=True), aside=False, end="")
    else:
        console.write(Path(json_to), dump(console.to_json(content)))


def main() -> NoReturn:
    """Entry point: an expected error is three lines on stderr, any other a traceback and exit code 1."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal without a character still gets the report
    received = console.handle_signals()
    code = _main()
    if code == 1 and received:  # some libraries swallow Ctrl-C during import and fail later, half imported
        code = 128 + received[-1]
    try:
        sys.stdout.flush()
        os.dup2(2, 1)  # keeps the output of exit handlers out of the answer
    except (OSError, ValueError, AttributeError):  # a closed pipe, or no stdout at all
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
        text, code = console.describe_exit(error)
        _print(make_scrubber().text(text))
        return code
    return 0


def _print(text: str, *, aside: bool = True, end: str = "\n") -> None:
    """Print to stderr, or flushed to stdout so that a full disk is reported. A closed pipe is not an error."""
    with contextlib.suppress(OSError) if aside else console.to_stdout():
        if text:
            print(text, end=end, file=sys.stderr if aside else None, flush=True)


if __name__ == "__main__":
    main()

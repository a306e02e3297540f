"""The command line. The only file that prints; imports torch and Lightning only once a command needs them."""

from __future__ import annotations

import difflib
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import click

from fastloop import __version__
from fastloop.commands.answer import Answer
from fastloop.errors import ConfigError, FastLoopError

_json = click.option("--json", "json_to", metavar="FILE|-", help="One JSON object to a file, or to stdout with '-'.")
_more = click.option("--config", "more", multiple=True, metavar="MORE.yaml", help="A patch: a file, rung or ladder.")
_overrides = click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")


class _Commands(click.Group):
    """A group that suggests the command a typing error meant."""

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if args and args[0] not in self.commands and not args[0].startswith("-"):
            close = difflib.get_close_matches(args[0], self.commands, n=1)
            do = f"write {close[0]}" if close else "run fastloop --help"
            raise ConfigError(got=f"command {args[0]!r}", why=f"the commands are {', '.join(self.commands)}", do=do)
        return super().resolve_command(ctx, args)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
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

    def check() -> Answer:
        checks = command.check(comm=comm)
        lines = [f"{check.status:<5} {check.name}: {check.found}" + (f"\n      do  {check.do}" if check.do else "")
                 for check in checks]  # fmt: skip
        return Answer(text="\n".join(lines), json={**command.as_json(checks), "run_dir": None},
                      exit_code=command.exit_code(checks))  # fmt: skip

    _answer(check, json_to)


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


@cli.group(cls=_Commands)
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
@click.option("--out", metavar="DIR", help="Run directory; default fastloop-runs/<name>/<utc>.")
@click.option("--force", is_flag=True, help="Write into a directory that is not empty.")
@click.option("--trust-checkpoint", is_flag=True, help="Resume from a checkpoint that needs code to load.")
@_json
def run(conf: str, overrides: Sequence[str], more: Sequence[str], out: str | None, force: bool, trust_checkpoint: bool,
        json_to: str | None) -> None:  # fmt: skip
    """Train, watch, verify, diagnose."""
    from fastloop.commands import run as command

    _answer(lambda: command.run(conf, more=more, overrides=overrides, out=out, force=force,
                                trust_checkpoint=trust_checkpoint), json_to)  # fmt: skip


@cli.command()
@click.argument("run_dir")
@click.option("--open", "open_it", is_flag=True, help="Open the report in its usual program.")
@_json
def report(run_dir: str, open_it: bool, json_to: str | None) -> None:
    """Show the report of a run directory."""
    from fastloop.commands import reporting

    _answer(lambda: reporting.report(run_dir), json_to)
    if open_it:
        click.launch(str(Path(run_dir) / "report.md"))


def _answer(command: Callable[[], Answer], json_to: str | None) -> None:
    """Run a command and print its answer: text to stdout, or with ``--json -`` the object there and all else to stderr."""
    if json_to == "-":
        # Whatever the training prints, in this process or its children, goes to stderr.
        sys.stdout.flush()
        kept = os.dup(1)
        os.dup2(2, 1)
        answer = command()
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)
        if answer.text:
            print(answer.text, file=sys.stderr)
        print(_dump(answer))
    else:
        answer = command()
        if answer.text:
            print(answer.text)
        if json_to is not None:
            _write(Path(json_to), _dump(answer))
    if answer.exit_code:
        raise SystemExit(answer.exit_code)


def _dump(answer: Answer) -> str:
    from fastloop.report.files import dump

    return dump(answer.json).rstrip("\n")


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(got=f"--json {path}", why=f"it cannot be written: {error.strerror or error}",
                          do="write a file in a directory of yours, or - for stdout") from None  # fmt: skip


def main() -> NoReturn:
    """Entry point: errors meant for people in three lines on stderr, everything else as a failed run."""
    sys.exit(_main())


def _main() -> int:
    try:
        cli.main(prog_name="fastloop", standalone_mode=False)
    except FastLoopError as error:
        print(f"fastloop: {error}", file=sys.stderr)
        return error.exit_code
    except click.ClickException as error:
        error.show()
        return 2
    except (KeyboardInterrupt, click.Abort):
        print("fastloop: interrupted", file=sys.stderr)
        return 130
    except SystemExit as error:
        # Lightning leaves a training that got SIGTERM by an exception of this family without a code.
        named = type(error).__name__ == "SIGTERMException"
        return 143 if named else error.code if isinstance(error.code, int) else int(error.code is not None)
    except Exception as error:
        traceback.print_exc()
        print(f"fastloop: the run failed: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    main()

"""What a command ends with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fastloop.config.loading import load
from fastloop.errors import ConfigError
from fastloop.experiments.trials.failures import Failed, explained, make_failure, ran_out_of_memory
from fastloop.records.trial import Trial


def test_a_failure_carries_its_text_and_code() -> None:
    assert (str(Failed("said")), Failed("said").exit_code, Failed("", exit_code=130).exit_code) == ("said", 1, 130)
    with pytest.raises(TypeError, match="positional"):
        Failed("said", 2)  # type: ignore[misc]


@pytest.mark.parametrize("code", [143, 129])
def test_a_termination_from_outside_is_a_failure(code: int, tmp_path: Path) -> None:
    config = load("cifar10")
    with pytest.raises(Failed, match="fastloop: terminated") as raised, explained(config, tmp_path):
        raise SystemExit(code)
    assert raised.value.exit_code == code


@pytest.mark.parametrize("code", [0, 3, 4, None, "bye"])
def test_an_exit_of_the_users_own_code_is_a_failed_run(code: Any, tmp_path: Path) -> None:
    """A training_step that exits with 0, 3 or 4 was taken for a success, another training or an open question."""
    said = r"the run failed: its own code called sys\.exit"
    with pytest.raises(Failed, match=said) as raised, explained(load("cifar10"), tmp_path):
        raise SystemExit(code)
    assert raised.value.exit_code == 1 and repr(code) in str(raised.value)


def test_an_error_about_a_key_says_where_it_was_written(tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_text("base: cifar10\nstrict: true\nrungs:\n  pin: {enabled: true}\n")
    config = load(str(tmp_path / "my.yaml"))

    def fail(key: str | None) -> str:
        with pytest.raises(ConfigError) as raised, explained(config, tmp_path):
            raise ConfigError(got="rungs.pin", why="it cannot apply", do="turn it off", key=key)
        return raised.value.got

    assert fail("rungs.pin.enabled") == f"rungs.pin ({tmp_path / 'my.yaml'}:4)"
    assert fail("rungs.compile.pay_back") == "rungs.pin" and fail(None) == "rungs.pin", "a default was written nowhere"


def trial(cause: str | None, tail: str = "", code: int = 1) -> Trial:
    return Trial(name="base", ok=False, cause=cause, seconds=1.0, run_dir=Path("a"), code=code, tail=tail)


@pytest.mark.parametrize(
    ("cause", "do"),
    [
        (
            "exit code 1 at step 3: torch.OutOfMemoryError: CUDA out of memory",
            "smaller micro-batches, or free the device",
        ),
        ("killed by SIGKILL at step 12: out of memory, or killed from outside", "check dmesg"),
        ("hung: no step for 6 s; rank 1 (process 7) is stopped from outside at step 12", "or kill -STOP"),
        ("hung: no step, output or CPU use for 600 s at step 7; it was ended", "find what they wait for"),
        ("exceeded its time limit of 60 s at step 7; it was ended", "--limit SECONDS"),
        ("the fit of train ended after 8 steps, before the window, which opens after 20", "watch.warmup_steps=3"),
        ("train ended with exit code 2 before it made a Trainer", "with --args"),
        ("exit code 2: train.py: error: the following arguments are required: --data", "with --args"),
        ("exit code 2: Error: Missing option '--data'.", "with --args"),
        ("exit code 1: EOFError: EOF when reading a line", "as arguments"),
    ],
)
def test_a_failure_says_what_to_do_next(cause: str, do: str) -> None:
    cause_line, do_line = str(make_failure(trial(cause))).splitlines()
    assert cause_line == f"fastloop: the run failed: {cause}" and do_line.startswith("  do  ") and do in do_line


def test_a_failure_says_how_to_go_on_where_that_is_possible() -> None:
    text = str(
        make_failure(trial("killed by SIGKILL at step 12: out of memory, or killed from outside"), Path("climbs/a"))
    )
    assert text.endswith("fewer workers or smaller batches; to continue unchanged, use --resume climbs/a")
    unknown = trial("exit code 1: no luck")
    assert str(make_failure(unknown, Path("b"))).endswith(
        "exit code 1: no luck\n  do  to continue unchanged, use --resume b"
    )
    assert "  do  " not in str(make_failure(unknown)), "nothing is known to do"


def test_what_the_configuration_said_is_not_explained_again() -> None:
    own = make_failure(trial("exit code 2: got it", "fastloop: got it\n  why\n  do  that", code=2), Path("b"))
    assert str(own) == "fastloop: got it\n  why\n  do  that" and own.exit_code == 2


def test_a_script_that_ends_with_2_is_not_taken_for_our_own_words() -> None:
    usage = "usage: train.py [-h] --name NAME\ntrain.py: error: the following arguments are required: --name"
    found = make_failure(trial("exit code 2: train.py: error: required: --name", usage, code=2), what="the base failed")
    assert str(found).splitlines()[2:] == ["fastloop: the base failed: exit code 2: train.py: error: required: --name"]


def test_a_killed_process_did_not_say_that_memory_was_short() -> None:
    assert ran_out_of_memory(trial("exit code 1: died", "RuntimeError: CUBLAS_STATUS_ALLOC_FAILED"))
    assert not ran_out_of_memory(trial("killed by SIGKILL: out of memory, or killed from outside"))

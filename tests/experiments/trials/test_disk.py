"""What a disk without room is called."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from fastloop.commands.console import attach, get_attached
from fastloop.errors import FastLoopError
from fastloop.experiments.trials.failures import writing
from fastloop.records.run_files import VerdictsFile

pytestmark = pytest.mark.short


@pytest.mark.parametrize("file", ["out/report.md", None])
def test_no_room_is_said_with_the_place_and_what_to_do(file: str | None) -> None:
    with pytest.raises(FastLoopError) as error, writing(Path("out")):
        raise OSError(errno.ENOSPC, "No space left on device", file)
    assert error.value.got == (file or "run directory out") and error.value.why.endswith("No space left on device")
    assert "out is incomplete" in error.value.do and error.value.exit_code == 1


def test_the_results_so_far_are_still_attached() -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    attach(full, VerdictsFile())
    with pytest.raises(FastLoopError) as error, writing(Path("out")):
        raise full
    assert get_attached(error.value) == VerdictsFile()


def test_what_can_go_on_is_said_to(tmp_path: Path) -> None:
    for there, do in ((False, f"; {tmp_path} is incomplete"), (True, f"space, then continue with --resume {tmp_path}")):
        if there:
            (tmp_path / "began.json").touch()
        with pytest.raises(FastLoopError) as error, writing(tmp_path, "began.json"):
            raise OSError(errno.ENOSPC, "No space left on device")
        assert error.value.do.endswith(do)


def test_other_errors_are_what_they_were() -> None:
    with pytest.raises(FileNotFoundError), writing(Path("out")):
        Path("there/is/no/such/file").read_text()
    with pytest.raises(ZeroDivisionError), writing(Path("out")):
        _ = 1 / 0


def test_a_disk_that_is_full_indeed() -> None:
    """Linux has one for tests."""
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("no /dev/full here")
    with pytest.raises(FastLoopError, match="No space left"), writing(Path("out")):
        full.write_text("x")

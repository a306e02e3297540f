from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fastloop.commands import torch_probe
from fastloop.experiments.trials import supervise

HANG = "import time; time.sleep(60)"


def gone(pid: int, within_s: float = 100.0) -> bool:
    """Whether the process ends in time; a zombie that nobody has reaped yet counts as ended."""
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True).stdout.strip()
        if not state or state.startswith("Z"):
            return True
        time.sleep(0.05)
    return False


def written_pid(path: Path) -> int:
    end = time.monotonic() + 100
    while time.monotonic() < end:
        if path.exists() and path.read_text():
            return int(path.read_text())
        time.sleep(0.02)
    raise AssertionError(f"nobody wrote {path.name}")


def test_torch_answers_from_a_process_of_its_own() -> None:
    probe = torch_probe.probe_torch()
    assert probe.trouble is None
    assert probe.cuda_available is (probe.device_count > 0)
    assert (probe.bf16_native is None) is not probe.cuda_available


def test_torch_in_the_working_directory_is_not_mistaken_for_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch.py").write_text("raise SystemExit('imported the wrong torch')")
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    monkeypatch.chdir(tmp_path)
    assert torch_probe.probe_torch().trouble is None


def test_a_torch_that_cannot_be_imported_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_probe, "TORCH_QUESTION", "raise ImportError('libcudart.so is missing')")
    trouble = torch_probe.probe_torch().trouble
    assert trouble is not None
    assert "exit code 1" in trouble and "ImportError: libcudart.so is missing" in trouble


def test_noise_before_the_answer_is_no_trouble() -> None:
    assert torch_probe._answer_of_child("print('warning'); print('{\"a\": 1}')", limit_s=100) == {"a": 1}


def test_nothing_outlives_a_timeout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The child's own children too, though they hold its pipes open."""
    pid_file = tmp_path / "pid"
    monkeypatch.setattr(torch_probe, "TORCH_LIMIT_S", 1)
    wait = supervise._wait
    monkeypatch.setattr(supervise, "_wait", lambda *given: written_pid(pid_file) and wait(*given))
    monkeypatch.setattr(
        torch_probe,
        "TORCH_QUESTION",
        f"import subprocess, sys; print('still loading', file=sys.stderr, flush=True)\n"
        f"grandchild = subprocess.Popen([sys.executable, '-c', {HANG!r}])\n"
        f"open({str(pid_file)!r}, 'w').write(str(grandchild.pid))\n{HANG}",
    )
    start = time.monotonic()
    trouble = torch_probe.probe_torch().trouble
    assert time.monotonic() - start < 50
    assert trouble == "no answer within 1 s: still loading"
    assert gone(written_pid(pid_file))


def test_ranks_left_by_a_child_that_failed_are_ended(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    code = f"""
import subprocess, sys
quiet = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
open({str(pid_file)!r}, "w").write(str(subprocess.Popen([sys.executable, "-c", {HANG!r}], **quiet).pid))
sys.exit("gave up")
"""
    with pytest.raises(torch_probe.NoAnswer, match="gave up"):
        torch_probe._answer_of_child(code, limit_s=100)
    assert gone(written_pid(pid_file))


@pytest.mark.skipif(not hasattr(signal, "alarm"), reason="needs POSIX signals")
def test_a_child_whose_parent_was_killed_ends_by_itself(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    child = f"import os; open({str(pid_file)!r}, 'w').write(str(os.getpid())); {HANG}"
    parent = subprocess.Popen(
        [
            sys.executable,
            "-c",
            f"from fastloop.commands import torch_probe; torch_probe._answer_of_child({child!r}, limit_s=100)",
        ],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    pid = written_pid(pid_file)
    parent.kill()
    parent.wait()
    assert gone(pid)


@pytest.mark.usefixtures("quick_starts")
def test_two_processes_exchange_over_gloo() -> None:
    assert torch_probe.exchange_gb_per_s("gloo", 2) > 0


@pytest.mark.usefixtures("quick_starts")
def test_an_exchange_that_fails_says_why() -> None:
    with pytest.raises(torch_probe.NoAnswer, match="no-such-backend"):
        torch_probe.exchange_gb_per_s("no-such-backend", 2)  # type: ignore[arg-type]

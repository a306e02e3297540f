from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fastloop.commands import doctor
from fastloop.commands.doctor import Check
from fastloop.commands.torch_probe import NoAnswer, TorchProbe
from fastloop.evidence import machine

GIB = 2**30
INSTALLED = {
    "python": "3.11.7",
    "torch": "2.11.0+cu130",
    "lightning": "2.6.6",
    "omegaconf": "2.4.0",
    "triton": "3.6.0",
    "torchvision": "0.26.0",
    "redis": "7.0",
    "nvidia-dali-cuda130": "2.4",
}
READINGS = {
    "count_usable_cpus": 8,
    "read_memory_bytes": 64 * GIB,
    "read_shm_free_bytes": 8 * GIB,
    "open_file_limit": 65536,
    "find_cxx_compiler": "g++",
}
NO_CUDA = TorchProbe(built_cuda="13.0")

Diagnose = Callable[..., dict[str, Check]]


def gpu(**changes: Any) -> machine.GpuReading:
    idle = {
        "name": "H200",
        "memory_total_bytes": 140 * GIB,
        "memory_used_bytes": GIB,
        "driver": "580.65",
        "compute_capability": (9, 0),
        "mig_enabled": False,
        "foreign_pids": (),
    }
    return machine.GpuReading(**{"index": 0, **idle, **changes})


def cuda(devices: int, **changes: Any) -> TorchProbe:
    answers = {"cuda_available": devices > 0, "device_count": devices, "bf16_native": True, "built_cuda": "13.0"}
    return TorchProbe(**{**answers, **changes})


def forbidden(*_: object) -> Any:
    raise AssertionError("torch was asked")


@pytest.fixture
def diagnose(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Diagnose:
    """The checks by name, on a machine with nothing wrong but what the test changes."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(machine, "find_bare_distribution", lambda: None)

    def run(
        versions: dict[str, str | None] | None = None,
        gpus: tuple[machine.GpuReading, ...] = (gpu(),),
        probe: TorchProbe | None = None,
        comm: bool = False,
        **readings: Any,
    ) -> dict[str, Check]:
        found = {**INSTALLED, **(versions or {})}
        monkeypatch.setattr(
            machine,
            "read_versions",
            lambda asked: {name: found[name] for name in ("python", *asked) if found.get(name)},
        )
        monkeypatch.setattr(machine, "list_gpus", lambda: gpus)
        monkeypatch.setattr(doctor, "probe_torch", lambda: probe or cuda(1))
        for name, value in {**READINGS, **readings}.items():
            monkeypatch.setattr(machine, name, lambda *_, value=value: value)
        checks = doctor.check(comm=comm)
        assert len({one.name for one in checks}) == len(checks), "two checks share a name"
        return {one.name: one for one in checks}

    return run


def troubled(checks: dict[str, Check]) -> set[str]:
    return {name for name, one in checks.items() if one.status in ("warn", "fail")}


def search_path(*first: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join([*map(str, first), *filter(None, sys.path)])}


def test_a_healthy_machine_has_no_trouble(diagnose: Diagnose) -> None:
    checks = diagnose()
    assert {one.status for one in checks.values()} == {"ok"}
    assert checks["GPU 0"].found == "H200, 1.0 GiB of 140.0 GiB in use, driver 580.65"


@pytest.mark.parametrize(
    ("package", "inside", "outside"),
    [
        ("python", ("3.10.0", "3.11.7"), ("3.9.1",)),
        ("torch", ("2.9.0", "2.11.0+cu130"), ("2.8.0", "2.15.0.dev20260101", "unknown")),
        ("lightning", ("2.5.0", "2.6.1", "2.6.4", "2.6.99"), ("2.4.0", "2.7.0")),
        ("pytorch-lightning", ("2.5.0", "2.6.6"), ("2.4.0", "2.7.0")),
        ("omegaconf", ("2.3.0", "2.4.0"), ("2.2.3",)),
    ],
)
def test_versions_are_held_against_the_tested_range(
    diagnose: Diagnose, package: str, inside: tuple[str, ...], outside: tuple[str, ...]
) -> None:
    for version in inside:
        assert diagnose(versions={package: version})[package].status == "ok"
    for version in outside:
        one = diagnose(versions={package: version})[package]
        assert one.status == "warn" and doctor.TESTED[package][0] in one.found


@pytest.mark.parametrize(
    ("bare", "words"),
    [
        (None, None),
        ("ours", ("an old install of this package", "pip install -e ")),
        ("stranger", ("a different project", "pip uninstall fastloop lightning-fastloop")),
    ],
)
def test_what_is_installed_under_the_bare_name(
    diagnose: Diagnose, monkeypatch: pytest.MonkeyPatch, bare: Any, words: tuple[str, str] | None
) -> None:
    monkeypatch.setattr(machine, "find_bare_distribution", lambda: bare)
    one = diagnose().get("distribution fastloop")
    assert (one is None) == (words is None)
    if one is not None and words is not None:
        assert one.status == "warn" and words[0] in one.found and words[1] in (one.do or "")


@pytest.mark.parametrize("package", ["torch", "lightning", "omegaconf"])
def test_a_missing_package_fails(diagnose: Diagnose, package: str) -> None:
    one = diagnose(versions={package: None})[package]
    assert one.status == "fail" and "pip install" in (one.do or "")


@pytest.mark.parametrize("package", ["lightning", "pytorch-lightning"])
@pytest.mark.parametrize("version", ["2.6.2", "2.6.3"])
def test_a_malicious_release_fails_and_torch_stays_unasked(
    diagnose: Diagnose, monkeypatch: pytest.MonkeyPatch, package: str, version: str
) -> None:
    monkeypatch.setattr(doctor, "exchange_gb_per_s", forbidden)
    checks = diagnose(versions={package: version}, comm=True)
    assert checks[package].status == "fail" and "GHSA-w37p-236h-pfx3" in checks[package].found
    assert all(word in (checks[package].do or "") for word in ("pip uninstall", "rotate", "2.6.6"))
    assert checks["torch and CUDA"].status == checks["all-reduce"].status == "info"
    assert doctor.exit_code(tuple(checks.values())) == 1


def test_pytorch_lightning_alone_is_a_lightning(diagnose: Diagnose) -> None:
    checks = diagnose(versions={"lightning": None, "pytorch-lightning": "2.6.6"})
    assert "lightning" not in checks and troubled(checks) == set()


def test_importing_doctor_does_not_import_torch() -> None:
    code = "import fastloop.commands.doctor, sys; assert not {'torch', 'lightning'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, env=search_path())


@pytest.mark.parametrize(("version", "imported"), [("2.6.3", []), ("2.6.4", ["torch"])])
def test_nothing_is_imported_beside_a_malicious_lightning(tmp_path: Path, version: str, imported: list[str]) -> None:
    """Stand-ins for both packages note who imports them; beside a harmless release torch is asked: the trap works."""
    site, notes = tmp_path / "site", tmp_path / "notes"
    notes.mkdir()
    (site / f"lightning-{version}.dist-info").mkdir(parents=True)
    (site / f"lightning-{version}.dist-info/METADATA").write_text(f"Name: lightning\nVersion: {version}\n")
    for name in ("torch", "lightning"):
        (site / f"{name}.py").write_text(f"import os; open({str(notes)!r} + '/{name}', 'w').write(str(os.getpid()))")
    code = (
        "import json, os; from fastloop.commands import doctor\n"
        "print(json.dumps([os.getpid(), doctor.exit_code(doctor.check(comm=True))]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, env=search_path(site))
    pid, exit_code = json.loads(done.stdout)
    assert exit_code == 1  # beside 2.6.4 because the stand-in has no torch.cuda
    assert [path.name for path in notes.iterdir()] == imported
    assert all(path.read_text() != str(pid) for path in notes.iterdir()), "doctor imported it into its own process"


@pytest.mark.parametrize(
    ("change", "name", "status", "word"),
    [
        ({"versions": {"pytorch-lightning": "2.6.6"}}, "two Lightnings", "info", "2.6.6 and"),
        ({"versions": {"pytorch-lightning": "2.5.0"}}, "two Lightnings", "warn", "2.5.0"),
        ({"versions": {"torch": "2.9.1"}}, "torch checkpoints", "warn", "GHSA-63cw-57p8-fm3p"),
        ({"versions": {"torch": "2.10.0"}}, "torch checkpoints", None, ""),
        ({"versions": {"lightning": "2.6.5"}}, "lightning checkpoints", "warn", "CVE-2026-58659"),
        ({"versions": {"pynvml": "12.0.0"}}, "pynvml", "warn", "pip uninstall pynvml"),
        ({"versions": {"triton": None}}, "triton", "warn", "torch.compile cannot work"),
        ({"versions": {"triton": None}, "gpus": (), "probe": NO_CUDA}, "triton", None, ""),
        (
            {"versions": {"torchvision": None}},
            "torchvision",
            "info",
            "lightning-fastloop[recipes] pip install torchvision",
        ),
        ({"versions": {"redis": None}}, "redis", "info", "lightning-fastloop[redis] pip install redis"),
        (
            {"versions": {"nvidia-dali-cuda130": None}},
            "DALI",
            "info",
            "lightning-fastloop[dali-cuda13] pip install nvidia-dali-cuda130",
        ),
        (
            {"versions": {"nvidia-dali-cuda130": None}, "probe": cuda(1, built_cuda="12.8")},
            "DALI",
            "info",
            "lightning-fastloop[dali-cuda12] pip install nvidia-dali-cuda120",
        ),
        ({"count_usable_cpus": 2}, "CPUs", "info", "2 of 8"),
        ({"read_memory_bytes": GIB}, "memory", "warn", "1.0 GiB"),
        ({"read_memory_bytes": None}, "memory", "info", "unknown"),
        ({"read_shm_free_bytes": 64 * 2**20}, "shared memory", "warn", "--shm-size"),
        ({"read_shm_free_bytes": GIB}, "shared memory", "ok", "1.0 GiB"),
        ({"read_shm_free_bytes": None}, "shared memory", "info", "no /dev/shm"),
        ({"open_file_limit": 1023}, "open files", "warn", "ulimit -n"),
        ({"open_file_limit": 1024}, "open files", "ok", "1024"),
        ({"open_file_limit": None}, "open files", "info", "no limit"),
        ({"find_cxx_compiler": None}, "C++ compiler", "warn", "torch.compile cannot work"),
        ({"gpus": (), "probe": NO_CUDA}, "GPU", "info", "need CUDA are skipped, everything else works"),
        ({"gpus": ()}, "GPU", "info", "pip install nvidia-ml-py"),
        ({"gpus": (), "probe": cuda(1, bf16_native=False)}, "GPU bf16", "warn", "emulated"),
        ({"gpus": (gpu(memory_total_bytes=None),)}, "GPU 0", "ok", "1.0 GiB of ? in use"),
        ({"gpus": (gpu(name=None),)}, "GPU 0", "warn", "cannot read"),
        ({"gpus": (gpu(foreign_pids=(41, 42)),)}, "GPU 0 neighbours", "warn", "PID 41, 42"),
        ({"gpus": (gpu(mig_enabled=True),)}, "GPU 0 MIG", "info", "slice"),
        ({"gpus": (gpu(compute_capability=(7, 5)),)}, "GPU 0 bf16", "warn", "emulated and slow"),
        ({"gpus": (gpu(compute_capability=None),)}, "GPU 0 bf16", None, ""),
        ({"probe": TorchProbe()}, "torch and CUDA", "warn", "CUDA build of torch"),
        ({"probe": NO_CUDA}, "torch and CUDA", "warn", "update the driver"),
        ({"probe": TorchProbe(trouble="no answer within 60 s")}, "torch and CUDA", "fail", "no answer"),
    ],
)
def test_what_is_found_is_told(
    diagnose: Diagnose, change: dict[str, Any], name: str, status: str | None, word: str
) -> None:
    checks = diagnose(**change)
    one = checks.get(name)
    assert (one and one.status) == status
    assert one is None or word in f"{one.found} {one.do}"
    assert [other for other in troubled(checks) if not checks[other].do] == [], "trouble without a remedy"


@pytest.mark.parametrize(
    ("variable", "gpus", "seen", "status"),
    [
        ("0,1", 2, 2, "ok"),
        ("GPU-8a2f", 4, 1, "ok"),
        ("0,-1,1", 2, 1, "ok"),
        ("", 0, 0, "ok"),
        ("0,7", 2, 1, "warn"),
        ("", 2, 0, "warn"),
        ("-1", 2, 0, "warn"),
        ("0", 0, 0, "warn"),
        (None, 2, 1, "warn"),
        (None, 2, 2, None),
        (None, 0, 0, None),
    ],
)
def test_visible_devices(
    diagnose: Diagnose, monkeypatch: pytest.MonkeyPatch, variable: str | None, gpus: int, seen: int, status: str | None
) -> None:
    if variable is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    checks = diagnose(gpus=tuple(gpu(index=index) for index in range(gpus)), probe=cuda(seen))
    assert getattr(checks.get("visible devices"), "status", None) == status


def test_mig_slices_are_not_counted_against_gpus(diagnose: Diagnose) -> None:
    assert "visible devices" not in diagnose(gpus=(gpu(mig_enabled=True), gpu(index=1, mig_enabled=True)))


def test_no_compiler_on_an_empty_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    found = {one.name: one.status for one in doctor._check_machine(os.environ)}
    assert found["C++ compiler"] == "warn"


def test_cache_directory(diagnose: Diagnose, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert diagnose()["cache directory"].status == "ok"
    assert not (tmp_path / "cache").exists(), "doctor looks and makes nothing"
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file/cache"))
    assert diagnose()["cache directory"].status == "warn"


def test_the_cache_directory_of_a_user_without_a_home(
    diagnose: Diagnose, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def has_none() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", has_none)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    found = diagnose()["cache directory"]
    assert (found.status, found.found) == ("ok", str(tmp_path / f"cache-{os.getuid()}")), "a relative path is ignored"


@pytest.mark.parametrize(
    ("devices", "asked", "status", "word"),
    [
        (4, ("nccl", 4), "ok", "NCCL, 4 GPUs: 123.4 GB/s"),
        (1, ("gloo", 2), "info", "gloo on this CPU"),
        (0, ("gloo", 2), "info", "gloo on this CPU"),
    ],
)
def test_comm_takes_nccl_from_two_gpus_on(
    diagnose: Diagnose, monkeypatch: pytest.MonkeyPatch, devices: int, asked: tuple[str, int], status: str, word: str
) -> None:
    calls: list[tuple[str, int]] = []
    monkeypatch.setattr(doctor, "exchange_gb_per_s", lambda *call: calls.append(call) or 123.4)
    assert "all-reduce" not in diagnose() and calls == [], "measured without having been asked to"
    one = diagnose(probe=cuda(devices), comm=True)["all-reduce"]
    assert calls == [asked]
    assert one.status == status and word in one.found


@pytest.mark.parametrize(("devices", "status"), [(2, "fail"), (0, "warn")])
def test_comm_that_hangs(diagnose: Diagnose, monkeypatch: pytest.MonkeyPatch, devices: int, status: str) -> None:
    def hang(*_: object) -> float:
        raise NoAnswer("no answer within 120 s: Connection refused")

    monkeypatch.setattr(doctor, "exchange_gb_per_s", hang)
    one = diagnose(probe=cuda(devices), comm=True)["all-reduce"]
    assert one.status == status and "Connection refused" in one.found


@pytest.mark.parametrize(
    ("statuses", "worst", "code"),
    [((), "ok", 0), (("ok", "info"), "ok", 0), (("ok", "warn", "info"), "warn", 0), (("fail", "warn"), "fail", 1)],
)
def test_json_and_exit_code(statuses: tuple[doctor.Status, ...], worst: str, code: int) -> None:
    checks = tuple(Check(name=str(n), status=status, found="this") for n, status in enumerate(statuses))
    assert json.loads(json.dumps(doctor.to_json(checks))) == {
        "schema": 1,
        "checks": [{"name": str(n), "status": s, "found": "this", "do": None} for n, s in enumerate(statuses)],
        "worst": worst,
    }
    assert doctor.exit_code(checks) == code


def test_doctor_runs_on_this_machine_and_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    checks = doctor.check()
    assert {"python", "torch", "CPUs", "memory"} <= {one.name for one in checks}
    assert capfd.readouterr() == ("", "")


def test_the_verdict_comes_first() -> None:
    def conclude(*statuses: str, name: str = "memory") -> str:
        return doctor.conclude([Check(name=name, status=each, found=f"{each}!") for each in statuses])  # type: ignore[arg-type]

    assert conclude("ok", "info") == "NOTHING WRONG   this machine can train"
    assert conclude("info", name="GPU") == "NOTHING WRONG   this machine can train, on its CPUs only: no GPU"
    assert conclude("warn", "ok") == "1 WARNING   memory: warn!"
    assert conclude("warn", "fail", "warn") == "1 FAULT, 2 WARNINGS   memory: fail!; memory: warn!; memory: warn!"

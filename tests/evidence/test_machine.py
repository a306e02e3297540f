from __future__ import annotations

import importlib.metadata
import json
import os
import pwd
import resource
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from fastloop.evidence import machine

GIB = 2**30
CGROUP = "sys/fs/cgroup"


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


def test_waiting_for_a_cpu_is_what_the_kernel_counts(tmp_path: Path) -> None:
    assert machine.read_cpu_wait_s(write(tmp_path, {"proc/thread-self/schedstat": "31 2500000000 7"})) == 2.5
    assert machine.read_cpu_wait_s(tmp_path / "elsewhere") is None


def executable(path: Path, text: str = "") -> Path:
    write(path.parent, {path.name: f"#!/bin/sh\n{text}"})
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("files", "cpus"),
    [
        ({}, 8),
        ({f"{CGROUP}/cpu.max": "max 100000"}, 8),
        ({f"{CGROUP}/cpu.max": "350000 100000"}, 3),
        ({f"{CGROUP}/cpu.max": "50000 100000"}, 1),
        ({f"{CGROUP}/cpu.max": "6400000 100000"}, 8),
        ({"proc/self/cgroup": "0::/job/step", f"{CGROUP}/job/step/cpu.max": "200000 100000"}, 2),
        (
            {
                "proc/self/cgroup": "0::/job/step",
                f"{CGROUP}/job/step/cpu.max": "max 100000",
                f"{CGROUP}/job/cpu.max": "200000 100000",
            },
            2,
        ),
        ({"proc/self/cgroup": "0::/mine", f"{CGROUP}/yours/cpu.max": "200000 100000"}, 8),
        ({"proc/self/cgroup": "0::/as/the/host/names/it", f"{CGROUP}/cpu.max": "200000 100000"}, 2),
        (
            {
                "proc/self/cgroup": "4:memory:/job\n2:cpu,cpuacct:/job",
                f"{CGROUP}/cpu/job/cpu.cfs_quota_us": "400000",
                f"{CGROUP}/cpu/job/cpu.cfs_period_us": "100000",
            },
            4,
        ),
        (
            {
                "proc/self/cgroup": "2:cpu,cpuacct:/",
                f"{CGROUP}/cpu/cpu.cfs_quota_us": "-1",
                f"{CGROUP}/cpu/cpu.cfs_period_us": "100000",
            },
            8,
        ),
    ],
    ids=["none", "max", "quota", "half", "above", "own", "parent", "stranger", "container", "v1", "v1-unlimited"],
)
def test_cpus_are_the_smaller_of_affinity_and_quota(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], cpus: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    assert machine.count_usable_cpus(write(tmp_path, files)) == cpus


def test_cpus_without_affinity_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 5)
    assert machine.count_usable_cpus(tmp_path) == 5


@pytest.mark.parametrize(
    ("environ", "ranks"),
    [
        ({}, 1),
        ({"LOCAL_WORLD_SIZE": "4"}, 4),
        ({"SLURM_NTASKS_PER_NODE": "2"}, 2),
        ({"LOCAL_WORLD_SIZE": "4", "SLURM_NTASKS_PER_NODE": "2"}, 4),
        ({"LOCAL_WORLD_SIZE": "many"}, 1),
        ({"LOCAL_WORLD_SIZE": "0"}, 1),
        ({"WORLD_SIZE": "16"}, 1),
    ],
)
def test_local_ranks(environ: dict[str, str], ranks: int) -> None:
    assert machine.count_local_ranks(environ) == ranks


@pytest.mark.parametrize(
    ("files", "gib"),
    [
        ({}, 16),
        ({f"{CGROUP}/memory.max": str(2 * GIB)}, 2),
        ({f"{CGROUP}/memory.max": "max"}, 16),
        ({"proc/self/cgroup": "4:memory:/a/b", f"{CGROUP}/memory/a/memory.limit_in_bytes": str(3 * GIB)}, 3),
        ({"proc/self/cgroup": "4:memory:/", f"{CGROUP}/memory/memory.limit_in_bytes": "9223372036854771712"}, 16),
    ],
    ids=["none", "version-2", "unlimited", "version-1", "version-1-unlimited"],
)
def test_memory_is_the_smaller_of_installed_and_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], gib: int
) -> None:
    monkeypatch.setattr(os, "sysconf", {"SC_PHYS_PAGES": 16 * GIB // 4096, "SC_PAGE_SIZE": 4096}.__getitem__)
    assert machine.read_memory_bytes(write(tmp_path, files)) == gib * GIB


def test_memory_nobody_knows_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sysconf")
    assert machine.read_memory_bytes(tmp_path) is None


@pytest.mark.parametrize(
    ("files", "room"),
    [
        ({}, None),
        ({"proc/meminfo": "MemTotal: 100 kB\nMemAvailable:   50 kB"}, 50 * 1024),
        ({"proc/meminfo": "MemAvailable: 50 kB", f"{CGROUP}/memory.max": "max"}, 50 * 1024),
        # what the group holds in file caches can be had back; what it holds in shared memory cannot
        ({f"{CGROUP}/memory.max": "9000", f"{CGROUP}/memory.stat": "anon 2000\nfile 5000\nshmem 1500"}, 5500),
        ({f"{CGROUP}/memory/memory.limit_in_bytes": "9000"}, None),
        # version 1 has both: of the group alone, and with those below it
        (
            {
                f"{CGROUP}/memory.limit_in_bytes": "9000",
                f"{CGROUP}/memory.stat": "rss 1000\nshmem 1500\ntotal_rss 2000\ntotal_shmem 1500",
            },
            5500,
        ),
        (
            {
                "proc/self/cgroup": "4:memory:/job",
                f"{CGROUP}/memory/job/memory.limit_in_bytes": "9000",
                f"{CGROUP}/memory/job/memory.stat": "total_rss 9500\ntotal_shmem 1",
            },
            0,
        ),
    ],
)
def test_memory_that_is_left(files: dict[str, str], room: int | None, tmp_path: Path) -> None:
    assert machine.read_memory_free_bytes(write(tmp_path, files)) == room


def test_room_on_a_disk_is_that_of_the_nearest_directory_there_is(tmp_path: Path) -> None:
    room = machine.read_disk_free_bytes(tmp_path / "not" / "there")
    assert room is not None and room > 0
    assert machine.read_disk_free_bytes(Path("not/there/either")) is not None


def test_the_cache_directory_of_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert machine.find_cache_home() == tmp_path / ".cache"
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)
    assert machine.find_cache_home().name == f"cache-{os.getuid()}"
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert machine.find_cache_home() == Path("/elsewhere")


def test_shared_memory(tmp_path: Path) -> None:
    assert machine.read_shm_free_bytes(tmp_path) is None
    (tmp_path / "dev/shm").mkdir(parents=True)
    assert (machine.read_shm_free_bytes(tmp_path) or 0) > 0


def test_open_file_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 1024))
    assert machine.open_file_limit() == 256
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert machine.open_file_limit() is None


def test_compiler_is_the_one_inductor_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    clang = str(executable(tmp_path / "clang++"))
    path = {"PATH": str(tmp_path)}
    assert machine.find_cxx_compiler(path) is None, "Inductor does not fall back on clang++"
    assert machine.find_cxx_compiler({**path, "CXX": "clang++"}) == clang
    assert machine.find_cxx_compiler({"PATH": "", "CXX": clang}) == clang
    gcc = str(executable(tmp_path / "g++"))
    assert machine.find_cxx_compiler(path) == gcc
    assert machine.find_cxx_compiler({**path, "CXX": "no-such-compiler"}) is None, "CXX has the last word"
    assert machine.find_cxx_compiler({"PATH": ""}) is None


class FakeNVMLError(Exception):
    pass


def refuse(*_: object) -> None:
    raise FakeNVMLError("not supported")


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A pynvml with two GPUs that answer; a test replaces the answers it is about."""
    fake = SimpleNamespace(
        NVMLError=FakeNVMLError,
        pids=[],
        users=[],
        nvmlInit=lambda: fake.users.append("fastloop"),
        nvmlShutdown=lambda: fake.users.pop(),
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlSystemGetDriverVersion=lambda: "580.65",
        nvmlDeviceGetName=lambda device: f"GPU model {device}",
        nvmlDeviceGetMemoryInfo=lambda device: SimpleNamespace(total=80 * GIB, used=device * GIB),
        nvmlDeviceGetCudaComputeCapability=lambda _: (9, 0),
        nvmlDeviceGetMigMode=lambda device: [device, device],
        nvmlDeviceGetComputeRunningProcesses=lambda _: [SimpleNamespace(pid=pid) for pid in fake.pids],
    )
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return fake


def test_gpus_that_answer(nvml: SimpleNamespace) -> None:
    first, second = machine.list_gpus()
    assert first == machine.GpuReading(
        index=0,
        name="GPU model 0",
        memory_total_bytes=80 * GIB,
        memory_used_bytes=0,
        driver="580.65",
        compute_capability=(9, 0),
        mig_enabled=False,
        foreign_pids=(),
    )
    assert (second.index, second.memory_used_bytes, second.mig_enabled) == (1, GIB, True)
    assert nvml.users == [], "NVML was left open"


def test_no_gpus_without_a_driver_or_nvml(nvml: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "nvmlInit", refuse)
    assert machine.list_gpus() == ()
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert machine.list_gpus() == ()


@pytest.mark.parametrize(
    ("question", "field"),
    [
        ("nvmlDeviceGetName", "name"),
        ("nvmlDeviceGetMemoryInfo", "memory_total_bytes"),
        ("nvmlSystemGetDriverVersion", "driver"),
        ("nvmlDeviceGetMigMode", "mig_enabled"),
        ("nvmlDeviceGetCudaComputeCapability", "compute_capability"),
        ("nvmlDeviceGetComputeRunningProcesses", "foreign_pids"),
    ],
)
def test_what_nvml_refuses_is_none_and_the_rest_stays(
    nvml: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, question: str, field: str
) -> None:
    monkeypatch.setattr(nvml, question, refuse)
    unknown = {name for name, value in vars(machine.list_gpus()[0]).items() if value is None}
    assert unknown - {"memory_used_bytes"} == {field}


def test_a_lost_gpu_keeps_its_place(nvml: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "nvmlDeviceGetHandleByIndex", lambda index: refuse() if index == 0 else index)
    lost, well = machine.list_gpus()
    assert lost == machine.GpuReading(index=0, driver="580.65")
    assert well.name == "GPU model 1"


def test_pynvml_may_lack_a_function(nvml: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(nvml, "nvmlDeviceGetMigMode")
    assert machine.list_gpus()[0].mig_enabled is None


def test_foreign_processes_are_told_from_ours(nvml: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE"):
        monkeypatch.delenv(name, raising=False)
    sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
    helper, neighbour = subprocess.Popen(sleep), subprocess.Popen(sleep, start_new_session=True)
    try:
        nvml.pids = [os.getpid(), helper.pid, neighbour.pid]
        assert machine.list_gpus()[0].foreign_pids == (neighbour.pid,)
        monkeypatch.setattr(os, "getppid", os.getpid)  # now the neighbour looks like a sibling
        assert machine.list_gpus()[0].foreign_pids == (neighbour.pid,), "the shell's other jobs are not this run"
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
        assert machine.list_gpus()[0].foreign_pids == (), "the launcher's other ranks are this run"
    finally:
        for child in (helper, neighbour):
            child.kill()
            child.wait()
    assert machine.list_gpus()[0].foreign_pids == (helper.pid, neighbour.pid), "their PIDs name nobody now"


def test_versions_are_those_of_installed_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(package: str) -> str | None:
        if package == "torch":
            return "2.11.0+cu130"
        if package == "scipy":
            return None
        raise importlib.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert machine.read_versions() == {"python": ".".join(map(str, sys.version_info[:3])), "torch": "2.11.0+cu130"}


def test_reading_the_machine_imports_neither_torch_nor_lightning() -> None:
    code = """
import os, sys
from fastloop.evidence import machine
machine.read_environment([], os.environ)
assert not {"torch", "lightning", "pytorch_lightning", "numpy"} & set(sys.modules)
"""
    search_path = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    subprocess.run([sys.executable, "-c", code], check=True, env=search_path)


@pytest.mark.usefixtures("nvml")
def test_environment_is_json_without_secrets() -> None:
    kept = {"CUDA_VISIBLE_DEVICES": "0,1", "MASTER_ADDR": "node", "NCCL_DEBUG": "INFO", "RANK": "1"}
    kept["NVIDIA_TF32_OVERRIDE"] = "0"
    environ = {**kept, "FASTLOOP_API_KEY": "hush", "SLURM_JWT": "hush", "HF_TOKEN": "hush", "HOME": "mine"}
    record = machine.read_environment(["train.py", "logger.api_key=hush", "--token", "hush"], environ)
    assert json.loads(json.dumps(record)).keys() == record.keys()
    assert "hush" not in json.dumps(record)
    assert record["schema"] == 1
    assert record["argv"] == ["train.py", "logger.api_key=***", "--token", "***"]
    assert record["variables"] == {**kept, "FASTLOOP_API_KEY": "***"}
    assert record["driver"] == "580.65" and len(record["hardware"]["gpus"]) == 2
    assert record["torch_flags"] is None


@pytest.fixture
def work_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.com", "-c", "commit.gpgsign=false"]
    write(tmp_path, {"train.py": "1"})
    for command in (["init", "-q"], ["add", "train.py"], [*identity, "commit", "-q", "-m", "first"]):
        subprocess.run(["git", *command], check=True, cwd=tmp_path)
    return tmp_path


def test_commit_and_whether_files_differ_from_it(work_tree: Path) -> None:
    clean = machine.read_environment([], {})
    assert len(clean["commit"]) == 40 and clean["dirty"] is False
    write(work_tree, {"notes.txt": "untracked"})
    assert machine.read_environment([], {})["dirty"] is False
    write(work_tree, {"train.py": "2"})
    changed = machine.read_environment([], {})
    assert (changed["commit"], changed["dirty"]) == (clean["commit"], True)


def test_no_commit_outside_a_work_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert machine.read_environment([], {})["commit"] is machine.read_environment([], {})["dirty"] is None


def test_git_that_hangs_is_not_waited_for(work_tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    executable(work_tree / "bin/git", "exec sleep 30")
    monkeypatch.setenv("PATH", f"{work_tree / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(machine, "GIT_LIMIT_S", 0.2)
    assert machine.read_environment([], {})["commit"] is None


def test_cpu_model(tmp_path: Path) -> None:
    write(tmp_path, {"proc/cpuinfo": "processor\t: 0\nmodel name\t: Fast CPU @ 3 GHz\n"})
    assert machine._read_cpu_model(tmp_path) == "Fast CPU @ 3 GHz"


@pytest.mark.parametrize(
    ("commands", "whose"),
    [
        (None, None),
        ("[console_scripts]\nfastloop = fastloop.cli:main\n", "ours"),
        ("", "stranger"),
        ("[console_scripts]\nfastloop = fastloop.loop:main\n", "stranger"),
    ],
)
def test_an_old_install_of_ours_is_told_apart_from_the_strangers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, commands: str | None, whose: str | None
) -> None:
    if commands is not None:
        folder = tmp_path / "fastloop-0.1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: fastloop\nVersion: 0.1.0\n")
        (folder / "entry_points.txt").write_text(commands)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert machine.find_bare_distribution() == whose

"""Reads the properties of this machine and its installation, without importing torch or Lightning.

A value that could not be read is ``None``, never 0. Functions that read ``/proc``, ``/sys`` or ``/dev`` take their
``root`` as a parameter, and functions that read variables take the mapping, so that a test can supply its own machine.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.metadata
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import psutil

from fastloop.records.secrets import mask_secrets

Reading = TypeVar("Reading")

ROOT = Path("/")

DISTRIBUTION, BARE_NAME = "lightning-fastloop", "fastloop"
"""The name of this package's distribution, and that of an unrelated distribution that also has a package ``fastloop``;
ours once had the second name."""

PACKAGES = (
    DISTRIBUTION,
    "torch",
    "lightning",
    "pytorch-lightning",
    "torchvision",
    "omegaconf",
    "torchdata",
    "numpy",
    "hydra-core",
    "jsonargparse",
    "click",
    "rich",
    "psutil",
    "scipy",
    "nvidia-ml-py",
    "nvidia-dali-cuda120",
    "nvidia-dali-cuda130",
    "triton",
)
"""Distributions whose versions can change what a run computes or how fast it is."""

VARIABLE_PREFIXES = ("CUDA_", "NCCL_", "TORCH_", "OMP_", "MKL_", "PYTORCH_", "FASTLOOP_", "SLURM_")
VARIABLE_NAMES = (
    "NVIDIA_TF32_OVERRIDE",
    "WORLD_SIZE",
    "RANK",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "NODE_RANK",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
)
UNMARKED_SECRETS = ("SLURM_JWT",)
"""Credentials among these variables whose names do not look like secrets: left out, because masking goes by name."""

GIT_LIMIT_S = 2.0
LONGEST_NAME, SOCKET_PATH = len("/pymp-12345678/listener-12345678"), 107
"""Bytes that multiprocessing adds to the path of the directory for temporary files, and a socket path's limit."""


class Unreadable(Exception):
    """This GPU cannot be read; the message says why."""


@dataclass(frozen=True, kw_only=True)
class GpuReading:
    """One GPU, by NVML's numbering (``CUDA_VISIBLE_DEVICES`` is ignored); ``None`` = NVML did not say."""

    index: int
    name: str | None = None
    memory_total_bytes: int | None = None
    memory_used_bytes: int | None = None
    driver: str | None = None
    compute_capability: tuple[int, int] | None = None
    mig_enabled: bool | None = None
    """Also ``None`` if the GPU does not support partitioning."""
    foreign_pids: tuple[int, ...] | None = None
    """Processes that compute on this GPU and do not belong to this run. In a container NVML may use the host's process
    ids; a run that already uses the GPU is then listed among them."""


# ---------------------------------------------------------------- processors, memory, limits


def count_usable_cpus(root: Path = ROOT) -> int:
    """CPUs this process may keep busy: the smaller of its affinity and its cgroup's quota, and at least 1."""
    on_linux = hasattr(os, "sched_getaffinity")  # macOS has neither affinity nor quota
    allowed = len(os.sched_getaffinity(0)) if on_linux else os.cpu_count() or 1
    return max(1, int(min([allowed, *_read_cpu_quotas(root)])))


def read_cpu_wait_s(root: Path = ROOT) -> float | None:
    """Seconds that this thread was ready to run and waited for a CPU; None if the kernel does not count them.

    Source: https://docs.kernel.org/scheduler/sched-stats.html, the second number of schedstat.
    """
    counts = _read_text(root / "proc/thread-self/schedstat").split()
    return int(counts[1]) / 1e9 if len(counts) == 3 else None


def count_local_ranks(environ: Mapping[str, str]) -> int:
    """Training processes on this machine, according to torchrun or SLURM; 1 if neither says."""
    for name in ("LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE"):
        count = environ.get(name, "")
        if count.isdecimal() and int(count) > 0:
            return int(count)
    return 1


def read_memory_bytes(root: Path = ROOT) -> int | None:
    """Memory this process may use: the smaller of the installed memory and the cgroup's limit."""
    limits = [limit for _, limit in _list_memory_limits(root)]
    with contextlib.suppress(AttributeError, OSError, ValueError):  # no sysconf, or it lacks these names
        limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return min(limits, default=None)


def read_shm_free_bytes(root: Path = ROOT) -> int | None:
    """Free space in ``/dev/shm``, through which loader workers pass their batches; ``None`` if it does not exist."""
    try:
        return shutil.disk_usage(root / "dev/shm").free
    except OSError:
        return None


def read_memory_free_bytes(root: Path = ROOT) -> int | None:
    """Memory this process may still allocate: the smaller of the available memory and the room left in its cgroups.
    File caches do not count as used, files in shared memory do."""
    rooms = []
    for group, limit in _list_memory_limits(root):
        used = dict(line.split(" ", 1) for line in _read_text(group / "memory.stat").splitlines() if " " in line)
        names = ("total_rss", "total_shmem") if "total_rss" in used else ("anon", "shmem")  # version 1, or 2
        rooms.append(max(0, limit - sum(int(used.get(name, 0)) for name in names)))
    lines = _read_text(root / "proc/meminfo").splitlines()
    rooms += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    return min(rooms, default=None)


def read_disk_free_bytes(path: Path) -> int | None:
    """Free space at the location of `path`, even if `path` does not exist yet; ``None`` if unknown."""
    try:
        there = next(each for each in (path, *path.parents) if each.exists())
        return shutil.disk_usage(there).free
    except (OSError, StopIteration):
        return None


def find_cache_home() -> Path:
    """The user's cache directory, by the XDG specification; a temporary directory for a user without a home."""
    home = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if home.is_absolute():  # the specification ignores relative paths
        return home
    try:
        return Path.home() / ".cache"
    except RuntimeError:  # a container may run as an unknown user
        return Path(tempfile.gettempdir()) / f"cache-{os.getuid()}"


def find_socket_obstacle() -> str | None:
    """The directory for temporary files, if its path is too long for a socket below it; else ``None``.

    Loader workers pass their batches through such sockets. If a worker cannot create one, it prints an error and the
    training waits forever. Source: ``unix(7)``, ``multiprocessing.connection.arbitrary_address``.
    """
    place = tempfile.gettempdir()
    return place if len(os.fsencode(place)) + LONGEST_NAME > SOCKET_PATH else None


def open_file_limit() -> int | None:
    """Files this process may hold open; ``None`` if unlimited."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if limit == resource.RLIM_INFINITY else limit


def find_cxx_compiler(environ: Mapping[str, str]) -> str | None:
    """Path of the C++ compiler that Inductor calls; ``None`` if ``torch.compile`` would fail for lack of one.

    Inductor tries ``CXX``, else one name per platform, and nothing else: clang++ does not help if g++ is missing.
    Source: ``torch/_inductor/config.py``, ``cpp.cxx`` (read in torch 2.11).
    """
    name = environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    return shutil.which(name, path=environ.get("PATH", os.defpath))


def _read_cpu_quotas(root: Path) -> Iterator[float]:
    for group in _list_cgroups(root, "cpu"):
        version_1 = f"{_read_text(group / 'cpu.cfs_quota_us')} {_read_text(group / 'cpu.cfs_period_us')}"
        for text in (_read_text(group / "cpu.max"), version_1):
            match text.split():  # "150000 100000"; unlimited is "max 100000" or "-1 100000"
                case [quota, period] if quota.isdecimal() and period.isdecimal() and int(period) > 0:
                    yield int(quota) / int(period)


def _list_memory_limits(root: Path) -> Iterator[tuple[Path, int]]:
    """Cgroups with a limit, and their limits."""
    for group in _list_cgroups(root, "memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            limit = _read_text(group / name)
            if limit.isdecimal():  # unlimited is "max", or in version 1 a number no machine reaches
                yield group, int(limit)


def _list_cgroups(root: Path, controller: str) -> Iterator[Path]:
    """Directories of this process's cgroups and all their parents: the tightest of these limits applies.

    In a container the cgroup often has its path on the host, while the mount begins at the container; the walk up to
    the mount point finds the limits in that case too.
    """
    mount = root / "sys/fs/cgroup"
    yield mount
    for line in _read_text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = mount / controller if controllers else mount  # version 2 names no controllers
        parts = Path(path.lstrip("/")).parts
        yield from (top.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1))


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


# ---------------------------------------------------------------- GPUs


def list_gpus() -> tuple[GpuReading, ...]:
    """Every GPU of this machine; empty without NVML, a driver or a GPU."""
    try:
        nvml = start_nvml()
    except Unreadable:
        return ()
    try:
        count = ask_nvml(nvml.nvmlDeviceGetCount) or 0
        return tuple(_read_gpu(nvml, index) for index in range(count))
    finally:
        ask_nvml(lambda: nvml.nvmlShutdown())  # NVML counts its users: others that have it open keep it


def _read_gpu(nvml: Any, index: int) -> GpuReading:
    driver = ask_driver(nvml)
    device = ask_nvml(lambda: nvml.nvmlDeviceGetHandleByIndex(index))
    if device is None:
        return GpuReading(index=index, driver=driver)
    memory = ask_nvml(lambda: nvml.nvmlDeviceGetMemoryInfo(device))
    processes = ask_nvml(lambda: nvml.nvmlDeviceGetComputeRunningProcesses(device))
    return GpuReading(
        index=index,
        name=ask_nvml(lambda: nvml.nvmlDeviceGetName(device)),
        memory_total_bytes=None if memory is None else memory.total,
        memory_used_bytes=None if memory is None else memory.used,
        driver=driver,
        compute_capability=ask_nvml(lambda: nvml.nvmlDeviceGetCudaComputeCapability(device)),
        mig_enabled=ask_nvml(lambda: bool(nvml.nvmlDeviceGetMigMode(device)[0])),
        foreign_pids=None if processes is None else tuple(p.pid for p in processes if not is_ours(p.pid, os.environ)),
    )


def start_nvml() -> Any:
    """The initialized module ``pynvml``; the caller must shut it down.

    Raises:
        Unreadable: no nvidia-ml-py, no driver, no GPU.
    """
    try:
        nvml: Any = importlib.import_module("pynvml")  # the module of the distribution nvidia-ml-py
    except Exception as error:
        raise Unreadable(f"nvidia-ml-py cannot be imported ({error})") from error
    try:
        nvml.nvmlInit()
    except Exception as error:
        raise Unreadable(f"NVML does not start ({error})") from error
    return nvml


def ask_nvml(question: Callable[[], Reading]) -> Reading | None:
    """The answer, or ``None`` if the driver refuses or forbids it, or this pynvml lacks the function."""
    try:
        return question()
    except Exception:
        return None


def ask_driver(nvml: Any) -> str | None:
    """The driver's version."""
    return ask_nvml(lambda: str(nvml.nvmlSystemGetDriverVersion()))


def is_ours(pid: int, environ: Mapping[str, str]) -> bool:
    """Whether ``pid`` belongs to this run: same process group, or a sibling if a launcher started several ranks."""
    try:
        if os.getpgid(pid) == os.getpgrp():
            return True
        # torchrun and srun put each rank into a separate group, under one parent
        return count_local_ranks(environ) > 1 and psutil.Process(pid).ppid() == os.getppid()
    except (OSError, psutil.Error):  # gone, or a process id of the host
        return False


# ---------------------------------------------------------------- versions and the record of a run


def read_versions(packages: Iterable[str] = PACKAGES) -> dict[str, str]:
    """Versions of Python and of the installed distributions in ``packages``, from metadata: imports nothing."""
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            version: str | None = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
        if version is not None:  # the leftovers of a broken uninstall have no version
            found[package] = version
    return found


def find_bare_distribution() -> Literal["ours", "stranger"] | None:
    """The kind of distribution installed under the bare name: an old install of this package, or an unrelated one."""
    try:
        installed = importlib.metadata.distribution(BARE_NAME)
    except importlib.metadata.PackageNotFoundError:
        return None
    commands = {entry.value for entry in installed.entry_points if entry.group == "console_scripts"}
    return "ours" if "fastloop.cli:main" in commands else "stranger"


def read_environment(argv: Sequence[str], environ: Mapping[str, str]) -> dict[str, Any]:
    """The content of ``env.json``, secrets masked; the caller fills in ``torch_flags`` if it has loaded torch."""
    readings = list_gpus()
    chosen = (name for name in sorted(environ) if name.startswith(VARIABLE_PREFIXES) or name in VARIABLE_NAMES)
    commit = _ask_git("rev-parse", "HEAD")
    changes = _ask_git("--no-optional-locks", "status", "--porcelain", "--untracked-files=no") if commit else None
    record = {
        "schema": 1,
        "versions": read_versions(),
        "hardware": {
            "cpu_model": _read_cpu_model(),
            "usable_cpus": count_usable_cpus(),
            "memory_bytes": read_memory_bytes(),
            "shm_free_bytes": read_shm_free_bytes(),
            "gpus": [dataclasses.asdict(reading) for reading in readings],
        },
        "driver": readings[0].driver if readings else None,
        "commit": commit,
        "dirty": None if changes is None else bool(changes),
        "argv": list(argv),
        "variables": {name: environ[name] for name in chosen if name not in UNMARKED_SECRETS},
        "torch_flags": None,
    }
    return dict(mask_secrets(record))


def _ask_git(*arguments: str) -> str | None:
    """Output of git for the working directory; ``None`` outside a work tree, without git, or on timeout."""
    try:
        done = subprocess.run(["git", *arguments], capture_output=True, text=True, timeout=GIT_LIMIT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _read_cpu_model(root: Path = ROOT) -> str | None:
    for line in _read_text(root / "proc/cpuinfo").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.processor() or None

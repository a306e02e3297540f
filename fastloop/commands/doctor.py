"""fastloop doctor: check this machine, its GPUs and the installed versions.

Versions come from metadata and GPUs from NVML. torch is imported in a separate process, and not at all while a
malicious release is installed. Nothing is printed here.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import fastloop
from fastloop.commands.console import Answer
from fastloop.commands.torch_probe import Backend, NoAnswer, TorchProbe, exchange_gb_per_s, probe_torch
from fastloop.evidence import machine

Status = Literal["ok", "warn", "fail", "info"]
Versions = Mapping[str, str]
Gpus = Sequence[machine.GpuReading]

TESTED: dict[str, tuple[str, str | None]] = {
    "python": ("3.10", None),
    "torch": ("2.9", "2.14"),
    "lightning": ("2.5", "2.6"),
    "pytorch-lightning": ("2.5", "2.6"),
    "omegaconf": ("2.3", None),
}
"""First and last tested minor version; ``None`` if no later version is known to break."""

LIGHTNINGS = ("lightning", "pytorch-lightning")
MALICIOUS_LIGHTNING = ((2, 6, 2), (2, 6, 3))

UNSAFE_CHECKPOINTS = {
    "torch": ("2.10", "GHSA-63cw-57p8-fm3p"),
    "lightning": ("2.6.6", "CVE-2026-58659"),
    "pytorch-lightning": ("2.6.6", "CVE-2026-58659"),
}
"""First version in which loading an untrusted checkpoint is safe, and the advisory for earlier ones."""

GIB = 2**30
LEAST_MEMORY_BYTES = 4 * GIB
LEAST_SHM_BYTES = GIB
LEAST_OPEN_FILES = 1024


@dataclass(frozen=True, kw_only=True)
class Check:
    """The result of one check."""

    name: str
    status: Status
    """info: worth knowing, nothing to fix."""
    found: str
    do: str | None = None
    """How to fix it."""


def doctor(*, comm: bool) -> Answer:
    """Run all checks: the answer sums up what is wrong, then has one line for each check, with fixes."""
    checks = check(comm=comm)
    lines = [f"{one.status:<5} {one.name}: {one.found}" + (f"\n      do  {one.do}" if one.do else "") for one in checks]
    return Answer(
        text="\n".join([f"fastloop {conclude(checks)}", *lines]),
        json={**to_json(checks), "run_dir": None},
        exit_code=exit_code(checks),
    )


def check(comm: bool = False) -> tuple[Check, ...]:
    """Check versions, machine, GPUs and optional packages; with ``comm``, also time an all-reduce (at most 2 min)."""
    found = machine.read_versions((*machine.PACKAGES, "pynvml", "redis"))
    poisoned = any(_release(found.get(name)) in MALICIOUS_LIGHTNING for name in LIGHTNINGS)
    probe = None if poisoned or "torch" not in found else probe_torch()
    gpus = machine.list_gpus()
    checks = [
        *_check_distribution(machine.find_bare_distribution()),
        *_check_versions(found),
        *_check_machine(os.environ),
        *_check_torch(found, gpus, probe, os.environ),
        *_check_gpus(gpus, probe),
        *_check_extras(found, probe),
    ]
    if comm:
        checks.append(_check_comm(probe))
    return tuple(checks)


def conclude(checks: Sequence[Check]) -> str:
    """Sum up what is wrong with this machine for training, faults before warnings."""
    wrong = {word: [one for one in checks if one.status == word] for word in ("fail", "warn")}
    named = [f"{one.name}: {one.found}" for found in wrong.values() for one in found]
    if not named:
        only = ", on its CPUs only: no GPU" if any(one.name == "GPU" for one in checks) else ""
        return f"NOTHING WRONG   this machine can train{only}"
    counts = [
        f"{len(found)} {word}{'' if len(found) == 1 else 'S'}"
        for word, found in zip(("FAULT", "WARNING"), wrong.values(), strict=True)
        if found
    ]
    return f"{', '.join(counts)}   {'; '.join(named)}"


def to_json(checks: Sequence[Check]) -> dict[str, Any]:
    """Return the object that ``--json`` writes; ``worst`` is ok, warn or fail."""
    seen = {one.status for one in checks}
    worst = next((status for status in ("fail", "warn") if status in seen), "ok")
    return {"schema": 1, "checks": [dataclasses.asdict(one) for one in checks], "worst": worst}


def exit_code(checks: Sequence[Check]) -> int:
    """Return 1 if a check failed, otherwise 0."""
    return int(any(one.status == "fail" for one in checks))


def _check(status: Status, name: str, found: str, do: str | None = None) -> Check:
    return Check(name=name, status=status, found=found, do=do)


# ---------------------------------------------------------------- versions


def _check_distribution(bare: Literal["ours", "stranger"] | None) -> Iterator[Check]:
    """Warn about a distribution with the bare name: an old install of this package, or another project's."""
    name, home = f"distribution {machine.BARE_NAME}", Path(fastloop.__file__).parents[1]
    again = f"pip uninstall {machine.BARE_NAME} && pip install -e {home}"
    if bare == "ours":
        yield _check("warn", name, f"an old install of this package, now called {machine.DISTRIBUTION}", again)
    elif bare == "stranger":
        why = "a different project, which installs into the same folder: `import fastloop` may load theirs"
        both = f"pip uninstall {machine.BARE_NAME} {machine.DISTRIBUTION}, then install your clone or wheel again"
        yield _check("warn", name, why, both)


def _check_versions(found: Versions) -> Iterator[Check]:
    lightnings = [name for name in LIGHTNINGS if name in found]
    for name in ("python", "torch", *(lightnings or ["lightning"]), "omegaconf"):
        yield _check_version(name, found.get(name))
    for name, (safe, advisory) in UNSAFE_CHECKPOINTS.items():
        if name in found and _release(found[name]) < _release(safe):
            do = f"install {name}>={safe}, or load only checkpoints you trust"
            yield _check("warn", f"{name} checkpoints", f"{found[name]} has {advisory}", do)
    if len(lightnings) == 2:
        status: Status = "info" if found["lightning"] == found["pytorch-lightning"] else "warn"
        both = " and ".join(f"{name} {found[name]}" for name in lightnings)
        yield _check(status, "two Lightnings", both, "import from one of them only: they share no classes")
    if "pynvml" in found:
        do = "pip uninstall pynvml && pip install --force-reinstall nvidia-ml-py"
        yield _check("warn", "pynvml", f"{found['pynvml']}, deprecated: nvidia-ml-py provides the same module", do)


def _check_version(name: str, version: str | None) -> Check:
    low, high = TESTED[name]
    span = f"{low} to {high}.x" if high else f"{low} or newer"
    if version is None:
        return _check("fail", name, "not installed", f'pip install "{name}>={low}"')
    release = _release(version)
    if name in LIGHTNINGS and release in MALICIOUS_LIGHTNING:
        do = f'pip uninstall {name}; rotate all credentials this machine could read; pip install "{name}==2.6.6"'
        return _check("fail", name, f"{version} is a malicious release (GHSA-w37p-236h-pfx3)", do)
    if release < _release(low) or (high and release[:2] > _release(high)):
        do = f"install {name} {span}, or check that rungs take effect"
        return _check("warn", name, f"{version}, tested with {span}", do)
    return _check("ok", name, version)


def _release(version: str | None) -> tuple[int, ...]:
    """``2.11.0+cu130`` -> (2, 11, 0); no version -> ()."""
    numbers = re.match(r"\d+(\.\d+)*", version or "")
    return tuple(int(number) for number in numbers[0].split(".")) if numbers else ()


# ---------------------------------------------------------------- machine


def _check_machine(environ: Mapping[str, str]) -> Iterator[Check]:
    usable, present = machine.count_usable_cpus(), os.cpu_count() or 1
    if usable < present:
        do = "count only usable CPUs when you size workers: affinity or a cgroup quota limits this process"
        yield _check("info", "CPUs", f"{usable} of {present} usable", do)
    else:
        yield _check("ok", "CPUs", str(usable))
    few_workers = "use few DataLoader workers: each one is a Python process"
    yield _check_enough("memory", machine.read_memory_bytes(), LEAST_MEMORY_BYTES, _format_gib, "unknown", few_workers)
    more_shm = "start the container with --shm-size=8g: workers pass batches through /dev/shm"
    yield _check_enough(
        "shared memory", machine.read_shm_free_bytes(), LEAST_SHM_BYTES, _format_gib, "no /dev/shm here", more_shm
    )
    more_files = "ulimit -n 65536: every batch in flight keeps files open"
    yield _check_enough("open files", machine.open_file_limit(), LEAST_OPEN_FILES, str, "no limit", more_files)
    yield _check_cache()
    if compiler := machine.find_cxx_compiler(environ):
        yield _check("ok", "C++ compiler", compiler)
    else:
        missing = f"no {environ.get('CXX') or 'g++'}: torch.compile cannot work"
        yield _check("warn", "C++ compiler", missing, "install g++, or set CXX to your compiler")


def _check_enough(name: str, found: int | None, least: int, show: Callable[[int], str], absent: str, do: str) -> Check:
    if found is None:
        return _check("info", name, absent)
    if found < least:
        return _check("warn", name, f"{show(found)}, below {show(least)}", do)
    return _check("ok", name, show(found))


def _format_gib(count_bytes: int | None) -> str:
    return "?" if count_bytes is None else f"{count_bytes / GIB:.1f} GiB"


def _check_cache() -> Check:
    home = machine.find_cache_home()
    # A missing part is created there.
    nearest = next(folder for folder in (home, *home.parents) if os.access(folder, os.F_OK))
    if nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK):
        return _check("ok", "cache directory", str(home))
    do = "set XDG_CACHE_HOME to a directory you can write to"
    return _check("warn", "cache directory", f"{home} cannot be written", do)


# ---------------------------------------------------------------- torch and GPUs


def _check_torch(found: Versions, gpus: Gpus, probe: TorchProbe | None, environ: Mapping[str, str]) -> Iterator[Check]:
    if probe is None:
        yield _check("info", "torch and CUDA", "not checked: a package above is malicious or missing")
        return
    if probe.trouble:
        do = "run python -c 'import torch' to see the error, then reinstall torch"
        yield _check("fail", "torch and CUDA", probe.trouble, do)
        return
    yield _check_cuda(gpus, probe)
    if (visible := _check_visibility(gpus, probe, environ.get("CUDA_VISIBLE_DEVICES"))) is not None:
        yield visible
    if probe.cuda_available and "triton" in found:
        yield _check("ok", "triton", found["triton"])
    elif probe.cuda_available:
        do = "reinstall torch, which comes with triton"
        yield _check("warn", "triton", "not installed: torch.compile cannot work on CUDA", do)


def _check_cuda(gpus: Gpus, probe: TorchProbe) -> Check:
    name, build = "torch and CUDA", f"built for CUDA {probe.built_cuda}" if probe.built_cuda else "built without CUDA"
    if probe.cuda_available:
        return _check("ok", name, f"{build}, {probe.device_count} device(s) visible")
    if not gpus:
        return _check("info", name, f"{build}, no device")
    do = "check CUDA_VISIBLE_DEVICES, then update the driver" if probe.built_cuda else "install a CUDA build of torch"
    return _check("warn", name, f"{build}, cannot use the {len(gpus)} GPU(s), driver {gpus[0].driver or '?'}", do)


def _check_visibility(gpus: Gpus, probe: TorchProbe, variable: str | None) -> Check | None:
    """Check that torch sees as many devices as CUDA_VISIBLE_DEVICES lists, or if unset, as NVML counts."""
    if variable is None:
        if probe.device_count >= len(gpus) or any(gpu.mig_enabled for gpu in gpus):  # CUDA counts slices differently
            return None
        do = "compare with nvidia-smi -L: the driver or the container hides some from CUDA"
        return _check("warn", "visible devices", f"torch sees {probe.device_count} of {len(gpus)}", do)
    named = list(itertools.takewhile(lambda entry: entry not in ("", "-1"), map(str.strip, variable.split(","))))
    found = f"CUDA_VISIBLE_DEVICES={variable!r} lists {len(named)}, torch sees {probe.device_count}"
    if probe.device_count == len(named) and (named or not gpus):
        return _check("ok", "visible devices", found)
    return _check("warn", "visible devices", found, "fix or unset it: CUDA stops at the first entry it cannot find")


def _check_gpus(gpus: Gpus, probe: TorchProbe | None) -> Iterator[Check]:
    for gpu in gpus:
        yield from _check_gpu(gpu)
    if gpus:
        return
    if probe is None or not probe.cuda_available:
        yield _check("info", "GPU", "no GPU: rungs that need CUDA are skipped, everything else works")
        return
    yield _check("info", "GPU", "CUDA works, but NVML cannot be read", "pip install nvidia-ml-py")
    if probe.bf16_native is False:
        yield _warn_of_emulated_bf16("GPU")


def _check_gpu(gpu: machine.GpuReading) -> Iterator[Check]:
    name = f"GPU {gpu.index}"
    memory = f"{_format_gib(gpu.memory_used_bytes)} of {_format_gib(gpu.memory_total_bytes)} in use"
    if gpu.name:
        yield _check("ok", name, f"{gpu.name}, {memory}, driver {gpu.driver or '?'}")
    else:
        yield _check("warn", name, f"NVML cannot read it, driver {gpu.driver or '?'}", "run nvidia-smi to see why")
    if gpu.foreign_pids:
        pids = ", ".join(map(str, gpu.foreign_pids))
        do = "pick an idle GPU (CUDA_VISIBLE_DEVICES): timings on a shared GPU are unreliable"
        yield _check("warn", f"{name} neighbours", f"used by other processes: PID {pids}", do)
    if gpu.mig_enabled:
        yield _check("info", f"{name} MIG", "on: a run gets one slice, but readings are for the whole GPU")
    if gpu.compute_capability and gpu.compute_capability < (8, 0):
        yield _warn_of_emulated_bf16(name)


def _warn_of_emulated_bf16(name: str) -> Check:
    do = "use float16 mixed precision: 16-mixed"
    return _check("warn", f"{name} bf16", "emulated and slow: compute capability below 8.0", do)


# ---------------------------------------------------------------- optional packages, exchange between processes


def _check_extras(found: Versions, probe: TorchProbe | None) -> Iterator[Check]:
    cuda_12 = probe is not None and (probe.built_cuda or "").startswith("12.")
    dali = found.get("nvidia-dali-cuda130") or found.get("nvidia-dali-cuda120")
    for name, version, package, extra in (
        ("torchvision", found.get("torchvision"), "torchvision", "recipes"),
        ("DALI", dali, f"nvidia-dali-cuda{120 if cuda_12 else 130}", "dali-cuda12" if cuda_12 else "dali-cuda13"),
        ("redis", found.get("redis"), "redis", "redis"),
    ):
        if version:
            yield _check("ok", name, version)
        else:
            optional = f"not installed, optional: part of {machine.DISTRIBUTION}[{extra}]"
            yield _check("info", name, optional, f"pip install {package}")


def _check_comm(probe: TorchProbe | None) -> Check:
    """Time an all-reduce: NCCL over all visible GPUs if there are at least two, else gloo between two processes."""
    if probe is None or probe.trouble:
        return _check("info", "all-reduce", "not measured: torch cannot be imported")
    on_gpus = probe.device_count >= 2
    backend: Backend = "nccl" if on_gpus else "gloo"
    where = f"NCCL, {probe.device_count} GPUs" if on_gpus else "gloo on this CPU, 2 processes (says nothing about GPUs)"
    try:
        speed = exchange_gb_per_s(backend, probe.device_count if on_gpus else 2)
    except NoAnswer as trouble:
        do = "NCCL_DEBUG=INFO fastloop doctor --comm" if on_gpus else None
        return _check("fail" if on_gpus else "warn", "all-reduce", f"{where}: {trouble}", do)
    return _check("ok" if on_gpus else "info", "all-reduce", f"{where}: {speed:.1f} GB/s bus bandwidth at 64 MiB")

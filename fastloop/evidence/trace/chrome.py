"""Read a Chrome trace from torch.profiler in one pass, keeping only what the account of a step needs.

Kineto writes one object with `traceEvents`; times are microseconds with three decimals; `pid` is the device of a device
event; a kernel refers to the call that launched it by `args.correlation`, and to its operator by `args["External id"]`.
Work launched before the recording began has no such call. Flows, instants, metadata, `gpu_user_annotation` (a range
repeated over its kernels) and `cuda_sync` (a wait shown on a stream) are not work and are dropped while reading, so
that a file of hundreds of megabytes is never in memory as a whole. `profiler.events()` would avoid the file, but builds
an object for each event and lacks the streams and calls that the account needs: for 50 steps with 46,600 events it took
9.2 s and 122 MiB; reading the export back took 1.4 s and 18 MiB.
Source: https://github.com/pytorch/kineto/blob/main/libkineto/src/output_json.cpp
"""

from __future__ import annotations

import gzip
import io
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

Source = Mapping[str, Any] | Path
"""A parsed trace, or the path of one (plain, or gzipped if it ends in ``.gz``)."""

STEP = "ProfilerStep#"
RANGE = "fastloop/"
_CHUNK = 1 << 20
_COPIES = ("gpu_memcpy", "gpu_memset")
_CALLS = ("cuda_runtime", "cuda_driver")
_SYNCS = (
    "cudaStreamSynchronize",
    "cudaDeviceSynchronize",
    "cudaEventSynchronize",
    "cuStreamSynchronize",
    "cuCtxSynchronize",
    "cuEventSynchronize",
    "cudaMemcpy",
    "cudaMemset",
    "hipStreamSynchronize",
    "hipDeviceSynchronize",
    "hipEventSynchronize",
    "hipMemcpy",
    "hipMemcpyWithStream",
)
"""Calls that return when the device is done. Copies that are called asynchronous count if they behaved this way."""
_READS = ("aten::item", "aten::_local_scalar_dense")


class DeviceSpan(NamedTuple):
    """One interval of work on a device stream."""

    begin: float
    end: float
    name: str
    stream: Any
    copy: bool
    launched: float | None
    """Time of the host's launch; None if that is not in the trace."""


class HostSpan(NamedTuple):
    """One interval of host time: an operator, a range or a call."""

    begin: float
    end: float
    name: str
    thread: Any


@dataclass
class ChromeTrace:
    """The contents of one trace, in microseconds; lists sorted by begin."""

    work: list[DeviceSpan] = field(default_factory=list)
    steps: list[HostSpan] = field(default_factory=list)
    """The ranges `ProfilerStep#<n>`."""
    ranges: list[HostSpan] = field(default_factory=list)
    """The ranges `fastloop/<name>`, without the prefix."""
    syncs: list[HostSpan] = field(default_factory=list)
    """Calls in which the host waited for the device."""
    launches: list[float] = field(default_factory=list)
    """Times at which the host launched work, once per call."""
    operators: list[HostSpan] = field(default_factory=list)
    """Only filled if the trace has no device work."""


class _Reader:
    """Sorts events into a ChromeTrace; keeps calls and operators until it knows the work they launched."""

    def __init__(self) -> None:
        self.trace = ChromeTrace()
        self._calls: dict[Any, HostSpan] = {}
        self._begin_of_operator: dict[Any, float] = {}
        self._work: list[tuple[DeviceSpan, Any, Any]] = []

    def take(self, event: Mapping[str, Any]) -> None:
        category = event.get("cat")
        if event.get("ph") != "X" or category is None:
            return
        begin, args = float(event["ts"]), event.get("args") or {}
        host = HostSpan(begin, begin + max(0.0, event.get("dur", 0.0)), sys.intern(event["name"]), event.get("tid"))
        if category == "kernel" or category in _COPIES:
            self._add_device_work(host, category in _COPIES, event, args)
        elif category in _CALLS:
            self._call(host, args)
        elif category == "cpu_op":
            self._add_operator(host, args)
        elif category == "user_annotation":
            self._add_annotation(host)

    def _add_device_work(self, host: HostSpan, copy: bool, event: Mapping[str, Any], args: Mapping[str, Any]) -> None:
        stream = (event.get("pid"), args.get("stream", event.get("tid")))
        work = DeviceSpan(host.begin, host.end, host.name, stream, copy, None)
        self._work.append((work, args.get("correlation"), args.get("External id")))
        self.trace.operators.clear()

    def _call(self, host: HostSpan, args: Mapping[str, Any]) -> None:
        if host.name in _SYNCS:
            self.trace.syncs.append(host)
        if (correlation := args.get("correlation")) is not None and "Synchronize" not in host.name:
            self._calls[correlation] = host

    def _add_operator(self, host: HostSpan, args: Mapping[str, Any]) -> None:
        if host.name in _READS:
            self.trace.syncs.append(host)
        if (external := args.get("External id")) is not None:
            self._begin_of_operator[external] = host.begin
        if not self._work:
            self.trace.operators.append(host)

    def _add_annotation(self, host: HostSpan) -> None:
        if host.name.startswith(STEP):
            self.trace.steps.append(host)
        elif host.name.startswith(RANGE):
            self.trace.ranges.append(host._replace(name=sys.intern(host.name[len(RANGE) :])))

    def close(self) -> ChromeTrace:
        trace, launches = self.trace, dict[Any, float]()
        for work, correlation, external in self._work:
            call = self._calls.get(correlation)
            launched = call.begin if call else self._begin_of_operator.get(external)
            trace.work.append(work._replace(launched=launched))
            if call is not None:
                launches[correlation] = call.begin
                if work.copy and call.end >= work.end:
                    trace.syncs.append(call)  # it returned when the copy was done: the memory was not pinned
        trace.launches = sorted(launches.values())
        for rows in (trace.work, trace.steps, trace.ranges, trace.syncs, trace.operators):
            rows.sort(key=lambda row: row.begin)
        return trace


def load(source: Source) -> ChromeTrace:
    """Read a trace.

    Raises:
        ValueError: the file is truncated, or is not a trace.
    """
    reader = _Reader()
    for event in source["traceEvents"] if isinstance(source, Mapping) else _read_events(source):
        reader.take(event)
    return reader.close()


def _read_events(path: Path) -> Iterator[Any]:
    opened: Callable[..., Any] = gzip.open if path.suffix == ".gz" else Path.open
    with opened(path, "rt", encoding="utf-8", errors="replace") as stream:
        yield from _decode_events(stream)


def _decode_events(stream: io.TextIOBase) -> Iterator[Any]:
    """The events of one JSON text, one at a time. Raises ValueError if the text is truncated."""
    decoder, text = json.JSONDecoder(), _to_first_event(stream)
    place = 0
    while True:
        while place < len(text) and text[place] in " \t\r\n,":
            place += 1
        if text.startswith("]", place):
            return
        try:
            event, place = decoder.raw_decode(text, place)
        except ValueError:
            more = stream.read(_CHUNK)
            if not more:
                raise ValueError("an event does not end") from None
            text, place = text[place:] + more, 0
            continue
        yield event


def _to_first_event(stream: io.TextIOBase) -> str:
    """The text after the bracket that opens the list of events."""
    text = stream.read(_CHUNK)
    while (key := text.find('"traceEvents"')) < 0 or (bracket := text.find("[", key)) < 0:
        more = stream.read(_CHUNK)
        if not more:
            raise ValueError("it contains no traceEvents")
        text += more
    return text[bracket + 1 :]

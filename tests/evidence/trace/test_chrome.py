"""Reading Chrome traces: what is kept, what is dropped, and files that are no whole trace."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from fastloop.evidence.trace import chrome
from fastloop.evidence.trace.chrome import load
from tests.evidence.trace.made import ADD, GEMM, Recording


def recorded() -> Recording:
    made = Recording()
    made.step(0, 0, 1000)
    made.phase("forward", 10, 400)
    made.host("cpu_op", "aten::mm", 10, 30, **{"External id": 5})
    made.kernel(GEMM, 50, 100, launched=20)
    made.kernel("Memcpy HtoD (Pinned -> Device)", 100, 150, launched=30, category="gpu_memcpy", stream=20)
    made.sync(200, 300)
    return made


@pytest.mark.parametrize("chunk", [7, 64, 1 << 20])
def test_a_file_reads_as_the_parsed_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr(chrome, "_CHUNK", chunk)
    trace, path = recorded().trace(), tmp_path / "trace.json"
    path.write_text(json.dumps(trace, indent=2))
    (packed := tmp_path / "trace.json.gz").write_bytes(gzip.compress(path.read_bytes()))
    assert load(path) == load(packed) == load(trace)


def test_what_is_kept() -> None:
    found = load(recorded().trace())
    assert [(work.begin, work.end, work.copy, work.launched) for work in found.work] == [
        (50, 100, False, 20),
        (100, 150, True, 30),
    ]
    assert [work.stream for work in found.work] == [(0, 7), (0, 20)]
    assert [row.name for row in found.ranges] == ["forward"] and [row.name for row in found.steps] == ["ProfilerStep#0"]
    assert [(row.begin, row.end) for row in found.syncs] == [(200, 300)]
    assert found.launches == [20, 30] and found.operators == []


def test_a_launch_is_found_by_correlation_else_by_the_operator_else_not() -> None:
    made = Recording()
    made.host("cpu_op", "aten::mm", 10, 30, **{"External id": 5})
    kernel = {"ph": "X", "cat": "kernel", "name": GEMM, "pid": 0, "tid": 7, "ts": 50.0, "dur": 5.0}
    made.events += [
        kernel | {"args": {"stream": 7, "External id": 5}},
        kernel | {"args": {"stream": 7, "correlation": 99}},
        kernel,
    ]
    assert [work.launched for work in load(made.trace()).work] == [10, None, None]


def test_a_graph_is_launched_once() -> None:
    made = Recording()
    made.host("cuda_runtime", "cudaGraphLaunch", 5, 20, correlation=1)
    for begin in (30, 40, 50):
        made.events.append(
            {
                "ph": "X",
                "cat": "kernel",
                "name": ADD,
                "pid": 0,
                "tid": 7,
                "ts": begin,
                "dur": 5,
                "args": {"stream": 7, "correlation": 1, "graph node id": begin},
            }
        )
    found = load(made.trace())
    assert found.launches == [5] and [work.launched for work in found.work] == [5, 5, 5]


def test_an_asynchronous_copy_that_returned_when_it_was_done_was_a_wait() -> None:
    made = Recording()
    made.kernel(
        "Memcpy HtoD (Pageable -> Device)",
        20,
        80,
        launched=10,
        category="gpu_memcpy",
        call="cudaMemcpyAsync",
        call_lasts=75,
    )
    made.kernel("Memcpy HtoD (Pinned -> Device)", 120, 180, launched=110, category="gpu_memcpy", call="cudaMemcpyAsync")
    assert [(row.begin, row.end) for row in load(made.trace()).syncs] == [(10, 85)]


@pytest.mark.parametrize("name", ["aten::item", "aten::_local_scalar_dense"])
def test_reading_a_number_is_a_wait(name: str) -> None:
    made = Recording()
    made.host("cpu_op", name, 5, 9)
    assert [(row.begin, row.end) for row in load(made.trace()).syncs] == [(5, 9)]


WHOLE = json.dumps(recorded().trace())


@pytest.mark.parametrize(
    "text",
    [WHOLE[: len(WHOLE) // 2], "", '{"schema": 1}', "hello", '{"traceEvents": [{"ph": "X", "cat": "kernel"'],
    ids=["cut", "empty", "other json", "text", "event without end"],
)
def test_a_file_that_is_no_whole_trace_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "trace.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"traceEvents|does not end"):
        load(path)


def test_a_large_file_never_stands_in_memory(tmp_path: Path) -> None:
    """Most of a trace of a GPU is what is dropped; parsed as a whole it takes many times its size."""
    path, arguments = tmp_path / "trace.json", {"a": 1, "b": [1, 2, 3]}
    filler = json.dumps({"ph": "X", "cat": "python_function", "name": "f" * 50, "ts": 1.5, "args": arguments})
    with path.open("w") as target:
        target.write('{"traceEvents": [')
        for _ in range(60_000):
            target.write(filler + ",\n")
        target.write(json.dumps(recorded().trace()["traceEvents"])[1:-1] + "]}")

    def peak(read: Any) -> float:
        tracemalloc.start()
        try:
            read()
            return tracemalloc.get_traced_memory()[1] / 2**20
        finally:
            tracemalloc.stop()

    assert peak(lambda: load(path)) < 8
    assert peak(lambda: json.loads(path.read_text())) > 16, "the file is too small to tell"
    assert len(load(path).work) == 2

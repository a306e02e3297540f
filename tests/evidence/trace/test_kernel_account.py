"""The account of traces made by hand, where every figure is known, and of a real one of the CPU."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.trace_parts import read_parts
from fastloop.errors import FastLoopError
from fastloop.evidence.trace import kernel_account
from fastloop.records.measurement import FAMILIES
from tests.evidence.trace.made import ADD, ALL_REDUCE, BACKWARD_THREAD, GEMM, Recording


def families(found: dict[str, Any]) -> dict[str, float]:
    """Those that took time."""
    return {name: ms for name, ms in found["families_ms"].items() if ms}


def starving() -> Recording:
    """Two steps of 10 ms: 6 ms of data wait, then 4 ms of one GEMM that the host waits for."""
    made = Recording()
    for number, begin in enumerate((0.0, 10_000.0)):
        made.step(number, begin, begin + 10_000)
        made.phase("data_wait", begin, begin + 6000)
        made.phase("forward", begin + 6000, begin + 10_000)
        made.kernel(GEMM, begin + 6010, begin + 10_000, launched=begin + 6000)
        made.sync(begin + 6020, begin + 10_000)
    return made


def test_a_starving_step() -> None:
    found = kernel_account.read(starving().trace())
    assert found["steps"] == 2 and found["launches"] == 1
    assert found["step_ms"] == pytest.approx(10) and found["busy_ms"] == pytest.approx(3.99)
    assert found["idle_ms"] == pytest.approx({"data": 6, "launch": 0.01, "sync": 0, "other": 0})
    assert families(found) == pytest.approx({"gemm": 3.99})
    assert tuple(found["families_ms"]) == FAMILIES
    assert found["comm_exposed_ms"] == 0 == found["nccl_overlapped_ms"] and found["comm_tail_ms"] is None
    assert found["top"] == [{"name": GEMM, "ms": pytest.approx(3.99), "count": 1}]


def test_without_its_range_the_wait_is_nobody_s() -> None:
    """What names the wait is the range, not the account's wish for a cause."""
    made = starving()
    made.events = [event for event in made.events if event["name"] != "fastloop/data_wait"]
    found = kernel_account.read(made.trace())
    assert found["idle_ms"]["data"] == 0 and found["idle_ms"]["other"] > 5.5


def test_a_wait_that_the_device_does_not_notice_costs_nothing() -> None:
    """The host waits 6 ms for data in every step, and the device is busy with the step before."""
    made = Recording()
    made.kernel(GEMM, -5000, 8000)
    for number, begin in enumerate((0.0, 10_000.0, 20_000.0)):
        made.step(number, begin, begin + 10_000)
        made.phase("data_wait", begin, begin + 6000)
        made.phase("forward", begin + 6000, begin + 10_000)
        made.kernel(GEMM, begin + 8000, begin + 18_000, launched=begin + 7000)
    found = kernel_account.read(made.trace())
    assert found["step_ms"] == pytest.approx(10) and found["busy_ms"] == pytest.approx(10)
    assert sum(found["idle_ms"].values()) == pytest.approx(0)
    # The device gets to the marks late; the same trace without that lead starves for 6 ms.
    assert read_parts(made.trace())["parts_ms"] == pytest.approx({"data_wait": 0, "forward": 10})


def test_streams_at_the_same_time_count_once() -> None:
    made = Recording()
    made.step(0, 0, 10_000)
    made.phase("forward", 0, 9000)
    made.kernel(GEMM, 1000, 5000, launched=10)
    made.kernel(GEMM, 3000, 7000, launched=20, stream=8)
    made.kernel(ADD, 6000, 8000, launched=30, stream=9)
    found = kernel_account.read(made.trace())
    assert families(found) == pytest.approx({"gemm": 6, "elementwise": 2})
    assert found["busy_ms"] == pytest.approx(7), "busy is the union over families too"
    assert found["top"][0] == {"name": GEMM, "ms": pytest.approx(8), "count": 2}, "time by name is the kernels' sum"
    assert found["busy_ms"] + sum(found["idle_ms"].values()) == pytest.approx(found["step_ms"])


def gap(
    host: str, *, launched: float | None, begin: float = 2000, end: float = 5000, until: float = 6000
) -> dict[str, float]:
    """The idle time of one step whose device is idle from `begin` to `end` while the host is in `host`."""
    made = Recording()
    made.step(0, 0, until)
    if host.startswith("cuda"):
        made.phase("forward", 0, until)
        made.sync(begin - 500, end - 100, host)
    elif host.startswith("aten"):
        made.phase("callbacks_logging", 0, until)
        made.host("cpu_op", host, begin - 500, end - 100)
    elif host:
        made.phase(host, 0, until)
    made.kernel(GEMM, 0, begin, launched=0)
    made.kernel(GEMM, end, until, launched=launched)
    found: dict[str, float] = kernel_account.read(made.trace())["idle_ms"]
    assert sum(found.values()) == pytest.approx((end - begin) / 1e3), "idle time is split, neither lost nor made"
    return {name: ms for name, ms in found.items() if ms > 1e-9}


@pytest.mark.parametrize(
    ("host", "cause"),
    [
        ("data_wait", "data"),
        ("forward", "launch"),
        ("backward", "launch"),
        ("optimizer", "launch"),
        ("callbacks_logging", "other"),
        ("validation", "other"),
        ("h2d", "other"),
        ("", "other"),
    ],
)
def test_a_gap_is_what_the_host_did(host: str, cause: str) -> None:
    assert gap(host, launched=4990) == pytest.approx({cause: 3})
    assert gap(host, launched=None) == pytest.approx({cause: 3}), "an unknown launch leaves the host's state"


@pytest.mark.parametrize(
    "host",
    [
        "cudaStreamSynchronize",
        "cudaDeviceSynchronize",
        "cudaEventSynchronize",
        "cudaMemcpy",
        "aten::item",
        "aten::_local_scalar_dense",
    ],
)
def test_a_gap_under_a_wait_for_the_device(host: str) -> None:
    """The wait, the moment until the host launches again, and the launch's own latency."""
    rest = "other" if host.startswith("aten") else "launch"
    assert gap(host, launched=4980) == pytest.approx({"sync": 2.98, rest: 0.02})


def test_asking_is_not_waiting() -> None:
    assert gap("cudaEventQuery", launched=4980) == pytest.approx({"launch": 3})


def test_a_gap_in_the_device_s_own_queue_is_nobody_s() -> None:
    """Called for long before, while the host is already waiting for the next batch."""
    assert gap("data_wait", launched=1000, begin=2000, end=2002) == pytest.approx({"other": 0.002})
    emptied = gap("data_wait", launched=1995, begin=2000, end=2008)
    assert emptied == pytest.approx({"data": 0.008}), "called for just now: the queue had run empty"


def test_a_slow_host_after_a_wait_is_a_slow_host() -> None:
    """After a wait that drained the device a restart is the wait's doing, 3 ms of Python are not."""
    made = Recording()
    made.step(0, 0, 10_000)
    made.phase("forward", 0, 10_000)
    made.kernel(GEMM, 100, 2000, launched=50)
    made.sync(200, 2010)
    made.kernel(GEMM, 5010, 10_000, launched=5000)
    idle = kernel_account.read(made.trace())["idle_ms"]
    assert idle["sync"] == pytest.approx(0.01 + kernel_account.RESTART_US / 1e3)
    assert idle["launch"] == pytest.approx(0.1 + 3.01 - idle["sync"])


def test_waits_of_other_threads_are_not_the_step_s() -> None:
    """A loader that pins memory in a thread of its own waits for its copies; a backward's thread is the step's."""

    def idle(thread: int, phase: str) -> dict[str, float]:
        made = Recording()
        made.step(0, 0, 10_000)
        made.phase(phase, 0, 10_000)
        made.kernel(GEMM, 10, 2000, launched=0)
        made.sync(1900, 4900, thread=thread)
        made.kernel(GEMM, 5000, 10_000, launched=4990)
        found: dict[str, float] = kernel_account.read(made.trace())["idle_ms"]
        return found

    assert idle(thread=55, phase="forward")["sync"] == 0
    assert idle(thread=BACKWARD_THREAD, phase="backward")["sync"] > 2.8


def launch_bound(kernels_per_step: int = 400) -> Recording:
    """A host that needs 10 us a launch for kernels of 2 us, which begin 6 us after their call."""
    made = Recording()
    made.step(0, 0, kernels_per_step * 10)
    made.phase("forward", 0, kernels_per_step * 10)
    for number in range(kernels_per_step):
        made.kernel(ADD, number * 10 + 6, number * 10 + 8, launched=number * 10)
    return made


def test_many_small_kernels_are_launching() -> None:
    found = kernel_account.read(launch_bound().trace())
    assert found["launches"] == 400 and found["step_ms"] == pytest.approx(4)
    assert found["busy_ms"] == pytest.approx(0.8) and found["idle_ms"]["launch"] == pytest.approx(3.2)


def exchanging(last_exchange_ends: float) -> Recording:
    """A backward of 4 ms on the autograd thread, one exchange under it and one that begins 1 ms before its end."""
    made = Recording()
    for number, begin in enumerate((0.0, 10_000.0)):
        made.step(number, begin, begin + 10_000)
        made.phase("forward", begin, begin + 1000)
        made.phase("backward", begin + 1000, begin + 8000)
        made.phase("optimizer", begin + 8000, begin + 10_000)
        made.kernel(GEMM, begin + 100, begin + 1000, launched=begin + 10)
        made.kernel(GEMM, begin + 2000, begin + 6000, launched=begin + 1100, thread=BACKWARD_THREAD)
        made.kernel(ALL_REDUCE, begin + 3000, begin + 4000, launched=begin + 1200, stream=20, thread=BACKWARD_THREAD)
        made.kernel(
            ALL_REDUCE,
            begin + 5000,
            begin + last_exchange_ends,
            launched=begin + 1300,
            stream=20,
            thread=BACKWARD_THREAD,
        )
        made.kernel(ADD, begin + 9000, begin + 9500, launched=begin + 8900)
    return made


@pytest.mark.parametrize(("ends", "overlapped", "exposed"), [(7000, 2, 1), (5900, 1.9, 0), (8500, 2, 2.5)])
def test_an_exchange_half_under_the_backward(ends: float, overlapped: float, exposed: float) -> None:
    found = kernel_account.read(exchanging(ends).trace())
    assert found["families_ms"]["nccl"] == pytest.approx(overlapped + exposed)
    assert found["nccl_overlapped_ms"] == pytest.approx(overlapped)
    assert found["comm_exposed_ms"] == pytest.approx(exposed)
    assert found["comm_tail_ms"] == pytest.approx(max(0, ends / 1e3 - 6)), "from the last backward kernel on"


def test_a_copy_under_an_exchange_hides_nothing() -> None:
    made = exchanging(7000)
    made.kernel("Memcpy HtoD (Pinned -> Device)", 6000, 7000, launched=1400, stream=30, category="gpu_memcpy")
    made.kernel("Memcpy HtoD (Pinned -> Device)", 16_000, 17_000, launched=11_400, stream=30, category="gpu_memcpy")
    found = kernel_account.read(made.trace())
    assert found["comm_exposed_ms"] == pytest.approx(1) and found["families_ms"]["copy"] == pytest.approx(1)


def test_exchanges_outside_the_backward_are_no_tail() -> None:
    """A mean of a metric over the ranks, in a callback."""
    made = exchanging(5900)
    for begin in (0.0, 10_000.0):
        made.kernel(ALL_REDUCE, begin + 9600, begin + 9900, launched=begin + 8901)
    assert kernel_account.read(made.trace())["comm_tail_ms"] == 0


def test_small_kernels_of_the_optimizer_are_the_optimizer_s() -> None:
    def found(phase: str) -> dict[str, float]:
        made = Recording()
        made.step(0, 0, 1000)
        made.phase(phase, 0, 1000)
        made.kernel(ADD, 100, 300, launched=50)
        made.kernel(GEMM, 300, 400, launched=60)
        return families(kernel_account.read(made.trace()))

    assert found("optimizer") == pytest.approx({"optimizer": 0.2, "gemm": 0.1})
    assert found("forward") == pytest.approx({"elementwise": 0.2, "gemm": 0.1})


def test_a_closure_s_forward_and_backward_lie_inside_the_optimizer() -> None:
    made = Recording()
    made.step(0, 0, 1000)
    made.phase("optimizer", 0, 1000)
    made.phase("forward", 10, 400)
    made.kernel(ADD, 100, 300, launched=50)
    made.kernel(ADD, 600, 700, launched=550)
    assert families(kernel_account.read(made.trace())) == pytest.approx({"elementwise": 0.2, "optimizer": 0.1})


def test_parts_are_what_events_would_read() -> None:
    found = read_parts(exchanging(7000).trace())
    assert found["step_ms"] == pytest.approx(10) and found["steps"] == 2
    # The mark behind the forward is reached at 1.0, the one behind the backward at 8.0, by the host after the exchange.
    assert found["parts_ms"] == pytest.approx({"forward": 1, "backward": 7, "optimizer": 2})
    assert found["between_ms"] == pytest.approx(0)
    starved = read_parts(starving().trace())["parts_ms"]
    assert starved == pytest.approx({"data_wait": 6, "forward": 4})


def test_parts_and_what_lies_between_them_are_the_step() -> None:
    made = exchanging(7000)
    made.events = [event for event in made.events if event["name"] != "fastloop/optimizer"]
    found = read_parts(made.trace())
    assert found["between_ms"] == pytest.approx(2)
    assert sum(found["parts_ms"].values()) + found["between_ms"] == pytest.approx(found["step_ms"])


def test_launches_that_are_not_in_the_trace() -> None:
    made = starving()
    made.events = [event for event in made.events if event.get("cat") != "cuda_runtime"]
    found = kernel_account.read(made.trace())
    assert found["launches"] == 1 and found["busy_ms"] == pytest.approx(3.99)
    assert found["idle_ms"]["data"] == pytest.approx(6)


def test_only_so_many_steps() -> None:
    made = starving()
    made.step(2, 20_000, 90_000)  # cut short: the training ended in it
    assert kernel_account.read(made.trace(), steps=2) == kernel_account.read(starving().trace())
    assert kernel_account.read(made.trace())["step_ms"] > 20


@pytest.mark.parametrize("drop", ["ProfilerStep", ""])
def test_without_steps_there_is_no_account(drop: str) -> None:
    made = starving()
    made.events = [event for event in made.events if not event["name"].startswith(drop)]
    for account in (kernel_account.read, read_parts):
        with pytest.raises(FastLoopError, match="without a whole step"):
            account(made.trace())


def test_steps_without_work() -> None:
    made = Recording()
    made.step(0, 0, 100)
    with pytest.raises(FastLoopError, match="without any work"):
        kernel_account.read(made.trace())


def test_a_file_reads_the_same(tmp_path: Path) -> None:
    trace = exchanging(7000).trace()
    (tmp_path / "t.json").write_text(json.dumps(trace))
    (tmp_path / "t.json.gz").write_bytes(gzip.compress(json.dumps(trace).encode()))
    assert (
        kernel_account.read(tmp_path / "t.json")
        == kernel_account.read(tmp_path / "t.json.gz")
        == kernel_account.read(trace)
    )


def test_operators_count_their_own_time_on_the_cpu() -> None:
    made = Recording()
    for number, begin in enumerate((0.0, 1000.0)):
        made.step(number, begin, begin + 1000)
        made.phase("data_wait", begin, begin + 200)
        made.host("cpu_op", "aten::mul", begin + 50, begin + 150)  # the loader's own arithmetic
        made.host("cpu_op", "aten::linear", begin + 300, begin + 700)
        made.host("cpu_op", "aten::addmm", begin + 320, begin + 680)
        made.host("cpu_op", "aten::copy_", begin + 330, begin + 350)
        made.host("cpu_op", "aten::add_", begin + 800, begin + 850)
        made.phase("optimizer", begin + 900, begin + 1000)
        made.host("cpu_op", "aten::add_", begin + 900, begin + 960)
    found = kernel_account.read(made.trace())
    assert families(found) == pytest.approx({"gemm": 0.38, "copy": 0.02, "elementwise": 0.05, "optimizer": 0.06})
    assert found["busy_ms"] == pytest.approx(0.51) and found["step_ms"] == pytest.approx(1)
    assert found["top"][0] == {"name": "aten::addmm", "ms": pytest.approx(0.34), "count": 1}
    assert set(found["idle_ms"].values()) == {None} == {found["launches"], found["comm_exposed_ms"]}


def test_ten_names_and_none_of_them_endless() -> None:
    made = Recording()
    made.step(0, 0, 100_000)
    for number in range(15):
        name = f"void at::native::kernel_{number:02}<{'std::array<char*, 3ul>, ' * 50}>"
        made.kernel(name, number * 1000, number * 1000 + 10 * (number + 1), launched=number * 1000 - 10)
    top = kernel_account.read(made.trace())["top"]
    assert [row["ms"] for row in top] == pytest.approx([(15 - number) * 0.01 for number in range(10)])
    assert max(len(row["name"]) for row in top) == 160 and len({row["name"] for row in top}) == 10


SOFTMAX = "void (anonymous namespace)::softmax_warp_forward<float, float, float, 10, false, true>"
SOFTMAX_BACKWARD = (
    "void at::native::(anonymous namespace)::cunn_SoftMaxBackward<4, float, float, float, SoftMaxBackward>"
)
LOG_SOFTMAX = "void (anonymous namespace)::softmax_warp_forward<float, float, float, 10, true, false>"
GATE = 2.0


def transformer(softmax: str = SOFTMAX, layers: int = 2, softmax_us: float = 40.0) -> Recording:
    """A step of layers: a product, a mask, a softmax, a product, and one more that has nothing to do with it."""
    made, at = Recording(), 100.0
    made.step(0, 0.0, 100.0 + layers * 2 * 400.0)
    for name in (softmax, SOFTMAX_BACKWARD if softmax == SOFTMAX else softmax):
        for _ in range(layers):
            for kernel, us in ((GEMM, 200.0), (GEMM, 50.0), (ADD, 20.0), (name, softmax_us), (GEMM, 50.0)):
                made.kernel(kernel, at, at + us, launched=at - 50.0)
                at += us
    return made


def test_attention_written_by_hand_is_a_softmax_between_products() -> None:
    # Of 2 x 2 layers each 50 + 20 + 40 + 50 us; the product of 200 us is none of it.
    found = kernel_account.read(transformer().trace())
    assert found["attention_by_hand_ms"] == pytest.approx(4 * 0.160)
    assert families(found)["elementwise"] == pytest.approx(4 * 0.060), "families stay what they are"


@pytest.mark.parametrize(
    "made",
    [
        transformer(LOG_SOFTMAX),
        transformer("triton_red_fused__log_softmax_nll_loss_forward_3"),
        transformer("void flash_fwd_kernel<Softmax>"),
        transformer(layers=1),
        transformer(softmax_us=GATE),
        starving(),
    ],
    ids=["loss", "compiled loss", "fused", "too few", "gate", "none"],
)
def test_other_softmaxes_are_no_attention(made: Recording) -> None:
    assert kernel_account.read(made.trace())["attention_by_hand_ms"] == 0.0


def test_a_compiled_softmax_of_attention_counts_too() -> None:
    found = kernel_account.read(transformer("triton_per_fused__softmax_masked_fill_mul_1").trace())
    assert found["attention_by_hand_ms"] == pytest.approx(4 * 0.160)

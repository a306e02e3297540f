"""Chrome traces as Kineto writes them, made by hand. Times in microseconds."""

from __future__ import annotations

from itertools import count
from typing import Any

MAIN, BACKWARD_THREAD = 100, 101
GEMM = "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x256x64_warpgroupsize2x1x1_execute_segment_k_off_kernel"
ADD = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, std::array<char*, 3ul> >"
ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


class Recording:
    """Collects the events of a trace."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self._numbers = count(1)

    def host(self, category: str, name: str, begin: float, end: float, thread: int = MAIN, **args: Any) -> None:
        self.events.append(
            {
                "ph": "X",
                "cat": category,
                "name": name,
                "pid": 7,
                "tid": thread,
                "ts": begin,
                "dur": round(end - begin, 3),
                "args": args,
            }
        )

    def step(self, number: int, begin: float, end: float) -> None:
        self.host("user_annotation", f"ProfilerStep#{number}", begin, end)

    def phase(self, name: str, begin: float, end: float) -> None:
        self.host("user_annotation", f"fastloop/{name}", begin, end)
        # Kineto draws a range again over the kernels it launched. That is no work.
        self.events.append(
            {
                "ph": "X",
                "cat": "gpu_user_annotation",
                "name": f"fastloop/{name}",
                "pid": 0,
                "tid": 7,
                "ts": begin,
                "dur": end - begin,
                "args": {},
            }
        )

    def kernel(
        self,
        name: str,
        begin: float,
        end: float,
        launched: float | None = None,
        *,
        stream: int = 7,
        thread: int = MAIN,
        category: str = "kernel",
        call: str = "cudaLaunchKernel",
        call_lasts: float = 4.0,
    ) -> None:
        """A kernel and, where the launch is in the trace, its call and the flow between them."""
        number = next(self._numbers)
        if launched is not None:
            self.host("cuda_runtime", call, launched, launched + call_lasts, thread, cbid=211, correlation=number)
            self.events.append(
                {"ph": "s", "id": number, "pid": 7, "tid": thread, "ts": launched, "cat": "ac2g", "name": "ac2g"}
            )
        self.events.append(
            {
                "ph": "X",
                "cat": category,
                "name": name,
                "pid": 0,
                "tid": stream,
                "ts": begin,
                "dur": round(end - begin, 3),
                "args": {"device": 0, "stream": stream, "correlation": number},
            }
        )

    def sync(self, begin: float, end: float, name: str = "cudaStreamSynchronize", thread: int = MAIN) -> None:
        self.host("cuda_runtime", name, begin, end, thread, cbid=131, correlation=next(self._numbers))

    def trace(self) -> dict[str, Any]:
        rest = [
            {"name": "process_name", "ph": "M", "ts": 0.0, "pid": 7, "tid": 0, "args": {"name": "python"}},
            {
                "ph": "X",
                "cat": "Trace",
                "ts": 0.0,
                "dur": 9e9,
                "pid": "Spans",
                "tid": "PyTorch Profiler",
                "name": "PyTorch Profiler (0)",
                "args": {"Op count": 0},
            },
            {"name": "Record Window End", "ph": "i", "s": "g", "pid": "", "tid": "", "ts": 9e9},
        ]
        return {
            "schemaVersion": 1,
            "deviceProperties": [],
            "displayTimeUnit": "ms",
            "traceEvents": self.events + rest,
            "traceName": "made.json",
        }

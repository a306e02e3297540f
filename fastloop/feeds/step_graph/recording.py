"""Record what work launches on a CUDA device, and launch it again in one call.

Source: https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch

from fastloop.evidence.sync.call_site import find_site
from fastloop.evidence.sync.cuda_warnings import SyncWarnings

Work = Callable[[], Sequence[torch.Tensor]]
"""What is to be recorded; returns the tensors that every replay writes anew."""


class CudaRecorder:
    """CUDA graphs that share memory, on one device. Random streams go on at each replay as they do in eager steps."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Where work is recorded: on a stream of its own. Afterwards, all that was launched there is done."""
        self.wait()
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            self.wait()

    def find_syncs(self, work: Callable[[], object]) -> list[str]:
        """Run `work`; the lines in it that make the host wait for the device, which no recording survives."""
        found: list[str] = []

        def note(frame: object) -> None:
            site = find_site(frame)  # type: ignore[arg-type]
            found.append(f"{site.where}: {site.text}")

        with SyncWarnings(note):
            work()
        return found

    def record(self, work: Work) -> tuple[Sequence[torch.Tensor], Callable[[], None]]:
        """What `work` returned, and what launches it again. Whether it has run once by then is not said."""
        graph = torch.cuda.CUDAGraph()
        random_state = torch.cuda.get_rng_state(self._device)
        with self.aside():
            # Other threads load batches meanwhile, and may allocate: what they do is no fault of this one's.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                tensors = work()
                graph.capture_end()
            except BaseException:
                self._recover(graph, random_state)
                raise
        return tensors, graph.replay

    def wait(self) -> None:
        """Until the device has done all that was launched."""
        torch.cuda.synchronize(self._device)

    def _recover(self, graph: torch.cuda.CUDAGraph, random_state: torch.Tensor) -> None:
        """End a recording that failed. torch then leaves the allocator and the random stream in it (seen in 2.11)."""
        with contextlib.suppress(RuntimeError):
            graph.capture_end()
        with contextlib.suppress(RuntimeError, AttributeError):
            torch._C._cuda_endAllocateToPool(self._device.index, self._pool)
        fresh = torch.Generator(self._device)
        fresh.set_state(random_state)
        torch.cuda.default_generators[self._device.index].graphsafe_set_state(fresh.graphsafe_get_state())

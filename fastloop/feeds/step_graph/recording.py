"""Records the CUDA work that a function launches, and launches it again in one call.

Source: https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch

from fastloop.evidence.sync.call_site import find_site
from fastloop.evidence.sync.cuda_warnings import SyncWarnings

ROOM, GIB = 1.2, 2**30
"""Free memory must be this many times what a recording takes."""
Work = Callable[[], Sequence[torch.Tensor]]
"""The work to record; returns the tensors that every replay overwrites."""


class CudaRecorder:
    """CUDA graphs on one device that share memory. Each replay advances the random streams as an eager step does."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Switch to the separate stream used for recording; on exit, wait until all work on it is done."""
        self.wait()
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            self.wait()

    def find_syncs(self, work: Callable[[], object]) -> list[str]:
        """Run `work` and list its lines that make the host wait for the device, which a recording does not allow."""
        found: list[str] = []

        def note(frame: object) -> None:
            site = find_site(frame)  # type: ignore[arg-type]
            found.append(f"{site.where}: {site.text}")

        with SyncWarnings(note):
            work()
        return found

    def record(self, work: Work) -> tuple[Sequence[torch.Tensor], Callable[[], None]]:
        """Return what `work` returned, and a function that launches it again. `work` may or may not have run once."""
        graph = torch.cuda.CUDAGraph()
        random_state = torch.cuda.get_rng_state(self._device)
        with self.aside():
            # Other threads load batches meanwhile and may allocate; that must not fail this thread's recording.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                tensors = work()
                graph.capture_end()
            except BaseException:
                self._recover(graph, random_state)
                raise
        return tensors, graph.replay

    def note_memory(self) -> Callable[[], str | None]:
        """Call this before recording, and the returned function afterwards: it returns why the device is too full, or
        None.

        A recording keeps a step's activations for itself. Steps that run eagerly between replays, and validation, need
        as much again.
        """
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved(self._device)

        def explain() -> str | None:
            torch.cuda.empty_cache()
            taken = torch.cuda.memory_reserved(self._device) - before
            free, _ = torch.cuda.mem_get_info(self._device)
            if free >= ROOM * taken:
                return None
            taken_gib, free_gib = taken / GIB, free / GIB
            return f"a recording takes {taken_gib:.1f} GiB, an eager step as much, but only {free_gib:.1f} GiB are free"

        return explain

    def wait(self) -> None:
        """Wait until the device has finished all launched work."""
        torch.cuda.synchronize(self._device)

    def _recover(self, graph: torch.cuda.CUDAGraph, random_state: torch.Tensor) -> None:
        """End a failed recording. torch leaves the allocator and the random stream in capture mode (seen in 2.11)."""
        with contextlib.suppress(RuntimeError):
            graph.capture_end()
        with contextlib.suppress(RuntimeError, AttributeError):
            torch._C._cuda_endAllocateToPool(self._device.index, self._pool)
        fresh = torch.Generator(self._device)
        fresh.set_state(random_state)
        torch.cuda.default_generators[self._device.index].graphsafe_set_state(fresh.graphsafe_get_state())

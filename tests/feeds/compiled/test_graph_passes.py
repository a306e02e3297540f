"""Passes change graphs before they are compiled; in most tests Inductor is left out."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from fastloop.feeds.compiled.calls import CompiledCall, put_in
from tests.feeds.compiled.test_calls import Net, batch, run

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def double_tanh(graph: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """A pass that changes what a graph computes, so that it can be seen."""
    for node in list(graph.graph.nodes):
        if node.target is torch.tanh:
            with graph.graph.inserting_after(node):
                twice = graph.graph.call_function(torch.mul, (node, 2.0))
            node.replace_all_uses_with(twice, delete_user_cb=lambda user, twice=twice: user is not twice)
    graph.recompile()
    return graph


@pytest.mark.parametrize("mode", ["eager", pytest.param("default", marks=pytest.mark.slow)])
def test_passes_change_graphs_before_they_are_compiled(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def change(graph: torch.fx.GraphModule) -> torch.fx.GraphModule:
        seen.append(graph)
        return double_tanh(graph)

    class Doubled(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last((2.0 * torch.tanh(self.first(x))).mean(dim=1))

    modules, codes = [Net(), Net()], dict[Any, Any]()
    calls = [CompiledCall(module, "net", codes, mode=mode, dynamic=None, passes=[change]) for module in modules]
    before = dict(vars(modules[0]))
    undo = put_in(calls)
    for module in modules:
        torch.testing.assert_close(run(module, batch(7)), run(Doubled(), batch(7)))
    assert sum(call.graphs for call in calls) == 1, "alike modules have one graph"
    assert len(seen) == 1 and not calls[0].failure
    undo()
    assert vars(modules[0]) == before


@pytest.mark.parametrize("passes", [(), (double_tanh,)])
@pytest.mark.parametrize("on_gpu", [True, False])
def test_a_gpus_kernels_are_timed_in_another_process(
    passes: Any, on_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In each compile of these modes, with and without passes; Inductor is not asked here."""
    seen: list[dict[str, Any]] = []

    def take(graph: Any, _inputs: Any, *, config_patches: Any, **_: Any) -> Any:
        seen.append(config_patches)
        return graph.forward

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", take)
    put_in([CompiledCall(net := Net(), "net", {}, mode="max-autotune-no-cudagraphs", dynamic=None, passes=passes)])
    run(net, batch(7))
    assert [(each["autotune_in_subproc"], each["max_autotune"]) for each in seen] == [(torch.cuda.is_available(), True)]


@pytest.mark.slow
def test_a_later_compile_starts_from_torchs_cache_on_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """So no cache of our own is needed: with passes as without, and what is truncated on the disk is made anew."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))

    def start() -> dict[str, int]:
        """As another process would: with nothing in memory."""
        torch._dynamo.reset()
        torch._inductor.utils.clear_caches()
        counters.clear()
        module = Net()
        call = CompiledCall(module, "net", {}, mode="default", dynamic=None, passes=[double_tanh])
        wanted = (2.0 * torch.tanh(module.first(batch(7)))).mean(dim=1)
        put_in([call])
        torch.testing.assert_close(run(module, batch(7))[0], module.last(wanted).sum())
        assert call.graphs == 1 and not call.failure
        return dict(counters["aot_autograd"])

    def count(found: dict[str, int]) -> tuple[int, int]:
        return found.get("autograd_cache_hit", 0), found.get("autograd_cache_miss", 0)

    assert count(start()) == (0, 1) and count(start()) == (1, 0)
    kept = [each for folder in ("aotautograd", "fxgraph") for each in (tmp_path / folder).rglob("*") if each.is_file()]
    assert kept
    for each in kept:
        os.truncate(each, 100)
    assert count(start()) == (0, 1)

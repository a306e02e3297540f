"""What a compile and fused kernels do on a CUDA device: kernels timed apart, warm second starts, clipping."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from fastloop.feeds.compiled.calls import CompiledCall, put_in
from tests import models
from tests.rungs import test_fused as fused
from tests.rungs.fits import fit, seeded, verdict
from tests.rungs.test_compile import Own

pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"), pytest.mark.timeout(150)]
GPU: dict[str, Any] = {"accelerator": "gpu"}


class Synchronizations(L.Callback):
    """Counts those that CUDA's debug mode warns of, in the steps from the third on."""

    def __init__(self) -> None:
        self.count = 0

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            self.seen = warnings.catch_warnings(record=True)
            self.found = self.seen.__enter__()
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")

    def on_train_end(self, *_: Any) -> None:
        torch.cuda.set_sync_debug_mode("default")
        self.seen.__exit__(None, None, None)
        self.count = sum("synchroniz" in str(each.message) for each in self.found)


class Clipped(fused.Tuned):
    """Notes the norm of the gradients that each step gets, on the device."""

    def configure_optimizers(self) -> Any:
        self.norms: list[torch.Tensor] = []
        optimizer = super().configure_optimizers()
        optimizer.register_step_pre_hook(lambda *_: self.norms.append(self.norm()))
        return optimizer

    def norm(self) -> torch.Tensor:
        return torch.nn.utils.get_total_norm([each.grad for each in self.parameters() if each.grad is not None])

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        return torch.nn.functional.mse_loss(self.net(x), y)  # without the loss that the module's base reads back


@pytest.mark.parametrize("mode", ["bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("by_user", [False, True])
def test_clipping_under_mixed_precision_keeps_norm_and_synchronizations(mode: str, by_user: bool) -> None:
    amp: dict[str, Any] = {"amp": {"mode": mode}}
    plain, ours = seeded(Clipped), seeded(Clipped, **({"fused": True} if by_user else {}))
    of_plain, of_ours = Synchronizations(), Synchronizations()
    clip = {"gradient_clip_val": 0.05, "limit_train_batches": 8, **GPU}
    fit(amp, plain, callbacks=(of_plain,), **clip)
    watcher, _ = fit(amp if by_user else {**amp, "fused": {}}, ours, callbacks=(of_ours,), **clip)
    assert by_user or verdict(watcher, "fused").took is True
    norms = [float(each) for each in ours.norms if torch.isfinite(each)]
    assert norms == pytest.approx([float(each) for each in plain.norms if torch.isfinite(each)], rel=5e-3)
    assert max(norms) < 0.0501
    assert of_ours.count <= of_plain.count, "no synchronization of its own"
    assert models.distance(models.weights(plain), models.weights(ours)) < 5e-3


class DrawsOnce(L.Callback):
    """Leaves other numbers for those who draw later."""

    def on_train_start(self, trainer: Any, module: Any) -> None:
        torch.rand(1, device=module.device)


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_dropout_draws_what_it_draws_eagerly(mode: str) -> None:
    def weights(rungs: Any, *callbacks: Any) -> dict[str, torch.Tensor]:
        module = seeded(Own)
        module.net.insert(2, torch.nn.Dropout(0.5))
        fit(rungs, module, callbacks=callbacks, max_epochs=2, **GPU)
        return models.weights(module)

    plain, compiled = weights(None), {"compile": {"mode": mode}}
    assert models.distance(plain, weights(compiled)) < 1e-4
    assert models.distance(plain, weights(compiled, DrawsOnce())) > 1e-3, "the control"


@pytest.mark.slow
def test_a_kernel_that_breaks_its_context_breaks_none_of_the_users() -> None:
    """The product of a GPT-2's last layer: more than 2^31 numbers, which some Triton kernels here write out of
    bounds."""
    torch._dynamo.reset()
    layer = torch.nn.Linear(64, 50304, bias=False, device="cuda", dtype=torch.bfloat16)
    call = CompiledCall(layer, "layer", {}, mode="max-autotune-no-cudagraphs", dynamic=None)
    undo = put_in([call])
    x = torch.randn(43008, 64, device="cuda", dtype=torch.bfloat16)
    assert x.shape[0] * layer.weight.shape[0] > 2**31
    with torch.no_grad():
        made = layer(x)
        undo()
        rows = [0, 1, 43007]
        torch.testing.assert_close(made[rows], layer(x[rows]), rtol=2e-2, atol=2e-2)
    torch.cuda.synchronize()
    assert call.graphs == 1 and not call.failure


SECOND = """
import json, time, torch
from torch._dynamo.utils import counters
from fastloop.feeds.compiled.calls import CompiledCall, put_in
torch.manual_seed(0)
net = torch.nn.TransformerEncoderLayer(64, 2, 128, batch_first=True, device="cuda")
put_in([CompiledCall(net, "net", {}, mode="default", dynamic=None)])
began = time.perf_counter()
with torch.autocast("cuda", torch.bfloat16):
    net(torch.randn(4, 32, 64, device="cuda")).float().sum().backward()
torch.cuda.synchronize()
print(json.dumps({"s": time.perf_counter() - began, **counters["aot_autograd"], **counters["inductor"]}))
"""


@pytest.mark.slow
def test_a_second_process_starts_warm(tmp_path: Path) -> None:
    def start() -> dict[str, Any]:

        env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
        done = subprocess.run(
            [sys.executable, "-c", SECOND], env=env, capture_output=True, text=True, timeout=200, check=True
        )
        return dict(json.loads(done.stdout.splitlines()[-1]))

    first, second = start(), start()
    print("cold, warm:", first, second)
    assert first.get("autograd_cache_miss") and not first.get("autograd_cache_hit")
    assert second.get("autograd_cache_hit") and not second.get("autograd_cache_miss")
    assert not second.get("fxgraph_cache_miss")

"""What surrounds the modules in a training step of the run, for playing their calls outside of one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from fastloop.bridge.apply.rehearse.time_limit import explain
from fastloop.bridge.apply.site import LiveSite
from fastloop.errors import FastLoopError


@contextlib.contextmanager
def surrounded(site: LiveSite) -> Iterator[None]:
    """Enter the contexts of a training step: the precision's, and DDP's, which shows Dynamo where buckets end."""
    inside = getattr(site.wrapped, "_inside_ddp_forward", contextlib.nullcontext)
    loop = site.trainer.fit_loop.epoch_loop
    logged = loop._results
    loop._results = type(logged)(training=True)  # values that a module logs in a play belong to no step
    try:
        with inside(), site.strategy.precision_plugin.train_step_context():
            yield
    finally:
        loop._results = logged


def check_device(device: torch.device, rung: str) -> None:
    """Stop if the device is lost: every later call would fail without naming the cause."""
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
    except Exception as error:
        raise FastLoopError(
            got=f"a GPU that stopped responding after the rehearsal of {rung}",
            why=explain(error),
            do=f"write rungs.{rung}.enabled: false",
        ) from error

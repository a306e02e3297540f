"""What BatchNorm in groups costs: a compiled ResNet-50 on a resident batch, with each way of writing it.

    python -m benchmarks.batch_norm [--groups 4] [--steps 15] [--rounds 3] [--ways ordinary,shipped] [--budget 150]

ordinary  torch's own BatchNorm over the whole batch, which is another training
shipped   `normalize_groups`: sums and squares of the differences from a guess of the mean; two sums in the backward
moments   var_mean; weight and bias are [channels]: five sums of two shapes in the backward
explicit  var_mean, and a backward that is written out, with two sums
gathered  var_mean; weight and bias meet the pixels as [groups, channels]: four sums of one shape

Forward, backward and SGD in bfloat16 autocast, channels-last. Each way has a process of its own, so that all compile at
once; then they take turns, a block of steps each, with the device to themselves.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing import connection
from typing import Any

import torch
from torch.nn import functional as F

from benchmarks.cases import Case, make_parser, run_cases, say, wait
from fastloop.feeds.batch_norm import groups as batch_norm


def normalize_gathered(x: torch.Tensor, weight: Any, bias: Any, eps: float, groups: int) -> Any:
    """Weight and bias as [groups, channels]."""
    parts, over = split(x, groups)
    wide = parts.float()
    variances, means = torch.var_mean(wide, dim=over, correction=0, keepdim=True)
    scale = torch.rsqrt(variances + eps) * weight.view(-1, 1, 1)
    output = (wide - means) * scale + bias.view(-1, 1, 1).expand(means.shape)
    return output.to(x.dtype).flatten(0, 1), means.view(groups, -1), variances.view(groups, -1)


def normalize_moments(x: torch.Tensor, weight: Any, bias: Any, eps: float, groups: int) -> Any:
    """As anybody would write it."""
    parts, over = split(x, groups)
    wide = parts.float()
    variances, means = torch.var_mean(wide, dim=over, correction=0, keepdim=True)
    output = (wide - means) * torch.rsqrt(variances + eps) * weight.view(-1, 1, 1) + bias.view(-1, 1, 1)
    return output.to(x.dtype).flatten(0, 1), means.view(groups, -1), variances.view(groups, -1)


def normalize_explicit(x: torch.Tensor, weight: Any, bias: Any, eps: float, groups: int) -> Any:
    """With a backward of its own."""
    parts, _ = split(x, groups)
    output, means, variances = Explicit.apply(parts, weight, bias, eps)
    return output.flatten(0, 1), means.view(groups, -1), variances.view(groups, -1)


class Explicit(torch.autograd.Function):
    """Two sums, as few as there can be. Not for float32: where a cast does nothing, torch 2.11's Dynamo takes its
    output for another and hands zeros to this backward."""

    @staticmethod
    def forward(ctx: Any, parts: Any, weight: Any, bias: Any, eps: float) -> Any:
        wide = parts.float()
        variances, means = torch.var_mean(wide, dim=[1, 3, 4], correction=0, keepdim=True)
        scale = torch.rsqrt(variances + eps)
        ctx.save_for_backward(parts, weight, means, scale)
        output = (wide - means) * (scale * weight.view(-1, 1, 1)) + bias.view(-1, 1, 1)
        return output.to(parts.dtype), means, variances

    @staticmethod
    def backward(ctx: Any, gradient: Any, *_: Any) -> Any:
        parts, weight, means, scale = ctx.saved_tensors
        values = parts.numel() // means.numel()
        slope, apart = gradient.float(), parts.float() - means
        total = slope.sum([1, 3, 4], keepdim=True)
        aligned = (slope * apart).sum([1, 3, 4], keepdim=True) * scale
        of_parts = (slope - total / values - apart * (scale * aligned / values)) * (scale * weight.view(-1, 1, 1))
        return of_parts.to(parts.dtype), aligned.sum(0).view(-1), total.sum(0).view(-1), None


def split(x: torch.Tensor, groups: int) -> tuple[torch.Tensor, list[int]]:
    """[groups, rows, channels, height, width], and what is summed over."""
    return x.view(groups, x.shape[0] // groups, *x.shape[1:]), [1, 3, 4]


WAYS: dict[str, Any] = {
    "ordinary": None,
    "shipped": batch_norm.normalize_groups,
    "explicit": normalize_explicit,
    "gathered": normalize_gathered,
    "moments": normalize_moments,
}


def make_step(options: Any, groups: int) -> Callable[[], torch.Tensor]:
    """A step that returns its loss."""
    from torchvision.models import resnet18, resnet50

    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = True
    model = (resnet18 if options.size == "tiny" else resnet50)(num_classes=1000)
    model = model.to(options.device, memory_format=torch.channels_last)
    side = 32 if options.size == "tiny" else 224
    images = torch.randn(options.batch, 3, side, side, device=options.device)
    images = images.contiguous(memory_format=torch.channels_last)
    labels = torch.randint(1000, (options.batch,), device=options.device)
    counts = batch_norm.BatchGroups()
    batch_norm.group_forwards(model, counts)
    counts.begin(groups)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4, fused=True)
    run = torch.compile(model, backend="inductor" if options.size == "default" else "eager")

    def step() -> torch.Tensor:
        with torch.autocast(options.device, torch.bfloat16):
            loss = F.cross_entropy(run(images), labels)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def serve(way: str, options: Any, pipe: Any) -> None:
    """Compile beside all others; then time a block of steps whenever asked."""
    batch_norm.normalize_groups = WAYS[way]
    began = time.perf_counter()
    step = make_step(options, 1 if way == "ordinary" else options.groups)
    losses = [float(step()) for _ in range(4)]
    pipe.send({"compile_s": time.perf_counter() - began, "losses": losses})
    with contextlib.suppress(EOFError):
        while pipe.recv():
            pipe.send(time_block(step, options))


def time_block(step: Callable[[], torch.Tensor], options: Any) -> dict[str, float]:
    """ms of a step and images/s, after two steps that are not timed."""
    for warm in (2, options.steps):
        wait(options.device)
        began = time.perf_counter()
        for _ in range(warm):
            step()
        wait(options.device)
        took_s = time.perf_counter() - began
    return {"step_ms": 1e3 * took_s / options.steps, "images_per_s": options.batch * options.steps / took_s}


def gather(pipes: dict[Any, str], left_s: float) -> Iterator[Any]:
    """The pipes of the ways that are compiled in so many seconds; a line for each way."""
    waiting, until = dict(pipes), time.monotonic() + left_s
    while waiting and (heard := connection.wait(list(waiting), min(3600, max(0, until - time.monotonic())))):
        for pipe in heard:
            try:
                found = pipe.recv()
                yield pipe
            except EOFError:
                found = {"error": "it died; its traceback is on stderr"}
            say("batch_norm", {"case": f"{waiting.pop(pipe)}, first steps", **found})
    for way in waiting.values():
        say("batch_norm", {"case": f"{way}, first steps", "left_out": f"not compiled in {left_s:.0f} s"})


def measure(pipe: Any, left_s: float) -> dict[str, Any]:
    pipe.send(True)
    if not pipe.poll(left_s):
        raise TimeoutError(f"a block of steps took over {left_s:.0f} s")
    return dict(pipe.recv())


def main() -> None:
    parser = make_parser(__doc__, rounds=3)
    parser.add_argument("--ways", default=list(WAYS), type=lambda text: text.split(","))
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--batch", type=int, help="256, or 16 for the tiny size")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    options.batch = options.batch or (256 if options.size == "default" else 16)
    context = torch.multiprocessing.get_context("spawn")
    pipes, processes = dict[Any, str](), list[Any]()
    for way in options.ways:
        ours, theirs = context.Pipe()
        processes.append(context.Process(target=serve, args=(way, options, theirs)))
        processes[-1].start()
        theirs.close()
        pipes[ours] = way
    try:
        ready = list(gather(pipes, 0.7 * (options.until - time.monotonic())))
        for process, pipe in zip(processes, pipes, strict=True):
            if pipe not in ready:  # else it would go on beside what is timed
                process.kill()
        cases = [Case(way, partial(measure, pipe)) for pipe, way in pipes.items() if pipe in ready]
        run_cases("batch_norm", cases, options, rate="images_per_s", batch=options.batch, groups=options.groups)
    finally:
        for process in processes:
            process.kill()


if __name__ == "__main__":
    main()

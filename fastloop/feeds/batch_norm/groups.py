"""BatchNorm over each of the user's batches when several of them run as one.

The rows of a call then form `count` consecutive groups, one per batch. Each group is normalized with its own
statistics, and the running statistics are updated as if by one call per group, so the training equals that of separate
batches. In eager mode the user's forward runs once per group; compiled code normalizes all groups at once
(`normalize_groups`).
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from fastloop.errors import name_kind
from fastloop.records.plan import Undo

KINDS = (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d)
MOST_MIXED = 0.3
"""Largest difference between a layer's means of separate and of merged batches, relative to their spread over the
batches. Rounding leaves 1e-2 in bfloat16; rows in another order differ by about 1."""
ROUNDING = 1e-3
"""Relative to a layer's mean magnitude: smaller differences are rounding, even if the batches are nearly alike."""
GUESSED = 8
"""Values of a group from which its mean is guessed. With 4 to 7, Inductor writes the differences to memory."""


class BatchGroups:
    """The number of user batches in the current calls, and the layers that use it."""

    def __init__(self) -> None:
        self.count = 1
        self.most = 1
        """Largest count so far."""
        self.norms: dict[str, Any] = {}

    def begin(self, count: int) -> None:
        """Set the number of batches in the following calls; 1 turns grouping off."""
        self.count, self.most = count, max(count, self.most)

    @contextlib.contextmanager
    def of(self, count: int) -> Iterator[None]:
        """Set the count inside the context, without changing `most`."""
        before, self.count = self.count, count
        try:
            yield
        finally:
            self.count = before


def group_forwards(model: torch.nn.Module, groups: BatchGroups) -> Undo:
    """Give all BatchNorm layers of a model a forward that follows `groups`. No module is replaced, so names, classes
    and checkpoints stay the same. SyncBatchNorm stays unchanged."""
    before: list[tuple[Any, Any]] = []
    for name, part in model.named_modules():
        if isinstance(part, KINDS):
            before.append((part, vars(part).get("forward")))
            groups.norms[name] = part
            vars(part)["forward"] = GroupedForward(part, part.forward, groups)

    def undo() -> None:
        groups.count = 1
        groups.norms.clear()
        while before:
            part, own = before.pop()
            vars(part).pop("forward", None)
            if own is not None:
                vars(part)["forward"] = own

    return undo


class GroupedForward:
    """The forward of one BatchNorm layer.

    Args:
        plain: the layer's previous forward.
    """

    def __init__(self, module: Any, plain: Any, groups: BatchGroups) -> None:
        self.module, self.plain, self.groups = module, plain, groups
        self.fuses = getattr(plain, "__func__", None) is _BatchNorm.forward

    def __call__(self, input: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Normalize `input` [rows, channels, ...].

        Raises:
            ValueError: the rows are not a multiple of the groups.
        """
        count, module = self.groups.count, self.module
        if count == 1 or not uses_batch(module):
            return self.plain(input, *args, **kwargs)
        if input.shape[0] % count:
            # Not one of our own errors: Dynamo cannot trace their constructors.
            raise ValueError(
                f"got {name_kind(module)} that gets {input.shape[0]} rows of {count} batches\n"
                "  why each batch must keep its own statistics, but these rows cannot be divided among the batches\n"
                "  do  write batch_norm: merge, or turn the rung off"
            )
        if not (self.fuses and torch.compiler.is_compiling()):
            return torch.cat([self.plain(part, *args, **kwargs) for part in input.chunk(count)])
        module._check_input_dim(input)
        output, means, variances = normalize_groups(input, module.weight, module.bias, module.eps, count)
        if module.training and module.track_running_stats:
            move_running(module, means, variances, input.numel() // means.numel())
        return output

    def __deepcopy__(self, memo: dict[int, Any]) -> GroupedForward:
        """A copy of the model that trains alongside gets the same batches, so it shares `groups`."""
        return GroupedForward(copy.deepcopy(self.module, memo), copy.deepcopy(self.plain, memo), self.groups)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self.module, "forward")  # a pickled module has the forward of its class


def uses_batch(module: Any) -> bool:
    """Whether a layer normalizes with the statistics of its input, by torch's rule."""
    return bool(module.training or (module.running_mean is None and module.running_var is None))


def normalize_groups(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float, groups: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Apply batch normalization separately to each of `groups` equal runs of rows. Inductor fuses it.

    The statistics are sums of the differences from a guess, the mean of `GUESSED` values of the group. The mean of n
    values is at most sqrt(n / GUESSED) standard deviations from that guess, so the variance, a difference of squares,
    loses at most a factor n / GUESSED of its precision, and almost always none. A zero carries the mean's gradient, so
    that the backward has two sums over the same dimensions: a ResNet-50 trains at 6,573 images/s on an H200, as with
    torch's own BatchNorm (6,568), against 5,526 with `torch.var_mean` (benchmarks/results/batch_norm_h200_202611.md).
    A reduction over merged dimensions, [groups, rows * height * width, channels], took Inductor minutes to compile.

    Args:
        x: [rows, channels, ...], in any memory format; the output has the same.
        weight: [channels], or None; likewise `bias`.

    Returns:
        The output, in the dtype of `x`; means and biased variances [groups, channels], in float32 or wider.

    Raises:
        ValueError: a group has only one value per channel.
    """
    parts, values = _split_groups(x, groups), x.numel() // (groups * x.shape[1])
    if values == 1:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {tuple(x.shape)}")
    over = [dim for dim in range(parts.dim()) if dim not in (0, 2)]
    shape = (1, 1, -1, *[1] * (parts.dim() - 3))
    wide = parts.float() if x.dtype in (torch.float16, torch.bfloat16) else parts
    corner = (slice(None), slice(GUESSED), slice(None), *[slice(1)] * (parts.dim() - 3))
    guess = wide.detach()[corner].mean(1, keepdim=True)
    rest = wide - guess
    offsets = rest.sum(over, keepdim=True) / values
    variances = rest.square().sum(over, keepdim=True) / values - offsets.square()
    means = guess + offsets.detach()
    scale = torch.rsqrt(variances + eps)
    if weight is not None:
        scale = scale * weight.view(shape)
    shift = (offsets.detach() - offsets) * scale
    if bias is not None:
        shift = shift + bias.view(shape)
    # A copy: Inductor scatters into a view where a ReLU changes it in place.
    output = ((wide - means) * scale + shift).flatten(0, 1).to(x.dtype, copy=True)
    return output, means.view(groups, -1), variances.view(groups, -1)


def _split_groups(x: torch.Tensor, groups: int) -> torch.Tensor:
    """View [groups * rows, channels, ...] as [groups, rows, channels, ...]."""
    return x.view(groups, x.shape[0] // groups, *x.shape[1:])


@torch.no_grad()
def move_running(module: Any, means: torch.Tensor, variances: torch.Tensor, values: int) -> None:
    """Update a layer's running statistics as if by one call per group, in closed form.

    Args:
        means: [groups, channels]; likewise `variances`, which are biased.
        values: number of values per channel and group.
    """
    groups, tracked = len(means), module.num_batches_tracked
    kept: Any = 1.0
    shares: torch.Tensor | None = None
    if module.momentum is not None:
        kept = (1 - module.momentum) ** groups
        calls_after = torch.arange(groups - 1, -1, -1, device=means.device, dtype=means.dtype)
        shares = module.momentum * (1 - module.momentum) ** calls_after
    elif tracked is not None:  # the mean over all calls so far
        seen = tracked.to(means.dtype)
        kept, shares = seen / (seen + groups), (1 / (seen + groups)).expand(groups)
    if tracked is not None:
        tracked.add_(groups)
    if shares is None:
        return
    for running, found in (
        (module.running_mean, means.detach()),
        (module.running_var, variances.detach() * (values / (values - 1))),
    ):
        running.copy_(running * kept + (found * shares[:, None]).sum(0))


class MeansOfGroups:
    """Compares the layers' inputs for separate batches with those for merged ones, to check that a call's rows are the
    batches one after the other. If a layer gets rows in another order, such as alternating views, the batches cannot be
    kept apart."""

    def __init__(self, groups: BatchGroups) -> None:
        self.groups = groups
        self._seen: list[dict[str, list[torch.Tensor]]] = []
        self._norms = {name: part for name, part in groups.norms.items() if uses_batch(part)}

    @contextlib.contextmanager
    def looking(self) -> Iterator[None]:
        """Record calls inside the context. Enter it last: code that restores the model's hooks would remove ours."""
        with contextlib.ExitStack() as hooks:
            for name, part in self._norms.items():
                hooks.callback(part.register_forward_pre_hook(self._make_hook(name), with_kwargs=True).remove)
            yield

    def begin(self) -> None:
        """Start recording the next piece."""
        self._seen.append({})

    def _make_hook(self, name: str) -> Any:
        def look(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            rows = (args[0] if args else kwargs["input"]).detach()
            if rows.shape[0] % self.groups.count:
                raise ValueError(f"BatchNorm {name} gets {rows.shape[0]} rows of {self.groups.count} batches")
            parts = _split_groups(rows, self.groups.count)
            over = [dim for dim in range(parts.dim()) if dim not in (0, 2)]
            both = [each.mean(over, dtype=torch.float32) for each in (parts, parts.abs())]
            self._seen[-1].setdefault(name, []).append(torch.stack(both))

        return look

    def explain_mixed(self, apart: int) -> str | None:
        """Return why the batches are not kept apart; None if they are.

        Args:
            apart: how many of the pieces were single batches. The others held the same batches, merged.
        """
        for name in dict.fromkeys(name for piece in self._seen for name in piece):
            calls = [piece.get(name, []) for piece in self._seen]
            if len({len(each) for each in calls}) > 1:
                return f"BatchNorm {name} is called more often for some batches than for others"
            for one in zip(*calls, strict=True):
                if _are_mixed(torch.cat(one[:apart], 1), torch.cat(one[apart:], 1)):
                    return f"BatchNorm {name} does not get the samples of your batches one batch after the other"
        return None


def _are_mixed(apart: torch.Tensor, together: torch.Tensor) -> bool:
    """Compare means and mean magnitudes [2, batches, channels] of the same batches. False if they are NaN."""
    if apart.shape != together.shape:
        return True
    spread = (apart[0] - apart[0].mean(0)).norm()
    return bool((together[0] - apart[0]).norm() > MOST_MIXED * spread + ROUNDING * apart[1].norm())

"""BatchNorm in groups: the same numbers as one call for each batch, to the rounding of float64."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

from fastloop.feeds.batch_norm.groups import (
    BatchGroups,
    GroupedForward,
    MeansOfGroups,
    group_forwards,
    normalize_groups,
)

GROUPS = 4
SHAPES: dict[Any, tuple[int, ...]] = {
    torch.nn.BatchNorm1d: (24, 5),
    torch.nn.BatchNorm2d: (24, 5, 4, 3),
    torch.nn.BatchNorm3d: (24, 5, 2, 3, 4),
}


@pytest.fixture(autouse=True)
def fresh(fresh_dynamo: None) -> None:
    torch.manual_seed(0)


def grouped(norm: torch.nn.Module, count: int = GROUPS) -> tuple[torch.nn.Module, BatchGroups]:
    model, groups = torch.nn.Sequential(norm), BatchGroups()
    group_forwards(model, groups)
    groups.begin(count)
    return model, groups


def largest(a: Any, b: Any) -> float:
    return float((a - b).detach().abs().max() / a.detach().abs().max().clamp_min(1e-30))


def weigh(output: torch.Tensor) -> torch.Tensor:
    """A loss to which no two outputs matter alike."""
    return ((output + 2).square() * torch.linspace(0.5, 2, output.numel(), dtype=output.dtype).view_as(output)).sum()


def train(model: Any, x: torch.Tensor, *, compiled: bool = False, count: int = 1) -> tuple[Any, Any]:
    """Output and input gradient of a call, `count` times one after the other."""
    call = torch.compile(model, backend="eager", fullgraph=True) if compiled else model
    leaf = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    output = torch.cat([call(part) for part in leaf.chunk(count)])
    weigh(output).backward()
    return output, leaf.grad


def all_equal(one: Any, other: Any, x: torch.Tensor, *, compiled: bool) -> None:
    """Three steps of batches one by one, and of all together."""
    for _ in range(3):
        output, gradient = train(one, x, count=GROUPS)
        own, own_gradient = train(other, x, compiled=compiled)
        assert largest(output, own) < 1e-14 and largest(gradient, own_gradient) < 1e-14
        assert own.stride() == x.stride() and own.dtype == x.dtype
    mine = dict(other.named_parameters()) | dict(other.named_buffers())
    for name, tensor in (*one.named_parameters(), *one.named_buffers()):
        got = mine[f"0.{name}"]
        if tensor.grad is not None:
            assert largest(tensor.grad, got.grad) < 1e-14, name
        if tensor.is_floating_point():
            assert largest(tensor, got) < 1e-15, name
        else:
            assert int(tensor) == int(got) == 3 * GROUPS


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("momentum", [0.1, 0.37, 1.0, None])
def test_equal_to_the_batches_one_by_one(kind: Any, momentum: float | None, compiled: bool) -> None:
    one = kind(5, momentum=momentum).double()
    torch.nn.init.normal_(one.weight)
    torch.nn.init.normal_(one.bias)
    model, _ = grouped(copy.deepcopy(one))
    x = 3 * torch.randn(SHAPES[kind], dtype=torch.float64) + 1
    if x.dim() == 4:
        x = x.to(memory_format=torch.channels_last)
    all_equal(one, model, x, compiled=compiled)
    # The control: the statistics of all batches are others.
    merged = copy.deepcopy(one)
    merged.zero_grad()
    assert largest(train(one, x, count=GROUPS)[1], train(merged, x)[1]) > 1e-3


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    "settings", [{"affine": False}, {"track_running_stats": False}, {"affine": False, "track_running_stats": False}]
)
def test_without_weights_or_running_statistics(settings: Any, compiled: bool) -> None:
    one = torch.nn.BatchNorm2d(5, **settings).double()
    model, _ = grouped(copy.deepcopy(one))
    all_equal(one, model, torch.randn(24, 5, 4, 3, dtype=torch.float64), compiled=compiled)
    if not one.track_running_stats:  # then evaluation, too, goes by the batch
        all_equal(one.eval(), model.eval(), torch.randn(24, 5, 4, 3, dtype=torch.float64), compiled=compiled)


@pytest.mark.parametrize("compiled", [False, True])
def test_frozen_layers_have_no_groups(compiled: bool) -> None:
    one = torch.nn.BatchNorm2d(5).double()
    train(one, torch.randn(24, 5, 4, 3, dtype=torch.float64))
    model, _ = grouped(copy.deepcopy(one).eval())
    x = torch.randn(25, 5, 4, 3, dtype=torch.float64)  # and need no whole ones
    assert torch.equal(train(one.eval(), x)[0], train(model, x, compiled=compiled)[0])
    assert int(model[0].num_batches_tracked) == 1


@pytest.mark.parametrize("compiled", [False, True])
def test_under_autocast_statistics_are_float32(compiled: bool) -> None:
    one = torch.nn.Sequential(torch.nn.Conv2d(3, 5, 1), torch.nn.BatchNorm2d(5))
    model = copy.deepcopy(one)
    groups = BatchGroups()
    group_forwards(model, groups)
    groups.begin(GROUPS)
    x = torch.randn(24, 3, 4, 4)
    with torch.autocast("cpu", torch.bfloat16):
        output, own = train(one, x, count=GROUPS)[0], train(model, x, compiled=compiled)[0]
    assert output.dtype == own.dtype == torch.bfloat16 and largest(output.float(), own.float()) < 1e-2
    for name in ("running_mean", "running_var"):
        assert largest(getattr(one[1], name), getattr(model[1], name)) < 1e-6  # bfloat16 resolves 4e-3
    _, means, variances = normalize_groups(x.bfloat16(), None, None, 1e-5, GROUPS)
    assert means.dtype == variances.dtype == torch.float32 and means.shape == variances.shape == (GROUPS, 3)


def test_a_guess_that_is_far_off_costs_little() -> None:
    """The first values, which the mean is guessed from, are the group's only outliers."""
    x = torch.randn(4 * 64, 3, 16, 16)
    x.view(4, 64, 3, 16, 16)[:, :8, :, 0, 0] = 1000.0
    parts = x.double().view(4, 64, 3, 256).transpose(1, 2).reshape(4, 3, -1)
    _, means, variances = normalize_groups(x, None, None, 1e-5, 4)
    variance = parts.var(2, correction=0)
    assert float(((parts.mean(2) - means) / variance.sqrt()).abs().max()) < 1e-4
    assert largest(variance, variances.double()) < 5e-3


def test_one_graph_for_one_number_of_groups() -> None:
    model, groups = grouped(torch.nn.BatchNorm2d(5))
    graphs: list[str] = []

    def keep(graph: Any, _inputs: Any) -> Any:
        graphs.append(str(graph.code))
        return graph.forward

    call = torch.compile(model, backend=keep, fullgraph=True)
    for _ in range(3):
        call(torch.randn(24, 5, 4, 4))
    assert len(graphs) == 1 and "rsqrt" in graphs[0] and "batch_norm" not in graphs[0]
    groups.begin(1)
    call(torch.randn(24, 5, 4, 4))
    assert len(graphs) == 2 and "batch_norm" in graphs[1] and "rsqrt" not in graphs[1]


def test_inductor_fuses_it() -> None:
    one = torch.nn.BatchNorm2d(4)
    model, _ = grouped(copy.deepcopy(one))
    x = torch.randn(8, 4, 4, 4).to(memory_format=torch.channels_last)
    output, gradient = train(one, x, count=GROUPS)
    leaf = x.clone(memory_format=torch.preserve_format).requires_grad_()
    own = torch.compile(model, fullgraph=True)(leaf)
    weigh(own).backward()
    assert largest(output, own) < 1e-5 and largest(gradient, leaf.grad) < 1e-4
    assert own.is_contiguous(memory_format=torch.channels_last)
    assert largest(one.running_var, model[0].running_var) < 1e-6 and int(model[0].num_batches_tracked) == GROUPS


@pytest.mark.parametrize("compiled", [False, True])
def test_rows_that_cannot_be_divided(compiled: bool) -> None:
    model, _ = grouped(torch.nn.BatchNorm1d(5))
    call = torch.compile(model, backend="eager") if compiled else model
    with pytest.raises(ValueError, match="gets 23 rows of 4 batches"):
        call(torch.randn(23, 5))
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        call(torch.randn(4, 5))  # as torch says it of one sample


class Leaky(torch.nn.BatchNorm1d):
    """With a forward of its own, as in timm."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.leaky_relu(super().forward(input))


@pytest.mark.parametrize("compiled", [False, True])
def test_a_forward_of_the_users_own_is_called_for_each_batch(compiled: bool) -> None:
    one = Leaky(5).double()
    model, _ = grouped(copy.deepcopy(one))
    all_equal(one, model, torch.randn(24, 5, dtype=torch.float64), compiled=compiled)


def test_which_layers_and_undo() -> None:
    model = torch.nn.ModuleDict(
        {
            "plain": torch.nn.BatchNorm1d(2),
            "own": torch.nn.BatchNorm2d(2),
            "synced": torch.nn.SyncBatchNorm(2),
            "instance": torch.nn.InstanceNorm2d(2, track_running_stats=True),
        }
    )

    def users(x: torch.Tensor) -> torch.Tensor:
        return x

    vars(model["own"])["forward"] = users
    before = {name: dict(vars(part)) for name, part in model.items()}
    keys, groups = list(model.state_dict()), BatchGroups()
    undo = group_forwards(model, groups)
    groups.begin(3)
    assert sorted(groups.norms) == ["own", "plain"] and list(model.state_dict()) == keys
    assert [isinstance(part.forward, GroupedForward) for part in model.values()] == [True, True, False, False]
    undo()
    undo()
    assert {name: dict(vars(part)) for name, part in model.items()} == before
    assert groups.count == 1 and groups.most == 3 and not groups.norms


def test_copies() -> None:
    model, groups = grouped(torch.nn.BatchNorm1d(5).double())
    x = torch.randn(24, 5, dtype=torch.float64)
    teacher = copy.deepcopy(model)
    expected = train(model, x)[0]
    assert torch.equal(train(teacher, x)[0], expected), "a copy that trains beside it has the same batches"
    assert torch.equal(teacher[0].running_mean, model[0].running_mean)
    assert teacher[0].running_mean is not model[0].running_mean and int(model[0].num_batches_tracked) == GROUPS
    groups.begin(1)
    assert torch.equal(teacher(x), torch.nn.BatchNorm1d(5).double()(x))
    stored = pickle.dumps(model)
    assert b"fastloop" not in stored
    groups.begin(GROUPS)
    plain = pickle.loads(stored)
    assert torch.equal(plain(x), torch.nn.BatchNorm1d(5).double()(x)) and torch.equal(copy.deepcopy(plain)(x), plain(x))


def test_rows_in_another_order_show() -> None:
    def look(order: Any, spread: float = 1.0) -> str | None:
        model, groups = torch.nn.Sequential(torch.nn.BatchNorm1d(3)), BatchGroups()
        group_forwards(model, groups)
        batches = [spread * torch.randn(16, 3) + 5 for _ in range(3)]
        means = MeansOfGroups(groups)
        with means.looking():
            for batch in batches:
                means.begin()
                model(order(batch, 1))
            means.begin()
            with groups.of(3):
                model(order(torch.cat(batches), 3))
        assert not model[0]._forward_pre_hooks and groups.count == 1
        return means.explain_mixed(3)

    assert look(lambda rows, _: rows) is None
    noise = 1e-3 * torch.randn(48, 3)
    assert look(lambda rows, _: rows + noise[: len(rows)]) is None
    assert look(lambda rows, _: torch.cat([rows, rows.roll(1, 1)], 1).reshape(-1, 3)) is None  # tokens of a sample
    mixed = "BatchNorm 0 does not get the samples of your batches one batch after the other"
    assert look(lambda rows, _: torch.cat([rows, rows + 0.1])) == mixed
    assert (
        look(lambda rows, _: torch.cat([rows, rows.roll(1, 1)], 1).view(-1, 2, 3).transpose(0, 1).reshape(-1, 3))
        == mixed
    )
    assert look(lambda rows, _: torch.randn(48, 3)) == mixed
    with pytest.raises(ValueError, match="BatchNorm 0 gets 47 rows of 3 batches"):
        look(lambda rows, count: rows[: len(rows) - (count > 1)])

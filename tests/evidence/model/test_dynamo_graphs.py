"""What Dynamo captured since a moment, whatever happened before it."""

from __future__ import annotations

import copy
import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._dynamo.utils import DEFAULT_COMPILATION_METRICS_LIMIT, get_compilation_metrics

from fastloop.evidence.model import dynamo_graphs
from fastloop.evidence.sync.call_site import name_line
from fastloop.feeds.loss import cross_entropy

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def since(before: dynamo_graphs.Count) -> dict[str, Any]:
    return dynamo_graphs.count_since(before, name_line)


def compiled(function: Any, **settings: Any) -> Any:
    return torch.compile(function, backend="eager", **settings)


def test_graphs_are_counted_from_the_moment() -> None:
    compiled(lambda x: x + 1)(torch.ones(2))
    before = dynamo_graphs.count()
    assert since(before) == {"graphs": 0, "recompiles": [], "breaks": [], "limit_hit": False}
    compiled(lambda x: x + 2)(torch.ones(2))
    assert since(before) == {"graphs": 1, "recompiles": [], "breaks": [], "limit_hit": False}


def test_recompiles_have_one_line_causes() -> None:
    before, double = dynamo_graphs.count(), compiled(lambda x: 2 * x, dynamic=False)
    for size in (2, 3, 3, 4):
        double(torch.ones(size))
    found = since(before)
    assert found["graphs"] == 3 and not found["limit_hit"]
    assert found["recompiles"] == [
        "tensor 'x' size mismatch at index 0. expected 2, actual 3",
        "tensor 'x' size mismatch at index 0. expected 3, actual 4",
    ]


def test_causes_come_without_hints() -> None:
    """Dynamo adds one about parameters, as in manual optimization that freezes the other optimizer's."""
    failed = "tensor 'module._modules['0']._parameters['bias']' requires_grad mismatch. expected requires_grad=1"
    hint = "Guard failed on a parameter, consider using torch._dynamo.config.force_parameter_static_shapes = False"
    assert (
        dynamo_graphs.shorten_reason(f"triggered by the following guard failure(s):\n- 0/0: {failed}. {hint}") == failed
    )


def test_the_limit_is_seen() -> None:
    before, double = dynamo_graphs.count(), compiled(lambda x: 2 * x, dynamic=False)
    for size in range(2, 14):
        double(torch.ones(size))
    assert since(before)["limit_hit"] is True and since(before)["graphs"] == 8
    assert since(dynamo_graphs.count())["limit_hit"] is False  # what is over is over


def halve_if_large(x: torch.Tensor) -> torch.Tensor:
    return x / 2 if x.sum() > 0 else x


def breaks_twice(x: torch.Tensor) -> torch.Tensor:
    print("a side effect")
    return halve_if_large(x)


def test_breaks_have_a_reason_and_the_users_line() -> None:  # C2
    before, broken = dynamo_graphs.count(), compiled(breaks_twice)
    broken(torch.ones(2))
    broken(torch.ones(3))
    start, called = (inspect.getsourcelines(function)[1] for function in (breaks_twice, halve_if_large))
    here = "tests/evidence/model/test_dynamo_graphs.py"
    printing, branching = since(before)["breaks"]
    assert printing.endswith(f" at {here}:{start + 1}") and "\n" not in printing
    assert branching == f"Data-dependent branching at {here}:{called + 1}"
    assert since(dynamo_graphs.count())["breaks"] == []


def test_a_break_in_torchs_code_names_the_users_line() -> None:
    def call(layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        return layer(x)

    layer = torch.nn.Linear(2, 2)
    layer.register_forward_hook(torch._dynamo.disable(lambda *_args: None))
    before = dynamo_graphs.count()
    compiled(call)(layer, torch.ones(2, 2))
    line = inspect.getsourcelines(call)[1] + 1
    (cause,) = since(before)["breaks"]
    assert cause.endswith(f" at tests/evidence/model/test_dynamo_graphs.py:{line}")


def test_only_graphs_of_our_own_kernels_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel whose capture failed has a record, too, and no graph."""
    ours = SimpleNamespace(co_filename=inspect.getfile(cross_entropy), graph_op_count=3)
    failed = SimpleNamespace(co_filename=ours.co_filename, graph_op_count=None)
    user = SimpleNamespace(co_filename="/home/me/feeds/train.py", graph_op_count=5)
    records, graphs = [user], [1]
    monkeypatch.setattr(dynamo_graphs, "read_records", lambda: list(records))
    monkeypatch.setattr(dynamo_graphs, "count_captured", lambda: graphs[0])
    count_users = dynamo_graphs.follow_users_graphs()
    records += [ours, failed, copy.copy(user)]
    graphs[0] += 2
    assert count_users() == 1


def test_causes_are_found_when_the_list_of_compilations_is_full() -> None:
    """Dynamo keeps the latest 64 only: a position in the list says nothing, its last member does."""
    for size in range(DEFAULT_COMPILATION_METRICS_LIMIT + 2):
        compiled(eval(f"lambda x: x + {size}"))(torch.ones(2))  # each with a code object of its own
    assert len(get_compilation_metrics()) == DEFAULT_COMPILATION_METRICS_LIMIT
    before, double = dynamo_graphs.count(), compiled(lambda x: 2 * x, dynamic=False)
    assert since(before)["recompiles"] == []
    double(torch.ones(2))
    double(torch.ones(3))
    assert since(before)["recompiles"] == ["tensor 'x' size mismatch at index 0. expected 2, actual 3"]


@pytest.mark.parametrize(
    ("reason", "is_limit"),
    [
        ("Dynamo recompile limit exceeded", True),
        ("recompile_limit reached", True),
        ("cache_size_limit reached", True),
        ("None", False),
        ("call to print", False),
    ],
)
def test_the_limits_names_in_several_versions(reason: str, is_limit: bool) -> None:
    assert dynamo_graphs._is_limit(reason) is is_limit
